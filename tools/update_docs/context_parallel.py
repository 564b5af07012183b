"""Blocks about one sequence over several GPUs: what was measured, and the cost model on paper."""

from __future__ import annotations

from htree_cuda.bench.context_parallel import COLUMNS, imbalance

from .common import NOT_MEASURED, length, load_all, markdown

# A rate that no run here measured: what a network card of 400 Gb/s a GPU is sold with.
NOMINAL_NETWORK_GB_PER_S = 50.0
RANKS = (8, 64, 512)


def _figures() -> list[tuple[dict, dict]]:
    """(report, figure), the newest of each shape."""
    newest = {}
    for report in load_all("context_parallel*"):
        for f in report["figures"]:
            key = (f["H"], f["H_kv"], f["top_k"], f["T"], f["layout"], f["ranks"], f["inputs"])
            newest[key] = (report, f)
    return [newest[key] for key in sorted(newest, key=lambda key: (key[3], key[:3], key[4] != "zigzag"))]


def measured() -> str:
    """One row a shape and layout."""
    found = _figures()
    if not found:
        return NOT_MEASURED
    report, first = found[-1]
    header = ["H", "top_k", "T", "layout", "one GPU, ms", "ms", "times as fast", "exchange alone, ms", "overlap"]
    header += ["imbalance", "to the cost model", "memory", "peak, GB"]
    names = ["H", "top_k", "T", "layout", "one ms", "ms", "speedup", "exchange", "overlap", "imbalance", "to model"]
    names += ["memory", "peak GB"]
    rows = [[COLUMNS[name](f) for name in names] for _, f in found]
    return (
        f"{first['ranks']} {report['gpu']} of one host, driver {report['driver']}, torch {report['torch']}, "
        f"{report['date']}; bfloat16, K = V = {first['K']}, {first['inputs']} inputs. Forward + backward.\n\n"
        + markdown(header, rows)
    )


def model() -> str:
    """Computed from the measured time of one GPU and the measured rate of the exchange between two."""
    found = {(f["T"], f["H"], f["top_k"]): f for _, f in _figures() if f["layout"] == "zigzag" and "one" in f}
    points = [(T, H, k) for T, H, k in found if max(T for T, _, _ in found) == T] if found else []
    if not points:
        return NOT_MEASURED
    rows = []
    for point in points:
        f = found[point]
        T, H, top_k = point
        rate = f["exchange"]["forward"]["gb_per_s"]
        for ranks in RANKS:
            sent = 4 * T * f["H_kv"] * f["K"] * (ranks - 1) / ranks
            row = [f"{H}/{f['H_kv']}", str(top_k), length(T), str(ranks)]
            compute = f["one"]["ms"] / ranks * imbalance(T, ranks, "zigzag", top_k)
            row.append(f"{compute:.1f}")
            for gb_per_s in (rate, NOMINAL_NETWORK_GB_PER_S):
                exchange = 4 * sent / gb_per_s / 1e6
                row.append(f"{exchange:.1f} ({f['one']['ms'] / (compute + exchange):.0f}x)")
            rows.append(row)
    rates = sorted({found[point]["exchange"]["forward"]["gb_per_s"] for point in points})
    header = ["H", "top_k", "T", "GPUs", "compute, ms"]
    header += ["exchange at the measured rate, ms", f"at {NOMINAL_NETWORK_GB_PER_S:.0f} GB/s, ms"]
    return (
        "**Computed, not measured.** Forward and backward of one layer. Compute is the measured time of one GPU over "
        "the number of GPUs, times the imbalance counted from candidates. The exchange is bytes over a rate: the one "
        f"that it reached between two GPUs ({rates[0]} to {rates[-1]} GB/s, measured), and the nominal rate of a "
        "network card of 400 Gb/s for each GPU, which was not measured. In brackets: times as fast as one GPU.\n\n"
        + markdown(header, rows)
    )


BLOCKS = {"context_parallel": measured, "context_parallel_model": model}
