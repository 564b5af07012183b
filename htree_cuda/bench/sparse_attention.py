"""`bench sparse_attention`: over numbers of heads and keys, interleaved with FlashMLA's where it is installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torch import Tensor

from .. import sparse_attention
from . import lists
from .attn_dist import COLUMNS as ATTN_DIST_COLUMNS
from .inputs import DTYPES, list_inputs
from .peers import PEER_DIFFERENCE, difference, flash_mla_attention, flash_mla_identity
from .protocol import measure_interleaved


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


def run(args: argparse.Namespace) -> list[dict]:
    """The kernel gathers a row once for each group of 64 heads."""
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
    "spaced ms": lambda f: f"{f['spaced']['ms']:.3f}",
    "FlashMLA spaced": lambda f: f"{f['flash_mla']['spaced']['ms']:.3f}" if "flash_mla" in f else "-",
    "speedup spaced": lambda f: f"{f['spaced']['speedup_over_flash_mla']:.3f}" if "flash_mla" in f else "-",
}
