"""Fits the rates of htree_cuda/cost_model.py to the phases of benchmarks/results/; needs the kernels' library, no GPU.

    python -m tools.fit_costs            writes htree_cuda/cost_rates.json
    python -m tools.fit_costs --check    exit 1 where it is not what the results give

A set is fitted for each op, group and K: for each phase that a profile tells apart, the rates of its units that make
the sum of squared relative errors smallest. Whole sequences on the GPU that was measured last count.
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


def figures() -> list[dict]:
    """Profiled figures of whole sequences with more than one layer, each with its file, GPU and date."""
    found = []
    for path in sorted([*RESULTS.glob("forward*.json"), *RESULTS.glob("backward*.json")]):
        report = json.loads(path.read_text())
        for figure in report.get("figures", []):
            selects = figure["T"] > figure["top_k"] * figure["compression_rate"]
            profiled = figure.get("phases_ms") or figure.get("kernels_ms")
            if profiled and selects and figure["T"] == figure.get("T_q", figure["T"]):
                times = phases(profiled)
                if total := times.pop("all", None):
                    times["rest"] = total - sum(times.values())
                about = {"gpu": report["gpu"], "date": report["date"], "file": path.name, "times": times}
                found.append(figure | about)
    last = max(found, key=lambda figure: figure["date"])
    return [figure for figure in found if figure["gpu"] == last["gpu"]]


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


def fit(of: list[dict]) -> dict:
    """One set of rates from figures of one op, group and K."""
    observed: dict[tuple[str, ...], list[tuple[list[float], float]]] = defaultdict(list)
    calls = []
    for figure in of:
        call, work = work_of(figure)
        calls.append((figure, call))
        for phase, ms in figure["times"].items():
            names = PHASES.get(phase)
            if phase == "pack" and "rotations" in figure["times"]:
                names = ("pack",)
            if names and ms > 0 and any(work[name] for name in names):
                observed[names].append(([work[name] for name in names], ms))
    ns: dict[str, float] = {}
    for names, pairs in observed.items():
        for name, x in zip(names, least_squares([row for row, _ in pairs], [ms for _, ms in pairs])):
            ns[name] = ns.get(name) or float(f"{x * 1e6:.4g}")
    first = of[0]
    return {
        "op": first["op"], "G": first["H"] // first["H_kv"], "K": first["K"], "V": first["V"],
        "gpu": first["gpu"], "date": max(f["date"] for f in of)[:10], "files": sorted({f["file"] for f in of}),
        "error": 0.0, "ns": dict(sorted(ns.items())), "calls": calls,
    }  # fmt: skip


def errors(one: dict) -> list[float]:
    """Relative errors of the whole calls that a set was fitted to."""
    found = []
    for figure, call in one["calls"]:
        times = cost_model.predict(call, one)
        total = sum(ms or 0.0 for ms in times) + cost_model.rest(call, one)
        found.append(abs(total / figure["ms"] - 1))
    return found


def fitted() -> str:
    """The text of cost_rates.json."""
    groups = defaultdict(list)
    for figure in figures():
        groups[figure["op"], figure["H"] // figure["H_kv"], figure["K"], figure["V"]].append(figure)
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
