"""Blocks about the forward of htree attention."""

from __future__ import annotations

from htree_cuda.bench.tables import break_even

from .common import NOT_MEASURED, load, markdown, on_cpu, on_gpu, phases


def forward_cpu() -> str:
    report, whole = load("forward_cpu"), load("forward_cpu_whole")
    figures = report["figures"]
    rows = [
        [
            f"{f['T']:,}",
            str(f["layers"]),
            f"{f['candidates_per_query']:,.0f}",
            f"{f['us_per_query']:.0f}",
            f"{1e3 * f['dense']['ms'] / f['T_q']:.0f}",
            f"{f['peak_rss_bytes'] / 1e9:.2f}",
        ]
        for f in figures
    ]
    f = figures[0]
    shape = f"{f['dtype']}, H {f['H']}, H_kv {f['H_kv']}, K = V = {f['K']}, top_k {f['top_k']}"
    header = ["T", "layers", "candidates per query", "µs per query", "dense SDPA, µs per query", "peak memory, GB"]
    last = whole["figures"][0]
    return (
        f"Torch backend on a CPU, the last {f['T_q']:,} queries of T tokens, {shape} ({on_cpu(report)}):\n\n"
        + markdown(header, rows)
        + f"\nAll {last['T']:,} queries of a {last['T']:,}-token sequence take {last['ms'] / 1e3:.1f} s, at most "
        f"{last['peak_rss_bytes'] / 1e9:.2f} GB of process memory; dense SDPA {last['dense']['ms'] / 1e3:.1f} s.\n"
    )


def forward_gpu() -> str:
    report = load("forward_gpu")
    if report is None:
        return NOT_MEASURED
    rows = [
        [
            f"{f['T']:,}",
            f["inputs"],
            f"{f['ms']:.2f}",
            f"{f['p90_ms']:.2f}",
            f"{min(f['ms_by_seed'].values()):.2f} .. {max(f['ms_by_seed'].values()):.2f}",
            f"{f['dense']['ms']:.2f}" + (" (once)" if f["dense"]["calls"] == 1 else "") if "dense" in f else "",
            f"{f['speedup_over_dense']:.2f}" if "dense" in f else "",
            f"{f['tflops']:.0f}",
            f"{f['ms'] / f['floor_ms']:.1f}" if "floor_ms" in f else "",
            f"{f['peak_bytes'] / 1e6:,.0f}",
        ]
        for f in report["figures"]
    ]
    f = report["figures"][0]
    shape = f"B {f['B']}, H {f['H']}, H_kv {f['H_kv']}, K = V = {f['K']}, {f['dtype']}, top_k {f['top_k']}"
    at = break_even(report["figures"])
    where = f"always faster than dense from T = {at:,}" if at else "not faster than dense at the longest T"
    seeds = f"{len(f['ms_by_seed'])} seeds, ms"
    header = [
        "T",
        "inputs",
        "median, ms",
        "p90, ms",
        seeds,
        "dense (SDPA), ms",
        "dense / this",
        "TFLOP/s",
        "this / floor of its FLOPs at 600 TFLOP/s",
        "peak beyond inputs, MB",
    ]
    text = f"{shape} ({on_gpu(report)}); {where}:\n\n" + markdown(header, rows)
    profiled = [f for f in report["figures"] if "phases_ms" in f]
    names = list(dict.fromkeys(name for f in profiled for name in phases(f["phases_ms"])))
    if names:
        phase_rows = [
            [f"{f['T']:,}", f["inputs"], *(f"{phases(f['phases_ms']).get(name, 0.0):.2f}" for name in names)]
            for f in profiled
        ]
        text += (
            "\n\nBy phase, ms, from the end of one kernel to the end of the next in a profiled call:\n\n"
            + markdown(["T", "inputs", *names], phase_rows)
        )
    return text


def forward_long() -> str:
    """The last queries of two million tokens, and a call with one query."""
    long, one = load("forward_gpu_2m"), load("forward_gpu_one")
    if long is None or one is None:
        return NOT_MEASURED
    last, f = " / ".join(f"{f['ms']:.0f}" for f in long["figures"]), long["figures"][0]
    times = "; ".join(
        f"T = {f['T']:,}, {f['inputs']}: {f['ms']:.2f} ms"
        + (f" (dense {f['dense']['ms']:.2f})" if "dense" in f else "")
        for f in one["figures"]
    )
    return (
        f"The last {f['T_q']:,} queries of {f['T']:,} tokens, iid / local: {last} ms, {f['peak_bytes'] / 1e6:,.0f} MB "
        f"beyond inputs ({on_gpu(long)}).\n\n"
        f"A call of `forward` with one query, which pools the tree again ({on_gpu(one)}): {times}."
    )


BLOCKS = {
    "forward_cpu": forward_cpu,
    "forward_gpu": forward_gpu,
    "forward_long": forward_long,
}
