"""dense_indexer_loss: against the definition, against attn_dist + indexer_loss, over tiles and processes, and what a
caller can get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import htree_cuda
from htree_cuda import UnsupportedError, ops_dense_loss
from htree_cuda import definition_dense_loss as definition
from htree_cuda.params import IndexerParams
from htree_cuda.torch_backend import dense_loss
from htree_cuda.torch_backend import lists as torch_lists
from tests.inputs import examples

OP = torch.ops.htree_cuda.dense_indexer_loss
NUMBERS = {"sm_scale": None, "q_start": None, "k_stride": 1, "lse_base": 2.0, "group": "", "backend": "auto"}
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def problem(s_q=5, s_kv=20, h_i=3, d_i=4, h_q=6, d_qk=8, B=None, dtype=torch.float64, grad=True):
    """q_i, k_i, weights, q, k; and lse of dense attention to all keys, base 2."""
    batch = () if B is None else (B,)
    acc = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape):
        return torch.randn(*batch, *shape, dtype=torch.float64)

    q_i, k_i = (x.to(dtype).requires_grad_(grad) for x in (draw(s_q, h_i, d_i), draw(s_kv, 1, d_i)))
    weights = draw(s_q, h_i).to(acc).requires_grad_(grad)
    q, k = draw(s_q, h_q, d_qk).to(dtype), draw(s_kv, 1, d_qk).to(dtype)
    scores = torch.einsum("...shd,...jd->...shj", q.double(), k.double()[..., 0, :]) * d_qk**-0.5
    lse = scores.logsumexp(-1) / math.log(2) if s_kv else draw(s_q, h_q)
    return q_i, k_i, weights, q, k, lse.to(acc)


def reduced(losses, counts, reduction):
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum().clamp(min=1)}[reduction]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 2 queries by 3 keys, 2 heads at a time: every sum crosses their borders."""
    monkeypatch.setattr(dense_loss, "KEYS_CPU", 3)
    monkeypatch.setattr(dense_loss, "HEADS", 2)
    monkeypatch.setattr(dense_loss, "MAX_TILE_BYTES", 2000)


# ----------------------------------------------------------------------------------------------------------- definition


