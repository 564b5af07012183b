"""Where the time of the backward goes on a Hopper GPU: each kernel's share, beside dense attention's backward.

    python tools/gpu_backward.py [ROW ...]     a row is HEADS,KV_HEADS,THOUSAND_TOKENS,TOP_K

Every row is measured with `local` and with `iid` inputs, in bf16 with K = V = 128. Kernels count from the end of the
one before to their own end (`bench.phases.increments`), in milliseconds of a call; brackets hold the number
of launches. Dense is PyTorch's SDPA, cuDNN first; with --no-dense it is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable

from content_hash import ROOT

ROWS = ("32,8,32,128", "32,8,64,128", "32,8,64,512", "64,8,32,128", "16,1,32,128", "16,1,64,128", "16,1,64,512")
KERNELS = ("dkdv_entry", "dq_entry", "dkdv_selected", "dq_selected", "dq_gather", "visit_lists", "reverse_index",
           "add_segments", "pack", "distribute", "pool", "memset")  # fmt: skip
SECONDS = 0.5  # that a row is timed for, about


def kernel_of(name: str) -> str:
    """Which of KERNELS a launch is, by its name on the device."""
    return next((kernel for kernel in KERNELS if re.search(kernel, name.lower())), "other")


def milliseconds(call: Callable[[], object]) -> float:
    """The time of a call, of several back to back."""
    import torch

    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        once = time.perf_counter() - begin
    calls = max(2, min(50, int(SECONDS / once)))
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(calls):
        call()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / calls


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--inputs", default="local,iid")
    parser.add_argument("--no-dense", action="store_true")
    args = parser.parse_args(argv)

    sys.path.insert(0, str(ROOT))
    import torch

    import htree_cuda
    from htree_cuda.bench import inputs, peers, phases

    def backward_of(out, x):
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, x, dout, retain_graph=True)

    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for row in args.rows:
        H, H_kv, thousand, top_k = map(int, row.split(","))
        T = thousand * 1024
        dense = None
        for kind in args.inputs.split(","):
            x = [
                t.requires_grad_()
                for t in inputs.tree_inputs(kind, 1, T, T, H, H_kv, 128, 128, torch.bfloat16, "cuda", 0)
            ]
            call = backward_of(htree_cuda.forward(*x, top_k_per_layer=top_k), x)
            sums: dict[str, list[float]] = {}
            total = milliseconds(call)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            memory = (torch.cuda.max_memory_allocated() - before) / 2**20
            for name, ms, _ in phases.kernels(call):
                of = sums.setdefault(kernel_of(name), [0.0, 0])
                of[0] += ms
                of[1] += 1
            if dense is None and not args.no_dense:
                dense = milliseconds(backward_of(peers.dense_attention(*x), x))
            table = ", ".join(f"{name} {ms:.2f} [{count}]" for name, (ms, count) in sums.items())
            beside = "" if dense is None else f", dense {dense:.2f}"
            shape = f"{H} on {H_kv}, {thousand}K, top_k {top_k}, {kind}"
            print(f"{shape}: {total:.2f} ms{beside}, {memory:.0f} MiB | {table}", flush=True)
            del x, call
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
