"""The autograd function of `context_parallel_forward`: which calls of `pieces` a rank makes, what is exchanged when.

Forward, for each sequence of the batch: K and V are gathered stage by stage, and the queries of the rank's part of a
stage run as soon as the keys before them are there, beside the exchange of the next stage. A query sees nothing after
itself, so each part runs over the tokens up to its own end, with the bits that it has over the whole sequence.

Backward, for each sequence and chunk of KV heads: K and V are gathered again, the part of the last stage runs first,
and its sums of dk and dv travel beside the part of the stage before, which adds to earlier tokens alone, or beside the
next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..definition import accumulation_dtype, layer_sizes
from ..torch_backend import sinks
from ..torch_backend.decode import whole_layers
from . import pieces
from .exchange import Gathered, reduce, wait
from .placement import Placement

# Bytes that dk and dv of chunks of KV heads take in the accumulation dtype: of two chunks, so that the sums of one
# travel beside the kernels of the next, or of one head where two do not fit.
SUM_BYTES = 512 << 20


@dataclass(frozen=True)
class Call:
    """One call of `context_parallel_forward`; `tree` holds the options of `forward` that the ops take."""

    place: Placement
    group: dist.ProcessGroup
    tree: dict
    deterministic: bool
    save_selection: str
    need_selection: bool
    needs_grad: bool
    rope_inv_freq: Tensor | None = None
    cu_seqlens: Tensor | None = None  # of the whole pack
    max_seqlen: int | None = None
    given: Tensor | None = None  # a selection to replay, of this rank's queries

    def options(self, piece: _Piece, attn_sink: Tensor | None) -> dict:
        """What `pieces` is told of a piece besides tensors."""
        pack = None
        if self.cu_seqlens is not None:
            # A sequence that began on an earlier rank has its last tokens here, its keys up to them before.
            cu, end = self.cu_seqlens.long(), piece.keys
            pack = pieces.Pack(
                (cu - piece.q_start).clamp(0, end - piece.q_start).int(), cu.clamp(0, end).int(),
                min(self.max_seqlen, end - piece.q_start), self.max_seqlen,
            )  # fmt: skip
        return {
            **self.tree, "q_start": piece.q_start, "attn_sink": attn_sink, "rope_inv_freq": self.rope_inv_freq,
            "pack": pack,
        }  # fmt: skip

    def keeps(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the backward's selection is kept: the rule of `forward`."""
        if self.given is not None:
            return False
        if self.save_selection != "auto":
            return self.save_selection == "always"
        layers = self.layers(self.place.ranks * q.shape[1])
        return layers - 1 <= ops._layers_that_fit(q, k, v, self.tree["top_k_per_layer"])

    def replayed(self, b: int, piece: _Piece, kv_heads: slice) -> Tensor | None:
        """What was given, of the layers that a piece has."""
        if self.given is None:
            return None
        return self.given[: self.layers(piece.keys) - 1, b : b + 1, piece.rows, kv_heads].contiguous()

    def layers(self, T: int) -> int:
        """Of the tree of a whole sequence."""
        r, top_k, most = (self.tree[name] for name in ("compression_rate", "top_k_per_layer", "max_top_nodes"))
        return len(
            layer_sizes(T if self.max_seqlen is None else self.max_seqlen, r, top_k * r if most is None else most)
        )


@dataclass(frozen=True)
class _Piece:
    """This rank's part of a stage: rows of its tensors, and positions in the sequence."""

    stage: int
    rows: slice
    q_start: int
    keys: int  # tokens from the first on that the piece is given
    last_stage: int  # whose exchange ends before it can run


def _pieces(place: Placement, local: int, strict_causal: bool) -> list[_Piece]:
    n = local // place.stages
    found = []
    for stage in range(place.stages):
        start = place.part(stage) * n
        # Without strict causality the node that holds a query takes part in its selection, later tokens and all.
        keys, last = (start + n, stage) if strict_causal else (place.ranks * local, place.stages - 1)
        found.append(_Piece(stage, slice(stage * n, (stage + 1) * n), start, keys, last))
    return found


def _final_stages(parts: list[_Piece], piece: _Piece) -> list[int]:
    """The stages whose sums no other piece adds to after this one, in the backward's order of pieces."""
    if any(other.last_stage > other.stage for other in parts):
        return [] if piece.stage > 0 else [other.stage for other in reversed(parts)]
    return [piece.stage]


def _ahead(units: list, start):
    """Each unit with what `start(unit)` returns; that of the next unit is started before a unit is handed out."""
    begun = [start(units[0])] if units else []
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            begun.append(start(units[i + 1]))
        yield unit, begun.pop(0)


def _whole_selection(call: Call, found: list[list[Tensor]], parts: list[_Piece], q: Tensor, k: Tensor) -> Tensor:
    """The selections of all pieces in one tensor, for the layers of the whole sequence. In a layer that a piece does
    not have, its queries select every node up to their own."""
    r, top_k = call.tree["compression_rate"], call.tree["top_k_per_layer"]
    layers = call.layers(call.place.ranks * q.shape[1])
    selection = q.new_empty(layers - 1, q.shape[0], q.shape[1], k.shape[2], top_k, dtype=torch.int32)
    for b, row in enumerate(found):
        for piece, own in zip(parts, row, strict=True):
            selection[: own.shape[0], b, piece.rows] = own[:, 0]
            t = torch.arange(piece.q_start, piece.q_start + own.shape[2], device=q.device)
            for layer in range(own.shape[0] + 1, layers):
                selection[layer - 1, b, piece.rows] = whole_layers(t, r, layer, top_k)[:, None].int()
    return selection


