"""Blocks about decoding from a cached tree."""

from __future__ import annotations

from htree_cuda.bench import decode

from .common import NOT_MEASURED, briefly, length, load, markdown, on_gpu


def decode_gpu() -> str:
    """One step of decoding, beside dense attention over the same cache, every shape that was measured."""
    report = load("decode_gpu")
    if report is None:
        return NOT_MEASURED
    rows = [[show(f) for show in decode.COLUMNS.values()] for f in report["figures"]]
    copy = report["figures"][0]["copy_gb_per_s"]
    return (
        f"One step, append and attend, replayed as a CUDA graph ({on_gpu(report)}; a copy there runs at "
        f"{copy / 1e3:.2f} TB/s):\n\n" + markdown(list(decode.COLUMNS), rows)
    )


def decode_short() -> str:
    """The README's rows: microseconds of a step by budget, and of dense attention."""
    report = load("decode_gpu")
    if report is None:
        return "Decoding: not measured yet, `python tools/gpu_bench.py --only decode_gpu` on a Hopper machine."
    shapes: dict[tuple, dict] = {}
    for f in report["figures"]:
        if "dense" in f:
            shapes.setdefault((f["B"], f["T"], f["H"], f["H_kv"], f["K"]), {})[f["top_k"]] = f
    budgets = sorted({top_k for found in shapes.values() for top_k in found})
    rows = []
    for (B, T, H, H_kv, _), found in shapes.items():
        dense = next(iter(found.values()))["dense"]["ms"]
        cells = [f"{1e3 * found[k]['ms']:.0f} ({dense / found[k]['ms']:.1f}x)" if k in found else "" for k in budgets]
        rows.append([str(B), length(T), f"{H}, {H_kv}", *cells, f"{1e3 * dense:.0f}"])
    header = ["batch", "T", "H, H_kv", *(f"top_k {k}, µs" for k in budgets), "dense, µs"]
    return (
        f"A step of decoding with `TreeCache`, and how many times as fast as dense attention it is "
        f"({briefly(report)}):\n\n" + markdown(header, rows)
    )


def generate_gpu() -> str:
    """Bytes per second of a small decoder that continues text from its caches."""
    report = load("generate_gpu")
    if report is None:
        return (
            "Whole models: not measured yet, `python examples/generate_bytes.py --preset gpu --json "
            "benchmarks/results/generate_gpu.json` on a Hopper machine."
        )
    speeds: dict[int, dict[str, dict]] = {}
    for f in report["figures"]:
        speeds.setdefault(f["prompt"], {})[f["arm"]] = f
    rows = [
        [length(T), *(f"{arms[arm]['tokens_per_s']:,.0f}" for arm in ("htree", "dense"))] for T, arms in speeds.items()
    ]
    return (
        "Bytes per second of the small decoder of `examples/generate_bytes.py` (8 heads on 2, K 64, top_k "
        f"{report['top_k']}; {briefly(report)}):\n\n" + markdown(["prompt", "htree", "dense"], rows)
    )


BLOCKS = {"decode_gpu": decode_gpu, "decode_short": decode_short, "generate_gpu": generate_gpu}
