"""`bench backward`: the gradients of htree attention beside those of dense attention over lengths."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from .. import forward
from .inputs import DTYPES, tree_inputs
from .peers import dense_attention
from .phases import GRADIENT_KERNELS, kernels
from .protocol import measure


def gradients_of(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """A call that computes dq, dk and dv of an output that was computed before."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = attention(*inputs)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def run(args: argparse.Namespace) -> list[dict]:
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
                name: round(sum(ms for kernel, ms, _ in found if re.search(text, kernel)), 4)
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


COLUMNS = {
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
