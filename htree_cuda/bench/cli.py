"""`python -m htree_cuda bench COMMAND ...`: the options of every command, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import checks
from . import (
    attn_dist,
    backward,
    budgets,
    context_parallel,
    decode,
    dsa,
    dsa_decode,
    forward,
    indexer,
    packed,
    sparse_attention,
)
from .inputs import DTYPES, KINDS, RANDOM
from .plots import check_name, plot
from .protocol import Short, identity, write_whole
from .tables import break_even, table

COMMANDS = {
    "forward": forward, "backward": backward, "decode": decode, "attn_dist": attn_dist,
    "sparse_attention": sparse_attention, "dsa": dsa, "dsa_decode": dsa_decode, "indexer": indexer,
    "context_parallel": context_parallel, "packed": packed, "budgets": budgets,
}  # fmt: skip


LARGEST_SEED = (1 << 63) - 1  # Benchmarks add small numbers to a seed, and torch takes 64 bits.


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _ints(text: str) -> list[int]:
    numbers = [_whole(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"every number must be at least 1, got {text}")
    return numbers


def _size(text: str, least: int = 1) -> int:
    if _whole(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
    return int(text)


def _count(text: str) -> int:
    return _size(text, least=0)


def _seed(text: str) -> int:
    if not -LARGEST_SEED - 1 <= _whole(text) <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"must lie in -2^63 .. 2^63 - 1, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, got {text}")
    return float(text)


def _names(text: str, known: Iterable[str]) -> list[str]:
    """Names between commas, each one known. An empty name is shown as ''."""
    names = text.split(",")
    if unknown := set(names) - set(known):
        shown = ", ".join(name or repr(name) for name in sorted(unknown))
        raise argparse.ArgumentTypeError(f"{shown}: must be of {', '.join(known)}, got {text!r}")
    return names


def _types(text: str) -> str:
    if text:
        _names(text, indexer.TYPES)
    return text


def _kinds(text: str) -> list[str]:
    return _names(text, KINDS)


def _layouts(text: str) -> list[str]:
    return _names(text, checks.distributed.LAYOUTS)


def _ops(text: str) -> list[str]:
    return _names(text, indexer.OPS)


def _common(cuda: bool) -> argparse.ArgumentParser:
    """Options of every command."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="where to measure")
    add("--backend", choices=["auto", "torch"], default="auto", help="as htree_cuda.forward takes it")
    add("--dtype", choices=list(DTYPES), default="bfloat16" if cuda else "float32", help="of every input")
    add("--seed", type=_seed, default=0, help="of the random inputs")
    add("--out", type=Path, help="write the figures to this JSON file")
    return parser


def _tree(cuda: bool) -> argparse.ArgumentParser:
    """Options of forward and backward."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--batch", type=_size, default=1, help="B, sequences")
    add("--heads", type=_size, default=16 if cuda else 8, help="H, query heads")
    add("--kv-heads", type=_size, default=1 if cuda else 2, help="H_kv, KV heads; divides --heads")
    add("--dim", type=_size, default=128 if cuda else 64, help="K = V, head dimension of keys and of values")
    add("--compression-rate", type=_size, default=16, help="children per node")
    return parser


def _decode(cuda: bool) -> argparse.ArgumentParser:
    """Options of decode, whose every combination is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="six shapes from 1 x 32K to 64 x 32K and 1 x 1M, top_k 512 and 64")
    add("--batches", type=_ints, default="1,4,16,64" if cuda else "1,4", help="each B, sequences, to measure")
    add("--lengths", type=_ints, default="8192,32768,131072,1048576" if cuda else "2048,8192", help="each T, tokens")
    add("--heads", type=decode.heads, default="16/1,64/8,32/8" if cuda else "8/2", help="pairs of H and H_kv")
    add("--top-k", type=_ints, default="64,512" if cuda else "16,64", help="nodes expanded per layer, each")
    add("--dim", type=_size, default=128 if cuda else 64, help="K = V, head dimension of keys and of values")
    add("--dense-up-to", type=int, default=1 << 20, help="longest T at which dense attention runs")
    return parser


def _cases(text: str) -> list[str]:
    return _names(text, packed.CASES)


