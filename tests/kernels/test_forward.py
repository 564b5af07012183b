"""The htree forward kernels against the definition in float64: whole small problems, a few queries of large ones.

Selection and numbers are judged apart: the selection by its own rules (`baseline.check_selection`), the values with the
kernel's own selection given to the oracle, within twice the error of the baseline.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError, definition, kernels

from .. import baseline
from ..inputs import skip_what_is_not_built

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _kernels_are_built():
    """A Hopper GPU without kernels is a failure, not a skip."""
    kernels.load()


def inputs(T, T_q, *, B=1, H_kv=1, G=16, K=128, V=128, dtype=BF16, seed=0):
    """Drawn on the CPU, where the oracle runs; returned on both devices."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, T_q, H_kv * G, K), (B, T, H_kv, K), (B, T, H_kv, V)
    host = tuple(torch.randn(*shape, generator=g).to(dtype) for shape in shapes)
    return host, tuple(x.to(DEVICE, copy=True) for x in host)


def run(tensors, **options):
    return htree_cuda.forward(*tensors, return_lse=True, return_selection=True, **options)


def check(host, device, top_k, picks=None, share=0.99, selection_rules=True, **options):
    """Kernel against definition for the queries `picks` or slices of them (default: all), a walk of the oracle each."""
    q, k, v = host
    T, T_q = k.shape[1], q.shape[1]
    q_start = options.pop("q_start", T - T_q)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=top_k, q_start=q_start, **options))
    options = {"top_k_per_layer": top_k} | options
    exact_out, exact_lse, base_out, base_lse, shares = [], [], [], [], []
    parts = [slice(0, T_q)] if picks is None else [i if isinstance(i, slice) else slice(i, i + 1) for i in picks]
    for part in parts:
        options["q_start"] = q_start + part.start
        chosen = selection[:, :, part]
        exact = definition.forward(q[:, part], k, v, selection=chosen, **options)
        base = baseline.forward(q[:, part], k, v, chosen, **options)
        exact_out.append(exact.out), exact_lse.append(exact.lse)
        base_out.append(base.out), base_lse.append(base.lse)
        if selection_rules and selection.shape[0]:
            shares.append(baseline.check_selection(q[:, part], k, chosen, base.score_error, **options))
    exact_out, exact_lse, base_out, base_lse = (torch.cat(x, 1) for x in (exact_out, exact_lse, base_out, base_lse))
    out_part, lse_part = (torch.cat([x[:, part] for part in parts], 1) for x in (out, lse))
    baseline.assert_within("out", out_part, base_out, exact_out)
    baseline.assert_lse_within(lse_part, base_lse, exact_lse)
    assert not shares or sum(shares) / len(shares) >= share
    return out, lse, selection


def same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
        assert torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))


def check_one_query(one, whole, host, device, top_k, G, **options):
    """A call with one query equals it in a longer one up to rounding. With more than 8 heads scores are the same to the
    bit; with fewer, queries of a longer call rotate at the bottom by other instructions, and its error is bounded."""
    assert torch.equal(one[2], whole[2])
    torch.testing.assert_close(one[0], whole[0], atol=4e-3, rtol=2e-2)
    if G > 8:
        torch.testing.assert_close(one[1], whole[1], atol=1e-5, rtol=1e-5)
    else:
        check(host, device, top_k, share=0.9, **options)


# Queries share a warp where they have 8 heads or fewer, at the bottom four of them with 4 or fewer.
EITHER_WAY = pytest.mark.parametrize("G", [4, 7, 12])


# ---- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 255, 256, 257, 509])
def test_small_lengths(T, dtype):
    """One layer and the first length with two; enough numbers that the errors are no accident."""
    host, device = inputs(T, min(T, 40), B=16 if T < 20 else 1, G=8, dtype=dtype, seed=T)
    check(host, device, 16, share=0.95)


@pytest.mark.parametrize("T", [4095, 4096, 4097, 65535, 65537])
def test_three_and_four_layers(T):
    host, device = inputs(T, 4, G=3, K=64, V=64, seed=T)
    assert len(definition.layer_sizes(T, 16, 256)) == (2 if T < 4097 else 3 if T < 65537 else 4)
    check(host, device, 16, share=0.95)


@pytest.mark.parametrize("T", [8191, 8192, 8193])
def test_boundary_of_the_default_top_k(T):
    host, device = inputs(T, 2, seed=T)
    check(host, device, 512)


