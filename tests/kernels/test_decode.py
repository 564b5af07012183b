"""The kernels of a cached tree, append and decode, against the definition in float64.

As for the forward, selection and numbers are judged apart: the selection by its own rules, the values with the kernel's
own selection given to the oracle, within twice the error of the baseline, which is the forward's on the tokens of each
sequence. What the cache stores is judged by its bits, against the torch backend.
"""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import TreeCache, UnsupportedError, definition, forward_cached

from .. import baseline
from ..bits import same_bits
from ..cached import nodes, same_nodes
from ..unit.test_guides import DECODING, blocks

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"


def inputs(B, T, T_q, *, H_kv=1, G=4, D=64, dtype=BF16, seed=0):
    """q [B, T_q, H, D], k and v [B, T, H_kv, D], drawn on the CPU, where the oracle runs."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, T_q, H_kv * G, D), (B, T, H_kv, D), (B, T, H_kv, D)
    return tuple(torch.randn(*shape, generator=g).to(dtype) for shape in shapes)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def empty(k, max_tokens=None, **options):
    B, T, H_kv, D = k.shape
    return TreeCache(B, max_tokens or T, H_kv, D, dtype=k.dtype, device=DEVICE, **options)


def filled(k, v, lengths, *, cuts=(), max_tokens=None, backend="auto", poison=False, from_host=False, **options):
    """A cache of the first lengths[b] tokens of k, v, appended in one call or in calls that end at each of the cuts.
    `from_host`: what the kernels read comes from the host, as initcheck sees no store of PyTorch's kernels."""
    cache = empty(k, max_tokens, **options)
    if poison:
        for x in (cache._k, cache._v, cache._k_upper, cache._v_upper):
            x.fill_(math.nan)
    if cache.page_size and cache._owns_table:
        cache.reserve(list(lengths))
    if from_host:
        for x in (cache.lengths, cache.overflowed, cache._shared):
            x.copy_(torch.zeros(x.shape, dtype=x.dtype))
        cache.reserved.copy_(torch.full(cache.reserved.shape, cache.max_tokens, dtype=torch.int32))
        cache._rope_table(16, None, 10000.0, None, k.shape[3])
        for (positions, rope_base, rope_dim, *_), (table, _) in cache._rope_tables.items():
            options = {"positions": positions, "rope_base": rope_base, "rope_dim": rope_dim}
            table.copy_(torch.ops.htree_cuda.rope_table(k, None, **options))
    k, v = k.to(DEVICE), v.to(DEVICE)
    done = 0
    for cut in (*cuts, max(lengths)):
        used = int32(*(min(max(0, n - done), cut - done) for n in lengths))
        cache.append(k[:, done:cut], v[:, done:cut], seqused=used, backend=backend)
        done = cut
    cache.check()
    assert cache.lengths.tolist() == list(lengths)
    return cache


def shuffled(B, pages, seed=0):
    """A page table of the caller whose pages lie anywhere in a pool that is larger than needed."""
    order = torch.randperm(B * pages + 3, generator=torch.Generator().manual_seed(seed))[: B * pages]
    return {"block_table": order.to(torch.int32).view(B, pages).to(DEVICE), "num_pages": B * pages + 3}


@torch.no_grad()
def run(q, cache, top_k, **options):
    return forward_cached(q.to(DEVICE), cache, top_k_per_layer=top_k, return_lse=True, return_selection=True, **options)


