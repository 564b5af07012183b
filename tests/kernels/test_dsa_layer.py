"""On a Hopper GPU: DSAttention by kernels beside itself by PyTorch operations, and the warm-up's loss on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import htree_cuda
from htree_cuda import DSAttention, dsa_module
from tests.baseline import FACTOR

pytestmark = [pytest.mark.gpu, pytest.mark.hardware]

D, T = 256, 640


def layer(backend: str, dtype: torch.dtype, **options) -> DSAttention:
    torch.manual_seed(1)
    module = DSAttention(
        D, 64, q_lora_rank=128, index_n_heads=16, rope_base=10000.0, rope_interleaved=True,
        index_rope_interleaved=False, backend=backend, device="cuda", dtype=torch.float64, **options,
    )  # fmt: skip
    for p in module.parameters():  # what low precision rounds is the same number for every module
        p.data = p.data.bfloat16().to(torch.float64)
    return module.to(dtype)


def results(module: DSAttention, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
    x = x.to(module.wo.weight.dtype).requires_grad_()
    out, loss = module(x)
    names = ["x", *(name for name, _ in module.named_parameters())]
    gradients = torch.autograd.grad((out, loss), [x, *module.parameters()], (dout.to(out.dtype), torch.ones_like(loss)))
    return {"out": out, "loss": loss, **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_every_key_its_error_is_at_most_twice_that_of_pytorch(dtype):
    """Out, loss and every gradient, against the same weights in float64; and dense attention in stage "warmup"."""
    torch.manual_seed(5)  # the loss is one number: the chance of the draw would decide how it compares
    x = torch.randn(2, T, D, device="cuda").bfloat16().double()
    dout = torch.randn(2, T, D, device="cuda").bfloat16().double()
    options = {"index_topk": 2048}
    exact = results(layer("torch", torch.float64, **options), x, dout)
    plain = results(layer("torch", dtype, **options), x, dout)
    kernels = results(layer("auto", dtype, **options), x, dout)
    dense = results(layer("auto", dtype, stage="warmup", **options), x, dout)
    for name, wanted in exact.items():
        baseline = (plain[name].double() - wanted).abs()
        for found in (kernels[name], dense[name]):
            error = (found.double() - wanted).abs()
            assert error.square().mean().sqrt() <= FACTOR * baseline.square().mean().sqrt(), name
            # The largest of a tensor that both round: one unit of the dtype's last place decides it by chance.
            floor = torch.finfo(dtype).eps * wanted.abs().max()
            assert error.max() <= FACTOR * baseline.max() + floor, name


def test_lists_are_those_of_pytorch_and_so_is_the_attention_on_them(monkeypatch):
    seen: list[Tensor] = []
    original = dsa_module.indexer_topk

    def look(*args, **options):
        found = original(*args, **options)
        seen.append(found[0])
        return found

    monkeypatch.setattr(dsa_module, "indexer_topk", look)
    x = torch.randn(1, 4096, D, device="cuda").bfloat16()
    outs = [layer(backend, torch.bfloat16, index_topk=256)(x) for backend in ("auto", "torch")]
    ours, theirs = (torch.zeros(4096, 4096, device="cuda").scatter_(1, y[0, :, 0].clamp(min=0).long(), 1) for y in seen)
    same = (ours * theirs).sum(1) / theirs.sum(1)
    assert same.mean() > 0.99
    rows = same == 1
    assert rows.float().mean() > 0.2
    error = (outs[0][0] - outs[1][0])[0, rows].float()
    assert error.norm() <= 0.02 * outs[1][0][0, rows].float().norm()
    torch.testing.assert_close(outs[0][1], outs[1][1], rtol=0.02, atol=0)


@torch.no_grad()
def test_steps_from_a_past_equal_the_whole_call():
    module = layer("auto", torch.bfloat16, index_topk=2048).eval()
    x = torch.randn(2, 96, D, device="cuda").bfloat16()
    whole = module(x)[0].float()
    parts, past = [], None
    for first, end in ((0, 64), *((t, t + 1) for t in range(64, 96))):
        out, _, past = module(x[:, first:end], past=past, return_kv=True)
        parts.append(out)
    assert (torch.cat(parts, 1).float() - whole).norm() <= 0.01 * whole.norm()


def test_repeats_of_the_forward_are_bitwise_identical():
    module = layer("auto", torch.bfloat16, index_topk=256)
    x = torch.randn(1, 2048, D, device="cuda").bfloat16()
    out, loss = module(x)
    for _ in range(20):
        again, again_loss = module(x)
        assert torch.equal(again, out) and torch.equal(again_loss, loss)


@pytest.mark.parametrize(
    "dtype, backend",
    [(torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.bfloat16, "torch"), (torch.float32, "torch")],
)
def test_the_loss_of_the_warm_up(dtype, backend):
    """Beside float64 on the CPU."""
    s_q, s_kv, h_q, h_i = 300, 9000, 20, 12  # more keys than a tile
    acc = torch.float32
    q_i, k_i = (torch.randn(n, h, 64).to(dtype) for n, h in ((s_q, h_i), (s_kv, 1)))
    weights = torch.randn(s_q, h_i)
    q, k = (torch.randn(n, h, 576).to(dtype) for n, h in ((s_q, h_q), (s_kv, 1)))
    numbers = {"sm_scale": 0.04, "q_start": [s_kv - s_q]}
    lse = torch.ops.htree_cuda.dense_lse(q[None].double(), k[None].double(), **numbers, backend="torch")[0]
    results = []
    for device, precision in (("cpu", torch.float64), ("cuda", None)):
        inputs = [x.to(device, precision or x.dtype).requires_grad_() for x in (q_i, k_i, weights)]
        constants = [q.to(device, precision or dtype), k.to(device, precision or dtype)]
        found_lse = torch.ops.htree_cuda.dense_lse(*(x[None] for x in constants), **numbers, backend=backend)[0]
        torch.testing.assert_close(found_lse.double().cpu(), lse, rtol=0, atol=1e-4)
        loss = htree_cuda.dense_indexer_loss(
            *inputs, *constants, lse.to(device, precision or acc), lse_base=torch.e,
            **{**numbers, "q_start": s_kv - s_q}, backend=backend,
        )  # fmt: skip
        results.append((loss, *torch.autograd.grad(loss, inputs)))
    step = {torch.float32: 1e-4, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    exact, found = results
    torch.testing.assert_close(found[0].double().cpu(), exact[0], rtol=2e-5, atol=0)
    for a, b in zip(found[1:], exact[1:], strict=True):
        assert (a.double().cpu() - b).norm() <= step * b.norm()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_warm_up_of_a_long_context_keeps_its_memory(backend):
    """s_q x s_kv floats would be 1 GiB; a head's scores of all queries another 64."""
    s_q, s_kv = 4096, 65536
    q_i, k_i = (torch.randn(n, h, 128, device="cuda").bfloat16().requires_grad_() for n, h in ((s_q, 64), (s_kv, 1)))
    weights = torch.randn(s_q, 64, device="cuda", requires_grad=True)
    q, k = (torch.randn(n, h, 576, device="cuda").bfloat16() for n, h in ((s_q, 8), (s_kv, 1)))
    lse = torch.full((s_q, 8), 12.0, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, q_start=s_kv - s_q, backend=backend)
    assert torch.cuda.max_memory_allocated() - before <= 256 << 20
    gradients = torch.autograd.grad(loss, (q_i, k_i, weights))
    kept = sum(x.numel() * x.element_size() for x in gradients) + 4 * k_i.numel()
    assert torch.cuda.max_memory_allocated() - before <= (256 << 20) + kept
