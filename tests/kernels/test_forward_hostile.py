"""Hostile inputs of the forward: ties, later tokens, numbers that are not finite, sizes of all kinds."""

from __future__ import annotations

import math

import pytest
import torch

from htree_cuda import definition

from .. import baseline
from ..bits import same_bits
from .forward_checks import BF16, EITHER_WAY, FP16, check, inputs, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.emulated
@pytest.mark.parametrize("zero", ["q", "k"])
def test_ties_go_to_the_lowest_positions(zero):
    host, device = inputs(2000, 16, G=5, K=64, V=64)
    for tensors in (host, device):
        tensors["qk".index(zero)].zero_()
    selection = run(device, top_k_per_layer=16)[2]
    t = torch.arange(1984, 2000, device=DEVICE)
    expected = torch.arange(15, device=DEVICE).repeat(16, 1)
    assert torch.equal(selection[0, 0, :, 0, :15].long(), expected)
    assert torch.equal(selection[0, 0, :, 0, 15].long(), t // 16)
    check(host, device, 16, picks=(0, 15), selection_rules=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e4])
def test_later_tokens_have_no_effect(bad):
    _, (q, k, v) = inputs(5003, 5003, B=2, G=3, K=64, V=64)
    before = run((q, k, v), top_k_per_layer=16)
    t = 3 * 1024 + 5
    for x in (q, k, v):
        x[:, t + 1 :] = bad
    after = run((q, k, v), top_k_per_layer=16)
    same_bits([x[:, : t + 1] for x in after[:2]], [x[:, : t + 1] for x in before[:2]])
    same_bits([after[2][:, :, : t + 1]], [before[2][:, :, : t + 1]])


@pytest.mark.emulated
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
@EITHER_WAY
def test_later_tokens_have_no_effect_on_some_queries(bad, G):
    _, (q, k, v) = inputs(1003, 40, G=G, K=64, V=64)
    before = run((q, k, v), top_k_per_layer=16, q_start=700)
    for x in (q[:, 21:], k[:, 721:], v[:, 721:]):
        x[:] = bad
    after = run((q, k, v), top_k_per_layer=16, q_start=700)
    same_bits([x[:, :21] for x in after[:2]], [x[:, :21] for x in before[:2]])
    same_bits([after[2][:, :, :21]], [before[2][:, :, :21]])


@pytest.mark.emulated
@pytest.mark.parametrize("size", [2.0**7, 2.0**13, 2.0**100])
@pytest.mark.parametrize("t", [100, 249, 603, 1004])
def test_later_siblings_of_any_size_have_no_effect(t, size):
    """Where a token's siblings are later ones, in the entry layer of a query (t < 256) and below it."""
    _, (q, k, v) = inputs(1100, 1100, G=3 if t % 2 else 10, K=64, V=64)
    q, options = q[:, t - 3 : t + 1], {"top_k_per_layer": 16, "q_start": t - 3}
    before = run((q, k, v), **options)
    k[:, t + 1 :] *= size
    same_bits(run((q, k, v), **options), before)


@pytest.mark.emulated
@pytest.mark.parametrize("T_q", [1, 2, 26])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_reach_their_dimension_alone(bad, T_q):
    """Selected or not: below the node, or in its mean."""
    _, (q, k, v) = inputs(3000, T_q, G=12 if math.isnan(bad) else 4, K=64, V=64)
    v[:, 1234, :, 9] = bad
    out, lse, _ = run((q, k, v), top_k_per_layer=16)
    assert out[..., 9].isnan().all() and lse.isfinite().all()
    assert out[..., :9].isfinite().all() and out[..., 10:].isfinite().all()


@pytest.mark.emulated
def test_nan_where_attended_ends_and_selects_distinct_candidates():
    _, (q, k, v) = inputs(3000, 100, G=4, K=64, V=64)
    k[:, 1234, :, 5] = math.nan
    v[:, 77, :, 9] = math.nan
    out, lse, selection = run((q, k, v), top_k_per_layer=16)
    assert out.isnan().all() and lse.isnan().all()
    row = selection[0, 0, :, 0]
    assert (row[:, 1:] > row[:, :-1]).all() and (row >= 0).all() and (row <= 3000 // 16).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("q_size", "k_size"), [(30.0, 30.0), (1.0, 1e-6), (1e-3, 1e4), (1e4, 1e-3)])
def test_large_and_small_numbers(q_size, k_size, dtype):
    """Logits of 1e3 and keys of 1e-6 and 1e4: powers of two keep them in range."""
    host, _ = inputs(1200, 12, G=4)
    host = (host[0] * q_size, host[1] * k_size, host[2])
    host = tuple(x.to(dtype) for x in host)
    # Scores of 1e-6 differ by less than float32 resolves in s - lse: their order is no rule there.
    check(host, tuple(x.to(DEVICE) for x in host), 16, share=0.0, selection_rules=k_size > 1e-6)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("spread", "of_siblings"), [(7, 1), (13, 1), (13, 16), (30, 16)])
