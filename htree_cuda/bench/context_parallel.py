"""`bench context_parallel`: one sequence over the ranks that torchrun started, beside one rank alone.

    torchrun --nproc-per-node 2 -m htree_cuda bench context_parallel --quick --out results.json

Times are the largest of any rank. Steps of at least ONCE_S are made once, the first of their shape. Whole sequences on
one rank are measured on all ranks at the same time, each with shapes of its own. The first rank writes --out again
after each row. Exchange and compute are measured apart by leaving the other out: `pieces`, which computes, or the
collectives, in whose place keys and values come that were gathered before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import types
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import distributed, forward
from ..definition import layer_sizes
from ..distributed import attention, balance, lending, pieces
from ..distributed.exchange import Gathered, Travel, wait
from ..distributed.exchange import trade as trade_rows
from ..distributed.placement import Placement
from .inputs import DTYPES, tree_inputs, visited
from .plots import save
from .protocol import identity, write_report

SHAPES = [(16, 1, 64), (16, 1, 512), (32, 8, 64), (32, 8, 512)]  # H, H_kv, top_k of --quick, the longest last
LONG_S = 1.5  # of a step that takes longer nothing is measured apart but the exchange
ONCE_S = 5.0  # and one that takes longer is made once
TIMED_S = 1.0
WARM_TOKENS = 4096  # of a first call, in which ranks agree and connect


def shapes(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    return SHAPES if args.quick else [(args.heads, args.kv_heads, args.top_k)]


# -------------------------------------------------------------------------------------------------------------- timing


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _once(call: Callable[[], object], device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _of_all(seconds: float, device: str) -> list[float]:
    """Of every rank."""
    own = torch.tensor([seconds], dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [x.item() for x in found]


def timed(call: Callable[[], object], device: str, together: bool, first: float) -> dict:
    """Milliseconds of a call that took `first` seconds before: back to back for about TIMED_S. together: every rank
    makes it, and as many calls as the slowest one allows."""
    if together:
        first = max(_of_all(first, device))
    calls = max(2, min(20, int(TIMED_S / first)))

    def several() -> None:
        for _ in range(calls):
            call()

    if together:
        dist.barrier()
    return _times(_once(several, device) / calls, device, together, calls)


def _times(seconds: float, device: str, together: bool, calls: int) -> dict:
    ranks = _of_all(seconds, device) if together else [seconds]
    return {"ms": round(1e3 * max(ranks), 4), "calls": calls, "ranks_ms": [round(1e3 * x, 4) for x in ranks]}


def _peak(call: Callable[[], object], device: str) -> int:
    """Bytes beyond what lives before the call; 0 on a CPU."""
    if device == "cpu":
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ------------------------------------------------------------------------------------------- one of the two left out


@contextlib.contextmanager
def no_compute():
    """Inside, a call exchanges and computes nothing."""

    def nothing(k: Tensor, v: Tensor, runs: list[pieces.Run], *, need_selection: bool, **options) -> list:
        if not need_selection:
            return [None] * len(runs)
        r, top_k, most = (options[x] for x in ("compression_rate", "top_k_per_layer", "max_top_nodes"))
        layers = len(layer_sizes(k.shape[1], r, top_k * r if most is None else most))
        return [x.q.new_empty(layers - 1, *x.q.shape[:2], k.shape[2], top_k, dtype=torch.int32) for x in runs]

    names = {"forward": nothing, "Pack": pieces.Pack, "Run": pieces.Run, "Whole": pieces.Whole}
    kept, stub = attention.pieces, types.SimpleNamespace(**names)
    stub.backward = lambda *tensors, **options: None
    attention.pieces = stub
    try:
        yield
    finally:
        attention.pieces = kept


@contextlib.contextmanager
def no_exchange():
    """Inside, a call computes on what the first one received and sends nothing."""
    found: dict[tuple, Gathered] = {}
    traded: dict[tuple, list[Tensor]] = {}

    def gathered(place: Placement, group: dist.ProcessGroup, tensors: list[Tensor], seen: list[int]) -> Gathered:
        key = tuple((x.data_ptr(), x.shape) for x in tensors)
        if key not in found:
            found[key] = Gathered(place, group, tensors, seen).start()
            found[key].ready(place.stages - 1)
        return types.SimpleNamespace(whole=found[key].whole, ready=lambda stage: None, start=lambda: found[key])

    def trade(place: Placement, group: dist.ProcessGroup, tensors: list[tuple[Tensor, dict, dict]]) -> None:
        sent, received = ([x for row in tensors for x in row[i].values()] for i in (1, 2))
        key = tuple((x.shape, x.dtype) for x in sent), tuple((x.shape, x.dtype) for x in received)
        if key not in traded:
            wait(tensors[0][0], trade_rows(place, group, tensors))
            traded[key] = [x.clone() for x in received]
        for x, first in zip(received, traded[key], strict=True):
            x.copy_(first)

    kept = attention.Gathered, attention.reduce, lending.trade
    attention.Gathered, attention.reduce, lending.trade = gathered, lambda *arguments: Travel(None), trade
    try:
        yield
    finally:
        attention.Gathered, attention.reduce, lending.trade = kept


# ------------------------------------------------------------------------------------------------------------ measures


def _both(call: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: str, together: bool) -> dict:
    """A forward and a backward. A step of ONCE_S counts although it is the first of its shape; else it is the warm-up
    of a forward without gradients and of a backward of an output that was computed before."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    found: list[Tensor] = []
    if together:
        dist.barrier()
    forward_s = _once(lambda: found.append(call(*leaves)), device)
    out = found.pop()
    gradient = torch.randn_like(out)
    gradients = lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)  # noqa: E731
    if together:
        dist.barrier()
    backward_s = _once(gradients, device)
    step = forward_s + backward_s
    if (max(_of_all(step, device)) if together else step) >= ONCE_S:
        times = {"forward": _times(forward_s, device, together, 1), "backward": _times(backward_s, device, together, 1)}
    else:
        times = {"backward": timed(gradients, device, together, backward_s)}
        del out
        with torch.no_grad():
            times["forward"] = timed(lambda: call(*leaves), device, together, forward_s)
    times["ms"] = round(times["forward"]["ms"] + times["backward"]["ms"], 4)
    return times


