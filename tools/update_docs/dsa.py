"""Blocks about a step of DeepSeek Sparse Attention and about its indexer."""

from __future__ import annotations

from .common import briefly, length, load, markdown, on_gpu


def _ms(found: dict) -> str:
    return f"{found['ms']:.2f}" if "ms" in found else ""


def _gib(found: dict) -> str:
    return f"{found['peak_bytes'] / 2**30:.2f}" if found.get("peak_bytes") is not None else ""


def dsa_step() -> str:
    """Each piece of a decoder's step and the whole, beside PyTorch operations and peers."""
    report = load("dsa_gpu")
    if report is None:
        return "Not measured yet: `python tools/gpu_bench.py --only dsa_gpu` on a Hopper machine."
    rows = []
    for f in report["figures"]:
        torch = f.get("torch_backend", {})
        peer = f"{f['peer']['name']} {_ms(f['peer'])}" if "peer" in f else ""
        rows.append(
            [f["piece"], str(f["h_q"]), f"{f['s_kv']:,}", _ms(f), _gib(f), _ms(torch), _gib(torch), peer],
        )
    f = report["figures"][0]
    header = ["piece", "heads", "s_kv", "ms", "GiB", "PyTorch backend, ms", "GiB", "peer, ms"]
    return (
        f"s_q {f['s_q']:,}, topk {f['topk']:,}, d_qk {f['d_qk']}, d_v {f['d_v']}, indexer {f['h_i']} heads of "
        f"{f['d_i']}, {f['dtype']} ({on_gpu(report)}); GiB is the most memory beyond the inputs:\n\n"
        + markdown(header, rows)
    )


def dsa_decode() -> str:
    """A step of decoding and its two pieces, beside dense attention to the latents."""
    report = load("dsa_decode_gpu")
    if report is None:
        return "Not measured yet: `python tools/gpu_bench.py --only dsa_decode_gpu` on a Hopper machine."
    parts = ("indexer_topk", "sparse_attention", "indexer_topk_fp8")
    rows = [
        [
            str(f["B"]),
            f"{f['s_kv']:,}",
            *(f"{1e3 * ms:.0f}" for ms in (f["ms"], *(f["parts"][name]["ms"] for name in parts))),
            f"{1e3 * f['dense']['ms']:,.0f}",
            f"{f['speedup_over_dense']:.1f}",
        ]
        for f in report["figures"]
    ]
    f = report["figures"][0]
    header = ["sequences", "tokens", "step, us", *parts[:2], "indexer_topk in FP8", "dense, us", "dense / step"]
    return (
        f"{f['h_q']} heads, topk {f['topk']:,}, d_qk {f['d_qk']}, d_v {f['d_v']}, indexer {f['h_i']} heads of "
        f"{f['d_i']}, {f['dtype']}, CUDA graphs ({on_gpu(report)}); dense is PyTorch's attention to all latents:\n\n"
        + markdown(header, rows)
    )


def dsa_short() -> str:
    """The README's sentence: a step of decoding at the longest context, by the number of sequences."""
    report = load("dsa_decode_gpu")
    if report is None:
        return "A step of decoding: not measured yet, `python tools/gpu_bench.py --only dsa_decode_gpu`."
    longest = max(f["s_kv"] for f in report["figures"])
    found = [f for f in report["figures"] if f["s_kv"] == longest]
    steps = " and ".join(f"{1e3 * f['ms']:.0f} µs for {f['B']}" for f in found)
    dense = " and ".join(f"{f['dense']['ms']:.1f}" for f in found)
    f = found[0]
    return (
        f"A step of decoding of one layer at {length(longest)} tokens, an indexer of {f['h_i']} heads and attention "
        f"of {f['h_q']} with topk {f['topk']:,}, takes {steps} sequences ({briefly(report)}). PyTorch's dense "
        f"attention to all latents takes {dense} ms."
    )


INDEXER_REPORTS = ("indexer_gpu", "indexer_topk_gpu", "indexer_prefill_gpu")


def indexer() -> str:
    """The indexer, its selector, and both in one call."""
    reports = [report for name in INDEXER_REPORTS if (report := load(name)) is not None]
    if not reports:
        return "Not measured yet: `python tools/gpu_bench.py --only indexer` on a Hopper machine."
    rows = [
        [
            f["op"],
            f["dtype"],
            f"{f['h_i']} x {f['d_i']}" if "h_i" in f else "",
            f"{f['s_q']:,}",
            f"{f['s_kv']:,}",
            str(f.get("topk", "")),
            _ms(f),
            f"{f['tflops']:.0f}" if "tflops" in f else "",
            _ms(f.get("torch_topk", {})),
        ]
        for report in reports
        for f in report["figures"]
    ]
    header = ["op", "dtype", "heads", "s_q", "s_kv", "topk", "ms", "TFLOP/s", "torch.topk, ms"]
    days = " and ".join(sorted({report["date"] for report in reports}))
    return f"Random inputs ({on_gpu({**reports[-1], 'date': days})}):\n\n" + markdown(header, rows)


BLOCKS = {"dsa_step": dsa_step, "dsa_decode": dsa_decode, "dsa_short": dsa_short, "indexer": indexer}
