"""`dense_indexer_loss`: the loss of an indexer's dense warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, ops_dense_loss  # noqa: F401  (importing ops_dense_loss registers its ops)
from .api import _starts
from .autocast import autocast


def dense_indexer_loss(
    q_i: Tensor,
    k_i: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    lse_base: float = 2,
    reduction: str = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """KL divergence of an indexer's softmax over all visible keys from dense attention: the loss of the dense warm-up.

    For each query, with ``a[j]`` the sum over heads of ``exp(<q, k[j]> * sm_scale - lse)``, ``target = a / sum(a)`` and
    ``logits[j] = sum over heads of weights * relu(<q_i, k_i[j]>)``, all over the keys that it sees:
    ``sum of target * (log(target) - log_softmax(logits))``. Nothing of size s_q x s_kv exists.

    Args:
        q_i: [s_q, h_i, d_i] float16, bfloat16, float32 or float64, the indexer's queries. Either no tensor or every
            tensor has a leading batch dimension B.
        k_i: [s_kv, 1, d_i], dtype of q_i, the indexer's keys.
        weights: [s_q, h_i] float32 (float64 where q_i is), the weights of the indexer's heads, every constant factor
            included.
        q: [s_q, h_q, d_qk] float16, bfloat16, float32 or float64, queries of the attention; its dtype may be another
            than q_i's.
        k: [s_kv, 1, d_qk], dtype of q (multi-query attention, MLA in absorbed form).
        lse: [s_q, h_q] float32 (float64 where q is), log-sum-exp of the *scaled* scores over the same keys.
        sm_scale: finite float, natural score scale; default d_qk ** -0.5.
        q_start: int >= 0, absolute position of query 0 (a list of B of them when batched); default None: no causal
            rule, k_stride is ignored.
        k_stride: int >= 1; key row j is visible to query s only if ``j < (q_start + s + 1) // k_stride``; default 1.
        k_start, k_end: [s_q] int32, any values; key row j is visible to query s only if ``k_start[s] <= j < k_end[s]``;
            default None: no such bound.
        lse_base: 2 or math.e, the base of lse; default 2.
        reduction: "mean": over the queries that see a key (0 where none does); "sum"; "none".
        group: torch.distributed process group whose ranks hold the other heads of q and lse; q_i, k_i, weights and the
            window are the same on all of them. Every rank of it must make the call, and its backward. Default None.
        backend: "auto" or "torch", as in `forward`. The attention is made by `attn_dist`'s kernel; the logits and their
            gradient are PyTorch operations on any device.
        deterministic: bool; default None. Gradients are bitwise repeatable in any case.

    Returns:
        float32 (float64 where an input is), a scalar, or [s_q] (batched [B, s_q]) with reduction "none".
        A query that sees no key, and one whose attention is 0 on all of them, gives 0 and no gradient; the second
        counts in the mean.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`.

    Notes:
        Gradients: to q_i, k_i and weights, through the logits, ``softmax(logits) - target`` times that of the result.
        q, k and lse are constants. Second derivatives raise.
        Memory: at most 256 MiB beside inputs, gradients (that of k_i in float32) and four numbers a query.
        With a group, one all-reduce for each tile of queries by keys, in the forward and again in the backward.
        A head whose lse is infinite (of either sign) adds nothing to ``a``; a NaN lse gives NaN. A NaN or an infinity
        in a key reaches the queries that see it and no other.
        Autocast: q_i, k_i, q and k are cast to the autocast dtype; weights and lse are not.

    Example:
        >>> q_i, k_i, weights = torch.randn(16, 4, 32), torch.randn(64, 1, 32), torch.randn(16, 4, requires_grad=True)
        >>> q, k = torch.randn(16, 8, 48), torch.randn(64, 1, 48)
        >>> every = torch.arange(64, dtype=torch.int32).expand(16, 1, 64).contiguous()
        >>> _, lse = htree_cuda.sparse_attention(q, k, every, d_v=32, q_start=48)
        >>> htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, q_start=48).backward()

    Source: the dense warm-up of DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "dense_indexer_loss"
    checks.common.backend_name(op, backend)
    tensors = {"q_i": q_i, "k_i": k_i, "weights": weights, "q": q, "k": k, "lse": lse}
    tensors |= {name: x for name, x in (("k_start", k_start), ("k_end", k_end)) if x is not None}
    for name, x in tensors.items():
        checks.common.tensor(op, name, x)
    sm_scale = checks.common.number(op, "sm_scale", sm_scale, optional=True)
    q_start = _starts(op, q_start, q_i.shape[0] if q_i.dim() == 4 else None)
    k_stride = checks.common.integer(op, "k_stride", k_stride)
    lse_base = checks.common.number(op, "lse_base", lse_base)
    checks.dense_loss.reduction(op, reduction)
    checks.common.process_group(op, "group", group)
    if deterministic is not None:
        checks.common.boolean(op, "deterministic", deterministic)
    q_i, k_i, q, k = autocast(q_i, k_i, q, k)
    losses, _, largest, _ = torch.ops.htree_cuda.dense_indexer_loss(
        q_i, k_i, weights, q.detach(), k.detach(), lse.detach(), k_start, k_end, sm_scale=sm_scale, q_start=q_start,
        k_stride=k_stride, lse_base=lse_base, group="" if group is None else group.group_name, backend=backend,
    )  # fmt: skip
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (largest != -math.inf).sum().clamp(min=1) if reduction == "mean" else total