def _packed(cuda: bool) -> argparse.ArgumentParser:
    """Options of packed, whose every combination is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--total", type=_size, default=65536 if cuda else 2048, help="tokens of a pack")
    add("--heads", type=decode.heads, default="16/1,32/8" if cuda else "8/2", help="pairs of H and H_kv")
    add("--top-k", type=_ints, default="64,512" if cuda else "16", help="nodes expanded per layer, each")
    add("--dim", type=_size, default=128 if cuda else 64, help="K = V, head dimension of keys and of values")
    add("--cases", type=_cases, default=",".join(packed.CASES), help="which packs: " + ", ".join(packed.CASES))
    add("--backward", action="store_true", help="also the gradients alone")
    return parser


def _lists(cuda: bool) -> argparse.ArgumentParser:
    """Options of attn_dist and sparse_attention."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--queries", type=_size, default=4096 if cuda else 32, help="s_q, queries")
    add("--heads-list", type=_ints, default=[128, 64], help="each h_q, query heads, to measure")
    add("--topk", type=_size, default=2048, help="slots of each query's index list")
    add("--dim", type=_size, default=576, help="d_qk, head dimension of queries and keys")
    return parser


def _dsa_decode(cuda: bool) -> argparse.ArgumentParser:
    """Options of dsa_decode, whose every combination is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--batches", type=_ints, default="1,8,32" if cuda else "1", help="each B, sequences, to measure")
    add("--lengths", type=_ints, default="16384,65536,131072" if cuda else "4096", help="each s_kv, keys, to measure")
    add("--heads-list", type=_ints, default=[128] if cuda else [16], help="each h_q, query heads, to measure")
    add("--topk", type=_size, default=2048 if cuda else 256, help="slots of each query's index list")
    add("--dim", type=_size, default=576, help="d_qk, head dimension of queries and keys")
    add("--value-dim", type=_size, default=512, help="d_v, columns of a key row that are its value")
    add("--index-heads", type=_size, default=64 if cuda else 8, help="h_i, heads of the indexer")
    add("--index-dim", type=_size, default=128, help="d_i, head dimension of the indexer")
    return parser


def _context_parallel(cuda: bool) -> argparse.ArgumentParser:
    """Options of context_parallel."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="heads 16/1 and 32/8, top_k 512 and 64, in place of --heads and --top-k")
    add("--lengths", type=_ints, default="131072,1048576" if cuda else "2048", help="each T of all ranks to measure")
    add("--layouts", type=_layouts, default="zigzag,contiguous", help="which tokens a rank has: one or both")
    add("--inputs", choices=RANDOM, default="iid", help="kind of input")
    add("--top-k", type=_size, default=512 if cuda else 16, help="nodes expanded per layer")
    add("--no-single", action="store_true", help="leave out one rank alone, which needs the memory for it")
    add("--weak-up-to", type=int, default=131072, help="longest T whose share of a rank is also measured alone")
    add("--plot", type=Path, help="write a PNG of the speedup over T")
    return parser


