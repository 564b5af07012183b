"""Blocks by group size and budget: which shapes are faster than dense attention, and from which length on."""

from __future__ import annotations

from collections.abc import Callable

from htree_cuda.bench.tables import break_even

from .common import NOT_MEASURED, length, load_all, markdown

Shape = tuple[int, int, int, int]  # H, H_kv, K, top_k
Figures = dict[tuple, dict]  # by (*Shape, inputs, T)
SHORTEST, LONGEST = 8192, 262144
KINDS = ("iid", "local", "trained")


def figures_of(op: str) -> Figures:
    """The newest figure of each shape, inputs and length, over whole sequences, on the card that was measured last."""
    reports = [r for r in load_all(f"{op}*") if "gpu" in r and any(f.get("op") == op for f in r.get("figures", []))]
    found: Figures = {}
    for report in reports:
        if report["gpu"] != reports[-1]["gpu"]:
            continue
        for f in report["figures"]:
            whole = f["B"] == 1 and f.get("T_q", f["T"]) == f["T"]
            if f.get("op") == op and f.get("backend") != "torch" and whole and SHORTEST <= f["T"] <= LONGEST:
                key = (f["H"], f["H_kv"], f["K"], f["top_k"], f["inputs"], f["T"])
                found[key] = {**f, "card": f"one {report['gpu']}, {report['date'][:10]}"}
    return found


def shapes(figures: Figures) -> list[Shape]:
    """The largest group first, then by heads and budget."""
    return sorted({key[:4] for key in figures}, key=lambda s: (-s[0] // s[1], s[0], -s[2], s[3]))


def overtakes(figures: Figures, shape: Shape) -> str:
    """The break-even length of a shape, in words."""
    beside = [f for key, f in figures.items() if key[:4] == shape and "dense" in f]
    if not beside:
        return "not measured"
    at = break_even(beside)
    return length(at) if at else f"not up to {length(max(f['T'] for f in beside))}"


def _speedup(f: dict) -> str:
    return f"{f['dense']['ms'] / f['ms']:.2f}" if "dense" in f else ""


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
    header = ["group", "H, H_kv, K", "top_k", *map(length, lengths), *(["always faster from"] if crossover else [])]
    cards = "; ".join(sorted({f["card"] for f in figures.values()}))
    return f"{' / '.join(kinds)} inputs ({cards}):\n\n" + markdown(header, rows)


BLOCKS = {
    "budgets": lambda: "Time of dense attention (cuDNN) divided by the forward's, " + table("forward", _speedup, True),
    "budget_times": lambda: "Forward, median ms, " + table("forward", _ms, False),
    "backward_budgets": lambda: (
        "Time of dense attention's backward divided by this one's, " + table("backward", _speedup, True)
    ),
    "backward_budget_times": lambda: "Backward, median ms, " + table("backward", _ms, False),
}
