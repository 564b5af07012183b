"""Inputs of the benchmarks, and what a query visits."""

from __future__ import annotations

import math

import torch

from ..definition import layer_sizes
from . import trained

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
RANDOM = ("iid", "local")
KINDS = (*RANDOM, "trained")
LOCAL_RHO = 0.99


def tree_inputs(kind: str, B: int, T: int, T_q: int, H: int, H_kv: int, K: int, V: int, dtype, device, seed: int):
    """iid: Gaussian q, k, v. local: q_t = rho q_{t-1} + sqrt(1 - rho^2) e, independent over heads and dimensions.
    trained: what trained decoders compute of text (`trained`)."""
    if kind == "trained":
        if B != 1 or K != V:
            raise ValueError(f"inputs trained: B must be 1 and K must equal V, got B = {B}, K = {K}, V = {V}")
        return trained.tree_inputs(T, T_q, H, H_kv, K, dtype, device, seed)
    g = torch.Generator(device=device).manual_seed(seed)
    q = torch.randn(B, T_q, H, K, generator=g, device=device)
    if kind == "local":
        # The recursion in blocks: within one, q_t = rho^t q_0 + sum_s rho^(t-s) sqrt(1-rho^2) e_s is a matrix product.
        block = 512
        i = torch.arange(block, device=device, dtype=torch.float64)
        kernel = torch.where(i[:, None] >= i, LOCAL_RHO ** (i[:, None] - i), 0.0) * math.sqrt(1 - LOCAL_RHO**2)
        kernel, decay = kernel.float(), (LOCAL_RHO ** (i + 1)).float()[:, None]
        last = torch.randn(B, 1, H * K, generator=g, device=device)
        for first in range(0, T_q, block):
            e = q[:, first : first + block].flatten(2)
            n = e.shape[1]
            rows = kernel[:n, :n] @ e + decay[:n] * last
            q[:, first : first + block] = rows.unflatten(2, (H, K))
            last = rows[:, -1:]
    k = torch.randn(B, T, H_kv, K, generator=g, device=device, dtype=dtype)
    v = torch.randn(B, T, H_kv, V, generator=g, device=device, dtype=dtype)
    return q.to(dtype), k, v


def visited(T: int, t0: int, t1: int, r: int, top_k: int, max_top_nodes: int) -> tuple[int, int]:
    """Candidates scored and leaves attended, summed over the queries t0 .. t1-1 of one KV head."""
    layers = len(layer_sizes(T, r, max_top_nodes))
    t = torch.arange(t0, t1, dtype=torch.int64)
    candidates = leaves = 0
    n = t // r ** (layers - 1) + 1
    for layer in reversed(range(layers)):
        candidates += int(n.sum())
        chosen = n.clamp(max=top_k)
        leaves += int((n - chosen).sum() if layer else n.sum())
        if layer:
            n = (chosen - 1) * r + t // r ** (layer - 1) % r + 1
    return candidates, leaves


def list_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d_qk: int, dtype, device, seed: int):
    """q, k and distinct uniform indices for every query, unsorted, all valid."""
    g = torch.Generator(device=device).manual_seed(seed)
    q = torch.randn(s_q, h_q, d_qk, generator=g, device=device, dtype=dtype)
    k = torch.randn(s_kv, 1, d_qk, generator=g, device=device, dtype=dtype)
    indices = torch.empty(s_q, 1, topk, dtype=torch.int32, device=device)
    step = max(1, (1 << 28) // (s_kv * 8))
    for first in range(0, s_q, step):
        rows = slice(first, min(first + step, s_q))
        order = torch.rand(rows.stop - rows.start, s_kv, generator=g, device=device).argsort(1)[:, :topk]
        indices[rows, 0] = order.to(torch.int32)
    return q, k, indices


def dist_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d_qk: int, dtype, device, seed: int):
    """`list_inputs`, and the lse that makes each head's slots sum to one."""
    q, k, indices = list_inputs(s_q, h_q, s_kv, topk, d_qk, dtype, device, seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse = torch.empty(s_q, h_q, dtype=wide, device=device)
    scale = d_qk**-0.5 * math.log2(math.e)
    for s in range(0, s_q, 16):
        gathered = k[indices[s : s + 16, 0].long(), 0].to(wide)
        scores = torch.bmm(q[s : s + 16].to(wide), gathered.transpose(1, 2)) * scale
        lse[s : s + 16] = torch.logsumexp(scores * math.log(2.0), 2) / math.log(2.0)
    return q, k, indices, lse