def _budgets(cuda: bool) -> argparse.ArgumentParser:
    """Options of budgets, whose every combination is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--heads", type=decode.heads, default="32/8,64/8,16/1,16/16" if cuda else "8/2", help="pairs of H and H_kv")
    add("--top-k", type=_ints, default="64,128,512" if cuda else "16", help="nodes expanded per layer, each")
    lengths = "32768,65536,16384,131072,8192,262144" if cuda else "1024,2048"
    add("--lengths", type=_ints, default=lengths, help="each T, tokens, in the order in which a limit cuts them off")
    add("--inputs", type=_kinds, default="iid,local,trained" if cuda else "iid", help="of iid, local, trained")
    add("--dim", type=_size, default=128 if cuda else 64, help="K = V, head dimension of keys and of values")
    add("--compression-rate", type=_size, default=16, help="children per node")
    add("--dense-up-to", type=int, default=262144, help="longest T at which dense attention runs")
    add("--forward-only", action="store_true", help="time forwards alone, and no kernels one by one")
    add("--phases-at", type=_ints, default="65536", help="each T whose kernels are also timed one by one")
    add(
        "--limit-s",
        type=_seconds,
        default=0.0,
        help="begin no row after so many seconds and name those left; 0: no limit",
    )
    add("--warm-up-s", type=_seconds, default=Short.warm_up_s, help="seconds of calls before those that count")
    add("--timed-s", type=_seconds, default=Short.timed_s, help="seconds of calls that count, at least")
    add("--long-s", type=_seconds, default=Short.long_s, help="a call that takes so many seconds counts once")
    return parser


def _indexer(cuda: bool) -> argparse.ArgumentParser:
    """Options of indexer."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--queries", type=_size, default=4096 if cuda else 64, help="s_q, queries")
    add("--topk", type=_size, default=2048 if cuda else 256, help="slots of each query's index list")
    add("--index-heads", type=_size, default=64 if cuda else 8, help="h_i, heads of the indexer")
    add("--index-dim", type=_size, default=128 if cuda else 64, help="d_i, head dimension of the indexer")
    add(
        "--types",
        type=_types,
        default="",
        help="dtypes of q and k, float8_e4m3fn among them, comma-separated; empty: --dtype",
    )
    ops = ", ".join(indexer.OPS)
    add("--ops", type=_ops, default=",".join(indexer.OPS), help=f"of {ops}; the first two hold [s_q, s_kv] float32")
    return parser


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m htree_cuda bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common, tree, lists = _common(cuda), _tree(cuda), _lists(cuda)

    def command(name: str, shape: argparse.ArgumentParser, text: str) -> Callable:
        formatter = argparse.ArgumentDefaultsHelpFormatter
        return commands.add_parser(name, parents=[common, shape], help=text, formatter_class=formatter).add_argument

    add = command("forward", tree, "htree attention against dense attention over T")
    add("--lengths", type=_ints, default="8192,16384,32768,65536,131072", help="each T, tokens of context, to measure")
    add("--queries", type=_count, default=0, help="measure the last N queries; 0: all of them")
    add("--inputs", type=_kinds, default="iid", help="kinds of input, of iid, local, trained")
    add("--seeds", type=_size, default=1, help="inputs to time: that of --seed, and as many less one after it")
    add("--top-k", type=_size, default=512 if cuda else 64, help="nodes expanded per layer")
    add("--dense-up-to", type=int, default=262144 if cuda else 131072, help="longest T at which dense attention runs")
    add("--dense-once", type=int, default=0, help="longest T for a single call of it, beyond those lengths")
    add("--plot", type=Path, help="write a PNG of time per query over T")
    add = command("backward", tree, "gradients of htree attention against dense attention's over T")
    add("--lengths", type=_ints, default="16384,65536,131072" if cuda else "2048,4096", help="each T to measure")
    add("--inputs", type=_kinds, default="iid,local", help="kinds of input, of iid, local, trained")
    add("--top-k", type=_size, default=512 if cuda else 16, help="nodes expanded per layer")
    add("--dense-up-to", type=int, default=131072, help="longest T at which dense attention runs")
    add = command("decode", _decode(cuda), "a step of decoding from a cached tree against dense attention over T")
    add("--plot", type=Path, help="write a PNG of time per step over T")
    parent = argparse.ArgumentParser(
        add_help=False, parents=[_context_parallel(cuda), tree], conflict_handler="resolve"
    )
    command("context_parallel", parent, "one sequence over several ranks, started by torchrun")
    command("budgets", _budgets(cuda), "forward, backward and both by group, budget and length, beside dense attention")
    command("packed", _packed(cuda), "packed sequences beside batches, their documents and PyTorch's own")
    add = command("attn_dist", lists, "attn_dist over numbers of heads and keys, beside cuDNN frontend's operation")
    add("--lengths", type=_ints, default="4096,16384,65536,131072" if cuda else "4096", help="each s_kv, keys")
    add = command("sparse_attention", lists, "sparse_attention over numbers of heads and keys, beside FlashMLA")
    add("--lengths", type=_ints, default="16384,65536" if cuda else "4096", help="each s_kv, keys, to measure")
    add("--value-dim", type=_size, default=512, help="d_v, columns of a key row that are its value")
    add("--backward", action="store_true", help="the gradients in its place, atomic and deterministic, ascending lists")
    add = command("dsa", lists, "a decoder step of DeepSeek Sparse Attention: each piece and the whole")
    add("--lengths", type=_ints, default="16384,65536" if cuda else "1024", help="each s_kv, keys, to measure")
    add("--value-dim", type=_size, default=512, help="d_v, columns of a key row that are its value")
    add("--index-heads", type=_size, default=64, help="h_i, heads of the indexer")
    add("--index-dim", type=_size, default=128, help="d_i, head dimension of the indexer")
    command("dsa_decode", _dsa_decode(cuda), "a step of decoding of DeepSeek Sparse Attention, beside dense attention")
    add = command("indexer", _indexer(cuda), "the indexer, its selector, and both in one call, over numbers of keys")
    add("--lengths", type=_ints, default="16384,65536,131072" if cuda else "2048", help="each s_kv, keys, to measure")
    return parser


