"""What must hold of the backward kernel of sparse_attention whatever the numbers are: facts that need no oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import htree_cuda

from .test_sparse_attention import HOSTILE, Problem, problem
from .test_sparse_attention_bwd import DEVICE, MODES, check, incoming, run

pytestmark = pytest.mark.gpu


def changed(x: Problem, **tensors: Tensor) -> Problem:
    parts = {"q": x.q, "kv": x.kv, "indices": x.indices, **tensors}
    return Problem(**parts, options=dict(x.options))


def close(mine: Tensor, other: Tensor, units: float = 2.0) -> None:
    """Within some roundings to the dtype, relative to the largest number of the row."""
    size = other.float().abs().amax(-1, keepdim=True)
    assert ((mine.float() - other.float()).abs() <= units * torch.finfo(mine.dtype).eps * size + 1e-6).all()


@pytest.mark.emulated
def test_lists_without_a_row_in_common_give_the_same_bits_in_both_ways():
    """One contribution a row: there is no order of sums."""
    x = problem(64, 40, s_q=3, s_kv=130, seed=21)
    for s in range(3):
        x.indices[0, s, 0] = torch.arange(40 * s, 40 * s + 40)
    dout, dlse = incoming(x)
    for mine, other in zip(run(x, dout, dlse, True), run(x, dout, dlse, False)):
        assert torch.equal(mine, other)


@MODES
@pytest.mark.emulated
def test_dq_depends_on_its_own_query_alone(deterministic):
    x = problem(65, 70, s_q=4, seed=22)
    dout, dlse = incoming(x)
    whole = run(x, dout, dlse, deterministic)[0]
    for part in (slice(0, 1), slice(1, 4)):
        chunk = changed(x, q=x.q[:, part].contiguous(), indices=x.indices[:, part].contiguous())
        mine = run(chunk, dout[:, part].contiguous(), dlse[:, part].contiguous(), deterministic)[0]
        assert torch.equal(mine, whole[:, part])


@MODES
@pytest.mark.emulated
def test_a_sink_of_minus_infinity_is_no_sink(deterministic):
    x = problem(16, 70, s_q=2, seed=23)
    for s in range(2):
        x.indices[0, s, 0] = torch.arange(70 * s, 70 * s + 70)  # no row in common: atomics have no order
    dout, dlse = incoming(x)
    sunk = changed(x)
    sunk.options["attn_sink"] = torch.full((16,), -math.inf)
    none, with_sink = run(x, dout, dlse, deterministic), run(sunk, dout, dlse, deterministic)
    assert torch.equal(none[0], with_sink[0]) and torch.equal(none[1], with_sink[1])
    assert torch.equal(with_sink[2], torch.zeros(16))


@pytest.mark.emulated
def test_a_gradient_of_lse_alone_reaches_no_value_beyond_its_key():
    """dout = 0, dlse = 1: dkv is sm_scale sum S q. The columns past the values have no part of P in any case."""
    x = problem(64, 66, s_q=2, seed=24)
    dout, dlse = incoming(x)
    dkv = run(x, dout * 0, torch.ones_like(dlse), True)[1]
    q, kv = x.q.double(), x.kv.double()
    wanted = torch.zeros_like(kv)
    for s in range(2):
        rows = x.indices[0, s, 0].long()
        keep = (rows >= 0) & (rows < kv.shape[1])
        rows = rows[keep]
        scores = q[0, s] @ kv[0, rows, 0].T * x.options["sm_scale"]
        part = scores.softmax(1).T @ q[0, s] * x.options["sm_scale"] / math.log(x.options["lse_base"])
        wanted[0, :, 0].index_add_(0, rows, part)
    assert (dkv.double() - wanted).norm() <= 2e-2 * wanted.norm()
    tails = [run(x, d, dlse * 0, True)[1][..., 512:] for d in (dout, 2 * dout)]
    close(2 * tails[0], tails[1])


@MODES
@pytest.mark.emulated
def test_the_order_of_slots_changes_rounding_alone(deterministic):
    x = problem(64, 130, s_q=2, seed=25)
    dout, dlse = incoming(x)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(1))
    mine = run(changed(x, indices=x.indices[..., order].contiguous()), dout, dlse, deterministic)
    for a, b in zip(mine[:2], run(x, dout, dlse, deterministic)[:2]):
        close(a, b, 8.0)


@pytest.mark.emulated
def test_a_slot_twice_is_a_row_that_exists_twice():
    x = problem(64, 66, s_q=1, s_kv=100, seed=26)
    x.indices[0, 0, 0] = torch.arange(66)
    x.indices[0, 0, 0, 65] = 7
    dout, dlse = incoming(x)
    twice = run(x, dout, dlse, True)[1].float()
    copied = changed(x, kv=x.kv.clone(), indices=x.indices.clone())
    copied.kv[0, 90] = x.kv[0, 7]
    copied.indices[0, 0, 0, 65] = 90
    parts = run(copied, dout, dlse, True)[1].float()
    parts[0, 7] += parts[0, 90]
    parts[0, 90] = 0
    size = parts.abs().amax(-1, keepdim=True)
    assert ((parts - twice).abs() <= 2 * torch.finfo(torch.bfloat16).eps * size).all()


@MODES
@pytest.mark.emulated
def test_scores_of_1e4_stay_finite(deterministic):
    x = problem(16, 66, s_q=2, seed=27)
    x.q.mul_(100)
    x.kv.mul_(20)
    dout, dlse = incoming(x)
    for t in run(x, dout, dlse, deterministic)[:2]:
        assert t.isfinite().all()


@MODES
@pytest.mark.hardware
def test_sums_past_2_31(deterministic):
    """Rows of kv, of its sums and of q past 2^31 elements: the last rows get what rows of a small call get."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GiB of GPU memory")
    s_q, s_kv, h_q = 60000, 3_800_000, 64
    g = torch.Generator(device=DEVICE).manual_seed(1)
    small_kv = torch.randn(100, 1, 576, device=DEVICE, generator=g).bfloat16()
    small_q = torch.randn(60, h_q, 576, device=DEVICE, generator=g).bfloat16()
    dout = torch.randn(60, h_q, 512, device=DEVICE, generator=g).bfloat16()
    lists = torch.rand(60, 100, device=DEVICE, generator=g).argsort(-1)[:, None, :40].int()
    wanted = gradients(small_q, small_kv, lists, dout, deterministic)
    assert s_kv * 576 > 2**31 and s_q * h_q * 576 > 2**31
    q, big_dout = (torch.zeros(s_q, *t.shape[1:], device=DEVICE, dtype=t.dtype) for t in (small_q, dout))
    kv = torch.zeros(s_kv, 1, 576, device=DEVICE, dtype=torch.bfloat16)
    indices = torch.full((s_q, 1, 40), -1, device=DEVICE, dtype=torch.int32)
    q[-60:], big_dout[-60:], kv[-100:], indices[-60:] = small_q, dout, small_kv, lists + (s_kv - 100)
    dq, dkv = gradients(q, kv, indices, big_dout, deterministic)
    assert torch.equal(dq[-60:], wanted[0]) and not dq[:-60].any()
    assert not dkv[:-100].any()
    close(dkv[-100:], wanted[1], 1.0 if not deterministic else 0.0)