def _batch(b: int) -> slice:
    return slice(b, b + 1)


class Attention(torch.autograd.Function):
    """(q, k, v, attn_sink, call) -> (out, lse, selection), selection of size 0 in its first dimension unless needed."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, attn_sink: Tensor | None, call: Call):
        place = call.place
        parts = _pieces(place, q.shape[1], call.tree["strict_causal"])
        size = pieces.Whole(q.shape[1], k.shape[2])
        keeps = call.keeps(q, k, v)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        found: list[list[Tensor]] = []

        def start(b: int) -> Gathered:
            return Gathered(place, call.group, [k[b], v[b]]).start()

        for b, whole in _ahead(list(range(q.shape[0])), start):
            k_all, v_all = whole.whole
            found.append([])
            for piece in parts:
                whole.ready(piece.last_stage)
                rows = (_batch(b), piece.rows)
                selection = pieces.forward(
                    q[rows], k_all[:, : piece.keys], v_all[:, : piece.keys], out[rows], lse[rows], whole=size,
                    need_selection=keeps or call.need_selection, given=call.replayed(b, piece, slice(None)),
                    **call.options(piece, attn_sink),
                )  # fmt: skip
                found[-1].append(selection)
            del whole, k_all, v_all  # before what the next sequence takes
        if call.need_selection:
            selection = _whole_selection(call, found, parts, q, k)
        else:
            shape = (0, q.shape[0], q.shape[1], k.shape[2], call.tree["top_k_per_layer"])
            selection = q.new_empty(shape, dtype=torch.int32)
        ctx.save_for_backward(q, k, v, attn_sink, out, lse, *(x for row in found for x in row if keeps))
        ctx.call = call
        ctx.mark_non_differentiable(selection)
        ctx.set_materialize_grads(False)
        return out, lse, selection

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse, _dselection):
        q, k, v, attn_sink, out, lse, *saved = ctx.saved_tensors
        dout, dlse = (x.new_zeros(()).expand_as(x) if dx is None else dx for x, dx in ((out, dout), (lse, dlse)))
        call, place = ctx.call, ctx.call.place
        parts = _pieces(place, q.shape[1], call.tree["strict_causal"])
        acc = accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        H_kv, G = k.shape[2], q.shape[2] // k.shape[2]
        head_bytes = place.ranks * q.shape[1] * (k.shape[3] + v.shape[3]) * acc.itemsize
        fit = SUM_BYTES // head_bytes  # KV heads
        chunks = -(-H_kv // max(1, fit // 2))
        step = -(-H_kv // chunks)
        in_flight = 2 * step <= fit
        size = pieces.Whole(q.shape[1], H_kv)
        under_way: list[tuple[list, list[Tensor]]] = []  # sums that travel, and the events of their ends
        units = [(b, slice(h, min(h + step, H_kv))) for b in range(q.shape[0]) for h in range(0, H_kv, step)]

        def start(unit: tuple[int, slice]) -> Gathered:
            return Gathered(place, call.group, [x[unit[0], :, unit[1]] for x in (k, v)]).start()

        for (b, kv_heads), whole in _ahead(units, start):
            heads = slice(kv_heads.start * G, kv_heads.stop * G)
            k_all, v_all = whole.whole
            while len(under_way) > in_flight:
                for end in under_way[0][0]:
                    wait(q, end)
                del under_way[0]
            sums = [torch.zeros(x.shape, dtype=acc, device=x.device) for x in whole.whole]
            whole.ready(place.stages - 1)
            ends = []
            for piece in reversed(parts):
                rows = (_batch(b), piece.rows, heads)
                own_q, own_k, own_v = q[rows], k_all[:, : piece.keys], v_all[:, : piece.keys]
                options = call.options(piece, None if attn_sink is None else attn_sink[heads])
                if call.given is not None:
                    selection = call.replayed(b, piece, kv_heads)
                elif saved:
                    selection = saved[b * len(parts) + piece.stage][:, :, :, kv_heads]
                else:
                    again = [x.new_empty(x[rows].shape) for x in (out, lse)]
                    selection = pieces.forward(own_q, own_k, own_v, *again, whole=size, need_selection=True, **options)
                    del again
                pieces.backward(
                    dout[rows], dlse[rows], own_q, own_k, own_v, out[rows], lse[rows], selection, dq[rows],
                    *(x[:, : piece.keys] for x in sums), whole=size, deterministic=call.deterministic, **options,
                )  # fmt: skip
                for stage in _final_stages(parts, piece):
                    ends.append(reduce(place, call.group, stage, sums, [x[b, :, kv_heads] for x in (dk, dv)]))
            under_way.append((ends, sums))
            del whole, k_all, v_all, own_k, own_v, sums  # before what the next unit takes
        for ends, _ in under_way:
            for end in ends:
                wait(q, end)
        dsink = None
        if attn_sink is not None and ctx.needs_input_grad[3]:
            if call.cu_seqlens is not None:  # padding is no part of the sum
                dout = torch.where((lse == -torch.inf)[..., None], dout.new_zeros(()), dout)
            dsink = sinks.gradient(dout, out, lse, attn_sink)
        return dq, dk, dv, dsink, None
