"""attn_dist: the definition's cases, and the torch backend against it in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import htree_cuda
from htree_cuda import definition

from ..baseline import attn_dist_arithmetic_bound

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def problem(s_q=5, h_q=6, s_kv=40, topk=12, d_qk=8, B=None, dtype=torch.float64, seed=0):
    """Distinct valid indices and the lse (base 2) that makes every head's slots sum to one."""
    g = torch.Generator().manual_seed(seed)
    batch = () if B is None else (B,)
    q = torch.randn(*batch, s_q, h_q, d_qk, generator=g, dtype=torch.float64).to(dtype)
    k = torch.randn(*batch, s_kv, 1, d_qk, generator=g, dtype=torch.float64).to(dtype)
    order = torch.rand(*batch, s_q, 1, s_kv, generator=g).argsort(-1)
    indices = order[..., :topk].to(torch.int32).contiguous()
    return q, k, indices, exact_lse(q, k, indices)


def exact_lse(q, k, indices, valid=None):
    """Base-2 log-sum-exp of the scaled scores over the valid slots, [.., s_q, h_q]; -inf where there is none."""
    rows = k[..., 0, :].double()
    safe = indices[..., 0, :].long().clamp(0, rows.shape[-2] - 1)
    gathered = rows[safe] if rows.dim() == 2 else torch.stack([x[i] for x, i in zip(rows, safe)])
    s = torch.einsum("...shd,...skd->...shk", q.double(), gathered) * q.shape[-1] ** -0.5 * math.log2(math.e)
    if valid is not None:
        s = s.masked_fill(~valid[..., None, :], -math.inf)
    lse = torch.logsumexp(s * math.log(2.0), -1) / math.log(2.0)
    return lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def check(q, k, indices, lse, **options):
    out = htree_cuda.attn_dist(q, k, indices, lse, **options)
    torch.testing.assert_close(out, definition.attn_dist(q, k, indices, lse, **options), rtol=0, atol=1e-10)
    return out


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    B=st.one_of(st.none(), st.integers(1, 2)), s_q=st.integers(1, 4), h_q=st.sampled_from([1, 3, 63, 64, 65, 130]),
    s_kv=st.integers(0, 30), topk=st.integers(1, 20), d_qk=st.integers(1, 9),
    start=st.one_of(st.none(), st.integers(0, 40)), k_stride=st.sampled_from([1, 2, 4]), lengths=st.booleans(),
    natural=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_equals_the_definition(B, s_q, h_q, s_kv, topk, d_qk, start, k_stride, lengths, natural, seed):
    g = torch.Generator().manual_seed(seed)
    batch = () if B is None else (B,)
    q = torch.randn(*batch, s_q, h_q, d_qk, generator=g, dtype=torch.float64)
    k = torch.randn(*batch, s_kv, 1, d_qk, generator=g, dtype=torch.float64)
    indices = torch.randint(-3, s_kv + 4, (*batch, s_q, 1, topk), generator=g, dtype=torch.int32)
    lse = torch.randn(*batch, s_q, h_q, generator=g, dtype=torch.float64) + 3
    length = torch.randint(-1, topk + 2, (*batch, s_q), generator=g, dtype=torch.int32) if lengths else None
    base = math.e if natural else 2
    check(q, k, indices, lse, q_start=start, k_stride=k_stride, topk_length=length, lse_base=base)


def test_slots_sum_to_the_number_of_heads():
    q, k, indices, lse = problem(h_q=130)
    out = check(q, k, indices, lse)
    assert out.shape == (3, 5, 12)
    expected = torch.tensor([64.0, 64.0, 2.0], dtype=torch.float64)[:, None].expand(3, 5)
    torch.testing.assert_close(out.sum(-1), expected, rtol=1e-12, atol=0)


def test_invalid_indices_of_every_kind():
    q, k, indices, lse = problem()
    bad = [-1, INT_MIN, INT_MAX, 40, 41, -2]
    indices[:, 0, : len(bad)] = torch.tensor(bad, dtype=torch.int32)
    k_poisoned = k.clone()
    named = torch.unique(indices[(indices >= 0) & (indices < 40)]).long()
    mask = torch.ones(40, dtype=torch.bool)
    mask[named] = False
    k_poisoned[mask] = math.nan
    out = check(q, k, indices, lse)
    assert (out[..., : len(bad)] == 0).all() and (out[..., len(bad) :] > 0).all()
    assert torch.equal(out, htree_cuda.attn_dist(q, k_poisoned, indices, lse))


def test_row_zero_may_be_poisoned_where_nobody_names_it():
    q, k, indices, lse = problem()
    indices[indices == 0] = -1
    k[0] = math.nan
    assert check(q, k, indices, lse).isfinite().all()


def test_duplicates_count_once_per_slot():
    q, k, indices, lse = problem()
    indices[:] = 7
    out = check(q, k, indices, lse)
    assert torch.equal(out, out[..., :1].expand_as(out)) and (out > 0).all()


def test_all_invalid_rows_are_zero():
    q, k, indices, lse = problem()
    indices[2] = -1
    out = check(q, k, indices, lse)
    assert (out[:, 2] == 0).all() and (out[:, 1] > 0).all()


