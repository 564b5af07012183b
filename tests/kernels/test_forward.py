"""The htree forward kernels against the definition in float64: whole small problems, a few queries of large ones.

Selection and numbers are judged apart: the selection by its own rules (`baseline.check_selection`), the values with the
kernel's own selection given to the oracle, within twice the error of the baseline.
"""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import definition, kernels

from ..bits import same_bits
from ..inputs import skip_what_is_not_built
from .forward_checks import BF16, EITHER_WAY, FP16, check, check_one_query, inputs, odd_rows, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


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
@pytest.mark.parametrize(
    ("G", "strict_causal"),
    [
        *(pytest.param(G, True, marks=pytest.mark.sample) for G in (1, 5, 16)),  # a kernel each
        *((3, True), (1, False), (3, False), (5, False), (16, False)),
    ],
)
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


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("G", "strict_causal", "dtype"),
    [(3, True, BF16), (4, False, BF16), (7, True, BF16), (8, False, BF16), (4, True, FP16), (8, True, FP16)],
)
def test_queries_that_share_a_warp_in_a_selected_layer_that_selects(G, strict_causal, dtype):
    """Three layers; neighbours that agree, others that do not, and the first query whose layer 1 is selected."""
    T, T_q, top_k = 4700, 31, 16
    (q, k, v), _ = inputs(T, T_q, G=G, K=64, V=64, dtype=dtype, seed=G)
    q[:, 8:20] = (q[:, 8:9].float() + 0.1 * q[:, 8:20].float()).to(q.dtype)
    for q_start in (4080, T - T_q):
        check((q, k, v), tuple(x.to(DEVICE, copy=True) for x in (q, k, v)), top_k, q_start=q_start, share=0.9,
              strict_causal=strict_causal)  # fmt: skip


# Below the entry layer a call of few queries packs the parents that its lists name, one of many packs the layer. With
# top_k 16 up to 24 queries (two blocks) are few for the 388 parents of the bottom layer, one for the 25 of the next.
FEW = 6200


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
@pytest.mark.parametrize("kind", ["iid", "local", "skewed", "rising", "uneven", "fp16"])
@pytest.mark.parametrize("q_start", [4090, 6121, 7000])
def test_which_parents_share_a_stage_leaves_no_trace(q_start, kind):
    """Windows of a call, whose blocks have other neighbours and other unions, bit for bit."""
    T_q = 41
    G, dtype = 11 if q_start == 6121 else 4, FP16 if kind == "fp16" else BF16
    (q, k, v), _ = inputs(q_start + T_q, T_q, H_kv=2, G=G, K=64, V=64, dtype=dtype, seed=q_start)
    g = torch.Generator().manual_seed(q_start)
    if kind in ("local", "fp16"):  # neighbours select much the same
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
