"""Predicted times of the kernels of one htree call: counts of `explain` times rates that were measured.

The rates lie in `cost_rates.json`, one set for each group and K that was measured: nanoseconds for a unit of work of a
phase, fitted to the profiled phases of `benchmarks/results/` by ``python -m tools.fit_costs``. The file names its
sources and their GPU. A call takes the set of the nearest shape: of its op, of the smallest measured group that holds
its own, then of the nearest K. A model of this kind leaves out that launches overlap, and what keys and values hold:
neighbouring queries that select the same blocks are faster in selected layers.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

RATES = Path(__file__).resolve().parent / "cost_rates.json"
# With fewer queries a launch does not fill a GPU, and its time is not a matter of how much work there is.
MIN_QUERIES = 4096


@functools.cache
def rates() -> list[dict]:
    """The measured sets, none before the first fit; see the module."""
    return json.loads(RATES.read_text())["sets"] if RATES.exists() else []


def nearest(call: dict) -> dict | None:
    """The set for a call; None where its op was not measured, and where it has too few queries."""
    if call["T_q"] < MIN_QUERIES:
        return None
    G, K = call["H"] // call["H_kv"], call["K"]
    sets = [one for one in rates() if one["op"] == call["op"]]
    return min(sets, key=lambda one: (one["G"] < G, abs(one["G"] - G), abs(one["K"] - K)), default=None)


def units(row: dict, call: dict) -> dict[str, float]:
    """The work of one row of `explain`, by the name of its rate.

    A pair is a query of one KV head and a block of 16 candidates. A selection sorts nothing but reads every candidate;
    what it costs is a part for the query and a part for the pairs that the score pass made.
    """
    phase, kind = row["phase"], row["kind"].replace("half-selected", "selected")
    heads = call["B"] * call["H_kv"]
    if phase in ("rotations", "union"):
        return {phase: row["ctas"] or row["launches"]}
    if phase in ("pool", "pack", "gather"):
        nodes = call["layers"][row["layer"] or 0]
        if phase == "pack" and kind == "entry":
            nodes = min(nodes, 16 * call["top_k"])  # the others are no query's candidates in an entry layer
        return {"pool" if phase == "pool" else "pack": heads * nodes}
    if phase == "select":
        scored = sum(r["pairs"] or 0 for r in call["rows"] if r["phase"] == "score" and r["layer"] == row["layer"])
        return {"select": heads * call["T_q"], "select, pairs": scored}
    return {f"{phase}, {kind}" if kind else phase: row["pairs"] or row["ctas"] or row["launches"]}


def rest(call: dict, measured: dict) -> float:
    """Milliseconds of all rows together that the set has no rate for: small kernels, which a profile counts as one."""
    return measured["ns"].get("rest", 0.0) * call["B"] * call["H_kv"] * call["T_q"] / 1e6


def predict(call: dict, measured: dict) -> list[float | None]:
    """Milliseconds of each row of a call by the rates of a set; None for a row that the set has no rate for (`rest`).

    Args:
        call: B, T_q, H, H_kv, K, V, top_k, `layers` (nodes of each, the tokens first) and `rows` as `explain` has them.
        measured: what `nearest` found.
    """
    # Keys and values are read once, and multiplied once; rates are of the measured K and V.
    scale = (call["K"] + call["V"]) / (measured["K"] + measured["V"])
    times: list[float | None] = []
    for row in call["rows"]:
        work = units(row, call)
        known = [name for name in work if name in measured["ns"]]
        ns = sum(work[name] * measured["ns"][name] for name in known)
        depends = row["phase"] not in ("union", "select")
        times.append(ns / 1e6 * (scale if depends else 1.0) if known else None)
    return times
