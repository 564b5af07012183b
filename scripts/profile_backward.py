"""Milliseconds of the kernels of one backward call, on a Hopper machine: the table of docs/htree_backward.md.

python scripts/profile_backward.py [T ...]    default: 16384 65536 131072

B 1, H 16, H_kv 1, K = V = 128, bf16, top_k 512.
"""

from __future__ import annotations

import sys

import torch
from content_hash import ROOT
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(ROOT))
import htree_cuda
from htree_cuda.bench import tree_inputs

KERNELS = {"queries": "gradient::Pass)0", "nodes": "gradient::Pass)1"}


def backward_ms(T: int, kind: str) -> dict[str, float]:
    """All kernels of the second of two backward calls, and the two that multiply."""
    inputs = [x.requires_grad_() for x in tree_inputs(kind, 1, T, T, 16, 1, 128, 128, torch.bfloat16, "cuda", 0)]
    out = htree_cuda.forward(*inputs)
    gradient = torch.randn_like(out)
    out.backward(gradient, retain_graph=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        out.backward(gradient)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    names = {"total": "", **KERNELS}
    return {
        name: sum(e.time_range.elapsed_us() for e in events if text in e.name) / 1e3 for name, text in names.items()
    }


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("profile_backward.py needs a Hopper GPU")
    for T in map(int, sys.argv[1:] or ("16384", "65536", "131072")):
        for kind in ("local", "iid"):
            print(f"T {T} {kind}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in backward_ms(T, kind).items()))
