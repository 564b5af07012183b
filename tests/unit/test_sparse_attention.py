"""sparse_attention: the definition's cases, the torch backend and its backward against it, and what a caller can get
wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import htree_cuda
from htree_cuda import UnsupportedError, definition
from htree_cuda.torch_backend import chunks
from htree_cuda.torch_backend import lists as torch_lists

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
OP = torch.ops.htree_cuda.sparse_attention
NUMBERS = {"d_v": 5, "sm_scale": None, "q_start": None, "k_stride": 1, "lse_base": 2.0, "backend": "auto"}


def problem(s_q=5, h_q=6, s_kv=40, topk=12, d_qk=8, B=None, dtype=torch.float64, grad=False, hostile=False):
    """q, kv, indices: distinct and valid, or of every kind."""
    batch = () if B is None else (B,)
    q = torch.randn(*batch, s_q, h_q, d_qk, dtype=torch.float64).to(dtype).requires_grad_(grad)
    kv = torch.randn(*batch, s_kv, 1, d_qk, dtype=torch.float64).to(dtype).requires_grad_(grad)
    if hostile:
        indices = torch.randint(-3, s_kv + 4, (*batch, s_q, 1, topk), dtype=torch.int32)
    else:
        indices = torch.rand(*batch, s_q, 1, s_kv).argsort(-1)[..., :topk].to(torch.int32).contiguous()
    return q, kv, indices


def check(q, kv, indices, d_v=5, **options):
    """Both outputs equal the definition to 1e-10."""
    out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=d_v, **options)
    expected = definition.sparse_attention(q, kv, indices, d_v=d_v, **options)
    for x, y in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10, equal_nan=True)
    return out, lse


def gradients(function, inputs, d_out, d_lse, *args, **options):
    out, lse = function(*inputs[:2], *args, attn_sink=inputs[2] if len(inputs) > 2 else None, **options)
    return torch.autograd.grad((out, lse), inputs, (d_out, d_lse))


# ------------------------------------------------------------------------------------------------------- definition


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    B=st.one_of(st.none(), st.integers(1, 2)), s_q=st.integers(1, 4), h_q=st.sampled_from([1, 3, 64, 65]),
    s_kv=st.integers(0, 30), topk=st.integers(1, 20), d_qk=st.integers(1, 9), values=st.integers(1, 9),
    start=st.one_of(st.none(), st.integers(0, 40)), k_stride=st.sampled_from([1, 2, 4]), lengths=st.booleans(),
    sinks=st.booleans(), natural=st.booleans(), scale=st.sampled_from([None, None, 0.0, -0.4, 1.7]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_forward_and_backward_equal_the_definition(
    B, s_q, h_q, s_kv, topk, d_qk, values, start, k_stride, lengths, sinks, natural, scale, seed
):
    torch.manual_seed(seed)
    q, kv, indices = problem(s_q, h_q, s_kv, topk, d_qk, B, grad=True, hostile=True)
    batch = () if B is None else (B,)
    length = torch.randint(-1, topk + 2, (*batch, s_q), dtype=torch.int32) if lengths else None
    sink = torch.randn(h_q, dtype=torch.float64, requires_grad=True) if sinks else None
    options = {
        "d_v": min(values, d_qk), "q_start": start, "k_stride": k_stride, "topk_length": length,
        "lse_base": math.e if natural else 2, "sm_scale": scale,
    }  # fmt: skip
    out, lse = check(q, kv, indices, attn_sink=sink, **options)
    empty = lse.isinf()
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    inputs = (q, kv, sink) if sinks else (q, kv)
    mine = gradients(htree_cuda.sparse_attention, inputs, d_out, d_lse, indices, **options)
    if empty.all():  # autograd has no path through the definition then
        assert all((x == 0).all() for x in mine)
        return
    exact = gradients(definition.sparse_attention, inputs, d_out, d_lse, indices, **options)
    for x, y in zip(mine, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("function", [definition.sparse_attention, htree_cuda.sparse_attention])
def test_gradcheck(function):
    q, kv, indices = problem(s_q=3, h_q=2, s_kv=7, topk=4, d_qk=4, grad=True)
    indices[0, 0, 1] = indices[0, 0, 0]
    indices[1, 0, 2] = -1
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, kv, s: function(q, kv, indices, d_v=3, attn_sink=s), (q, kv, sink))


def test_it_is_softmax_attention():
    """Against PyTorch's own attention, all keys listed; and its lse against attn_dist's need."""
    q, kv, _ = problem()
    indices = torch.arange(40, dtype=torch.int32).expand(5, 1, 40).contiguous()
    out, lse = check(q, kv, indices)
    heads, keys = q.transpose(0, 1), kv[:, 0].expand(6, -1, -1)
    dense = torch.nn.functional.scaled_dot_product_attention(heads, keys, keys[..., :5])
    torch.testing.assert_close(out, dense.transpose(0, 1), rtol=0, atol=1e-12)
    scores = heads @ keys.transpose(1, 2) * 8**-0.5 / math.log(2.0)
    torch.testing.assert_close(torch.exp2(scores - lse.T[:, :, None]).sum(-1), torch.ones_like(lse.T))


@pytest.mark.parametrize("h_q", [1, 3, 130])
@pytest.mark.parametrize("lse_base", [2, math.e])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 1e-3)])
def test_slots_of_attn_dist_sum_to_the_number_of_heads(h_q, lse_base, dtype, tolerance):
    q, kv, indices = problem(s_q=7, h_q=h_q, s_kv=60, topk=33, d_qk=64, dtype=dtype, hostile=True)
    indices[3] = -1
    length = torch.tensor([33, 20, 1, 33, 33, 33, 40], dtype=torch.int32)
    options = {"q_start": 50, "topk_length": length, "lse_base": lse_base}
    sink = torch.ones(h_q, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    _, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=48, attn_sink=sink, **options)
    sums = htree_cuda.attn_dist(q, kv, indices, lse, **options).sum((0, 2)).double()
    valid = lse[:, 0] > -math.inf
    assert valid.tolist() == [True, True, bool(valid[2]), False, True, True, True]
    torch.testing.assert_close(sums, torch.where(valid, float(h_q), 0.0).double(), rtol=tolerance, atol=0)


def test_both_lse_bases():
    q, kv, indices = problem()
    out, lse = check(q, kv, indices)
    natural_out, natural_lse = check(q, kv, indices, lse_base=math.e)
    assert torch.equal(out, natural_out)
    torch.testing.assert_close(lse * math.log(2.0), natural_lse, rtol=1e-14, atol=0)


def test_return_lse_false_gives_out_alone():
    q, kv, indices = problem(grad=True)
    out = htree_cuda.sparse_attention(q, kv, indices, d_v=5, return_lse=False)
    assert torch.equal(out, htree_cuda.sparse_attention(q, kv, indices, d_v=5)[0])
    out.sum().backward()
    assert q.grad.abs().sum() > 0


# ------------------------------------------------------------------------------------------------------------- slots


def test_invalid_indices_of_every_kind():
    q, kv, indices = problem()
    bad = [-1, INT_MIN, INT_MAX, 40, 41, -2]
    indices[:, 0, : len(bad)] = torch.tensor(bad, dtype=torch.int32)
    named = torch.unique(indices[(indices >= 0) & (indices < 40)]).long()
    poisoned = torch.full_like(kv, math.nan)
    poisoned[named] = kv[named]
    out, lse = check(q, kv, indices)
    assert out.isfinite().all() and lse.isfinite().all()
    for x, y in zip((out, lse), htree_cuda.sparse_attention(q, poisoned, indices, d_v=5)):
        assert torch.equal(x, y)
    shorter = indices[:, :, len(bad) :].contiguous()
    torch.testing.assert_close(htree_cuda.sparse_attention(q, kv, shorter, d_v=5)[0], out, rtol=0, atol=1e-14)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_nobody_names_reaches_no_gradient(poison):
    q, kv, indices = problem()
    indices[indices == 0] = -1
    indices[2] = -1
    clean = [x.clone().requires_grad_() for x in (q, kv)]
    kv[0] = poison
    dirty = [x.requires_grad_() for x in (q, kv)]
    results = []
    for inputs in (clean, dirty):
        out, lse = htree_cuda.sparse_attention(*inputs, indices, d_v=5)
        (out.sum() + lse.exp().sum()).backward()
        results.append((out, lse, inputs[0].grad, inputs[1].grad))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert (clean[1].grad[0] == 0).all()


@pytest.mark.parametrize("column", [1, 7])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_in_a_named_row_reaches_its_queries_alone(poison, column):
    """In the value columns and beyond them alike: it reaches the score."""
    q, kv, indices = problem()
    indices[:, 0][indices[:, 0] == 9] = 10
    indices[3, 0, 4] = 9
    kv[9, 0, column] = poison
    inputs = [x.requires_grad_() for x in (q, kv)]
    out, lse = check(*inputs, indices)
    assert out[3].isnan().all() and lse[3].isnan().all()
    others = [0, 1, 2, 4]
    assert out[others].isfinite().all() and lse[others].isfinite().all()
    out.sum().backward()
    assert q.grad[3].isnan().all() and q.grad[others].isfinite().all()
    touched = torch.zeros(40, dtype=torch.bool)
    touched[indices[3, 0].long()] = True
    assert kv.grad[touched].isnan().any(-1).all() and kv.grad[~touched].isfinite().all()


def test_poison_in_a_query_reaches_its_head_alone():
    q, kv, indices = problem()
    q[2, 4, 0] = math.nan
    out, lse = check(q, kv, indices)
    assert out[2, 4].isnan().all() and lse[2, 4].isnan()
    out[2, 4], lse[2, 4] = 0.0, 0.0
    assert out.isfinite().all() and lse.isfinite().all()


def test_duplicates_count_once_per_slot():
    q, kv, indices = problem(topk=3)
    indices[:, 0, 1:] = 7
    indices[:, 0, 0] = 3
    out, lse = check(q, kv, indices)
    once, once_lse = check(q, kv, indices[:, :, :2].contiguous())
    assert ((out - once).abs().amax(-1) > 1e-3).any()
    p = torch.exp2(q @ kv[7, 0] * 8**-0.5 / math.log(2.0) - once_lse)
    torch.testing.assert_close(torch.exp2(lse - once_lse), 1 + p)


@pytest.mark.parametrize("sink", [None, [0.0, -math.inf, math.inf, -800.0, 3.0, 80.0]])
def test_empty_rows_are_zeros_without_gradient(sink):
    """Whatever comes back for them: NaN for out, and for lse the -inf of a square's derivative."""
    q, kv, indices = problem(grad=True)
    indices[2] = -1
    inputs = [q, kv] if sink is None else [q, kv, torch.tensor(sink, dtype=torch.float64, requires_grad=True)]
    out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=5, attn_sink=inputs[2] if sink else None)
    assert (out[2] == 0).all() and (lse[2] == -math.inf).all() and lse[[0, 1, 3, 4]].isfinite().all()
    d_out, d_lse = torch.randn_like(out), 2 * lse.detach()
    d_out[2] = math.nan
    mine = torch.autograd.grad((out, lse), inputs, (d_out, d_lse), retain_graph=True)
    d_out[2], d_lse[2] = 0.0, 0.0
    assert (mine[0][2] == 0).all()
    for x, y in zip(mine, torch.autograd.grad((out, lse), inputs, (d_out, d_lse)), strict=True):
        assert x.isfinite().all() and torch.equal(x, y)