@pytest.mark.parametrize("T", [131071, 131072, 131073])
def test_large_boundary_of_the_default_top_k(T):
    host, device = inputs(T, 2, G=4, seed=T)
    check(host, device, 512)


@pytest.mark.emulated
@pytest.mark.parametrize(("q_start", "strict_causal"), [(8165, True), (9003, False)])
def test_many_candidates_in_an_entry_layer(q_start, strict_causal):
    """Eight times top_k; at 8,176 tokens their number passes a power of two. Parts have the bits of the whole."""
    G = 5 if strict_causal else 9
    (q, k, v), _ = inputs(q_start + 25, 25, G=G, K=64, V=64, seed=q_start)
    options = {"strict_causal": strict_causal}
    host, device = (q, k, v), tuple(x.to(DEVICE, copy=True) for x in (q, k, v))
    whole = check(host, device, 64, **options)
    for begin, end in ((0, 3), (5, 25), (12, 13), (11, 14)):
        part = (q[:, begin:end].contiguous().to(DEVICE), *device[1:])
        results = [x.cpu() for x in run(part, top_k_per_layer=64, q_start=q_start + begin, **options)]
        expected = [x[:, begin:end] for x in whole[:2]] + [whole[2][:, :, begin:end]]
        if end - begin == 1:
            check_one_query(results, expected, (q[:, begin:end], k, v), part, 64, G, q_start=q_start + begin, **options)
        else:
            same_bits(results, expected)


@pytest.mark.emulated
@pytest.mark.parametrize("case", ["one parent outweighs the others", "values that are not finite", "later tokens"])
@EITHER_WAY
def test_hostile_among_many_candidates_in_an_entry_layer(case, G):
    (q, k, v), _ = inputs(9016, 14, G=G, K=64, V=64, seed=11)
    if case == "one parent outweighs the others":  # of the nodes that are not selected little is left
        k[:, 1008:1024] = 4 * q[:, 5:6, 0].unsqueeze(2)
        check((q, k, v), tuple(x.to(DEVICE, copy=True) for x in (q, k, v)), 64, share=0.9)
        return
    before = [x.cpu() for x in run([x.to(DEVICE) for x in (q, k, v)], top_k_per_layer=64)]
    if case == "later tokens":
        k[:, 9010:], v[:, 9010:] = math.nan, math.inf
        after = [x.cpu() for x in run([x.to(DEVICE) for x in (q, k, v)], top_k_per_layer=64)]
        same_bits(
            [after[0][:, :8], after[1][:, :8], after[2][:, :, :8]],
            [before[0][:, :8], before[1][:, :8], before[2][:, :, :8]],
        )
    else:
        v[0, 777, 0, 3] = math.inf
        out, lse, selection = (x.cpu() for x in run([x.to(DEVICE) for x in (q, k, v)], top_k_per_layer=64))
        assert out[..., 3].isnan().all()  # every query attends the token, or a node that holds it
        out[..., 3] = before[0][..., 3]
        same_bits([out, lse, selection], before)


@pytest.mark.emulated
@pytest.mark.parametrize("strict_causal", [pytest.param(True, marks=pytest.mark.sample), False])
@pytest.mark.parametrize("G", [1, 3, 5, 16])
def test_groups_batches_and_heads(G, strict_causal):
    host, device = inputs(1021, 13, B=3, H_kv=3, G=G, K=64, V=64, seed=G)
    check(host, device, 16, picks=(0, 7, 12), strict_causal=strict_causal, share=0.95)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_head_dimensions(K, V, dtype):
    skip_what_is_not_built(K, V)
    host, device = inputs(1500, 25, G=8, K=K, V=V, dtype=dtype, seed=K + V)
    check(host, device, 32, picks=(0, 1, 11, 12, 24), share=0.95)


@pytest.mark.parametrize("top_k", [16, 32, 64, 128, 256])
def test_top_k(top_k):
    host, device = inputs(20000, 30, G=2, K=64, V=64, seed=top_k)
    check(host, device, top_k, q_start=19000, picks=(0, 29), share=0.95)