def _check_lengths(option: str, value: int, lengths: list[int]) -> None:
    if value > min(lengths):
        raise ValueError(f"{option} must be at most the smallest of --lengths, {min(lengths)}, got {value}")


def _check_file(option: str, path: Path) -> None:
    """A folder that is missing is made when the file is written, if it can be."""
    try:
        if path.is_dir():
            raise ValueError(f"{option} must name a file, got the folder {path}")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written ({error.strerror})") from None
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: cannot be written ({folder} is no folder)")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: cannot be written ({folder} is not writable)")


def _check(args: argparse.Namespace) -> None:
    """What options ask of each other and of the machine, before anything is measured. Raises ValueError."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA device")
    if args.out:
        _check_file("--out", args.out)
    if getattr(args, "plot", None):
        _check_file("--plot", args.plot)
        check_name(args.plot)
        if getattr(args, "no_single", False):
            raise ValueError(f"--plot {args.plot}: draws the speedup over one rank, which --no-single leaves out")
    if args.command in ("attn_dist", "sparse_attention"):  # Every slot of their index lists holds another key.
        _check_lengths("--topk", args.topk, args.lengths)
    if args.command == "dsa":  # Its queries are the last ones of the sequence.
        _check_lengths("--queries", args.queries, args.lengths)
    if args.command in ("sparse_attention", "dsa", "dsa_decode") and args.value_dim > args.dim:
        raise ValueError(f"--value-dim must be at most --dim, {args.dim}, got {args.value_dim}")
    if args.command == "packed":
        for case in args.cases:
            if args.total < packed.LEAST[case]:
                rule = f"at least {packed.LEAST[case]} for {case} of --cases"
                raise ValueError(f"--total must be {rule}, got {args.total}")


def write(path: Path, report: dict) -> None:
    """The report as JSON; the path holds the one before or this one whole, whenever the run is ended."""
    write_whole(path, json.dumps(report, indent=1) + "\n")


@dataclass(frozen=True)
class Keep:
    """Writes what is measured so far, for a run that is ended before it has all. A class, since a benchmark may hand
    its options to a process of its own."""

    command: str
    device: str
    out: Path | None

    def report(self, figures: list[dict]) -> dict:
        return {"program": f"bench {self.command}", **identity(self.device), "figures": figures}

    def __call__(self, figures: list[dict]) -> None:
        if self.out:
            write(self.out, self.report(figures))


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, and writes what is asked for; returns the exit status."""
    args = _parser().parse_args(argv)
    command = COMMANDS[args.command]
    args.keep = Keep(args.command, args.device, args.out)
    try:
        _check(args)
        figures = command.run(args)
        if figures is not None:  # A rank other than the first has no report.
            _report(args, figures)
    except (ValueError, checks.UnsupportedError) as error:  # a shape that the operation refuses
        print(f"htree_cuda bench {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _report(args: argparse.Namespace, figures: list[dict]) -> None:
    """Prints the table and writes the files. Raises ValueError where one cannot be written."""
    command = COMMANDS[args.command]
    print(table(figures, command.COLUMNS))
    report = args.keep.report(figures)
    if args.command == "budgets":
        report["protocol"] = vars(args.short)
    if args.command in ("forward", "backward") and any("dense" in f for f in figures):  # rows of one shape
        report["break_even"] = T = break_even(figures)
        print(f"break-even: T = {T:,}" if T else "break-even: none, dense attention is faster at the longest T")
    if args.out:
        write(args.out, report)
        print(f"wrote {args.out}")
    if getattr(args, "plot", None):
        getattr(command, "plot", plot)(figures, args.plot)
        print(f"wrote {args.plot}")
