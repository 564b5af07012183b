"""Packed and ragged sequences in PyTorch operations. Sequences with the same numbers of keys and queries are a batch of
`tree.forward`; a pack of 4,096 documents of 16 tokens is one call of it. Lengths are read on the host, once a call."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition import accumulation_dtype, layer_sizes
from ..params import TreeParams, VarlenParams
from . import tree
from .decode import whole_layers


class Lengths(NamedTuple):
    """What says which rows a sequence has: cumulative lengths of a pack, or what the rows of a batch hold."""

    cu_seqlens_q: Tensor | None  # [N + 1]
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None  # [B]; all rows where None
    seqused_k: Tensor | None
    starts: Tensor | None  # [B] position of the first query; seqused_k - seqused_q where None


class _Shape(NamedTuple):
    """What sequences of one batch have in common: queries at the positions start .. start + queries - 1 of the keys."""

    keys: int
    queries: int
    start: int


class _Members(NamedTuple):
    """Where the rows of each of some sequences begin."""

    b: list[int]  # row of the batch; 0 in a pack
    q: list[int]
    k: list[int]


def sequence_bounds(lengths: Lengths, params: VarlenParams, total_q: int, total_k: int) -> Tensor:
    """[N, 6] int64 on the device: row of the batch, first query that has a key, how many have one, first key, number
    of keys, and the position of that query. Whatever the lengths hold, rows lie within the tensors."""
    N = params.sequences
    some = next(
        x for x in (lengths.cu_seqlens_k, lengths.seqused_k, lengths.seqused_q, lengths.starts) if x is not None
    )
    index = torch.arange(N, device=some.device)
    zero = torch.zeros_like(index)
    if params.packed:
        # What decreases is raised, so that no row belongs to two sequences whatever the lengths hold.
        bounds_q = lengths.cu_seqlens_q.long().clamp(0, total_q).cummax(0).values
        bounds_k = lengths.cu_seqlens_k.long().clamp(0, total_k).cummax(0).values
        first_q, first_k, b = bounds_q[:-1], bounds_k[:-1], zero
        used_q = (bounds_q[1:] - first_q).clamp(0, params.max_seqlen_q)
        keys = (bounds_k[1:] - first_k).clamp(0, params.max_seqlen_k)
        start = keys - used_q
    else:
        first_q, first_k, b = zero, zero, index
        full = (zero + total_q, zero + total_k)
        used_q = full[0] if lengths.seqused_q is None else lengths.seqused_q.long().clamp(0, total_q)
        keys = full[1] if lengths.seqused_k is None else lengths.seqused_k.long().clamp(0, total_k)
        start = keys - used_q if lengths.starts is None else lengths.starts.long().clamp(-(2**32), 2**32)
    missing = (-start).clamp(min=0)  # queries before the first key
    queries = (torch.minimum(used_q, keys - start) - missing).clamp(min=0)
    return torch.stack((b, first_q + missing, queries, first_k, keys, start + missing), dim=1)


def _batches(lengths: Lengths, params: VarlenParams, q: Tensor, k: Tensor) -> dict[_Shape, _Members]:
    """The sequences with a query, by what they have in common."""
    batches: dict[_Shape, _Members] = defaultdict(lambda: _Members([], [], []))
    for b, first_q, queries, first_k, keys, start in sequence_bounds(
        lengths, params, q.shape[-3], k.shape[-3]
    ).tolist():
        if queries:
            members = batches[_Shape(keys, queries, start)]
            members.b.append(b), members.q.append(first_q), members.k.append(first_k)
    return batches


def _rows(x: Tensor, b: list[int], first: list[int], count: int, packed: bool):
    """The index of rows first .. first + count - 1 of each sequence in x [total, ...] or [B, T, ...]: a slice where
    there is one sequence, so that nothing is copied."""
    if len(b) == 1:
        rows = slice(first[0], first[0] + count)
        return (None, rows) if packed else (slice(b[0], b[0] + 1), rows)
    rows = torch.tensor(first, device=x.device)[:, None] + torch.arange(count, device=x.device)
    return (rows,) if packed else (torch.tensor(b, device=x.device)[:, None], rows)


def _assign(x: Tensor, index: tuple, value: Tensor) -> None:
    if index[0] is None:
        x[index[1]] = value[0]
    else:
        x[index] = value


def forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, params: VarlenParams, *, need_selection: bool = False,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out and lse of the shape of q without its last dimension, and selection [L-1, *rows of q, H_kv, top_k] int32
    (first dimension 0 unless needed). Rows that are no query of a sequence: 0, -inf, -1."""
    r, top_k = params.tree.compression_rate, params.tree.top_k
    layers = len(layer_sizes(params.max_seqlen_k, r, params.tree.max_top_nodes))
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
    kept = layers - 1 if need_selection else 0
    selection = torch.full((kept, *q.shape[:-2], k.shape[-2], top_k), -1, dtype=torch.int32, device=q.device)
    for shape, members in _batches(lengths, params, q, k).items():
        of_q = _rows(q, members.b, members.q, shape.queries, params.packed)
        of_k = _rows(k, members.b, members.k, shape.keys, params.packed)
        mine = _tree_params(params, shape)
        chosen = None if given is None else _of_layers(given, shape, members, of_q, mine)
        results = tree.forward(q[of_q], k[of_k], v[of_k], mine, need_selection=need_selection, given=chosen)
        _assign(out, of_q, results[0])
        _assign(lse, of_q, results[1])
        if need_selection:
            found = results[2].shape[0]
            t = torch.arange(shape.start, shape.start + shape.queries, device=q.device)
            for layer in range(1, layers):
                if layer <= found:
                    nodes = results[2][layer - 1]
                else:
                    nodes = whole_layers(t, r, layer, top_k)[None, :, None].to(torch.int32)
                _assign(selection[layer - 1], of_q, nodes)
    return out, lse, selection


def _of_layers(selection: Tensor, shape: _Shape, members: _Members, of_q: tuple, mine: TreeParams) -> Tensor:
    """The part of a selection that belongs to some sequences, of the layers that they have."""
    found = len(layer_sizes(shape.keys, mine.compression_rate, mine.max_top_nodes)) - 1
    chosen = selection.new_empty(found, len(members.b), shape.queries, *selection.shape[-2:])
    for layer in range(found):
        chosen[layer] = selection[layer][of_q]
    return chosen


def _tree_params(params: VarlenParams, shape: _Shape) -> TreeParams:
    return dataclasses.replace(params.tree, q_start=shape.start)


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor,
    lengths: Lengths, params: VarlenParams, *, deterministic: bool = False,
    add_to: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the dtype of the inputs; 0 in rows of no sequence. add_to: as in `tree.backward`."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if add_to is not None:
        dk, dv = add_to
    for shape, members in _batches(lengths, params, q, k).items():
        of_q = _rows(q, members.b, members.q, shape.queries, params.packed)
        of_k = _rows(k, members.b, members.k, shape.keys, params.packed)
        mine = _tree_params(params, shape)
        chosen = _of_layers(selection, shape, members, of_q, mine)
        options = {} if add_to is None else {"add_to": tuple(x[of_k].clone() for x in add_to)}
        gradients = tree.backward(
            dout[of_q], dlse[of_q], q[of_q], k[of_k], v[of_k], out[of_q], lse[of_q], chosen, mine,
            deterministic=deterministic, **options,
        )  # fmt: skip
        for total, index, mine_only in zip((dq, dk, dv), (of_q, of_k, of_k), gradients):
            _assign(total, index, mine_only)
    return dq, dk, dv