@settings(max_examples=examples(80), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    B=st.one_of(st.none(), st.integers(1, 2)), s_q=st.integers(1, 5), s_kv=st.integers(0, 24), h_i=st.integers(1, 5),
    h_q=st.integers(1, 5), start=st.one_of(st.none(), st.integers(0, 30)), k_stride=st.sampled_from([1, 2, 4]),
    bounds=st.tuples(st.booleans(), st.booleans()), natural=st.booleans(), scale=st.sampled_from([None, 0.0, -0.4]),
    reduction=st.sampled_from(["mean", "sum", "none"]), silent=st.booleans(), tiles=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_loss_and_gradient_equal_the_definition(
    B, s_q, s_kv, h_i, h_q, start, k_stride, bounds, natural, scale, reduction, silent, tiles, seed
):
    torch.manual_seed(seed)
    args = problem(s_q, s_kv, h_i, 4, h_q, 8, B)
    batch = () if B is None else (B,)
    if silent:
        args[5][..., 0] = math.inf if seed % 2 else -math.inf
    drawn = [torch.randint(-4, s_kv + 5, (*batch, s_q), dtype=torch.int32) if wanted else None for wanted in bounds]
    rule = {
        "q_start": start, "k_stride": k_stride, "k_start": drawn[0], "k_end": drawn[1], "sm_scale": scale,
        "lse_base": math.e if natural else 2,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if tiles:
            patch.setattr(dense_loss, "KEYS_CPU", 3)
            patch.setattr(dense_loss, "HEADS", 2)
            patch.setattr(dense_loss, "MAX_TILE_BYTES", 2000)
        loss = htree_cuda.dense_indexer_loss(*args, reduction=reduction, **rule)
        losses, counts = definition.dense_indexer_loss(*args, **rule)
        expected = reduced(losses, counts, reduction)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        upstream = torch.randn_like(loss)
        found = torch.autograd.grad(loss, args[:3], upstream)
    if not expected.requires_grad:
        assert all((x == 0).all() for x in found)
        return
    exact = torch.autograd.grad(expected, args[:3], upstream, allow_unused=True)
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("B", [None, 2])
@pytest.mark.parametrize("q_start", [None, 15])
def test_it_is_attn_dist_and_indexer_loss_on_the_list_of_all_rows(B, q_start, small_tiles):
    args = problem(h_q=70, B=B)
    q_i, k_i, weights, q, k, _ = args
    every = torch.arange(20, dtype=torch.int32).expand(*(() if B is None else (B,)), 5, 1, 20).contiguous()
    _, lse = htree_cuda.sparse_attention(q, k, every, d_v=4, q_start=q_start)
    logits = torch.einsum("...shj,...sh->...sj", torch.relu(q_i @ k_i[..., 0, :].mT[..., None, :, :]), weights)
    dist = htree_cuda.attn_dist(q, k, every, lse, q_start=q_start)
    expected = htree_cuda.indexer_loss(logits, dist, every, s_kv=20, q_start=q_start)
    loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, q_start=q_start)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for x, y in zip(*(torch.autograd.grad(x, args[:3]) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_gradcheck_and_no_second_derivative():
    args = problem(s_q=3, s_kv=7, h_q=2)
    constants = args[3:]

    def call(*x):
        return htree_cuda.dense_indexer_loss(*x, *constants, q_start=4, reduction="none")

    assert torch.autograd.gradcheck(call, args[:3])
    (first,) = torch.autograd.grad(call(*args[:3]).sum(), args[2], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        first.sum().backward()


def test_it_is_zero_at_the_target_and_positive_elsewhere():
    """One head that sees the target as its logits, up to a constant for each query."""
    _, _, _, q, k, lse = problem(d_qk=8, h_q=1)
    scores = q[:, 0] @ k[:, 0].T * 8**-0.5
    # relu(<[score + 100, 1], key>) with keys that are unit vectors: logits are the scores, moved up.
    q_i = (scores + 100)[:, None].requires_grad_()
    k_i = torch.eye(20, dtype=torch.float64)[:, None].requires_grad_()
    weights = torch.ones(5, 1, dtype=torch.float64, requires_grad=True)
    loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, reduction="none")
    torch.testing.assert_close(loss, torch.zeros(5).double(), rtol=0, atol=1e-12)
    for x in torch.autograd.grad(loss.sum(), (q_i, k_i)):
        torch.testing.assert_close(x, torch.zeros_like(x), rtol=0, atol=1e-12)
    others = problem()
    assert (htree_cuda.dense_indexer_loss(*others, reduction="none") > 1e-3).all()


def plain(dtype, q_i, k_i, weights, q, k, lse):
    """Losses [s_q] by PyTorch operations that have all keys at once, in one precision."""
    scores = torch.einsum("shd,jd->shj", q.to(dtype), k.to(dtype)[:, 0]) * q.shape[2] ** -0.5
    a = torch.exp(scores - lse.to(dtype)[:, :, None] * math.log(2))
    target = a.sum(1) / a.sum((1, 2))[:, None]
    z = torch.relu(torch.einsum("shd,jd->shj", q_i.to(dtype), k_i.to(dtype)[:, 0]))
    return (target * (target.log() - torch.einsum("sh,shj->sj", weights.to(dtype), z).log_softmax(1))).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_plain_float32(dtype, monkeypatch):
    """Logits in the hundreds, where the two parts of the sum are large, over ten tiles of keys; the largest errors of
    eight problems, since that of one is a matter of the order in which a processor adds."""
    monkeypatch.setattr(dense_loss, "KEYS_CPU", 15)
    errors: list[list[torch.Tensor]] = [[], [], [], []]  # of the loss and of its gradients, each beside the baseline's
    for _ in range(8):
        q_i, k_i, weights, *rest = problem(
            s_q=128, s_kv=150, h_i=8, d_i=32, h_q=16, d_qk=32, dtype=dtype, grad=False
        )  # fmt: skip
        inputs = [x.requires_grad_() for x in (q_i * 2, k_i, weights * 3 + 2)]
        # The exact gradients are not rounded: a number that is rounded the other way would count.
        wide = [x.detach().double().requires_grad_() for x in inputs]
        exact, allowed = plain(torch.float64, *wide, *rest), plain(torch.float32, *inputs, *rest)
        definition_losses, _ = definition.dense_indexer_loss(*(x[:2] for x in inputs[:1]), inputs[1], inputs[2][:2],
                                                             rest[0][:2], rest[1], rest[2][:2])  # fmt: skip
        torch.testing.assert_close(definition_losses, exact[:2], rtol=1e-12, atol=0)
        loss = htree_cuda.dense_indexer_loss(*inputs, *rest, reduction="none")
        assert exact.mean() > 50
        losses = (loss, inputs), (allowed, inputs), (exact, wide)
        results = [(x, *torch.autograd.grad(x.sum(), leaves)) for x, leaves in losses]
        for found, (one, other, wanted) in zip(errors, zip(*results, strict=True), strict=True):
            found.append(torch.stack([x.double() - wanted for x in (one, other)]))
    for found in errors:
        error, baseline = torch.stack(found, 1).flatten(1)
        assert error.abs().max() <= 2 * baseline.abs().max()
        assert error.square().mean().sqrt() <= 2 * baseline.square().mean().sqrt()


# ------------------------------------------------------------------------------------------------ what may not matter


def windows(s_q=5):
    """Key rows 3 and 4 are outside every window, query 2 sees nothing."""
    k_start = torch.tensor([5, 6, 9, 5, INT_MIN], dtype=torch.int32)
    k_end = torch.tensor([20, 12, 9, INT_MAX, 3], dtype=torch.int32)
    return {"k_start": k_start, "k_end": k_end}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_keys_and_queries_outside_every_window_reach_nothing(poison, small_tiles):
    args = problem(grad=False)
    results = []
    for dirty in (False, True):
        q_i, k_i, weights, q, k, lse = (x.clone() for x in args)
        if dirty:
            for x in (k_i, k):
                x[3:5] = poison
            for x in (q_i, weights, q, lse):
                x[2] = poison
        inputs = [x.requires_grad_() for x in (q_i, k_i, weights)]
        losses = htree_cuda.dense_indexer_loss(*inputs, q, k, lse, reduction="none", **windows())
        upstream = torch.tensor([1.0, 2, poison if dirty else 0, 4, 5], dtype=torch.float64)
        results.append((losses.detach(), *torch.autograd.grad(losses, inputs, upstream)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and dirty.isfinite().all()
    losses, dq, dk, dweights = results[1]
    assert losses[2] == 0 and (dq[2] == 0).all() and (dweights[2] == 0).all() and (dk[3:5] == 0).all()


@pytest.mark.parametrize("which", range(6))
def test_a_nan_reaches_the_queries_that_see_it_and_no_other(which, small_tiles):
    args = [x.clone() for x in problem(grad=False)]
    names = {0: 3, 1: 15, 2: 3, 3: 3, 4: 15, 5: 3}  # key row 15 is seen by queries 0 and 3
    args[which][names[which]] = math.nan
    hit = [0, 3] if which in (1, 4) else [3]
    clear = [s for s in (0, 1, 4) if s not in hit]
    inputs = [x.requires_grad_() for x in args[:3]]
    losses = htree_cuda.dense_indexer_loss(*inputs, *args[3:], reduction="none", **windows())
    assert losses[hit].isnan().all() and losses[[*clear, 2]].isfinite().all()
    dq, dk, dweights = torch.autograd.grad(losses.sum(), inputs)
    assert dq[hit].isnan().any(2).any(1).all() and dq[[*clear, 2]].isfinite().all()
    assert dweights[hit].isnan().any(1).all() and dweights[[*clear, 2]].isfinite().all()
    assert dk[:3].isfinite().all(), "rows that only query 4 sees"


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("weight", [-1.0, 1.0])
def test_an_infinite_key_reaches_the_gradients_of_the_queries_that_see_it(value, weight, small_tiles):
    """Whatever its logit is: infinite, minus infinity, or 0 by the ReLU. 1 - 1 = 0 has no gradient."""
    args = [x.clone() for x in problem(grad=False)]
    args[1][15] = value  # seen by queries 0 and 3
    args[2].fill_(weight)
    args[0].abs_()
    inputs = [x.requires_grad_() for x in args[:3]]
    losses = htree_cuda.dense_indexer_loss(*inputs, *args[3:], reduction="none", **windows())
    dq, dk, _ = torch.autograd.grad(losses.sum(), inputs)
    assert (~dq[[0, 3]].isfinite()).all() and dq[[1, 2, 4]].isfinite().all()
    assert dk[:3].isfinite().all(), "rows that only query 4 sees"


def test_zero_attention_counts_in_the_mean_and_empty_windows_do_not():
    args = problem()
    args[5][1] = math.inf
    losses = htree_cuda.dense_indexer_loss(*args, reduction="none", **windows())
    assert (losses[[1, 2]] == 0).all() and (losses[[0, 3, 4]] > 0).all()
    mean = htree_cuda.dense_indexer_loss(*args, **windows())
    torch.testing.assert_close(mean, losses.sum() / 4)
    dq, _, dweights = torch.autograd.grad(mean, args[:3])
    assert (dq[[1, 2]] == 0).all() and (dweights[[1, 2]] == 0).all() and (dq[[0, 3, 4]] != 0).any(2).any(1).all()


@pytest.mark.parametrize("sizes", [{"s_q": 0}, {"s_kv": 0}, {"B": 0}])
def test_empty_sizes(sizes):
    args = problem(**sizes)
    losses = htree_cuda.dense_indexer_loss(*args, reduction="none", q_start=3)
    assert losses.shape == args[0].shape[:-2] and (losses == 0).all()
    for reduction in ("mean", "sum"):
        loss = htree_cuda.dense_indexer_loss(*args, reduction=reduction)
        assert loss == 0
        assert all((x == 0).all() for x in torch.autograd.grad(loss, args[:3]))


def test_attention_is_a_constant_and_its_scale_does_not_matter():
    q_i, k_i, weights, q, k, lse = problem()
    attention = [x.clone().requires_grad_() for x in (q, k, lse)]
    loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, *attention)
    assert all(x is None for x in torch.autograd.grad(loss, attention, allow_unused=True))
    moved = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse - 40)
    torch.testing.assert_close(loss, moved, rtol=1e-12, atol=0)


def test_any_strides_and_other_dtypes_of_the_attention():
    q_i, k_i, weights, q, k, lse = problem(dtype=torch.float32)
    loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, **windows())
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q_i, k_i, weights)]
    one_end = torch.tensor(12, dtype=torch.int32).expand(5)
    same = htree_cuda.dense_indexer_loss(*strided, q, k, lse, **windows())
    assert torch.equal(loss, same)
    assert htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, k_end=one_end) > 0
    low = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q.bfloat16(), k.bfloat16(), lse, **windows())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, loss, rtol=0.05, atol=0)
    high = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q.double(), k.double(), lse.double(), **windows())
    assert high.dtype == torch.float64
    torch.testing.assert_close(high.float(), loss, rtol=1e-5, atol=0)
    high.backward()
    assert q_i.grad.dtype == torch.float32