@pytest.mark.parametrize("strict_causal", [True, False])
@pytest.mark.parametrize(
    "T", [*(pytest.param(T, marks=pytest.mark.emulated) for T in (1, 17, 257, 4097)), 2, 256, 1021, 65537]
)
def test_one_query(T, strict_causal):
    """Split over the warps of a block: one to four layers, fewer parents than warps and more."""
    host, device = inputs(T, 1, B=2, H_kv=2, G=3, K=64, V=64, seed=T)
    check(host, device, 16, strict_causal=strict_causal, share=0.9)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_one_query_of_any_head_dimension(K, V, dtype):
    skip_what_is_not_built(K, V)
    host, device = inputs(5000, 1, G=16, K=K, V=V, dtype=dtype, seed=K + V)
    check(host, device, 32, share=0.95)


@pytest.mark.emulated
@pytest.mark.parametrize("G", [3, 9])
def test_one_query_repeats_and_agrees_with_prefill(G):
    host, (q, k, v) = inputs(6007, 2, H_kv=2, G=G, K=64, V=64)
    both = run((q, k, v), top_k_per_layer=16)
    one = run((q[:, 1:], k, v), top_k_per_layer=16)
    for _ in range(8):
        same_bits(run((q[:, 1:], k, v), top_k_per_layer=16), one)
    expected = [x[:, 1:] for x in both[:2]] + [both[2][:, :, 1:]]
    check_one_query(one, expected, (host[0][:, 1:], *host[1:]), (q[:, 1:], k, v), 16, G)


# Below the entry layer a call of few queries packs the parents that its lists name, one of many packs the layer. With
# top_k 16 up to 24 queries (two blocks) are few for the 388 parents of the bottom layer, one for the 25 of the next.
FEW = 6200


def odd_rows(x):
    """The same numbers in rows of three elements more, which begin at an odd one."""
    return torch.nn.functional.pad(x, (1, 2), value=math.nan)[..., 1:-2]


@pytest.mark.emulated
@pytest.mark.sample
@pytest.mark.parametrize("T_q", [1, 2, 3])
def test_few_queries(T_q):
    host, (q, k, v) = inputs(FEW, T_q, B=2, H_kv=2, G=3, K=64, V=64, seed=T_q)
    tree = (k.transpose(1, 2).contiguous().transpose(1, 2), v) if T_q == 2 else (odd_rows(k), odd_rows(v))
    check(host, (q, *tree), 16, strict_causal=T_q != 2, share=0.9)


@pytest.mark.emulated
def test_few_queries_equal_the_same_in_a_longer_call():
    """Bit for bit, a single query apart, from wherever k and v are read; whatever is packed for whom."""
    host, (q, k, v) = inputs(FEW, 30, H_kv=2, G=2, K=64, V=64)
    options = {"top_k_per_layer": 16}
    whole = run((q, k, v), **options)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    odd = [odd_rows(x) for x in (k, v)]
    for first, last, tree in ((28, 30, (k, v)), (0, 3, swapped), (9, 12, odd), (16, 30, (k, v))):
        start = FEW - 30 + first
        part = run((q[:, first:last], *tree), q_start=start, **options)
        same_bits(part[:2], [x[:, first:last] for x in whole[:2]])
        same_bits(part[2:], [whole[2][:, :, first:last]])
    one = run((q[:, 29:], k, v), **options)
    for tree in (swapped, odd):
        same_bits(run((q[:, 29:], *tree), **options), one)
    expected = [x[:, 29:] for x in whole[:2]] + [whole[2][:, :, 29:]]
    check_one_query(one, expected, (host[0][:, 29:], *host[1:]), (q[:, 29:], k, v), 16, G=2)


# Queries may take most of the parents that there are, half of them, or few. With top_k 16 they take all of 16 parents
# at the bottom up to token 256 and in layer 1 up to 4096, two thirds at 384 and 6144, half at 512 and 8192.
BORDERS = 8300


@pytest.mark.emulated
@pytest.mark.parametrize("q_start", [245, 500, 4085, 6133, 8181])
@pytest.mark.parametrize("T_q", [22, 1])
def test_lists_of_most_of_the_parents(q_start, T_q):
    start = q_start + 22 - T_q
    host, device = inputs(BORDERS, T_q, H_kv=2, G=3 if T_q > 1 else 16, K=64, V=64, seed=q_start)
    check(host, device, 16, q_start=start, strict_causal=q_start != 500, share=0.9)


