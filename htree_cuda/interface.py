"""The public functions: defaults, autocast, return conventions. Everything else happens in the ops (`ops.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, ops  # noqa: F401  (importing ops registers torch.ops.htree_cuda)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, floating tensors (float64 apart) take the autocast dtype, as in PyTorch's own attention."""
    device_type = tensors[0].device.type
    # torch.compile of older versions cannot trace the question whether autocast exists: not asked where it does.
    exists = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    if not exists or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_start: int | None = None,
    compression_rate: int = 16,
    top_k_per_layer: int = 512,
    max_top_nodes: int | None = None,
    scale: float | None = None,
    rope_base: float = 10000.0,
    strict_causal: bool = True,
    return_lse: bool = False,
    return_selection: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Hierarchical-tree sparse causal attention.

    Keys and values are mean-pooled into a tree with ``compression_rate`` children per node. Each query walks it from
    the top: it scores the candidates of a layer (RoPE on their places in the candidate list), expands the ``top_k``
    most important ones into the next layer, and attends, in one softmax, to all nodes it did not expand and to the
    tokens it reached. The choice is shared by the query heads of a KV head. With ``T <= max_top_nodes`` the result is
    ordinary dense causal attention with RoPE.

    Args:
        q: [B, T_q, H, K] float16, bfloat16, float32 or float64; queries at the positions
            ``q_start .. q_start + T_q - 1``; K even.
        k: [B, T, H_kv, K], dtype of q; H a multiple of H_kv; query head ``h`` uses KV head ``h // (H / H_kv)``.
            Not rotated: RoPE is part of the operation.
        v: [B, T, H_kv, V], dtype of q.
        q_start: int, 0 .. T - T_q, absolute position of the first query; default: the last T_q positions.
        compression_rate: int, power of two >= 2, children per node; default 16.
        top_k_per_layer: int, power of two >= 1, nodes expanded per layer; default 512.
        max_top_nodes: int, top_k .. top_k * compression_rate, upper bound on the nodes of the top layer;
            default top_k * compression_rate.
        scale: finite float, multiplies the scores; default K ** -0.5.
        rope_base: finite float > 0; default 10000.
        strict_causal: bool; True keeps the node that contains the query's position out of the importance normaliser,
            so that no later token can influence the selection; False is the original formula, which includes it.
        return_lse: bool; also return lse.
        return_selection: bool; also return the selected nodes.
        backend: "auto": CPU tensors use PyTorch operations, CUDA tensors the Hopper kernels or an error;
            "torch": PyTorch operations on any device.

    Returns:
        out [B, T_q, H, V] in the dtype of q; or a tuple (out[, lse][, selection]).
        lse: [B, T_q, H] float32 (float64 for float64 inputs), natural log of the softmax denominator.
        selection: [L-1, B, T_q, H_kv, top_k] int32; entry ``l - 1`` holds the nodes expanded at layer ``l``,
        ascending, padded with -1; L is the number of layers.
        B = 0 or T_q = 0 give empty tensors. Every query attends at least to itself, so no row is empty.

    Raises:
        TypeError: an argument is not a tensor / number / bool.
        ValueError: a dtype, shape, range or device breaks a rule above; the message names the rule and the value.
        UnsupportedError: backend "auto" and CUDA tensors the kernels do not cover.

    Notes:
        Gradients: out and lse are differentiable with respect to q, k, v (the selection is a constant). The backward
        walks the tree again from the selection, which is kept: 4 (L-1) B T_q H_kv top_k bytes. Second derivatives
        raise. On CUDA, the torch backend's dk and dv use atomic additions unless
        ``torch.use_deterministic_algorithms(True)``; everything else is bitwise repeatable.
        Memory: the torch backend holds the tree (1 + 1/r + ... times k and v), plus a bounded chunk of temporaries; the
        kernels hold the tree, packed, and at most 192 MiB forward; backward see docs/htree_backward.md.
        Support: what the kernels cover is the table in the README; among its limits, scores must stay below 2^26 in
        magnitude, bfloat16 keys below 2^112 and bfloat16 values below 2e37.
        Autocast: q, k, v are cast to the autocast dtype.
        A NaN or infinity reaches the output only where it is attended; later tokens never matter.
        Dropout, masks, packed (varlen) sequences and a cached tree are not supported.

    Example:
        >>> q = torch.randn(1, 4096, 8, 64); k, v = torch.randn(2, 1, 4096, 2, 64)
        >>> out, lse = htree_cuda.forward(q, k, v, top_k_per_layer=32, return_lse=True)

    Source: docs/algorithm.md; the algorithm comes from github.com/skywong14/htree.
    """
    op = "forward"
    checks.backend_name(op, backend)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.tensor(op, name, x)
    checks.integer(op, "q_start", q_start, optional=True)
    checks.integer(op, "compression_rate", compression_rate)
    checks.integer(op, "top_k_per_layer", top_k_per_layer)
    checks.integer(op, "max_top_nodes", max_top_nodes, optional=True)
    checks.number(op, "scale", scale, optional=True)
    checks.number(op, "rope_base", rope_base)
    for name, flag in (
        ("strict_causal", strict_causal), ("return_lse", return_lse), ("return_selection", return_selection)
    ):  # fmt: skip
        checks.boolean(op, name, flag)
    q, k, v = _autocast(q, k, v)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    options = {
        "q_start": q_start, "compression_rate": compression_rate, "top_k_per_layer": top_k_per_layer,
        "max_top_nodes": max_top_nodes, "scale": scale, "rope_base": rope_base, "strict_causal": strict_causal,
        "backend": backend,
    }  # fmt: skip
    need_selection = return_selection or needs_grad
    out, lse, selection = torch.ops.htree_cuda.forward(q, k, v, need_selection=need_selection, **options)
    extra = ([lse] if return_lse else []) + ([selection] if return_selection else [])
    return (out, *extra) if extra else out


def attn_dist(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    lse_base: float = 2,
    backend: str = "auto",
) -> Tensor:
    """Attention probabilities over a sparse index list, summed over groups of 64 heads.

    For each group of 64 query heads and each slot ``j`` of a query's index list, the sum over the group's heads of
    ``exp(<q, k[indices[j]]> * sm_scale - lse)``: the target of the indexer loss of DeepSeek Sparse Attention. It is
    not normalised, so partial sums over heads may be added across ranks.

    Args:
        q: [s_q, h_q, d_qk] float16, bfloat16, float32 or float64. Either no tensor or every tensor has a leading
            batch dimension B.
        k: [s_kv, 1, d_qk], dtype of q (multi-query attention: one KV head).
        indices: [s_q, 1, topk] int32, key rows of each query; anything outside ``[0, s_kv)`` is an invalid slot;
            a row named twice counts in each of its slots.
        lse: [s_q, h_q] float32 (float64 where q is), log-sum-exp of the *scaled* scores in base ``lse_base``.
        sm_scale: finite float, natural score scale; default d_qk ** -0.5.
        q_start: int >= 0, absolute position of query 0 (a list of B of them when batched); default None: no causal
            rule, k_stride is ignored.
        k_stride: int >= 1; key row i is visible to query s iff ``i <= (q_start + s + 1) // k_stride - 1``.
        topk_length: [s_q] int32; slots at and past it are invalid; default None: all slots count.
        lse_base: 2 or math.e (what `forward` and current FlashMLA return); default 2.
        backend: "auto" or "torch", as in `forward`.

    Returns:
        [ceil(h_q / 64), s_q, topk] float32 (float64 for float64 inputs), batched [B, ceil(h_q / 64), s_q, topk].
        Invalid slots hold 0; every element is written. A head with an infinite lse (of either sign) contributes 0, a
        NaN lse gives NaN in the valid slots of its group. It never requires grad.
        s_q = 0, topk = 0 or B = 0 give an empty tensor, s_kv = 0 gives zeros.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`.

    Notes:
        Deterministic. Keys that no valid slot names are never used, whatever they hold.
        Autocast: q and k are cast to the autocast dtype; lse is not.

    Example:
        >>> q, k = torch.randn(16, 8, 64), torch.randn(256, 1, 64)
        >>> indices = torch.randint(0, 256, (16, 1, 32), dtype=torch.int32)
        >>> s = torch.einsum("shd,skd->shk", q, k[indices[:, 0].long(), 0]) * 64**-0.5
        >>> dist = htree_cuda.attn_dist(q, k, indices, s.logsumexp(2), lse_base=math.e)  # rows sum to 8

    Source: the indexer loss of DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/algorithm.md.
    """
    op = "attn_dist"
    checks.backend_name(op, backend)
    for name, x in (("q", q), ("k", k), ("indices", indices), ("lse", lse)):
        checks.tensor(op, name, x)
    if topk_length is not None:
        checks.tensor(op, "topk_length", topk_length)
    checks.number(op, "sm_scale", sm_scale, optional=True)
    if q_start is not None:
        if not isinstance(q_start, Sequence):
            q_start = [q_start] * (q.shape[0] if q.dim() == 4 else 1)
        q_start = list(q_start)
        for start in q_start:
            checks.integer(op, "q_start", start)
    checks.integer(op, "k_stride", k_stride)
    checks.number(op, "lse_base", lse_base)
    q, k = _autocast(q, k)
    return torch.ops.htree_cuda.attn_dist(
        q.detach(),
        k.detach(),
        indices,
        lse.detach(),
        topk_length,
        sm_scale=sm_scale,
        q_start=q_start,
        k_stride=k_stride,
        lse_base=lse_base,
        backend=backend,
    )
