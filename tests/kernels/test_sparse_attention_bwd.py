"""The backward kernel of sparse_attention against the definition, on a Hopper GPU or, the tests marked `emulated`,
without one. The oracle is autograd through the definition in float64; what it may be off is fixed by `baseline`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import htree_cuda
from htree_cuda import definition, kernels

from .. import baseline
from .test_sparse_attention import HOSTILE, Problem, problem

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])


def incoming(x: Problem, seed: int = 100) -> tuple[Tensor, Tensor]:
    """dout in the dtype of q and dlse float32."""
    g = torch.Generator().manual_seed(seed)
    shape = x.q.shape[:3]
    return torch.randn(*shape, 512, generator=g).to(x.q.dtype), torch.randn(*shape, generator=g)


def run(x: Problem, dout: Tensor, dlse: Tensor, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dkv, dsink) of the kernel, on the host; every element and the workspace were poisoned before."""
    q, kv, indices, dout, dlse = (Problem._there(t) for t in (x.q, x.kv, x.indices, dout, dlse))
    options = {k: Problem._there(v) if isinstance(v, Tensor) else v for k, v in x.options.items()}
    out, lse = (t.to(DEVICE) for t in x.run())
    sink = options["attn_sink"]
    dq, dkv = (torch.full(t.shape, math.nan, dtype=t.dtype, device=DEVICE) for t in (q, kv))
    dsink = torch.full((0 if sink is None else sink.shape[0],), math.nan, device=DEVICE)
    size = kernels.sparse_attention_backward_workspace(q, kv, sink, deterministic)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    kernels.sparse_attention_backward(
        dout, dlse, q, kv, indices, out, lse, dq, dkv, dsink, workspace, **options, deterministic=deterministic
    )
    return dq.cpu(), dkv.cpu(), dsink.cpu()


def exact(x: Problem, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in float64 by autograd through the definition; a query without a valid slot gets nothing."""
    options = {**x.options, "d_v": 512}
    q, kv = (t.double().requires_grad_() for t in (x.q, x.kv))
    sink = None if x.options["attn_sink"] is None else x.options["attn_sink"].double().requires_grad_()
    out, lse = definition.sparse_attention(q, kv, x.indices, **{**options, "attn_sink": sink})
    counts = lse > -math.inf
    total = (out * dout.double())[counts].sum() + (lse * dlse.double())[counts].sum()
    inputs = [q, kv] if sink is None else [q, kv, sink]
    if not total.requires_grad:
        return tuple(torch.zeros_like(t) for t in (q, kv, *inputs[2:]))
    grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return (*grads, torch.zeros(0)) if sink is None else grads


def bounds(x: Problem, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The baseline, batch by batch; rows of dkv are the sums over their batch alone."""
    parts = []
    for b in range(x.q.shape[0]):
        o = {**x.options, "d_v": 512}
        o["q_start"] = None if o["q_start"] is None else o["q_start"][b]
        o["topk_length"] = None if o["topk_length"] is None else o["topk_length"][b]
        parts.append(baseline.sparse_attention_backward(dout[b], dlse[b], x.q[b], x.kv[b], x.indices[b], **o))
    return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), sum(p[2] for p in parts)


def check(x: Problem, deterministic: bool, dout: Tensor | None = None, dlse: Tensor | None = None):
    """Runs the kernel and compares; returns what it gave."""
    if dout is None:
        dout, dlse = incoming(x)
    wanted, allowed = exact(x, dout, dlse), bounds(x, dout, dlse)
    x.poison()
    got = run(x, dout, dlse, deterministic)
    for name, mine, base, truth in zip(("dq", "dkv"), got, allowed, wanted):
        same_zeros = truth.flatten(2).abs().amax(-1) == 0
        assert not mine.flatten(2)[same_zeros].any(), f"{name}: not zero where nothing contributes"
        keep = ~same_zeros
        if keep.any():
            baseline.assert_within(name, mine.flatten(2)[keep], base.flatten(2)[keep], truth.flatten(2)[keep])
    if got[2].numel():
        error, allowance = ((t.double() - wanted[2]).abs().max() for t in (got[2], allowed[2]))
        assert error <= 2 * allowance + 1e-5 * (1 + wanted[2].abs().max()), f"dsink off by {error:.3e}, {allowance:.3e}"
    return got


@MODES
@pytest.mark.emulated
@pytest.mark.parametrize(("h_q", "topk"), [(1, 1), (16, 63), (64, 64), (65, 65), (128, 130), (129, 3)])
def test_heads_and_slots(h_q, topk, deterministic):
    check(problem(h_q, topk, seed=h_q + topk), deterministic)


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("topk", [1, 64, 200])
@pytest.mark.parametrize("h_q", [16, 64, 65, 128])
def test_every_shape(h_q, topk, d, dtype, deterministic):
    check(problem(h_q, topk, d=d, dtype=dtype, seed=h_q + topk), deterministic)


