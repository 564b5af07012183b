"""The one Python benchmark program: `python -m htree_cuda bench {forward,backward,attn_dist,sparse_attention} ...`.

Protocol. On a GPU: 0.5 s of warm-up, then back-to-back calls for at least 1 s (at least 5 calls), CUDA events around
each; median and 90th percentile; SM clock and power are read while the calls run. Beyond --dense-up-to dense attention
is called once, cold, by the wall clock. On a CPU: one warm-up call, then calls for at least 1 s (at least 3 calls),
wall clock. Everything a call needs is inside the time: there is no cache between calls. Peers run in the same process
on the same data. Inputs have unit variance and are never zeros.

sparse_attention and its peer take turns, three each, over which median and percentile are taken. Then they do so once
more with a pause before each call, as long as the call: back to back the power cap sets the clock, with pauses not.

Every figure carries the FLOPs and bytes it counts; the JSON names the sources (content hash), machine and torch. The
tables and plots of the README are made from these files by tools/update_docs.py.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import inspect
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from . import __version__, attn_dist, forward, normalize_attn_dist, sparse_attention
from .reference.definition import layer_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
WARM_UP_S, TIMED_S = 0.5, 1.0
LEAST_CALLS_GPU, LEAST_CALLS_CPU = 5, 3
TURNS = 3  # of each of several calls that are measured in turns
LEAST_PAUSE_MS = 0.5  # the host enqueues a call in less
PEER_DIFFERENCE = 0.02  # of the largest entry: beyond it a peer does not compute the same
LOCAL_RHO = 0.99
MMA_TFLOPS = 600  # that `mma.sync` sustains on an H200: the floor of forward by its FLOPs


# ------------------------------------------------------------------------------------------------- machine, timing


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def identity(device: str) -> dict:
    """Which sources ran where."""
    script = Path(__file__).resolve().parent.parent / "tools" / "content_hash.py"
    about = {
        "version": __version__,
        "content_hash": _output([sys.executable, str(script)]) if script.exists() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", _this_gpu()])
        about |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    else:
        about |= {"cpu": _cpu_name(), "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    return about


def _this_gpu() -> str:
    """The option of nvidia-smi that picks the current device."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "--id=0" if uuid is None else f"--id=GPU-{uuid}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _quantile(times: list[float], q: float) -> float:
    times = sorted(times)
    return times[min(len(times) - 1, math.ceil(q * len(times)) - 1)]


def _summary(times: list[float], **extra) -> dict:
    median, p90 = (round(_quantile(times, q), 4) for q in (0.5, 0.9))
    return {"ms": median, "p90_ms": p90, "calls": len(times), **extra}


def _turn(call: Callable[[], object], device: str, pause_ms: float = 0.0) -> tuple[list[float], dict]:
    """Milliseconds of each call by the protocol above, and what was read meanwhile. With a pause before each call: the
    GPU spends it in a kernel of one thread, while the host enqueues the call behind it, so that no time of the host is
    in the call's."""
    times: list[float] = []
    if device == "cpu":
        call()
        while len(times) < LEAST_CALLS_CPU or sum(times) < 1e3 * TIMED_S:
            time.sleep(pause_ms / 1e3)
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return times, {}
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_S:
        call()
        torch.cuda.synchronize()
        time.sleep(pause_ms / 1e3)
    clocks = round(max(pause_ms, LEAST_PAUSE_MS) * _clocks_per_ms()) if pause_ms else 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", _this_gpu()]
    probe = None
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    start = time.perf_counter()
    while len(pairs) < LEAST_CALLS_GPU or time.perf_counter() - start < TIMED_S:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        if clocks:
            torch.cuda._sleep(clocks)
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
        if len(pairs) % 16 == 0:  # keeps the queue short, never empty
            pairs[-8][1].synchronize()
        if probe is None and time.perf_counter() - start > 0.3 * TIMED_S:
            probe = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    torch.cuda.synchronize()
    clock = power = None
    if probe is not None:
        fields = probe.communicate(timeout=60)[0].split(",")
        if len(fields) == 2:
            clock, power = (float(x) for x in fields)
    about = {"clock_mhz": clock, "power_w": power, "peak_bytes": torch.cuda.max_memory_allocated() - before}
    if clocks:
        pauses = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(pairs)]
        about["pause_ms"] = round(_quantile(pauses, 0.5), 4)
    return [a.elapsed_time(b) for a, b in pairs], about


