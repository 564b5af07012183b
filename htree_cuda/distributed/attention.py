"""The autograd function of `context_parallel_forward`: which calls of `pieces` a rank makes, what is exchanged when.

Forward, for each sequence of the batch: K and V are gathered stage by stage, and the queries of the rank's part of a
stage run as soon as the keys before them are there, beside the exchange of the next stage. A query sees nothing after
itself. A stage's call is therefore given the tokens up to its own end, and its bits are those of a call that is given
all. The queries that the rank has borrowed run together with its late part (`balance`).

Backward, for each sequence and chunk of KV heads: K and V are gathered again, beside the chunk before (the first chunk
has one head, since its exchange has nothing beside it), and all queries of the rank run in one call. The sums of dk and
dv then travel beside the kernels of the first head of the next chunk, which write to dk and dv last. Those of the last
chunk have nothing beside them, nor have any where selections are made again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..definition import accumulation_dtype, layer_sizes
from ..torch_backend import sinks
from ..torch_backend.decode import whole_layers
from . import pieces
from .balance import Loans, loans
from .exchange import Gathered, Travel, joined, reduce, staging
from .lending import Lending
from .placement import Placement

# Bytes that dk and dv of a chunk of KV heads take in the accumulation dtype, at most; of one head where that is more.
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

    def options(self, stage: _Stage, attn_sink: Tensor | None) -> dict:
        """What `pieces` is told besides runs and keys; of a pack, for the one run that it has."""
        pack = None
        if self.cu_seqlens is not None:
            # A sequence that began on an earlier rank has its last tokens here, its keys up to them before.
            cu, start, end = self.cu_seqlens.long(), stage.runs[0].q_start, stage.keys
            pack = pieces.Pack(
                (cu - start).clamp(0, end - start).int(), cu.clamp(0, end).int(), min(self.max_seqlen, end - start),
                self.max_seqlen,
            )  # fmt: skip
        return {**self.tree, "attn_sink": attn_sink, "rope_inv_freq": self.rope_inv_freq, "pack": pack}

    def keeps(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the backward's selection is kept: the rule of `forward`."""
        if self.given is not None:
            return False
        if self.save_selection != "auto":
            return self.save_selection == "always"
        layers = self._layers(self.place.ranks * q.shape[1])
        return layers - 1 <= ops._layers_that_fit(q, k, v, self.tree["top_k_per_layer"])

    def replayed(self, b: int, stage: _Stage, run: _Rows, kv_heads: slice = slice(None)) -> Tensor | None:
        """What was given, of the layers that the tree of a stage has."""
        if self.given is None:
            return None
        return self.given[: self._layers(stage.keys) - 1, b : b + 1, run.rows, kv_heads].contiguous()

    def lending(self, q: Tensor, k: Tensor) -> tuple[Lending, Lending]:
        """The loans of the forward and of the backward. Selections that the caller gives or wants stay where their
        queries are."""
        place, found, local = self.place, Loans(None, None), q.shape[1]
        if place.stages > 1 and place.ranks > 1 and self.given is None and not self.need_selection:
            found = loans(place.ranks * local, place.ranks, q.shape[2] // k.shape[2], *self._sizes())
        return tuple(Lending(place, self.group, loan, local) for loan in found)

    def split_selections(
        self, found: list[Tensor], stages: list[_Stage], lending: Lending, later: Lending
    ) -> tuple[list[Tensor], Travel]:
        """The selections of a sequence's runs as the backward has its runs: those of queries that are lent in the
        forward alone travel back, to the end of the late part's. The lender's late part may have fewer layers than the
        tokens that the borrower saw; in the layers above, a query's selection is every node up to its own."""
        rows = lending.rows - later.rows
        late = stages[-1]
        keys = late.keys if lending.lent or not self.tree["strict_causal"] else lending.end
        layers = self._layers(keys) - 1
        like = found[:1] * layers
        if lending.lent:
            own = found[-1]
            whole = own.new_empty(layers, 1, own.shape[2] + rows, *own.shape[3:])
            whole[:, :, :-rows] = own
            return [*found[:-1], whole], lending.trade(like, [], [x[0, -rows:] for x in whole])
        at = next(run.number for run in late.runs if run.borrowed)
        kept = [found[at][:, :, rows:].clone()] if later.rows else []
        back = [x[0, :rows] for x in found[at][:layers]]
        return [*found[:at], *kept, *found[at + 1 :]], lending.trade(like, back, [])

    def whole_selection(self, selections: list[list[Tensor]], stages: list[_Stage], q: Tensor, k: Tensor) -> Tensor:
        """The selections of all runs in one tensor, for the layers of the whole sequence. In a layer that the tree of a
        stage does not have, its queries select every node up to their own."""
        r, top_k, _ = self._sizes()
        layers = self._layers(self.place.ranks * q.shape[1])
        whole = q.new_empty(layers - 1, q.shape[0], q.shape[1], k.shape[2], top_k, dtype=torch.int32)
        runs = [run for stage in stages for run in stage.runs]
        for b, row in enumerate(selections):
            for run, own in zip(runs, row, strict=True):
                whole[: own.shape[0], b, run.rows] = own[:, 0]
                t = torch.arange(run.q_start, run.q_start + own.shape[2], device=q.device)
                for layer in range(own.shape[0] + 1, layers):
                    whole[layer - 1, b, run.rows] = whole_layers(t, r, layer, top_k)[:, None].int()
        return whole

    def _sizes(self) -> tuple[int, int, int]:
        r, top_k, most = (self.tree[name] for name in ("compression_rate", "top_k_per_layer", "max_top_nodes"))
        return r, top_k, top_k * r if most is None else most

    def _layers(self, T: int) -> int:
        """Of the tree of a whole sequence."""
        r, _, most = self._sizes()
        return len(layer_sizes(T if self.max_seqlen is None else self.max_seqlen, r, most))


@dataclass(frozen=True)
class _Rows:
    """A run of queries that this rank computes, its own or borrowed ones."""

    number: int  # among all runs of a sequence
    rows: slice  # of this rank's tensors, or of what it has borrowed
    q_start: int
    borrowed: bool


@dataclass(frozen=True)
class _Stage:
    """The runs of a stage, whose queries are given the first `keys` tokens."""

    runs: list[_Rows]
    keys: int
    last_stage: int  # whose exchange ends before the runs can begin


def _first(run: tuple) -> int:
    return run[0]


def _stages(lending: Lending, local: int, strict_causal: bool) -> list[_Stage]:
    """Runs in the order of positions: two that touch share chunks of the backward."""
    place = lending.place
    n = local // place.stages
    found, number = [], itertools.count()
    for stage in range(place.stages):
        first, late = stage * n, stage == place.stages - 1
        end = lending.kept_rows if late else first + n
        runs = [(place.part(stage) * n, slice(first, end), False)]
        if late and lending.borrowed:
            runs.append((lending.borrowed.start, slice(0, lending.borrowed.count), True))
        runs = [_Rows(next(number), rows, start, borrowed) for start, rows, borrowed in sorted(runs, key=_first)]
        if strict_causal:
            found.append(_Stage(runs, (place.part(stage) + 1) * n, stage))
        else:
            # The node that holds a query takes part in its selection, later tokens and all.
            found.append(_Stage(runs, place.ranks * local, place.stages - 1))
    return found


def _ahead(units: list, start):
    """Each unit with what `start(unit)` returns; that of the next unit is started before a unit is handed out."""
    begun = [start(units[0])] if units else []
    for i, unit in enumerate(units):
        if i + 1 < len(units):
            begun.append(start(units[i + 1]))
        yield unit, begun.pop(0)


def _of_sequence(b: int, tensors) -> list[Tensor]:
    return [x[b : b + 1] for x in tensors]


class Attention(torch.autograd.Function):
    """(q, k, v, attn_sink, call) -> (out, lse, selection), selection of size 0 in its first dimension unless needed."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, attn_sink: Tensor | None, call: Call):
        lending, later = call.lending(q, k)
        stages = _stages(lending, q.shape[1], call.tree["strict_causal"])
        size = pieces.Whole(q.shape[1], k.shape[2])
        seen = call.place.seen(call.tree["strict_causal"])
        keeps = call.keeps(q, k, v)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
        selections: list[list[Tensor]] = []
        borrowed: list[Tensor] = []  # of each sequence q, out and lse [1, count, ..] for the backward
        returns: list[Travel] = []

        def start(b: int):
            whole = Gathered(call.place, call.group, [k[b], v[b]], seen).start()
            return whole, lending.send([q[b]]) if lending.any else None

        with joined(q, call.place):
            for b, (whole, sent) in _ahead(list(range(q.shape[0])), start):
                k_all, v_all = whole.whole
                own = _of_sequence(b, (q, out, lse))
                others = [x[None] for x in sent[0]] if sent else []
                if others:
                    others += [x.new_empty(1, lending.borrowed.count, *x.shape[2:]) for x in own[1:]]
                found: list[Tensor] = []
                for stage in stages:
                    keys = [x[:, : stage.keys] for x in (k_all, v_all)]
                    if stage.keys == q.shape[1] // call.place.stages:
                        keys = [x[b : b + 1, : stage.keys] for x in (k, v)]  # the first part, which waits for nobody
                    else:
                        whole.ready(stage.last_stage)
                    if sent and stage is stages[-1]:
                        sent[1].wait(q)
                    runs = [
                        pieces.Run(
                            *(x[:, run.rows] for x in (others if run.borrowed else own)), run.q_start, stage.keys,
                            call.replayed(b, stage, run),
                        )
                        for run in stage.runs
                    ]  # fmt: skip
                    found += pieces.forward(
                        *keys, runs, whole=size, need_selection=keeps or call.need_selection,
                        **call.options(stage, attn_sink),
                    )  # fmt: skip
                if sent:
                    returns.append(lending.give_back([out[b], lse[b]], [x[0] for x in others[1:]]))
                    if keeps and lending.rows > later.rows:
                        found, travel = call.split_selections(found, stages, lending, later)
                        returns.append(travel)
                selections.append(found)
                if later.borrowed and call.needs_grad:
                    fewer = later.rows < lending.rows  # the rest of the forward's is freed
                    borrowed += [x[:, -later.rows :].clone() if fewer else x for x in others]
                whole.ready(
                    call.place.stages - 1
                )  # its memory is given on, and what nobody waited for may still arrive
                del whole, k_all, v_all, keys, others  # before what the next sequence takes
            for travel in returns:
                travel.wait(q)
        if call.need_selection:
            selection = call.whole_selection(selections, stages, q, k)
        else:
            shape = (0, q.shape[0], q.shape[1], k.shape[2], call.tree["top_k_per_layer"])
            selection = q.new_empty(shape, dtype=torch.int32)
        kept = [x for row in selections for x in row if keeps]
        ctx.save_for_backward(q, k, v, attn_sink, out, lse, *borrowed, *kept)
        ctx.call = call
        ctx.mark_non_differentiable(selection)
        ctx.set_materialize_grads(False)
        return out, lse, selection

    @staticmethod
    def backward(ctx, *gradients):
        found = _gradients(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        leaf = next(x for x in ctx.saved_tensors[:4] if x is not None and x.requires_grad)
        return tuple(None if x is None else _NoSecondDerivative.apply(x, leaf) for x in found)


class _NoSecondDerivative(torch.autograd.Function):
    """A gradient that may be used, and that says so where it is differentiated again."""

    @staticmethod
    def forward(ctx, gradient: Tensor, leaf: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError("context_parallel_forward: second derivatives (double backward) are not supported")


@torch.autograd.function.once_differentiable
def _gradients(ctx, dout, dlse, _dselection):
    q, k, v, attn_sink, out, lse, *saved = ctx.saved_tensors
    dout, dlse = (x.new_zeros(()).expand_as(x) if dx is None else dx for x, dx in ((out, dout), (lse, dlse)))
    call, place = ctx.call, ctx.call.place
    _, lending = call.lending(q, k)
    seen = place.seen(call.tree["strict_causal"])
    each = 3 if lending.borrowed else 0  # saved tensors of what was borrowed, of a sequence
    kept = saved[each * q.shape[0] :]
    stages = _stages(lending, q.shape[1], call.tree["strict_causal"])
    acc = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    H_kv, G = k.shape[2], q.shape[2] // k.shape[2]
    head_bytes = place.ranks * q.shape[1] * (k.shape[3] + v.shape[3]) * acc.itemsize
    chunks = -(-H_kv // max(1, SUM_BYTES // head_bytes))
    step = -(-H_kv // chunks)  # KV heads
    # The sums of a chunk take the place of those before, which travel until the first of its heads is done.
    T = place.ranks * q.shape[1]
    room = [q.new_empty(T * step * x.shape[3], dtype=acc) for x in (k, v)]
    received: list[Tensor] = []
    summed = Travel(None)
    size = pieces.Whole(q.shape[1], H_kv)
    returns: list[Travel] = []
    others: list[Tensor] = []  # q, out, lse, dout, dlse and dq of what was borrowed of the sequence at hand
    units = []
    for b in range(q.shape[0]):
        first = 1 if b == 0 and chunks > 1 else step  # nothing runs beside the first exchange
        bounds = [0, *range(first, H_kv, step), H_kv]
        units += [(b, slice(*heads)) for heads in itertools.pairwise(bounds)]

    def start(unit: tuple[int, slice]):
        b, kv_heads = unit
        whole = Gathered(place, call.group, [x[b, :, kv_heads] for x in (k, v)], seen).start()
        return whole, lending.send([dout[b], dlse[b]]) if lending.any and kv_heads.start == 0 else None

    def runs_of(stage: _Stage, b: int, kv_heads: slice, keys: list[Tensor], options: dict) -> list[pieces.Run]:
        """With their selections, which are made again where nobody has kept them."""
        heads = slice(kv_heads.start * G, kv_heads.stop * G)
        own = _of_sequence(b, (q, out, lse, dout, dlse, dq))
        found = []
        for run in stage.runs:
            *forward, dout_, dlse_, dq_ = (x[:, run.rows, heads] for x in (others if run.borrowed else own))
            selection = call.replayed(b, stage, run, kv_heads)
            if kept:
                number = b * sum(len(x.runs) for x in stages) + run.number
                selection = kept[number][:, :, :, kv_heads]
            found.append(pieces.Run(*forward, run.q_start, stage.keys, selection, dout_, dlse_, dq_))
        if not kept and call.given is None:
            summed.wait(q)  # scores are slower beside the exchange of sums than behind it (lab/README.md)
            again = [x._replace(out=torch.empty_like(x.out), lse=torch.empty_like(x.lse)) for x in found]
            selections = pieces.forward(*keys, again, whole=size, need_selection=True, **options)
            found = [x._replace(selection=selection) for x, selection in zip(found, selections, strict=True)]
        return found

    with joined(q, place):
        for (b, kv_heads), (whole, sent) in _ahead(units, start):
            whole.ready(place.stages - 1)
            if sent:
                sent[1].wait(q)
                if lending.borrowed:
                    before = saved[b * each : (b + 1) * each]
                    others = [*before, *(x[None] for x in sent[0]), torch.empty_like(before[0])]
            sink = None if attn_sink is None else attn_sink[kv_heads.start * G : kv_heads.stop * G]
            runs = []
            for stage in stages:
                options = call.options(stage, sink)
                runs += runs_of(stage, b, kv_heads, [x[:, : stage.keys] for x in whole.whole], options)
            keys = max(stage.keys for stage in stages)
            sums = [x[: whole_x.numel()].view(whole_x.shape) for x, whole_x in zip(room, whole.whole, strict=True)]
            pieces.backward(
                *(x[:, :keys] for x in (*whole.whole, *sums)), runs, whole=size, deterministic=call.deterministic,
                before=summed.event, **options,
            )  # fmt: skip
            summed.wait(q)
            # Where the kernels of the only chunk have just freed theirs.
            received = received or staging(place, room[0], T // place.parts, step * (k.shape[3] + v.shape[3]))
            summed = reduce(place, call.group, sums, [x[b, :, kv_heads] for x in (dk, dv)], seen, received)
            del whole, runs, sums  # before what the next unit takes
            if lending.any and kv_heads.stop == H_kv:
                returns.append(lending.give_back([dq[b]], [x[0] for x in others[5:]]))
        for travel in (*returns, summed):
            travel.wait(q)
    dsink = None
    if attn_sink is not None and ctx.needs_input_grad[3]:
        if call.cu_seqlens is not None:  # padding is no part of the sum
            dout = torch.where((lse == -torch.inf)[..., None], dout.new_zeros(()), dout)
        dsink = sinks.gradient(dout, out, lse, attn_sink)
    return dq, dk, dv, dsink, None
