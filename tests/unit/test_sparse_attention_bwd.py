"""The backward of sparse_attention: its baseline, wrong variants, and options of the op."""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import checks, definition

from .. import baseline
from .test_sparse_attention import problem


def test_which_gradients_tma_loads():
    """The rest is copied: expanded from one head, or with strides of odd bytes."""
    x = torch.zeros(2, 3, 4, 512, dtype=torch.bfloat16)
    assert checks.support.loads_by_tma(x) and checks.support.loads_by_tma(x.transpose(1, 2))
    assert checks.support.loads_by_tma(x[:1].expand(2, 3, 4, 512))
    assert not checks.support.loads_by_tma(x[:, :, :1].expand(2, 3, 4, 512))
    assert not checks.support.loads_by_tma(x.new_zeros(()).expand_as(x))
    assert not checks.support.loads_by_tma(x.new_zeros(2, 3, 4, 516)[..., :512])
    assert not checks.support.loads_by_tma(x.new_zeros(2, 3, 512, 4).transpose(2, 3))


def test_deterministic_is_what_torch_says_unless_given(monkeypatch):
    from htree_cuda import ops

    seen = []
    monkeypatch.setattr(
        ops.torch_lists, "add_rows", lambda total, index, rows, deterministic: seen.append(deterministic)
    )
    for wanted in (None, False, True):
        q, kv, indices = problem(dtype=torch.float32, grad=True)
        out, _ = htree_cuda.sparse_attention(q, kv, indices, d_v=5, deterministic=wanted)
        out.sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        q, kv, indices = problem(dtype=torch.float32, grad=True)
        htree_cuda.sparse_attention(q, kv, indices, d_v=5)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, False, True, True]


def backward_problem(dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(3)
    q = torch.randn(4, 6, 40, generator=g).to(dtype)
    kv = torch.randn(30, 1, 40, generator=g).to(dtype)
    indices = torch.randint(-3, 33, (4, 1, 24), generator=g, dtype=torch.int32)
    indices[1] = 5  # one row in every slot
    indices[3] = -1
    dout, dlse = torch.randn(4, 6, 32, generator=g).to(dtype), torch.randn(4, 6, generator=g)
    return dout, dlse, q, kv, indices, {"d_v": 32, "attn_sink": torch.linspace(-2, 2, 6)}


def exact_backward(dout, dlse, q, kv, indices, options):
    inputs = [x.double().requires_grad_() for x in (q, kv, options["attn_sink"])]
    out, lse = definition.sparse_attention(*inputs[:2], indices, **{**options, "attn_sink": inputs[2]})
    keep = lse > -math.inf
    return torch.autograd.grad((out * dout)[keep].sum() + (lse * dlse)[keep].sum(), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_baseline_of_the_backward_is_near_the_definition(dtype):
    *args, options = backward_problem(dtype)
    exact = exact_backward(*args, options)
    base = baseline.sparse_attention_backward(*args, **options)
    eps = torch.finfo(dtype).eps
    for x, truth, worst in zip(base, exact, (3 * eps, 3 * eps, 3 * eps), strict=True):
        assert (x.double() - truth).norm() <= worst * truth.norm()
    named = exact[1].flatten(1).abs().amax(1) > 0
    baseline.assert_within("dkv", base[1][named], base[1][named], exact[1][named], factor=1.0)


def wrong_gradients(dkv, dq, args, options):
    """What plausible mistakes would give: (name, dq, dkv)."""
    dout, dlse, q, kv, indices, _ = (*args, options)
    yield "values' part of dkv left out", dq, dkv - values_part(args, options)
    yield "gradient of lse left out", *baseline.sparse_attention_backward(dout, dlse * 0, q, kv, indices, **options)[:2]
    without = {**options, "attn_sink": None}
    yield "sink left out", *baseline.sparse_attention_backward(dout, dlse, q, kv, indices, **without)[:2]
    once = indices.clone()
    once[1, 0, 1:] = -1
    yield "duplicates once", *baseline.sparse_attention_backward(dout, dlse, q, kv, once, **options)[:2]
    shorter = {**options, "topk_length": torch.full((4,), 23, dtype=torch.int32)}
    yield "last slot left out", *baseline.sparse_attention_backward(dout, dlse, q, kv, indices, **shorter)[:2]
    yield "scale missing", dq * 40**0.5, dkv
    yield "scale twice", dq * 40**-0.5, dkv
    values = values_part(args, options)
    yield "values' part of dkv from the last columns on", dq, dkv - values + values.roll(8, -1)
    base_2 = dlse * math.log2(math.e)
    yield "lse of base 2 for base e", *baseline.sparse_attention_backward(dout, base_2, *args[2:], **options)[:2]
    # dscore = P (dP - delta) + S dlse, and P = S share: another delta is another dlse.
    out, lse = definition.sparse_attention(q.double(), kv.double(), indices, **options)
    lonely, _ = definition.sparse_attention(q.double(), kv.double(), indices, **without)
    share = torch.sigmoid(lse - options["attn_sink"].double()).nan_to_num()
    moved = ((out - lonely) * dout.double()).sum(-1)
    other = (dlse + share * moved).float()
    yield (
        "delta of the output without the sink",
        *baseline.sparse_attention_backward(dout, other, *args[2:], **options)[:2],
    )
    other = (dlse - moved).float()
    yield "S for P", *baseline.sparse_attention_backward(dout, other, *args[2:], **without)[:2]


def values_part(args, options):
    dout, dlse, q, kv, indices = args
    zeros = baseline.sparse_attention_backward(dout, dlse, q * 0, kv, indices, **options)[1]
    return zeros


def test_wrong_backwards_are_found():
    *args, options = backward_problem()
    exact = exact_backward(*args, options)
    base = baseline.sparse_attention_backward(*args, **options)
    named = exact[1].flatten(1).abs().amax(1) > 0
    for name, dq, dkv in wrong_gradients(base[1], base[0], args, options):
        with pytest.raises(AssertionError, match="error"):
            baseline.assert_within("dq", dq[:3], base[0][:3], exact[0][:3])
            baseline.assert_within("dkv", dkv[named], base[1][named], exact[1][named])
            pytest.fail(f"{name} passes", pytrace=False)
