"""What `dense_indexer_loss` computes, one query at a time, in float64: the oracle of its tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .definition import batch_starts
from .definition_dsa import window


def dense_indexer_loss(
    q_i: Tensor,
    k_i: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    q_start: int | list[int] | None = None,
    k_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    lse_base: float = 2.0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """KL divergence of every query [s_q], and whether it sees a key [s_q] (batched: a leading B).

    q_i: [s_q, h_i, d_i], k_i: [s_kv, 1, d_i], weights: [s_q, h_i], q: [s_q, h_q, d_qk], k: [s_kv, 1, d_qk],
    lse: [s_q, h_q] in base ``lse_base``. Differentiable with respect to q_i, k_i and weights.
    """
    if q_i.dim() == 4:
        B = q_i.shape[0]
        rows = [
            dense_indexer_loss(
                q_i[b], k_i[b], weights[b], q[b], k[b], lse[b], sm_scale=sm_scale, q_start=start, k_stride=k_stride,
                k_start=None if k_start is None else k_start[b], k_end=None if k_end is None else k_end[b],
                lse_base=lse_base, compute_dtype=compute_dtype,
            )
            for b, start in enumerate(batch_starts(q_start, B))
        ]  # fmt: skip
        if not rows:
            losses = weights.sum(-1, dtype=compute_dtype)
            return losses, losses.bool()
        return torch.stack([losses for losses, _ in rows]), torch.stack([counts for _, counts in rows])
    sm_scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    rule = {"s_kv": k.shape[0], "q_start": q_start, "k_stride": k_stride, "k_start": k_start, "k_end": k_end}
    losses, counts = [], []
    for s in range(q_i.shape[0]):
        keys = list(window(s, **rule))
        scores = q[s].detach().to(compute_dtype) @ k[keys, 0].detach().to(compute_dtype).T * sm_scale
        natural = lse[s].detach().to(compute_dtype)[:, None] * math.log(lse_base)
        a = torch.where(natural.isinf(), 0.0, torch.exp(scores - natural)).sum(0)
        z = q_i[s].to(compute_dtype) @ k_i[keys, 0].to(compute_dtype).T
        logits = weights[s].to(compute_dtype) @ torch.relu(z)
        log_p = torch.log_softmax(logits, dim=0)
        loss = weights.new_zeros((), dtype=compute_dtype)
        for t, log_prob in zip(a / a.sum(), log_p):
            if t != 0 and a.sum() != 0:
                loss = loss + t * (t.log() - log_prob)
        losses.append(loss)
        counts.append(bool(keys))
    losses = torch.stack(losses) if losses else weights.sum(-1, dtype=compute_dtype)
    return losses, torch.tensor(counts, dtype=torch.bool)
