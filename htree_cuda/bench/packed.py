"""`bench packed`: packed sequences beside batched calls, beside the sum of their documents, and beside PyTorch's own
attention of packed sequences."""

from __future__ import annotations

import argparse
import inspect
import math
import random
import sys

import torch

from .. import forward, forward_varlen
from .inputs import DTYPES
from .protocol import measure

# Seconds of warm-up and of timed calls. The GPU is warm from the row before, and every row has a call of its own to be
# compared with.
SECONDS = (0.2, 0.6)
# The same for each length of a document. Its time is that of one sequence of a batch of its length which fills the GPU.
# Nothing is interpolated between fewer lengths: from 16 top_k tokens on a sequence has one layer more, and its cost
# rises in a straight line, by a factor of 5 to 9 up to twice that length.
DOCUMENT_SECONDS = (0.03, 0.15)


def documents(total: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths drawn log-uniform that fill a pack; the last one is cut."""
    rng = random.Random(seed)
    found: list[int] = []
    while sum(found) < total:
        length = round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
        found.append(min(length, total - sum(found)))
    return found


def _inputs(args: argparse.Namespace, rows: tuple[int, ...], H: int, H_kv: int):
    g = torch.Generator(device=args.device).manual_seed(args.seed)
    place = {"generator": g, "device": args.device, "dtype": DTYPES[args.dtype]}
    return [torch.randn(*rows, heads, args.dim, **place).requires_grad_() for heads in (H, H_kv, H_kv)]


def _measured(call, tensors, args: argparse.Namespace, gradients: bool, seconds=SECONDS) -> dict:
    """Forward without gradients; or a backward alone, through a graph that is kept."""
    options = {"seconds": seconds, "probed": seconds != DOCUMENT_SECONDS}
    if not gradients:
        with torch.no_grad():
            return measure(call, args.device, **options)
    out = call()
    dout = torch.randn_like(out)
    return measure(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True), args.device, **options)


def _packed(args: argparse.Namespace, lengths: list[int], H: int, H_kv: int, top_k: int, gradients: bool) -> dict:
    q, k, v = _inputs(args, (sum(lengths),), H, H_kv)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=args.device)
    most = max(lengths)

    def call():
        return forward_varlen(q, k, v, cu, cu, most, most, top_k_per_layer=top_k, backend=args.backend)

    return _measured(call, (q, k, v), args, gradients)


def _batched(args, B: int, T: int, H: int, H_kv: int, top_k: int, gradients: bool, seconds=SECONDS) -> dict:
    q, k, v = _inputs(args, (B, T), H, H_kv)

    def call():
        return forward(q, k, v, top_k_per_layer=top_k, backend=args.backend)

    return _measured(call, (q, k, v), args, gradients, seconds)


def _peer(args: argparse.Namespace, lengths: list[int], H: int, H_kv: int, gradients: bool) -> dict | None:
    """PyTorch's attention of packed sequences, where this PyTorch has it."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    q, k, v = _inputs(args, (sum(lengths),), H, H_kv)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=args.device)
    most = max(lengths)
    taken = inspect.signature(varlen.varlen_attn).parameters
    options = {"window_size": (-1, 0)} if "window_size" in taken else {"is_causal": True}
    # Not every version has grouped heads. Where one has none, its keys and values are repeated beforehand.
    if "enable_gqa" in taken:
        options["enable_gqa"] = True
    else:
        k, v = (x.detach().repeat_interleave(H // H_kv, 1).requires_grad_() for x in (k, v))

    def call():
        return varlen.varlen_attn(q, k, v, cu, cu, most, most, **options)

    try:
        result = _measured(call, (q, k, v), args, gradients)
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"torch.nn.attention.varlen does not run: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return result | {"name": f"torch.nn.attention.varlen of PyTorch {torch.__version__}, {_flash_attention()}"}


def _flash_attention() -> str:
    """Which FlashAttention PyTorch runs: its own build of the second, where no other was activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return "FA2" if current is None else str(current)


def point(args: argparse.Namespace, case: str, H: int, H_kv: int, top_k: int, gradients: bool) -> dict:
    total = args.total
    if case == "equal":  # 8 sequences that together are twice the total
        lengths = [total // 4] * 8
        beside = _batched(args, 8, total // 4, H, H_kv, top_k, gradients)
    elif case == "documents":
        lengths = documents(total, 256, total // 2, args.seed)
        times = {}
        for T in sorted(set(lengths)):
            B = max(1, total // T)
            times[T] = _batched(args, B, T, H, H_kv, top_k, gradients, DOCUMENT_SECONDS)["ms"] / B
        beside = {"ms": sum(times[x] for x in lengths), "ms_by_length": times}
    elif case == "dense":
        lengths = [total // 16] * 16
        beside = _peer(args, lengths, H, H_kv, gradients)
    else:
        lengths = [16] * (total // 16)
        beside = None
    result = _packed(args, lengths, H, H_kv, top_k, gradients)
    result |= {
        "op": "forward_varlen", "case": case, "what": "backward" if gradients else "forward", "sequences": len(lengths),
        "total": sum(lengths), "H": H, "H_kv": H_kv, "K": args.dim, "top_k": top_k, "dtype": args.dtype,
        "backend": args.backend, "seed": args.seed, "lengths": lengths if case == "documents" else lengths[:1],
    }  # fmt: skip
    if beside is not None:
        result |= {"beside": beside, "ratio": round(result["ms"] / beside["ms"], 4)}
    return result


def run(args: argparse.Namespace) -> list[dict]:
    points = [
        (case, H, H_kv, top_k, gradients)
        for gradients in ((False, True) if args.backward else (False,))
        for H, H_kv in args.heads
        for top_k in args.top_k
        for case in args.cases
        if case != "dense" or args.total // 16 <= 16 * top_k  # dense attention by definition
    ]
    figures = []
    for i, one in enumerate(points, 1):
        print(f"[{i}/{len(points)}] packed {one} ...", file=sys.stderr, flush=True)
        figures.append(point(args, *one))
        args.keep(figures)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return figures


LEAST = {"equal": 4, "documents": 2, "dense": 16, "short": 16}  # tokens of --total, by case
CASES = tuple(LEAST)
COLUMNS = {
    "case": lambda f: f["case"],
    "what": lambda f: f["what"],
    "sequences": lambda f: f"{f['sequences']:,}",
    "tokens": lambda f: f"{f['total']:,}",
    "heads": lambda f: f"{f['H']}/{f['H_kv']}",
    "top_k": lambda f: str(f["top_k"]),
    "ms": lambda f: f"{f['ms']:.3f}",
    "beside ms": lambda f: f"{f['beside']['ms']:.3f}" if "beside" in f else "-",
    "ratio": lambda f: f"{f['ratio']:.3f}" if "ratio" in f else "-",
    "peak MB": lambda f: f"{f.get('peak_bytes', 0) / 1e6:.0f}",
}
