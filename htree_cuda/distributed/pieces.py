"""Attention of runs of queries into tensors that exist, with the rules, backends and bits of `htree_cuda.forward`.

The ops of `ops.py` return tensors of their own; a rank's results are made of several calls, and copying them together
would hold them twice. Tensors are [1, T_q, ...] and [1, T, ...]; with `Pack` their rows are packed sequences.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks, ops, ops_varlen, pairs
from ..definition import layer_sizes
from ..params import TreeParams
from ..torch_backend import sinks
from ..torch_backend import tree as torch_tree
from ..torch_backend import varlen as torch_varlen
from .exchange import wait


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

    def part(self, kv_heads: int) -> tuple[int, int, int]:
        """For a call of tensors that have these KV heads and no others: more queries stand for the others."""
        return self.queries * self.kv_heads // kv_heads, 0, 0


def _packed_params(q: Tensor, k: Tensor, v: Tensor, pack: Pack, op: str, **tree):
    """Whatever the position of the first row, a sequence's queries are its last ones."""
    return checks.varlen.forward(
        q, k, v, *pack.lengths, max_seqlen_q=pack.max_seqlen_q, max_seqlen_k=pack.max_seqlen_k, op=op, **tree
    )


class Run(NamedTuple):
    """Queries with consecutive positions, from q_start on, in tensors [1, n, ..]: of a rank's part, or borrowed ones.
    Their keys are the first `keys` tokens. `selection`: in the forward one to replay, in the backward the one that the
    forward returned. The fields after `selection` belong to the backward."""

    q: Tensor
    out: Tensor
    lse: Tensor
    q_start: int
    keys: int
    selection: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None
    dq: Tensor | None = None


@ops._without_autocast
def forward(
    k: Tensor, v: Tensor, runs: list[Run], *, whole: Whole, backend: str, need_selection: bool,
    pack: Pack | None = None, **tree,
) -> list[Tensor | None]:  # fmt: skip
    """Fills out [1, n, H, V] and lse [1, n, H] of runs, contiguous; returns their selections where these are needed.
    Runs have the same keys, and k and v are these. whole: see there."""
    if pack is not None:
        return [_forward_of_pack(runs[0], k, v, pack, backend, need_selection, **tree)]
    op_params = [checks.tree.forward(x.q, k, v, q_start=x.q_start, backend=backend, **tree) for x in runs]
    if ops._use_torch("forward", k, backend):
        selections = []
        for x, params in zip(runs, op_params, strict=True):
            found = torch_tree.forward(x.q, k, v, params, need_selection=need_selection, given=x.selection)
            x.out.copy_(found[0])
            x.lse.copy_(found[1])
            selections.append(found[2] if need_selection else None)
        return selections
    from .. import kernels

    for x, params in zip(runs, op_params, strict=True):
        checks.support.forward(x.q, k, v, params)
    queries, k, op_params = _arranged(runs, k, op_params)
    own = []
    for x, q, params in zip(runs, queries, op_params, strict=True):
        selection = None
        if need_selection:
            layers = len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))
            shape = (layers - 1, *q.shape[:2], k.shape[2], params.top_k)
            selection = q.new_empty(shape, dtype=torch.int32)
        own.append(kernels.Run(q, x.out, x.lse, selection, params, x.selection))
    part = whole.part(k.shape[2])
    workspace = k.new_empty(kernels.forward_runs_workspace(own, k, v, part=part), dtype=torch.uint8)
    kernels.forward_runs(own, k, v, workspace, part=part)
    return [x.selection for x in own]


def _arranged(runs: list[Run], k: Tensor, op_params: list[TreeParams]) -> tuple[list[Tensor], Tensor, list[TreeParams]]:
    """Queries, keys and params for the kernels: `pairs.arranged` of all runs."""
    q, k, first = pairs.arranged(runs[0].q, k, op_params[0])
    rest = [pairs.to_halves(x.q, op_params[0]) for x in runs[1:]]
    return [q, *rest], k, [dataclasses.replace(first, q_start=x.q_start) for x in runs]


def _forward_of_pack(run: Run, k: Tensor, v: Tensor, pack: Pack, backend: str, need_selection: bool, **tree):
    q, k, v = run.q[0], k[0], v[0]
    params = _packed_params(q, k, v, pack, op="forward_varlen", backend=backend, **tree)
    if ops._use_torch("forward_varlen", q, backend):
        found = torch_varlen.forward(q, k, v, pack.lengths, params, need_selection=need_selection)
        run.out[0], run.lse[0] = found[0], found[1]
        return found[2].unsqueeze(1) if need_selection else None
    checks.varlen.kernel(q, k, v, params, *pack.lengths, op="forward_varlen")
    selection = ops_varlen.empty_selection(q, k, params, need_selection)
    ops_varlen.launch(q, k, v, run.out[0], run.lse[0], selection, pack.lengths, params)
    return selection.unsqueeze(1) if need_selection else None