@pytest.mark.parametrize("G", [8, 16])
def test_siblings_of_different_sizes(spread, of_siblings, dtype, G):
    """Keys, and nodes of the layer above, with and without a scale that all sixteen siblings share, in either walk."""
    g = torch.Generator().manual_seed(spread)
    host, _ = inputs(1100, 1100, G=G, K=64, V=64)
    falls = torch.randint(0, spread + 1, (-(-1100 // of_siblings),), generator=g)
    size = 2.0 ** (1 - falls.float()).repeat_interleave(of_siblings)[None, :1100, None, None]
    host = tuple(x.to(dtype) for x in (host[0], host[1] * size, host[2]))
    for q_start in (226, 1060):
        part = (host[0][:, q_start : q_start + 40], *host[1:])
        check(part, tuple(x.to(DEVICE) for x in part), 16, share=0.9, q_start=q_start)


@pytest.mark.emulated
@pytest.mark.parametrize("offsets", [(88.0,), (92.0,), (-88.0,), (-92.0,), (88.0, 92.0), (-88.0, 92.0, 0.0)])
@EITHER_WAY
def test_scores_far_from_zero(offsets, G):
    """Around 4096 in units of log(2), beyond which exponents are computed from differences of raw scores."""
    host, _ = inputs(900, 900, G=G, K=64, V=64)
    q, k, v = host
    q[..., EXACT] = 16.0
    k[..., EXACT] = torch.tensor(offsets)[torch.arange(900) % len(offsets)].to(BF16)[None, :, None, None]
    scores = 16 * 16.0 * max(offsets, key=abs) / 8 / math.log(2)
    assert 4040 < abs(scores) < 4300 and (abs(scores) > 4096) == (92.0 in map(abs, offsets))
    # Of several offsets the lower ones matter to no result, and their order follows from sums that underflow.
    rules = len(offsets) == 1
    options = {"share": 0.9 if rules else 0.0, "selection_rules": rules, "rope_base": EXACT_BASE}
    for q_start in (236, 860):
        part = (q[:, q_start : q_start + 40], k, v)
        check(part, tuple(x.to(DEVICE) for x in part), 16, q_start=q_start, **options)


@pytest.mark.emulated
@pytest.mark.parametrize("of_siblings", [1, 16])
@pytest.mark.parametrize("G", [7, 16])
def test_keys_of_which_maxima_rise_and_do_not(of_siblings, G):
    """Logits of up to 6, 34 and 112, one after another, among siblings and among parents."""
    g = torch.Generator().manual_seed(of_siblings)
    q, k, v = inputs(1100, 1100, G=G, K=64, V=64)[0]
    sizes = torch.tensor([1.0, 6.0, 20.0])[torch.randint(0, 3, (-(-1100 // of_siblings),), generator=g)]
    k = (k * sizes.repeat_interleave(of_siblings)[None, :1100, None, None]).to(BF16)
    for q_start in (226, 1060):
        part = (q[:, q_start : q_start + 40], k, v)
        check(part, tuple(x.to(DEVICE) for x in part), 16, share=0.9, q_start=q_start)


@pytest.mark.emulated
@pytest.mark.parametrize("offset", [-4.75, 4.75, 5.5, -5.5])
def test_all_scores_of_forty(offset):
    """Exponentials of 2^55, 2^63 and the inverse where no maximum is taken off, of values as large and as small."""
    q, k, v = inputs(900, 900, G=12 if abs(offset) > 5 else 4, K=64, V=64)[0]
    q[..., EXACT], k[..., EXACT] = 4.0, offset
    v = v * 2.0 ** (60.0 if offset > 0 else -60.0)
    for q_start in (236, 860):
        part = (q[:, q_start : q_start + 40] / 8, k / 2, v)
        part[0][..., EXACT], part[1][..., EXACT] = 4.0, offset
        check(part, tuple(x.to(DEVICE) for x in part), 16, share=0.9, q_start=q_start, rope_base=EXACT_BASE)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_first_token_attends_itself_alone(dtype):
    _, (q, k, v) = inputs(40, 40, G=3, K=64, V=64, dtype=dtype)
    out, lse, _ = run((q, k, v), top_k_per_layer=16)
    same_bits([out[:, 0]], [v[:, 0].repeat_interleave(3, 1)])
    assert lse.isfinite().all()


EXACT = slice(16, 32)
EXACT_BASE = 1e30  # pair m = 16 of 32 rotates by p * 1e-15


def exact_inputs(T, T_q, q_size, k_size, *, G, dtype, signs=(-1, 1), seed=0):
    """Rows whose scores are exact, ties included: small whole numbers times powers of two in the dimensions `EXACT`,
    which a rope_base of `EXACT_BASE` does not rotate, and zeros elsewhere."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.zeros(1, T_q, G, 64), torch.zeros(1, T, 1, 64)
    q[..., EXACT] = torch.randint(1, 4, (1, T_q, G, 16), generator=g).float() * 2.0**q_size
    sign = torch.tensor(signs)[torch.randint(0, len(signs), (1, T, 1, 16), generator=g)]
    k[..., EXACT] = torch.randint(1, 3, (1, T, 1, 16), generator=g) * sign * 2.0**k_size
    v = torch.randn(1, T, 1, 64, generator=g)
    host = tuple(x.to(dtype) for x in (q, k, v))
    assert all(x.isfinite().all() for x in host)
    return host, tuple(x.to(DEVICE, copy=True) for x in host)


@pytest.mark.parametrize("strict_causal", [True, False])
@pytest.mark.parametrize(
    ("T", "q_size", "k_size", "dtype"),
    [
        (1200, 14, 13, FP16),  # scores of 1e9: a rounding of them is 32 to 64
        (1200, 0, 0, FP16),
        pytest.param(1200, 40, 60, BF16, marks=pytest.mark.emulated),
        pytest.param(1200, -118, 118, BF16, marks=pytest.mark.emulated),  # raw products times the largest keys' scales
        pytest.param(1200, -112, 122, BF16, marks=pytest.mark.emulated),
        pytest.param(250, -126, 126, BF16, marks=pytest.mark.emulated),  # means of these would overflow
        pytest.param(1200, 124, -118, BF16, marks=pytest.mark.emulated),  # the largest units of queries
        pytest.param(
            1200, 20, -129, BF16, marks=pytest.mark.emulated
        ),  # subnormal keys: every score equal but for what float32 resolves
    ],
)
def test_scores_of_any_size(T, q_size, k_size, dtype, strict_causal):
    """Exact scores up to the end of float32's range, ties included: only the float32 steps after them may err."""
    host, device = exact_inputs(T, 12, q_size, k_size, G=4 if strict_causal else 10, dtype=dtype, seed=abs(q_size))
    # Most importance is below 2^-100 of the largest where scores are large: its order is free, so no share is asked.
    options = {"rope_base": EXACT_BASE, "strict_causal": strict_causal}
    check(host, device, 16, share=0.0, selection_rules=q_size + k_size > -20, **options)


@pytest.mark.emulated
@pytest.mark.parametrize("k_size", [60, 62])
def test_scores_far_below_zero_are_leaves(k_size):
    """A score of -1e37 is a leaf like any other where all are as low."""
    host, device = exact_inputs(1200, 12, 58, k_size, G=k_size // 6, dtype=BF16, signs=(-1,))
    exact = definition.forward(*host, top_k_per_layer=16, rope_base=EXACT_BASE)
    assert exact.lse.max() < -1e34
    check(host, device, 16, share=0.0, rope_base=EXACT_BASE)


@pytest.mark.emulated
def test_means_that_overflow_matter_as_leaves_alone():
    """bf16 tokens of 2^124 have infinite means: an expanded node's is never touched, a leaf's is NaN where it is."""
    top_k, T, T_q = 16, 1200, 12
    host, device = exact_inputs(T, T_q, 0, -4, G=4, dtype=BF16)
    first, hostile = slice(3 * 16, 4 * 16), slice(40 * 16, 41 * 16)
    for _, k, v in (host, device):
        k[:, first, :, EXACT] = 8.0  # what outweighs the tokens of the hostile node, and comes before it
        k[:, hostile, :, EXACT] = 6.0
        v[:, hostile, :, ::2] = 1.5 * 2.0**124
    out, lse, selection = check(host, device, top_k, share=0.95, rope_base=EXACT_BASE)
    assert (selection[0] == 40).any(-1).all() and out.isfinite().all() and lse.isfinite().all()

    for _, k, _ in (host, device):
        k[:, hostile, :, EXACT] = -6.0
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=top_k, rope_base=EXACT_BASE))
    exact = definition.forward(*host, selection=selection, top_k_per_layer=top_k, rope_base=EXACT_BASE)
    assert not (selection[0] == 40).any() and exact.out[..., ::2].isnan().all()
    assert out[..., ::2].isnan().all() and lse.isfinite().all()
    assert baseline.row_errors(out[..., 1::2], exact.out[..., 1::2])[1] < 0.01


@pytest.mark.emulated
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3])
def test_scales(scale):
    host, device = inputs(900, 8, G=4, K=64, V=64)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=16, scale=scale))
    exact = definition.forward(*host, selection=selection, top_k_per_layer=16, scale=scale)
    assert baseline.row_errors(out, exact.out)[1] < 0.01
    assert (lse - exact.lse).abs().max() < 0.01


@pytest.mark.emulated
def test_non_strict_importance_does_not_underflow():
    """A rightmost node that outweighs everything else by e^500 leaves the order of the others exact."""
    host, device = inputs(2000, 3, G=4, K=64, V=64)
    for tensors in (host, device):
        tensors[1][:, 1984:] = tensors[0][:, 2:3, :1] * 60.0
    check(host, device, 16, strict_causal=False, picks=(2,), share=0.9)
