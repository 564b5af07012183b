"""Target and loss of a sparse-attention indexer, in plain PyTorch operations: autograd derives the loss, torch.compile
fuses it, and it runs on any device. Arguments come checked from `api.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .definition import accumulation_dtype
from .torch_backend.lists import valid_slots


def _share(x: Tensor) -> Tensor:
    """x over its sum along the last dimension; a row whose sum is 0 stays as it is, and an infinity makes it NaN."""
    largest = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.sum(-1, keepdim=True)
    # A power of two, with which no sum of fewer than 2^32 finite numbers is infinite.
    x = x * torch.ones_like(largest).masked_fill(largest > torch.finfo(x.dtype).max * 2.0**-32, 2.0**-32)
    total = x.sum(-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1.0).masked_fill(total.isinf(), math.nan)


def normalize_attn_dist(attn_dist: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """[.., G, s_q, topk] -> [.., s_q, topk]; see `api.normalize_attn_dist`."""
    total = attn_dist.sum(-3)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    return _share(total)


def indexer_loss(
    logits: Tensor,
    attn_dist: Tensor,
    indices: Tensor,
    *,
    s_kv: int,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    reduction: str,
) -> Tensor:
    """See `api.indexer_loss`; q_start: see `params.start_of`, or None."""
    acc = accumulation_dtype(logits.dtype)
    position = None
    if q_start:  # an empty list: B = 0, no query to place
        query = torch.arange(logits.shape[-2], device=logits.device)
        position = torch.stack([query + start for start in q_start]) if len(q_start) > 1 else query + q_start[0]
    valid = valid_slots(indices.squeeze(-2), s_kv=s_kv, position=position, k_stride=k_stride, topk_length=topk_length)
    if attn_dist.dim() > logits.dim():
        attn_dist = attn_dist.sum(-3)
    # In its own precision: only then does its scale not matter to float32 logits.
    target = _share(attn_dist.masked_fill(~valid, 0.0)).to(acc)
    counts = valid.any(-1)
    # A row without a valid slot gets zeros for its logits: a softmax over nothing is NaN, as is its gradient. So does a
    # row in which every logit is -inf, where no slot has a probability.
    scores = logits.to(acc).masked_fill(~valid, -math.inf)
    nothing = (scores.detach() == -math.inf).all(-1, keepdim=True)
    # A row without a target has no gradient, whatever its logits are.
    empty = (target.detach() == 0).all(-1, keepdim=True)
    log_p = torch.log_softmax(scores.masked_fill(nothing | empty, 0.0), -1).masked_fill(
        nothing & counts[..., None], -math.inf
    )
    # Where the target is 0 the limit of t log(t) is 0, and 0 * (-inf) must not become NaN.
    loss = torch.where(target == 0, 0.0, target * (target.log() - log_p)).sum(-1)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total / counts.sum().clamp(min=1) if reduction == "mean" else total