@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["iid", "local", "skewed", "rising", "uneven"])
@pytest.mark.parametrize("q_start", [4090, 6121, 7000])
def test_which_parents_share_a_stage_leaves_no_trace(q_start, kind):
    """Windows of a call, whose blocks have other neighbours and other unions, bit for bit."""
    T_q = 41
    (q, k, v), _ = inputs(q_start + T_q, T_q, H_kv=2, G=11 if q_start == 6121 else 4, K=64, V=64, seed=q_start)
    g = torch.Generator().manual_seed(q_start)
    if kind == "local":  # neighbours select much the same
        for i in range(1, T_q):
            q[:, i] = 0.99 * q[:, i - 1] + 0.14 * q[:, i]
    elif kind == "skewed":  # the later half of the parents takes nearly all
        k[:, k.shape[1] // 2 :] *= 3
        q *= 2
    elif kind == "rising":  # maxima rise to the end
        k *= torch.linspace(0, 2, k.shape[1]).view(1, -1, 1, 1).to(k.dtype)
        k += q.float().mean((0, 1, 2)).to(k.dtype)
    elif kind == "uneven":  # keys that keep scales of their own
        places = torch.randperm(k.shape[1], generator=g)
        k[:, places[:20]] *= 2.0**-12
        k[:, places[20:50]] *= 40
    tree = k.to(DEVICE), v.to(DEVICE)
    whole = run((q.to(DEVICE), *tree), top_k_per_layer=16, q_start=q_start)
    for first, last in ((0, 9), (5, 30), (17, 41)):
        part = run((q[:, first:last].to(DEVICE), *tree), top_k_per_layer=16, q_start=q_start + first)
        same_bits(part, (whole[0][:, first:last], whole[1][:, first:last], whole[2][:, :, first:last]))


@pytest.mark.emulated
def test_calls_that_end_where_lists_begin_to_leave_more_out():
    """Bit for bit as in a call of all."""
    options = {"top_k_per_layer": 16}
    for q_start, ends in ((245, (256, 260)), (500, (512, 515)), (6130, (6144, 6149))):
        _, (q, k, v) = inputs(BORDERS, 25, H_kv=2, G=2, K=64, V=64, seed=q_start)
        whole = run((q, k, v), q_start=q_start, **options)
        for end in ends:
            for first, last in ((0, end - q_start), (end - q_start, 25)):
                part = run((q[:, first:last], k, v), q_start=q_start + first, **options)
                same_bits(part[:2], [x[:, first:last] for x in whole[:2]])
                same_bits(part[2:], [whole[2][:, :, first:last]])


@pytest.mark.emulated
@pytest.mark.parametrize("T_q", [13, 1])
@pytest.mark.parametrize(("T", "top_k", "left_out"), [(7000, 256, 150), (24000, 64, 27), (48000, 128, 45)])
def test_many_parents_left_out_at_once(T, top_k, left_out, T_q):
    """Runs of parents that nobody takes, at the bottom and in layer 1, in lists of most of the parents."""
    layer = 1 if T < 10000 else 2
    nodes = -(-T // 16**layer)
    hidden = torch.zeros(nodes, dtype=torch.bool)
    hidden[nodes // 3 : nodes // 3 + left_out] = True
    host, _ = inputs(T, T_q, G=2 if T_q > 1 else 16, K=64, V=64, seed=left_out)
    liked = torch.zeros(64)
    liked[26:32] = liked[58:64] = 1.5  # rotates least
    size = torch.where(hidden, -1.0, 1.0).repeat_interleave(16**layer)[:T, None]
    host = ((host[0] + liked).to(BF16), (host[1] + (size * liked)[None, :, None]).to(BF16), host[2])
    device = tuple(x.to(DEVICE, copy=True) for x in host)
    *_, selection = check(host, device, top_k, rope_base=1e8, share=0.9)
    assert not hidden[selection[layer - 1].flatten().long()].any()


@pytest.mark.emulated
def test_one_query_of_a_long_sequence_needs_little_workspace():
    """The pooled tree (18 MB here) and the parents that are selected; 272 MB would hold the bottom layer packed."""
    T = 1 << 20
    q = torch.empty(1, 1, 16, 64, dtype=BF16, device=DEVICE)
    k = torch.empty(1, 1, 1, 64, dtype=BF16, device=DEVICE).expand(1, T, 1, 64)
    params = htree_cuda.checks.tree.forward(
        q, k, k, q_start=None, compression_rate=16, top_k_per_layer=512, max_top_nodes=None, scale=None,
        rope_base=10000.0, strict_causal=True, backend="auto",
    )  # fmt: skip
    assert kernels.forward_workspace(q, k, k, params) < 30e6


@pytest.mark.hardware
def test_two_million_tokens():
    """Without overflow: the last queries of 2^21 + 5."""
    T = (1 << 21) + 5
    host, device = inputs(T, 13, G=2, K=64, V=64, seed=21)
    check(host, device, 512, picks=(slice(9, 13),))


@pytest.mark.hardware
def test_every_node_selected_is_dense_attention():
    """Queries before max_top_nodes select everything: the same bits whether or not a layer lies above."""
    _, (q, k, v) = inputs(8200, 8200, G=2, K=64, V=64)
    n = 512
    short = run((q[:, :n], k[:, :n], v[:, :n]))
    long = run((q, k, v))
    same_bits((long[0][:, :n], long[1][:, :n]), short[:2])


@pytest.mark.hardware
def test_agrees_with_the_torch_backend():
    _, device = inputs(6000, 6000, B=2, H_kv=2, G=4, K=64, V=64)
    mine = run(device, top_k_per_layer=64)
    theirs = run(device, top_k_per_layer=64, backend="torch")
    share = (mine[2] == theirs[2]).all(-1).float().mean()
    error = (mine[0].float() - theirs[0].float()).square().mean().sqrt() / theirs[0].float().square().mean().sqrt()
    assert share > 0.7 and error < 0.05, (share, error)
    equal = (mine[2] == theirs[2]).all(-1).all(0).repeat_interleave(4, -1)
    assert (mine[1] - theirs[1])[equal].abs().max() < 5e-3


# ---- hostile inputs ---------------------------------------------------------------------------------------------


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


# ---- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict_causal", [True, False])
@pytest.mark.parametrize(
    ("T", "parts"),
    [
        pytest.param(290, ((0, 2), (250, 290), (5, 290), (288, 290)), marks=pytest.mark.emulated),
        pytest.param(
            6007, ((0, 2), (0, 13), (255, 700), (4090, 4100), (5, 6007), (6005, 6007)), marks=pytest.mark.hardware
        ),
    ],
)
def test_any_split_of_the_queries_equals_the_whole(T, parts, strict_causal):
    """Bit for bit, a single query apart: its sums are split over warps."""
    _, (q, k, v) = inputs(T, T, H_kv=2, G=3, K=64, V=64)
    whole = run((q, k, v), top_k_per_layer=16, strict_causal=strict_causal)
    for first, last in parts:
        options = {"top_k_per_layer": 16, "strict_causal": strict_causal, "q_start": first}
        part = run((q[:, first:last], k, v), **options)
        same_bits(part[:2], [x[:, first:last] for x in whole[:2]])
        same_bits(part[2:], [whole[2][:, :, first:last]])


@pytest.mark.parametrize(
    ("T", "T_q", "top_k"),
    [
        pytest.param(700, 11, 16, marks=pytest.mark.emulated),  # one block of queries a head
        pytest.param(700, 31, 16, marks=pytest.mark.emulated),  # three, in pairs
        pytest.param(275, 37, 16, marks=pytest.mark.emulated),  # whose entry layers differ
        pytest.param(20000, 20000, 512, marks=pytest.mark.hardware),  # in chunks that begin within a head
    ],
)
def test_heads_do_not_depend_on_others(T, T_q, top_k):
    """Bit for bit, each as in a call of its own."""
    _, (q, k, v) = inputs(T, T_q, B=2, H_kv=3, G=3, K=64, V=64)
    whole = run((q, k, v), top_k_per_layer=top_k)
    for b in range(2):
        for head in range(3):
            group = slice(3 * head, 3 * head + 3)
            one = run(
                (q[b : b + 1, :, group], *(x[b : b + 1, :, head : head + 1] for x in (k, v))), top_k_per_layer=top_k
            )
            same_bits(one[:2], [x[b : b + 1, :, group] for x in whole[:2]])
            same_bits(one[2:], [whole[2][:, b : b + 1, :, head : head + 1]])


@pytest.mark.hardware
def test_several_chunks():
    """More queries than one chunk of the workspace holds, T_q not a multiple of anything."""
    _, (q, k, v) = inputs(40007, 40007, G=2, K=64, V=64)
    whole = run((q, k, v))
    for first in (0, 3168 * 2 - 5, 12000, 39000):
        part = run((q[:, first : first + 1007], k, v), q_start=first)
        same_bits(part[:2], [x[:, first : first + 1007] for x in whole[:2]])


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        pytest.param(300, (30, 256, 257), marks=pytest.mark.emulated),
        pytest.param(4200, (200, 257, 4096, 4097), marks=pytest.mark.hardware),
    ],
)
def test_the_first_tokens_do_not_depend_on_how_many_follow(most, lengths):
    """Also where a later token adds a layer: prefill and decoding agree."""
    _, (q, k, v) = inputs(most, most, G=2, K=64, V=64)
    long = run((q, k, v), top_k_per_layer=16)
    for T in lengths:
        short = run((q[:, :T], k[:, :T], v[:, :T]), top_k_per_layer=16)
        same_bits(short[:2], [x[:, :T] for x in long[:2]])


@pytest.mark.hardware
def test_repeats_are_bitwise_equal():
    _, device = inputs(5000, 3000, H_kv=2, G=16)
    first = run(device, top_k_per_layer=32)
    for _ in range(300):
        same_bits(run(device, top_k_per_layer=32), first)


# ---- surroundings -----------------------------------------------------------------------------------------------


@pytest.mark.emulated
def test_strided_views():
    _, (q, k, v) = inputs(1000, 100, B=2, H_kv=2, G=3, K=64, V=64)
    expected = run((q, k, v), top_k_per_layer=16)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    same_bits(run(swapped, top_k_per_layer=16), expected)
    same_bits(run([odd_rows(x) for x in (q, k, v)], top_k_per_layer=16), expected)
    one = k[:, :1].expand(-1, 1000, -1, -1)
    same_bits(run((q, one, v), top_k_per_layer=16), run((q, one.contiguous(), v), top_k_per_layer=16))


def test_every_output_is_written():
    _, (q, k, v) = inputs(3000, 50, B=2, H_kv=2, G=3, K=64, V=128)
    params = htree_cuda.checks.tree.forward(
        q, k, v, q_start=None, compression_rate=16, top_k_per_layer=16, max_top_nodes=None, scale=None,
        rope_base=10000.0, strict_causal=True, backend="auto",
    )  # fmt: skip
    expected = run((q, k, v), top_k_per_layer=16)
    poisoned = [torch.empty_like(x) for x in expected]
    workspace = torch.empty(kernels.forward_workspace(q, k, v, params), dtype=torch.uint8, device=DEVICE)
    for byte in (0xFF, 0x7F, 0):
        for x in (*poisoned, workspace):
            x.view(torch.uint8).fill_(byte)
        kernels.forward(q, k, v, *poisoned, workspace, params)
        same_bits(poisoned, expected)


@pytest.mark.emulated
@pytest.mark.parametrize(
    "rule", ["selection must be 16-byte aligned, got an address 4 bytes past", "the workspace must have"]
)
def test_what_a_launcher_refuses(rule):
    """Nothing is written then. Tensors that `forward` makes are neither, but the launcher has other callers."""
    _, (q, k, v) = inputs(600, 10, G=2, K=64, V=64)
    params = htree_cuda.checks.tree.forward(
        q, k, v, q_start=None, compression_rate=16, top_k_per_layer=16, max_top_nodes=None, scale=None,
        rope_base=10000.0, strict_causal=True, backend="auto",
    )  # fmt: skip
    outputs = [torch.full_like(x, -7) for x in run((q, k, v), top_k_per_layer=16)]
    workspace = torch.empty(kernels.forward_workspace(q, k, v, params), dtype=torch.uint8, device=DEVICE)
    out, lse, selection = outputs
    if rule.startswith("selection"):
        selection = torch.full((selection.numel() + 1,), -7, dtype=selection.dtype, device=DEVICE)[1:]
        assert selection.data_ptr() % 16 == 4
    else:
        workspace = workspace[:-1]
    with pytest.raises(ValueError, match=f"forward: {rule}"):
        kernels.forward(q, k, v, out, lse, selection, workspace, params)
    assert all((x == -7).all() for x in (out, lse, selection))


@pytest.mark.emulated
def test_zero_sizes():
    _, (q, k, v) = inputs(100, 10, G=2, K=64, V=64)
    for tensors in ((q[:, :0], k, v), (q[:0], k[:0], v[:0])):
        out, lse, _ = run(tensors, top_k_per_layer=16)
        assert out.shape == (*tensors[0].shape[:3], 64) and out.numel() == lse.numel() == 0


@pytest.mark.hardware
def test_streams_and_threads():
    _, device = inputs(3000, 500, G=4, K=64, V=64)
    expected = run(device, top_k_per_layer=16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run(device, top_k_per_layer=16)
    stream.synchronize()
    same_bits(result, expected)
    results = {}

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = run(device, top_k_per_layer=16)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results.values():
        same_bits(result, expected)


@pytest.mark.hardware
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    _, first = inputs(3000, 500, G=4, K=64, V=64)
    second = [x.to("cuda:1") for x in first]
    results = []
    for tensors in (first, second):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse, selection = run(leaves, top_k_per_layer=16)
        (out.float().square().sum() + lse.sum()).backward()
        assert torch.cuda.current_device() == 0
        assert {x.device for x in (out, lse, selection, *(x.grad for x in leaves))} == {tensors[0].device}
        results.append([x.detach().cpu() for x in (out, lse, selection, *(x.grad for x in leaves))])
    same_bits(*results)
    with pytest.raises(ValueError, match="device"):
        run((first[0], second[1], second[2]), top_k_per_layer=16)


@pytest.mark.hardware
def test_graph_capture_and_replay():
    _, (q, k, v) = inputs(2000, 200, G=4, K=64, V=64)
    run((q, k, v), top_k_per_layer=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run((q, k, v), top_k_per_layer=16)
    _, fresh = inputs(2000, 200, G=4, K=64, V=64, seed=5)
    for x, y in zip((q, k, v), fresh):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(result, run(fresh, top_k_per_layer=16))


@pytest.mark.hardware
def test_compile():
    _, device = inputs(1000, 100, G=4, K=64, V=64)
    compiled = torch.compile(lambda q, k, v: run((q, k, v), top_k_per_layer=16), fullgraph=True, backend="aot_eager")
    same_bits(compiled(*device), run(device, top_k_per_layer=16))


@pytest.mark.parametrize("strict_causal", [True, False])
@pytest.mark.parametrize(("T", "T_q", "K", "V", "dtype"), [(40, 40, 64, 64, BF16), (300, 14, 128, 64, FP16)])
def test_sanitizer_small_shapes(T, T_q, K, V, dtype, strict_causal):
    """One layer and two, a last block that is not full; every row of the outputs is read."""
    _, device = inputs(T, T_q, B=2, H_kv=2, G=3, K=K, V=V, dtype=dtype)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=16, strict_causal=strict_causal))
    assert out.isfinite().all() and lse.isfinite().all() and (selection >= -1).all()


@pytest.mark.emulated
def test_sanitizer_three_layers():
    _, device = inputs(4200, 3, G=2, K=64, V=64)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=16))
    assert out.isfinite().all() and lse.isfinite().all() and selection.shape[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16, q is torch.float32"),
        ({"K": 32}, "K .* 64 or 128, got 32"),
        ({"V": 96}, "V .* 64 or 128, got 96"),
        ({"G": 17}, "at most 16 query heads .* got 17"),
        ({"top_k_per_layer": 8}, "top_k_per_layer in 16 .. 512, got 8"),
        ({"top_k_per_layer": 1024}, "top_k_per_layer in 16 .. 512, got 1024"),
        ({"compression_rate": 8}, "compression_rate 16, got 8"),
        ({"max_top_nodes": 100}, "max_top_nodes = .*256.*, got 100"),
    ],
)
def test_what_is_not_supported_says_so(change, message):
    shape = {"G": 2, "K": 64, "V": 64} | {n: x for n, x in change.items() if n in ("G", "K", "V", "dtype")}
    _, device = inputs(20, 2, **shape)
    options = {"top_k_per_layer": 16} | {n: x for n, x in change.items() if n not in shape}
    with pytest.raises(UnsupportedError, match=rf'(?s)forward: .*{message}.*backend="torch"'):
        htree_cuda.forward(*device, **options)


def test_wrong_comes_before_unsupported():
    _, (q, k, v) = inputs(20, 2, G=2, K=64, V=64)
    with pytest.raises(ValueError, match="q_start must lie in 0"):
        htree_cuda.forward(q, k.transpose(1, 3).contiguous().transpose(1, 3), v, q_start=-1)
    with pytest.raises(UnsupportedError, match="last dimension of k contiguous"):
        htree_cuda.forward(q, k.transpose(1, 3).contiguous().transpose(1, 3), v)
