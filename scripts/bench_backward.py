"""Times the backward of `forward` beside that of dense attention, by the protocol of htree_cuda/bench.py.

    python scripts/bench_backward.py [--lengths 16384,65536,131072] [--inputs iid,local] [--out FILE]

B 1, H 16, H_kv 1, K = V = 128, bf16, top_k 512 unless said otherwise. A call is `torch.autograd.grad` of an output that
was computed before. On a GPU with the time of the two kernels that multiply, of one profiled call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from content_hash import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))
import htree_cuda
from htree_cuda.bench import DTYPES, dense_attention, identity, measure, table, tree_inputs

KERNELS = {"queries": "gradient::Pass)0", "nodes": "gradient::Pass)1"}


def timed(attention: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: str) -> tuple[dict, Callable]:
    """Median milliseconds of the gradients of `attention`, and the call that was timed."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    out = attention(*inputs)
    gradient = torch.randn_like(out)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return measure(call, device), call


def kernel_ms(call: Callable) -> dict[str, float]:
    """Of one call's kernels on a GPU: all, and the two that multiply."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    names = {"all": "", **KERNELS}
    return {
        name: round(sum(e.time_range.elapsed_us() for e in events if text in e.name) / 1e3, 3)
        for name, text in names.items()
    }


def point(args: argparse.Namespace, T: int, kind: str) -> dict:
    """One length and kind of inputs. Peak memory is beyond what lives before the call; the gradients are part of it."""
    shape = (1, T, T, args.heads, args.kv_heads, args.dim, args.dim)
    inputs = tree_inputs(kind, *shape, DTYPES[args.dtype], args.device, args.seed)
    result, call = timed(lambda *x: htree_cuda.forward(*x, top_k_per_layer=args.top_k), inputs, args.device)
    if args.device == "cuda":
        result["kernels_ms"] = kernel_ms(call)
    del call
    result |= {
        "op": "backward", "inputs": kind, "T": T, "B": 1, "H": args.heads, "H_kv": args.kv_heads, "K": args.dim,
        "V": args.dim, "dtype": args.dtype, "top_k": args.top_k,
        "gradient_bytes": sum(x.numel() * x.element_size() for x in inputs),
    }  # fmt: skip
    if args.dense_up_to >= T:
        result["dense"], _ = timed(dense_attention, inputs, args.device)
    return result


def main(argv: list[str] | None = None) -> int:
    """Prints a table, and writes it with everything else as JSON where --out says."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default=[16384, 65536, 131072])
    parser.add_argument("--inputs", type=lambda text: text.split(","), default=["iid", "local"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense-up-to", type=int, default=131072, help="0: no dense attention")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    figures = []
    points = [(T, kind) for kind in args.inputs for T in args.lengths]
    for i, (T, kind) in enumerate(points, 1):
        print(f"[{i}/{len(points)}] backward T = {T}, {kind} ...", file=sys.stderr, flush=True)
        figures.append(point(args, T, kind))
    columns = {
        "inputs": lambda f: f["inputs"],
        "T": lambda f: f"{f['T']:,}",
        "ms": lambda f: f"{f['ms']:.2f}",
        "dense ms": lambda f: f"{f['dense']['ms']:.2f}" if "dense" in f else "-",
        **{name: lambda f, name=name: f"{f.get('kernels_ms', {}).get(name, 0.0):.2f}" for name in KERNELS},
        "peak MB": lambda f: f"{f.get('peak_bytes', 0) / 1e6:.0f}",
        "of them gradients": lambda f: f"{f['gradient_bytes'] / 1e6:.0f}",
    }
    print(table(figures, columns))
    if args.out is not None:
        args.out.write_text(json.dumps({**identity(args.device), "figures": figures}, indent=1) + "\n")
        print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
