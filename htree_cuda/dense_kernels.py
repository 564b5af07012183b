"""Dense attention's distribution and lse by the kernels over index lists: one list of all rows, expanded over the
queries, so that it takes 4 bytes a key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import kernels
from .params import start_of

MAX_HEADS = 512  # of a launch of attn_dist, whose result has a row for every 64 of them
MAX_OUT_BYTES = 64 << 20  # of the values that sparse_attention makes beside an lse
D_V = 512


def _all_rows(first: int, end: int, queries: int, device: torch.device) -> Tensor:
    return torch.arange(first, end, dtype=torch.int32, device=device).expand(1, queries, 1, end - first)


def attention(q: Tensor, k: Tensor, lse: Tensor, sm_scale: float, lse_base: float, acc: torch.dtype) -> Tensor:
    """[n, m]: sum over heads of exp(score - lse) for q [n, h, d], k [m, d], lse [n, h]; every key for every query."""
    n, m = q.shape[0], k.shape[0]
    rows = _all_rows(0, m, n, q.device)
    total = torch.zeros(n, m, dtype=torch.float32, device=q.device)
    for heads, part in zip(q.split(MAX_HEADS, 1), lse.split(MAX_HEADS, 1), strict=True):
        out = total.new_empty(1, (heads.shape[1] + 63) // 64, n, m)
        kernels.attn_dist(
            heads[None], k[None, :, None], rows, part[None], out, sm_scale=sm_scale, q_start=None, k_stride=1,
            topk_length=None, lse_base=lse_base,
        )  # fmt: skip
        total += out[0].sum(0)
    return total.to(acc)


def dense_lse(q: Tensor, k: Tensor, starts: list[int], sm_scale: float) -> Tensor:
    """[B, s_q, h_q] natural lse of dense causal attention, as `torch_backend.dense_loss.dense_lse`; the kernel also
    makes values, a chunk of queries at a time, which are dropped."""
    B, s_q, h_q, _ = q.shape
    lse = torch.empty(B, s_q, h_q, dtype=torch.float32, device=q.device)
    step = max(1, MAX_OUT_BYTES // (h_q * D_V * q.element_size()))
    for b in range(B):
        start = start_of(starts, b)
        for first in range(0, s_q, step):
            chunk = slice(first, min(first + step, s_q))
            part = q[b : b + 1, chunk]
            end = min(k.shape[1], start + chunk.stop)
            rows = _all_rows(0, end, part.shape[1], q.device)
            workspace = q.new_empty(kernels.sparse_attention_workspace(part, rows), dtype=torch.uint8)
            kernels.sparse_attention(
                part, k[b : b + 1], rows, part.new_empty(*part.shape[:3], D_V), lse[b : b + 1, chunk], workspace,
                sm_scale=sm_scale, q_start=[start + first], k_stride=1, topk_length=None, attn_sink=None,
                lse_base=math.e,
            )  # fmt: skip
    return lse
