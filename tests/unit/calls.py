"""Small calls of the ops that several tests share."""

from __future__ import annotations

import torch

TREE = {
    "q_start": None, "compression_rate": 4, "top_k_per_layer": 4, "max_top_nodes": None, "scale": None,
    "rope_base": 100.0, "strict_causal": True,
}  # fmt: skip
SMALL = {"compression_rate": 4, "top_k_per_layer": 4}


def qkv(T=70, T_q=12, H=4, H_kv=2, K=8, V=6, B=1, dtype=torch.float64, grad=False):
    shapes = ((B, T_q, H, K), (B, T, H_kv, K), (B, T, H_kv, V))
    return tuple(torch.randn(*s, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes)


def dist_args(B=None, s_q=5, h_q=66, s_kv=20, topk=9, d_qk=8, dtype=torch.float32):
    batch = () if B is None else (B,)
    q, k = torch.randn(*batch, s_q, h_q, d_qk).to(dtype), torch.randn(*batch, s_kv, 1, d_qk).to(dtype)
    return q, k, torch.randint(-2, s_kv + 2, (*batch, s_q, 1, topk), dtype=torch.int32), torch.randn(*batch, s_q, h_q)
