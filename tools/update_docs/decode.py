"""Blocks about decoding with a cached tree."""

from __future__ import annotations

from .common import NOT_MEASURED, length, load, markdown, on_gpu


def decode_gpu() -> str:
    """One step of decoding, beside dense attention over the same cache."""
    report = load("decode_gpu")
    if report is None:
        return NOT_MEASURED
    rows = [
        [
            str(f["B"]),
            length(f["T"]),
            f"{f['H']}, {f['H_kv']}",
            str(f["top_k"]),
            f"{1e3 * f['ms']:.1f}",
            f"{1e3 * f['dense']['ms']:.1f}" if "dense" in f else "",
            f"{f['dense']['ms'] / f['ms']:.2f}" if "dense" in f else "",
        ]
        for f in report["figures"]
    ]
    header = ["batch", "T", "H, H_kv", "top_k", "median, µs", "dense, µs", "dense / this"]
    return f"One step of decoding ({on_gpu(report)}):\n\n" + markdown(header, rows)


BLOCKS = {"decode_gpu": decode_gpu}
