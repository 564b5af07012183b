"""How many candidates one walk for importance and values would have to put off.

A layer that selects walks its candidates three times: for the softmax denominator, for importance, for the values of
those that were not selected. The last two could be one walk if it were known of most candidates, as they pass, that
they will not be selected: those whose importance is below a bound that top_k candidates or more reach. Others are put
off until the selection is known. This program takes the bound from a sample of a query's own candidates, whole tiles
of 64 a constant distance apart, at such a rank that `--put-off` times top_k are expected beyond it, and counts: what
is put off and not selected (work that comes back), and queries whose bound fails, of which all would have to be
walked again.

    python tools/model_put_off.py [--top-k 512] [--lengths 32768,131072] [--sample 256,512] [--queries 64]

Entry layers, the inputs of the benchmark (inputs.tree_inputs), K = V = 128, float32 on the CPU; see
lab/frozen/htree_layer.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from htree_cuda import definition
from htree_cuda.bench import inputs

TILE = 64


def importances(q: torch.Tensor, k: torch.Tensor, t: int) -> torch.Tensor:
    """Of the nodes before the one that holds token t. q: [H, K] of the query, k: [nodes, K]; RoPE by node."""
    n = t // 16
    places = torch.arange(n + 1)
    keys = definition.rope(k[: n + 1], places, 10000.0)
    query = definition.rope(q, torch.full((len(q),), n), 10000.0)
    scores = query @ keys[:n].T * q.shape[-1] ** -0.5
    return scores.softmax(-1).sum(0)


def bound(x: torch.Tensor, top_k: int, sample: int, put_off: float) -> float:
    """The value whose rank in the sample is that of put_off * top_k in all."""
    tiles = len(x) // TILE
    step = max(tiles * TILE // sample, 1)
    some = torch.cat([x[tile * TILE : (tile + 1) * TILE] for tile in range(step // 2, tiles, step)])
    rank = min(int(put_off * top_k * len(some) / len(x)), len(some) - 1)
    return some.sort(descending=True).values[rank].item()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top-k", type=int, default=512)
    parser.add_argument("--lengths", default="32768,65536,131072")
    parser.add_argument("--sample", default="256,512")
    parser.add_argument("--put-off", default="1.5,1.8,2.2")
    parser.add_argument("--queries", type=int, default=64)
    args = parser.parse_args(argv)
    print("| T | inputs | sampled | wanted, top_k | put off and not selected, top_k | bounds that fail |")
    print("|---|---|---|---|---|---|")
    for T in map(int, args.lengths.split(",")):
        for kind in ("iid", "local"):
            q, k, _ = inputs.tree_inputs(kind, 1, T, T, 16, 1, 128, 128, torch.float32, "cpu", 0)
            nodes = k[0, : T // 16 * 16, 0].unflatten(0, (-1, 16)).mean(1)
            first = max(T // 2, 3 * args.top_k * 16)
            ts = torch.linspace(first, T - 1, args.queries).long().tolist()
            rows = [importances(q[0, t], nodes, t) for t in ts]
            for sample in map(int, args.sample.split(",")):
                for put_off in map(float, args.put_off.split(",")):
                    beyond = [int((x >= bound(x, args.top_k, sample, put_off)).sum()) for x in rows]
                    fails = sum(n <= args.top_k for n in beyond)
                    back = sum(max(n - args.top_k, 0) for n in beyond) / len(beyond) / args.top_k
                    counts = f"{back:.2f} | {fails} of {len(rows)}"
                    print(f"| {T:,} | {kind} | {sample} | {put_off} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
