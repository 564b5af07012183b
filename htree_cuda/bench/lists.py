"""`bench attn_dist` and `bench sparse_attention`: what both count of attention over an index list."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from .inputs import DTYPES


def points(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """h_q and s_kv of each figure, announced."""
    points = [(h_q, s_kv) for h_q in args.heads_list for s_kv in args.lengths]
    for i, (h_q, s_kv) in enumerate(points, 1):
        print(f"[{i}/{len(points)}] {args.command} h_q = {h_q}, s_kv = {s_kv} ...", file=sys.stderr, flush=True)
        yield h_q, s_kv


def figure(args: argparse.Namespace, h_q: int, s_kv: int, measured: dict, d_v: int = 0, gathers: int = 1) -> dict:
    """What was measured, and what it counts: products of d_qk + d_v columns, rows fetched so many times a query."""
    flops = 2 * args.queries * args.topk * h_q * (args.dim + d_v)
    gathered = gathers * args.queries * args.topk * args.dim * DTYPES[args.dtype].itemsize
    return measured | {
        "op": args.command, "s_q": args.queries, "h_q": h_q, "s_kv": s_kv, "topk": args.topk, "d_qk": args.dim,
        **({"d_v": d_v} if d_v else {}), "dtype": args.dtype, "backend": args.backend, "flops": flops,
        "gathered_bytes": gathered, "tflops": round(flops / measured["ms"] / 1e9, 4),
        "gathered_tb_per_s": round(gathered / measured["ms"] / 1e9, 4),
    }  # fmt: skip
