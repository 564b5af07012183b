"""The attn_dist kernel against the torch backend in float64, whatever the shape, the contents and the surroundings.

Three measures: how far the kernel strays from exact arithmetic on its rounded inputs (an a-priori bound), how far from
the unrounded inputs beside the baseline (at most twice), and equal bits wherever nothing that matters has changed.
"""

from __future__ import annotations

import math
import random
import sys
import threading

import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError, definition, kernels

from .. import baseline
from ..bits import same_bits

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
HEADS = [1, 16, 63, 64, 65, 96, 128, 129, 192]
SLOTS = [1, 63, 64, 65, 2047, 2048]
HEAD_DIMS = [576, 512, 192, 128]


# ---- problems ----------------------------------------------------------------------------------------------


def randn(*shape, dtype=BF16, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)


def distinct(s_q, s_kv, topk, seed=0, batch=()):
    """Slots of every query: distinct where there are enough keys, in random order."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    rounds = -(-topk // s_kv)
    keys = torch.rand(*batch, s_q, 1, rounds, s_kv, device=DEVICE, generator=generator).argsort(-1)
    return keys.flatten(-2)[..., :topk].to(torch.int32).contiguous()


def hostile(indices, s_kv, seed=0):
    """A third of the slots invalid in every way there is, a third duplicates."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 18, indices.shape, generator=generator).to(indices.device)
    out = indices.clone()
    for i, bad in enumerate((-1, INT_MIN, INT_MAX, s_kv, s_kv + 1, -2)):
        out[kind == i] = bad
    duplicate = kind >= 12
    out[duplicate] = (indices[duplicate] % 3).to(torch.int32)
    return out


def exact_lse(q, k, indices, base=2.0):
    """float32 log-sum-exp of the scaled scores over the slots with a key, so that every head sums to one."""
    s_kv = k.shape[-3]
    lse = torch.empty(q.shape[:-1], device=q.device)
    for b in range(q.shape[0]) if q.dim() == 4 else (...,):
        valid = (indices[b][..., 0, :] >= 0) & (indices[b][..., 0, :] < s_kv)
        rows = k[b][:, 0].float()[indices[b][..., 0, :].long().clamp(0, max(s_kv - 1, 0))]
        scores = torch.einsum("shd,skd->shk", q[b].float(), rows) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~valid[:, None], -math.inf)
        lse[b] = torch.logsumexp(scores.double(), -1).float() / math.log(base)
    return lse


def problem(s_q=3, h_q=128, s_kv=1500, topk=200, d_qk=576, dtype=BF16, seed=0, batch=(), bad=False, base=2.0):
    q = randn(*batch, s_q, h_q, d_qk, dtype=dtype, seed=seed)
    k = randn(*batch, s_kv, 1, d_qk, dtype=dtype, seed=seed + 1)
    indices = distinct(s_q, s_kv, topk, seed + 2, batch)
    if bad:
        indices = hostile(indices, s_kv, seed + 3)
    return q, k, indices, exact_lse(q, k, indices, base)


def exact(q, k, indices, lse, **options):
    return htree_cuda.attn_dist(q.double(), k.double(), indices, lse.double(), backend="torch", **options)


