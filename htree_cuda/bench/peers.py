"""The attentions that are measured beside ours, in the same process on the same data."""

from __future__ import annotations

import importlib.metadata
import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor

PEER_DIFFERENCE = 0.02  # of the largest entry: beyond it a peer does not compute the same


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The peer: PyTorch's SDPA, causal with the queries at the end; cuDNN first on a GPU. RoPE is not in its time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[2] == k.shape[2]:
        causal = {"is_causal": True}
    else:
        from torch.nn.attention.bias import causal_lower_right

        causal = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if q.is_cuda:
        backends = [SDPBackend.CUDNN_ATTENTION, *backends]
    with sdpa_kernel(backends, set_priority=True):
        return sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **causal)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, of the largest entry."""
    return ((found.float() - expected.float()).abs().amax() / expected.abs().amax()).item()


def cudnn_attn_dist(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor) -> Callable[[], Tensor] | None:
    """The peer: cuDNN frontend's recompute of sparse attention scores, which divides each row by its sum. None where
    the package is not installed. Source: docs.nvidia.com/cudnn, DeepSeek Sparse Attention."""
    try:
        from cudnn import DSA
    except ImportError:
        return None
    operands = (q[None], k[None, :, 0], (lse * math.log(2.0))[None], indices[None, :, 0], q.shape[2] ** -0.5)
    return lambda: DSA.sparse_attn_score_recompute_wrapper(*operands, qhead_per_kv_head=q.shape[1])["target"]


def flash_mla_attention(q: Tensor, kv: Tensor, indices: Tensor) -> Callable[[], Tensor] | None:
    """The peer: FlashMLA's sparse prefill, whose values are the first 512 columns and which leaves an lse too. None
    where the package is not installed or its kernel lacks the shape. Source: github.com/deepseek-ai/FlashMLA."""
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError:
        return None
    _, h_q, d_qk = q.shape
    if q.dtype != torch.bfloat16 or d_qk != 576 or h_q % 64 or indices.shape[2] % 128:
        return None
    options = _flash_mla_options(flash_mla_sparse_fwd)
    return lambda: flash_mla_sparse_fwd(q, kv, indices, d_qk**-0.5, **options)[0]


def _flash_mla_options(function: Callable) -> dict:
    """sgl-flash-mla keeps the kernels for Hopper apart as legacy ones, and has them write an lse to base 2 as ours does
    where that is asked for: else launches follow that convert it."""
    known = inspect.signature(function).parameters
    return {name: True for name in ("use_legacy", "return_log2_lse") if name in known}


def flash_mla_identity() -> dict:
    """Its version, null where it says none, the distribution that it came in, and what a build of its own notes."""
    import flash_mla

    found = {"version": getattr(flash_mla, "__version__", None)}
    if names := importlib.metadata.packages_distributions().get("flash_mla"):
        found["distribution"] = names[0]
    if note := getattr(flash_mla, "__note__", None):
        found["note"] = note
    return found
