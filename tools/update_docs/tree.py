"""Blocks about tree pooling."""

from __future__ import annotations

from .common import load, markdown


def tree_pool() -> str:
    report = load("tree_pool")
    if report is None:
        return "Not measured yet: `python tools/gpu_bench.py --only tree_pool` on a Hopper machine."
    copy = report["copy"]
    rows = [
        [
            f"{t['T']:,}",
            str(t["H_kv"]),
            f"{t['K']}, {t['V']}",
            str(t["r"]),
            str(t["layers"] - 1),
            f"{t['bytes'] / 1e9:.3f}",
            f"{1e3 * t['median_ms']:.1f}",
            f"{1e3 * t['p90_ms']:.1f}",
            f"{t['tb_per_s']:.2f}",
            f"{100 * t['of_copy']:.0f}%",
        ]
        for t in report["timings"]
    ]
    header = ["T", "H_kv", "K, V", "r", "layers", "GB", "median, µs", "p90, µs", "TB/s", "of the copy"]
    return (
        f"bfloat16, B 1, one {report['gpu']} (driver {report['driver']}, CUDA {report['cuda']}, SM clock "
        f"{copy['sm_mhz']} MHz), {report['date'][:10]}; a device copy of {copy['bytes'] / 1e9:.1f} GB (read and "
        f"written) in the same run: {copy['tb_per_s']:.2f} TB/s.\n\n" + markdown(header, rows)
    )


BLOCKS = {
    "tree_pool": tree_pool,
}