def check(host, lengths, results, top_k, used=None, share=0.95, heads=None, picks=None, **options):
    """Every sequence (or `picks` of them) on its own tokens; queries without a key are empty."""
    q, k, v = host
    T_q = q.shape[1]
    out, lse, selection = (x.cpu() for x in results)
    options = {"top_k_per_layer": top_k, **options}
    exact_parts, base_parts, mine_parts, shares = [], [], [], []
    for b in range(len(lengths)) if picks is None else picks:
        n, rows = lengths[b], T_q if used is None else used[b]
        count = min(rows, n)
        for part in (slice(0, rows - count), slice(rows, T_q)):
            assert (out[b, part] == 0).all() and (lse[b, part] == -math.inf).all()
            assert (selection[:, b, part] == -1).all()
        if not count:
            continue
        mine = slice(rows - count, rows)
        tensors = q[b : b + 1, mine], k[b : b + 1, :n], v[b : b + 1, :n]
        layers = len(definition.layer_sizes(n, 16, top_k * 16))
        chosen = selection[: layers - 1, b : b + 1, mine]
        for layer in range(layers, selection.shape[0] + 1):  # those that are above this sequence
            for i in range(count):
                last = (n - count + i) // 16**layer
                wanted = torch.tensor([*range(last + 1), *[-1] * (top_k - last - 1)], dtype=torch.int32)
                assert (selection[layer - 1, b, mine][i] == wanted).all()
        exact = definition.forward(*tensors, selection=chosen, **options)
        base = baseline.forward(*tensors, chosen, **options)
        for parts, pair in ((exact_parts, (exact.out, exact.lse)), (base_parts, (base.out, base.lse))):
            parts.append([x.flatten(0, 2) if x.dim() == 4 else x.flatten() for x in pair])
        mine_parts.append([out[b, mine].flatten(0, 1), lse[b, mine].flatten()])
        if layers > 1:
            shares.append(baseline.check_selection(*tensors[:2], chosen, base.score_error, **options))
    (out, lse), (base_out, base_lse), (exact_out, exact_lse) = (
        [torch.cat(x) for x in zip(*parts)] for parts in (mine_parts, base_parts, exact_parts)
    )
    baseline.assert_within("out", out, base_out, exact_out)
    baseline.assert_lse_within(lse, base_lse, exact_lse)
    assert not shares or sum(shares) / len(shares) >= share


PAGES = pytest.mark.parametrize("page_size", [None, 256])


# ---- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T_q", [pytest.param(1, marks=pytest.mark.emulated), 3, 8])
@PAGES
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_small_lengths(dtype, page_size, T_q):
    """Around the first boundaries, in one batch; lengths of 0 among them."""
    lengths = (0, 1, 2, 15, 16, 17, 31, 100, 255, 256, 257, 272, 300, 0)
    host = inputs(len(lengths), 300, T_q, H_kv=2, G=4, dtype=dtype)
    cache = filled(*host[1:], lengths, page_size=page_size)
    check(host, lengths, run(host[0], cache, 16), 16, share=0.9)


@pytest.mark.parametrize("T_q", [pytest.param(1, marks=pytest.mark.emulated), 5])
@PAGES
@pytest.mark.parametrize(
    "lengths", [pytest.param((4095, 4096, 4097, 513, 300), marks=pytest.mark.emulated), (65535, 65536, 65537, 9000)]
)
def test_two_to_four_layers(lengths, page_size, T_q):
    host = inputs(len(lengths), max(lengths), T_q, G=3, seed=T_q)
    cache = filled(*host[1:], lengths, page_size=page_size, max_tokens=70000)
    check(host, lengths, run(host[0], cache, 16), 16, share=0.9)


@pytest.mark.parametrize("T_q", [1, 2])
@pytest.mark.parametrize("lengths", [(8191, 8192, 8193), (131071, 131073)])
def test_the_default_top_k(lengths, T_q):
    host = inputs(len(lengths), max(lengths), T_q, G=4, D=128, seed=T_q)
    check(host, lengths, run(host[0], filled(*host[1:], lengths), 512), 512)


@pytest.mark.parametrize(
    "G", [pytest.param(G, marks=pytest.mark.emulated) if G in (1, 5, 16) else G for G in range(1, 17)]
)
def test_groups(G):
    lengths = (1021, 700, 16)
    host = inputs(3, 1021, 2, H_kv=2, G=G, seed=G)
    check(host, lengths, run(host[0], filled(*host[1:], lengths), 16), 16, share=0.9)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("G", [4, 16])
def test_head_dimensions(D, G, dtype):
    lengths = (5000, 1500)
    host = inputs(2, 5000, 2, H_kv=2, G=G, D=D, dtype=dtype, seed=D)
    check(host, lengths, run(host[0], filled(*host[1:], lengths), 32), 32, share=0.9)


@pytest.mark.parametrize("top_k", [16, 32, 64, 128, 256, 512])
def test_top_k(top_k):
    lengths = (20000, 16 * top_k, 16 * top_k + 1, top_k)
    host = inputs(4, 20000, 2, G=2, seed=top_k)
    check(host, lengths, run(host[0], filled(*host[1:], lengths), top_k), top_k, share=0.9)