def poisoned_launch(q, k, indices, lse, **options):
    """The kernel into an output full of NaN, past the op: whatever is not written shows."""
    batched = q.dim() == 4
    if not batched:
        q, k, indices, lse = q[None], k[None], indices[None], lse[None]
    lengths = options.get("topk_length")
    start = options.get("q_start")
    out = torch.full((q.shape[0], (q.shape[2] + 63) // 64, q.shape[1], indices.shape[3]), math.nan, device=q.device)
    kernels.attn_dist(
        q, k, indices, lse, out,
        sm_scale=options.get("sm_scale", q.shape[-1] ** -0.5),
        q_start=None if start is None else [start] * q.shape[0] if isinstance(start, int) else start,
        k_stride=options.get("k_stride", 1),
        topk_length=lengths if lengths is None or batched else lengths[None],
        lse_base=options.get("lse_base", 2.0),
    )  # fmt: skip
    return out if batched else out[0]


def check(q, k, indices, lse, **options):
    """Launch and op agree bit for bit, every element is written, zeros where zeros belong, errors within the bound."""
    out = htree_cuda.attn_dist(q, k, indices, lse, **options)
    assert out.dtype == torch.float32
    same_bits(out, poisoned_launch(q, k, indices, lse, **options))
    truth = exact(q, k, indices, lse, **options)
    same_nan = out.isnan() == truth.isnan()
    assert same_nan.all(), f"{int((~same_nan).sum())} elements are NaN in one of the two"
    silent = truth == 0
    assert (out[silent] == 0).all(), "an invalid slot is not zero"
    log_lse = lse.masked_fill(~lse.isfinite(), 0) * math.log(options.get("lse_base", 2.0))
    scale = abs(options.get("sm_scale", q.shape[-1] ** -0.5))
    allowed = baseline.attn_dist_arithmetic_bound(q, k, truth, log_lse / math.log(2.0), scale)
    error = (out.double() - truth).abs()
    wrong = (error > allowed) & ~truth.isnan()
    assert not wrong.any(), f"error {float(error[wrong].max()):.3e}, bound {float(allowed[wrong].min()):.3e}"
    return out


# ---- shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", SLOTS)
@pytest.mark.parametrize("h_q", HEADS)
def test_heads_and_slots(h_q, topk):
    for d_qk, dtype, bad in ((576, BF16, False), (512, FP16, True), (192, BF16, True), (128, FP16, False)):
        check(*problem(3, h_q, 2500, topk, d_qk, dtype, seed=h_q + topk, bad=bad))


@pytest.mark.parametrize(
    ("h_q", "topk", "d_qk", "dtype"), [(65, 130, 576, BF16), (128, 64, 512, FP16), (3, 63, 128, BF16)]
)
def test_sanitizer_shapes(h_q, topk, d_qk, dtype, monkeypatch):
    """Inputs come from the host and results are judged there: initcheck does not see what torch's kernels write."""
    with monkeypatch.context() as host:
        host.setattr(sys.modules[__name__], "DEVICE", "cpu")
        tensors = problem(3, h_q, 200, topk, d_qk, dtype, seed=1, bad=True)
        truth = exact(*tensors)
    out = htree_cuda.attn_dist(*(x.to(DEVICE) for x in tensors))
    torch.testing.assert_close(out.cpu().double(), truth, rtol=1e-4, atol=1e-7)


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d_qk", HEAD_DIMS)
def test_more_queries_than_processors(d_qk, dtype):
    """Every CTA has whole queries and cuts through two."""
    for s_q, h_q, topk in ((300, 128, 320), (170, 64, 200), (70, 192, 129), (400, 40, 64), (150, 100, 64)):
        check(*problem(s_q, h_q, 3000, topk, d_qk, dtype, seed=s_q))


@pytest.mark.emulated
@pytest.mark.sample
@pytest.mark.parametrize("h_q", [3, 65, 128])
def test_groups_of_heads_and_partial_tiles(h_q):
    check(*problem(3, h_q, 200, 70, 128, seed=h_q, bad=True))


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [64, 128, 130])
def test_batches(h_q):
    for B in (1, 2, 5):
        check(*problem(4, h_q, 700, 130, 576, batch=(B,), seed=B))


@pytest.mark.sample
def test_many_batches_with_their_own_starts():
    """Starts travel in the kernel's parameters, 128 at a time."""
    q, k, indices, lse = problem(1, 16, 64, 40, 128, batch=(300,))
    starts = [(7 * b) % 200 for b in range(300)]
    check(q, k, indices, lse, q_start=starts, k_stride=2)


@pytest.mark.hardware
def test_more_than_65535_queries():
    q, k, indices, lse = problem(70_001, 8, 500, 4, 128)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    torch.testing.assert_close(out, exact(q, k, indices, lse).float(), rtol=2e-5, atol=1e-7)


@pytest.mark.hardware
def test_more_than_2_31_elements():
    s_q, h_q, d_qk = 30_000, 128, 576
    q = torch.empty(s_q, h_q, d_qk, dtype=BF16, device=DEVICE)
    assert q.numel() > 2**31
    q.view(torch.int16).random_(0x3C00, 0x3F00)  # 0.008 .. 0.5
    k = randn(4000, 1, d_qk, seed=1)
    indices = distinct(s_q, 4000, 68, 2)
    lse = torch.full((s_q, h_q), 7.0, device=DEVICE)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    rows = [0, 1, 14_999, 29_126, 29_127, 29_998, 29_999]  # 29,127 is the first query past 2^31 elements
    truth = exact(q[rows], k, indices[rows], lse[rows])
    torch.testing.assert_close(out[:, rows], truth.float(), rtol=2e-5, atol=1e-7)
    del q, out
    k = torch.empty(4_000_000, 1, d_qk, dtype=BF16, device=DEVICE)
    k.view(torch.int16).random_(0x3C00, 0x3F00)
    assert k.numel() > 2**31
    q = randn(5, 128, d_qk)
    indices = torch.randint(3_700_000, 4_000_000, (5, 1, 130), dtype=torch.int32, device=DEVICE)
    lse = torch.full((5, 128), 7.0, device=DEVICE)
    rows = k[indices[:, 0].long(), 0]
    local = torch.arange(130, dtype=torch.int32, device=DEVICE).expand(5, 1, 130)
    for s in range(5):
        truth = exact(q[s : s + 1], rows[s][:, None], local[s : s + 1].contiguous(), lse[s : s + 1])
        out = htree_cuda.attn_dist(q[s : s + 1], k, indices[s : s + 1], lse[s : s + 1])
        torch.testing.assert_close(out, truth.float(), rtol=2e-5, atol=1e-7)


@pytest.mark.emulated
@pytest.mark.sample
def test_zero_sizes():
    q, k, indices, lse = problem(2, 70, 20, 10, 128)
    assert htree_cuda.attn_dist(q[:0], k, indices[:0], lse[:0]).shape == (2, 0, 10)
    assert htree_cuda.attn_dist(q, k, indices[..., :0].contiguous(), lse).shape == (2, 2, 0)
    out = htree_cuda.attn_dist(q, k[:0], indices, lse)
    assert out.shape == (2, 2, 10) and (out == 0).all()
    empty = htree_cuda.attn_dist(q[None][:0], k[None][:0], indices[None][:0], lse[None][:0])
    assert empty.shape == (0, 2, 2, 10)


# ---- contents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d_qk", HEAD_DIMS)
def test_within_twice_the_baseline(d_qk, dtype):
    """Against unrounded inputs; the baseline is the definition on the rounded ones in float32."""
    generator = torch.Generator().manual_seed(d_qk)
    q = torch.randn(2, 96, d_qk, generator=generator)
    k = torch.randn(60, 1, d_qk, generator=generator)
    indices = torch.rand(2, 1, 60, generator=generator).argsort(-1)[..., :50].to(torch.int32).contiguous()
    lse = exact_lse(q.to(dtype), k.to(dtype), indices)
    truth = definition.attn_dist(q, k, indices, lse)
    base = baseline.attn_dist(q.to(dtype), k.to(dtype), indices, lse)
    out = htree_cuda.attn_dist(*(x.to(DEVICE) for x in (q.to(dtype), k.to(dtype), indices, lse))).cpu()
    baseline.assert_within("attn_dist", out, base, truth)
    exact_on_rounded = definition.attn_dist(q.to(dtype), k.to(dtype), indices, lse)
    allowed = baseline.attn_dist_arithmetic_bound(q.to(dtype), k.to(dtype), exact_on_rounded, lse)
    assert ((out - exact_on_rounded).abs() <= allowed).all()


@pytest.mark.parametrize("h_q", [64, 96, 128, 192])
def test_indices_of_any_content(h_q):
    q, k, indices, _ = problem(6, h_q, 900, 330)
    for bad in (
        hostile(indices, 900),
        torch.full_like(indices, -1),
        torch.full_like(indices, INT_MAX),
        torch.full_like(indices, INT_MIN),
        torch.zeros_like(indices),
        torch.randint(INT_MIN, INT_MAX, indices.shape, dtype=torch.int32, device=DEVICE),
    ):
        check(q, k, bad, exact_lse(q, k, bad))


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [40, 128])
def test_rows_that_no_slot_names_never_count(h_q):
    """NaN in every other row, and behind the ends of k."""
    q, k, indices, lse = problem(5, h_q, 2000, 150, bad=True)
    out = check(q, k, indices, lse)
    named = indices[(indices >= 0) & (indices < 2000)].long()
    around = torch.full((2200, 1, 576), math.nan, dtype=BF16, device=DEVICE)
    inside = around[100:2100]
    inside[named] = k[named]
    same_bits(out, htree_cuda.attn_dist(q, inside, indices, lse))