@MODES
@pytest.mark.emulated
@pytest.mark.parametrize(
    ("d", "dtype"), [pytest.param(576, torch.bfloat16, marks=pytest.mark.sample), (512, torch.float16)]
)
def test_hostile_indices(d, dtype, deterministic):
    x = problem(65, 200, d=d, dtype=dtype, s_q=4, seed=1)
    x.indices[0, 0, 0, ::3] = torch.tensor(HOSTILE * 17, dtype=torch.int32)[:67]
    x.indices[0, 1] = -1  # nothing
    x.indices[0, 2] = 5  # one row, 200 times
    x.indices[0, 3, 0, :130] = 2**31 - 1  # two tiles without a valid slot, then some
    dq, _, _ = check(x, deterministic)
    assert not dq[0, 1].any()


@MODES
@pytest.mark.emulated
def test_one_row_in_every_slot_of_every_query(deterministic):
    x = problem(64, 130, s_q=6, seed=2)
    x.indices[:] = 7
    check(x, deterministic)


@MODES
@pytest.mark.emulated
def test_lengths_causal_rule_sinks_and_batches(deterministic):
    lengths = torch.tensor([[0, 1, 64, 65, 200, 500, -3], [63, 0, 0, 128, 129, 100, 7]], dtype=torch.int32)
    sink = torch.linspace(-4, 4, 70)
    sink[3], sink[5] = math.inf, -math.inf
    x = problem(
        70, 200, B=2, s_q=7, seed=3, q_start=[0, 120], k_stride=2, topk_length=lengths, lse_base=math.e, attn_sink=sink
    )
    dout, dlse = incoming(x)
    dout[0, 0], dlse[0, 0] = math.nan, math.nan  # a query without a valid slot
    finite = dout.nan_to_num(), dlse.nan_to_num()
    for mine, other in zip(check(x, deterministic, *finite), run(x, dout, dlse, deterministic)):
        assert torch.equal(mine, other) or not deterministic
        assert not other.isnan().any()


@MODES
@pytest.mark.emulated
def test_strided_views(deterministic):
    x = problem(66, 70, B=2, seed=4, topk_length=torch.tensor([[70, 3], [64, 70], [0, 65]], dtype=torch.int32).T)
    x.indices = x.indices.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    dout, dlse = incoming(x)
    wide = torch.stack([dout, dout * math.nan], 2).transpose(1, 3)[:, :, 0].transpose(1, 2)
    heads_first = dlse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not (wide.is_contiguous() or heads_first.is_contiguous() or x.indices.is_contiguous())
    check(x, deterministic, wide, heads_first)


@MODES
@pytest.mark.emulated
@pytest.mark.parametrize("scale", [-0.04, 0.0])
def test_negative_and_zero_scale(scale, deterministic):
    check(problem(16, 130, seed=5, sm_scale=scale), deterministic)


@MODES
@pytest.mark.emulated
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_rows(value, deterministic):
    """In a query's head: dq of that head, and dkv of the rows that the query names. In a key row: the queries that name
    it and all rows that those name."""
    x = problem(5, 20, s_q=3, seed=6)
    x.indices[0, 0, 0] = torch.arange(0, 20)
    x.indices[0, 1, 0] = torch.arange(40, 60)
    x.indices[0, 2, 0] = torch.arange(80, 100)
    dout, dlse = incoming(x)
    clean = run(x, dout, dlse, True)
    x.q[0, 0, 3, 570] = value
    x.kv[0, 45, 0, 11] = value
    dq, dkv, _ = run(x, dout, dlse, deterministic)
    reached = torch.zeros(1, 3, 5, dtype=torch.bool)
    reached[0, 1] = reached[0, 0, 3] = True
    assert dq[reached].isnan().all() and torch.equal(dq[~reached], clean[0][~reached])
    rows = torch.zeros(150, dtype=torch.bool)
    rows[0:20] = rows[40:60] = True
    assert dkv[0, rows].isnan().all() and not dkv[0, ~rows].isnan().any()


@MODES
@pytest.mark.emulated
def test_nothing_to_attend_to(deterministic):
    x = problem(66, 5, attn_sink=torch.ones(66))
    x.indices[:] = -1
    dq, dkv, dsink = check(x, deterministic)
    assert not (dq.any() or dkv.any() or dsink.any())


