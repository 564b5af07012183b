"""Fits the rates of htree_cuda/cost_model.py to the phases of benchmarks/results/; needs the kernels' library, no GPU.

    python -m tools.fit_costs            writes htree_cuda/cost_rates.json
    python -m tools.fit_costs --check    exit 1 where it is not what the results give

A set is fitted for each op, group and K: the rates that make the sum of squared relative errors smallest, over the
phases that a profile tells apart and over whole calls. Of each set whole sequences on the GPU that was measured last
count, those of `bench budgets` by the mean of `iid` and `local` inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from htree_cuda import cost_model, kernels
from htree_cuda.bench.inputs import DTYPES
from htree_cuda.explain import explain

from .update_docs.common import RESULTS, phases

# What a profiled phase consists of, by the names of rates; a profile of a newer build tells layer kinds apart no more.
PHASES = {
    "pool": ("pool",),
    "rotations": ("rotations",),
    "pack": ("rotations", "pack"),  # with the rotations in a profile that has no phase for them
    "union": ("union",),
    "select": ("select", "select, pairs"),
    "entry layer: score": ("score, entry",),
    "entry layer: attend": ("attend, entry",),
    "selected layers: score": ("score, selected",),
    "selected layers: attend": ("attend, selected",),
    "score": ("score, entry", "score, selected"),
    "attend": ("attend, entry", "attend, selected"),
    "dq_entry": ("dq, entry",),
    "dkdv_entry": ("dkdv, entry",),
    "dq_selected": ("dq, selected",),
    "dkdv_selected": ("dkdv, selected",),
    "rest": ("rest",),
}
KINDS = ("iid", "local")
# A pair of an entry layer takes so much of one of a selected layer: 0.18 to 0.25 by the profiles of 2026-11-24, which
# told the two apart (lab/README.md). Where whole calls are fitted too, the sum alone is known.
ENTRY_SHARE = 0.22


def _selects(figure: dict) -> bool:
    """Whether it is of a whole sequence that has more than one layer."""
    longer = figure["T"] > figure["top_k"] * figure["compression_rate"]
    return longer and figure["T"] == figure.get("T_q", figure["T"])


def _profiled(report: dict) -> list[dict]:
    """Figures of one op, whose phases add up to the call."""
    found = []
    for figure in report["figures"]:
        profiled = figure.get("phases_ms") or figure.get("kernels_ms")
        if profiled and _selects(figure):
            times = phases(profiled)
            if total := times.pop("all", None):
                times["rest"] = total - sum(times.values())
            found.append(figure | {"times": times})
    return found


def _budgets(report: dict) -> list[dict]:
    """Calls of `bench budgets`, which profiles a step, forward and backward together, on inputs of one kind: its phases
    are scaled as the whole call is from that kind to the mean."""
    calls: dict[tuple, dict[str, dict]] = defaultdict(dict)
    steps: dict[tuple, dict] = {}
    for figure in report["figures"]:
        shape = tuple(figure[name] for name in ("H", "H_kv", "K", "V", "T", "top_k", "dtype"))
        if figure["op"] == "both":
            if "phases_ms" in figure:
                steps[shape] = figure
        elif figure["inputs"] in KINDS and _selects(figure):
            calls[figure["op"], shape][figure["inputs"]] = figure
    found = []
    for (op, shape), kinds in calls.items():
        if set(kinds) != set(KINDS):
            continue
        ms = sum(figure["ms"] for figure in kinds.values()) / len(kinds)
        times = {}
        if (step := steps.get(shape)) and step["inputs"] in kinds:
            profiled = step["phases_ms"] if op == "forward" else step["kernels_ms"]
            scale = ms / kinds[step["inputs"]]["ms"]
            times = {name: x * scale for name, x in profiled.items() if name in PHASES}
        found.append(kinds["iid"] | {"ms": ms, "times": times, "whole": True})
    return found


def figures() -> list[dict]:
    """Calls, each with the times of its phases, its file, GPU and date; `whole`: phases are not all of its time."""
    found = []
    for read, pattern in ((_profiled, "forward*"), (_profiled, "backward*"), (_budgets, "budgets*")):
        for path in sorted(RESULTS.glob(f"{pattern}.json")):
            report = json.loads(path.read_text())
            if "gpu" in report and "figures" in report:
                about = {"gpu": report["gpu"], "date": report["date"], "file": path.name}
                found += [figure | about for figure in read(report)]
    last: dict[tuple, dict] = {}
    for figure in sorted(found, key=lambda figure: figure["date"]):
        last[_set_of(figure)] = figure
    return [figure for figure in found if figure["gpu"] == last[_set_of(figure)]["gpu"]]


def _set_of(figure: dict) -> tuple:
    """Op, group, K and V, which have rates of their own."""
    return figure["op"], figure["H"] // figure["H_kv"], figure["K"], figure["V"]


def work_of(figure: dict) -> tuple[dict, dict[str, float]]:
    """The call of a figure as `explain` tells it, and its work by the names of rates."""
    call = explain(
        T=figure["T"], H=figure["H"], H_kv=figure["H_kv"], K=figure["K"], V=figure["V"], B=figure["B"],
        top_k_per_layer=figure["top_k"], dtype=DTYPES[figure["dtype"]], backward=figure["op"] == "backward",
    )  # fmt: skip
    work: dict[str, float] = defaultdict(float)
    for row in call["rows"]:
        for name, x in cost_model.units(row, call).items():
            work[name] += x
    work["rest"] = call["B"] * call["H_kv"] * call["T_q"]
    return call, work


def least_squares(rows: list[list[float]], ms: list[float]) -> list[float]:
    """Rates >= 0 that make the sum of squared relative errors of ``rows @ rates`` smallest."""
    A = np.array(rows) / np.array(ms)[:, None]
    free = [j for j in range(A.shape[1]) if A[:, j].any()]
    while free:
        found = np.linalg.lstsq(A[:, free], np.ones(len(ms)), rcond=None)[0]
        if (found >= 0).all():
            break
        free.remove(free[int(found.argmin())])
    rates = [0.0] * A.shape[1]
    for j, x in zip(free, found if free else []):
        rates[j] = float(x)
    return rates


def _tied(work: dict[str, float]) -> dict[str, float]:
    """Pairs of entry layers as parts of pairs of selected ones."""
    rest = {name: x for name, x in work.items() if name != "attend, entry"}
    if "attend, entry" in work:
        rest["attend, selected"] = rest.get("attend, selected", 0.0) + ENTRY_SHARE * work["attend, entry"]
    return rest


def fit(of: list[dict]) -> dict:
    """One set of rates from figures of one op, group and K."""
    observed: list[tuple[dict[str, float], float]] = []
    calls = []
    for figure in of:
        call, work = work_of(figure)
        calls.append((figure, call, work))
        for phase, ms in figure["times"].items():
            names = PHASES.get(phase)
            if phase == "pack" and "rotations" in figure["times"]:
                names = ("pack",)
            if names and ms > 0 and any(work[name] for name in names):
                observed.append(({name: work[name] for name in names}, ms))
    whole = [(work, figure["ms"]) for figure, _, work in calls if figure.get("whole")]
    if whole:  # kernels without a phase of their own are the rest
        profiled = {name for work, _ in observed for name in work} | {"rest"}
        observed += [({name: x for name, x in work.items() if name in profiled}, ms) for work, ms in whole]
        observed = [(_tied(work), ms) for work, ms in observed]
    told = {name for work, _ in observed for name in work}
    names = list(dict.fromkeys(name for names in PHASES.values() for name in names if name in told))
    rows = [[work.get(name, 0.0) for name in names] for work, _ in observed]
    rates = least_squares(rows, [ms for _, ms in observed])
    ns = {name: x * 1e6 for name, x in zip(names, rates) if x > 0}
    if whole and "attend, selected" in ns:
        ns["attend, entry"] = ENTRY_SHARE * ns["attend, selected"]
    ns = {name: float(f"{x:.4g}") for name, x in ns.items()}
    first = of[0]
    return {
        "op": first["op"], "G": first["H"] // first["H_kv"], "K": first["K"], "V": first["V"],
        "gpu": first["gpu"], "date": max(f["date"] for f in of)[:10], "files": sorted({f["file"] for f in of}),
        "error": 0.0, "ns": dict(sorted(ns.items())), "calls": calls,
    }  # fmt: skip


def errors(one: dict) -> list[float]:
    """Relative errors of the whole calls that a set was fitted to."""
    found = []
    for figure, call, _ in one["calls"]:
        times = cost_model.predict(call, one)
        total = sum(ms or 0.0 for ms in times) + cost_model.rest(call, one)
        found.append(abs(total / figure["ms"] - 1))
    return found


def fitted() -> str:
    """The text of cost_rates.json."""
    groups = defaultdict(list)
    for figure in figures():
        groups[_set_of(figure)].append(figure)
    sets = [fit(of) for _, of in sorted(groups.items())]
    for one in sets:
        one["error"] = float(f"{max(errors(one)):.2g}")
        del one["calls"]
    return json.dumps({"units": "ns; see cost_model.units", "sets": sets}, indent=1) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Writes or checks the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    if not kernels.built():
        print(f"the rates of explain are not fitted: {kernels.why_not_built()}")
        return 0
    text = fitted()
    path = Path(cost_model.RATES)
    if args.check:
        stale = not path.exists() or path.read_text() != text
        print(f"{path.name} is out of date: python -m tools.fit_costs" if stale else f"{path.name} is up to date")
        return int(stale)
    path.write_text(text)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
