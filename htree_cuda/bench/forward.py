"""`bench forward`: htree attention beside dense attention over lengths."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable

from .. import forward
from ..definition import layer_sizes
from .inputs import DTYPES, tree_inputs, visited
from .peers import dense_attention
from .phases import phases
from .protocol import measure, measure_once

MMA_TFLOPS = 600  # that `mma.sync` sustains on an H200: the floor of forward by its FLOPs


def point(args: argparse.Namespace, T: int, kind: str) -> dict:
    dtype = DTYPES[args.dtype]
    T_q = min(T, args.queries or T)
    options = {"compression_rate": args.compression_rate, "top_k_per_layer": args.top_k, "backend": args.backend}

    def timed(seed: int):
        inputs = tree_inputs(
            kind, args.batch, T, T_q, args.heads, args.kv_heads, args.dim, args.dim, dtype, args.device, seed
        )
        return inputs, measure(lambda: forward(*inputs, **options), args.device)

    seeds = range(args.seed + 1, args.seed + args.seeds)
    others = {seed: timed(seed)[1]["ms"] for seed in seeds}
    (q, k, v), result = timed(args.seed)
    result["ms_by_seed"] = {args.seed: result["ms"], **others}
    r, max_top = args.compression_rate, args.top_k * args.compression_rate
    candidates, leaves = visited(T, T - T_q, T, r, args.top_k, max_top)
    flops = args.batch * args.heads * (2 * args.dim * candidates + 2 * args.dim * leaves)
    # Keys of candidates and values of leaves, fetched for each query by itself.
    gathered = args.batch * args.kv_heads * dtype.itemsize * args.dim * (candidates + leaves)
    result |= {
        "op": "forward", "inputs": kind, "T": T, "T_q": T_q, "B": args.batch, "H": args.heads, "H_kv": args.kv_heads,
        "K": args.dim, "V": args.dim, "dtype": args.dtype, "compression_rate": r, "top_k": args.top_k,
        "layers": len(layer_sizes(T, r, max_top)), "candidates_per_query": candidates / T_q, "flops": flops,
        "gathered_bytes": gathered,
        "input_bytes": sum(x.numel() * x.element_size() for x in (q, k, v)), "backend": args.backend,
    }  # fmt: skip
    result["tflops"] = round(flops / result["ms"] / 1e9, 4)
    result["gathered_tb_per_s"] = round(gathered / result["ms"] / 1e9, 4)
    result["us_per_query"] = round(1e3 * result["ms"] / (args.batch * T_q), 3)
    if args.device == "cuda":
        result["floor_ms"] = round(flops / MMA_TFLOPS / 1e9, 4)
    if max(args.dense_up_to, args.dense_once) >= T:
        timed_peer = measure if args.dense_up_to >= T else measure_once
        result["dense"] = timed_peer(lambda: dense_attention(q, k, v), args.device)
        result["speedup_over_dense"] = round(result["dense"]["ms"] / result["ms"], 4)
    if args.device == "cuda" and args.backend != "torch":
        result["phases_ms"] = phases(lambda: forward(q, k, v, **options))
    if args.device == "cpu":
        result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def _in_child(function: Callable, args: argparse.Namespace, *point) -> dict:
    """A fresh process for each CPU point, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (args, *point))


def run(args: argparse.Namespace) -> list[dict]:
    figures = []
    points = [(T, kind) for kind in args.inputs for T in args.lengths]
    for i, (T, kind) in enumerate(points, 1):
        print(f"[{i}/{len(points)}] forward T = {T}, {kind} ...", file=sys.stderr, flush=True)
        one = _in_child(point, args, T, kind) if args.device == "cpu" else point(args, T, kind)
        figures.append(one)
    return figures


COLUMNS = {
    "inputs": lambda f: f["inputs"],
    "T": lambda f: f"{f['T']:,}",
    "queries": lambda f: f"{f['T_q']:,}",
    "layers": lambda f: str(f["layers"]),
    "candidates/query": lambda f: f"{f['candidates_per_query']:.0f}",
    "ms": lambda f: f"{f['ms']:.2f}",
    "us/query": lambda f: f"{f['us_per_query']:.2f}",
    "TFLOP/s": lambda f: f"{f['tflops']:.1f}",
    "dense ms": lambda f: f"{f['dense']['ms']:.2f}" if "dense" in f else "-",
    "speedup": lambda f: f"{f['speedup_over_dense']:.2f}" if "dense" in f else "-",
    "peak MB": lambda f: f"{f.get('peak_bytes', f.get('peak_rss_bytes', 0)) / 1e6:.0f}",
}