@pytest.mark.emulated
def test_rows_of_very_different_size_in_the_same_call():
    """Integers are multiples of a unit that each row has for itself: small gradients keep their bits."""
    x = problem(16, 40, s_q=4, s_kv=160, seed=7)
    for s in range(4):
        x.indices[0, s, 0] = torch.arange(40 * s, 40 * s + 40)
    dout, dlse = incoming(x)
    size = torch.tensor([1e-12, 1.0, 1e9, 1e-3])[None, :, None]
    check(x, True, (dout * size[..., None]).to(dout.dtype), dlse * size)


@pytest.mark.emulated
def test_deterministic_gives_the_same_bits():
    x = problem(65, 130, s_q=6, s_kv=40, seed=8)
    dout, dlse = incoming(x)
    first = run(x, dout, dlse, True)
    for _ in range(3):
        for mine, other in zip(run(x, dout, dlse, True), first):
            assert torch.equal(mine, other)


@pytest.mark.hardware
def test_a_thousand_repeats():
    x = problem(128, 500, s_q=40, s_kv=300, seed=9, attn_sink=torch.zeros(128))
    q, kv = (t.to(DEVICE).requires_grad_() for t in (x.q, x.kv))
    sink = x.options["attn_sink"].to(DEVICE).requires_grad_()
    out, lse = htree_cuda.sparse_attention(q, kv, x.indices.to(DEVICE), attn_sink=sink, deterministic=True)
    dout, dlse = (t.to(DEVICE) for t in incoming(x))
    grads = [torch.autograd.grad((out, lse), (q, kv, sink), (dout, dlse), retain_graph=True) for _ in range(2)]
    for _ in range(1000):
        grads[1] = torch.autograd.grad((out, lse), (q, kv, sink), (dout, dlse), retain_graph=True)
        for mine, other in zip(*grads):
            assert torch.equal(mine, other)


@MODES
@pytest.mark.hardware
@pytest.mark.parametrize(("h_q", "s_kv"), [(64, 3000), (128, 3000), (128, 20000)])
def test_the_public_function_against_the_torch_backend(h_q, s_kv, deterministic):
    """With 20,000 keys the sums do not fit into L2, and CTAs keep the same pace."""
    g = torch.Generator(device=DEVICE).manual_seed(1)
    q = torch.randn(300, h_q, 576, device=DEVICE, generator=g).bfloat16()
    kv = torch.randn(s_kv, 1, 576, device=DEVICE, generator=g).bfloat16()
    indices = torch.rand(300, s_kv, device=DEVICE, generator=g).argsort(-1)[:, None, :1000].to(torch.int32)
    sink = torch.randn(h_q, device=DEVICE, generator=g)
    grads = []
    for backend in ("auto", "torch"):
        inputs = [t.clone().requires_grad_() for t in (q, kv, sink)]
        options = {"attn_sink": inputs[2], "q_start": s_kv - 300, "backend": backend, "deterministic": deterministic}
        out, lse = htree_cuda.sparse_attention(inputs[0], inputs[1], indices, **options)
        grads.append(torch.autograd.grad(out.float().sin().sum() + lse.sum(), inputs))
    for mine, other in zip(*grads):
        assert (mine.float() - other.float()).norm() <= 5e-3 * other.float().norm()


@pytest.mark.hardware
def test_gradient_of_a_sum_is_expanded():
    x = problem(64, 100, seed=11)
    q, kv = (t.to(DEVICE).requires_grad_() for t in (x.q, x.kv))
    out = htree_cuda.sparse_attention(q, kv, x.indices.to(DEVICE), return_lse=False)
    dq, dkv = torch.autograd.grad(out.sum(), (q, kv), retain_graph=True)
    ones = torch.autograd.grad(out, (q, kv), torch.ones_like(out))
    assert torch.equal(dq, ones[0]) and (dkv - ones[1]).abs().max() <= 0.02 * dkv.abs().max()


@pytest.mark.hardware
def test_capture_and_replay():
    x = problem(64, 300, s_q=40, s_kv=500, seed=12)
    q, kv, indices = (t.to(DEVICE) for t in (x.q, x.kv, x.indices))
    out, lse = htree_cuda.sparse_attention(q, kv, indices)
    dout, dlse = (t.to(DEVICE) for t in incoming(x))
    numbers = {"d_v": 512, "sm_scale": None, "q_start": None, "k_stride": 1, "lse_base": 2.0, "backend": "auto"}

    def call():
        return torch.ops.htree_cuda.sparse_attention_backward(
            dout, dlse, q, kv, indices, None, None, out, lse, **numbers, deterministic=True
        )

    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        for t in captured:
            t.fill_(math.nan)
        graph.replay()
        for mine, other in zip(captured, expected):
            assert torch.equal(mine, other)
