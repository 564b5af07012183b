"""Blocks by group size and budget: which shapes are faster than dense attention, and from which length on."""

from __future__ import annotations

import math
from collections.abc import Callable

from htree_cuda.bench.tables import break_even

from .common import NOT_MEASURED, length, load_all, markdown

Shape = tuple[int, int, int, int]  # H, H_kv, K, top_k
Figures = dict[tuple, dict]  # by (*Shape, inputs, T)
SHORTEST, LONGEST = 8192, 262144
KINDS = ("iid", "local", "trained")


def _without_cold_peer(f: dict, report: dict) -> dict:
    """Reports whose protocol lacks `long_calls` timed a long call of dense attention by its first one, which is no
    measure: it makes plans."""
    cold = "long_calls" not in report.get("protocol", {"long_calls": 1}) and f.get("dense", {}).get("calls") == 1
    return {name: x for name, x in f.items() if not cold or name not in ("dense", "speedup_over_dense")}


def figures_of(op: str, having: str | None = None) -> Figures:
    """The newest figure of each shape, inputs and length, over whole sequences, on the card that was measured last;
    with `having`, the newest with such an entry."""
    reports = [
        report
        for pattern in (f"{op}*", "budgets*")
        for report in load_all(pattern)
        if "gpu" in report and any(f.get("op") == op for f in report.get("figures", []))
    ]
    reports.sort(key=lambda report: report["date"])
    found: Figures = {}
    for report in reports:
        if report["gpu"] != reports[-1]["gpu"]:
            continue
        for f in report["figures"]:
            f = _without_cold_peer(f, report)
            if having is not None and not f.get(having):
                continue
            whole = f["B"] == 1 and f.get("T_q", f["T"]) == f["T"]
            if f.get("op") == op and f.get("backend") != "torch" and whole and SHORTEST <= f["T"] <= LONGEST:
                key = (f["H"], f["H_kv"], f["K"], f["top_k"], f["inputs"], f["T"])
                found[key] = {**f, "card": f"one {report['gpu']}, {report['date'][:10]}"}
    return _with_scaled_peers(found)


def _with_scaled_peers(figures: Figures) -> Figures:
    """Where dense attention was not measured, its time for another number of heads at the same length, times the
    heads: its work is proportional to them."""
    peers: dict[tuple, dict[int, float]] = {}
    for (H, _, K, _, _, T), f in figures.items():
        if "dense" in f:
            peers.setdefault((K, T), {})[H] = f["dense"]["ms"]
    for (H, _, K, _, _, T), f in figures.items():
        if "dense" not in f and (K, T) in peers:
            near = min(peers[K, T], key=lambda heads: abs(math.log(heads / H)))
            f["dense"] = {"ms": peers[K, T][near] * H / near, "scaled": True}
            f["speedup_over_dense"] = f["dense"]["ms"] / f["ms"]
    return figures


