"""Runs the benchmarks on a Hopper machine: each program of benchmarks/cpp, then `python -m htree_cuda bench`.

    python scripts/gpu_bench.py [--shard i/n] [--only TEXT] [--list]

Each C++ program prints JSON, which goes to benchmarks/results/<name>.json with the sources' content hash. The
Python benchmark writes its own file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys

from content_hash import ROOT, content_hash
from gpu_common import BINARIES, RESULTS, ensure_built, machine, parse_shard, run, today

LIMIT_S = 420


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


def main(argv: list[str] | None = None) -> int:
    """Runs this shard's benchmarks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", help="i/n: the i-th of n parts")
    parser.add_argument("--only", default="", help="benchmarks whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the benchmarks and stop")
    arguments = parser.parse_args(argv)
    shard, shards = parse_shard(arguments.shard)
    names = [path.stem for path in sorted((ROOT / "benchmarks" / "cpp").glob("*.cu"))]
    sys.path.insert(0, str(ROOT))
    if importlib.util.find_spec("htree_cuda.bench") is not None:
        names.append("python -m htree_cuda bench")
    mine = [name for name in names[shard::shards] if arguments.only in name]
    if arguments.list:
        print("\n".join(mine))
        return 0
    machine()
    ensure_built(benchmarks=True)
    failed = 0
    for name in mine:
        if name.startswith("python"):
            status, output = run([sys.executable, "-m", "htree_cuda", "bench"], LIMIT_S)
            outcome = "done" if status == 0 else f"failed: exit status {status}"
            print(output)
        else:
            outcome = run_binary(name)
        failed += outcome.startswith("failed")
        print(f"{name}: {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
