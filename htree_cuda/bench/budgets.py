"""`bench budgets`: the rows that every report has, by group, budget and length: forward, backward, and both in a step,
beside dense attention.

The table has hundreds of rows, so a row is measured by `protocol.Short` instead of the protocol of the other commands:
long calls once. Dense attention is measured once for a number of heads and a length, on the first kind of inputs. The
file is written after each row, and a limit of time cuts off the last lengths.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import forward
from .inputs import DTYPES, tree_inputs, visited
from .peers import dense_attention
from .phases import GRADIENT_KERNELS, PHASES, kernels, phase_of
from .protocol import Short, _this_gpu, identity, laps, summary, write_report
from .tables import break_even

Inputs = tuple[Tensor, Tensor, Tensor]

OPS = ("forward", "backward", "both")
TRAINED_GROUPS = (4, 8)  # of the decoders that models have
LAST = 512  # queries of a quarter whose selections are compared with their neighbours'
TOGETHER = (4, 12, 48)  # neighbouring queries of a warp, a tile and a CTA of the forward's kernels for groups of 4
ALONE_UP_TO = 65536  # without groups, and inputs of random kinds alone: a row that says what not to use


def rows(args: argparse.Namespace) -> Iterator[tuple[int, int, int, str]]:
    """T, H, H_kv and kind of inputs; each has a row for every top_k."""
    for T in args.lengths:
        for H, H_kv in args.heads:
            for kind in args.inputs:
                if H_kv == H and (ALONE_UP_TO < T or kind == "trained"):
                    continue
                if kind == "trained" and args.device == "cuda" and H // H_kv not in TRAINED_GROUPS:
                    continue
                yield T, H, H_kv, kind


def _step(attention: Callable[..., Tensor], inputs: Inputs) -> Callable[[Callable[[], None]], object]:
    """A call that marks the end of a forward with gradients and goes on with the backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient: list[Tensor] = []

    def call(mark: Callable[[], None]) -> object:
        out = attention(*leaves)
        if not gradient:  # in the layout of the output, which the first call shows
            gradient.append(torch.randn_like(out))
        mark()
        return torch.autograd.grad(out, leaves, gradient)

    return call


def measured(
    attention: Callable[..., Tensor], inputs: Inputs, device: str, short: Short, alone: bool = True, step: bool = True
) -> dict[str, dict]:
    """Times of the forward, of the backward, and of both in a step. alone: the forward is also timed by itself, without
    gradients, and that is its time; else it is the first part of the step. step: without, nothing else is timed."""

    def peak() -> dict:
        return {"peak_bytes": torch.cuda.max_memory_allocated() - allocated} if device == "cuda" else {}

    def reset() -> int:
        if device == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    found = {}
    if alone:
        allocated = reset()
        with torch.no_grad():
            times = [ms for (ms,) in laps(lambda mark: attention(*inputs), device, short)]
        found["forward"] = summary(times, **peak())
    if not step:
        return found
    allocated = reset()
    steps = laps(_step(attention, inputs), device, short)
    if not alone:
        found["forward"] = summary([first for first, _ in steps])
    found["backward"] = summary([backward for _, backward in steps], **peak())
    found["both"] = summary([sum(step) for step in steps], **peak())
    return found


def _profiled(attention: Callable[..., Tensor], inputs: Inputs) -> dict:
    """What the kernels of a step take, from the end of one to the end of the next: those of the forward by phase, those
    of the backward that multiply by name."""
    step = _step(attention, inputs)
    step(lambda: None)  # the first one draws a gradient besides
    found = kernels(lambda: step(lambda: None), 2)
    sums: dict[str, float] = {}
    for name, ms, _ in found:
        phase = phase_of(name)
        sums[phase] = sums.get(phase, 0.0) + ms
    return {
        "phases_ms": {name: round(sums[name], 4) for name in (*PHASES, "other") if name in sums},
        "kernels_ms": {
            name: round(sum(ms for kernel, ms, _ in found if re.search(text, kernel)), 4)
            for name, text in GRADIENT_KERNELS.items()
        },
    }