def shapes(figures: Figures) -> list[Shape]:
    """The largest group first, then by heads and budget."""
    return sorted({key[:4] for key in figures}, key=lambda s: (-s[0] // s[1], s[0], -s[2], s[3]))


def overtakes(figures: Figures, shape: Shape) -> str:
    """The break-even length of a shape, in words."""
    beside = [f for key, f in figures.items() if key[:4] == shape and "dense" in f]
    if not beside:
        return "not measured"
    at = break_even(beside)
    if not at:
        return f"not up to {length(max(f['T'] for f in beside))}"
    return "~" * any("scaled" in f["dense"] for f in beside if f["T"] == at) + length(at)


def _speedup(f: dict) -> str:
    return "~" * ("scaled" in f["dense"]) + f"{f['dense']['ms'] / f['ms']:.2f}" if "dense" in f else ""


def _ms(f: dict) -> str:
    return f"{f['ms']:.2f}"


def table(op: str, show: Callable[[dict], str], crossover: bool) -> str:
    """One row a shape, one column a length; a cell shows its kinds of inputs in the order of KINDS."""
    figures = figures_of(op)
    if not figures:
        return NOT_MEASURED
    lengths = sorted({key[5] for key in figures})
    kinds = [kind for kind in KINDS if any(key[4] == kind for key in figures)]
    rows = []
    for shape in shapes(figures):
        H, H_kv, K, top_k = shape
        row = [str(H // H_kv), f"{H}, {H_kv}, {K}", str(top_k)]
        for T in lengths:
            cells = [show(figures[(*shape, kind, T)]) for kind in kinds if (*shape, kind, T) in figures]
            row.append(" / ".join(filter(None, cells)))
        rows.append([*row, *([overtakes(figures, shape)] if crossover else [])])
    seen = [i for i in range(len(lengths)) if any(row[3 + i] for row in rows)]
    rows = [[*row[:3], *(row[3 + i] for i in seen), *row[3 + len(lengths) :]] for row in rows]
    header = ["group", "H, H_kv, K", "top_k", *(length(lengths[i]) for i in seen)]
    header += ["always faster from"] if crossover else []
    cards = "; ".join(sorted({f["card"] for f in figures.values()}))
    some = " (trained: groups of 4 and 8)" if "trained" in kinds else ""
    if any("~" in cell for row in rows for cell in row):
        cards += "; ~: beside dense attention's time of another number of heads, times the heads"
    return f"{' / '.join(kinds)} inputs{some} ({cards}):\n\n" + markdown(header, rows)


def no_groups() -> str:
    """What htree costs where every query head has its own KV head, at the longest length that was measured."""
    found = {}
    for op in ("forward", "backward"):
        own = [(key, f) for key, f in figures_of(op).items() if key[0] == key[1] and "dense" in f and key[4] == "iid"]
        found[op] = {(key[5], key[3]): f for key, f in own}
    at = max((T for T, _ in found["forward"]), default=None)
    if at is None:
        return (
            "Without groups: not measured yet, `python -m htree_cuda bench budgets --heads 16/16` on a Hopper machine."
        )
    forward = {top_k: f for (T, top_k), f in sorted(found["forward"].items()) if at == T}
    first = next(iter(forward.values()))
    over = lambda figures: ", ".join(f"{f['ms'] / f['dense']['ms']:.1f}" for f in figures)  # noqa: E731
    line = (
        f"Without groups ({first['H']} on {first['H']} heads, T {length(at)}, iid; {first['card']}), with top_k "
        f"{', '.join(map(str, forward))}, the forward takes {over(forward.values())} times dense attention's time"
    )
    back = [found["backward"].get((at, top_k)) for top_k in forward]
    if all(back):
        line += f", the backward {over(back)} times"
    return f"{line}."


def neighbours() -> str:
    """What neighbouring queries have in common, by kind of inputs."""
    found = figures_of("both", having="distinct_blocks")
    if not found:
        return NOT_MEASURED
    at = max(key[5] for key in found)
    rows = []
    for shape in shapes(found):
        own = [found.get((*shape, kind, at)) for kind in KINDS]
        shares = [(f["shared_with_neighbour"], *f["distinct_blocks"].values()) if f else () for f in own]
        cells = [" / ".join(f"{100 * share:.0f}" for share in some) for some in shares]
        rows.append([str(shape[0] // shape[1]), f"{shape[0]}, {shape[1]}, {shape[2]}", str(shape[3]), *cells])
    cards = "; ".join(sorted({f["card"] for f in found.values()}))
    together = next(iter(found.values()))["distinct_blocks"]
    line = (
        "Of the blocks of tokens that a query attends, the percentage that the query before it attends too; and "
        f"different blocks that {', '.join(together)} neighbouring queries attend in all layers, in percent of "
        "those that they name together"
    )
    return f"{line}, T {length(at)} ({cards}):\n\n" + markdown(["group", "H, H_kv, K", "top_k", *KINDS], rows)


BLOCKS = {
    "neighbours": neighbours,
    "budgets": lambda: "Time of dense attention (cuDNN) divided by the forward's, " + table("forward", _speedup, True),
    "budget_times": lambda: "Forward, median ms, " + table("forward", _ms, False),
    "backward_budgets": lambda: (
        "Time of dense attention's backward divided by this one's, " + table("backward", _speedup, True)
    ),
    "backward_budget_times": lambda: "Backward, median ms, " + table("backward", _ms, False),
    "step_budgets": lambda: (
        "Time of dense attention's forward and backward divided by this one's, " + table("both", _speedup, True)
    ),
    "no_groups": no_groups,
}