def test_memory_is_bounded():
    """8,192 queries by 8,192 keys of one number each: 256 MiB of float32 would hold one such matrix, tiles do not."""
    window = dense_loss.Window(1, 8192, torch.device("cpu"), IndexerParams(False, [0], 1))
    for _, rows, tiles in window.tiles(8192, 100, 4):
        held = (rows.stop - rows.start) * max(cols.stop - cols.start for cols in tiles) * 4
        assert held * (2 * dense_loss.HEADS + 8) <= 32 << 20
    seen = [(rows, cols) for _, rows, tiles in window.tiles(8192, 100, 4) for cols in tiles]
    assert all(cols.start < rows.stop for rows, cols in seen), "tiles after the last query are left out"


def test_repeats_are_bitwise_identical():
    args = problem(s_q=40, s_kv=500, dtype=torch.float32)
    runs = []
    for _ in range(5):
        loss = htree_cuda.dense_indexer_loss(*args, q_start=460)
        runs.append((loss, *torch.autograd.grad(loss, args[:3])))
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_autocast_casts_queries_and_keys_alone():
    args = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = htree_cuda.dense_indexer_loss(*args)
    q_i, k_i, weights, q, k, lse = args
    low = [x.bfloat16() for x in (q_i, k_i)]
    assert torch.equal(loss, htree_cuda.dense_indexer_loss(*low, weights, q.bfloat16(), k.bfloat16(), lse))