def test_an_empty_row_is_zero_beside_a_nan_sink():
    q, kv, indices = problem()
    indices[2] = -1
    out, _ = check(q, kv, indices, attn_sink=torch.full((6,), math.nan, dtype=torch.float64))
    assert (out[2] == 0).all() and out[[0, 1, 3, 4]].isnan().all()


@pytest.mark.parametrize("k_stride", [1, 4])
@pytest.mark.parametrize("q_start", [0, 3, 37, 200])
def test_causal_rule(q_start, k_stride):
    """A change in rows that a query cannot see changes nothing, not even to NaN."""
    q, kv, indices = problem(s_q=9, topk=40)
    out, lse = check(q, kv, indices, q_start=q_start, k_stride=k_stride)
    for s in range(9):
        visible = (q_start + s + 1) // k_stride
        later = kv.clone()
        later[visible:] = math.nan
        row = htree_cuda.sparse_attention(
            q[s : s + 1], later, indices[s : s + 1], d_v=5, q_start=q_start + s, k_stride=k_stride
        )
        torch.testing.assert_close(row[0][0], out[s], rtol=0, atol=1e-14)
        assert (lse[s, 0] == -math.inf) == (visible == 0)


@pytest.mark.parametrize("q_start", ["x", 2.5, True, -5])
def test_q_start_is_checked_for_an_empty_batch_as_well(q_start):
    q, kv, indices = torch.randn(0, 4, 3, 4), torch.randn(0, 7, 1, 4), torch.zeros(0, 4, 1, 5, dtype=torch.int32)
    assert htree_cuda.sparse_attention(q, kv, indices, d_v=2, q_start=3)[0].shape == (0, 4, 3, 2)
    with pytest.raises((TypeError, ValueError), match="sparse_attention: q_start must be"):
        htree_cuda.sparse_attention(q, kv, indices, d_v=2, q_start=q_start)


