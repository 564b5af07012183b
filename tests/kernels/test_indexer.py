"""The kernels of indexer_logits and indexer_topk: against float64, beside the baseline, and bit for bit where nothing
that matters changes."""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError, kernels
from htree_cuda.params import IndexerParams

from .. import baseline
from ..bits import same_bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
INF, NAN = math.inf, math.nan
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = [BF16, FP16, FP8]


def problem(s_q=9, h_i=64, s_kv=200, d_i=128, dtype=BF16, batch=(), seed=0):
    """(q, k, weights, scales) with the scales of quantize_fp8 for FP8."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(*batch, s_q, h_i, d_i, generator=g)
    k = torch.randn(*batch, s_kv, 1, d_i, generator=g)
    weights = (torch.randn(*batch, s_q, h_i, generator=g) * (h_i * d_i) ** -0.5).to(DEVICE)
    if dtype != FP8:
        return q.to(dtype).to(DEVICE), k.to(dtype).to(DEVICE), weights, {}
    (q, q_scale), (k, k_scale) = (htree_cuda.quantize_fp8(x, block_size=None) for x in (q, k))
    return q.to(DEVICE), k.to(DEVICE), weights, {"q_scale": q_scale.to(DEVICE), "k_scale": k_scale.to(DEVICE)}


def wide(x):
    return x.float().double()


def in_float64(q, k, weights, q_scale=None, k_scale=None, **window):
    """Logits in float64 on the given inputs, and the scale R that errors are relative to."""
    factor = weights if q_scale is None else weights * q_scale
    exact = htree_cuda.indexer_logits(wide(q), wide(k), factor.double(), backend="torch", **window)
    size = htree_cuda.indexer_logits(wide(q).abs(), wide(k).abs(), factor.double().abs(), backend="torch", **window)
    if k_scale is not None:
        column = k_scale[..., 0].double().unsqueeze(-2)
        exact, size = exact * column, size * column.abs()
    return exact, size


def poisoned(q, k, weights, q_scale=None, k_scale=None, k_start=None, k_end=None, q_start=None, k_stride=1):
    """The kernel into an output of another value than any that belongs there, past the op."""
    tensors = [q, k, weights, q_scale, k_scale, k_start, k_end]
    batched = q.dim() == 4
    tensors = [x if x is None or batched else x[None] for x in tensors]
    starts = [q_start] * tensors[0].shape[0] if isinstance(q_start, int) else q_start
    out = torch.full((*tensors[0].shape[:2], tensors[1].shape[1]), 12345.0, device=q.device)
    kernels.indexer_logits(*tensors, out, params=IndexerParams(True, starts, k_stride))
    return out if batched else out[0]


def check(q, k, weights, scales, **window):
    """Within the bounds of the spec wherever something is visible, minus infinity elsewhere, every element written."""
    out = htree_cuda.indexer_logits(q, k, weights, **scales, **window)
    same_bits(out, poisoned(q, k, weights, **scales, **window))
    return judge(out, q, k, weights, scales, **window)


def judge(out, q, k, weights, scales, **window):
    exact, size = in_float64(q, k, weights, **scales, **window)
    hidden = exact == -INF
    assert torch.equal(out == -INF, hidden)
    error = ((out.double() - exact).abs() / size.clamp(min=1e-30)).masked_fill(hidden, 0.0)
    if hidden.all():
        return out
    if q.dtype == FP8:
        assert error.max() <= 2.0**-8
        x, y = out.double()[~hidden], exact[~hidden]
        assert 2 * (x * y).sum() >= (1 - 5e-6) * ((x * x).sum() + (y * y).sum())
    else:
        plain = baseline.indexer_logits(q, k, weights, **window)
        plain_error = ((plain.double() - exact).abs() / size.clamp(min=1e-30)).masked_fill(hidden, 0.0)
        # The definition has no rounding but float32's, whose order of addition differs: an ulp of the sum is the floor.
        floor = 2.0**-22
        assert error.max() <= max(baseline.FACTOR * plain_error.max(), floor)
        assert error.pow(2).mean().sqrt() <= max(baseline.FACTOR * plain_error.pow(2).mean().sqrt(), floor / 4)
    return out


@pytest.mark.emulated
@pytest.mark.sample
def test_small_sample():
    q, k, weights, scales = problem(s_q=9, s_kv=130, d_i=64)
    check(q, k, weights, scales, q_start=100)
    htree_cuda.indexer_topk(q, k, weights, 20, q_start=100)


@pytest.mark.emulated
@pytest.mark.parametrize("h_i", [1, 20, 33, 64])
def test_heads(h_i):
    check(*problem(s_q=5, h_i=h_i, s_kv=70))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_i", [64, 128])
@pytest.mark.parametrize("h_i", [1, 7, 32, 33, 64])
@pytest.mark.parametrize("s_q, s_kv", [(1, 1), (3, 63), (8, 64), (17, 65), (70, 5000), (2, 9000), (1, 70000)])
def test_every_size(dtype, d_i, h_i, s_q, s_kv):
    q, k, weights, scales = problem(s_q, h_i, s_kv, d_i, dtype)
    check(q, k, weights, scales)
    if s_kv > s_q:
        check(q, k, weights, scales, q_start=s_kv - s_q)


@pytest.mark.emulated
@pytest.mark.parametrize("h_i", [20, 64])
@pytest.mark.parametrize("s_q", [1, 3])
def test_few_queries_have_the_bits_of_many(s_q, h_i):
    """Up to four queries a CTA has one of them, and its consumers split the keys."""
    q, k, weights, scales = problem(s_q=9, h_i=h_i, s_kv=330, batch=(2,), d_i=64)
    full = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=[321, 150])
    for s in (0, 4, 9 - s_q):
        few = check(q[:, s : s + s_q], k, weights[:, s : s + s_q], scales, q_start=[321 + s, 150 + s])
        same_bits(few, full[:, s : s + s_q])


@pytest.mark.emulated(sms=1)
@pytest.mark.parametrize("d_i, s_kv", [(64, 1500), (128, 1100)])
def test_a_ring_that_goes_round_for_few_queries(d_i, s_kv):
    q, k, weights, scales = problem(s_q=1, s_kv=s_kv, d_i=d_i)
    check(q, k, weights, scales, q_start=s_kv - 3)


@pytest.mark.emulated
@pytest.mark.parametrize("h_i", [20, 32, 64])
def test_zeros_have_the_sign_of_a_prefill(h_i):
    """Products that underflow give -0 where weights are negative, and heads that do not exist change no sum."""
    q, k = (torch.full((n, h, 64), 1e-15, device=DEVICE).to(BF16) for n, h in ((5, h_i), (70, 1)))
    weights = torch.full((5, h_i), -1e-20, device=DEVICE)
    full = htree_cuda.indexer_logits(q, k, weights)
    assert (full == 0).all() and full.signbit().all()
    same_bits(full[:1], htree_cuda.indexer_logits(q[:1], k, weights[:1]))


@pytest.mark.hardware
def test_a_step_of_decoding_in_a_graph():
    q, k, weights, scales = problem(s_q=1, s_kv=70000)
    expected = htree_cuda.indexer_topk(q, k, weights, 2048, **scales, q_start=69999)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = htree_cuda.indexer_topk(q, k, weights, 2048, **scales, q_start=69999)
    graph.replay()
    assert torch.equal(out, expected)
    k.neg_()
    graph.replay()
    assert torch.equal(out, htree_cuda.indexer_topk(q, k, weights, 2048, **scales, q_start=69999))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_decoding_has_the_bits_of_a_prefill(dtype):
    q, k, weights, scales = problem(s_q=9, s_kv=20000, dtype=dtype)
    full = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=19991)
    for s_q in (1, 2, 4):
        part = {name: x[-s_q:] if name == "q_scale" else x for name, x in scales.items()}
        same_bits(full[-s_q:], check(q[-s_q:], k, weights[-s_q:], part, q_start=20000 - s_q))


@pytest.mark.emulated
def test_windows_and_batches():
    q, k, weights, scales = problem(s_q=11, s_kv=300, batch=(2,))
    g = torch.Generator().manual_seed(3)
    start, end = (torch.randint(-20, 330, (2, 11), generator=g, dtype=torch.int32).to(DEVICE) for _ in range(2))
    check(q, k, weights, scales, k_start=start - 150, k_end=end)
    check(q, k, weights, scales, q_start=[0, 900], k_stride=4)
    empty = torch.zeros(2, 11, dtype=torch.int32, device=q.device)
    assert (check(q, k, weights, scales, k_end=empty) == -INF).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_neighbours_chunks_or_windows(dtype):
    q, k, weights, scales = problem(s_q=40, s_kv=9000, dtype=dtype)
    full = htree_cuda.indexer_logits(q, k, weights, **scales)
    part = {name: x[13:30] if name == "q_scale" else x for name, x in scales.items()}
    same_bits(full[13:30], htree_cuda.indexer_logits(q[13:30], k, weights[13:30], **part))
    part = {name: x[77:5000] if name == "k_scale" else x for name, x in scales.items()}
    same_bits(full[:, 77:5000], htree_cuda.indexer_logits(q, k[77:5000], weights, **part))
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(0)).to(q.device)
    part = {name: x[order] if name == "k_scale" else x for name, x in scales.items()}
    moved = k.view(torch.uint8)[order].view(k.dtype)
    same_bits(full[:, order], htree_cuda.indexer_logits(q, moved, weights, **part))
    causal = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=4000)
    visible = causal > -INF
    same_bits(full[visible], causal[visible])


@pytest.mark.emulated
def test_nan_and_infinity_stay_where_they_are():
    q, k, weights, _ = problem(s_q=9, h_i=20, s_kv=140)
    end = torch.full((9,), 120, dtype=torch.int32, device=q.device)
    clean = htree_cuda.indexer_logits(q, k, weights, k_end=end)
    k[120:], k[70, 0, 3], q[4, 1, 5], weights[6, 2] = NAN, NAN, NAN, NAN
    k[30] = INF
    out = htree_cuda.indexer_logits(q, k, weights, k_end=end)
    exact = htree_cuda.indexer_logits(q.double(), k.double(), weights.double(), k_end=end, backend="torch")
    assert torch.equal(out.isnan(), exact.isnan()) and (out[:, 120:] == -INF).all()
    kept = ~exact.isnan() & (torch.arange(140, device=q.device) != 30)
    same_bits(out[kept], clean[kept])
    assert torch.equal(out[:, 30].isinf(), exact[:, 30].isinf())


@pytest.mark.emulated
def test_strided_views():
    q, k, weights, _ = problem(s_q=6, h_i=64, s_kv=80, d_i=64)
    big = torch.zeros(6, 70, 136, dtype=q.dtype, device=q.device)
    big[:, :64, 64:128] = q
    keys = torch.zeros(80, 3, 64, dtype=k.dtype, device=k.device)
    keys[:, 1:2] = k
    strided = weights.T.contiguous().T
    out = htree_cuda.indexer_logits(big[:, :64, 64:128], keys[:, 1:2], strided)
    same_bits(out, htree_cuda.indexer_logits(q, k, weights))


@pytest.mark.emulated
@pytest.mark.parametrize("topk", [10, 300])
def test_indexer_topk_is_bitwise_the_two_steps(topk):
    q, k, weights, scales = problem(s_q=11, h_i=32, s_kv=200, batch=(2,))
    k[:, 5] = k[:, 3]
    for window in ({}, {"q_start": [0, 180]}, {"k_end": torch.full((2, 11), 90, dtype=torch.int32, device=q.device)}):
        dense = htree_cuda.indexer_logits(q, k, weights, **scales, **window)
        expected = htree_cuda.topk_indices(dense, topk, return_values=True, **window)
        got = htree_cuda.indexer_topk(q, k, weights, topk, **scales, **window, return_logits=True)
        assert torch.equal(got[0], expected[0])
        same_bits(got[1], expected[1])


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_topk_in_chunks(dtype):
    """Several chunks of queries: more logits than the workspace holds."""
    q, k, weights, scales = problem(s_q=5000, h_i=8, s_kv=40000, d_i=64, dtype=dtype)
    dense = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=35000)
    expected = htree_cuda.topk_indices(dense, 512, return_values=True, q_start=35000)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = htree_cuda.indexer_topk(q, k, weights, 512, **scales, q_start=35000, return_logits=True)
    results = sum(x.numel() * x.element_size() for x in got)
    assert torch.cuda.max_memory_allocated() - before <= results + (257 << 20)
    assert torch.equal(got[0], expected[0])
    same_bits(got[1], expected[1])


def listed_problem(s_q=5, h_i=64, s_kv=90, d_i=128, topk=100, dtype=BF16, batch=(), seed=0):
    """Lists with invalid slots of every kind and duplicates, lengths, and a window."""
    q, k, weights, _ = problem(s_q, h_i, s_kv, d_i, dtype, batch, seed)
    g = torch.Generator().manual_seed(seed + 1)
    indices = torch.randint(-2, s_kv + 2, (*batch, s_q, 1, topk), generator=g, dtype=torch.int32)
    indices[..., 3], indices[..., 4], indices[..., 5:9] = -(2**31), 2**31 - 1, 7
    length = torch.randint(topk // 2, topk + 5, (*batch, s_q), generator=g, dtype=torch.int32)
    end = torch.randint(s_kv // 2, s_kv + 9, (*batch, s_q), generator=g, dtype=torch.int32)
    if s_q > 2:
        length[..., 1] = 0  # a query without a valid slot
    rule = {"indices": indices, "topk_length": length, "k_end": end}
    return q, k, weights, {name: x.to(DEVICE) for name, x in rule.items()}


def backward_of(q, k, weights, rule, dlogits, backend):
    """(dq, dk, dweights) past autograd, in the dtype of q or, with the torch backend, in float64."""
    if backend == "torch":
        q, k, weights, dlogits = q.double(), k.double(), weights.double(), dlogits.double()
    tensors = rule["indices"], rule["topk_length"], None, rule["k_end"]
    return torch.ops.htree_cuda.indexer_logits_backward(
        dlogits, q, k, weights, *tensors, q_start=None, k_stride=1, backend=backend
    )


def check_listed(q, k, weights, rule):
    out = htree_cuda.indexer_logits(q, k, weights, **rule)
    exact, size = in_float64(q, k, weights, **rule)
    hidden = exact == -INF
    assert torch.equal(out == -INF, hidden) and not hidden.all()
    error = ((out.double() - exact).abs() / size.clamp(min=1e-30)).masked_fill(hidden, 0.0)
    assert error.max() <= 2.0**-20
    dlogits = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(q.device).masked_fill(hidden, NAN)
    got = backward_of(q, k, weights, rule, dlogits, "auto")
    wanted = backward_of(q, k, weights, rule, dlogits, "torch")
    plain = baseline.indexer_logits_backward(q, k, weights, rule, dlogits)
    for name, x, y, z in zip(("dq", "dk", "dweights"), got, wanted, plain, strict=True):
        # Relative to the row; dk adds with atomics, whose order is another every time.
        scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        error, plain_error = ((e.double() - y).abs() / scale for e in (x, z))
        floor = 2.0**-20
        assert error.max() <= max(baseline.FACTOR * plain_error.max(), floor), name
        assert error.pow(2).mean() <= max((baseline.FACTOR**2 * plain_error.pow(2).mean()), floor**2), name
    return got


@pytest.mark.emulated
@pytest.mark.parametrize("h_i", [20, 64])
def test_listed_forward_and_backward(h_i):
    got = check_listed(*listed_problem(h_i=h_i))
    assert (got[0][1] == 0).all() and (got[2][1] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d_i", [64, 128])
@pytest.mark.parametrize("s_q, s_kv, topk", [(1, 1, 16), (7, 300, 64), (33, 5000, 2048), (4, 100, 129)])
def test_listed_sizes(dtype, d_i, s_q, s_kv, topk):
    check_listed(*listed_problem(s_q, 64, s_kv, d_i, topk, dtype))
    check_listed(*listed_problem(s_q, 33, s_kv, d_i, topk, dtype, batch=(2,)))


@pytest.mark.parametrize("exponent", [-24, -14, 24])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_beyond_what_fp16_holds(dtype, exponent):
    """Small ones, as of a mean over many queries, and large ones: a power of two of them leaves as it came."""
    q, k, weights, rule = listed_problem(s_q=3, h_i=20, topk=70, dtype=dtype)
    dlogits = torch.randn(3, 70, generator=torch.Generator().manual_seed(5)).to(q.device)
    wanted = backward_of(q, k, weights, rule, dlogits, "auto")
    other = 2.0 ** (-exponent / 2)  # of keys and queries
    got = backward_of(q * other, k * other, weights, rule, dlogits * 2.0**exponent, "auto")
    for name, x, y, factor in zip(("dq", "dk", "dweights"), got, wanted, (other, other, 1.0), strict=True):
        x = x.double() * factor
        torch.testing.assert_close(x, y.double(), rtol=2.0**-7, atol=2.0**-9 * float(y.abs().max()), msg=name)


@pytest.mark.emulated
def test_listed_rows_that_are_not_finite_reach_no_neighbour():
    q, k, weights, rule = listed_problem(s_q=4, h_i=20, topk=30)
    rule["topk_length"][:] = 30
    rule["k_end"][:] = 90
    q[2], k[7] = NAN, INF
    rule["indices"][0] = torch.where(rule["indices"][0] == 7, 8, rule["indices"][0])
    named = torch.zeros(90, dtype=torch.bool, device=q.device)
    named[rule["indices"][2][(rule["indices"][2] >= 0) & (rule["indices"][2] < 90)].long()] = True
    dlogits = torch.ones(4, 30, device=q.device)
    dq, dk, dweights = backward_of(q, k, weights, rule, dlogits, "auto")
    assert dq[0].isfinite().all() and dweights[0].isfinite().all() and dweights[2].isnan().all()
    assert torch.equal(dk[:, 0].isfinite().all(-1), ~named)


@pytest.mark.hardware
def test_one_row_in_every_slot_and_training_through_the_selector():
    q, k, weights, _ = problem(s_q=256, s_kv=64)
    indices = torch.full((1, 1, 1), 7, dtype=torch.int32, device=DEVICE).expand(256, 1, 2048)
    rule = {"indices": indices, "topk_length": None, "k_end": None}
    dlogits = torch.ones((), device=DEVICE).expand(256, 2048)
    got = backward_of(q, k, weights, rule, dlogits, "auto")
    wanted = backward_of(q, k, weights, rule, dlogits, "torch")
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=2e-2, atol=2e-2 * float(wanted[1].abs().max()))
    inputs = [x.requires_grad_() for x in (q, k, weights)]
    found, logits = htree_cuda.indexer_topk(*inputs, 16, return_logits=True)
    grads = torch.autograd.grad(logits.sum(), inputs)
    again = torch.autograd.grad(htree_cuda.indexer_logits(*inputs, indices=found).sum(), inputs)
    same_bits(grads[0].float(), again[0].float())
    same_bits(grads[2], again[2])


def test_selection_against_float64():
    """Every selected row is within twice the allowed error of the threshold, and 99% of the set is the exact one."""
    q, k, weights, _ = problem(s_q=32, s_kv=6000)
    indices = htree_cuda.indexer_topk(q, k, weights, 512)[:, 0].long()
    exact, size = in_float64(q, k, weights)
    delta = 2 * (size.amax(1) * 2.0**-20)
    threshold = exact.sort(1, descending=True).values[:, 511]
    picked = exact.gather(1, indices)
    assert (picked >= (threshold - delta)[:, None]).all()
    best = exact.topk(512, 1).indices
    same = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(indices, best))
    assert same >= 0.99 * indices.numel()


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_repeats_are_bitwise_equal(dtype):
    q, k, weights, scales = problem(s_q=64, s_kv=5000, dtype=dtype)
    first = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=4000)
    for _ in range(1000):
        same_bits(htree_cuda.indexer_logits(q, k, weights, **scales, q_start=4000), first)


@pytest.mark.hardware
def test_sums_past_2_31():
    s_q, s_kv = 40000, 65536
    q, k, weights, _ = problem(s_q=40, h_i=2, s_kv=s_kv, d_i=64)
    out = htree_cuda.indexer_logits(q.repeat(1000, 1, 1), k, weights.repeat(1000, 1))
    assert out.numel() > 2**31 and out.shape == (s_q, s_kv)
    first = out[:40]
    for i in (500, 999):
        same_bits(out[40 * i : 40 * i + 40], first)


@pytest.mark.hardware
def test_refusals():
    q, k, weights, _ = problem()
    with pytest.raises(UnsupportedError, match="d_i to be 64 or 128, got 96"):
        htree_cuda.indexer_logits(q[..., :96], k[..., :96], weights)
    with pytest.raises(UnsupportedError, match=r"q is torch\.float32"):
        htree_cuda.indexer_logits(q.float(), k.float(), weights)
    weights.requires_grad_()
    with pytest.raises(UnsupportedError, match="no backward kernel for the dense form"):
        htree_cuda.indexer_logits(q, k, weights)
    with pytest.raises(UnsupportedError, match="in any order, deterministic is True"):
        htree_cuda.indexer_topk(q, k, weights, 5, return_logits=True, deterministic=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer(dtype):
    """Inputs come from the host and results are judged there: initcheck does not see what PyTorch's kernels write."""
    q, k, weights, scales = problem(s_q=9, h_i=20, s_kv=150, dtype=dtype)
    logits = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=100).cpu()
    indices = htree_cuda.indexer_topk(q, k, weights, 50, **scales, q_start=100).cpu()[:, 0]
    q, k, weights = (x.cpu() for x in (q, k, weights))
    judge(logits, q, k, weights, {name: x.cpu() for name, x in scales.items()}, q_start=100)
    assert (indices >= 0).all()  # the first query sees 101 rows
    chosen = logits.gather(-1, indices.long()).sort(-1, descending=True).values
    same_bits(chosen, logits.sort(-1, descending=True).values[:, :50])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizer_of_few_queries(dtype):
    q, k, weights, scales = problem(s_q=2, h_i=20, s_kv=330, dtype=dtype)
    logits = htree_cuda.indexer_logits(q, k, weights, **scales, q_start=310).cpu()
    judge(logits, q.cpu(), k.cpu(), weights.cpu(), {name: x.cpu() for name, x in scales.items()}, q_start=310)