def _one(shape: tuple, top_k: int, args: argparse.Namespace) -> dict:
    """This rank's time of a whole sequence."""
    inputs = tree_inputs(args.inputs, *shape, DTYPES[args.dtype], args.device, args.seed)
    return _both(lambda *x: forward(*x, top_k_per_layer=top_k, backend=args.backend), inputs, args.device, False)


def _alone(T: int, args: argparse.Namespace) -> list[dict | None]:
    """One rank's time of a whole sequence of each shape; None where it has not the memory. Ranks measure different
    shapes at the same time, the longest ones first: they share nothing."""
    mine: dict[int, dict | None] = {}
    own = range(len(shapes(args)))[::-1]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for i in own:
        # The last shape takes as long as the others together: the first rank has it alone where there are two ranks.
        if (0 if i == own[0] else 1 + (own[0] - i) % max(1, ranks - 1)) % ranks != rank:
            continue
        H, H_kv, top_k = shapes(args)[i]
        try:
            mine[i] = _one((args.batch, T, T, H, H_kv, args.dim, args.dim), top_k, args) | {"rank": rank}
        except torch.OutOfMemoryError:
            mine[i] = None
        if args.device == "cuda":
            torch.cuda.empty_cache()
    boxes: list[dict] = [{} for _ in range(ranks)]
    dist.all_gather_object(boxes, mine)
    found = {i: times for box in boxes for i, times in box.items()}
    return [found[i] for i in range(len(found))]


