"""Blocks about the backward of htree attention."""

from __future__ import annotations

from .common import NOT_MEASURED, load, markdown, on_gpu, phases


def backward_gpu() -> str:
    report = load("backward_gpu")
    if report is None:
        return NOT_MEASURED
    kernels = [name for name in phases(report["figures"][0]["kernels_ms"]) if name != "all"]
    rows = [
        [
            f"{f['T']:,}", f["inputs"], f"{f['ms']:.1f}", f"{f['p90_ms']:.1f}",
            *(f"{phases(f['kernels_ms'])[name]:.1f}" for name in kernels),
            f"{f['dense']['ms']:.1f}" if "dense" in f else "",
            f"{f['peak_bytes'] / 1e6:,.0f}", f"{f['gradient_bytes'] / 1e6:,.0f}",
        ]
        for f in report["figures"]
    ]  # fmt: skip
    header = ["T", "inputs", "median, ms", "p90, ms", *kernels, "dense (SDPA), ms", "peak, MB", "of it gradients"]
    return f"{on_gpu(report)}:\n\n" + markdown(header, rows)


BLOCKS = {
    "backward_gpu": backward_gpu,
}