def test_k_stride_is_ignored_without_q_start():
    q, kv, indices = problem()
    assert torch.equal(check(q, kv, indices, k_stride=4)[0], check(q, kv, indices)[0])


def test_topk_length():
    q, kv, indices = problem(s_q=6)
    length = torch.tensor([0, 1, 5, 12, 13, -4], dtype=torch.int32)
    out, lse = check(q, kv, indices, topk_length=length)
    assert lse.isinf().all(-1).tolist() == [True, False, False, False, False, True]
    assert torch.equal(out[1], kv[indices[1, 0, 0].long(), 0, :5].expand(6, 5))


def test_batches_and_a_start_for_each():
    q, kv, indices = problem(B=3)
    sink = torch.randn(6, dtype=torch.float64)
    out, lse = check(q, kv, indices, q_start=[0, 20, 40], attn_sink=sink)
    for b, start in enumerate([0, 20, 40]):
        row = htree_cuda.sparse_attention(q[b], kv[b], indices[b], d_v=5, q_start=start, attn_sink=sink)
        assert torch.equal(out[b], row[0]) and torch.equal(lse[b], row[1])
    assert torch.equal(check(q, kv, indices, q_start=20, attn_sink=sink)[0][1], out[1])


# -------------------------------------------------------------------------------------------------------------- sinks


