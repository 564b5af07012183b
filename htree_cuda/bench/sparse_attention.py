"""`bench sparse_attention`: over numbers of heads and keys, interleaved with FlashMLA's where it is installed; with
--backward its gradients, atomic and deterministic."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from .. import sparse_attention
from . import lists
from .attn_dist import COLUMNS as ATTN_DIST_COLUMNS
from .inputs import DTYPES, list_inputs
from .peers import PEER_DIFFERENCE, difference, flash_mla_attention, flash_mla_identity
from .protocol import measure, measure_interleaved


def _figures(ours: Callable[[], Tensor], peer: Callable[[], Tensor] | None, device: str) -> dict:
    """Times of `sparse_attention`, interleaved with those of the peer, once its result is ours."""
    if peer is None:
        return measure_interleaved({"this": ours}, device)["this"]
    error = difference(peer(), ours())
    if not error < PEER_DIFFERENCE:
        raise RuntimeError(f"FlashMLA differs from sparse_attention by {error:.3g} of the largest entry")
    this, theirs = measure_interleaved({"this": ours, "flash_mla": peer}, device).values()
    for own, other in ((this, theirs), (this["spaced"], theirs["spaced"])):
        own["speedup_over_flash_mla"] = round(other["ms"] / own["ms"], 4)
    return {**this, "flash_mla": {**flash_mla_identity(), "difference": error, **theirs}}


def _backward(args: argparse.Namespace, h_q: int, s_kv: int) -> dict:
    """Times of the gradients of q and kv, on ascending lists, as the selector gives them."""
    inputs = list_inputs(args.queries, h_q, s_kv, args.topk, args.dim, DTYPES[args.dtype], args.device, args.seed)
    q, kv, indices = inputs[0].requires_grad_(), inputs[1].requires_grad_(), inputs[2].sort(2).values
    g = torch.Generator(device=args.device).manual_seed(args.seed + 1)
    dout = torch.randn(args.queries, h_q, args.value_dim, generator=g, device=args.device, dtype=q.dtype)
    found = []
    for deterministic in (False, True):
        options = {"d_v": args.value_dim, "backend": args.backend, "deterministic": deterministic}
        out = sparse_attention(q, kv, indices, return_lse=False, **options)
        found.append(measure(lambda out=out: torch.autograd.grad(out, (q, kv), dout, retain_graph=True), args.device))
    figure = lists.figure(args, h_q, s_kv, found[0], d_v=args.value_dim, gathers=-(-h_q // 64))
    # Five products: three of d_qk columns, two of d_v.
    figure["flops"] = 2 * args.queries * args.topk * h_q * (3 * args.dim + 2 * args.value_dim)
    figure["tflops"] = round(figure["flops"] / figure["ms"] / 1e9, 4)
    ratio = round(found[1]["ms"] / found[0]["ms"], 4)
    return {**figure, "op": "sparse_attention_backward", "deterministic": {**found[1], "of_atomic": ratio}}


def run(args: argparse.Namespace) -> list[dict]:
    """The kernels gather a row once for each group of 64 heads."""
    if args.backward:
        return [_backward(args, h_q, s_kv) for h_q, s_kv in lists.points(args)]
    figures = []
    for h_q, s_kv in lists.points(args):
        inputs = list_inputs(args.queries, h_q, s_kv, args.topk, args.dim, DTYPES[args.dtype], args.device, args.seed)
        peer = flash_mla_attention(*inputs) if args.device == "cuda" and args.value_dim == 512 else None
        measured = _figures(
            lambda x=inputs: sparse_attention(*x, d_v=args.value_dim, backend=args.backend)[0], peer, args.device
        )
        figures.append(lists.figure(args, h_q, s_kv, measured, d_v=args.value_dim, gathers=-(-h_q // 64)))
    return figures


COLUMNS = {
    **{name: ATTN_DIST_COLUMNS[name] for name in ("h_q", "s_kv", "ms", "p90", "TFLOP/s", "gathered TB/s")},
    "FlashMLA ms": lambda f: f"{f['flash_mla']['ms']:.3f}" if "flash_mla" in f else "-",
    "FlashMLA p90": lambda f: f"{f['flash_mla']['p90_ms']:.3f}" if "flash_mla" in f else "-",
    "speedup": lambda f: f"{f['speedup_over_flash_mla']:.3f}" if "flash_mla" in f else "-",
    "deterministic ms": lambda f: f"{f['deterministic']['ms']:.3f}" if "deterministic" in f else "-",
    "of atomic": lambda f: f"{f['deterministic']['of_atomic']:.2f}" if "deterministic" in f else "-",
    "spaced ms": lambda f: f"{f['spaced']['ms']:.3f}" if "spaced" in f else "-",
    "FlashMLA spaced": lambda f: f"{f['flash_mla']['spaced']['ms']:.3f}" if "flash_mla" in f else "-",
    "speedup spaced": lambda f: f"{f['spaced']['speedup_over_flash_mla']:.3f}" if "flash_mla" in f else "-",
}
