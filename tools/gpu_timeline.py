"""How a call of `forward` passes on a Hopper GPU: by how much each kernel delays the end of the call.

    python tools/gpu_timeline.py [--lengths 65536,131072] [--inputs local] [--launches]

A kernel counts from the end of the one before to its own end (`bench.phases.increments`). Of several calls back to
back the last is shown, by phase, beside the kernels' own times; --launches adds every launch in its order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from content_hash import ROOT

CALLS = 6


def by_phase(rows: Iterable[tuple[str, float, float]], phase_of) -> dict[str, tuple[float, float, int]]:
    """Phase -> sum of the increments, of the kernels' own times, and launches."""
    sums: dict[str, tuple[float, float, int]] = {}
    for name, step, own in rows:
        before = sums.get(phase_of(name), (0.0, 0.0, 0))
        sums[phase_of(name)] = (before[0] + step, before[1] + own, before[2] + 1)
    return sums


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="65536,131072")
    parser.add_argument("--inputs", default="local", choices=["local", "iid"])
    parser.add_argument("--launches", action="store_true", help="every launch, in microseconds")
    args = parser.parse_args(argv)

    sys.path.insert(0, str(ROOT))
    import torch

    import htree_cuda
    from htree_cuda.bench import inputs, phases

    if not torch.cuda.is_available():
        raise SystemExit("gpu_timeline.py needs a CUDA GPU")
    for T in map(int, args.lengths.split(",")):
        q, k, v = inputs.tree_inputs(args.inputs, 1, T, T, 16, 1, 128, 128, torch.bfloat16, "cuda", 0)
        for _ in range(30):  # the clock settles at the power limit
            htree_cuda.forward(q, k, v)
        rows = phases.kernels(lambda: htree_cuda.forward(q, k, v), CALLS)  # noqa: B023
        print(f"T = {T:,}, {args.inputs}: {sum(step for _, step, _ in rows):.2f} ms, {len(rows)} launches")
        for phase, (step, own, count) in by_phase(rows, phases.phase_of).items():
            print(f"  {phase:22s} {step:9.3f} ms  (by the kernels' own times {own:9.3f}) {count:5d} launches")
        if args.launches:
            for name, step, own in rows:
                print(f"    {phases.phase_of(name):22s} {step * 1e3:9.1f} us  (its own time {own * 1e3:9.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
