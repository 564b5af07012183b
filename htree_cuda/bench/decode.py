"""`bench decode`: a step of decoding from a cached tree, beside dense attention to the same keys and values.

A step appends one token to every sequence and attends from it. Several (``STEPS``) are timed between two events, so
that nodes are completed as often as in a long run; the cache is truncated before, outside the time. On a GPU a step is
a captured CUDA graph that is replayed, and is timed eagerly beside that; its append and its attention are also replayed
alone. Dense attention is SDPA over keys and values
as they lie in the cache, without a mask, with the heads of a group as its query rows; every backend of PyTorch runs
a few times, and the fastest is measured. The time of appending to a dense cache is left out.

Bytes are those of the keys of all candidates and the values of all leaves; their floor is these bytes at the rate of a
copy on the same device, measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import TreeCache, forward_cached
from .inputs import DTYPES, visited
from .plots import save
from .protocol import measure

STEPS = {"cuda": 32, "cpu": 4}  # in one measured interval
BESIDE = (0.1, 0.3)  # seconds of warm-up and of timed calls of what is set beside a replayed step on a GPU
GLANCES = 8  # calls of a backend of dense attention before the fastest is measured
CHUNK = 4096  # tokens that are drawn and appended at a time
QUICK = (
    (1, 32768, 32, 8), (1, 131072, 32, 8), (1, 1048576, 16, 1), (16, 32768, 32, 8), (8, 131072, 32, 8),
    (64, 32768, 32, 8),
)  # fmt: skip
QUICK_TOP_K = (512, 64)
DENSE_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


def heads(text: str) -> list[tuple[int, int]]:
    """Parses 16/1,64/8: pairs of query heads and KV heads."""
    try:
        pairs = [tuple(int(n) for n in pair.split("/")) for pair in text.split(",")]
    except ValueError:
        pairs = [()]
    if any(len(pair) != 2 or min(pair) < 1 or pair[0] % pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(f"must be pairs H/H_kv, H a multiple of H_kv, got {text!r}")
    return pairs


def points(args: argparse.Namespace) -> list[tuple[int, int, int, int]]:
    """(B, T, H, H_kv) of every cache that is filled."""
    if args.quick:
        return list(QUICK)
    return [(B, T, *pair) for pair in args.heads for T, B in itertools.product(args.lengths, args.batches)]


def filled(B: int, T: int, H_kv: int, dim: int, dtype: torch.dtype, device: str, seed: int, backend: str) -> TreeCache:
    """A cache of T random tokens in every sequence, with room for one interval."""
    g = torch.Generator(device=device).manual_seed(seed)
    cache = TreeCache(B, T + STEPS[device], H_kv, dim, dtype=dtype, device=device)
    for first in range(0, T, CHUNK):
        shape = B, min(CHUNK, T - first), H_kv, dim
        cache.append(*(torch.randn(shape, generator=g, device=device, dtype=dtype) for _ in range(2)), backend=backend)
    cache.check()
    return cache


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A replay of the call as a CUDA graph. It ran before, so that nothing is made for the first time."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(
    call: Callable[[], object], device: str, before: Callable[[], object] | None = None, *, alone: bool = False
) -> dict:
    """Eagerly, and on a GPU as a graph: {"eager": ..., "graph": ...}, milliseconds of one call. `alone`: a part of a
    step, on a GPU as a graph alone, and as long as what is set beside a step."""
    if before is not None:
        before()
    call()
    result = {}
    beside = {"seconds": BESIDE} if device == "cuda" else {}
    if not alone or device != "cuda":
        result["eager"] = measure(call, device, before=before, repeats=STEPS[device], **beside)
    if device == "cuda":
        replay = captured(call)
        if before is not None:
            before()
        result["graph"] = measure(replay, device, before=before, repeats=STEPS[device], **(beside if alone else {}))
    return result


def best(figure: dict) -> dict:
    """What counts of a `timed` call: the graph where there is one."""
    return figure["graph"] if "graph" in figure else figure["eager"]


def glance(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call from one interval: enough to choose among backends whose times are far apart."""
    call()
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    replay = captured(call)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        first.record()
        for _ in range(GLANCES):
            replay()
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / GLANCES


def dense(rows: Tensor, k: Tensor, v: Tensor, device: str) -> dict:
    """The fastest backend of SDPA; `rows` [B, H_kv, rows, K] are the query's heads of a group."""

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(rows, k, v)

    times = {}
    for name, backend in DENSE_BACKENDS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a backend takes no such tensors
                times[name] = round(glance(partial(call, backend), device), 4)
        except RuntimeError:  # the backend does not take these tensors, or not their size
            continue
        finally:
            if device == "cuda":
                torch.cuda.synchronize()
    name = min(times, key=times.get)
    figure = timed(partial(call, DENSE_BACKENDS[name]), device)
    return {"backend": name, **figure, "ms": best(figure)["ms"], "glance_ms": times}


def copy_gb_per_s(device: str) -> float:
    """Bytes read and written by a copy, a second."""
    source = torch.randn((1 << 28) if device == "cuda" else (1 << 25), device=device)
    target = torch.empty_like(source)
    ms = measure(lambda: target.copy_(source), device)["ms"]
    return 2 * source.numel() * source.element_size() / ms / 1e6


def needed_bytes(B: int, T: int, H: int, H_kv: int, dim: int, itemsize: int) -> int:
    """Memory of a cache, and of what dense attention may take for itself beside it."""
    return int(1.07 * 2 * B * H_kv * (T + STEPS["cuda"]) * dim * itemsize) + 4 * B * H * T * itemsize + (1 << 30)