def _memory(own: tuple[Tensor, ...], call: Callable[..., Tensor], place: Placement, args, options: dict) -> dict:
    """Peak of the forward alone and of a training step, beside what they may take: that of `htree_cuda.forward` of as
    many queries over all tokens, and what the exchange adds."""
    q, k, v = own
    T, item = place.ranks * k.shape[1], k.element_size()
    token = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    heads = max(1, attention.SUM_BYTES // (T * (k.shape[3] + v.shape[3]) * 4))
    sums = 4 * T * (k.shape[3] + v.shape[3]) * min(heads, k.shape[2])
    gathered = T * token * item

    def step(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        gradient = torch.randn_like(q[..., : v.shape[3]])
        return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)

    torch.cuda.empty_cache() if args.device == "cuda" else None
    with torch.no_grad():
        peak = {"forward": _peak(lambda: call(*own), args.device)}
    peak["step"] = _peak(step(call, own), args.device)
    whole = tuple(torch.randn(x.shape[0], T, *x.shape[2:], dtype=x.dtype, device=x.device) for x in (k, v))
    plain = lambda q, k, v: forward(q, k, v, **options)  # noqa: E731
    with torch.no_grad():
        allowed = {"forward": _peak(lambda: plain(q, *whole), args.device) + gathered}
    allowed["step"] = _peak(step(plain, (q, *whole)), args.device) + gathered + sums
    allowed["step"] -= (T - k.shape[1]) * token * item  # dk and dv of other ranks' tokens, which that step returns
    return {
        name: {
            "peak_bytes": max(int(x) for x in _of_all(peak[name], args.device)),
            "allowed_bytes": max(int(x) for x in _of_all(allowed[name], args.device)),
        }
        for name in peak
    }  # fmt: skip


CANDIDATES = balance.Weights(highest=1, selected=1, free=0, above_one=1, above_more=1, bottom=1)


def imbalance(T: int, ranks: int, layout: str, top_k: int, group_size: int, part: str, lends: bool = True) -> float:
    """Work of the rank that has the most, over the mean: what the cost model takes for compute. Where queries are lent
    (lends: if they are at all), as `distributed.balance` counts it, whose weights balance two ranks and say nothing of
    how parts far apart compare; elsewhere by candidates. part: forward or backward."""
    sizes = 16, top_k, 16 * top_k
    n = T // Placement(layout, 0, ranks).parts
    loan = getattr(balance.loans(T, ranks, group_size, *sizes), part) if lends and layout == "zigzag" else None
    weights = balance.weights(group_size)[PARTS.index(part)] if loan else CANDIDATES
    work = balance.Work(T, T // n, *sizes, weights)
    of = lambda start, count: work.up_to(start + count) - work.up_to(start)  # noqa: E731
    counts = []
    for rank in range(ranks):
        place = Placement(layout, rank, ranks)
        counts.append(sum(of(place.part(stage) * n, n) for stage in range(place.stages)))
    if loan:
        counts[loan.lender] -= of(loan.start, loan.count)
        counts[loan.borrower] += of(loan.start, loan.count)
    return max(counts) / (sum(counts) / ranks)


def _figure(shape: tuple, top_k: int, layout: str, alone: dict | None, args: argparse.Namespace) -> dict:
    B, T, _, H, H_kv, K, V = shape
    group = dist.group.WORLD
    place = Placement(layout, dist.get_rank(), dist.get_world_size())
    n = T // place.ranks
    own = tree_inputs(args.inputs, B, n, n, H, H_kv, K, V, DTYPES[args.dtype], args.device, args.seed + place.rank)
    options = {"top_k_per_layer": top_k, "backend": args.backend}
    call = lambda *x: distributed.context_parallel_forward(*x, group=group, layout=layout, **options)  # noqa: E731
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    result = {
        "op": "context_parallel", "inputs": args.inputs, "layout": layout, "ranks": place.ranks, "T": T, "B": B, "H": H,
        "H_kv": H_kv, "K": K, "V": V, "dtype": args.dtype, "top_k": top_k, "backend": args.backend,
        **_both(call, own, args.device, True),
    }  # fmt: skip
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
        result["step_peak_bytes"] = max(int(x) for x in _of_all(peak, args.device))
    if result["ms"] < 1e3 * LONG_S:
        with no_exchange():
            result["compute"] = _both(call, own, args.device, True)
    with no_compute():
        result["exchange"] = _both(call, own, args.device, True)
    counted = {name: imbalance(T, place.ranks, layout, top_k, H // H_kv, name) for name in PARTS}
    for name in ("forward", "backward"):
        times, exchange = result[name], result["exchange"][name]["ms"]
        if "compute" in result:
            apart = result["compute"][name]["ms"] + exchange
            times["overlap"] = round((apart - times["ms"]) / exchange, 3)
        token = B * H_kv * (K + V)
        sent = token * torch.finfo(DTYPES[args.dtype]).bits // 8 + (4 * token if name == "backward" else 0)
        received = sent * T * (place.ranks - 1) / place.ranks
        result["exchange"][name]["gb_per_s"] = round(received / exchange / 1e6, 1)
        if alone is not None:
            times["speedup"] = round(alone[name]["ms"] / times["ms"], 3)
            times["model_ms"] = round(alone[name]["ms"] / place.ranks * counted[name] + exchange, 4)
            times["to_model"] = round(times["ms"] / times["model_ms"], 3)
    result["imbalance"] = {"counted": round(max(counted.values()), 4)}
    if "compute" in result:
        result["imbalance"]["measured"] = _imbalance(result["compute"])
    if alone is not None:
        result["one"] = alone
        result["speedup"] = round(alone["ms"] / result["ms"], 3)
    if result["ms"] < 1e3 * LONG_S:
        result["memory"] = _memory(own, call, place, args, options)
    return result


def _imbalance(times: dict) -> float:
    ranks = [sum(x) for x in zip(times["forward"]["ranks_ms"], times["backward"]["ranks_ms"])]
    return round(max(ranks) / (sum(ranks) / len(ranks)), 4)


def run(args: argparse.Namespace) -> list[dict] | None:
    """The figures on the first rank, None on the others."""
    if "RANK" not in os.environ:
        sys.exit("bench context_parallel measures several ranks: start it by torchrun --nproc-per-node N -m htree_cuda")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        figures = _figures(args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return figures if int(os.environ["RANK"]) == 0 else None


def _figures(args: argparse.Namespace) -> list[dict]:
    figures, world, first = [], dist.get_world_size(), dist.get_rank() == 0
    about = identity(args.device) if first else {}
    started = time.perf_counter()

    def say(text: str) -> None:
        if first:
            print(f"[{time.perf_counter() - started:.0f} s] {text}", file=sys.stderr, flush=True)

    _connect(args)
    say(f"{world} ranks are connected")
    for T in args.lengths:
        alone = [None] * len(shapes(args)) if args.no_single else _alone(T, args)
        weak = _alone(T // world, args) if args.weak_up_to >= T else [None] * len(shapes(args))
        say(f"T {T:,} on one rank: {', '.join(_pair(x) if x else '-' for x in alone)} ms")
        for i, (H, H_kv, top_k) in enumerate(shapes(args)):
            for layout in args.layouts:
                shape = (args.batch, T, T, H, H_kv, args.dim, args.dim)
                figures.append(_figure(shape, top_k, layout, alone[i], args))
                figures[-1]["weak"] = None if weak[i] is None else {"T": T // world, **weak[i]}
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                if first and args.out:
                    write_report(args.out, "bench context_parallel", about, figures)
                say("  ".join(f"{name} {cell(figures[-1])}" for name, cell in COLUMNS.items()))
    return figures


def _connect(args: argparse.Namespace) -> None:
    """A short call with gradients in each layout."""
    for layout in args.layouts:
        n = min(WARM_TOKENS, *args.lengths) // dist.get_world_size()
        H, H_kv, top_k = shapes(args)[0]
        shape = (args.batch, n, n, H, H_kv, args.dim, args.dim)
        own = tree_inputs(args.inputs, *shape, DTYPES[args.dtype], args.device, args.seed)
        leaves = [x.requires_grad_() for x in own]
        options = {"top_k_per_layer": top_k, "backend": args.backend, "layout": layout}
        out = distributed.context_parallel_forward(*leaves, group=dist.group.WORLD, **options)
        torch.autograd.grad(out.float().sum(), leaves)


def _weak(f: dict) -> str:
    """Share of a rank's rate that is left where the sequence grows with the ranks: what one rank would take for its
    share of the longer sequence's work, over what it takes."""
    if f["weak"] is None:
        return "-"
    grown = visited(f["T"], 0, f["T"], 16, f["top_k"], 16 * f["top_k"])[0] / f["ranks"]
    work = grown / visited(f["weak"]["T"], 0, f["weak"]["T"], 16, f["top_k"], 16 * f["top_k"])[0]
    return f"{f['weak']['ms'] * work / f['ms']:.2f}"


def _memory_share(f: dict, name: str) -> str:
    memory = f.get("memory", {}).get(name)
    return f"{memory['peak_bytes'] / memory['allowed_bytes']:.3f}" if memory and memory["allowed_bytes"] else "-"


PARTS = ("forward", "backward")


def _pair(times: dict) -> str:
    return "+".join(f"{times[name]['ms']:.1f}" for name in PARTS)


COLUMNS = {
    "H": lambda f: f"{f['H']}/{f['H_kv']}",
    "top_k": lambda f: str(f["top_k"]),
    "T": lambda f: f"{f['T']:,}",
    "layout": lambda f: f["layout"],
    "one ms": lambda f: _pair(f["one"]) if "one" in f else "-",
    "ms": lambda f: _pair(f),
    "speedup": lambda f: f"{f['speedup']:.2f}" if "speedup" in f else "-",
    "weak": _weak,
    "compute": lambda f: _pair(f["compute"]) if "compute" in f else "-",
    "exchange": lambda f: f"{f['exchange']['forward']['ms']:.2f}+{f['exchange']['backward']['ms']:.2f}",
    "overlap": lambda f: " ".join(f"{f[n]['overlap']:.2f}" if "overlap" in f[n] else "-" for n in PARTS),
    "imbalance": lambda f: f"{f['imbalance'].get('measured', f['imbalance']['counted']):.3f}",
    "to model": lambda f: " ".join(str(f[n].get("to_model", "-")) for n in PARTS),
    "memory": lambda f: " ".join(_memory_share(f, n) for n in ("forward", "step")),
    "peak GB": lambda f: f"{f['step_peak_bytes'] / 1e9:.2f}" if "step_peak_bytes" in f else "-",
}


def plot(figures: list[dict], path) -> None:
    """Speedup over one rank, a group of bars for each shape and length. Raises ValueError where no row has one."""
    figures = [f for f in figures if "speedup" in f]
    if not figures:
        raise ValueError(f"--plot {path}: no row has a speedup, since one rank alone ran out of memory in each")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layouts = list(dict.fromkeys(f["layout"] for f in figures))
    points = list(dict.fromkeys((f["H"], f["H_kv"], f["top_k"], f["T"]) for f in figures))
    fig, ax = plt.subplots(figsize=(1.6 + 1.0 * len(points), 3.6), layout="constrained")
    width = 0.8 / len(layouts)
    for i, layout in enumerate(layouts):
        found = {(f["H"], f["H_kv"], f["top_k"], f["T"]): f["speedup"] for f in figures if f["layout"] == layout}
        places = [x + (i - (len(layouts) - 1) / 2) * width for x, point in enumerate(points) if point in found]
        bars = ax.bar(places, [found[point] for point in points if point in found], width, label=layout)
        ax.bar_label(bars, fmt="%.2f", fontsize=7)
    ranks = figures[0]["ranks"]
    ax.axhline(ranks, color="gray", linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(points)))
    ax.set_xticklabels([f"H {H}/{kv}\ntop_k {k}\n{T // 1024}K" for H, kv, k, T in points], fontsize=8)
    ax.set(ylabel="times as fast as one GPU", ylim=(0, 1.25 * ranks))
    ax.set_title("forward and backward of one sequence", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    save(fig, path)