def test_it_trains_an_indexer():
    torch.manual_seed(0)
    q_i, k_i, weights, q, k, lse = problem(s_q=8, s_kv=32)
    optimiser = torch.optim.Adam([q_i, k_i, weights], lr=0.1)
    losses = []
    for _ in range(40):
        loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.2 * losses[0]


# ------------------------------------------------------------------------------------------------------ tensor parallel


def _rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    try:
        dense_loss.KEYS_CPU, dense_loss.MAX_TILE_BYTES = 5, 3000
        q_i, k_i, weights, q, k, lse = torch.load(f"{path}/args.pt")
        heads = slice(0, 4) if rank == 0 else slice(4, 6)  # not the same number of heads
        inputs = [x.requires_grad_() for x in (q_i, k_i, weights)]
        group = torch.distributed.group.WORLD
        loss = htree_cuda.dense_indexer_loss(*inputs, q[:, heads], k, lse[:, heads], q_start=15, group=group)
        torch.save((loss.detach(), *torch.autograd.grad(loss, inputs)), f"{path}/rank{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_tensor_parallel_ranks_add_their_heads(tmp_path):
    args = problem()
    torch.save(tuple(x.detach() for x in args), tmp_path / "args.pt")
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    loss = htree_cuda.dense_indexer_loss(*args, q_start=15)
    expected = (loss.detach(), *torch.autograd.grad(loss, args[:3]))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for x, y, whole in zip(*ranks, expected, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, whole, rtol=1e-12, atol=1e-13)


# ----------------------------------------------------------------------------------------------------------- as an op


@pytest.mark.parametrize("B", [None, 2])
def test_opcheck(B):
    args = problem(B=B)
    bounds = torch.full(args[0].shape[:-2], 9, dtype=torch.int32)
    starts = [15] * (B or 1)
    torch.library.opcheck(OP, (*args, None if B else bounds, bounds), {**NUMBERS, "q_start": starts})
    args = [x.detach() for x in args]
    loss, *rest = OP(*args, None, bounds, **NUMBERS)
    tensors = (torch.randn_like(loss), *args, None, bounds, *rest)
    torch.library.opcheck(torch.ops.htree_cuda.dense_indexer_loss_backward, tensors, NUMBERS)
    q, k = (args[3], args[4]) if B else (args[3][None], args[4][None])
    numbers = {"sm_scale": 0.3, "q_start": starts, "backend": "auto"}
    torch.library.opcheck(torch.ops.htree_cuda.dense_lse, (q, k), numbers)


def test_a_row_without_attention_has_no_gradient_whatever_its_indexer_holds():
    q, k, lse = torch.rand(2, 1, 2), torch.rand(2, 1, 2), torch.tensor([[math.inf], [0.0]])
    for bad_q, bad_weight in ((math.nan, 1.0), (1.0, math.nan)):
        q_i, k_i = torch.rand(2, 1, 2), torch.rand(2, 1, 2)
        q_i[0], weights = bad_q, torch.tensor([[bad_weight], [1.0]])
        inputs = [x.requires_grad_() for x in (q_i, k_i, weights)]
        grads = torch.autograd.grad(htree_cuda.dense_indexer_loss(*inputs, q, k, lse, q_start=0), inputs)
        assert all(g.isfinite().all() for g in grads)
        assert not grads[0][0].any() and not grads[2][0].any()


def test_dense_lse(small_tiles):
    q, k = problem(B=2, s_q=7)[3:5]
    lse = torch.ops.htree_cuda.dense_lse(q, k, sm_scale=0.3, q_start=[13, 2], backend="auto")
    scores = torch.einsum("bshd,bjd->bshj", q, k[:, :, 0]) * 0.3
    for b, start in enumerate((13, 2)):
        for s in range(7):
            expected = scores[b, s, :, : start + s + 1].logsumexp(1)
            torch.testing.assert_close(lse[b, s], expected, rtol=0, atol=1e-12)


def test_compile_fullgraph_with_dynamic_sizes():
    def call(*args):
        return htree_cuda.dense_indexer_loss(*args, q_start=4, k_stride=2)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for s_q, s_kv in ((5, 9), (7, 12), (11, 30)):
        args = problem(s_q, s_kv)
        results = [f(*args) for f in (counted, call)]
        torch.testing.assert_close(*results)
        for x, y in zip(*(torch.autograd.grad(x, args[:3]) for x in results), strict=True):
            torch.testing.assert_close(x, y)
    assert counter.frame_count <= 2, "one graph for all sizes"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("match", "error", "change"),
    [
        (r"dense_indexer_loss: q_i must be a torch.Tensor, got list", TypeError, {"q_i": [1.0]}),
        (r"q_i must have the dimensions \[s_q, h_i, d_i\] or \[B, s_q, h_i, d_i\], got shape \(5, 3\)", ValueError,
         {"q_i": torch.zeros(5, 3)}),
        (r"q_i must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn", ValueError,
         {"q_i": torch.zeros(5, 3, 4).to(torch.float8_e4m3fn)}),
        (r"k_i must have the dtype of q_i \(torch.float32\), got torch.float64", ValueError,
         {"k_i": torch.zeros(20, 1, 4).double()}),
        (r"k_i must have one KV head", ValueError, {"k_i": torch.zeros(20, 2, 4)}),
        (r"h_i must be at least 1, got 0", ValueError, {"q_i": torch.zeros(5, 0, 4)}),
        (r"d_i of k_i must equal d_i of q_i \(4\), got 5", ValueError, {"k_i": torch.zeros(20, 1, 5)}),
        (r"weights must be float32 where q_i is torch.float32, got torch.bfloat16", ValueError,
         {"weights": torch.zeros(5, 3).bfloat16()}),
        (r"h_i of weights must equal h_i of q_i \(3\), got 4", ValueError, {"weights": torch.zeros(5, 4)}),
        (r"s_q of weights must equal s_q of q_i \(5\), got 4", ValueError, {"weights": torch.zeros(4, 3)}),
        (r"either every tensor has a batch dimension or none", ValueError, {"q": torch.zeros(1, 5, 6, 8)}),
        (r"s_q of q must equal s_q of q_i \(5\), got 4", ValueError,
         {"q": torch.zeros(4, 6, 8), "lse": torch.zeros(4, 6)}),
        (r"s_kv of k must equal s_kv of k_i \(20\), got 19", ValueError, {"k": torch.zeros(19, 1, 8)}),
        (r"lse must be float32 where q is torch.float32, got torch.float64", ValueError,
         {"lse": torch.zeros(5, 6).double()}),
        (r"h_q of lse must equal h_q of q \(6\), got 5", ValueError, {"lse": torch.zeros(5, 5)}),
        (r"lse must be on the device of .* \(cpu\), got meta", ValueError, {"lse": torch.zeros(5, 6, device="meta")}),
        (r"k_start must be int32, got torch.int64", ValueError, {"k_start": torch.zeros(5).long()}),
        (r"k_end must be a torch.Tensor, got int", TypeError, {"k_end": 4}),
        (r"s_q of k_end must equal s_q of q_i \(5\), got 6", ValueError, {"k_end": torch.zeros(6).int()}),
        (r"q_start must be one int, got 2 of them", ValueError, {"q_start": [1, 2]}),
        (r"k_stride must be at least 1, got 0", ValueError, {"k_stride": 0}),
        (r"lse_base must be 2 or math.e, got 10", ValueError, {"lse_base": 10}),
        (r"sm_scale must be finite, got inf", ValueError, {"sm_scale": math.inf}),
        (r"reduction must be one of 'mean', 'sum', 'none', got 'batchmean'", ValueError, {"reduction": "batchmean"}),
        (r"group must be a torch.distributed.ProcessGroup that this rank is in, got 'tp'", TypeError, {"group": "tp"}),
        (r"deterministic must be a bool, got 1", TypeError, {"deterministic": 1}),
        (r"backend must be one of 'auto', 'torch', got 'cuda'", ValueError, {"backend": "cuda"}),
    ],
)  # fmt: skip
def test_errors(match, error, change):
    names = ("q_i", "k_i", "weights", "q", "k", "lse")
    args = dict(zip(names, problem(dtype=torch.float32, grad=False), strict=True)) | change
    tensors = [args.pop(name) for name in names]
    with pytest.raises(error, match=match):
        htree_cuda.dense_indexer_loss(*tensors, **args)


