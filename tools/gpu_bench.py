"""Runs the benchmarks on a Hopper machine: each program of benchmarks/cpp, then `python -m htree_cuda bench ...`.

    python tools/gpu_bench.py [--shard i/n] [--only TEXT] [--list]

Each C++ program prints JSON, which goes to benchmarks/results/<name>.json with the sources' content hash. The
Python benchmark writes its own file.
"""

from __future__ import annotations

import argparse
import json
import sys

from content_hash import ROOT, content_hash
from gpu_common import (
    BINARIES,
    RESULTS,
    benchmark_names,
    end_with_children,
    ensure_built,
    machine,
    parse_shard,
    run,
    today,
)

LIMIT_S = 420

SHAPES = ["--inputs", "iid,local", "--lengths", "16384,65536,131072,262144", "--dense-up-to", "65536"]

# Calls of `python -m htree_cuda bench`, each writing benchmarks/results/<name>.json.
PYTHON_BENCHMARKS = {
    "forward_gpu": [
        "forward",
        "--inputs",
        "iid,local",
        "--seeds",
        "3",
        "--lengths",
        "4096,8192,16384,32768,65536,131072,262144,1048576",
        "--dense-once",
        "1048576",
        "--plot",
        str(RESULTS / "forward_gpu.png"),
    ],
    # More heads, smaller groups, smaller dimensions; the last queries of two million tokens, and one query.
    "forward_gpu_h64_kv4": ["forward", "--heads", "64", "--kv-heads", "4", *SHAPES],
    "forward_gpu_g8": ["forward", "--heads", "8", *SHAPES],
    "forward_gpu_g4": ["forward", "--heads", "32", "--kv-heads", "8", *SHAPES],
    "forward_gpu_d64": ["forward", "--dim", "64", *SHAPES],
    "forward_gpu_2m": ["forward", "--lengths", "2097152", "--queries", "131072", "--inputs", "iid,local"],
    "forward_gpu_one": ["forward", "--lengths", "65536,1048576", "--queries", "1", "--inputs", "iid,local"],
    "forward_gpu_torch": ["forward", "--backend", "torch", "--lengths", "8192,16384,32768"],
    "attn_dist_gpu": ["attn_dist"],
    "sparse_attention_gpu": ["sparse_attention"],
    "sparse_attention_bwd": ["sparse_attention", "--backward"],
    "indexer_gpu": ["indexer", "--types", "bfloat16,float8_e4m3fn"],
    # A whole prefill of 32,768 queries, whose logits exist in parts only.
    "indexer_prefill_gpu": [
        "indexer",
        "--ops",
        "indexer_topk",
        "--queries",
        "32768",
        "--index-heads",
        "32",
        "--lengths",
        "32768,65536,262144",
    ],
    "dsa_decode_gpu": ["dsa_decode"],
    "dsa_gpu": ["dsa", "--heads-list", "128", "--lengths", "65536"],
    "backward_gpu": ["backward"],
    "packed_gpu": ["packed", "--backward"],
    "decode_gpu": ["decode", "--quick", "--plot", str(RESULTS / "decode_gpu.png")],
    # Groups and budgets that models use, for the tables of README.md and docs/performance.md.
    "budgets_gpu": ["budgets"],
}


def run_binary(name: str) -> str:
    """Runs one program and writes its result; returns an outcome."""
    status, output = run([str(BINARIES / name)], LIMIT_S)
    if status != 0:
        return f"failed: exit status {status}\n{output[-3000:]}"
    result = {"content_hash": content_hash(), "date": today(), **json.loads(output)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return f"wrote {path.relative_to(ROOT)}"


def run_python(name: str) -> str:
    """Runs one call of the Python benchmark, which writes its own file; returns an outcome."""
    path = RESULTS / f"{name}.json"
    command = [sys.executable, "-m", "htree_cuda", "bench", *PYTHON_BENCHMARKS[name], "--out", str(path)]
    status, output = run(command, LIMIT_S)
    if status != 0:
        return f"failed: exit status {status}\n{output[-3000:]}"
    print(output)
    return f"wrote {path.relative_to(ROOT)}"


def main(argv: list[str] | None = None) -> int:
    """Runs this shard's benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", help="i/n: the i-th of n parts")
    parser.add_argument("--only", default="", help="benchmarks whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the benchmarks and stop")
    arguments = parser.parse_args(argv)
    end_with_children()
    shard, shards = parse_shard(arguments.shard)
    names = benchmark_names()
    names += PYTHON_BENCHMARKS
    mine = [name for name in names[shard::shards] if arguments.only in name]
    if arguments.list:
        print("\n".join(mine))
        return 0
    machine()
    ensure_built(benchmarks=True)
    failed = 0
    for name in mine:
        outcome = run_python(name) if name in PYTHON_BENCHMARKS else run_binary(name)
        failed += outcome.startswith("failed")
        print(f"{name}: {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