@pytest.mark.emulated
def test_one_query_and_several_of_a_large_top_k():
    """A CTA of 16 warps with one part, whose streams two warps share, and with as many parts as there are."""
    lengths = (4200,)
    host = inputs(1, 4200, 2, G=2, seed=5)
    cache = filled(*host[1:], lengths)
    out, lse, selection = run(host[0], cache, 256)
    check(host, lengths, (out, lse, selection), 256, share=0.9)
    same_bits(run(host[0][:, 1:], cache, 256), (out[:, 1:], lse[:, 1:], selection[:, :, 1:]))


@pytest.mark.parametrize("scale, rope_base", [(0.0, 10000.0), (-0.3, 50.0), (1.0, 1e6)])
def test_scale_and_base(scale, rope_base):
    lengths = (3000, 290)
    host = inputs(2, 3000, 2, H_kv=2, G=4)
    options = {"scale": scale, "rope_base": rope_base}
    check(host, lengths, run(host[0], filled(*host[1:], lengths), 16, **options), 16, share=0.0, **options)


@pytest.mark.emulated
@pytest.mark.sample
def test_tables_of_rotations(monkeypatch):
    """Angles that are given: those of rope_base have its bits, zeros are no rotation, whatever the base."""
    lengths = (700, 290)
    q, k, v = inputs(2, 700, 2, G=4)
    cache = filled(k, v, lengths)
    angles = 50.0 ** (-2.0 * torch.arange(32, dtype=torch.float64, device=DEVICE) / 64)
    same_bits(run(q, cache, 16, rope_inv_freq=angles), run(q, cache, 16, rope_base=50.0))
    none = run(q, cache, 16, rope_base=None)
    same_bits(run(q, cache, 16, rope_inv_freq=angles * 0), none)
    with monkeypatch.context() as patch:
        patch.setattr(definition, "rope", lambda x, positions, rope_base, inverse=False: x)
        check((q, k, v), lengths, none, 16, share=0.9)
    assert not torch.equal(none[0], run(q, cache, 16, rope_base=50.0)[0])


@pytest.mark.emulated
@PAGES
def test_ragged_queries(page_size):
    lengths, used = (700, 2, 0, 256, 300, 4097), (4, 4, 3, 0, 1, 2)
    host = inputs(6, 4097, 4, G=4)
    cache = filled(*host[1:], lengths, page_size=page_size)
    results = run(host[0], cache, 16, seqused_q=int32(*used))
    check(host, lengths, results, 16, used=used, share=0.9)


