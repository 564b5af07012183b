"""Blocks about one sequence over several GPUs: what was measured, and the cost model on paper."""

from __future__ import annotations

from htree_cuda.bench.context_parallel import COLUMNS, imbalance

from .common import length, load, load_all, markdown, on_gpu, other_sources, star

# Rates that no run here measured: of NVLink 4 in one direction, and of a network card of 400 Gb/s.
NOMINAL_GB_PER_S = (450.0, 50.0)
ONE_HOST = 8  # GPUs
RANKS = (8, 64, 512)
NOT_MEASURED = (
    "Not measured yet: `torchrun --nproc-per-node 2 -m htree_cuda bench context_parallel --quick --out "
    "benchmarks/results/context_parallel_gpu.json` on a machine with two Hopper GPUs."
)


def newest() -> list[tuple[dict, dict]]:
    """(report, figure), the newest of each shape."""
    newest = {}
    for report in load_all("context_parallel*"):
        for f in report["figures"]:
            key = (f["H"], f["H_kv"], f["top_k"], f["T"], f["layout"], f["ranks"], f["inputs"])
            newest[key] = (report, f)
    return [newest[key] for key in sorted(newest, key=lambda key: (key[3], key[:3], key[4] != "zigzag"))]


def measured() -> str:
    """One row a shape and layout."""
    found = newest()
    if not found:
        return NOT_MEASURED
    report, first = found[-1]
    header = ["H", "top_k", "T", "layout", "one GPU, ms", "ms", "times as fast", "weak"]
    header += ["exchange alone, ms", "overlap", "imbalance", "to the cost model", "memory", "peak, GB"]
    names = ["H", "top_k", "T", "layout", "one ms", "ms", "speedup", "weak", "exchange", "overlap"]
    names += ["imbalance", "to model", "memory", "peak GB"]
    rows = [[COLUMNS[name](f) + (star(f) if name == "ms" else "") for name in names] for _, f in found]
    return (
        f"{first['ranks']} {report['gpu']} of one host, driver {report['driver']}, torch {report['torch']}, "
        f"{report['date']}; bfloat16, K = V = {first['K']}, {first['inputs']} inputs. Forward + backward.\n\n"
        + markdown(header, rows)
        + other_sources([f for _, f in found])
    )


def _whole_forward() -> tuple[dict, dict] | None:
    """The measured forward of one GPU over the longest sequence, and its report."""
    report = load("forward_gpu")
    found = [f for f in report["figures"] if f["inputs"] == "iid" and f["T_q"] == f["T"]] if report else []
    return (report, max(found, key=lambda f: f["T"])) if found else None


def model() -> str:
    """The forward, computed from the measured time of one GPU and nominal rates."""
    found = _whole_forward()
    if found is None:
        return NOT_MEASURED
    report, f = found
    rows = []
    for ranks in RANKS:
        compute = f["ms"] / ranks * imbalance(f["T"], ranks, "zigzag", f["top_k"], f["H"] // f["H_kv"], "forward")
        row = [str(ranks), f"{compute:.1f}"]
        for gb_per_s in NOMINAL_GB_PER_S:
            if gb_per_s == NOMINAL_GB_PER_S[0] and ranks > ONE_HOST:
                row.append("-")
                continue
            exchange = 4 * f["T"] * f["H_kv"] * f["K"] * (ranks - 1) / ranks / gb_per_s / 1e6
            row.append(f"{exchange:.1f} ({f['ms'] / (compute + exchange):.0f} times as fast)")
        rows.append(row)
    link, network = NOMINAL_GB_PER_S
    header = ["GPUs", "compute, ms", f"exchange at {link:.0f} GB/s, ms", f"exchange at {network:.0f} GB/s, ms"]
    return (
        f"**Computed, not measured.** The forward of one layer, T {length(f['T'])}, H {f['H']}, H_kv {f['H_kv']}, "
        f"K = V = {f['K']}, top_k {f['top_k']}, iid. Compute is the measured {f['ms']:.0f} ms of {on_gpu(report)}, "
        "over the number of GPUs, times the imbalance of the counted work. The rates are what the makers name, for "
        "NVLink within a host of eight and for a network card of 400 Gb/s for each GPU. They were not measured.\n\n"
        + markdown(header, rows)
    )


BLOCKS = {"context_parallel": measured, "context_parallel_model": model}