def gradients(q: Tensor, kv: Tensor, indices: Tensor, dout: Tensor, deterministic: bool) -> tuple[Tensor, Tensor]:
    q, kv = q.requires_grad_(), kv.requires_grad_()
    out = htree_cuda.sparse_attention(q, kv, indices, return_lse=False, deterministic=deterministic)
    found = torch.autograd.grad(out, (q, kv), dout)
    q.requires_grad_(False), kv.requires_grad_(False)
    return found


@pytest.mark.hardware
def test_streams():
    x = problem(64, 300, s_q=40, s_kv=500, seed=28)
    q, kv, indices = (t.to(DEVICE) for t in (x.q[0], x.kv[0], x.indices[0]))
    dout = incoming(x)[0][0].to(DEVICE)
    expected = gradients(q, kv, indices, dout, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(q, kv, indices, dout, True)
    torch.cuda.current_stream().wait_stream(stream)
    for mine, other in zip(found, expected):
        assert torch.equal(mine, other)


@MODES
def test_sanitizer(deterministic):
    x = problem(66, 130, s_q=3, seed=29, attn_sink=torch.zeros(66))
    x.indices[0, 0, 0, ::3] = torch.tensor(HOSTILE * 11, dtype=torch.int32)[:44]
    x.indices[0, 1] = -1
    check(x, deterministic)