def test_sink_scales_out_and_never_enters_lse():
    q, kv, indices = problem()
    out, lse = check(q, kv, indices)
    sink = torch.tensor([-math.inf, 0.0, 3.0, -3.0, 1e4, math.inf], dtype=torch.float64)
    with_sink, lse_with_sink = check(q, kv, indices, attn_sink=sink)
    assert torch.equal(lse, lse_with_sink)
    share = 1 / (1 + torch.exp(sink - lse * math.log(2.0)))
    torch.testing.assert_close(with_sink, out * share[..., None], rtol=0, atol=1e-14)
    assert torch.equal(with_sink[:, 0], out[:, 0]) and (with_sink[:, 4:] == 0).all()
    assert torch.equal(check(q, kv, indices, attn_sink=sink, lse_base=math.e)[0], with_sink)


def test_gradients_at_extreme_sinks():
    q, kv, indices = problem(grad=True)
    sink = torch.tensor([-math.inf, 0.0, 1e4, -1e4, -800.0, math.inf], dtype=torch.float64, requires_grad=True)
    inputs, d_out, d_lse = (q, kv, sink), torch.randn(5, 6, 5).double(), torch.randn(5, 6).double()
    mine = gradients(htree_cuda.sparse_attention, inputs, d_out, d_lse, indices, d_v=5)
    exact = gradients(definition.sparse_attention, inputs, d_out, d_lse, indices, d_v=5)
    for x, y in zip(mine, exact, strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    assert (mine[2] == 0).tolist() == [True, False, True, True, True, True]


def test_a_nan_sink_reaches_its_head_alone():
    q, kv, indices = problem()
    sink = torch.zeros(6, dtype=torch.float64)
    sink[3] = math.nan
    out, lse = check(q, kv, indices, attn_sink=sink)
    assert out[:, 3].isnan().all() and out[:, [0, 1, 2, 4, 5]].isfinite().all() and lse.isfinite().all()


# ---------------------------------------------------------------------------------------------------- sizes and dtypes


@pytest.mark.parametrize(
    ("s_q", "topk", "s_kv", "B"), [(0, 4, 9, None), (3, 0, 9, None), (3, 4, 0, None), (3, 4, 9, 0)]
)
def test_empty_sizes(s_q, topk, s_kv, B):
    batch = () if B is None else (B,)
    q, kv = torch.randn(*batch, s_q, 7, 8, requires_grad=True), torch.randn(*batch, s_kv, 1, 8, requires_grad=True)
    indices = torch.zeros(*batch, s_q, 1, topk, dtype=torch.int32)
    sink = torch.zeros(7, requires_grad=True)
    out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=6, attn_sink=sink)
    assert out.shape == (*batch, s_q, 7, 6) and lse.shape == (*batch, s_q, 7) and lse.dtype == torch.float32
    assert (out == 0).all() and (lse == -math.inf).all()
    (out.sum() + lse.sum()).backward()
    assert all((x.grad == 0).all() and x.grad.shape == x.shape for x in (q, kv, sink))
    shapes = [x.shape for x in definition.sparse_attention(q, kv, indices, d_v=6)]
    assert shapes == [out.shape, lse.shape]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precisions_are_float32_inside(dtype):
    q, kv, indices = problem(h_q=65, d_qk=64, s_kv=80, topk=40, dtype=dtype, grad=True)
    sink = torch.randn(65, requires_grad=True)
    out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=48, attn_sink=sink)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact, exact_lse = definition.sparse_attention(q, kv, indices, d_v=48, attn_sink=sink)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=4e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=eps, atol=4e-6)
    d_out, d_lse = torch.randn(out.shape).to(dtype), torch.randn(lse.shape)
    mine = torch.autograd.grad((out, lse), (q, kv, sink), (d_out, d_lse), retain_graph=True)
    exact_grad = torch.autograd.grad((exact, exact_lse), (q, kv, sink), (d_out.double(), d_lse.double()))
    for x, y, input in zip(mine, exact_grad, (q, kv, sink), strict=True):
        assert x.dtype == input.dtype
        # delta = <dout, out> takes the rounded out: an error of the dtype's size relative to the largest.
        assert float((x.double() - y).abs().max()) <= 2 * eps * float(y.abs().max()) + 1e-5


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_scores_of_any_size(size):
    q, kv, indices = problem(s_kv=60, topk=30, d_qk=16)
    check(q * size, kv, indices)
    out, lse = htree_cuda.sparse_attention((q * size).float(), kv.float(), indices, d_v=5)
    exact, exact_lse = definition.sparse_attention((q * size).float(), kv.float(), indices, d_v=5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    assert (out - exact).abs().max() < 1e-6 * max(1.0, size)


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_gradients_of_large_scores(size):
    """An lse of 1e6 in float32 is rounded to a sixteenth, which the weights of the backward do not see."""
    torch.manual_seed(0)
    q, kv, indices = problem(s_kv=60, topk=30, d_qk=16)
    inputs = [x.detach().requires_grad_() for x in ((q * size).float(), kv.float())]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    d_out, d_lse = torch.randn(5, 6, 5), torch.randn(5, 6)
    found = gradients(htree_cuda.sparse_attention, inputs, d_out, d_lse, indices, d_v=5)
    wanted = gradients(definition.sparse_attention, exact, d_out.double(), d_lse.double(), indices, d_v=5)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).abs().max() <= 1e-5 * y.abs().max()