def _clocks_per_ms() -> float:
    """Of the kernel that torch.cuda._sleep launches: it counts clocks, and their rate follows power."""
    clocks = 1_000_000
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(clocks)  # the host enqueues the rest meanwhile
    first.record()
    torch.cuda._sleep(clocks)
    last.record()
    last.synchronize()
    return clocks / first.elapsed_time(last)


def _pooled(turns: list[tuple[list[float], dict]]) -> dict:
    """One summary of a call's turns: over all calls; of what was read beside them, the median of the turns."""
    known = {key: [about[key] for _, about in turns if about[key] is not None] for key in turns[0][1]}
    read = {key: _quantile(values, 0.5) if values else None for key, values in known.items()}
    return _summary([ms for times, _ in turns for ms in times], **read)


def measure(call: Callable[[], object], device: str) -> dict:
    """Median and p90 in milliseconds by the protocol above."""
    return _pooled([_turn(call, device)])


def measure_in_turns(calls: dict[str, Callable[[], object]], device: str) -> dict[str, dict]:
    """`measure` of calls that take turns, so that all meet the same machine; `spaced`: with pauses as long as each."""
    results: dict[str, dict] = {}
    for spaced in (False, True):
        turns: dict[str, list] = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, call in calls.items():
                turns[name].append(_turn(call, device, results[name]["ms"] if spaced else 0.0))
        for name, mine in turns.items():
            if spaced:
                results[name]["spaced"] = _pooled(mine)
            else:
                results[name] = _pooled(mine)
    return results


