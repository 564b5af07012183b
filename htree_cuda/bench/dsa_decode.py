"""`bench dsa_decode`: a step of decoding of DeepSeek Sparse Attention, beside dense attention to the same latents.

Every sequence has one query. The step is `indexer_topk`, then `sparse_attention` over what it selects; each is also
timed alone, and so is `indexer_topk` of the same numbers in float8_e4m3fn. On a GPU all are captured CUDA graphs that
are replayed, and the step is timed eagerly beside that. Dense attention is SDPA of all heads to all latents, the
fastest of PyTorch's backends.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch

from .. import indexer_topk, quantize_fp8, sparse_attention
from .decode import best, dense, timed
from .inputs import DTYPES


def _figure(args: argparse.Namespace, h_q: int, s_kv: int, B: int) -> dict:
    g = torch.Generator(device=args.device).manual_seed(args.seed)
    dtype = DTYPES[args.dtype]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=args.device, dtype=dtype)

    acc = torch.float64 if dtype == torch.float64 else torch.float32
    q, kv = draw(B, 1, h_q, args.dim), draw(B, s_kv, 1, args.dim)
    q_i, k_i = draw(B, 1, args.index_heads, args.index_dim), draw(B, s_kv, 1, args.index_dim)
    weights = draw(B, 1, args.index_heads).to(acc)
    options = {"q_start": s_kv - 1, "backend": args.backend}

    def select() -> torch.Tensor:
        return indexer_topk(q_i, k_i, weights, args.topk, **options)

    def attend(indices: torch.Tensor) -> torch.Tensor:
        return sparse_attention(q, kv, indices, d_v=args.value_dim, return_lse=False, **options)

    (q_8, q_scale), (k_8, k_scale) = (quantize_fp8(x, block_size=None) for x in (q_i, k_i))
    scales = {"q_scale": q_scale, "k_scale": k_scale}

    def select_fp8() -> torch.Tensor:
        return indexer_topk(q_8, k_8, weights.float(), args.topk, **scales, **options)

    selected = select()
    step = timed(lambda: attend(select()), args.device)
    parts = {
        "indexer_topk": timed(select, args.device, alone=True),
        "sparse_attention": timed(lambda: attend(selected), args.device, alone=True),
        "indexer_topk_fp8": timed(select_fp8, args.device, alone=True),
    }
    keys = kv.transpose(1, 2)
    figure = {
        "op": "dsa_decode", "B": B, "s_kv": s_kv, "h_q": h_q, "topk": args.topk, "d_qk": args.dim,
        "d_v": args.value_dim, "h_i": args.index_heads, "d_i": args.index_dim, "dtype": args.dtype,
        "backend": args.backend, **step, "ms": best(step)["ms"],
        "parts": {name: best(part) for name, part in parts.items()},
    }  # fmt: skip
    figure["dense"] = dense(q, keys, keys[..., : args.value_dim], args.device)
    figure["speedup_over_dense"] = round(figure["dense"]["ms"] / figure["ms"], 4)
    return figure


def run(args: argparse.Namespace) -> list[dict]:
    """One figure for each number of heads, keys and sequences."""
    points = list(itertools.product(args.heads_list, args.lengths, args.batches))
    figures = []
    for i, (h_q, s_kv, B) in enumerate(points, 1):
        text = f"[{i}/{len(points)}] dsa_decode h_q = {h_q}, s_kv = {s_kv}, B = {B} ..."
        print(text, file=sys.stderr, flush=True)
        figures.append(_figure(args, h_q, s_kv, B))
        args.keep(figures)
    return figures


COLUMNS = {
    "h_q": lambda f: str(f["h_q"]),
    "s_kv": lambda f: f"{f['s_kv']:,}",
    "B": lambda f: str(f["B"]),
    "us": lambda f: f"{1e3 * f['ms']:.1f}",
    "indexer_topk": lambda f: f"{1e3 * f['parts']['indexer_topk']['ms']:.1f}",
    "sparse_attention": lambda f: f"{1e3 * f['parts']['sparse_attention']['ms']:.1f}",
    "indexer_topk FP8": lambda f: f"{1e3 * f['parts']['indexer_topk_fp8']['ms']:.1f}",
    "dense": lambda f: f"{1e3 * f['dense']['ms']:.1f}",
    "of dense": lambda f: f["dense"]["backend"],
    "speedup": lambda f: f"{f['speedup_over_dense']:.2f}",
}
