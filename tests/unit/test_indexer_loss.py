"""normalize_attn_dist and indexer_loss: against the definition, by gradcheck, over processes, with hostile inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import htree_cuda
from htree_cuda import definition


def problem(s_q=5, topk=9, s_kv=20, B=None, groups=2, dtype=torch.float64, hostile=True):
    """logits, attn_dist [G, s_q, topk] and indices, a third of them invalid where hostile."""
    batch = () if B is None else (B,)
    logits = torch.randn(*batch, s_q, topk, dtype=torch.float64).to(dtype).requires_grad_()
    dist = torch.rand(*batch, groups, s_q, topk, dtype=torch.float64)
    low, high = (-3, s_kv + 4) if hostile else (0, max(s_kv, 1))
    indices = torch.randint(low, high, (*batch, s_q, 1, topk), dtype=torch.int32)
    return logits, dist if dtype == torch.float64 else dist.float(), indices


# --------------------------------------------------------------------------------------------- normalize_attn_dist


@pytest.mark.parametrize("B", [None, 3])
def test_normalised_over_all_heads(B):
    q_shape, k_shape = (5, 130, 8), (20, 1, 8)
    batch = () if B is None else (B,)
    q, k = torch.randn(*batch, *q_shape).double(), torch.randn(*batch, *k_shape).double()
    indices = torch.randint(-3, 23, (*batch, 5, 1, 12), dtype=torch.int32)
    lse = htree_cuda.sparse_attention(q, k, indices, d_v=4)[1]
    dist = htree_cuda.attn_dist(q, k, indices, lse)
    target = htree_cuda.normalize_attn_dist(dist)
    assert target.shape == (*batch, 5, 12) and target.dtype == torch.float64 and not target.requires_grad
    torch.testing.assert_close(target, dist.sum(-3) / 130, rtol=1e-12, atol=0)
    torch.testing.assert_close(target.sum(-1), torch.ones(*batch, 5).double(), rtol=1e-12, atol=0)


def test_zero_rows_stay_zero_and_nan_stays_nan():
    dist = torch.rand(2, 4, 6)
    dist[:, 1] = 0.0
    dist[0, 2, 3] = math.nan
    dist[1, 3, 3] = math.inf
    target = htree_cuda.normalize_attn_dist(dist)
    assert (target[1] == 0).all() and target[2].isnan().all()
    assert target[3].isnan().all()
    torch.testing.assert_close(target[0], dist[:, 0].sum(0) / dist[:, 0].sum())


def test_sums_beyond_the_range_of_float32():
    large = torch.tensor([[[3e38, 3e38, 0.0, 1e38]]])
    target = htree_cuda.normalize_attn_dist(large)
    torch.testing.assert_close(target[0], torch.tensor([3.0, 3.0, 0.0, 1.0]) / 7)
    logits, indices = torch.randn(1, 4), torch.arange(4, dtype=torch.int32).view(1, 1, 4)
    found, expected = (htree_cuda.indexer_loss(logits, x, indices, s_kv=4) for x in (large, large / 1e38))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("other", [(), (0.0,)])
def test_a_target_where_no_logit_is_finite_costs_infinity(other):
    logits = torch.tensor([[-math.inf] * 2 + list(other)], requires_grad=True)
    n = logits.shape[1]
    indices = torch.arange(n, dtype=torch.int32).view(1, 1, n)
    loss = htree_cuda.indexer_loss(logits, torch.eye(1, n), indices, s_kv=n)
    assert loss == math.inf
    loss.backward()
    assert logits.grad.isfinite().all() and logits.grad.any() == bool(other), (
        "no gradient where nothing has a probability"
    )


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 2, 3, 4)])
def test_normalise_empty_sizes(shape):
    target = htree_cuda.normalize_attn_dist(torch.zeros(shape))
    assert target.shape == (*shape[:-3], *shape[-2:]) and (target == 0).all()


def test_normalise_leaves_its_input_alone():
    dist = torch.rand(1, 3, 4)
    before = dist.clone()
    target = htree_cuda.normalize_attn_dist(dist)
    target.zero_()
    assert torch.equal(dist, before)


def _rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    try:
        dist = torch.load(f"{path}/dist.pt")
        group = torch.distributed.group.WORLD
        target = htree_cuda.normalize_attn_dist(dist[rank : rank + 1], group=group)
        alone = htree_cuda.normalize_attn_dist(dist[rank : rank + 1])
        # A group that this rank is not in would be skipped in silence by torch.distributed.
        other = torch.distributed.new_group([1 - rank])
        try:
            htree_cuda.normalize_attn_dist(dist, group=other)
            refused = ""
        except TypeError as error:
            refused = str(error)
        torch.save((target, alone, refused), f"{path}/rank{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_tensor_parallel_ranks_add_their_heads(tmp_path):
    """Two processes, 64 heads each: both get what one process gets from 128 heads."""
    dist = torch.rand(2, 7, 11)
    dist[:, 3] = 0.0
    torch.save(dist, tmp_path / "dist.pt")
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    expected = htree_cuda.normalize_attn_dist(dist)
    for rank in range(2):
        target, alone, refused = torch.load(tmp_path / f"rank{rank}.pt")
        assert torch.equal(target, expected)
        assert torch.equal(alone, htree_cuda.normalize_attn_dist(dist[rank : rank + 1]))
        assert not torch.equal(alone, expected)
        assert "group must be a torch.distributed.ProcessGroup that this rank is in" in refused


# ----------------------------------------------------------------------------------------------------------- definition


def reduced(losses, counts, reduction):
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum().clamp(min=1)}[reduction]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    B=st.one_of(st.none(), st.integers(1, 2)), s_q=st.integers(1, 5), topk=st.integers(1, 20), s_kv=st.integers(0, 30),
    start=st.one_of(st.none(), st.integers(0, 40)), k_stride=st.sampled_from([1, 2, 4]), lengths=st.booleans(),
    groups=st.integers(1, 2), zeros=st.booleans(), reduction=st.sampled_from(["mean", "sum", "none"]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_loss_and_gradient_equal_the_definition(
    B, s_q, topk, s_kv, start, k_stride, lengths, groups, zeros, reduction, seed
):
    torch.manual_seed(seed)
    logits, dist, indices = problem(s_q, topk, s_kv, B, groups)
    if zeros:
        dist = dist * (dist > 0.5)
    length = None
    if lengths:
        length = torch.randint(-1, topk + 2, (*(() if B is None else (B,)), s_q), dtype=torch.int32)
    rule = {"s_kv": s_kv, "q_start": start, "k_stride": k_stride, "topk_length": length}
    loss = htree_cuda.indexer_loss(logits, dist, indices, reduction=reduction, **rule)
    losses, counts = definition.indexer_loss(logits, dist.sum(-3), indices, **rule)
    expected = reduced(losses, counts, reduction)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    normalised = htree_cuda.normalize_attn_dist(dist)
    again = htree_cuda.indexer_loss(logits, normalised, indices, reduction=reduction, **rule)
    torch.testing.assert_close(loss, again, rtol=0, atol=1e-12)
    upstream = torch.randn_like(loss)
    (mine,) = torch.autograd.grad(loss, logits, upstream)
    if not expected.requires_grad:
        assert (mine == 0).all()
        return
    (exact,) = torch.autograd.grad(expected, logits, upstream)
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-10)


def test_gradcheck():
    logits, dist, indices = problem()
    indices[2] = -1
    dist[:, 3] = 0.0
    for reduction in ("mean", "sum", "none"):

        def call(x, reduction=reduction):
            return htree_cuda.indexer_loss(x, dist, indices, s_kv=20, reduction=reduction)

        assert torch.autograd.gradcheck(call, (logits,))
        assert torch.autograd.gradgradcheck(call, (logits,))


def test_it_is_the_kl_divergence_of_torch():
    logits, dist, indices = problem(hostile=False)
    target = htree_cuda.normalize_attn_dist(dist)
    log_p = logits.log_softmax(-1)
    per_row = torch.nn.functional.kl_div(log_p, target, reduction="none").sum(-1)
    for reduction, expected in (("none", per_row), ("sum", per_row.sum()), ("mean", per_row.mean())):
        loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20, reduction=reduction)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(per_row.sum(), logits)
    torch.testing.assert_close(gradient, logits.softmax(-1) - target, rtol=0, atol=1e-12)


def test_it_is_zero_at_the_target_and_positive_elsewhere():
    _, dist, indices = problem()
    target = htree_cuda.normalize_attn_dist(dist)
    perfect = (target.log() + 3.0).requires_grad_()  # any constant per row
    loss = htree_cuda.indexer_loss(perfect, dist, indices, s_kv=20, reduction="none")
    torch.testing.assert_close(loss, torch.zeros(5).double(), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), perfect)
    torch.testing.assert_close(gradient, torch.zeros(5, 9).double(), rtol=0, atol=1e-12)
    assert (htree_cuda.indexer_loss(torch.randn(5, 9), dist, indices, s_kv=20, reduction="none") > 1e-3).all()


# --------------------------------------------------------------------------------------------- what may not matter


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("topk_length", [None, torch.tensor([3, 0, 9, 4, 1], dtype=torch.int32)])
def test_invalid_slots_never_matter(poison, topk_length):
    logits, dist, indices = problem()
    indices[4] = -1
    rule = {"s_kv": 20, "q_start": 9, "topk_length": topk_length, "reduction": "none"}
    clean = htree_cuda.indexer_loss(logits, dist, indices, **rule)
    invalid = (indices < 0) | (indices >= 20) | (indices > (9 + torch.arange(5))[:, None, None])
    invalid = invalid[:, 0]
    if topk_length is not None:
        invalid |= torch.arange(9) >= topk_length[:, None]
    assert invalid.any(1).all() and invalid.all(1).any() and not invalid.all()
    dirty = logits.detach().masked_fill(invalid, poison).requires_grad_()
    dirty_dist = dist.masked_fill(invalid, poison)
    loss = htree_cuda.indexer_loss(dirty, dirty_dist, indices, **rule)
    assert torch.equal(loss, clean) and loss.isfinite().all() and (loss[invalid.all(1)] == 0).all()
    (gradient,) = torch.autograd.grad(clean.sum(), logits)
    (same,) = torch.autograd.grad(loss.sum(), dirty)
    assert torch.equal(gradient, same) and (same[invalid] == 0).all() and (same[~invalid] != 0).any()


def test_zero_targets_count_in_the_mean_and_empty_rows_do_not():
    logits, dist, indices = problem(hostile=False)
    indices[2] = -1
    dist[:, 3] = 0.0
    losses = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20, reduction="none")
    assert (losses[[2, 3]] == 0).all() and (losses[[0, 1, 4]] > 0).all()
    loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20)
    torch.testing.assert_close(loss, losses.sum() / 4, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[[2, 3]] == 0).all() and (gradient[[0, 1, 4]] != 0).all()


def test_no_step_of_the_backward_makes_a_nan():
    """A query without a valid slot has no softmax; anomaly detection stops at a NaN that a later step would hide."""
    logits, dist, indices = problem()
    indices[2] = -1
    dist[:, 3] = 0.0
    with torch.autograd.set_detect_anomaly(True):
        htree_cuda.indexer_loss(logits, dist, indices, s_kv=20).backward()
    assert logits.grad.isfinite().all()


def test_no_valid_slot_at_all_is_zero():
    logits, dist, indices = problem()
    for reduction in ("mean", "sum"):
        loss = htree_cuda.indexer_loss(logits, dist, torch.full_like(indices, -1), s_kv=20, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss == 0 and (gradient == 0).all()


def test_nan_in_a_valid_slot_reaches_its_query_alone():
    logits, dist, indices = problem(hostile=False)
    for poison_logits in (True, False):
        x, t = logits.detach().clone(), dist.clone()
        (x if poison_logits else t[0])[3, 4] = math.nan
        x.requires_grad_()
        loss = htree_cuda.indexer_loss(x, t, indices, s_kv=20, reduction="none")
        assert loss[3].isnan() and loss[[0, 1, 2, 4]].isfinite().all()
        (gradient,) = torch.autograd.grad(loss[[0, 1, 2, 4]].sum(), x)
        assert gradient[[0, 1, 2, 4]].isfinite().all()


def test_minus_infinity_in_a_valid_slot():
    """Impossible for the indexer: no loss where the target is 0 too, else an infinite one with a gradient."""
    logits, dist, indices = problem(hostile=False)
    x = logits.detach().clone()
    x[1, 2] = x[3, 4] = -math.inf
    dist[:, 1, 2] = 0.0
    x.requires_grad_()
    loss = htree_cuda.indexer_loss(x, dist, indices, s_kv=20, reduction="none")
    assert loss.isinf().tolist() == [False, False, False, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert gradient.isfinite().all() and gradient[1, 2] == 0 and gradient[3, 4] < 0


def test_only_proportions_of_the_target_count_and_it_gets_no_gradient():
    logits, dist, indices = problem()
    scaled = (dist * 2.0 ** torch.randint(-40, 40, (1, 5, 1))).requires_grad_()
    loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20, reduction="none")
    same = htree_cuda.indexer_loss(logits, scaled, indices, s_kv=20, reduction="none")
    assert torch.equal(loss, same)
    same.sum().backward()
    assert scaled.grad is None


@pytest.mark.parametrize("scale", [1e-300, 1e-44, 1e50, 1e300])
def test_the_scale_of_a_float64_target_is_no_matter_of_the_logits_range(scale):
    logits, dist, indices = problem(dtype=torch.float32)
    loss = htree_cuda.indexer_loss(logits, dist.double(), indices, s_kv=20, reduction="none")
    same = htree_cuda.indexer_loss(logits, dist.double() * scale, indices, s_kv=20, reduction="none")
    torch.testing.assert_close(same, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precisions_are_float32_inside(dtype):
    logits, dist, indices = problem(dtype=dtype)
    loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20)
    assert loss.dtype == torch.float32 and dist.dtype == torch.float32
    losses, counts = definition.indexer_loss(logits, dist.sum(0), indices, s_kv=20)
    torch.testing.assert_close(loss.double(), reduced(losses, counts, "mean"), rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("s_q", "topk", "s_kv", "B"), [(0, 4, 9, None), (3, 0, 9, None), (3, 4, 0, None), (3, 4, 9, 0)]
)
def test_empty_sizes(s_q, topk, s_kv, B):
    logits, dist, indices = problem(s_q, topk, s_kv, B)
    for reduction in ("mean", "sum", "none"):
        loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=s_kv, q_start=3, reduction=reduction)
        assert loss.shape == (logits.shape[:-1] if reduction == "none" else ()) and (loss == 0).all()
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert (gradient == 0).all() and gradient.shape == logits.shape
    losses, counts = definition.indexer_loss(logits, dist.sum(-3), indices, s_kv=s_kv, q_start=3)
    assert losses.shape == logits.shape[:-1] and not counts.any()


def test_batches_and_a_start_for_each():
    logits, dist, indices = problem(B=3)
    losses = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20, q_start=[0, 5, 30], k_stride=2, reduction="none")
    for b, start in enumerate([0, 5, 30]):
        row = htree_cuda.indexer_loss(
            logits[b], dist[b], indices[b], s_kv=20, q_start=start, k_stride=2, reduction="none"
        )
        assert torch.equal(losses[b], row)


def test_the_whole_step():
    """Sparse forward, attn_dist, loss: an indexer of free logits finds the distribution by gradient descent."""
    q, kv = torch.randn(6, 70, 16).double(), torch.randn(40, 1, 16).double()
    indices = torch.randint(-3, 43, (6, 1, 12), dtype=torch.int32)
    logits = torch.zeros(6, 12, dtype=torch.float64, requires_grad=True)
    rule = {"q_start": 30, "topk_length": torch.tensor([12, 5, 0, 12, 9, 12], dtype=torch.int32)}
    _, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=8, **rule)
    dist = htree_cuda.attn_dist(q, kv, indices, lse, **rule)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    first = None
    for _ in range(300):
        loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=40, **rule)
        first = float(loss.detach()) if first is None else first
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert first > 1e-2 and float(loss.detach()) < 1e-6


# ------------------------------------------------------------------------------------------------------------- compile


def test_compile_fullgraph_with_dynamic_sizes():
    def call(logits, dist, indices, length):
        target = htree_cuda.normalize_attn_dist(dist)
        return htree_cuda.indexer_loss(logits, target, indices, s_kv=20, q_start=4, k_stride=2, topk_length=length)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for s_q, topk in ((5, 9), (7, 12), (11, 30)):
        logits, dist, indices = problem(s_q, topk)
        length = torch.randint(0, topk, (s_q,), dtype=torch.int32)
        results = [f(logits, dist, indices, length) for f in (counted, call)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in results))
    assert counter.frame_count <= 2, "one graph for all sizes"
    logits, dist, indices = problem(dtype=torch.float32)
    length = torch.full((5,), 7, dtype=torch.int32)
    compiled = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(logits, dist, indices, length), call(logits, dist, indices, length))


def test_fake_tensors_meet_the_same_rules():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits, dist = torch.empty(2, 5, 9, dtype=torch.bfloat16), torch.empty(2, 3, 5, 9)
        indices = torch.empty(2, 5, 1, 9, dtype=torch.int32)
        loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=20, reduction="none")
        assert (loss.shape, loss.dtype) == ((2, 5), torch.float32)
        assert htree_cuda.normalize_attn_dist(dist).shape == (2, 5, 9)
        with pytest.raises(ValueError, match="topk of indices must equal topk of logits"):
            htree_cuda.indexer_loss(logits, dist, indices[..., :3], s_kv=20)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        (r"indexer_loss: logits must be a torch.Tensor, got list", TypeError, {"logits": [1.0]}),
        (r"logits must have the dimensions \[s_q, topk\] or \[B, s_q, topk\], got shape \(5,\)", ValueError,
         {"logits": torch.zeros(5)}),
        (r"logits must be float16, bfloat16, float32 or float64, got torch.int32", ValueError,
         {"logits": torch.zeros(5, 9).int()}),
        (r"logits must be a dense \(strided\) tensor", ValueError, {"logits": torch.zeros(5, 9).to_sparse()}),
        (r"attn_dist must be float32 or float64, got torch.bfloat16", ValueError,
         {"attn_dist": torch.zeros(5, 9).bfloat16()}),
        (r"attn_dist must have the shape \(5, 9\) of logits, or \(G, 5, 9\), got \(5, 8\)", ValueError,
         {"attn_dist": torch.zeros(5, 8)}),
        (r"attn_dist must have the shape \(5, 9\) of logits, or \(G, 5, 9\), got \(2, 5, 8\)", ValueError,
         {"attn_dist": torch.zeros(2, 5, 8)}),
        (r"attn_dist must have the shape .*, got \(2, 2, 5, 9\)", ValueError, {"attn_dist": torch.zeros(2, 2, 5, 9)}),
        (r"attn_dist must have the shape .*, got \(9,\)", ValueError, {"attn_dist": torch.zeros(9)}),
        (r"attn_dist must be on the device of logits and indices \(cpu\), got meta", ValueError,
         {"attn_dist": torch.zeros(5, 9, device="meta")}),
        (r"indices must have 3 dimensions \[s_q, h_kv, topk\], got shape \(5, 9\)", ValueError,
         {"indices": torch.zeros(5, 9).int()}),
        (r"indices must be int32, got torch.int64", ValueError, {"indices": torch.zeros(5, 1, 9).long()}),
        (r"indices must have one KV head", ValueError, {"indices": torch.zeros(5, 2, 9).int()}),
        (r"s_q of indices must equal s_q of logits \(5\), got 4", ValueError, {"indices": torch.zeros(4, 1, 9).int()}),
        (r"topk of indices must equal topk of logits \(9\), got 8", ValueError,
         {"indices": torch.zeros(5, 1, 8).int()}),
        (r"indices must be on the device of logits and attn_dist \(cpu\), got meta", ValueError,
         {"indices": torch.zeros(5, 1, 9, device="meta").int()}),
        (r"topk_length must be int32", ValueError, {"topk_length": torch.zeros(5)}),
        (r"topk_length must be a torch.Tensor, got int", TypeError, {"topk_length": 4}),
        (r"s_q of topk_length must equal s_q of logits \(5\), got 6", ValueError,
         {"topk_length": torch.zeros(6).int()}),
        (r"s_kv must be at least 0, got -1", ValueError, {"s_kv": -1}),
        (r"s_kv must be at most 2147483647", ValueError, {"s_kv": 2**31}),
        (r"s_kv must be an int, got 20.0", TypeError, {"s_kv": 20.0}),
        (r"q_start must be one int, got 2 of them", ValueError, {"q_start": [1, 2]}),
        (r"q_start must be an int, got '1'", TypeError, {"q_start": ["1"]}),
        (r"q_start must lie in 0 .. .*, got -1", ValueError, {"q_start": -1}),
        (r"k_stride must be at least 1, got 0", ValueError, {"k_stride": 0}),
        (r"k_stride must be an int, got None", TypeError, {"k_stride": None}),
        (r"reduction must be one of 'mean', 'sum', 'none', got 'batchmean'", ValueError, {"reduction": "batchmean"}),
        (r"reduction must be one of 'mean', 'sum', 'none', got None", ValueError, {"reduction": None}),
    ],
)  # fmt: skip
def test_loss_errors(match, error, change):
    logits, dist, indices = problem(dtype=torch.float32)
    args = {"logits": logits, "attn_dist": dist, "indices": indices, "s_kv": 20}
    with pytest.raises(error, match=match):
        htree_cuda.indexer_loss(**{**args, **change})


def test_loss_batch_errors():
    logits, dist, indices = problem(B=2)
    with pytest.raises(ValueError, match=r"shape \(2, 5, 9\) of logits, or \(2, G, 5, 9\), got \(1, 2, 5, 9\)"):
        htree_cuda.indexer_loss(logits, dist[:1], indices, s_kv=20)
    with pytest.raises(ValueError, match=r"dimension 0 of indices must equal B of logits \(2\), got 1"):
        htree_cuda.indexer_loss(logits, dist, indices[:1], s_kv=20)
    with pytest.raises(ValueError, match=r"list of B \(2\) ints, got 1 of them"):
        htree_cuda.indexer_loss(logits, dist, indices, s_kv=20, q_start=[1])


@pytest.mark.parametrize(
    ("match", "error", "x", "options"),
    [
        (r"normalize_attn_dist: attn_dist must be a torch.Tensor, got NoneType", TypeError, None, {}),
        (r"attn_dist must have the dimensions \[G, s_q, topk\] or \[B, G, s_q, topk\], got shape \(5, 9\)", ValueError,
         torch.zeros(5, 9), {}),
        (r"attn_dist must be float32 or float64, got torch.float16", ValueError, torch.zeros(1, 5, 9).half(), {}),
        (r"attn_dist must be a dense \(strided\) tensor", ValueError, torch.zeros(1, 5, 9).to_sparse(), {}),
        (r"group must be a torch.distributed.ProcessGroup that this rank is in, got 'tp'", TypeError,
         torch.zeros(1, 5, 9), {"group": "tp"}),
    ],
)  # fmt: skip
def test_normalise_errors(match, error, x, options):
    with pytest.raises(error, match=match):
        htree_cuda.normalize_attn_dist(x, **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_target_has_no_gradient_whatever_its_logits(bad):
    logits = torch.tensor([[bad, 1.0], [0.5, 1.0]], requires_grad=True)
    target, indices = torch.tensor([[0.0, 0.0], [0.25, 0.75]]), torch.tensor([[[0, 1]], [[0, 1]]], dtype=torch.int32)
    loss = htree_cuda.indexer_loss(logits, target, indices, s_kv=2)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and not grad[0].any() and grad[1].isfinite().all() and grad[1].all()
