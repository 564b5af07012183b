"""`python -m htree_cuda bench {forward,backward,attn_dist,sparse_attention} ...`: options, and where results go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from . import attn_dist, backward, forward, sparse_attention
from .inputs import DTYPES
from .plots import plot
from .protocol import identity
from .tables import crossover, table

COMMANDS = {"forward": forward, "backward": backward, "attn_dist": attn_dist, "sparse_attention": sparse_attention}


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m htree_cuda bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    common.add_argument("--backend", choices=["auto", "torch"], default="auto")
    common.add_argument("--dtype", choices=list(DTYPES), default="bfloat16" if cuda else "float32")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--out", type=Path, help="write the figures to this JSON file")
    f = commands.add_parser("forward", parents=[common], help="htree attention against dense attention over T")
    f.add_argument("--lengths", type=_ints, default=_ints("8192,16384,32768,65536,131072"))
    f.add_argument("--queries", type=int, default=0, help="measure the last N queries (0: all of them)")
    f.add_argument("--inputs", type=lambda s: s.split(","), default=["iid"], help="iid, local or both: iid,local")
    f.add_argument(
        "--seeds", type=int, default=1, help="inputs to time: those of --seed, and so many less one after it"
    )
    f.add_argument("--batch", type=int, default=1)
    f.add_argument("--heads", type=int, default=16 if cuda else 8)
    f.add_argument("--kv-heads", type=int, default=1 if cuda else 2)
    f.add_argument("--dim", type=int, default=128 if cuda else 64)
    f.add_argument("--compression-rate", type=int, default=16)
    f.add_argument("--top-k", type=int, default=512 if cuda else 64)
    f.add_argument("--dense-up-to", type=int, default=262144 if cuda else 131072, help="longest T for the dense peer")
    f.add_argument("--dense-once", type=int, default=0, help="longest T for a single call of it, beyond those lengths")
    f.add_argument("--plot", type=Path, help="write a PNG of time per query over T")
    b = commands.add_parser("backward", parents=[common], help="its gradients against dense attention's over T")
    b.add_argument("--lengths", type=_ints, default=_ints("16384,65536,131072" if cuda else "2048,4096"))
    b.add_argument(
        "--inputs", type=lambda s: s.split(","), default=["iid", "local"], help="iid, local or both: iid,local"
    )
    b.add_argument("--batch", type=int, default=1)
    b.add_argument("--heads", type=int, default=16 if cuda else 8)
    b.add_argument("--kv-heads", type=int, default=1 if cuda else 2)
    b.add_argument("--dim", type=int, default=128 if cuda else 64)
    b.add_argument("--compression-rate", type=int, default=16)
    b.add_argument("--top-k", type=int, default=512 if cuda else 16)
    b.add_argument("--dense-up-to", type=int, default=131072, help="longest T for the dense peer")
    lists = argparse.ArgumentParser(add_help=False)
    lists.add_argument("--queries", type=int, default=4096 if cuda else 32)
    lists.add_argument("--heads-list", type=_ints, default=[128, 64])
    lists.add_argument("--topk", type=int, default=2048)
    lists.add_argument("--dim", type=int, default=576)
    d = commands.add_parser("attn_dist", parents=[common, lists], help="attn_dist over numbers of heads and keys")
    d.add_argument("--lengths", type=_ints, default=_ints("4096,16384,65536,131072" if cuda else "4096"))
    s = commands.add_parser(
        "sparse_attention",
        parents=[common, lists],
        help="sparse_attention over numbers of heads and keys, in turns with FlashMLA where it is installed",
    )
    s.add_argument("--lengths", type=_ints, default=_ints("16384,65536" if cuda else "4096"))
    s.add_argument("--value-dim", type=int, default=512)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    command = COMMANDS[args.command]
    figures = command.run(args)
    print(table(figures, command.COLUMNS))
    report = {"program": f"bench {args.command}", **identity(args.device), "figures": figures}
    if args.command == "forward" and any("dense" in f for f in figures):
        for kind in args.inputs:
            at = crossover([f for f in figures if f["inputs"] == kind])
            report.setdefault("crossover", {})[kind] = at
            print(f"{kind}: faster than dense attention from T = {at}" if at else f"{kind}: dense attention is faster")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {args.out}")
    if getattr(args, "plot", None):
        plot(figures, args.plot)
        print(f"wrote {args.plot}")
    return 0