def test_what_the_kernels_lack_names_the_way_out(monkeypatch):
    monkeypatch.setattr(ops_dense_loss, "_use_torch", lambda op, x, backend: False)
    args = problem(grad=False, d_qk=576)
    with pytest.raises(UnsupportedError, match=r'dense_indexer_loss: .*q is torch.float64; pass backend="torch"'):
        htree_cuda.dense_indexer_loss(*args)
    args = problem(grad=False, d_qk=8, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"dense_indexer_loss: the kernel needs d_qk to be one of 576, .* got 8"):
        htree_cuda.dense_indexer_loss(*args)
    with pytest.raises(UnsupportedError, match=r"dense_lse: the kernel needs d_qk to be one of 576, 512, got 8"):
        torch.ops.htree_cuda.dense_lse(args[3][None], args[4][None], sm_scale=1.0, q_start=[0], backend="auto")


def test_the_kernels_get_one_list_of_all_rows(monkeypatch):
    """With launchers that compute by the PyTorch backend: tiles, strides and groups of heads as a GPU gets them."""
    from htree_cuda import dense_kernels

    def launch(op, outputs):
        def run(*args, attn_sink=None, **numbers):
            if op is torch_lists.sparse_attention:
                *args, workspace = args
                assert workspace.dtype == torch.uint8 and workspace.numel() == 32
            tensors, results = args[:-outputs], args[-outputs:]
            if op is torch_lists.sparse_attention:
                numbers |= {"attn_sink": attn_sink, "d_v": results[0].shape[3]}
            else:
                tensors = (*tensors[:3], tensors[3])
            assert tensors[2].shape[1] == 1 or tensors[2].stride(1) == 0, "one list for all queries"
            found = op(*tensors, **numbers)
            for result, x in zip(results, found if outputs > 1 else (found,), strict=True):
                result.copy_(x)

        return run

    monkeypatch.setattr(dense_kernels.kernels, "attn_dist", launch(torch_lists.attn_dist, 1))
    monkeypatch.setattr(dense_kernels.kernels, "sparse_attention", launch(torch_lists.sparse_attention, 2))
    monkeypatch.setattr(dense_kernels.kernels, "sparse_attention_workspace", lambda q, indices: 32)
    monkeypatch.setattr(dense_kernels, "MAX_HEADS", 64)
    monkeypatch.setattr(dense_kernels, "MAX_OUT_BYTES", 2 * 70 * 512 * 2)
    q_i, k_i, weights, q, k, _ = problem(B=2, d_qk=576, h_q=70, dtype=torch.bfloat16)
    numbers = {"sm_scale": 0.04, "q_start": [15, 9], "backend": "auto"}
    results = []
    for torch_backend in (True, False):
        monkeypatch.setattr(ops_dense_loss, "_use_torch", lambda op, x, backend, answer=torch_backend: answer)
        lse = torch.ops.htree_cuda.dense_lse(q, k, **numbers)
        rule = {**numbers, "lse_base": math.e}
        loss = htree_cuda.dense_indexer_loss(q_i, k_i, weights, q, k, lse, **rule)
        results.append((lse, loss, *torch.autograd.grad(loss, (q_i, k_i, weights))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-5)