def test_views_and_chunks(monkeypatch):
    q, kv, indices = problem(s_q=11, B=2)
    expected = check(q, kv, indices, q_start=[10, 30])
    wide = torch.randn(2, 11, 12, 16, dtype=torch.float64)
    view = wide[:, :, ::2, 4:12]
    view.copy_(q)
    lists = indices.repeat(1, 1, 1, 2)[..., :12]
    monkeypatch.setattr(chunks, "CHUNK_BYTES_CPU", 1)  # a chunk for each query
    results = htree_cuda.sparse_attention(view.requires_grad_(), kv.requires_grad_(), lists, d_v=5, q_start=[10, 30])
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)
    one_each = torch.autograd.grad(results[0].square().sum(), (view, kv))
    monkeypatch.undo()
    out = htree_cuda.sparse_attention(view, kv, indices, d_v=5, q_start=[10, 30])[0]
    for x, y in zip(one_each, torch.autograd.grad(out.square().sum(), (view, kv)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_memory_is_bounded(monkeypatch):
    """The gathered keys of all queries would be 4 MiB; a chunk may hold 1 MiB in all its temporaries."""
    largest = 0
    original = torch_lists._Lists._gather

    def spy(self, k, index):
        nonlocal largest
        largest = max(largest, index.numel() * self.d_qk * 8)
        return original(self, k, index)

    monkeypatch.setattr(torch_lists._Lists, "_gather", spy)
    monkeypatch.setattr(chunks, "CHUNK_BYTES_CPU", 1 << 20)
    q, kv, indices = problem(s_q=128, h_q=2, s_kv=200, topk=64, d_qk=64, grad=True)
    htree_cuda.sparse_attention(q, kv, indices, d_v=32)[0].sum().backward()
    assert 0 < largest <= 1 << 19


# ------------------------------------------------------------------------------------------ op, autograd, compile


@pytest.mark.parametrize("B", [None, 2])
@pytest.mark.parametrize("with_options", [False, True])
def test_opcheck(B, with_options):
    q, kv, indices = problem(B=B, grad=True, hostile=True)
    length = torch.full(indices.shape[:-2], 7, dtype=torch.int32) if with_options else None
    sink = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_options else None
    numbers = {**NUMBERS, "q_start": [33] * (B or 1) if with_options else None, "k_stride": 2}
    torch.library.opcheck(OP, (q, kv, indices, length, sink), numbers)
    out, lse = (x.detach() for x in OP(q, kv, indices, length, sink, **numbers))
    inputs = [x if x is None else x.detach() for x in (q, kv, indices, length, sink)]
    args = (torch.randn_like(out), torch.randn_like(lse), *inputs, out, lse)
    torch.library.opcheck(torch.ops.htree_cuda.sparse_attention_backward, args, numbers)


def test_compile_fullgraph_with_dynamic_sizes():
    def call(q, kv, indices, sink):
        out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=5, attn_sink=sink, q_start=20)
        return out.square().sum() + lse.sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for s_q, s_kv, topk in ((5, 40, 12), (7, 33, 9), (12, 70, 31)):
        q, kv, indices = problem(s_q=s_q, s_kv=s_kv, topk=topk, grad=True)
        sink = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        indices[..., 0] = 0
        grads = [torch.autograd.grad(f(q, kv, indices, sink), (q, kv, sink)) for f in (counted, call)]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y)
    assert counter.frame_count <= 2, "one graph for all sizes"


