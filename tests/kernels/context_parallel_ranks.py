"""One rank of tests/kernels/test_context_parallel.py, on a GPU of its own: `RANK WORLD RENDEZVOUS OUT` writes what each
check said, an empty text where it passed, up to the first that fails: the ranks may not be in step after it. Every rank
computes what one GPU would and compares its own tokens."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import htree_cuda
from htree_cuda import distributed as cp
from htree_cuda.distributed import attention, balance, exchange

BF16, FP16 = torch.bfloat16, torch.float16


def inputs(T, B=1, H=16, H_kv=1, D=128, dtype=BF16):
    g = torch.Generator(device="cuda").manual_seed(T)
    shapes = [(B, T, h, D) for h in (H, H_kv, H_kv, H)]
    q, k, v, dout = (torch.randn(shape, generator=g, device="cuda", dtype=torch.float32).to(dtype) for shape in shapes)
    return (q, k, v), (dout, torch.rand(B, T, H, generator=g, device="cuda") + 0.5)


def run(call, tensors, grads):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse, *selection = call(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, grads), *selection]


def compare(layouts=("zigzag", "contiguous"), shape=None, **options):
    """out, lse, selection and dq bit for bit; dk and dv, whose partial sums are added in another order, within two
    units in the last place of the dtype, of the numbers themselves or of the largest sums that cancelled. A call that
    returns no selection lends queries."""
    group = dist.group.WORLD
    tensors, grads = inputs(**shape)
    options = {"return_lse": True, "deterministic": True, **options}
    whole = run(lambda *x: htree_cuda.forward(*x, return_selection=True, **options), tensors, grads)
    for layout, selects in [(x, y) for x in layouts for y in ((True, False) if x == "zigzag" else (True,))]:
        own = [[cp.shard(x, 1, group, layout) for x in some] for some in (tensors, grads)]
        call = lambda *x: cp.context_parallel_forward(  # noqa: E731
            *x, group=group, layout=layout, return_selection=selects, **options  # noqa: B023
        )  # fmt: skip
        found, again = (run(call, *own) for _ in range(2))
        names = ("out", "lse", "dq", "dk", "dv", "selection")[: len(found)]
        for name, x, repeated, y in zip(names, found, again, whole, strict=False):
            assert torch.equal(x, repeated), f"{layout} {name}: two runs differ"
            expected = cp.shard(y, 2 if name == "selection" else 1, group, layout)
            if name in ("dk", "dv"):
                x, y = x.float(), expected.float()
                unit = 2.0**-8 if tensors[0].dtype == BF16 else 2.0**-11
                error = ((x - y).abs() / (y.abs() + 2.0**-7 * y.abs().max())).max().item()
                assert error <= 4 * unit, f"{layout} {name}: {error}"
                assert y.abs().max() > 0
            else:
                differ = (x != expected).float().mean().item()
                assert differ == 0, f"{layout} {name}: {differ:.2%} of the numbers differ"


# ------------------------------------------------------------------------------------------------------------- checks


def check_top_k_512():
    assert balance.loans(65536, 2, 16, 16, 512, 8192).forward, "nothing is lent"
    compare(shape={"T": 65536}, top_k_per_layer=512)


def check_top_k_64_and_eight_kv_heads():
    assert balance.loans(32768, 2, 4, 16, 64, 1024).backward, "nothing is lent"
    compare(shape={"T": 32768, "H": 32, "H_kv": 8}, top_k_per_layer=64)


def check_fewer_queries_lent_in_the_backward():
    """Selections of the others travel back."""
    loans = balance.loans(1 << 17, 2, 4, 16, 64, 1024)
    assert loans.forward.count > loans.backward.count > 0
    compare(("zigzag",), shape={"T": 1 << 17, "H": 8, "H_kv": 2}, top_k_per_layer=64)


def check_selected_again_in_the_backward():
    compare(shape={"T": 16384, "H": 8, "H_kv": 2, "D": 64}, top_k_per_layer=32, save_selection=False)


def check_float16_batches_and_no_strict_causality():
    compare(shape={"T": 8192, "B": 2, "H": 8, "H_kv": 2, "D": 64, "dtype": FP16}, top_k_per_layer=16)
    compare(shape={"T": 6008, "H": 8, "H_kv": 2, "D": 64}, top_k_per_layer=16, strict_causal=False)


def check_several_chunks_of_kv_heads():
    """dk and dv of three heads exceed 512 MiB in float32 at this length: one head, then two."""
    compare(("zigzag",), shape={"T": 1 << 19, "H": 3, "H_kv": 3, "D": 64}, top_k_per_layer=16, save_selection=False)


def check_heads_of_tensors_that_have_all():
    """Chunks of one KV head, views of what has all heads, whose keys are gathered beside the chunk before."""
    saved, staging = attention.SUM_BYTES, exchange.STAGING_BYTES
    attention.SUM_BYTES, exchange.STAGING_BYTES = 32768 * 128 * 2 * 4, 3 << 20
    try:
        compare(shape={"T": 32768, "H": 16, "H_kv": 4}, top_k_per_layer=64)
        compare(("zigzag",), shape={"T": 32768, "H": 16, "H_kv": 4}, top_k_per_layer=64, save_selection=False)
        compare(("zigzag",), shape={"T": 32768, "H": 32, "H_kv": 2}, top_k_per_layer=64, rope_interleaved=True)
    finally:
        attention.SUM_BYTES, exchange.STAGING_BYTES = saved, staging


def check_sums_beside_a_call_of_two_heads():
    """Sums of a chunk of KV heads are on their way while those of the first head of the next one are distributed on a
    second stream."""
    saved, attention.SUM_BYTES = attention.SUM_BYTES, 2 * (1 << 17) * 256 * 4
    try:
        compare(("zigzag",), shape={"T": 1 << 17, "H": 16, "H_kv": 4}, top_k_per_layer=64, save_selection=True)
    finally:
        attention.SUM_BYTES = saved


def check_other_work_on_the_device_in_between():
    """A stream that is not the default one, and memory that is used again at once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            compare(("zigzag",), shape={"T": 4096, "H": 8, "H_kv": 2, "D": 64}, top_k_per_layer=16)
            torch.randn(1 << 24, device="cuda")


def check_ranks_that_disagree_raise_everywhere():
    group = dist.new_group()
    (q, k, v), _ = inputs(4096, H=8, D=64)
    n = 2048 if dist.get_rank() == 0 else 1024
    try:
        cp.context_parallel_forward(q[:, :n], k[:, :n], v[:, :n], group=group, top_k_per_layer=16)
    except ValueError as error:
        assert "the shape of q" in str(error), error
        return
    raise AssertionError("no error")


def main() -> None:
    rank, world, rendezvous, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    said = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                said[name] = ""
            except Exception:
                said[name] = traceback.format_exc()
            Path(f"{out}.{rank}").write_text(json.dumps(said))
            if said[name]:
                print(said[name], flush=True)
                os._exit(1)  # without the group, for which another rank may wait
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