def measure_once(call: Callable[[], object], device: str) -> dict:
    """One call without warm-up, by the wall clock: for a peer that takes seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return _summary([1e3 * (time.perf_counter() - start)])


# -------------------------------------------------------------------------------------------------------- forward


def tree_inputs(kind: str, B: int, T: int, T_q: int, H: int, H_kv: int, K: int, V: int, dtype, device, seed: int):
    """iid: Gaussian q, k, v. local: q_t = rho q_{t-1} + sqrt(1 - rho^2) e, independent over heads and dimensions."""
    g = torch.Generator(device=device).manual_seed(seed)
    q = torch.randn(B, T_q, H, K, generator=g, device=device)
    if kind == "local":
        # The recursion in blocks: within one, q_t = rho^t q_0 + sum_s rho^(t-s) sqrt(1-rho^2) e_s is a matrix product.
        block = 512
        i = torch.arange(block, device=device, dtype=torch.float64)
        kernel = torch.where(i[:, None] >= i, LOCAL_RHO ** (i[:, None] - i), 0.0) * math.sqrt(1 - LOCAL_RHO**2)
        kernel, decay = kernel.float(), (LOCAL_RHO ** (i + 1)).float()[:, None]
        last = torch.randn(B, 1, H * K, generator=g, device=device)
        for first in range(0, T_q, block):
            e = q[:, first : first + block].flatten(2)
            n = e.shape[1]
            rows = kernel[:n, :n] @ e + decay[:n] * last
            q[:, first : first + block] = rows.unflatten(2, (H, K))
            last = rows[:, -1:]
    k = torch.randn(B, T, H_kv, K, generator=g, device=device, dtype=dtype)
    v = torch.randn(B, T, H_kv, V, generator=g, device=device, dtype=dtype)
    return q.to(dtype), k, v


def visited(T: int, t0: int, t1: int, r: int, top_k: int, max_top_nodes: int) -> tuple[int, int]:
    """Candidates scored and leaves attended, summed over the queries t0 .. t1-1 of one KV head."""
    layers = len(layer_sizes(T, r, max_top_nodes))
    t = torch.arange(t0, t1, dtype=torch.int64)
    candidates = leaves = 0
    n = t // r ** (layers - 1) + 1
    for layer in reversed(range(layers)):
        candidates += int(n.sum())
        chosen = n.clamp(max=top_k)
        leaves += int((n - chosen).sum() if layer else n.sum())
        if layer:
            n = (chosen - 1) * r + t // r ** (layer - 1) % r + 1
    return candidates, leaves


def _forward_point(args: argparse.Namespace, T: int, kind: str) -> dict:
    dtype = DTYPES[args.dtype]
    T_q = min(T, args.queries or T)
    options = {"compression_rate": args.compression_rate, "top_k_per_layer": args.top_k, "backend": args.backend}

    def timed(seed: int):
        inputs = tree_inputs(
            kind, args.batch, T, T_q, args.heads, args.kv_heads, args.dim, args.dim, dtype, args.device, seed
        )
        return inputs, measure(lambda: forward(*inputs, **options), args.device)

    seeds = range(args.seed + 1, args.seed + args.seeds)
    others = {seed: timed(seed)[1]["ms"] for seed in seeds}
    (q, k, v), result = timed(args.seed)
    result["ms_by_seed"] = {args.seed: result["ms"], **others}
    r, max_top = args.compression_rate, args.top_k * args.compression_rate
    candidates, leaves = visited(T, T - T_q, T, r, args.top_k, max_top)
    flops = args.batch * args.heads * (2 * args.dim * candidates + 2 * args.dim * leaves)
    # Keys of candidates and values of leaves, fetched for each query by itself.
    gathered = args.batch * args.kv_heads * dtype.itemsize * args.dim * (candidates + leaves)
    result |= {
        "op": "forward", "inputs": kind, "T": T, "T_q": T_q, "B": args.batch, "H": args.heads, "H_kv": args.kv_heads,
        "K": args.dim, "V": args.dim, "dtype": args.dtype, "compression_rate": r, "top_k": args.top_k,
        "layers": len(layer_sizes(T, r, max_top)), "candidates_per_query": candidates / T_q, "flops": flops,
        "gathered_bytes": gathered,
        "input_bytes": sum(x.numel() * x.element_size() for x in (q, k, v)), "backend": args.backend,
    }  # fmt: skip
    result["tflops"] = round(flops / result["ms"] / 1e9, 4)
    result["gathered_tb_per_s"] = round(gathered / result["ms"] / 1e9, 4)
    result["us_per_query"] = round(1e3 * result["ms"] / (args.batch * T_q), 3)
    if args.device == "cuda":
        result["floor_ms"] = round(flops / MMA_TFLOPS / 1e9, 4)
    if max(args.dense_up_to, args.dense_once) >= T:
        timed_peer = measure if args.dense_up_to >= T else measure_once
        result["dense"] = timed_peer(lambda: dense_attention(q, k, v), args.device)
        result["speedup_over_dense"] = round(result["dense"]["ms"] / result["ms"], 4)
    if args.device == "cuda" and args.backend != "torch":
        result["phases_ms"] = phases(lambda: forward(q, k, v, **options))
    if args.device == "cpu":
        result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The peer: PyTorch's SDPA, causal with the queries at the end; cuDNN first on a GPU. RoPE is not in its time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[2] == k.shape[2]:
        causal = {"is_causal": True}
    else:
        from torch.nn.attention.bias import causal_lower_right

        causal = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if q.is_cuda:
        backends = [SDPBackend.CUDNN_ATTENTION, *backends]
    with sdpa_kernel(backends, set_priority=True):
        return sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **causal)


# What the kernels of one call are for, by their names; the first that matches.
PHASES = {
    "pooling": r"tree_pool",
    "packing": r"tree_pack|turns_kernel",
    "selection": r"select_kernel",
    "union": r"unite_kernel",
    "first layer: choice": r"htree_layer_kernel<[^>]*Pass\)0[^>]*Walk\)0",
    "first layer: values": r"htree_layer_kernel<[^>]*Pass\)1[^>]*Walk\)0",
    # Launches of two ways to walk a layer: few, and mostly of queries below their first.
    "layers below: choice": r"htree_layer_kernel(_of_two<[^>]*Pass\)0|<[^>]*Pass\)0[^>]*Walk\)[12])",
    "layers below: values": r"htree_layer_kernel(_of_two<[^>]*Pass\)1|<[^>]*Pass\)1[^>]*Walk\)[12])",
}


def phase_of(kernel: str) -> str:
    """The phase that a kernel of `forward` belongs to, by its demangled name."""
    return next((phase for phase, pattern in PHASES.items() if re.search(pattern, kernel)), "other")


PROFILED_CALLS = 3


def increments(events: Iterable[tuple[str, float, float]], calls: int) -> list[tuple[str, float, float]]:
    """Of the last of several equal calls: name, how much later each kernel ends than the one before, and its own time.

    Launches overlap, so that a kernel's own time counts what it waited for the one before it, and own times add up to
    more than the call. From end to end they add up to the call.

    Args:
      events: name, start and end of every kernel of all calls, in any unit and order.
      calls: how many there were; at least two, since the first kernel of the last follows another.

    Raises:
      ValueError: these are not the kernels of so many equal calls.
    """
    ordered = sorted(events, key=lambda event: event[2])
    if calls < 2 or not ordered or len(ordered) % calls:
        raise ValueError(f"{len(ordered)} kernels are not those of {calls} equal calls, two at least")
    last = ordered[-(len(ordered) // calls) - 1 :]
    return [(name, end - before[2], end - start) for before, (name, start, end) in itertools.pairwise(last)]


def kernels(call: Callable[[], object], calls: int = PROFILED_CALLS) -> list[tuple[str, float, float]]:
    """Kernels of a call on a GPU, of the last of several back to back: demangled name, milliseconds from the end of the
    one before to its own end, and its own time (see `increments`)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    found = [(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events]
    return increments(found, calls)


def phases(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds by which the kernels of a call on a GPU delay its end, by phase, in the order of PHASES."""
    sums: dict[str, float] = {}
    for name, ms, _ in kernels(call):
        phase = phase_of(name)
        sums[phase] = sums.get(phase, 0.0) + ms
    return {phase: round(sums[phase], 4) for phase in (*PHASES, "other") if phase in sums}


def _in_child(function: Callable, args: argparse.Namespace, *point) -> dict:
    """A fresh process for each CPU point, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (args, *point))


def run_forward(args: argparse.Namespace) -> list[dict]:
    figures = []
    points = [(T, kind) for kind in args.inputs for T in args.lengths]
    for i, (T, kind) in enumerate(points, 1):
        print(f"[{i}/{len(points)}] forward T = {T}, {kind} ...", file=sys.stderr, flush=True)
        one = _in_child(_forward_point, args, T, kind) if args.device == "cpu" else _forward_point(args, T, kind)
        figures.append(one)
    return figures


# ------------------------------------------------------------------------------------------------------- backward


# The kernels of the backward that multiply, by their names: below the first layer of a query, and in it.
GRADIENT_KERNELS = {
    "queries": "gradient::Pass)0", "nodes": "gradient::Pass)1", "first queries": "gradient::Pass)2",
    "first nodes": "gradient::Pass)3",
}  # fmt: skip


def gradients_of(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """A call that computes dq, dk and dv of an output that was computed before."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = attention(*inputs)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def run_backward(args: argparse.Namespace) -> list[dict]:
    """Peak memory is beyond what lives before a call: the gradients are part of it."""
    figures = []
    points = [(T, kind) for kind in args.inputs for T in args.lengths]
    options = {"compression_rate": args.compression_rate, "top_k_per_layer": args.top_k, "backend": args.backend}
    for i, (T, kind) in enumerate(points, 1):
        print(f"[{i}/{len(points)}] backward T = {T}, {kind} ...", file=sys.stderr, flush=True)
        shape = (args.batch, T, T, args.heads, args.kv_heads, args.dim, args.dim)
        inputs = tree_inputs(kind, *shape, DTYPES[args.dtype], args.device, args.seed)
        call = gradients_of(lambda *x: forward(*x, **options), inputs)
        result = measure(call, args.device)
        if args.device == "cuda" and args.backend != "torch":
            found = kernels(call)
            result["kernels_ms"] = {
                name: round(sum(ms for kernel, ms, _ in found if text in kernel), 4)
                for name, text in {"all": "", **GRADIENT_KERNELS}.items()
            }
        del call
        result |= {
            "op": "backward", "inputs": kind, "T": T, "B": args.batch, "H": args.heads, "H_kv": args.kv_heads,
            "K": args.dim, "V": args.dim, "dtype": args.dtype, "compression_rate": args.compression_rate,
            "top_k": args.top_k, "backend": args.backend,
            "gradient_bytes": sum(x.numel() * x.element_size() for x in inputs),
        }  # fmt: skip
        if args.dense_up_to >= T:
            result["dense"] = measure(gradients_of(dense_attention, inputs), args.device)
            result["speedup_over_dense"] = round(result["dense"]["ms"] / result["ms"], 4)
        figures.append(result)
    return figures


# -------------------------------------------------------------------------------------- attn_dist, sparse_attention


def list_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d_qk: int, dtype, device, seed: int):
    """q, k and distinct uniform indices for every query, unsorted, all valid."""
    g = torch.Generator(device=device).manual_seed(seed)
    q = torch.randn(s_q, h_q, d_qk, generator=g, device=device, dtype=dtype)
    k = torch.randn(s_kv, 1, d_qk, generator=g, device=device, dtype=dtype)
    indices = torch.empty(s_q, 1, topk, dtype=torch.int32, device=device)
    step = max(1, (1 << 28) // (s_kv * 8))
    for first in range(0, s_q, step):
        rows = slice(first, min(first + step, s_q))
        order = torch.rand(rows.stop - rows.start, s_kv, generator=g, device=device).argsort(1)[:, :topk]
        indices[rows, 0] = order.to(torch.int32)
    return q, k, indices


def dist_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d_qk: int, dtype, device, seed: int):
    """`list_inputs`, and the lse that makes each head's slots sum to one."""
    q, k, indices = list_inputs(s_q, h_q, s_kv, topk, d_qk, dtype, device, seed)
    lse = torch.empty(s_q, h_q, dtype=torch.float32, device=device)
    scale = d_qk**-0.5 * math.log2(math.e)
    for s in range(0, s_q, 16):
        gathered = k[indices[s : s + 16, 0].long(), 0].float()
        scores = torch.bmm(q[s : s + 16].float(), gathered.transpose(1, 2)) * scale
        lse[s : s + 16] = torch.logsumexp(scores * math.log(2.0), 2) / math.log(2.0)
    return q, k, indices, lse


def _list_points(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """h_q and s_kv of each figure, announced."""
    points = [(h_q, s_kv) for h_q in args.heads_list for s_kv in args.lengths]
    for i, (h_q, s_kv) in enumerate(points, 1):
        print(f"[{i}/{len(points)}] {args.command} h_q = {h_q}, s_kv = {s_kv} ...", file=sys.stderr, flush=True)
        yield h_q, s_kv


def _list_figure(args: argparse.Namespace, h_q: int, s_kv: int, measured: dict, d_v: int = 0, gathers: int = 1) -> dict:
    """What was measured, and what it counts: products of d_qk + d_v columns, rows fetched so many times a query."""
    flops = 2 * args.queries * args.topk * h_q * (args.dim + d_v)
    gathered = gathers * args.queries * args.topk * args.dim * DTYPES[args.dtype].itemsize
    return measured | {
        "op": args.command, "s_q": args.queries, "h_q": h_q, "s_kv": s_kv, "topk": args.topk, "d_qk": args.dim,
        **({"d_v": d_v} if d_v else {}), "dtype": args.dtype, "backend": args.backend, "flops": flops,
        "gathered_bytes": gathered, "tflops": round(flops / measured["ms"] / 1e9, 4),
        "gathered_tb_per_s": round(gathered / measured["ms"] / 1e9, 4),
    }  # fmt: skip


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, of the largest entry."""
    return ((found.float() - expected.float()).abs().amax() / expected.abs().amax()).item()


def cudnn_attn_dist(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor) -> Callable[[], Tensor] | None:
    """The peer: cuDNN frontend's recompute of sparse attention scores, which divides each row by its sum. None where
    the package is not installed. Source: docs.nvidia.com/cudnn, DeepSeek Sparse Attention."""
    try:
        from cudnn import DSA
    except ImportError:
        return None
    operands = (q[None], k[None, :, 0], (lse * math.log(2.0))[None], indices[None, :, 0], q.shape[2] ** -0.5)
    return lambda: DSA.sparse_attn_score_recompute_wrapper(*operands, qhead_per_kv_head=q.shape[1])["target"]


def _cudnn_figures(ours: Tensor, peer: Callable[[], Tensor], device: str) -> dict:
    """Its time, if its result is ours: an experimental interface may change, or refuse a shape."""
    try:
        found = peer()[0]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return {"cudnn_frontend_error": f"{type(error).__name__}: {error}"[:300]}
    error = _difference(found, normalize_attn_dist(ours))
    if not error < PEER_DIFFERENCE:
        return {"cudnn_frontend_error": f"differs from attn_dist, normalised, by {error:.3g} of the largest"}
    return {"cudnn_frontend": {**measure(peer, device), "relative_error": error}}


def run_attn_dist(args: argparse.Namespace) -> list[dict]:
    figures = []
    for h_q, s_kv in _list_points(args):
        inputs = dist_inputs(args.queries, h_q, s_kv, args.topk, args.dim, DTYPES[args.dtype], args.device, args.seed)
        measured = measure(lambda x=inputs: attn_dist(*x, backend=args.backend), args.device)
        result = _list_figure(args, h_q, s_kv, measured)
        if args.backend != "torch" and args.device == "cuda":
            result["torch_backend"] = measure(lambda x=inputs: attn_dist(*x, backend="torch"), args.device)
            result["speedup_over_torch_backend"] = round(result["torch_backend"]["ms"] / result["ms"], 3)
        peer = cudnn_attn_dist(*inputs)
        if peer is not None and args.device == "cuda":
            result |= _cudnn_figures(attn_dist(*inputs, backend=args.backend), peer, args.device)
        figures.append(result)
    return figures


def flash_mla_attention(q: Tensor, kv: Tensor, indices: Tensor) -> Callable[[], Tensor] | None:
    """The peer: FlashMLA's sparse prefill, whose values are the first 512 columns and which leaves an lse too. None
    where the package is not installed or its kernel lacks the shape. Source: github.com/deepseek-ai/FlashMLA."""
    try:
        from flash_mla import flash_mla_sparse_fwd
    except ImportError:
        return None
    _, h_q, d_qk = q.shape
    if q.dtype != torch.bfloat16 or d_qk != 576 or h_q % 64 or indices.shape[2] % 128:
        return None
    options = _flash_mla_options(flash_mla_sparse_fwd)
    return lambda: flash_mla_sparse_fwd(q, kv, indices, d_qk**-0.5, **options)[0]


def _flash_mla_options(function: Callable) -> dict:
    """sgl-flash-mla keeps the kernels for Hopper apart as legacy ones, and has them write an lse to base 2 as ours does
    where that is asked for: else launches follow that convert it."""
    known = inspect.signature(function).parameters
    return {name: True for name in ("use_legacy", "return_log2_lse") if name in known}


def _flash_mla_identity() -> dict:
    """Its version, null where it says none, the distribution that it came in, and what a build of its own notes."""
    import flash_mla

    found = {"version": getattr(flash_mla, "__version__", None)}
    if names := importlib.metadata.packages_distributions().get("flash_mla"):
        found["distribution"] = names[0]
    if note := getattr(flash_mla, "__note__", None):
        found["note"] = note
    return found


def _sparse_attention_figures(ours: Callable[[], Tensor], peer: Callable[[], Tensor] | None, device: str) -> dict:
    """Times of `sparse_attention`, and those of the peer in turns with it, once its result is ours."""
    if peer is None:
        return measure_in_turns({"this": ours}, device)["this"]
    difference = _difference(peer(), ours())
    if not difference < PEER_DIFFERENCE:
        raise RuntimeError(f"FlashMLA differs from sparse_attention by {difference:.3g} of the largest entry")
    this, theirs = measure_in_turns({"this": ours, "flash_mla": peer}, device).values()
    for mine, other in ((this, theirs), (this["spaced"], theirs["spaced"])):
        mine["speedup_over_flash_mla"] = round(other["ms"] / mine["ms"], 4)
    return {**this, "flash_mla": {**_flash_mla_identity(), "difference": difference, **theirs}}


def run_sparse_attention(args: argparse.Namespace) -> list[dict]:
    """The kernel gathers a row once for each group of 64 heads."""
    figures = []
    for h_q, s_kv in _list_points(args):
        inputs = list_inputs(args.queries, h_q, s_kv, args.topk, args.dim, DTYPES[args.dtype], args.device, args.seed)
        peer = flash_mla_attention(*inputs) if args.device == "cuda" and args.value_dim == 512 else None
        measured = _sparse_attention_figures(
            lambda x=inputs: sparse_attention(*x, d_v=args.value_dim, backend=args.backend)[0], peer, args.device
        )
        figures.append(_list_figure(args, h_q, s_kv, measured, d_v=args.value_dim, gathers=-(-h_q // 64)))
    return figures


# ------------------------------------------------------------------------------------------------------------ output


def table(figures: list[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    rows = [list(columns), *([cell(f) for cell in columns.values()] for f in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


FORWARD_COLUMNS = {
    "inputs": lambda f: f["inputs"],
    "T": lambda f: f"{f['T']:,}",
    "queries": lambda f: f"{f['T_q']:,}",
    "layers": lambda f: str(f["layers"]),
    "candidates/query": lambda f: f"{f['candidates_per_query']:.0f}",
    "ms": lambda f: f"{f['ms']:.2f}",
    "us/query": lambda f: f"{f['us_per_query']:.2f}",
    "TFLOP/s": lambda f: f"{f['tflops']:.1f}",
    "dense ms": lambda f: f"{f['dense']['ms']:.2f}" if "dense" in f else "-",
    "speedup": lambda f: f"{f['speedup_over_dense']:.2f}" if "dense" in f else "-",
    "peak MB": lambda f: f"{f.get('peak_bytes', f.get('peak_rss_bytes', 0)) / 1e6:.0f}",
}
BACKWARD_COLUMNS = {
    "inputs": lambda f: f["inputs"],
    "T": lambda f: f"{f['T']:,}",
    "ms": lambda f: f"{f['ms']:.2f}",
    "dense ms": lambda f: f"{f['dense']['ms']:.2f}" if "dense" in f else "-",
    **{
        name: lambda f, name=name: f"{f['kernels_ms'][name]:.2f}" if "kernels_ms" in f else "-"
        for name in GRADIENT_KERNELS
    },
    "peak MB": lambda f: f"{f['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in f else "-",
    "of them gradients": lambda f: f"{f['gradient_bytes'] / 1e6:.0f}",
}
ATTN_DIST_COLUMNS = {
    "h_q": lambda f: str(f["h_q"]),
    "s_kv": lambda f: f"{f['s_kv']:,}",
    "ms": lambda f: f"{f['ms']:.3f}",
    "p90": lambda f: f"{f['p90_ms']:.3f}",
    "TFLOP/s": lambda f: f"{f['tflops']:.1f}",
    "gathered TB/s": lambda f: f"{f['gathered_tb_per_s']:.2f}",
    "torch ms": lambda f: f"{f['torch_backend']['ms']:.2f}" if "torch_backend" in f else "-",
    "cuDNN ms": lambda f: f"{f['cudnn_frontend']['ms']:.3f}" if "cudnn_frontend" in f else "-",
}
SPARSE_ATTENTION_COLUMNS = {
    **{name: ATTN_DIST_COLUMNS[name] for name in ("h_q", "s_kv", "ms", "p90", "TFLOP/s", "gathered TB/s")},
    "FlashMLA ms": lambda f: f"{f['flash_mla']['ms']:.3f}" if "flash_mla" in f else "-",
    "FlashMLA p90": lambda f: f"{f['flash_mla']['p90_ms']:.3f}" if "flash_mla" in f else "-",
    "speedup": lambda f: f"{f['speedup_over_flash_mla']:.3f}" if "flash_mla" in f else "-",
    "spaced ms": lambda f: f"{f['spaced']['ms']:.3f}",
    "FlashMLA spaced": lambda f: f"{f['flash_mla']['spaced']['ms']:.3f}" if "flash_mla" in f else "-",
    "speedup spaced": lambda f: f"{f['spaced']['speedup_over_flash_mla']:.3f}" if "flash_mla" in f else "-",
}


def crossover(figures: list[dict]) -> int | None:
    """Smallest measured length from which on htree is never slower than dense attention."""
    found = None
    for f in sorted((f for f in figures if "dense" in f), key=lambda f: f["T"]):
        found = (found or f["T"]) if f["speedup_over_dense"] >= 1 else None
    return found


def plot(figures: list[dict], path: Path) -> None:
    """Time over length, one line for each kind of input, and dense attention."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for kind in dict.fromkeys(f["inputs"] for f in figures):
        mine = [f for f in figures if f["inputs"] == kind]
        ax.plot([f["T"] for f in mine], [f["us_per_query"] for f in mine], "o-", label=f"htree, {kind}")
    dense = [f for f in figures if "dense" in f and f["inputs"] == figures[0]["inputs"]]
    if dense:
        per_query = [1e3 * f["dense"]["ms"] / (f["B"] * f["T_q"]) for f in dense]
        ax.plot([f["T"] for f in dense], per_query, "s--", color="gray", label="dense (SDPA)")
    ax.set(xscale="log", yscale="log", xlabel="tokens in the context", ylabel="microseconds per query")
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3)
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m htree_cuda bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    common.add_argument("--backend", choices=["auto", "torch"], default="auto")
    common.add_argument("--dtype", choices=list(DTYPES), default="bfloat16" if cuda else "float32")
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--out", type=Path, help="write the figures to this JSON file")
    f = commands.add_parser("forward", parents=[common], help="htree attention against dense attention over T")
    f.add_argument("--lengths", type=_ints, default=_ints("8192,16384,32768,65536,131072"))
    f.add_argument("--queries", type=int, default=0, help="measure the last N queries (0: all of them)")
    f.add_argument("--inputs", type=lambda s: s.split(","), default=["iid"], help="iid, local or both: iid,local")
    f.add_argument(
        "--seeds", type=int, default=1, help="inputs to time: those of --seed, and so many less one after it"
    )
    f.add_argument("--batch", type=int, default=1)
    f.add_argument("--heads", type=int, default=16 if cuda else 8)
    f.add_argument("--kv-heads", type=int, default=1 if cuda else 2)
    f.add_argument("--dim", type=int, default=128 if cuda else 64)
    f.add_argument("--compression-rate", type=int, default=16)
    f.add_argument("--top-k", type=int, default=512 if cuda else 64)
    f.add_argument("--dense-up-to", type=int, default=262144 if cuda else 131072, help="longest T for the dense peer")
    f.add_argument("--dense-once", type=int, default=0, help="longest T for a single call of it, beyond those lengths")
    f.add_argument("--plot", type=Path, help="write a PNG of time per query over T")
    b = commands.add_parser("backward", parents=[common], help="its gradients against dense attention's over T")
    b.add_argument("--lengths", type=_ints, default=_ints("16384,65536,131072" if cuda else "2048,4096"))
    b.add_argument(
        "--inputs", type=lambda s: s.split(","), default=["iid", "local"], help="iid, local or both: iid,local"
    )
    b.add_argument("--batch", type=int, default=1)
    b.add_argument("--heads", type=int, default=16 if cuda else 8)
    b.add_argument("--kv-heads", type=int, default=1 if cuda else 2)
    b.add_argument("--dim", type=int, default=128 if cuda else 64)
    b.add_argument("--compression-rate", type=int, default=16)
    b.add_argument("--top-k", type=int, default=512 if cuda else 16)
    b.add_argument("--dense-up-to", type=int, default=131072, help="longest T for the dense peer")
    lists = argparse.ArgumentParser(add_help=False)
    lists.add_argument("--queries", type=int, default=4096 if cuda else 32)
    lists.add_argument("--heads-list", type=_ints, default=[128, 64])
    lists.add_argument("--topk", type=int, default=2048)
    lists.add_argument("--dim", type=int, default=576)
    d = commands.add_parser("attn_dist", parents=[common, lists], help="attn_dist over numbers of heads and keys")
    d.add_argument("--lengths", type=_ints, default=_ints("4096,16384,65536,131072" if cuda else "4096"))
    s = commands.add_parser(
        "sparse_attention",
        parents=[common, lists],
        help="sparse_attention over numbers of heads and keys, in turns with FlashMLA where it is installed",
    )
    s.add_argument("--lengths", type=_ints, default=_ints("16384,65536" if cuda else "4096"))
    s.add_argument("--value-dim", type=int, default=512)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    runner, columns = {
        "forward": (run_forward, FORWARD_COLUMNS),
        "backward": (run_backward, BACKWARD_COLUMNS),
        "attn_dist": (run_attn_dist, ATTN_DIST_COLUMNS),
        "sparse_attention": (run_sparse_attention, SPARSE_ATTENTION_COLUMNS),
    }[args.command]
    figures = runner(args)
    print(table(figures, columns))
    report = {"program": f"bench {args.command}", **identity(args.device), "figures": figures}
    if args.command == "forward" and any("dense" in f for f in figures):
        for kind in args.inputs:
            at = crossover([f for f in figures if f["inputs"] == kind])
            report.setdefault("crossover", {})[kind] = at
            print(f"{kind}: faster than dense attention from T = {at}" if at else f"{kind}: dense attention is faster")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {args.out}")
    if getattr(args, "plot", None):
        plot(figures, args.plot)
        print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
