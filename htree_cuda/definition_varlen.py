"""Packed and ragged sequences, straight from their definition: `definition.forward` of one sequence after another, on
host numbers. The oracle of the tests of `forward_varlen`, and of `forward` with lengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import definition


def sequences_of_pack(cu_seqlens_q: list[int], cu_seqlens_k: list[int]) -> list[tuple]:
    """(index of q's rows, index of k's rows, position of the first query) of each sequence of a pack."""
    found = []
    for i in range(len(cu_seqlens_q) - 1):
        rows_q, rows_k = (slice(cu[i], cu[i + 1]) for cu in (cu_seqlens_q, cu_seqlens_k))
        found.append(((rows_q,), (rows_k,), (rows_k.stop - rows_k.start) - (rows_q.stop - rows_q.start)))
    return found


def sequences_of_batch(seqused_q: list[int], seqused_k: list[int], q_start: list[int] | None = None) -> list[tuple]:
    """The same of each row of a batch."""
    found = []
    for b, (queries, keys) in enumerate(zip(seqused_q, seqused_k)):
        start = keys - queries if q_start is None else q_start[b]
        found.append(((b, slice(0, queries)), (b, slice(0, keys)), start))
    return found


def _queries(rows: tuple, keys: int, start: int) -> tuple[tuple, int]:
    """The rows whose position is one of the keys, and the position of the first of them."""
    *head, part = rows
    first = part.start + max(0, -start)
    stop = min(part.stop, part.start + keys - start)
    return (*head, slice(first, max(first, stop))), max(0, start)


def forward(q: Tensor, k: Tensor, v: Tensor, sequences: list[tuple], *, max_seqlen_k: int, **options):
    """out, lse in float64, and selection [L-1, *rows of q, H_kv, top_k] with L of max_seqlen_k; options as
    `definition.forward`."""
    top_k, r = options["top_k_per_layer"], options["compression_rate"]
    most = options.get("max_top_nodes") or top_k * r
    layers = len(definition.layer_sizes(max_seqlen_k, r, most))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    selection = torch.full((layers - 1, *q.shape[:-2], k.shape[-2], top_k), -1, dtype=torch.int32)
    for rows_q, rows_k, start in sequences:
        keys = rows_k[-1].stop - rows_k[-1].start
        rows, first = _queries(rows_q, keys, start)
        if rows[-1].start == rows[-1].stop:
            continue
        one = definition.forward(q[rows][None], k[rows_k][None], v[rows_k][None], q_start=first, **options)
        out[rows], lse[rows] = one.out[0], one.lse[0]
        for layer in range(1, layers):
            if layer <= one.selection.shape[0]:
                selection[layer - 1][rows] = one.selection[layer - 1, 0]
                continue
            for j, t in enumerate(range(first, first + rows[-1].stop - rows[-1].start)):
                nodes = t // r**layer + 1
                selection[layer - 1][(*rows[:-1], rows[-1].start + j)][:, :nodes] = torch.arange(
                    nodes, dtype=torch.int32
                )
    return out, lse, selection


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, selection: Tensor, sequences: list[tuple], **options
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) in float64, 0 in rows of no sequence; with attn_sink (dq, dk, dv, dsink), dsink of all sequences."""
    sink = options.get("attn_sink")
    totals = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v) + (() if sink is None else (sink,))]
    for rows_q, rows_k, start in sequences:
        keys = rows_k[-1].stop - rows_k[-1].start
        rows, first = _queries(rows_q, keys, start)
        if rows[-1].start == rows[-1].stop:
            continue
        chosen = [layer[rows][None] for layer in selection]
        chosen = torch.stack(chosen) if chosen else selection
        parts = (dout[rows], dlse[rows], q[rows], k[rows_k], v[rows_k])
        one = definition.backward(*(x[None] for x in parts), chosen, q_start=first, **options)
        for total, index, mine in zip(totals, (rows, rows_k, rows_k), one):
            total[index] = mine[0]
        if sink is not None:
            totals[3] += one[3]
    return tuple(totals)
