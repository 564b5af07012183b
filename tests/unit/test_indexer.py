"""The lightning indexer and its selector: the definition's cases, and the torch backend against it."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import htree_cuda
from htree_cuda import definition_dsa
from htree_cuda.torch_backend import indexer as torch_indexer

INF, NAN = math.inf, math.nan
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
EXACT = {"rtol": 0, "atol": 1e-11}


def inputs(s_q=5, h_i=3, s_kv=40, d_i=6, B=None, dtype=torch.float64, seed=0, grad=False):
    g = torch.Generator().manual_seed(seed)
    batch = () if B is None else (B,)
    q = torch.randn(*batch, s_q, h_i, d_i, generator=g, dtype=torch.float64).to(dtype)
    k = torch.randn(*batch, s_kv, 1, d_i, generator=g, dtype=torch.float64).to(dtype)
    weights = torch.randn(*batch, s_q, h_i, generator=g, dtype=torch.float64)
    weights = weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return tuple(x.requires_grad_(grad) for x in (q, k, weights))


def bounds(s_q, s_kv, B=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (s_q,) if B is None else (B, s_q)
    pair = [torch.randint(-3, s_kv + 5, shape, generator=g, dtype=torch.int32) for _ in range(2)]
    return {"k_start": pair[0] - s_kv // 3, "k_end": pair[1]}


def fp8(x):
    return x.float().to(torch.float8_e4m3fn)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a call has several of queries and of keys."""
    monkeypatch.setattr(torch_indexer, "TILE_KEYS", 7)
    monkeypatch.setattr(torch_indexer, "MAX_TILE_BYTES", 1500)


# ------------------------------------------------------------------------------------------------- indexer_logits


