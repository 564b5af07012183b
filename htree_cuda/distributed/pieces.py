"""Attention of a run of queries into tensors that are there, with the rules, backends and bits of `htree_cuda.forward`.

The ops of `ops.py` return tensors of their own; a rank's results are made of several calls, and copying them together
would hold them twice. Tensors are [1, T_q, ...] and [1, T, ...]; with `Pack` their rows are packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks, ops, ops_varlen, pairs
from ..definition import layer_sizes
from ..params import TreeParams
from ..torch_backend import sinks
from ..torch_backend import tree as torch_tree
from ..torch_backend import varlen as torch_varlen


class Pack(NamedTuple):
    """Where the sequences of a pack begin, and how long they are at most."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def lengths(self) -> torch_varlen.Lengths:
        return torch_varlen.Lengths(self.cu_seqlens_q, self.cu_seqlens_k, None, None, None)


class Whole(NamedTuple):
    """What a rank has of one sequence, of which a call is a part: kernels cut it as they would cut the whole, and not a
    small part into smaller ones."""

    queries: int
    kv_heads: int

    def part(self, kv_heads: int) -> tuple[int, int]:
        """For a call of tensors that have these KV heads and no others: more queries stand for the others."""
        return self.queries * self.kv_heads // kv_heads, 0


def _packed_params(q: Tensor, k: Tensor, v: Tensor, pack: Pack, q_start: int, op: str, **tree):
    """Whatever the position of the first row, a sequence's queries are its last ones."""
    return checks.varlen.forward(
        q, k, v, *pack.lengths, max_seqlen_q=pack.max_seqlen_q, max_seqlen_k=pack.max_seqlen_k, op=op, **tree
    )


@ops._without_autocast
def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, whole: Whole, backend: str, need_selection: bool,
    pack: Pack | None = None, given: Tensor | None = None, **tree,
) -> Tensor | None:  # fmt: skip
    """Fills out [1, T_q, H, V] and lse [1, T_q, H], contiguous; returns the selection where it is needed. given: one to
    replay. whole: see there."""
    if pack is not None:
        q, k, v = q[0], k[0], v[0]
        params = _packed_params(q, k, v, pack, op="forward_varlen", backend=backend, **tree)
        if ops._use_torch("forward_varlen", q, backend):
            found = torch_varlen.forward(q, k, v, pack.lengths, params, need_selection=need_selection)
            out[0], lse[0] = found[0], found[1]
            return found[2].unsqueeze(1) if need_selection else None
        checks.varlen.kernel(q, k, v, params, *pack.lengths, op="forward_varlen")
        selection = ops_varlen.empty_selection(q, k, params, need_selection)
        ops_varlen.launch(q, k, v, out[0], lse[0], selection, pack.lengths, params)
        return selection.unsqueeze(1) if need_selection else None
    params = checks.tree.forward(q, k, v, backend=backend, **tree)
    if ops._use_torch("forward", q, backend):
        found = torch_tree.forward(q, k, v, params, need_selection=need_selection, given=given)
        out.copy_(found[0])
        lse.copy_(found[1])
        return found[2] if need_selection else None
    from .. import kernels

    checks.support.forward(q, k, v, params)
    selection = None
    if need_selection:
        layers = len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))
        shape = (layers - 1, *q.shape[:2], k.shape[2], params.top_k)
        selection = q.new_empty(shape, dtype=torch.int32)
    q, k, params = pairs.arranged(q, k, params)
    part = whole.part(k.shape[2])
    workspace = q.new_empty(kernels.forward_workspace(q, k, v, params, part=part), dtype=torch.uint8)
    chosen, replayed = (x if x is not None and x.numel() else None for x in (selection, given))
    kernels.forward(q, k, v, out, lse, chosen, workspace, params, given=replayed, part=part)
    return selection


@ops._without_autocast
def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, *, whole: Whole, backend: str, deterministic: bool, pack: Pack | None = None,
    **tree,
) -> None:  # fmt: skip
    """Fills dq and adds to dk and dv, which are contiguous and of the accumulation dtype. All but k, v, dk and dv may
    be views of some heads of tensors that have all; where the selection is, out, lse and dq are. whole: see there."""
    options = {"deterministic": deterministic, "add_to": (dk, dv)}
    if pack is not None:
        _backward_of_pack(dout, dlse, q, k, v, out, lse, selection, dq, dk, dv, pack, options, backend=backend, **tree)
        return
    params = checks.tree.forward(q, k, v, backend=backend, op="backward", **tree)
    checks.tree.backward(dout, dlse, q, k, v, out, lse, selection, params)
    if ops._use_torch("backward", q, backend):
        dq.copy_(torch_tree.backward(dout, dlse, q, k, v, out, lse, selection, params, **options)[0])
        return
    checks.support.forward(q, k, v, params, "backward")
    _launch_backward(dout, dlse, q, k, v, out, lse, selection, dq, dk, dv, params, whole)


def _backward_of_pack(
    dout, dlse, q, k, v, out, lse, selection, dq, dk, dv, pack: Pack, options: dict, *, backend: str, **tree
) -> None:
    own_dq = dq[0].contiguous()
    dout, dlse, q, k, v, dk, dv = (x[0] for x in (dout, dlse, q, k, v, dk, dv))
    out, lse, selection = out[0].contiguous(), lse[0].contiguous(), selection[:, 0].contiguous()
    options["add_to"] = (dk, dv)
    results = (dout, dlse, q, k, v, out, lse, selection)
    params = _packed_params(q, k, v, pack, op="backward_varlen", backend=backend, **tree)
    checks.varlen.backward(dout, dlse, q, v, out, lse, selection, params, k.shape[-2])
    if ops._use_torch("backward_varlen", q, backend):
        dq[0] = torch_varlen.backward(*results, pack.lengths, params, **options)[0]
        return
    checks.varlen.backward_kernel(q, k, v, out, lse, selection, params, *pack.lengths)
    ops_varlen.launch_backward(*results, own_dq, dk, dv, pack.lengths, params)
    if own_dq.data_ptr() != dq.data_ptr():
        dq[0] = own_dq


def _launch_backward(dout, dlse, q, k, v, out, lse, selection, dq, dk, dv, params: TreeParams, whole: Whole) -> None:
    from .. import kernels

    q, k, own = pairs.arranged(q, k, params)
    own_dq, own_dk = pairs.to_halves(dq, params), pairs.to_halves(dk, params)  # dk holds what the kernels add to
    if params.attn_sink is not None:
        lse, dlse = sinks.folded(lse, dlse, params.attn_sink)
    part = whole.queries, whole.kv_heads
    if selection.is_contiguous() or own_dq is not dq or params.attn_sink is not None:
        # Some are no views of the heads of whole tensors: the others are copied.
        out, lse, selection, own_dq = (x.contiguous() for x in (out, lse, selection, own_dq))
        part = whole.part(k.shape[2])
    workspace = q.new_empty(kernels.backward_workspace(q, k, v, own, part=part), dtype=torch.uint8)
    kernels.backward(dout, dlse, q, k, v, out, lse, selection, own_dq, own_dk, dv, workspace, own, part=part)
    if own_dq is not dq:
        dq.copy_(pairs.from_halves(own_dq, params))
    if own_dk is not dk:
        dk.copy_(pairs.from_halves(own_dk, params))