# ---- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "G, T, top_k",
    [
        pytest.param(4, 700, 16, marks=pytest.mark.emulated),
        pytest.param(16, 700, 16, marks=pytest.mark.emulated),
        (16, 4200, 16),
        (4, 40000, 64), (4, 9000, 512), (16, 20000, 512), (1, 70000, 32),
    ],
)  # fmt: skip
def test_a_position_has_the_same_bits_in_every_call(G, T, top_k):
    """In any T_q of 1 to 8, alone, in a batch and a crowd, in every layout of pages, whatever the room of the cache."""
    lengths = (T, T - 7, 300)
    q, k, v = inputs(3, T, 8, H_kv=2, G=G, seed=G)
    plain = filled(k, v, lengths)
    expected = run(q, plain, top_k)
    for T_q in range(1, 8):
        results = run(q[:, 8 - T_q :], plain, top_k)
        same_bits(results, (*(x[:, 8 - T_q :] for x in expected[:2]), expected[2][:, :, 8 - T_q :]))
    others = [
        {"page_size": 256}, {"page_size": 512, **shuffled(3, -(-T // 512))}, {"max_tokens": 2 * T + 5000},
        {"page_size": 4096, "max_tokens": 4096 * (-(-T // 4096))},
    ]  # fmt: skip
    for options in others:
        out, lse, selection = run(q, filled(k, v, lengths, **options), top_k)
        same_bits((out, lse, selection[: expected[2].shape[0]]), expected)
    for b, n in enumerate(lengths):
        alone = run(q[b : b + 1], filled(k[b : b + 1, :n], v[b : b + 1, :n], (n,)), top_k)
        layers = alone[2].shape[0]
        same_bits(alone, (expected[0][b : b + 1], expected[1][b : b + 1], expected[2][:layers, b : b + 1]))
    many = [0, 1, 2] * (5 if T > 1000 else 2)  # so many queries that a CTA takes two parts, where it may
    crowd = run(q[many], filled(k[many], v[many], [lengths[i] for i in many]), top_k)
    same_bits(crowd, (*(x[many] for x in expected[:2]), expected[2][:, many]))
    order = [2, 0, 1]
    swapped = filled(k[order], v[order], [lengths[i] for i in order])
    same_bits(run(q[order], swapped, top_k), (*(x[order] for x in expected[:2]), expected[2][:, order]))


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((300, 256, 17, 0, 64), marks=pytest.mark.emulated),
        pytest.param((4097, 4000, 1, 4096), marks=pytest.mark.emulated),
        (70000, 65536, 9, 65535),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_however_it_was_filled(lengths, dtype):
    """In chunks of any size, at once, in pages: the bits of the torch backend, and the same outputs."""
    most = max(lengths)
    q, k, v = inputs(len(lengths), most, 2, H_kv=2, dtype=dtype)
    wanted = filled(k, v, lengths, backend="torch")
    expected = run(q, wanted, 16)
    cuts = [(), (1, 2, 17, 100, 101, 255), tuple(range(256, most, 256)), (most // 3, most - 2)]
    if most <= 300:
        cuts.append(tuple(range(1, most)))
    for number, ends in enumerate(cuts):
        options = [{}, {"page_size": 256}, {"page_size": 256, **shuffled(len(lengths), -(-most // 256))}][number % 3]
        cache = filled(k, v, lengths, cuts=ends, **options)
        same_nodes(cache, wanted, lengths)
        same_bits(run(q, cache, 16), expected)


@PAGES
def test_long_appends(page_size):
    """Millions of elements, several layers at once, from a length that is no boundary."""
    lengths = (140000, 131072)
    _, k, v = inputs(2, 140000, 1, H_kv=2, D=128)
    wanted = filled(k, v, lengths, backend="torch")
    cache = filled(k, v, lengths, cuts=(333, 131071), page_size=page_size)
    same_nodes(cache, wanted, lengths)


@pytest.mark.emulated
@PAGES
def test_strided_tokens(page_size):
    """Tokens in any layout whose rows are contiguous, and at odd addresses."""
    _, k, v = inputs(2, 300, 1, H_kv=2)
    wanted = filled(k, v, (300, 40), page_size=page_size)
    k, v = k.to(DEVICE), v.to(DEVICE)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    odd = [torch.nn.functional.pad(x, (1, 2), value=math.nan)[..., 1:-2] for x in (k, v)]
    for pair in (swapped, odd):
        cache = empty(k, page_size=page_size)
        cache.reserve([300, 40])
        cache.append(*pair, seqused=int32(300, 40))
        same_nodes(cache, wanted, (300, 40))


@pytest.mark.emulated
@PAGES
def test_truncate_then_append(page_size):
    q, k, v = inputs(2, 700, 3, H_kv=2)
    other = inputs(2, 700, 1, H_kv=2, seed=8)[1:]
    wanted = filled(k, v, (700, 290), page_size=page_size)
    cache = filled(*other, (690, 700), page_size=page_size)
    cache.truncate(int32(0, 0))
    cache.reserve(700)
    cache.append(k[:, :400].to(DEVICE), v[:, :400].to(DEVICE), seqused=int32(400, 290))
    cache.append(other[0][:, :99].to(DEVICE), other[1][:, :99].to(DEVICE))
    cache.truncate(int32(400, 290))
    cache.append(k[:, 400:].to(DEVICE), v[:, 400:].to(DEVICE), seqused=int32(300, 0))
    cache.check()
    same_nodes(cache, wanted, (700, 290))
    same_bits(run(q, cache, 16), run(q, wanted, 16))


@pytest.mark.parametrize("lengths", [pytest.param((300, 17, 1), marks=pytest.mark.emulated), (9000, 4097, 1)])
@PAGES
def test_more_than_eight_queries_are_bitwise_the_forward(lengths, page_size):
    q, k, v = inputs(3, max(lengths), 12, H_kv=2)
    used = (12, 12, 1)
    out, lse, selection = run(q, filled(k, v, lengths, page_size=page_size), 16, seqused_q=int32(*used))
    for b, n in enumerate(lengths[:2]):
        tensors = [x.to(DEVICE) for x in (q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])]
        exact = htree_cuda.forward(*tensors, top_k_per_layer=16, return_lse=True, return_selection=True)
        layers = exact[2].shape[0]
        same_bits((out[b : b + 1], lse[b : b + 1], selection[:layers, b : b + 1]), exact)
    one = filled(k[:1], v[:1], lengths[:1])  # one query has the bits that it has among several
    alone = run(q[:1], one, 16, seqused_q=int32(1))
    two = torch.cat((q[:1, 3:4], q[:1, :1]), 1).to(DEVICE)
    exact = htree_cuda.forward(
        two, *(x[:1, : lengths[0]].to(DEVICE) for x in (k, v)), top_k_per_layer=16, return_lse=True
    )
    same_bits((alone[0][:, :1], alone[1][:, :1]), (exact[0][:, 1:], exact[1][:, 1:]))


@pytest.mark.parametrize("T", [pytest.param(330, marks=pytest.mark.emulated), 9000])
def test_prefill_then_steps_equal_one_forward(T):
    """Every position within twice the baseline, whichever call computed it."""
    first = T - 30
    host = inputs(1, T, T, G=4)
    q, k, v = (x.to(DEVICE) for x in host)
    cache = empty(host[1])
    cache.append(k[:, :first], v[:, :first])
    found, done = [], first
    for step in (1, 1, 3, 8, 9, 1, 7):
        part = slice(done, done + step)
        cache.append(k[:, part], v[:, part])
        found.append([x.cpu() for x in run(q[:, part], cache, 16)])
        done += step
    assert done == T
    results = [torch.cat([x[i] for x in found], 1 if i < 2 else 2) for i in range(3)]
    check((host[0][:, first:], *host[1:]), (T,), results, 16, share=0.9)


# ---- hostile ----------------------------------------------------------------------------------------------------


@pytest.mark.emulated
@PAGES
@pytest.mark.parametrize("T_q", [1, 4])
def test_what_was_not_written_reaches_nothing(T_q, page_size):
    """NaN in unwritten slots, in rows of nodes that are not complete and in free pages: the same bits."""
    lengths = (700, 17, 0, 255, 272)
    q, k, v = inputs(5, 700, T_q, H_kv=2)
    expected = run(q, filled(k, v, lengths, page_size=page_size), 16)
    cache = filled(k, v, lengths, page_size=page_size, poison=True)
    assert cache._k.isnan().any()
    same_bits(run(q, cache, 16), expected)
    cache.truncate(int32(690, 16, 0, 240, 256))
    assert run(q, cache, 16)[0].isfinite().all()


@pytest.mark.emulated
@PAGES
def test_forgotten_tokens_reach_nothing(page_size):
    """NaN and infinity in tokens that truncate forgot, and in their nodes."""
    lengths = (530, 33)
    q, k, v = inputs(2, 700, 2, H_kv=2)
    expected = run(q, filled(k, v, lengths, page_size=page_size), 16)
    k[0, 530:], v[0, 530:], k[1, 33:], v[1, 33:] = math.nan, math.inf, math.inf, math.nan
    cache = filled(k, v, (700, 700), page_size=page_size)
    cache.truncate(int32(*lengths))
    same_bits(run(q, cache, 16), expected)


@pytest.mark.emulated
def test_what_is_attended_and_not_finite():
    q, k, v = inputs(2, 700, 1, H_kv=2)
    before = [x.cpu() for x in run(q, filled(k, v, (700, 700)), 16)]
    v[0, 690, 0, 3] = math.inf
    k[1, 699, 1, 0] = math.nan
    out, lse, _ = (x.cpu() for x in run(q, filled(k, v, (700, 700)), 16))
    assert out[0, 0, :4, 3].isnan().all() and out[1, 0, 4:].isnan().all() and lse[1, 0, 4:].isnan().all()
    out[0, 0, :4, 3] = before[0][0, 0, :4, 3]
    assert torch.equal(out[0], before[0][0]) and torch.equal(out[1, 0, :4], before[0][1, 0, :4])


@pytest.mark.emulated
def test_large_numbers_and_ties():
    """Keys of 7e4, scores of thousands, all scores equal."""
    lengths = (700, 300)
    q, k, v = inputs(2, 700, 2, G=4)
    k[0, 100:160] *= 7e4
    check((q, k, v), lengths, run(q, filled(k, v, lengths), 16), 16, share=0.5)
    zero = torch.zeros_like(q)
    _, _, selection = run(zero, filled(k, v, lengths), 16)
    assert selection[0, 0, 1, 0].tolist() == [*range(15), 699 // 16], "ties go to the lower positions"


@pytest.mark.emulated
def test_garbage_in_lengths_and_tables():
    """Numbers without meaning: no fault and no hang, and the neighbours' pages alone may be written."""
    q, k, v = inputs(3, 310, 3)
    new = k[:, :3].to(DEVICE), v[:, :3].to(DEVICE)
    table = int32(5, -7, 2**31 - 1, 3, -(2**31), 0).view(3, 2)
    cache = empty(k, page_size=256, num_pages=4, block_table=table)
    plain = empty(k)
    for lengths in ((10, -5, 2**31 - 1), (-(2**31), 309, 310), (300, 1, 0)):
        for each in (cache, plain):
            each.lengths.copy_(int32(*lengths))
            each.append(*new, seqused=int32(2, 2**31 - 1, -4))
            for T_q in (1, 3):
                out, _, _ = run(q[:, :T_q], each, 16, seqused_q=int32(-1, 2**31 - 1, 2))
                assert out.shape == (3, T_q, 4, 64)
            each.truncate(int32(2**31 - 1, -(2**31), 7))
            assert (each.lengths >= 0).all() and (each.lengths <= 310).all()
    plain.reset()
    plain.lengths.copy_(int32(-9, 2**31 - 1, 310))
    plain.append(*new)
    assert plain.lengths.tolist() == [3, 310, 310] and plain.overflowed.bool().tolist() == [False, True, True]


@pytest.mark.emulated
@PAGES
def test_a_full_cache(page_size):
    """Nothing is written where not all fits; out and lse are NaN until truncate."""
    _, k, v = inputs(3, 310, 1, H_kv=2)
    q = inputs(3, 1, 2, H_kv=2, seed=2)[0]
    cache = filled(k, v, (309, 300, 310), page_size=page_size)
    before, expected = nodes(cache, 0, 309), run(q, cache, 16)
    new = k[:, :2].to(DEVICE), v[:, :2].to(DEVICE)
    cache.append(*new)
    cache.append(*(x[:, :1] for x in new))
    assert cache.overflowed.bool().tolist() == [True, False, True] and cache.lengths.tolist() == [309, 303, 310]
    assert all(torch.equal(x, y) for x, y in zip(nodes(cache, 0, 309), before))
    out, lse, selection = run(q, cache, 16, seqused_q=int32(1, 2, 2))
    assert out[0, :1].isnan().all() and lse[2].isnan().all() and (selection[:, [0, 2]] == -1).all()
    assert (out[0, 1:] == 0).all() and out[1].isfinite().all()
    with pytest.raises(RuntimeError, match=r"in the sequences \[0, 2\]"):
        cache.check()
    cache.truncate(cache.lengths)
    out, lse, _ = run(q, cache, 16)
    same_bits((out[0], lse[2]), (expected[0][0], expected[1][2]))


@pytest.mark.emulated
def test_pages():
    """A shared prefix, a reordered batch and a page that is copied before it is written: as without sharing."""
    ends = (600, 512, 540)
    q, k, v = inputs(3, 800, 2, H_kv=2)
    k[1:, :512], v[1:, :512] = k[:1, :512], v[:1, :512]
    expected = run(q, filled(k, v, ends), 16)
    cache = empty(k, page_size=256, num_pages=12)
    cache.reserve([600, 0, 0])
    cache.append(k[:, :600].to(DEVICE), v[:, :600].to(DEVICE), seqused=int32(600, 0, 0))
    for row in (1, 2):
        cache.attach(row, cache.pages(0)[:2], 512)
    cache.reserve([0, 0, 28])
    cache.append(k[:, 512:540].to(DEVICE), v[:, 512:540].to(DEVICE), seqused=int32(0, 0, 28))
    cache.check()
    wide = empty(k)  # of the same max_tokens, which decides how many layers a selection has
    wide.append(k.to(DEVICE), v.to(DEVICE), seqused=int32(*ends))
    same_nodes(cache, wide, ends)
    found = run(q, cache, 16)
    same_bits(found, run(q, wide, 16))
    same_bits(found[:2], expected[:2])
    cache.reorder([2, 0, 0])
    results = run(q[[2, 0, 0]], cache, 16)
    same_bits(results, (*(x[[2, 0, 0]] for x in found[:2]), found[2][:, [2, 0, 0]]))
    cache.append(k[:, 600:603].to(DEVICE), v[:, 600:603].to(DEVICE))
    cache.check()
    host = [torch.cat((x[[2, 0, 0]], torch.zeros_like(x[:, :3])), 1) for x in (k, v)]
    for x, y in zip(host, (k, v)):
        for b, end in enumerate((540, 600, 600)):
            x[b, end : end + 3] = y[b, 600:603]
    same_nodes(cache, filled(*host, (543, 603, 603), max_tokens=800), (543, 603, 603))


def test_what_the_kernels_do_not_cover():
    q, k, v = inputs(1, 100, 1)
    cache = filled(k, v, (100,))
    for call, message in (
        (lambda: run(q, cache, 8), "top_k_per_layer in 16 .. 512, got 8"),
        (lambda: run(q, cache, 16, max_top_nodes=64), "max_top_nodes = top_k"),
        (lambda: run(q, cache, 16, rope_dim=24), "rope_dim to be a multiple of 16, got 24"),
        (lambda: run(q.repeat(1, 1, 5, 1), cache, 16), "at most 16 query heads for each KV head"),
        (lambda: run(q, filled(k, v, (100,), compression_rate=4, backend="torch"), 16), "compression_rate 16, got 4"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call()
    out, _, _ = run(q, cache, 8, backend="torch")
    assert out.isfinite().all()


# ---- surroundings -----------------------------------------------------------------------------------------------


def step(q, k, v, cache, top_k=32):
    cache.append(k, v)
    return forward_cached(q, cache, top_k_per_layer=top_k, return_lse=True)


@pytest.mark.hardware
@pytest.mark.parametrize("page_size", [None, 4096])
def test_ten_thousand_replays_of_a_captured_step(page_size):
    """From 500 tokens, past the boundaries at 512 and 8,192: the bits of eager steps."""
    B, T, steps = 2, 500, 10_000
    _, k, v = inputs(B, T + steps, 1, H_kv=2)
    k, v = k.to(DEVICE), v.to(DEVICE)
    q = torch.randn(B, 1, 8, 64, device=DEVICE, dtype=BF16)
    caches = [empty(k, page_size=page_size) for _ in range(2)]
    for cache in caches:
        cache.reserve(T + steps)
        cache.append(k[:, :T], v[:, :T])
    captured, eager = caches
    new_q, new_k, new_v = (x[:, :1].clone() for x in (q, k, v))
    step(new_q, new_k, new_v, captured)
    captured.truncate(T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(new_q, new_k, new_v, captured)
    captured.truncate(T)
    wrong = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for i in range(steps):
        part = slice(T + i, T + i + 1)
        new_k.copy_(k[:, part]), new_v.copy_(v[:, part])
        new_q.copy_(q * (1 + 1e-3 * (i % 100)))
        graph.replay()
        expected = step(new_q, k[:, part], v[:, part], eager)
        for j, (x, y) in enumerate(zip(results, expected, strict=True)):
            wrong[j] += (x != y).any()
    assert wrong.tolist() == [0, 0]
    assert captured.lengths.tolist() == eager.lengths.tolist() == [T + steps] * B
    same_nodes(captured, eager, [T + steps] * B)


@pytest.mark.hardware
@PAGES
def test_no_synchronisation(page_size):
    q, k, v = (x.to(DEVICE) for x in inputs(2, 900, 3, H_kv=2))
    cache = filled(k.cpu(), v.cpu(), (300, 17), page_size=page_size)
    cache.reserve(100)
    used = int32(1, 2)
    step(q, k[:, :3], v[:, :3], cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for T_q in (1, 2, 3):
            step(q[:, :T_q], k[:, :T_q], v[:, :T_q], cache)
            cache.append(k[:, :3], v[:, :3], seqused=used)
            forward_cached(q, cache, seqused_q=used, top_k_per_layer=32)
            cache.truncate(cache.lengths - 1)
            cache.truncate(300)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.check()


@pytest.mark.hardware
def test_memory_of_a_step():
    """Nothing but out, lse and the op's own workspace, none of which grows with the tokens; a replay takes nothing."""
    peaks = []
    for T in (20_000, 200_000):
        _, k, v = inputs(1, T + 10, 1, H_kv=2)
        cache = filled(k, v, (T,))
        q, k, v = (x.to(DEVICE) for x in inputs(1, 1, 1, H_kv=2))
        step(q, k, v, cache)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(q, k, v, cache)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(q, k, v, cache)
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
    assert peaks[0] == peaks[1] <= 32 << 20


@pytest.mark.hardware
def test_the_first_call_of_a_cache_is_not_captured():
    q, k, v = (x.to(DEVICE) for x in inputs(1, 100, 1))
    cache = filled(k.cpu(), v.cpu(), (100,))
    with (
        pytest.raises(RuntimeError, match="call forward_cached once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        forward_cached(q, cache, top_k_per_layer=32)


@pytest.mark.hardware
def test_the_captured_step_of_the_guide():
    block = next(block for block in blocks(DECODING) if "CUDAGraph" in block)
    place = {"dtype": BF16, "device": DEVICE}
    cache = TreeCache(1, 600, 8, 128, **place)
    cache.append(torch.randn(1, 500, 8, 128, **place), torch.randn(1, 500, 8, 128, **place))
    q, k, v = (torch.randn(1, 1, heads, 128, **place) for heads in (32, 8, 8))
    variables = {"torch": torch, "htree_cuda": htree_cuda, "cache": cache, "length": 500}
    variables |= {"q_next": q, "k_next": k, "v_next": v}
    exec(compile(block, DECODING.name, "exec"), variables)
    torch.cuda.synchronize()
    assert cache.lengths.tolist() == [501] and variables["out"].isfinite().all()


@pytest.mark.hardware
def test_repeats_are_bitwise_equal():
    lengths = (20000, 9000)
    q, k, v = inputs(2, 20000, 2, H_kv=4, G=8, D=128)
    cache = filled(k, v, lengths)
    first = run(q, cache, 64)
    for _ in range(1000):
        same_bits(run(q, cache, 64), first)


@pytest.mark.hardware
def test_two_streams():
    """Two caches stepped at the same time, each with the bits that it has alone."""
    q, k, v = (x.to(DEVICE) for x in inputs(4, 9100, 1, H_kv=2))
    caches = [filled(k.cpu(), v.cpu(), (9000, 8000, 17, 300)) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = [[], [], []]
    for i in range(100):
        part = slice(9000 + i, 9001 + i)
        for cache, results, stream in zip(caches[:2], found, streams):
            with torch.cuda.stream(stream):
                results.append(step(q, k[:, part], v[:, part], cache, top_k=16))
    torch.cuda.synchronize()
    for i in range(100):
        part = slice(9000 + i, 9001 + i)
        found[2].append(step(q, k[:, part], v[:, part], caches[2], top_k=16))
    for results in zip(*found):
        same_bits(results[0], results[2])
        same_bits(results[1], results[2])


@pytest.mark.hardware
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    q, k, v = inputs(2, 700, 2, H_kv=2)
    results = []
    for device in ("cuda:0", "cuda:1"):
        cache = TreeCache(2, 700, 2, 64, dtype=BF16, device=device)
        cache.append(k.to(device), v.to(device))
        found = forward_cached(q.to(device), cache, top_k_per_layer=16, return_lse=True, return_selection=True)
        assert {x.device for x in found} == {cache.device} and torch.cuda.current_device() == 0
        results.append([x.cpu() for x in found])
    same_bits(*results)
    with pytest.raises(ValueError, match="device"):
        forward_cached(q.to("cuda:0"), cache, top_k_per_layer=16)


@pytest.mark.hardware
def test_compile():
    q, k, v = (x.to(DEVICE) for x in inputs(2, 400, 1, H_kv=2))
    caches = [filled(k.cpu(), v.cpu(), (300, 17), max_tokens=400) for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for i in range(20):
        part = slice(300 + i, 301 + i)
        found = compiled(q, k[:, part], v[:, part], caches[0])
        same_bits(found, step(q, k[:, part], v[:, part], caches[1]))
    same_nodes(*caches, caches[1].lengths.tolist())


@pytest.mark.parametrize("page_size", [None, 256])
def test_sanitizer_steps(page_size):
    """Ragged, paged, several layers; every row of the outputs is read."""
    lengths = (700, 17, 0, 256)
    q, k, v = inputs(4, 700, 3, H_kv=2)
    pages = shuffled(4, -(-700 // page_size)) if page_size else {}
    cache = filled(k, v, lengths, cuts=(5, 256, 600), page_size=page_size, **pages, from_host=True)
    for results in (run(q, cache, 16), run(q[:, :1], cache, 16)):
        out, lse, selection = (x.cpu() for x in results)
        assert out.isfinite().all() and not lse.isnan().any() and (selection >= -1).all()