@settings(max_examples=50, **QUIET)
@given(
    B=st.one_of(st.none(), st.integers(1, 2)), s_q=st.integers(1, 5), h_i=st.sampled_from([1, 2, 5]),
    s_kv=st.integers(0, 30), d_i=st.integers(1, 9), topk=st.one_of(st.none(), st.integers(1, 9)),
    start=st.one_of(st.none(), st.integers(0, 40)), k_stride=st.sampled_from([1, 2, 4]), bounded=st.booleans(),
    scaled=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_logits_equal_the_definition(B, s_q, h_i, s_kv, d_i, topk, start, k_stride, bounded, scaled, seed):
    q, k, weights = inputs(s_q, h_i, s_kv, d_i, B, seed=seed)
    options = bounds(s_q, s_kv, B, seed) if bounded else {}
    g = torch.Generator().manual_seed(seed)
    if topk is not None:
        batch = () if B is None else (B,)
        options["indices"] = torch.randint(-3, s_kv + 4, (*batch, s_q, 1, topk), generator=g, dtype=torch.int32)
        options["topk_length"] = torch.randint(-1, topk + 2, (*batch, s_q), generator=g, dtype=torch.int32)
    tolerance = EXACT
    if scaled:
        q, k, weights, tolerance = fp8(q), fp8(k), weights.float(), {"rtol": 1e-4, "atol": 1e-4}
        options["q_scale"] = torch.randn(weights.shape, generator=g)
        options["k_scale"] = torch.randn(k.shape[:-1], generator=g)
    options |= {"q_start": start, "k_stride": k_stride}
    out = htree_cuda.indexer_logits(q, k, weights, **options)
    expected = definition_dsa.indexer_logits(q, k, weights, **options).to(out.dtype)
    torch.testing.assert_close(out, expected, equal_nan=True, **tolerance)
    assert out.dtype == weights.dtype and ((out == -INF) == (expected == -INF)).all()


def test_logits_by_hand():
    q = torch.tensor([[[1.0, 2.0], [-1.0, -2.0]]])
    k = torch.tensor([[[1.0, 1.0]], [[-3.0, 1.0]], [[2.0, -1.0]]])
    out = htree_cuda.indexer_logits(q, k, torch.tensor([[1.0, 1.0]]))
    assert out.tolist() == [[3.0, 1.0, 0.0]]  # heads q and -q: |z|
    out = htree_cuda.indexer_logits(q, k, torch.tensor([[2.0, -1.0]]), q_start=1)
    assert out.tolist() == [[6.0, -1.0, -INF]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_the_other_dtypes(dtype):
    q, k, weights = inputs(dtype=dtype, h_i=8, d_i=32)
    out = htree_cuda.indexer_logits(q, k, weights)
    expected = definition_dsa.indexer_logits(q, k, weights)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert out.dtype == torch.float32


def test_scales_stand_where_the_formula_has_them():
    q, k, weights = inputs()
    q, k, weights = fp8(q), fp8(k), weights.float()
    q_scale, k_scale = torch.rand(5, 3) - 0.3, torch.rand(40, 1) - 0.3
    out = htree_cuda.indexer_logits(q, k, weights, q_scale=q_scale, k_scale=k_scale)
    plain = htree_cuda.indexer_logits(q, k, weights * q_scale)
    assert torch.equal(out, plain * k_scale[:, 0])
    wrong = htree_cuda.indexer_logits(q, k, weights, q_scale=q_scale, k_scale=k_scale.roll(1, 0))
    assert not torch.equal(out, wrong)
    doubled = htree_cuda.indexer_logits(q, k, weights, q_scale=q_scale, k_scale=k_scale * 2.0**20)
    assert torch.equal(doubled, out * 2.0**20)


def test_nan_shows_in_its_row_and_column_only():
    q, k, weights = inputs()
    clean = htree_cuda.indexer_logits(q, k, weights, q_start=20)
    k_nan, q_nan, w_nan = k.clone(), q.clone(), weights.clone()
    k_nan[7, 0, 2], q_nan[3, 1, 1], w_nan[2, 0] = NAN, NAN, NAN
    out = htree_cuda.indexer_logits(q_nan, k_nan, w_nan, q_start=20)
    visible = clean > -INF
    expected_nan = visible & (
        (torch.arange(40) == 7) | (torch.arange(5) == 3)[:, None] | (torch.arange(5) == 2)[:, None]
    )
    assert (out.isnan() == expected_nan).all()
    torch.testing.assert_close(out[~expected_nan], clean[~expected_nan], **EXACT)


def test_zero_times_infinity_and_infinite_products():
    q, k, weights = torch.ones(1, 2, 1), torch.tensor([[[INF]], [[-INF]], [[1.0]]]), torch.tensor([[0.0, 1.0]])
    out = htree_cuda.indexer_logits(q, k, weights)
    assert out[0, 0].isnan() and out[0, 1:].tolist() == [0.0, 1.0]  # 0 * inf, relu(-inf), plain


def test_keys_outside_every_window_are_never_used():
    q, k, weights = inputs()
    window = {"k_start": torch.full((5,), 4, dtype=torch.int32), "k_end": torch.full((5,), 30, dtype=torch.int32)}
    out = htree_cuda.indexer_logits(q, k, weights, **window)
    poisoned = k.clone()
    poisoned[:4], poisoned[30:] = NAN, INF
    assert torch.equal(out, htree_cuda.indexer_logits(q, poisoned, weights, **window))
    assert (out[:, :4] == -INF).all() and (out[:, 30:] == -INF).all() and out[:, 4:30].isfinite().all()


@pytest.mark.parametrize("start, end", [(INT_MIN, INT_MAX), (INT_MAX, INT_MIN), (10, 10), (-5, 0), (40, 90)])
def test_windows_of_every_kind(start, end):
    q, k, weights = inputs()
    window = {name: torch.full((5,), x, dtype=torch.int32) for name, x in (("k_start", start), ("k_end", end))}
    out = htree_cuda.indexer_logits(q, k, weights, **window)
    full = htree_cuda.indexer_logits(q, k, weights)
    rows = torch.arange(40)
    torch.testing.assert_close(out, full.masked_fill((rows < start) | (rows >= end), -INF), **EXACT)


def test_listed_equals_dense_and_duplicates_count():
    q, k, weights = inputs()
    indices = torch.randint(0, 40, (5, 1, 9), dtype=torch.int32)
    indices[:, 0, :3] = 7
    indices[:, 0, 3:6] = torch.tensor([-1, INT_MIN, INT_MAX], dtype=torch.int32)
    out = htree_cuda.indexer_logits(q, k, weights, indices=indices)
    dense = htree_cuda.indexer_logits(q, k, weights)
    valid = (indices[:, 0] >= 0) & (indices[:, 0] < 40)
    expected = dense.gather(1, indices[:, 0].long().clamp(0, 39)).masked_fill(~valid, -INF)
    torch.testing.assert_close(out, expected, **EXACT)


def test_empty_sizes():
    for s_q, s_kv, B in ((0, 5, None), (3, 0, None), (3, 5, 0)):
        q, k, weights = inputs(s_q=s_q, s_kv=s_kv, B=B)
        batch = () if B is None else (B,)
        assert htree_cuda.indexer_logits(q, k, weights).shape == (*batch, s_q, s_kv)
        indices = torch.zeros(*batch, s_q, 1, 4, dtype=torch.int32)
        out = htree_cuda.indexer_logits(q, k, weights, indices=indices)
        assert out.shape == (*batch, s_q, 4) and (s_kv or (out == -INF).all())
        indices, logits = htree_cuda.indexer_topk(q, k, weights, 3, return_logits=True)
        assert indices.shape == (*batch, s_q, 1, 3) and logits.shape == (*batch, s_q, 3)
        assert s_kv or ((indices == -1).all() and (logits == -INF).all())


# -------------------------------------------------------------------------------------------------------- gradient


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("B", [None, 2])
def test_gradient_equals_autograd_through_the_definition(listed, B, small_tiles):
    x = inputs(B=B, grad=True)
    batch = () if B is None else (B,)
    options = {**bounds(5, 40, B), "q_start": 30}
    if listed:
        options["indices"] = torch.randint(-2, 42, (*batch, 5, 1, 12), dtype=torch.int32)
        options["topk_length"] = torch.randint(-1, 14, (*batch, 5), dtype=torch.int32)
    out = htree_cuda.indexer_logits(*x, **options)
    expected = definition_dsa.indexer_logits(*x, **options)
    finite = expected > -INF
    assert finite.any() and not finite.all()
    # Outside window and valid slots the incoming gradient counts as 0, whatever it is.
    g = torch.randn_like(out).masked_fill(~finite, NAN)
    got = torch.autograd.grad(out, x, g)
    wanted = torch.autograd.grad(expected[finite].sum() * 0 + (expected * g)[finite].sum(), x)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_finite_differences():
    x = inputs(s_q=2, s_kv=6, h_i=2, d_i=3, grad=True)
    indices = torch.tensor([[[0, 5, 5, 3]], [[1, 2, 0, 4]]], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *x: htree_cuda.indexer_logits(*x), x)
    assert torch.autograd.gradcheck(lambda *x: htree_cuda.indexer_logits(*x, indices=indices), x)
    assert torch.autograd.gradcheck(lambda *x: htree_cuda.indexer_topk(*x, 3, return_logits=True)[1], x)


def test_gradient_at_zero_is_zero_and_second_derivatives_raise():
    q = torch.zeros(1, 1, 2, requires_grad=True)
    k, weights = torch.ones(3, 1, 2, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    out = htree_cuda.indexer_logits(q, k, weights)
    grads = torch.autograd.grad(out.sum(), (q, k, weights), create_graph=True)
    assert all((x == 0).all() for x in grads)
    with pytest.raises(RuntimeError, match="second derivatives"):
        grads[0].sum().backward()


@pytest.mark.parametrize("listed", [False, True])
def test_non_finite_rows_reach_no_gradient_of_their_neighbours(listed):
    q, k, weights = inputs(s_q=4, s_kv=10)
    q[2], k[9] = NAN, INF
    end = torch.tensor([9, 10, 9, 4], dtype=torch.int32)
    x = tuple(x.requires_grad_() for x in (q, k, weights))
    options = {"k_end": end}
    if listed:
        options["indices"] = torch.arange(10, dtype=torch.int32).expand(4, 1, 10)
    dq, dk, dw = torch.autograd.grad(htree_cuda.indexer_logits(*x, **options).sum(), x, torch.ones(()).double())
    assert dq[[0, 3]].isfinite().all() and not dq[1].isfinite().all()
    assert dw[[0, 3]].isfinite().all() and dw[2].isnan().all()
    assert not dk[:9].isfinite().any() and dk[9].isfinite().all()
    # Query 2 sees rows 0 to 8 and its NaN reaches them; row 9 is seen by query 1 alone.


# ---------------------------------------------------------------------------------------------------- topk_indices


def by_numpy(logits, topk, window):
    """The selection by a stable sort in numpy."""
    out = np.full((logits.shape[0], topk), -1, dtype=np.int64)
    for s, row in enumerate(logits.numpy()):
        rows = np.array([j for j in range(len(row)) if window[s][0] <= j < window[s][1] and row[j] != -INF], dtype=int)
        key = np.where(np.isnan(row[rows]), 2.0, 1.0), np.where(np.isnan(row[rows]), 0.0, row[rows] + 0.0)
        best = np.sort(rows[np.lexsort((rows, -key[1], -key[0]))][:topk])
        out[s, : len(best)] = best
    return torch.from_numpy(out)


def hostile_rows(n=300, seed=0):
    """Rows that a selector loses winners on."""
    g = torch.Generator().manual_seed(seed)
    random = torch.randn(n, generator=g)
    few = torch.randperm(n, generator=g)[:9]
    rows = {
        "random": random,
        "constant": torch.full((n,), 3.25),
        "all zero": torch.zeros(n),
        "few positive": torch.zeros(n).index_put((few,), torch.rand(len(few), generator=g)),
        "upper bits equal": (torch.randint(0, 4, (n,), generator=g) + 0x3F800000).to(torch.int32).view(torch.float32),
        "rising": torch.arange(n).float(),
        "falling": -torch.arange(n).float(),
        "denormal": torch.randint(0, 9, (n,), generator=g).to(torch.int32).view(torch.float32),
        "zeros of both signs": torch.zeros(n).masked_fill(torch.rand(n, generator=g) < 0.5, -0.0),
        "nan": random.masked_fill(torch.rand(n, generator=g) < 0.1, NAN),
        "nan of both signs": torch.where(random > 0, torch.tensor(NAN), -torch.tensor(NAN)),
        "infinite ties": random.masked_fill(torch.rand(n, generator=g) < 0.4, INF),
        "masked": random.masked_fill(torch.rand(n, generator=g) < 0.9, -INF),
        "all masked": torch.full((n,), -INF),
    }
    return list(rows), torch.stack(list(rows.values()))


def test_a_weight_that_is_not_finite_reaches_no_key_outside_the_window():
    q, k = torch.rand(2, 1, 2), torch.rand(2, 1, 2).requires_grad_()
    for bad in (math.nan, math.inf, -math.inf):
        (dk,) = torch.autograd.grad(
            htree_cuda.indexer_logits(q, k, torch.tensor([[bad], [1.0]]), q_start=0)[1].sum(), k
        )
        torch.testing.assert_close(dk[1, 0], q[1, 0])


@pytest.mark.parametrize("topk", [1, 7, 32, 299, 300, 301])
def test_selection_equals_a_stable_sort(topk):
    names, logits = hostile_rows()
    out = htree_cuda.topk_indices(logits, topk)[:, 0].long()
    expected = by_numpy(logits, topk, [(0, 300)] * len(names))
    wrong = [name for name, a, b in zip(names, out, expected, strict=True) if not torch.equal(a, b)]
    assert wrong == []
    start = torch.randint(-20, 100, (len(names),), dtype=torch.int32)
    end = torch.randint(90, 320, (len(names),), dtype=torch.int32)
    out = htree_cuda.topk_indices(logits, topk, k_start=start, k_end=end)[:, 0].long()
    assert torch.equal(out, by_numpy(logits, topk, list(zip(start.tolist(), end.tolist()))))


@settings(max_examples=40, **QUIET)
@given(
    B=st.one_of(st.none(), st.integers(0, 2)), s_q=st.integers(0, 4), n=st.integers(0, 40), topk=st.integers(1, 50),
    start=st.one_of(st.none(), st.integers(0, 50)), k_stride=st.sampled_from([1, 3]), bounded=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_selection_equals_the_definition(B, s_q, n, topk, start, k_stride, bounded, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, ((s_q, n) if B is None else (B, s_q, n)), generator=g).to(dtype)
    options = {"q_start": start, "k_stride": k_stride, **(bounds(s_q, n, B, seed) if bounded else {})}
    indices, values = htree_cuda.topk_indices(logits, topk, return_values=True, **options)
    expected, expected_values = definition_dsa.topk_indices(logits, topk, **options)
    assert torch.equal(indices, expected) and torch.equal(values, expected_values)
    unsorted = htree_cuda.topk_indices(logits, topk, sorted=False, **options)
    ascending = torch.where(unsorted < 0, INT_MAX, unsorted).sort(-1).values
    assert torch.equal(torch.where(ascending == INT_MAX, -1, ascending), indices)
    assert torch.equal(unsorted >= 0, indices >= 0), "-1 is last"


def test_selection_does_not_depend_on_what_cannot_win():
    _, logits = hostile_rows()
    full = htree_cuda.topk_indices(logits, 20)
    assert torch.equal(full, htree_cuda.topk_indices(torch.cat((logits, torch.full((14, 50), -INF)), 1), 20))
    assert torch.equal(full, htree_cuda.topk_indices(logits * 4, 20))
    assert torch.equal(full, htree_cuda.topk_indices(logits.double(), 20))
    poisoned = torch.cat((torch.full((14, 3), NAN), logits, torch.full((14, 3), NAN)), 1)
    start, end = (torch.full((14,), x, dtype=torch.int32) for x in (3, 303))
    shifted = htree_cuda.topk_indices(poisoned, 20, k_start=start, k_end=end)
    assert torch.equal(shifted, torch.where(full < 0, -1, full + 3))


def test_a_list_of_parts_selects_as_the_whole():
    _, logits = hostile_rows()
    full = htree_cuda.topk_indices(logits, 20)
    start = torch.full((14,), 150, dtype=torch.int32)
    parts = [htree_cuda.topk_indices(logits, 20, k_end=start), htree_cuda.topk_indices(logits, 20, k_start=start)]
    rows = torch.cat(parts, -1)[:, 0].long()
    values = logits.gather(1, rows.clamp(min=0)).masked_fill(rows < 0, -INF)
    merged = rows.gather(1, htree_cuda.topk_indices(values, 20)[:, 0].long().clamp(min=0))
    picked = htree_cuda.topk_indices(values, 20)[:, 0] >= 0
    assert torch.equal(torch.where(picked, merged, -1), full[:, 0].long())


# ---------------------------------------------------------------------------------------------------- indexer_topk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("topk", [5, 40, 55])
def test_indexer_topk_is_bitwise_the_two_steps(dtype, topk, small_tiles):
    source = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    q, k, weights = inputs(B=2, dtype=source)
    scales = {}
    if dtype == torch.float8_e4m3fn:
        (q, q_scale), (k, k_scale) = (htree_cuda.quantize_fp8(x, block_size=None) for x in (q, k))
        scales = {"q_scale": q_scale, "k_scale": k_scale}
    k[:, 5] = k[:, 3]  # ties
    window = {**bounds(5, 40, 2), "q_start": [35, 20]}
    dense = htree_cuda.indexer_logits(q, k, weights, **scales, **window)
    for ascending in (True, False):
        indices, values = htree_cuda.topk_indices(dense, topk, sorted=ascending, return_values=True)
        got, logits = htree_cuda.indexer_topk(
            q, k, weights, topk, **scales, **window, sorted=ascending, return_logits=True
        )
        assert torch.equal(got, indices) and torch.equal(logits, values)
    assert torch.equal(htree_cuda.indexer_topk(q, k, weights, topk, **scales, **window, sorted=False), got)


def test_indexer_topk_backward_is_the_listed_one():
    x = inputs(grad=True)
    indices, logits = htree_cuda.indexer_topk(*x, 6, return_logits=True)
    g = torch.randn_like(logits)
    got = torch.autograd.grad(logits, x, g)
    wanted = torch.autograd.grad(htree_cuda.indexer_logits(*x, indices=indices), x, g)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)) and not indices.requires_grad
    assert not htree_cuda.indexer_topk(*x, 6).requires_grad


# --------------------------------------------------------------------------------------------- ops, errors, autocast


@pytest.mark.parametrize("B", [None, 2])
def test_opcheck(B):
    x = inputs(B=B, dtype=torch.float32, grad=True)
    batch = () if B is None else (B,)
    start, end = bounds(5, 40, B).values()
    indices = torch.randint(-2, 42, (*batch, 5, 1, 7), dtype=torch.int32)
    length = torch.full((*batch, 5), 6, dtype=torch.int32)
    options = {"q_start": [30] * (B or 1), "k_stride": 1, "backend": "auto"}
    ops = torch.ops.htree_cuda
    for lists in ((None, None), (indices, length)):
        args = (*x, None, None, *lists, start, end)
        torch.library.opcheck(ops.indexer_logits, args, {**options, "deterministic": True})
        dlogits = torch.randn_like(ops.indexer_logits(*args, **options))
        detached = [y.detach() for y in x]
        torch.library.opcheck(ops.indexer_logits_backward, (dlogits, *detached, *lists, start, end), options)
    logits = torch.randn(*batch, 5, 40)
    for values in (True, False):
        numbers = {**options, "topk": 6, "sorted": True, "return_values": values}
        torch.library.opcheck(ops.topk_indices, (logits, start, end), numbers)
    torch.library.opcheck(ops.indexer_topk, (*x, None, None, start, end), {**options, "topk": 6, "sorted": True})


def test_autocast_casts_queries_and_keys_alone():
    q, k, weights = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = htree_cuda.indexer_logits(q, k, weights)
        out8 = htree_cuda.indexer_logits(fp8(q), fp8(k), weights)
    assert torch.equal(out, htree_cuda.indexer_logits(q.bfloat16(), k.bfloat16(), weights))
    assert torch.equal(out8, htree_cuda.indexer_logits(fp8(q), fp8(k), weights)) and out.dtype == torch.float32


Q, K, W = torch.zeros(5, 3, 6), torch.zeros(40, 1, 6), torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        ("q must be a torch.Tensor, got int", TypeError, {"q": 1}),
        ("q must have the dimensions [s_q, h_i, d_i] or [B, s_q, h_i, d_i]", ValueError, {"q": Q[0]}),
        ("q must be float16, bfloat16, float32, float64 or float8_e4m3fn, got torch.int32", ValueError, {"q": Q.int()}),
        ("k must have the dtype of q (torch.float32), got torch.float16", ValueError, {"k": K.half()}),
        ("k must have one KV head", ValueError, {"k": torch.zeros(40, 2, 6)}),
        ("d_i of k must equal d_i of q (6), got 5", ValueError, {"k": K[..., :5]}),
        ("weights must be float32 where q is torch.float32, got torch.float64", ValueError, {"weights": W.double()}),
        ("h_i of weights must equal h_i of q (3), got 2", ValueError, {"weights": W[:, :2]}),
        ("h_i must be at least 1, got 0", ValueError, {"q": Q[:, :0], "weights": W[:, :0]}),
        ("k_scale belongs to float8_e4m3fn tensors", ValueError, {"k_scale": torch.ones(40, 1)}),
        ("s_kv of k_scale must equal s_kv of k (40), got 39", ValueError,
         {"q": fp8(Q), "k": fp8(K), "k_scale": torch.ones(39, 1)}),
        ("topk_length belongs to indices", ValueError, {"topk_length": torch.ones(5).int()}),
        ("indices must be int32, got torch.int64", ValueError, {"indices": torch.zeros(5, 1, 3).long()}),
        ("k_start must be int32, got torch.int64", ValueError, {"k_start": torch.zeros(5).long()}),
        ("s_q of k_end must equal s_q of q (5), got 4", ValueError, {"k_end": torch.zeros(4).int()}),
        ("q_start must lie in 0 ..", ValueError, {"q_start": -1}),
        ("k_stride must be at least 1, got 0", ValueError, {"k_stride": 0}),
        ("deterministic must be a bool, got 1", TypeError, {"deterministic": 1}),
        ("backend must be one of 'auto', 'torch', got 'cuda'", ValueError, {"backend": "cuda"}),
        ("float8_e4m3fn calls have no gradient (weights): train with bfloat16", ValueError,
         {"q": fp8(Q), "k": fp8(K), "weights": W.clone().requires_grad_()}),
    ],
)  # fmt: skip
def test_logits_errors(match, error, change):
    call = {"q": Q, "k": K, "weights": W, **change}
    with pytest.raises(error, match=re.escape(f"indexer_logits: {match}")):
        htree_cuda.indexer_logits(**call)


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        ("topk must be at least 1, got 0", ValueError, {"topk": 0}),
        ("topk must be at most 1073741824, got 1073741825", ValueError, {"topk": 2**30 + 1}),
        ("topk must be an int, got 2.0", TypeError, {"topk": 2.0}),
        ("logits must be float16, bfloat16, float32 or float64, got torch.int64", ValueError,
         {"logits": torch.zeros(2, 3).long()}),
        ("logits must have the dimensions [s_q, n] or [B, s_q, n]", ValueError, {"logits": torch.zeros(3)}),
        ("sorted must be a bool, got None", TypeError, {"sorted": None}),
        ("return_values must be a bool, got 0", TypeError, {"return_values": 0}),
        ("k_start must have 1 dimensions [s_q]", ValueError, {"k_start": torch.zeros(1, 5).int()}),
    ],
)  # fmt: skip
def test_selector_errors(match, error, change):
    with pytest.raises(error, match=re.escape(f"topk_indices: {match}")):
        htree_cuda.topk_indices(**{"logits": torch.zeros(5, 9), "topk": 3, **change})


def test_other_devices_and_missing_kernels_are_named():
    q, k, weights = (x.to("meta") for x in inputs(dtype=torch.bfloat16))
    assert htree_cuda.indexer_logits(q, k, weights).shape == (5, 40)  # fake
    assert htree_cuda.topk_indices(torch.zeros(5, 9, device="meta"), 3).shape == (5, 1, 3)