@torch.no_grad()
def neighbours(inputs: Inputs, options: dict) -> dict:
    """What neighbouring queries have in common, over the last queries of each quarter of the sequence; empty where
    nothing is selected.

    shared_with_neighbour: the share of a query's blocks of tokens that the query before it has too. distinct_blocks, by
    a number of neighbouring queries: different blocks that these attend, in all layers where blocks are selected,
    divided by how many they name together.
    """
    q, k, v = inputs
    common = named = 0
    distinct, together = dict.fromkeys(TOGETHER, 0), dict.fromkeys(TOGETHER, 0)
    for quarter in range(1, 5):
        end = quarter * q.shape[1] // 4
        queries = slice(max(end - LAST, end - q.shape[1] // 4), end)
        selection = forward(q[:, queries], k[:, :end], v[:, :end], **options, return_selection=True)[-1]
        for i, layer in enumerate(selection[:, 0].transpose(1, 2)):  # [H_kv, T_q, top_k], the bottom's blocks first
            if i == 0:
                pairs = torch.cat((layer[:, 1:], layer[:, :-1]), 2).sort(2).values
                common += ((pairs[..., 1:] == pairs[..., :-1]) & (pairs[..., 1:] >= 0)).sum().item()
                named += (layer[:, 1:] >= 0).sum().item()
            for n in TOGETHER:
                if layer.shape[1] < n:
                    continue
                runs = layer[:, layer.shape[1] % n :].unflatten(1, (-1, n)).flatten(2).sort(2).values
                first = torch.cat((torch.ones_like(runs[..., :1]), runs[..., 1:] != runs[..., :-1]), 2).bool()
                distinct[n] += (first & (runs >= 0)).sum().item()
                together[n] += (runs >= 0).sum().item()
    if not named:
        return {}
    return {
        "shared_with_neighbour": round(common / named, 4),
        "distinct_blocks": {str(n): round(distinct[n] / together[n], 4) for n in TOGETHER if together[n]},
    }


class _Probe:
    """SM clock and power, read once while the rows of a shape run."""

    def __init__(self, device: str):
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        self.found: dict = {}
        self.process = None
        if device == "cuda":
            command = [*query, _this_gpu()]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read(self) -> dict:
        if self.process is not None and not self.found:
            fields = self.process.communicate(timeout=60)[0].split(",")
            if len(fields) == 2:
                self.found = {"clock_mhz": float(fields[0]), "power_w": float(fields[1])}
        return self.found


def _options(args: argparse.Namespace, top_k: int) -> dict:
    return {"compression_rate": args.compression_rate, "top_k_per_layer": top_k, "backend": args.backend}


def _figures(args, T: int, H: int, H_kv: int, kind: str, top_k: int, inputs: Inputs, dense: dict | None) -> list[dict]:
    """One figure an op."""
    options = _options(args, top_k)
    attention = lambda *x: forward(*x, **options)  # noqa: E731
    found = measured(attention, inputs, args.device, args.short, step=not args.forward_only)
    candidates, _ = visited(T, 0, T, args.compression_rate, top_k, top_k * args.compression_rate)
    shape = {
        "inputs": kind, "T": T, "T_q": T, "B": 1, "H": H, "H_kv": H_kv, "K": args.dim, "V": args.dim,
        "dtype": args.dtype, "compression_rate": args.compression_rate, "top_k": top_k, "backend": args.backend,
        "candidates_per_query": candidates / T,
    }  # fmt: skip
    figures = []
    for op in found:
        figure = {"op": op, **shape, **found[op]}
        if dense is not None:
            figure["dense"] = dense[op]
            figure["speedup_over_dense"] = round(dense[op]["ms"] / figure["ms"], 4)
        figures.append(figure)
    return figures


class _Run:
    """A run of the command: its figures, when it began, and what it says meanwhile."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.figures, self.dense = args, [], {}
        self.about = identity(args.device) | {"protocol": vars(args.short)}
        self.started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def say(self, text: str) -> None:
        print(f"[{self.seconds():.0f} s] {text}", file=sys.stderr, flush=True)

    def late(self, left: list) -> bool:
        """Whether the time is over; says what is left out."""
        if not self.args.limit_s or self.seconds() <= self.args.limit_s:
            return False
        self.say(f"left out, after {self.args.limit_s:g} s: {'; '.join(map(str, left))}")
        return True

    def write(self) -> None:
        if self.args.out:
            write_report(self.args.out, "bench budgets", self.about, self.figures)

    def inputs(self, T: int, H: int, H_kv: int, kind: str) -> Inputs:
        dim, dtype = self.args.dim, DTYPES[self.args.dtype]
        return tree_inputs(kind, 1, T, T, H, H_kv, dim, dim, dtype, self.args.device, self.args.seed)

    def rows(self, T: int, H: int, H_kv: int, kind: str) -> None:
        """Measures every budget of a shape and kind of inputs."""
        args, at = self.args, (T, H, H_kv)
        inputs = self.inputs(T, H, H_kv, kind)
        if at not in self.dense and args.dense_up_to >= T:
            only = args.forward_only
            found = measured(dense_attention, inputs, args.device, args.short, alone=only, step=not only)
            self.dense[at] = {op: {**x, "inputs": kind} for op, x in found.items()}
            times = " + ".join(f"{found[op]['ms']:.2f}" for op in OPS[:2] if op in found)
            self.say(f"T {T:,} H {H}/{H_kv} dense: {times}")
        probe, words = _Probe(args.device), []
        for top_k in args.top_k:
            found = _figures(args, T, H, H_kv, kind, top_k, inputs, self.dense.get(at))
            self.figures += [f | probe.read() for f in found]
            words.append(f"{top_k}: " + " + ".join(f"{f['ms']:.2f}" for f in found[:2]))
            self.write()
        self.say(f"T {T:,} H {H}/{H_kv} {kind}: {'  '.join(words)}")

    def kernels(self, T: int, H: int, H_kv: int, kind: str) -> None:
        """Adds to the figures of both in a step what neighbours have in common and, for inputs that have neighbours,
        what kernels take, where the profiler saw all of them."""
        inputs = self.inputs(T, H, H_kv, kind)
        for figure in self.figures:
            if (figure["op"], figure["T"], figure["H"], figure["H_kv"], figure["inputs"]) != ("both", T, H, H_kv, kind):
                continue
            options = _options(self.args, figure["top_k"])
            figure |= neighbours(inputs, options)
            if self.args.device == "cuda" and self.args.backend != "torch" and kind == "local":
                try:
                    figure |= _profiled(lambda *x: forward(*x, **options), inputs)  # noqa: B023
                except ValueError as error:
                    self.say(f"kernels not measured: {error}")
            self.say(
                f"T {T:,} H {H}/{H_kv} {kind} top_k {figure['top_k']}: shared {figure.get('shared_with_neighbour')} "
                f"{figure.get('distinct_blocks', '')} "
                f"{figure.get('phases_ms', '')} {figure.get('kernels_ms', '')}"
            )
        self.write()


def run(args: argparse.Namespace) -> list[dict]:
    args.short = Short(args.warm_up_s, args.timed_s, args.long_s)
    run = _Run(args)
    points = list(rows(args))
    longest = {(H, H_kv): T for T, H, H_kv, kind in points if kind == "trained"}
    for (H, H_kv), T in longest.items():  # once for the longest sequence, which shorter ones are cut from
        run.inputs(T, H, H_kv, "trained")
        run.say(f"inputs trained of H {H}/{H_kv}")
    for i, point in enumerate(points):
        if run.late(points[i:]):
            break
        run.rows(*point)
    points = [point for point in points if point[0] in args.phases_at and not args.forward_only]
    for i, point in enumerate(points):
        if run.late([("kernels of", *left) for left in points[i:]]):
            break
        run.kernels(*point)
    _print_crossovers(run.figures)
    return run.figures


def _print_crossovers(figures: list[dict]) -> None:
    """From which length on each shape is always faster, with every kind of inputs."""
    shapes = dict.fromkeys((f["op"], f["H"], f["H_kv"], f["top_k"]) for f in figures if "dense" in f)
    for op, H, H_kv, top_k in shapes:
        own = [f for f in figures if (f["op"], f["H"], f["H_kv"], f["top_k"]) == (op, H, H_kv, top_k)]
        at = break_even(own)
        words = f"from T = {at:,}" if at else f"not up to T = {max(f['T'] for f in own):,}"
        print(f"{op}, H {H} on {H_kv}, top_k {top_k}: always faster than dense attention {words}")


COLUMNS = {
    "op": lambda f: f["op"],
    "H": lambda f: f"{f['H']}/{f['H_kv']}",
    "top_k": lambda f: str(f["top_k"]),
    "T": lambda f: f"{f['T']:,}",
    "inputs": lambda f: f["inputs"],
    "ms": lambda f: f"{f['ms']:.2f}",
    "p90": lambda f: f"{f['p90_ms']:.2f}",
    "calls": lambda f: str(f["calls"]),
    "dense ms": lambda f: f"{f['dense']['ms']:.2f}" if "dense" in f else "-",
    "dense / this": lambda f: f"{f['speedup_over_dense']:.2f}" if "dense" in f else "-",
    "peak MB": lambda f: f"{f['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in f else "-",
}