@pytest.mark.emulated
def test_a_nan_key_stays_in_its_slots():
    q, k, indices, lse = problem(4, 128, 500, 200)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    k = k.clone()
    k[7] = math.nan
    got = htree_cuda.attn_dist(q, k, indices, lse)
    hit = (indices[:, 0] == 7).expand_as(out)
    assert got[hit].isnan().all()
    same_bits(got[~hit], out[~hit])


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [10, 64, 65, 128, 130])
def test_lse_that_is_not_finite(h_q):
    """Infinite: the head contributes nothing, even where its score is NaN. NaN: the group is NaN in its valid slots."""
    q, k, indices, lse = problem(6, h_q, 300, 100, bad=True)
    lse[1, 0], lse[1, h_q // 2], lse[2] = math.inf, -math.inf, math.inf
    lse[3, h_q - 1] = math.nan
    check(q, k, indices, lse)
    q = q.clone()
    q[1, 0], q[1, h_q // 2] = math.nan, math.inf
    out = htree_cuda.attn_dist(q, k, indices, lse)
    heads = [h for h in range(h_q) if h not in (0, h_q // 2)]
    if h_q <= 64:
        clean = exact(q[1:2, heads], k, indices[1:2], lse[1:2, heads])
        torch.testing.assert_close(out[:, 1:2], clean.float(), rtol=2e-5, atol=1e-7)
    assert not out[:, 1].isnan().any()


@pytest.mark.emulated
def test_a_huge_lse_is_not_an_infinite_one():
    """Beside a silent head: a NaN score shows, a finite one contributes nothing."""
    q, k, indices, lse = problem(3, 64, 100, 64)
    lse[:, 0], lse[:, 5] = math.inf, 3e38
    clean = htree_cuda.attn_dist(q, k, indices, lse, lse_base=math.e)
    assert clean.isfinite().all()
    q = q.clone()
    q[1, 5] = math.nan
    out = htree_cuda.attn_dist(q, k, indices, lse, lse_base=math.e)
    assert out[:, 1].isnan().all()
    same_bits(out[:, [0, 2]], clean[:, [0, 2]])


def test_extreme_scores():
    """Logits of 1e3 (overflow to infinity and underflow to zero included), tiny keys, tiny and zero queries."""
    for q_scale, k_scale in ((1e3, 1.0), (1.0, 1e-6), (1e-6, 1e4), (0.0, 1.0), (30.0, 30.0)):
        q, k, indices, _ = problem(3, 128, 300, 100)
        q, k = q * q_scale, k * k_scale
        lse = exact_lse(q, k, indices)
        out = htree_cuda.attn_dist(q, k, indices, lse)
        truth = exact(q, k, indices, lse)
        size = float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()) * 576**-0.5
        torch.testing.assert_close(out.double(), truth, rtol=2e-5 + 2**-20 * size, atol=1e-6)


@pytest.mark.parametrize("h_q", [64, 128, 160])
def test_causal_rule(h_q):
    q, k, indices, lse = problem(40, h_q, 256, 200)
    rules = ((0, 1), (0, 4), (100, 1), (511, 16), (4000, 16), (10**6, 4096), (INT_MAX - 40, 1), (3, 2**40))
    for start, stride in rules:
        out = check(q, k, indices, lse, q_start=start, k_stride=stride)
        visible = torch.tensor([(start + s + 1) // stride for s in range(40)], device=DEVICE)
        hidden = (indices[:, 0] >= visible[:, None]).expand_as(out)
        assert (out[hidden] == 0).all()
    same_bits(htree_cuda.attn_dist(q, k, indices, lse, k_stride=4), htree_cuda.attn_dist(q, k, indices, lse))


@pytest.mark.emulated
def test_chunks_equal_the_whole():
    q, k, indices, lse = problem(64, 128, 300, 200)
    whole = htree_cuda.attn_dist(q, k, indices, lse, q_start=50, k_stride=1)
    for size in (1, 7, 33):
        parts = [
            htree_cuda.attn_dist(
                q[s : s + size], k, indices[s : s + size], lse[s : s + size], q_start=50 + s, k_stride=1
            )
            for s in range(0, 64, size)
        ]
        same_bits(torch.cat(parts, 1), whole)


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [64, 128, 192])
def test_lengths(h_q):
    q, k, indices, lse = problem(12, h_q, 700, 330, bad=True)
    lengths = [0, 1, 63, 64, 65, 128, 329, 330, 331, 5000, -4, INT_MIN]
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = check(q, k, indices, lse, topk_length=lengths)
    past = (torch.arange(330, device=DEVICE) >= lengths[:, None]).expand_as(out)
    assert (out[past] == 0).all()
    changed = indices.clone()
    changed[past[0][:, None]] = 5
    same_bits(out, htree_cuda.attn_dist(q, k, changed, lse, topk_length=lengths))


def test_natural_lse_and_scale():
    q, k, indices, lse = problem(4, 128, 500, 300, base=math.e)
    out = check(q, k, indices, lse, lse_base=math.e)
    torch.testing.assert_close(out.sum(-1), torch.full_like(out[..., 0], 64.0), rtol=1e-4, atol=0)
    check(q, k, indices, lse, lse_base=math.e, sm_scale=0.01)
    check(q, k, indices, lse, sm_scale=-0.02)


def test_lse_of_the_forward():
    """A tree of one layer is dense attention: its lse gives rows that sum to the number of heads."""
    q, k = randn(1, 50, 16, 128), randn(1, 50, 1, 128, seed=1)
    _, lse = htree_cuda.forward(q, k, k, return_lse=True, rope_base=1e30)
    s = torch.einsum("shd,kd->shk", q[0].float(), k[0, :, 0].float()) * 128**-0.5
    s = s.masked_fill(torch.arange(50, device=DEVICE)[:, None, None] < torch.arange(50, device=DEVICE), -math.inf)
    indices = torch.arange(50, dtype=torch.int32, device=DEVICE).expand(50, 1, 50).contiguous()
    out = htree_cuda.attn_dist(q[0], k[0], indices, torch.logsumexp(s, -1), lse_base=math.e, q_start=0)
    torch.testing.assert_close(out.sum(-1), torch.full_like(out[..., 0], 16.0), rtol=1e-4, atol=0)
    assert lse.shape == (1, 50, 16)


# ---- views -------------------------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [33, 64, 128])
def test_strided_views(h_q):
    """Heads, queries and rows apart, an offset base, NaN in between."""
    q, k, indices, lse = problem(9, h_q, 400, 130)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    big_q = torch.full((11, h_q + 3, 576 + 64), math.nan, dtype=BF16, device=DEVICE)
    big_k = torch.full((403, 3, 576 + 8), math.nan, dtype=BF16, device=DEVICE)
    view_q, view_k = big_q[1:10, 2 : 2 + h_q, 32 : 32 + 576], big_k[2:402, 1:2, 8:]
    view_q.copy_(q)
    view_k.copy_(k)
    same_bits(out, htree_cuda.attn_dist(view_q, view_k, indices, lse))
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    same_bits(out, htree_cuda.attn_dist(heads_first, k, indices, lse))


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [64, 70])
def test_strides_of_lists_lse_and_lengths(h_q):
    """Every one of them transposed, with gaps; then those of one query for all."""
    q, k, indices, lse = problem(5, h_q, 300, 130, batch=(2,), bad=True)
    lengths = torch.tensor([[130, 0, 64, 65, 129], [1, 130, 500, -3, 128]], dtype=torch.int32, device=DEVICE)
    permuted = torch.stack([indices, indices * 0 + 3], -1).permute(3, 4, 2, 1, 0).contiguous()[:, 0].permute(3, 2, 1, 0)
    heads_first = torch.stack([lse, lse * math.nan], -1).permute(2, 3, 1, 0).contiguous()[:, 0].permute(2, 1, 0)
    options = {"topk_length": lengths.T.contiguous().T}
    assert not (permuted.is_contiguous() or heads_first.is_contiguous() or options["topk_length"].is_contiguous())
    out = check(q, k, permuted, heads_first, **options)
    same_bits(out, htree_cuda.attn_dist(q, k, indices, lse, topk_length=lengths))
    one, one_lse, length = (
        indices[:1, :1].expand_as(indices),
        lse[:, :, :1].expand_as(lse),
        lengths[:, 2:3].expand(2, 5),
    )
    out = htree_cuda.attn_dist(q, k, one, one_lse, topk_length=length)
    same_bits(
        out, htree_cuda.attn_dist(q, k, *(x.contiguous() for x in (one, one_lse)), topk_length=length.contiguous())
    )


def test_expanded_views():
    q, k, indices, lse = problem(5, 64, 300, 70)
    k_all, q_all = k.expand(3, -1, -1, -1), q.expand(3, -1, -1, -1)
    out = htree_cuda.attn_dist(q_all, k_all, indices.repeat(3, 1, 1, 1), lse.repeat(3, 1, 1))
    for b in range(3):
        same_bits(out[b], htree_cuda.attn_dist(q, k, indices, lse))
    one = q[:1].expand(5, -1, -1)
    same_bits(htree_cuda.attn_dist(one, k, indices, lse), htree_cuda.attn_dist(one.contiguous(), k, indices, lse))
    row = k[:1].expand(300, -1, -1)
    same_bits(htree_cuda.attn_dist(q, row, indices, lse), htree_cuda.attn_dist(q, row.contiguous(), indices, lse))


@pytest.mark.emulated
def test_what_the_kernel_does_not_take_is_an_error():
    q, k, indices, lse = problem(3, 64, 50, 20, 128)
    wide = randn(3, 64, 132)
    for bad, message in (
        (lambda: (wide[..., :128], k), "strides of q"),
        (lambda: (q, randn(50, 1, 132)[..., :128]), "strides of k"),
        (lambda: (torch.empty(q.numel() + 1, dtype=BF16, device=DEVICE)[1:].view(q.shape), k), "16 bytes"),
        (lambda: (q[:, :1].expand(-1, 64, -1), k), "heads"),
        (lambda: (q[..., :64].contiguous(), k[..., :64].contiguous()), "d_qk"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            htree_cuda.attn_dist(*bad(), indices, lse)


# ---- surroundings ------------------------------------------------------------------------------------------


@pytest.mark.hardware
@pytest.mark.parametrize("h_q", [64, 128, 192])
def test_a_thousand_repeats(h_q):
    q, k, indices, lse = problem(300, h_q, 16384, 512, bad=True)
    first = htree_cuda.attn_dist(q, k, indices, lse)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        out = htree_cuda.attn_dist(q, k, indices, lse)
        different += (out.view(torch.int32) != first.view(torch.int32)).sum()
    assert int(different) == 0


@pytest.mark.hardware
def test_graph_capture_and_replay_with_changed_inputs():
    first, second = problem(40, 130, 900, 200, seed=1), problem(40, 130, 900, 200, seed=5, bad=True)
    held = [x.clone() for x in first]
    htree_cuda.attn_dist(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = htree_cuda.attn_dist(*held, q_start=300, k_stride=1)
    for inputs in (first, second, first):
        for x, y in zip(held, inputs, strict=True):
            x.copy_(y)
        graph.replay()
        same_bits(out, htree_cuda.attn_dist(*inputs, q_start=300, k_stride=1))


@pytest.mark.hardware
def test_streams_and_threads():
    problems = [problem(60, h_q, 2000, 300, seed=h_q) for h_q in (64, 128)]
    expected = [htree_cuda.attn_dist(*p) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    got = []
    for _ in range(5):
        for stream, p in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                got.append(htree_cuda.attn_dist(*p))
    torch.cuda.synchronize()
    for i, out in enumerate(got):
        same_bits(out, expected[i % 2])

    results = [None, None]

    def work(i):
        with torch.cuda.stream(streams[i]):
            results[i] = htree_cuda.attn_dist(*problems[i])
            streams[i].synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out, truth in zip(results, expected, strict=True):
        same_bits(out, truth)


@pytest.mark.emulated
@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed):
    """Heads, slots, lengths of nothing, the causal rule, silent heads, hostile indices and batches, all together."""
    r = random.Random(seed)
    batch = r.choice([(), (2,)])
    s_q, h_q = r.choice([1, 2, 3, 5, 9]), r.choice([1, 5, 16, 63, 64, 65, 100, 128, 129, 192])
    topk, s_kv = r.choice([1, 3, 4, 63, 64, 65, 127, 128, 129, 200, 256, 321]), r.choice([1, 7, 64, 300, 900])
    q, k, indices, lse = problem(
        s_q, h_q, s_kv, topk, r.choice([576, 128]), seed=seed, batch=batch, bad=r.random() < 0.6
    )
    options = {}
    if r.random() < 0.6:
        lengths = torch.randint(0, topk + 1, (*batch, s_q), generator=torch.Generator().manual_seed(seed))
        lengths[..., 0] *= r.choice([0, 1])
        options["topk_length"] = lengths.to(DEVICE, torch.int32)
    if r.random() < 0.4:
        options |= {"q_start": r.choice([0, 3, 200]), "k_stride": r.choice([1, 4])}
    if r.random() < 0.3:
        lse.view(-1)[::3] = math.inf
        lse.view(-1)[1::5] = -math.inf
    check(q, k, indices, lse, **options)


@pytest.mark.hardware
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    inputs = problem(20, 128, 500, 200)
    expected = htree_cuda.attn_dist(*inputs)
    other = [x.to("cuda:1") for x in inputs]
    assert torch.cuda.current_device() == 0
    out = htree_cuda.attn_dist(*other)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    same_bits(out.to("cuda:0"), expected)
    with pytest.raises(ValueError, match="device"):
        htree_cuda.attn_dist(inputs[0], other[1], inputs[2], inputs[3])


@pytest.mark.hardware
def test_compile_and_autocast():
    q, k, indices, lse = problem(20, 128, 500, 200)
    expected = htree_cuda.attn_dist(q, k, indices, lse)
    compiled = torch.compile(htree_cuda.attn_dist, fullgraph=True, dynamic=True)
    same_bits(compiled(q, k, indices, lse), expected)
    same_bits(compiled(q[:7], k, indices[:7], lse[:7]), htree_cuda.attn_dist(q[:7], k, indices[:7], lse[:7]))
    with torch.autocast("cuda", dtype=BF16):
        same_bits(htree_cuda.attn_dist(q.float(), k.float(), indices, lse), expected)


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [64, 128])
def test_wrong_answers_are_noticed(h_q):
    """The checks of this file fail on results that are a little wrong: they would notice."""
    q, k, indices, lse = problem(3, h_q, 600, 200)
    out = htree_cuda.attn_dist(q, k, indices, lse)
    truth = exact(q, k, indices, lse)
    allowed = baseline.attn_dist_arithmetic_bound(q, k, truth, lse)
    stale = out.clone()
    stale[:, 1, 64:128] = out[:, 1, :64]
    swapped = htree_cuda.attn_dist(q[:, torch.tensor([1, 0, *range(2, h_q)], device=DEVICE)], k, indices, lse)
    dropped = exact(q[:, 1:], k, indices, lse[:, 1:])
    for wrong in (stale, swapped, dropped if h_q == 64 else stale):
        assert ((wrong.double() - truth).abs() > allowed).any()