def test_gradient_through_lse_only_and_out_only():
    q, kv, indices = problem(grad=True)
    out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=5)
    dq, dkv = torch.autograd.grad(lse.sum(), (q, kv), retain_graph=True)
    assert dq.abs().sum() > 0 and dkv.abs().sum() > 0
    assert torch.autograd.grad(out.sum(), kv)[0].abs().sum() > 0


def test_gradient_to_the_sink_alone():
    q, kv, indices = problem()
    sink = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=5, attn_sink=sink)
    (dsink,) = torch.autograd.grad(out.sum() + lse.sum(), sink)
    share = 1 / (1 + torch.exp(lse.detach() * math.log(2.0)))
    torch.testing.assert_close(dsink, -(share * out.detach().sum(-1)).sum(0))


def test_double_backward_raises():
    q, kv, indices = problem(grad=True)
    (dq,) = torch.autograd.grad(htree_cuda.sparse_attention(q, kv, indices, d_v=5)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_attention: second derivatives"):
        dq.sum().backward()


def test_autocast():
    q, kv, indices = problem(dtype=torch.float32, grad=True)
    sink = torch.zeros(6)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=5, attn_sink=sink)
        out.float().sum().backward()
        op = OP(q.detach(), kv.detach(), indices, None, sink, **NUMBERS)
    assert (out.dtype, lse.dtype, q.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    expected = htree_cuda.sparse_attention(
        q.detach().bfloat16(), kv.detach().bfloat16(), indices, d_v=5, attn_sink=sink
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(op[0], OP(q.detach(), kv.detach(), indices, None, sink, **NUMBERS)[0])


def test_meta_tensors_and_the_same_call_twice():
    q, kv, indices = problem()
    out, lse = htree_cuda.sparse_attention(*(x.to("meta") for x in (q, kv, indices)), d_v=5)
    assert (out.shape, lse.shape, out.device.type) == ((5, 6, 5), (5, 6), "meta")
    first, again = (htree_cuda.sparse_attention(q, kv, indices, d_v=5) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again))
    assert not {x.untyped_storage().data_ptr() for x in first} & {x.untyped_storage().data_ptr() for x in (q, kv)}


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        (r"sparse_attention: indices must be int32, got torch.int64", ValueError,
         {"indices": torch.zeros(5, 1, 12).long()}),
        (r"q must have the dimensions \[s_q, h_q, d_qk\] or \[B, s_q, h_q, d_qk\], got shape \(5, 8\)", ValueError,
         {"q": torch.zeros(5, 8)}),
        (r"kv must have 3 dimensions \[s_kv, h_kv, d_qk\], got shape \(1, 40, 1, 8\)", ValueError,
         {"kv": torch.zeros(1, 40, 1, 8)}),
        (r"indices must have 3 dimensions", ValueError, {"indices": torch.zeros(5, 12).int()}),
        (r"kv must have the dtype of q \(torch.float32\), got torch.float16", ValueError,
         {"kv": torch.zeros(40, 1, 8).half()}),
        (r"q must be float16, bfloat16, float32 or float64, got torch.int32", ValueError,
         {"q": torch.zeros(5, 6, 8).int()}),
        (r"kv must have one KV head \(dimension -2 must be 1: multi-query attention\), got 2", ValueError,
         {"kv": torch.zeros(40, 2, 8)}),
        (r"indices must have one KV head", ValueError, {"indices": torch.zeros(5, 2, 9).int()}),
        (r"d_qk of kv must equal d_qk of q \(8\), got 4", ValueError, {"kv": torch.zeros(40, 1, 4)}),
        (r"s_q of indices must equal s_q of q \(5\), got 4", ValueError, {"indices": torch.zeros(4, 1, 9).int()}),
        (r"h_q must be at least 1, got 0", ValueError, {"q": torch.zeros(5, 0, 8)}),
        (r"d_qk must be at least 1, got 0", ValueError, {"q": torch.zeros(5, 6, 0), "kv": torch.zeros(40, 1, 0)}),
        (r"d_v must lie in 1 .. d_qk \(8\), got 0", ValueError, {"d_v": 0}),
        (r"d_v must lie in 1 .. d_qk \(8\), got 512", ValueError, {"d_v": 512}),
        (r"d_v must be an int, got 4.0", TypeError, {"d_v": 4.0}),
        (r"topk_length must be int32, got torch.int64", ValueError, {"topk_length": torch.zeros(5).long()}),
        (r"topk_length must have 1 dimensions \[s_q\]", ValueError, {"topk_length": torch.zeros(5, 1).int()}),
        (r"s_q of topk_length must equal s_q of q \(5\), got 4", ValueError, {"topk_length": torch.zeros(4).int()}),
        (r"topk_length must be a torch.Tensor, got int", TypeError, {"topk_length": 3}),
        (r"attn_sink must be a torch.Tensor, got float", TypeError, {"attn_sink": 0.5}),
        (r"attn_sink must have 1 dimensions \[h_q\], got shape \(5, 6\)", ValueError,
         {"attn_sink": torch.zeros(5, 6)}),
        (r"attn_sink must be float32 where q is torch.float32, got torch.bfloat16", ValueError,
         {"attn_sink": torch.zeros(6).bfloat16()}),
        (r"h_q of attn_sink must equal h_q of q \(6\), got 7", ValueError, {"attn_sink": torch.zeros(7)}),
        (r"attn_sink must be on the device of q.* \(cpu\), got meta", ValueError,
         {"attn_sink": torch.zeros(6, device="meta")}),
        (r"attn_sink must be a dense \(strided\) tensor", ValueError, {"attn_sink": torch.zeros(6).to_sparse()}),
        (r"kv must be on the device of q and indices \(cpu\), got meta", ValueError,
         {"kv": torch.zeros(40, 1, 8, device="meta")}),
        (r"indices must be on the device of q and kv \(cpu\), got meta", ValueError,
         {"indices": torch.zeros(5, 1, 9, device="meta").int()}),
        (r"kv must be a dense \(strided\) tensor", ValueError, {"kv": torch.zeros(40, 1, 8).to_sparse()}),
        (r"k_stride must be at least 1, got 0", ValueError, {"k_stride": 0}),
        (r"k_stride must be an int, got True", TypeError, {"k_stride": True}),
        (r"q_start must lie in 0 .. .*, got -1", ValueError, {"q_start": -1}),
        (r"q_start must be one int, got 2 of them", ValueError, {"q_start": [1, 2]}),
        (r"q_start must be an int, got 0.5", TypeError, {"q_start": 0.5}),
        (r"sm_scale must be finite, got nan", ValueError, {"sm_scale": math.nan}),
        (r"sm_scale must be a number or None, got '1'", TypeError, {"sm_scale": "1"}),
        (r"lse_base must be 2 or math.e, got 10", ValueError, {"lse_base": 10}),
        (r"lse_base must be a number, got None", TypeError, {"lse_base": None}),
        (r"return_lse must be a bool, got 1", TypeError, {"return_lse": 1}),
        (r"backend must be one of 'auto', 'torch', got 'cuda'", ValueError, {"backend": "cuda"}),
        (r"sparse_attention: kv must be a torch.Tensor, got None", TypeError, {"kv": None}),
    ],
)  # fmt: skip
def test_errors(match, error, change):
    q, kv, indices = problem(dtype=torch.float32)
    with pytest.raises(error, match=match):
        htree_cuda.sparse_attention(**{"q": q, "kv": kv, "indices": indices, "d_v": 5, **change})


