"""`bench indexer`: the lightning indexer, its selector and both in one call, over numbers of keys."""

from __future__ import annotations

import argparse

import torch

from .. import indexer_logits, indexer_topk, quantize_fp8, topk_indices
from .inputs import DTYPES
from .protocol import measure

TYPES = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
OPS = ("topk_indices", "indexer_logits", "indexer_topk")


def _inputs(args: argparse.Namespace, dtype: torch.dtype, s_q: int, s_kv: int) -> tuple[list, dict]:
    """q, k, weights, and the scales of FP8."""
    g = torch.Generator(device=args.device).manual_seed(args.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=args.device)

    h_i, d_i = args.index_heads, args.index_dim
    weights = draw(s_q, h_i) * (h_i * d_i) ** -0.5
    if dtype != torch.float8_e4m3fn:
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        return [draw(s_q, h_i, d_i).to(dtype), draw(s_kv, 1, d_i).to(dtype), weights.to(acc)], {}
    (q, q_scale), (k, k_scale) = (quantize_fp8(draw(*x), block_size=None) for x in ((s_q, h_i, d_i), (s_kv, 1, d_i)))
    return [q, k, weights], {"q_scale": q_scale, "k_scale": k_scale}


def _figure(args: argparse.Namespace, op: str, measured: dict, s_kv: int, dtype: str, flop: float = 0.0) -> dict:
    figure = {"op": op, "s_q": args.queries, "s_kv": s_kv, "dtype": dtype, **measured}
    if op != "indexer_logits":
        figure["topk"] = args.topk
    if op != "topk_indices":
        figure |= {"h_i": args.index_heads, "d_i": args.index_dim, "tflops": round(flop / measured["ms"] / 1e9, 1)}
    return figure


def _selector(args: argparse.Namespace, s_kv: int) -> dict:
    logits = torch.randn(args.queries, s_kv, device=args.device)
    found = measure(lambda: topk_indices(logits, args.topk, backend=args.backend), args.device)
    figure = _figure(args, "topk_indices", found, s_kv, "float32")
    if args.topk <= s_kv:
        figure["torch_topk"] = measure(lambda: torch.topk(logits, args.topk, sorted=False), args.device)
    return figure


def _indexer(args: argparse.Namespace, name: str, s_kv: int) -> list[dict]:
    s_q = args.queries
    (q, k, weights), scales = _inputs(args, TYPES[name], s_q, s_kv)
    options = {**scales, "backend": args.backend}
    flop = 2.0 * s_q * s_kv * args.index_heads * args.index_dim
    figures = []
    if "indexer_logits" in args.ops:
        dense = measure(lambda: indexer_logits(q, k, weights, **options), args.device)
        figures.append(_figure(args, "indexer_logits", dense, s_kv, name, flop))
    if "indexer_topk" in args.ops:
        start = max(s_kv - s_q, 0)
        both = measure(lambda: indexer_topk(q, k, weights, args.topk, q_start=start, **options), args.device)
        visible = sum(min(start + s + 1, s_kv) for s in range(s_q)) / (s_q * s_kv)
        figures.append(_figure(args, "indexer_topk", both, s_kv, name, flop * visible))
    return figures


def run(args: argparse.Namespace) -> list[dict]:
    """indexer_logits sees all keys; indexer_topk has the last queries of the sequence, causal."""
    figures = []
    names = args.types.split(",") if args.types else [args.dtype]
    for s_kv in args.lengths:
        if "topk_indices" in args.ops:
            figures.append(_selector(args, s_kv))
        for name in names:
            figures.extend(_indexer(args, name, s_kv))
            args.keep(figures)
    return figures


COLUMNS = {
    "op": lambda f: f["op"],
    "dtype": lambda f: f["dtype"],
    "heads": lambda f: str(f.get("h_i", "-")),
    "s_q": lambda f: f"{f['s_q']:,}",
    "s_kv": lambda f: f"{f['s_kv']:,}",
    "ms": lambda f: f"{f['ms']:.3f}",
    "p90": lambda f: f"{f['p90_ms']:.3f}",
    "TFLOP/s": lambda f: f"{f['tflops']:.0f}" if "tflops" in f else "-",
    "torch.topk ms": lambda f: f"{f['torch_topk']['ms']:.2f}" if "torch_topk" in f else "-",
}