@ops._without_autocast
def backward(
    k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, runs: list[Run], *, whole: Whole, backend: str,
    deterministic: bool, pack: Pack | None = None, before: torch.cuda.Event | None = None, **tree,
) -> None:  # fmt: skip
    """Fills dq of runs, and dk and dv, contiguous and of the accumulation dtype. All but k, v, dk and dv may be views
    of some heads of tensors that have all; where the selection is, out, lse and dq are, and the selections of all runs
    or of none. k and v are the keys of all runs, which may have fewer. whole: see there. before: an event that all
    comes behind but, in the kernels, what touches neither dk nor dv: all of the first KV head but its last kernels."""
    if pack is not None or ops._use_torch("backward", k, backend):
        wait(k, before)
    if pack is not None:
        _backward_of_pack(runs[0], k, v, dk, dv, pack, backend=backend, deterministic=deterministic, **tree)
        return
    op_params = []
    for x in runs:
        own_k, own_v = k[:, : x.keys], v[:, : x.keys]
        params = checks.tree.forward(x.q, own_k, own_v, q_start=x.q_start, backend=backend, op="backward", **tree)
        checks.tree.backward(x.dout, x.dlse, x.q, own_k, own_v, x.out, x.lse, x.selection, params)
        op_params.append(params)
    if ops._use_torch("backward", k, backend):
        dk.zero_()
        dv.zero_()
        for x, params in zip(runs, op_params, strict=True):
            results = (x.dout, x.dlse, x.q, k[:, : x.keys], v[:, : x.keys], x.out, x.lse, x.selection)
            sums = dk[:, : x.keys], dv[:, : x.keys]
            x.dq.copy_(torch_tree.backward(*results, params, deterministic=deterministic, add_to=sums)[0])
        return
    for x, params in zip(runs, op_params, strict=True):
        checks.support.forward(x.q, k, v, params, "backward")
    _launch_backward(runs, k, v, dk, dv, op_params, whole, before)


def _backward_of_pack(
    run: Run, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, pack: Pack, *, backend: str, deterministic: bool,
    **tree,
) -> None:  # fmt: skip
    dk.zero_()
    dv.zero_()
    own_dq = run.dq[0].contiguous()
    dout, dlse, q, k, v, dk, dv = (x[0] for x in (run.dout, run.dlse, run.q, k, v, dk, dv))
    out, lse, selection = run.out[0].contiguous(), run.lse[0].contiguous(), run.selection[:, 0].contiguous()
    results = (dout, dlse, q, k, v, out, lse, selection)
    params = _packed_params(q, k, v, pack, op="backward_varlen", backend=backend, **tree)
    checks.varlen.backward(dout, dlse, q, v, out, lse, selection, params, k.shape[-2])
    if ops._use_torch("backward_varlen", q, backend):
        options = {"deterministic": deterministic, "add_to": (dk, dv)}
        run.dq[0] = torch_varlen.backward(*results, pack.lengths, params, **options)[0]
        return
    checks.varlen.backward_kernel(q, k, v, out, lse, selection, params, *pack.lengths)
    ops_varlen.launch_backward(*results, own_dq, dk, dv, pack.lengths, params)
    if own_dq.data_ptr() != run.dq.data_ptr():
        run.dq[0] = own_dq


def _launch_backward(
    runs: list[Run], k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, op_params: list[TreeParams], whole: Whole,
    before: torch.cuda.Event | None,
) -> None:  # fmt: skip
    from .. import kernels

    options = op_params[0]
    queries, own_k, op_params = _arranged(runs, k, op_params)
    own = []
    for x, q, params in zip(runs, queries, op_params, strict=True):
        lse, dlse = (x.lse, x.dlse) if options.attn_sink is None else sinks.folded(x.lse, x.dlse, options.attn_sink)
        dq = pairs.to_halves(x.dq, options)
        own.append(kernels.Run(q, x.out, lse, x.selection, params, None, x.dout, dlse, dq))
    own_dk = dk if own_k is k else torch.empty_like(dk)
    # Selections that were made again have the heads of this call alone.
    remade = all(x.selection.is_contiguous() for x in own)
    part = whole.queries, whole.kv_heads, k.shape[2] if remade else 0
    if options.attn_sink is not None or any(x.dq is not run.dq for x, run in zip(own, runs, strict=True)):
        # Some are no views of the heads of whole tensors: the others are copied.
        names = ("out", "lse", "selection", "dq")
        own = [x._replace(**{name: getattr(x, name).contiguous() for name in names}) for x in own]
        part = whole.part(k.shape[2])
    workspace = k.new_empty(kernels.backward_runs_workspace(own, own_k, v, part=part), dtype=torch.uint8)
    kernels.backward_runs(own, own_k, v, own_dk, dv, workspace, add=False, part=part, before_dkv=before)
    for x, run in zip(own, runs, strict=True):
        if x.dq is not run.dq:
            run.dq.copy_(pairs.from_halves(x.dq, options))
    if own_dk is not dk:
        dk.copy_(pairs.from_halves(own_dk, options))