def test_batch_errors():
    q, kv, indices = problem(B=2)
    with pytest.raises(ValueError, match=r"dimension 0 of kv must equal B of q \(2\), got 1"):
        htree_cuda.sparse_attention(q, kv[:1], indices, d_v=5)
    with pytest.raises(ValueError, match=r"dimension 0 of indices must equal B of q \(2\), got 1"):
        htree_cuda.sparse_attention(q, kv, indices[:1], d_v=5)
    with pytest.raises(ValueError, match=r"list of B \(2\) ints, got 3 of them"):
        htree_cuda.sparse_attention(q, kv, indices, d_v=5, q_start=[1, 2, 3])


def test_backward_op_checks_what_it_is_given():
    q, kv, indices = problem()
    out, lse = OP(q, kv, indices, None, None, **NUMBERS)
    good = {"dout": out, "dlse": lse, "out": out, "lse": lse}
    for name, bad, match in (
        ("dout", out[:3], r"sparse_attention_backward: dout must have the shape \(5, 6, 5\), got \(3, 6, 5\)"),
        ("dlse", lse.float(), r"sparse_attention_backward: dlse must be torch.float64, got torch.float32"),
        ("lse", lse[:, :2], r"sparse_attention_backward: lse must have the shape \(5, 6\)"),
        ("out", out.to("meta"), r"sparse_attention_backward: out must be on the device of q \(cpu\), got meta"),
    ):
        x = {**good, name: bad}
        with pytest.raises(ValueError, match=match):
            torch.ops.htree_cuda.sparse_attention_backward(
                x["dout"], x["dlse"], q, kv, indices, None, None, x["out"], x["lse"], **NUMBERS
            )
    for device in ("cpu", "meta"):  # the real and the fake implementation
        args = [x.to(device) for x in (out, lse, q, kv, indices.long(), out, lse)]
        with pytest.raises(ValueError, match=r"sparse_attention_backward: indices must be int32, got torch.int64"):
            torch.ops.htree_cuda.sparse_attention_backward(*args[:5], None, None, *args[5:], **NUMBERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16, q is torch.float32"),
        ({"d_qk": 192, "d_v": 128}, "d_qk to be one of 576, 512, got 192"),
        ({"d_v": 256}, "d_v to be 512, got 256"),
        ({"shift": 1}, "q to begin at a multiple of 16 bytes"),
        ({"gap": 4}, "strides of kv to be multiples of 16 bytes"),
        ({"expand": True}, "heads of q apart"),
    ],
)
def test_what_the_kernel_does_not_take_names_the_way_out(monkeypatch, change, message):
    """The whole call, where `_use_torch` says that the kernels are to run: an error before any launch."""
    from htree_cuda import ops

    monkeypatch.setattr(ops, "_use_torch", lambda op, x, backend: backend == "torch")
    d, dtype = change.get("d_qk", 576), change.get("dtype", torch.bfloat16)
    shift, gap = change.get("shift", 0), change.get("gap", 0)
    q = torch.zeros(4 * d * 2 + shift, dtype=dtype)[shift:].view(2, 4, d)
    if change.get("expand"):
        q = q[:, :1].expand(-1, 4, -1)
    kv = torch.zeros(9, 1, d + gap, dtype=dtype)[..., :d]
    indices = torch.zeros(2, 1, 3, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=rf'sparse_attention: .*{message}.*backend="torch"'):
        htree_cuda.sparse_attention(q, kv, indices, d_v=change.get("d_v", 512))


def test_transforms_are_refused():
    q, kv, indices = problem()
    with pytest.raises(RuntimeError, match=r"sparse_attention: q is inside a torch.func transform"):
        torch.func.vmap(lambda x: htree_cuda.sparse_attention(x, kv, indices, d_v=5))(q[None])