def run(args: argparse.Namespace) -> list[dict]:
    """Every cache once, all top_k on it; a shape that does not fit in the memory of a GPU is left out, and named.
    A row is printed and kept (`args.keep`) when it is measured."""
    dtype, device, figures = DTYPES[args.dtype], args.device, []
    rate = copy_gb_per_s(device)
    for B, T, H, H_kv in points(args):
        if device == "cuda":
            torch.cuda.empty_cache()
            free, wanted = torch.cuda.mem_get_info()[0], needed_bytes(B, T, H, H_kv, args.dim, dtype.itemsize)
            if wanted > free:
                needs = f"{wanted / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
                print(f"left out: {B} x {T:,}, {H} on {H_kv} heads: {needs}")
                continue
        cache = filled(B, T, H_kv, args.dim, dtype, device, args.seed, args.backend)
        g = torch.Generator(device=device).manual_seed(args.seed + 1)
        q, k, v = (
            torch.randn(B, 1, heads, args.dim, generator=g, device=device, dtype=dtype) for heads in (H, H_kv, H_kv)
        )
        peer = None
        if args.dense_up_to >= T:
            keys, values = (x.transpose(1, 2)[:, :, :T] for x in (cache.k, cache.v))
            peer = dense(q[:, 0].unflatten(1, (cache.n_kv_heads, -1)), keys, values, device)

        def append(cache=cache, k=k, v=v) -> None:
            cache.append(k, v, backend=args.backend)

        def back(cache=cache, T=T) -> None:
            cache.truncate(T)

        appended = timed(append, device, back, alone=True)
        for top_k in QUICK_TOP_K if args.quick else args.top_k:
            options = {"top_k_per_layer": top_k, "backend": args.backend}

            def attend(cache=cache, q=q, options=options) -> None:
                forward_cached(q, cache, **options)

            def step(append=append, attend=attend) -> None:
                append(), attend()

            parts = {"append": appended, "attend": timed(attend, device, back, alone=True)}
            whole = timed(step, device, back)
            steps = STEPS[device]
            candidates, leaves = visited(T + steps, T, T + steps, 16, top_k, 16 * top_k)
            read = B * H_kv * args.dim * dtype.itemsize * (candidates + leaves) / steps
            ms = best(whole)["ms"]
            figure = {
                "op": "decode", "B": B, "T": T, "H": H, "H_kv": H_kv, "K": args.dim, "V": args.dim,
                "dtype": args.dtype, "top_k": top_k, "backend": args.backend, "ms": ms, "step": whole, **parts,
                "candidates": candidates / steps, "bytes": read, "gb_per_s": round(read / ms / 1e6, 2),
                "copy_gb_per_s": round(rate, 1), "floor_share": round(read / rate / 1e6 / ms, 4),
                "cache_bytes": cache.nbytes,
            }  # fmt: skip
            if peer is not None:
                figure |= {"dense": peer, "speedup": round(peer["ms"] / ms, 3)}
            figures.append(figure)
            print(", ".join(f"{name} {show(figure)}" for name, show in COLUMNS.items()), flush=True)
            args.keep(figures)
        del cache, append, attend, step, back
    return figures


def _us(figure: dict, mode: str = "graph") -> str:
    return f"{1e3 * figure[mode]['ms']:.1f}" if mode in figure else "-"


COLUMNS = {
    "batch": lambda f: str(f["B"]),
    "T": lambda f: f"{f['T']:,}",
    "heads": lambda f: f"{f['H']} on {f['H_kv']}",
    "top_k": lambda f: str(f["top_k"]),
    "step us": lambda f: f"{1e3 * f['ms']:.1f}",
    "append": lambda f: f"{1e3 * best(f['append'])['ms']:.1f}",
    "attend": lambda f: f"{1e3 * best(f['attend'])['ms']:.1f}",
    "eager step": lambda f: _us(f["step"], "eager"),
    "dense us": lambda f: f"{1e3 * f['dense']['ms']:.1f}" if "dense" in f else "-",
    "by": lambda f: f["dense"]["backend"] if "dense" in f else "-",
    "times faster": lambda f: f"{f['speedup']:.2f}" if "dense" in f else "-",
    "GB/s": lambda f: f"{f['gb_per_s']:.1f}",
    "of the byte floor": lambda f: f"{100 * f['floor_share']:.1f}%",
}


def plot(figures: list[dict], path: Path) -> None:
    """Microseconds of a step over T, one panel for each batch size, htree attention by top_k and dense attention."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({f["B"] for f in figures})
    fig, axes = plt.subplots(1, len(batches), figsize=(4.2 * len(batches), 3.8), layout="constrained", squeeze=False)
    for ax, B in zip(axes[0], batches):
        rows = [f for f in figures if f["B"] == B]
        for i, pair in enumerate(dict.fromkeys((f["H"], f["H_kv"]) for f in rows)):
            shape = [f for f in rows if (f["H"], f["H_kv"]) == pair]
            for style, top_k in zip(("o-", "^-", "v-", "d-"), dict.fromkeys(f["top_k"] for f in shape)):
                line = sorted((f["T"], 1e3 * f["ms"]) for f in shape if f["top_k"] == top_k)
                ax.plot(*zip(*line), style, color=f"C{i}", label=f"{pair[0]} on {pair[1]}, top_k {top_k}")
            line = sorted({(f["T"], 1e3 * f["dense"]["ms"]) for f in shape if "dense" in f})
            if line:
                ax.plot(*zip(*line), "s--", color=f"C{i}", alpha=0.5, label=f"{pair[0]} on {pair[1]}, dense")
        ax.set(title=f"batch {B}", xlabel="tokens in the cache", ylabel="microseconds a step", yscale="log")
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    save(fig, path)
