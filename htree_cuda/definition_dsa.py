"""The lightning indexer and its selector, written straight from their definition: one query at a time.

As `definition.py`, this file is an oracle: it is meant to be read, not to be fast. Logits are differentiable torch
operations, so that autograd through them is the derivation of the backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .definition import batch_starts


def window(
    s: int,
    *,
    s_kv: int,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_start: int | None = None,
    k_stride: int = 1,
) -> range:
    """The key rows that query ``s`` sees; k_start, k_end: [s_q] int32."""
    first = 0 if k_start is None else max(int(k_start[s]), 0)
    end = s_kv if k_end is None else min(int(k_end[s]), s_kv)
    if q_start is not None:
        end = min(end, (q_start + s + 1) // k_stride)
    return range(first, max(first, end))


def _each(B: int, q_start, *tensors: Tensor | None):
    """For each batch element its start, and its part of each tensor."""
    for b, start in enumerate(batch_starts(q_start, B)):
        yield start, [None if x is None else x[b] for x in tensors]


def indexer_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_start: int | list[int] | None = None,
    k_stride: int = 1,
    compute_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """[s_q, s_kv] in ``compute_dtype``, or [s_q, topk] where indices are given (batched: a leading B)."""
    if q.dim() == 4:
        tensors = (q, k, weights, q_scale, k_scale, indices, topk_length, k_start, k_end)
        rows = [
            indexer_logits(
                *x[:3], q_scale=x[3], k_scale=x[4], indices=x[5], topk_length=x[6], k_start=x[7], k_end=x[8],
                q_start=start, k_stride=k_stride, compute_dtype=compute_dtype,
            )
            for start, x in _each(q.shape[0], q_start, *tensors)
        ]  # fmt: skip
        columns = k.shape[1] if indices is None else indices.shape[3]
        return torch.stack(rows) if rows else q.new_zeros(0, q.shape[1], columns, dtype=compute_dtype)
    s_q, s_kv = q.shape[0], k.shape[0]
    rule = {"s_kv": s_kv, "k_start": k_start, "k_end": k_end, "q_start": q_start, "k_stride": k_stride}
    result = []
    for s in range(s_q):
        visible = window(s, **rule)
        if indices is None:
            columns, rows, width = list(visible), list(visible), s_kv
        else:
            width = indices.shape[2]
            named = indices[s, 0].tolist()[: width if topk_length is None else max(int(topk_length[s]), 0)]
            columns = [j for j, i in enumerate(named) if i in visible]
            rows = [named[j] for j in columns]
        row = q.new_full((width,), -math.inf, dtype=compute_dtype)
        if rows:
            z = q[s].to(compute_dtype) @ k[rows, 0].to(compute_dtype).T
            factor = weights[s] if q_scale is None else weights[s] * q_scale[s]
            logits = factor.to(compute_dtype) @ torch.relu(z)
            if k_scale is not None:
                logits = logits * k_scale[rows, 0].to(compute_dtype)
            row = row.index_copy(0, torch.tensor(columns), logits)
        result.append(row)
    return torch.stack(result) if result else q.new_zeros(0, s_kv if indices is None else indices.shape[2])


def order_key(value: float) -> tuple[int, float]:
    """What logits are compared by: NaN above +inf, -0 equal to +0."""
    return (1, 0.0) if math.isnan(value) else (0, value)


def topk_indices(
    logits: Tensor,
    topk: int,
    *,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_start: int | list[int] | None = None,
    k_stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """(indices [s_q, 1, topk] int32, values [s_q, topk]), rows ascending, then -1 with -inf (batched: a leading B)."""
    if logits.dim() == 3:
        results = [
            topk_indices(x[0], topk, k_start=x[1], k_end=x[2], q_start=start, k_stride=k_stride)
            for start, x in _each(logits.shape[0], q_start, logits, k_start, k_end)
        ]
        if not results:
            return torch.zeros(0, logits.shape[1], 1, topk).int(), logits.new_zeros(0, logits.shape[1], topk)
        return tuple(torch.stack(x) for x in zip(*results))
    s_q, n = logits.shape
    indices = torch.full((s_q, 1, topk), -1, dtype=torch.int32)
    values = torch.full((s_q, topk), -math.inf, dtype=logits.dtype)
    for s in range(s_q):
        row = logits[s].tolist()
        visible = window(s, s_kv=n, k_start=k_start, k_end=k_end, q_start=q_start, k_stride=k_stride)
        candidates = [j for j in visible if row[j] != -math.inf]
        # Python's sort is stable: of equal logits the smaller row stays in front.
        best = sorted(sorted(candidates, key=lambda j: order_key(row[j]), reverse=True)[:topk])
        indices[s, 0, : len(best)] = torch.tensor(best, dtype=torch.int32)
        values[s, : len(best)] = logits[s, best]
    return indices, values
