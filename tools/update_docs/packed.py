"""The block about packed sequences."""

from __future__ import annotations

from .common import load, markdown, on_gpu, other_sources, star

CASES = {
    "equal": "equal lengths; a batch of them",
    "documents": "documents, log-uniform lengths; the sum of their times, each from a batch of its length",
    "dense": "short enough that nothing is left out; PyTorch's attention of packs",
    "short": "documents of 16 tokens",
}


def packed() -> str:
    """Times of packs beside what each is compared with."""
    report = load("packed_gpu")
    if report is None:
        return "Not measured yet: `python tools/gpu_bench.py --only packed_gpu` on a Hopper machine."
    rows = [
        [
            CASES[f["case"]],
            f["what"],
            f"{f['sequences']:,}",
            f"{f['total']:,}",
            f"{f['H']} on {f['H_kv']}",
            str(f["top_k"]),
            f"{f['ms']:.2f}{star(f)}",
            *([f"{f['beside']['ms']:.2f}", f"{f['ratio']:.3f}"] if "ratio" in f else ["", ""]),
        ]
        for f in report["figures"]
    ]
    first = report["figures"][0]
    peers = sorted({f["beside"]["name"] for f in report["figures"] if "name" in f.get("beside", {})})
    about = f"; {peers[0]}" if peers else ""
    header = ["pack; beside", "what", "sequences", "tokens", "heads", "top_k", "ms", "beside, ms", "ratio"]
    return (
        f"K = V = {first['K']}, {first['dtype']}, random inputs, seed {first['seed']} ({on_gpu(report)}{about}):\n\n"
        + markdown(header, rows)
        + other_sources(report["figures"])
    )


BLOCKS = {"packed": packed}