def test_infinite_lse_of_both_signs_and_nan():
    q, k, indices, lse = problem(h_q=70)
    full = check(q, k, indices, lse)
    one = lse.clone()
    one[1, 3], one[2, 4] = math.inf, -math.inf
    out = check(q, k, indices, one)
    heads = definition.attn_dist(q[1:2, 3:4], k, indices[1:2], lse[1:2, 3:4])
    torch.testing.assert_close(out[0, 1], full[0, 1] - heads[0, 0], rtol=1e-9, atol=1e-12)
    assert out.isfinite().all()
    nan = lse.clone()
    nan[3, 66] = math.nan
    indices[3, 0, 5] = -1
    out = htree_cuda.attn_dist(q, k, indices, nan)
    assert out[1, 3, :5].isnan().all() and out[1, 3, 5] == 0 and out[0].isfinite().all()
    assert out[1, [0, 1, 2, 4]].isfinite().all()


def test_a_huge_finite_lse_is_not_infinite():
    """-3e38 nats are finite; in base 2 they would overflow float32 and silence the head."""
    q, k, indices, lse = problem(dtype=torch.float32)
    lse[1, 2] = -3e38
    out = htree_cuda.attn_dist(q, k, indices, lse, lse_base=math.e)
    assert (out[0, 1] == math.inf).all() and out[0, 0].isfinite().all()


def test_scale_reaches_the_scores():
    q, k, indices, lse = problem()
    for sm_scale in (0.0, -0.3, 1.5):
        check(q, k, indices, lse, sm_scale=sm_scale)


@pytest.mark.parametrize("k_stride", [1, 4])
@pytest.mark.parametrize("q_start", [0, 3, 37, 200])
def test_causal_rule(q_start, k_stride):
    q, k, indices, lse = problem(s_q=9, topk=40)
    out = check(q, k, indices, lse, q_start=q_start, k_stride=k_stride)
    for s in range(9):
        visible = indices[s, 0] <= (q_start + s + 1) // k_stride - 1
        assert ((out[0, s] > 0) == visible).all()


def test_k_stride_is_ignored_without_q_start():
    q, k, indices, lse = problem()
    assert torch.equal(htree_cuda.attn_dist(q, k, indices, lse, k_stride=4), htree_cuda.attn_dist(q, k, indices, lse))


def test_topk_length():
    q, k, indices, lse = problem(s_q=6, topk=12)
    length = torch.tensor([0, 1, 5, 12, 13, -4], dtype=torch.int32)
    out = check(q, k, indices, lse, topk_length=length)
    assert (out > 0).sum(-1)[0].tolist() == [0, 1, 5, 12, 12, 0]


def test_both_lse_bases():
    q, k, indices, lse = problem()
    a = check(q, k, indices, lse)
    b = check(q, k, indices, lse * math.log(2.0), lse_base=math.e)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_lse_of_forward_fits():
    """A tree with one layer is dense attention; its lse feeds attn_dist over all keys, and the rows sum to H."""
    q, k = torch.randn(1, 1, 3, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    lse = htree_cuda.forward(q, k, k, return_lse=True)[1]
    out = htree_cuda.attn_dist(q, k, torch.zeros(1, 1, 1, 1, dtype=torch.int32), lse, lse_base=math.e)
    torch.testing.assert_close(out, torch.full((1, 1, 1, 1), 3.0, dtype=torch.float64), rtol=1e-12, atol=0)


def test_batches_and_a_start_for_each():
    q, k, indices, lse = problem(B=3)
    out = check(q, k, indices, lse, q_start=[0, 20, 40], k_stride=1)
    for b, start in enumerate([0, 20, 40]):
        row = htree_cuda.attn_dist(q[b], k[b], indices[b], lse[b], q_start=start)
        torch.testing.assert_close(out[b], row, rtol=0, atol=1e-14)
    shared = htree_cuda.attn_dist(q, k, indices, lse, q_start=20)
    assert torch.equal(shared[1], out[1])


@pytest.mark.parametrize(
    ("s_q", "topk", "s_kv", "B"), [(0, 4, 9, None), (3, 0, 9, None), (3, 4, 0, None), (3, 4, 9, 0)]
)
def test_empty_sizes(s_q, topk, s_kv, B):
    batch = () if B is None else (B,)
    q, k = torch.randn(*batch, s_q, 70, 8), torch.randn(*batch, s_kv, 1, 8)
    indices, lse = torch.zeros(*batch, s_q, 1, topk, dtype=torch.int32), torch.zeros(*batch, s_q, 70)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    assert out.shape == (*batch, 2, s_q, topk) and out.dtype == torch.float32
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precisions_are_float32_inside(dtype):
    q, k, indices, lse = problem(h_q=65, d_qk=64, dtype=dtype)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    assert out.dtype == torch.float32 and not out.requires_grad
    exact = definition.attn_dist(q, k, indices, lse)
    assert ((out - exact).abs() <= attn_dist_arithmetic_bound(q, k, exact, lse)).all()


def test_views_and_grad():
    q, k, indices, lse = problem()
    wide = torch.randn(5, 12, 16, dtype=torch.float64)
    view = wide[:, ::2, 4:12]
    view.copy_(q)
    out = htree_cuda.attn_dist(view.requires_grad_(), k.requires_grad_(), indices, lse.requires_grad_())
    assert not out.requires_grad and torch.equal(out, htree_cuda.attn_dist(q, k.detach(), indices, lse.detach()))
