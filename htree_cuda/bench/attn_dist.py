"""`bench attn_dist`: over numbers of heads and keys, beside cuDNN frontend's operation where it is installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torch import Tensor

from .. import attn_dist, normalize_attn_dist
from . import lists
from .inputs import DTYPES, dist_inputs
from .peers import PEER_DIFFERENCE, cudnn_attn_dist, difference
from .protocol import measure


def _cudnn_figures(ours: Tensor, peer: Callable[[], Tensor], device: str) -> dict:
    """Its time, if its result is ours: an experimental interface may change, or refuse a shape."""
    try:
        found = peer()[0]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return {"cudnn_frontend_error": f"{type(error).__name__}: {error}"[:300]}
    error = difference(found, normalize_attn_dist(ours))
    if not error < PEER_DIFFERENCE:
        return {"cudnn_frontend_error": f"differs from attn_dist, normalised, by {error:.3g} of the largest"}
    return {"cudnn_frontend": {**measure(peer, device), "relative_error": error}}


def run(args: argparse.Namespace) -> list[dict]:
    figures = []
    for h_q, s_kv in lists.points(args):
        inputs = dist_inputs(args.queries, h_q, s_kv, args.topk, args.dim, DTYPES[args.dtype], args.device, args.seed)
        measured = measure(lambda x=inputs: attn_dist(*x, backend=args.backend), args.device)
        result = lists.figure(args, h_q, s_kv, measured)
        if args.backend != "torch" and args.device == "cuda":
            result["torch_backend"] = measure(lambda x=inputs: attn_dist(*x, backend="torch"), args.device)
            result["speedup_over_torch_backend"] = round(result["torch_backend"]["ms"] / result["ms"], 3)
        peer = cudnn_attn_dist(*inputs)
        if peer is not None and args.device == "cuda":
            result |= _cudnn_figures(attn_dist(*inputs, backend=args.backend), peer, args.device)
        figures.append(result)
    return figures


COLUMNS = {
    "h_q": lambda f: str(f["h_q"]),
    "s_kv": lambda f: f"{f['s_kv']:,}",
    "ms": lambda f: f"{f['ms']:.3f}",
    "p90": lambda f: f"{f['p90_ms']:.3f}",
    "TFLOP/s": lambda f: f"{f['tflops']:.1f}",
    "gathered TB/s": lambda f: f"{f['gathered_tb_per_s']:.2f}",
    "torch ms": lambda f: f"{f['torch_backend']['ms']:.2f}" if "torch_backend" in f else "-",
    "cuDNN ms": lambda f: f"{f['cudnn_frontend']['ms']:.3f}" if "cudnn_frontend" in f else "-",
}
