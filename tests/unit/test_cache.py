"""A cached tree on the torch backend: what it stores, what it attends to, and what a caller can get wrong.

The oracle is the definition on the tokens of each sequence alone. The bits of the cache are judged by filling it in
other ways, and by the pooling op.
"""

from __future__ import annotations

import math
import time

import pytest
import torch

import htree_cuda
from htree_cuda import TreeCache, definition, forward_cached
from htree_cuda.torch_backend import decode

from ..cached import (
    F64,
    LENGTHS,
    PAGES,
    TREE,
    by_forward,
    check_rows,
    filled,
    int32,
    new_cache,
    nodes,
    queries,
    run,
    same_nodes,
    tokens,
)

# ------------------------------------------------------------------------------------------------- what it attends to


@PAGES
@pytest.mark.parametrize("T_q", [2, 9])
def test_equals_the_definition(T_q, page_size):
    lengths = (90, 17, 64, 1)
    k, v = tokens(len(lengths), 310)
    q = queries(len(lengths), T_q)
    cache = filled(k, v, lengths, page_size=page_size)
    check_rows(run(q, cache), q, k, v, lengths, oracle=definition.forward)


@PAGES
@pytest.mark.parametrize("T_q", [1, 3, 8, 9, 12])
def test_around_every_layer(T_q, page_size):
    k, v = tokens(len(LENGTHS), 310)
    q = queries(len(LENGTHS), T_q)
    check_rows(run(q, filled(k, v, LENGTHS, page_size=page_size)), q, k, v, LENGTHS)


@PAGES
@pytest.mark.parametrize("T_q", [4, 11])
def test_ragged_queries(T_q, page_size):
    lengths, used = (300, 2, 0, 64, 17, 256), (T_q, 3, 2, 0, 1, 5 if T_q > 5 else 4)
    k, v = tokens(6, 310)
    q = queries(6, T_q)
    results = run(q, filled(k, v, lengths, page_size=page_size), seqused_q=int32(*used))
    check_rows(results, q, k, v, lengths, used)


@PAGES
def test_rows_that_do_not_exist_may_lie_past_a_full_sequence(page_size):
    """Row j of a sequence of 310 tokens and no used row would be position 310 + j, of which nothing is stored."""
    lengths, used = (50, 310), (5, 0)
    k, v = tokens(2, 310)
    q = queries(2, 5)
    results = run(q, filled(k, v, lengths, page_size=page_size), seqused_q=int32(*used))
    check_rows(results, q, k, v, lengths, used)
    cache = TreeCache(2, 12, 1, 2, dtype=F64)
    k, v = (x[:, :, :1, :2] for x in tokens(2, 12))
    cache.append(k, v)
    q = queries(2, 5)[:, :, :1, :2]
    out = forward_cached(q, cache, seqused_q=int32(5, 0))
    torch.testing.assert_close(out[:1], htree_cuda.forward(q[:1], k[:1], v[:1]), atol=1e-12, rtol=0)
    assert not out[1].any()


@pytest.mark.parametrize("T_q", [2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, T_q):
    """The definition in float64 on what was stored; the backend accumulates in float32 and rounds the output."""
    lengths = (90, 17)
    k, v = tokens(2, 310, dtype=dtype)
    q = queries(2, T_q, dtype=dtype)
    cache = filled(k, v, lengths)
    out, lse, _ = run(q, cache)
    assert out.dtype == dtype and lse.dtype == torch.float32
    for b, n in enumerate(lengths):
        exact = definition.forward(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=4, **TREE)
        atol = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(out[b].double(), exact.out[0], atol=atol, rtol=0)
        torch.testing.assert_close(lse[b].double(), exact.lse[0], atol=1e-5, rtol=0)


def test_select():
    """A row of the new cache is a row of the old one, and goes its own way."""
    lengths = (300, 17, 64, 256)
    k, v = tokens(4, 310)
    cache = filled(k, v, lengths)
    expected = run(queries(4, 2), cache)
    for rows in ([3, 0, 0], int32(1), []):
        new, order = cache.select(rows), [int(i) for i in rows]
        assert new.batch_size == len(order) and new.lengths.tolist() == [lengths[i] for i in order]
        results = run(queries(4, 2)[order], new)
        assert torch.equal(results[0], expected[0][order]) and torch.equal(results[2], expected[2][:, order])
        new.append(*tokens(len(order), 10))
        assert cache.lengths.tolist() == list(lengths)
    assert torch.equal(run(queries(4, 2), cache)[0], expected[0])
    with pytest.raises(ValueError, match="select: the cache must have no pages, got page_size 256"):
        filled(k, v, lengths, page_size=256).select([0])
    with pytest.raises(ValueError, match="select: "):
        cache.select([4])


@pytest.mark.parametrize(
    "r, top_k, max_top_nodes", [(16, 2, None), (2, 2, 3), (16, 1, 16), (512, 2, None), (4, 64, None), (2, 1, 1)]
)
def test_other_trees(r, top_k, max_top_nodes):
    lengths = (300, 17, 256, 1)
    k, v = tokens(4, 310)
    q = queries(4, 2)
    options = {"top_k_per_layer": top_k, "max_top_nodes": max_top_nodes, "rope_base": 50.0, "scale": 0.7}
    layers = len(definition.layer_sizes(310, r, top_k * r if max_top_nodes is None else max_top_nodes))
    cache = filled(k, v, lengths, r=r, num_layers=max(layers, 2))
    out, lse, _ = run(q, cache, **options)
    for b, n in enumerate(lengths):
        count = min(n, 2)
        exact = by_forward(q[b : b + 1, 2 - count :], k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=r, **options)
        torch.testing.assert_close(out[b, 2 - count :], exact.out[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(lse[b, 2 - count :], exact.lse[0], atol=1e-12, rtol=0)


@PAGES
def test_prefill_then_steps_equal_one_forward(page_size):
    """A prefill by forward, its tokens appended, then steps and chunks of every kind."""
    k, v = tokens(1, 310)
    q = queries(1, 310)
    whole, whole_lse = htree_cuda.forward(q, k, v, compression_rate=4, return_lse=True, **TREE)
    cache = new_cache(1, page_size=page_size)
    cache.reserve(310)
    cache.append(k[:, :200], v[:, :200])
    done = 200
    for step in (1, 1, 2, 8, 9, 1, 40, 1, 47):
        part = slice(done, done + step)
        cache.append(k[:, part], v[:, part])
        out, lse, _ = run(q[:, part], cache)
        torch.testing.assert_close(out, whole[:, part], atol=1e-12, rtol=0)
        torch.testing.assert_close(lse, whole_lse[:, part], atol=1e-12, rtol=0)
        done += step
    assert done == 310


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_more_than_eight_queries_are_bitwise_the_forward(dtype):
    """Also where one query of them exists: it has the bits that it has in a call of several."""
    lengths, used = (300, 64, 1, 17), (12, 1, 1, 12)
    k, v = tokens(4, 310, dtype=dtype)
    q = queries(4, 12, dtype=dtype)
    out, lse, selection = run(q, filled(k, v, lengths), seqused_q=int32(*used))
    for b, (n, rows) in enumerate(zip(lengths, used)):
        mine = slice(0, rows)
        last = q[b : b + 1, mine]
        if rows == 1 and n > 1:  # the same query, behind another one
            last = torch.cat((q[b : b + 1, 5:6], last), 1)
        exact = by_forward(last, k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=4, **TREE)
        assert torch.equal(out[b, mine], exact.out[0, -rows:]) and torch.equal(lse[b, mine], exact.lse[0, -rows:])
        assert torch.equal(selection[: exact.selection.shape[0], b, mine], exact.selection[:, 0, -rows:])


@pytest.mark.parametrize("T_q", [3, 12])
def test_rotations(T_q, monkeypatch):
    """rope_inv_freq against the definition with such angles; the other options are permutations and zeros of it."""
    lengths = (300, 17)
    k, v = tokens(2, 310)
    q = queries(2, T_q)
    cache = filled(k, v, lengths)
    inv_freq = torch.tensor([1.0, 0.3, 0.02, 0.0], dtype=F64)

    def rope(x, positions, rope_base, inverse=False):
        angle = positions.double()[:, None] * inv_freq
        lo, hi = x.chunk(2, -1)
        return torch.cat((lo * angle.cos() - hi * angle.sin(), lo * angle.sin() + hi * angle.cos()), -1)

    with monkeypatch.context() as patch:
        patch.setattr(definition, "rope", rope)
        found = run(q, cache, rope_inv_freq=inv_freq)
        check_rows(found, q, k, v, lengths, oracle=definition.forward)
    pairs = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # halves made of neighbours
    back = pairs.argsort()
    mixed = filled(k[..., back], v, lengths)
    interleaved = run(q[..., back], mixed, rope_inv_freq=inv_freq, rope_interleaved=True)
    # Pairs (m, m + 2) of the first four elements, moved to where all eight are halves.
    moved = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    few = filled(k[..., moved], v, lengths)
    some = torch.tensor([1.0, 0.1, 0.0, 0.0], dtype=F64)
    for one, other in (
        (interleaved, found),
        (run(q, cache, rope_base=None), run(q, cache, rope_inv_freq=torch.zeros(4, dtype=F64))),
        (run(q, cache, rope_base=100.0), run(q, cache, rope_inv_freq=100.0 ** (-torch.arange(4, dtype=F64) / 4))),
        (run(q, cache, rope_base=100.0, rope_dim=4), run(q[..., moved], few, rope_inv_freq=some)),
    ):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


@pytest.mark.parametrize("T_q", [3, 12])
def test_sinks(T_q):
    lengths = (300, 17)
    k, v = tokens(2, 310)
    q = queries(2, T_q)
    cache = filled(k, v, lengths)
    out, lse, selection = run(q, cache)
    sink = torch.tensor([0.5, -3.0, 100.0, -math.inf], dtype=F64)
    with_sink = run(q, cache, attn_sink=sink)
    share = lse.exp() / (lse.exp() + sink.exp())
    torch.testing.assert_close(with_sink[0], out * share[..., None], atol=1e-12, rtol=0)
    torch.testing.assert_close(with_sink[1], lse, atol=1e-12, rtol=0)
    assert torch.equal(with_sink[2], selection)
    for options, message in (
        ({"attn_sink": sink.float()}, "attn_sink must be float64 where q is torch.float64, got torch.float32"),
        ({"attn_sink": sink[:2]}, r"dimension 0 of attn_sink must equal H of q \(4\), got 2"),
        ({"rope_dim": 3}, r"rope_dim must be even, 2 .. K \(8\), got 3"),
        ({"rope_inv_freq": torch.ones(3)}, r"dimension 0 of rope_inv_freq must equal rope_dim / 2 \(4\), got 3"),
        ({"rope_inv_freq": torch.ones(4), "rope_base": 5.0}, "which must be left alone, got 5.0"),
        ({"rope_inv_freq": torch.full((4,), math.nan)}, "rope_inv_freq must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            run(q, cache, **options)


def test_a_table_is_made_once():
    k, v = tokens(1, 100)
    cache = filled(k, v, (100,))
    q = queries(1, 1)
    frequencies = torch.ones(4)
    for _ in range(3):
        run(q, cache), run(q, cache, rope_inv_freq=frequencies), run(q, cache, rope_base=5.0)
    assert len(cache._rope_tables) == 3
    before = run(q, cache, rope_inv_freq=frequencies)[0]
    frequencies.mul_(0.5)  # another table
    assert not torch.equal(run(q, cache, rope_inv_freq=frequencies)[0], before) and len(cache._rope_tables) == 4


# ------------------------------------------------------------------------------------------------------ what it stores


@PAGES
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_however_it_was_filled(dtype, page_size):
    """Token by token, in chunks, at once: the same bits as the pooling op, and the same outputs."""
    lengths = (300, 256, 17, 0, 64)
    k, v = tokens(5, 310, dtype=dtype)
    q = queries(5, 2, dtype=dtype)
    once = filled(k, v, lengths, page_size=page_size)
    expected = run(q, once)
    for cuts in (range(1, 300), (1, 2, 17, 100, 101, 255), (64, 128, 192), (63, 65, 299)):
        cache = filled(k, v, lengths, cuts, page_size=page_size)
        same_nodes(cache, once, lengths)
        assert all(torch.equal(x, y) for x, y in zip(run(q, cache), expected, strict=True))
    for b, n in enumerate(lengths):
        if n == 0:
            continue
        pooled = torch.ops.htree_cuda.tree_pool(
            k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=4, max_top_nodes=1, backend="auto"
        )
        sizes = definition.layer_sizes(n, 4, 1)
        for stored, tokens_of, pool in zip(nodes(once, b, n), (k, v), pooled):
            layers = [tokens_of[b, :n], *pool[0].transpose(0, 1).split(sizes[1:])]
            whole = torch.cat([x[: n // 4**layer] for layer, x in enumerate(layers)])
            assert torch.equal(stored[: whole.shape[0]], whole) and stored.shape[0] == whole.shape[0]


@PAGES
def test_truncate_then_append(page_size):
    """As never having appended; by a tensor that is clamped, by one int, by a list."""
    lengths = (300, 256, 17, 5)
    k, v = tokens(4, 310)
    other_k, other_v = tokens(4, 310, seed=9)
    q = queries(4, 3)
    once = filled(k, v, lengths, page_size=page_size)
    for kept in (int32(100, 999, -5, 5), 16, [64, 0, 17, 4]):
        cache = filled(other_k, other_v, (310, 260, 17, 200), page_size=page_size)
        had = (310, 260, 17, 200)
        wanted = kept.tolist() if isinstance(kept, torch.Tensor) else [kept] * 4 if isinstance(kept, int) else kept
        cache.truncate(kept)
        kept = [min(max(0, n), most) for n, most in zip(wanted, had)]
        assert cache.lengths.tolist() == kept
        cache.truncate(0)
        if page_size:
            cache.reserve(list(lengths))
        cache.append(k[:, :300], v[:, :300], seqused=int32(*lengths))
        same_nodes(cache, once, lengths)
        assert all(torch.equal(x, y) for x, y in zip(run(q, cache), run(q, once), strict=True))
    kept = (250, 250, 16, 3)  # and from the middle
    cache.truncate(kept)
    position = torch.arange(310).expand(4, 310) + torch.tensor(kept)[:, None]
    rest = [x[torch.arange(4)[:, None], position.clamp(max=309)] for x in (k, v)]
    cache.append(*rest, seqused=int32(50, 6, 1, 2))
    same_nodes(cache, once, lengths)


@PAGES
def test_a_full_cache(page_size, monkeypatch):
    k, v = tokens(3, 330)
    q = queries(3, 2)
    options = {"page_size": page_size}
    cache = filled(k[:, :310], v[:, :310], (309, 300, 310), **options)
    before = [x.clone() for x in nodes(cache, 0, 309)]
    expected = run(q, cache)
    cache.append(k[:, :2], v[:, :2])  # no room in the first and the last
    assert cache.overflowed.bool().tolist() == [True, False, True] and cache.lengths.tolist() == [309, 302, 310]
    assert all(torch.equal(x, y) for x, y in zip(nodes(cache, 0, 309), before))
    cache.append(k[:, :1], v[:, :1])  # would fit in the first, which has lost two tokens
    assert cache.overflowed.bool().tolist() == [True, False, True] and cache.lengths.tolist() == [309, 303, 310]
    out, lse, selection = run(q, cache)
    assert out[[0, 2]].isnan().all() and lse[[0, 2]].isnan().all() and (selection[:, [0, 2]] == -1).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()
    out, lse, _ = run(torch.cat([q] * 5, 1), cache, seqused_q=int32(9, 9, 0))
    assert out[0, :9].isnan().all() and (out[0, 9:] == 0).all() and (out[2] == 0).all() and out[1].isfinite().all()
    with pytest.raises(RuntimeError, match=r"no room .* in the sequences \[0, 2\]"):
        cache.check()
    monkeypatch.setenv("HTREE_CUDA_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"in the sequences \[0, 2\]"):
        run(q, cache)
    monkeypatch.setenv("HTREE_CUDA_CHECK", "0")
    cache.truncate(cache.lengths)
    assert not cache.overflowed.any()
    out, lse, selection = run(q, cache)
    assert torch.equal(out[0], expected[0][0]) and torch.equal(lse[2], expected[1][2])
    cache.append(k[:, :1], v[:, :1], seqused=int32(1, 0, 0))
    assert cache.lengths.tolist() == [310, 303, 310]
    cache.append(k[:, :5], v[:, :5], seqused=int32(0, -3, 0))  # nothing is no overflow
    cache.check()


@PAGES
def test_reorder_reset_clone_resize(page_size):
    lengths = (300, 17, 64, 256)
    k, v = tokens(4, 310)
    q = queries(4, 2)
    cache = filled(k, v, lengths, page_size=page_size, num_pages=page_size and 16)
    expected = run(q, cache)
    copied = cache.clone()
    for order in ([3, 0, 0, 2], int32(1, 1, 1, 1)):
        cache = copied.clone()
        cache.reorder(order)
        order = [int(i) for i in order]
        assert cache.lengths.tolist() == [lengths[i] for i in order]
        results = run(q[order], cache)
        assert torch.equal(results[0], expected[0][order]) and torch.equal(results[2], expected[2][:, order])
        new = tokens(4, 10, seed=3)  # each goes its own way
        cache.reserve(10)
        cache.append(*new)
        cache.check()
        ends = [lengths[i] for i in order]
        joined = [torch.cat((x[order], torch.zeros_like(y)), 1) for x, y in zip((k, v), new)]
        for x, y in zip(joined, new):
            for b, end in enumerate(ends):
                x[b, end : end + 10] = y[b]
        check_rows(run(q, cache), q, *joined, [end + 10 for end in ends])
    assert all(torch.equal(x, y) for x, y in zip(run(q, copied), expected, strict=True))
    cache = copied
    cache.reset(1)
    assert cache.lengths.tolist() == [300, 0, 64, 256] and (run(q, cache)[0][1] == 0).all()
    cache.reset([1, 1, 2, 2])
    assert cache.lengths.tolist() == [300, 0, 0, 256]
    cache.truncate(torch.tensor([2**40, 0, -(2**40), 256]))
    assert cache.lengths.tolist() == [300, 0, 0, 256]
    cache.reset()
    assert cache.lengths.tolist() == [0] * 4 and cache.free_pages == (16 if page_size else 0)
    k, v = tokens(4, 700)
    cache = filled(k[:, :300], v[:, :300], lengths, page_size=page_size)
    cache.resize(700)
    grown = TreeCache(4, 700, 2, 8, 6, compression_rate=4, dtype=F64, page_size=page_size)
    assert (cache.max_tokens, cache.num_layers, cache.nbytes) == (700, 5, grown.nbytes)
    cache.reserve([400, 600, 400, 0])
    cache.append(k[:, 300:], v[:, 300:], seqused=int32(400, 0, 0, 0))
    cache.check()
    check_rows(run(q, cache), q, k, v, (700, 17, 64, 256))
    cache.truncate(290)
    cache.resize(300)
    check_rows(run(q, cache), q, k, v, (290, 17, 64, 256))
    with pytest.raises(ValueError, match="resize: max_tokens must be at least 290, got 280"):
        cache.resize(280)


@PAGES
@pytest.mark.parametrize("T_q", [2, 9])
def test_what_was_not_written_reaches_nothing(T_q, page_size):
    """NaN in every slot that holds no token and no complete node, and in free pages: the same bits."""
    lengths = (300, 17, 0, 255)
    k, v = tokens(4, 310)
    q = queries(4, T_q)
    clean = filled(k, v, lengths, page_size=page_size)
    expected = run(q, clean)
    cache = new_cache(4, page_size=page_size)
    for x in (cache._k, cache._v, cache._k_upper, cache._v_upper):
        x.fill_(math.nan)
    cache.reserve(list(lengths))
    cache.append(k, v, seqused=int32(*lengths))
    same_nodes(cache, clean, lengths)
    found = run(q, cache)
    assert cache._k.isnan().any() and all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    cache.truncate([256, 5, 0, 64])
    assert not any(x.isnan().any() for x in run(q, cache)[:2])


def test_garbage_in_lengths_and_tables():
    """Numbers without meaning, no fault: reads and writes stay in the pool."""
    k, v = tokens(3, 310)
    q = queries(3, 2)
    table = int32(*[5, -7, 2**31 - 1, 3, -(2**31), 0]).view(3, 2)
    cache = new_cache(3, page_size=256, num_pages=4, block_table=table)
    for lengths in ((10, -5, 2**31 - 1), (-(2**31), 309, 310), (300, 1, 0)):
        cache.lengths.copy_(int32(*lengths))
        cache.append(k[:, :3], v[:, :3], seqused=int32(2, 2**31 - 1, -4))
        for T_q in (1, 2):
            out, _, _ = run(q[:, :T_q], cache, seqused_q=int32(-1, 2**31 - 1, 2))
            assert out.shape == (3, T_q, 4, 6)
        cache.truncate(int32(2**31 - 1, -(2**31), 7))
    assert (cache.lengths >= 0).all() and (cache.lengths <= 310).all()
    assert torch.equal(table.view(-1), int32(5, -7, 2**31 - 1, 3, -(2**31), 0))
    plain = new_cache(3)
    plain.lengths.copy_(int32(-9, 2**31 - 1, 310))
    plain.append(k[:, :3], v[:, :3])
    assert plain.lengths.tolist() == [3, 310, 310] and plain.overflowed.bool().tolist() == [False, True, True]
    assert torch.cat([run(q, plain)[0]]).shape == (3, 2, 4, 6)


# ------------------------------------------------------------------------------------------- variants that must fail


def test_wrong_variants_fail(monkeypatch):
    """The checks above see an open node that is read, a node from the page beside, lengths raised before the write."""
    lengths = (300, 270)
    k, v = tokens(2, 310)
    q = queries(2, 2)

    def passes(page_size=256):
        cache = new_cache(2, page_size=page_size)
        for x in (cache._k, cache._v, cache._k_upper, cache._v_upper):
            x.fill_(0.5)
        cache.reserve(list(lengths))
        cache.append(k, v, seqused=int32(*lengths))
        check_rows(run(q, cache), q, k, v, lengths)

    passes()
    rows, importance, append = decode._flat_rows, decode._log_importance, decode.append

    class Open(decode._Candidates):
        def __init__(self, layer, n, node):
            super().__init__(layer, n, node)
            self.readable = self.valid

    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(decode, "_Candidates", Open)
        patch.setattr(decode, "_log_importance", lambda s, layer, strict_causal: importance(s, layer, False))
        passes()

    def neighbour(cache, layout, layer, b, h, node):
        found, upper = rows(cache, layout, layer, b, h, node)
        if layer == 0 or upper:
            return found, upper
        page = cache.k.shape[1] * layout.page_rows
        return (found + page) % (cache.k.shape[0] * page), upper

    def attend_to_the_neighbour(*arguments, **options):
        with monkeypatch.context() as inner:
            inner.setattr(decode, "_flat_rows", neighbour)
            return attend(*arguments, **options)

    attend = decode.forward_cached
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(decode, "forward_cached", attend_to_the_neighbour)
        passes()

    def raise_first(k, v, seqused, cache, layout):
        append(k, v, seqused, cache._replace(lengths=cache.lengths + 1), layout)
        cache.lengths.add_(seqused)

    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(decode, "append", raise_first)
        passes()


# ----------------------------------------------------------------------------------------------------- memory and time


@pytest.mark.parametrize("page_size", [None, 256, 4096])
def test_memory(page_size):
    """At most 1/15 above plain K and V, and 15 rows a layer; a table and three numbers for each sequence."""
    B, T, H_kv, D = 3, 131072, 2, 16
    cache = TreeCache(B, T, H_kv, D, dtype=torch.bfloat16, page_size=page_size, device="meta")
    row = 2 * H_kv * D * 2 * B
    small = 4 * 4 * B + cache.block_table.numel() * 4
    assert cache.nbytes <= row * T * (1 + 1 / 15) + 15 * row * cache.num_layers + small
    assert cache.nbytes >= row * T * (1 + 1 / 15) - row * 16


def test_a_step_does_not_grow_with_the_length():
    """top_k 32, on this machine: a step at T = 131,072 takes at most 1.6 times one at T = 16,384."""
    caches = {}
    for T in (16384, 131072):
        caches[T] = TreeCache(1, T + 8, 2, 32, dtype=torch.float32)
        caches[T].append(*(torch.randn(1, T, 2, 32) for _ in range(2)))
    q, new = torch.randn(1, 1, 8, 32), torch.randn(1, 1, 2, 32)
    threads, ratios = torch.get_num_threads(), []
    torch.set_num_threads(1)  # threads of a shared machine wait for each other
    try:
        for _ in range(5):
            seconds = {T: [] for T in caches}
            for _ in range(25):  # in alternation, so that both meet the same machine
                for T, cache in caches.items():
                    started = time.perf_counter()
                    cache.append(new, new)
                    forward_cached(q, cache, top_k_per_layer=32)
                    seconds[T].append(time.perf_counter() - started)
                    cache.truncate(T)
            ratios.append(min(seconds[131072]) / min(seconds[16384]))
            if ratios[-1] <= 1.6:
                return
    finally:
        torch.set_num_threads(threads)
    raise AssertionError(f"times {ratios} by the fastest of 25 steps, in each of 5 attempts")


# --------------------------------------------------------------------------------------------------------------- state


@PAGES
def test_state(page_size, tmp_path):
    lengths = (300, 17)
    k, v = tokens(2, 310)
    q = queries(2, 2)
    cache = filled(k, v, lengths, page_size=page_size)
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    new = new_cache(2, page_size=page_size)
    new.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
    assert all(torch.equal(x, y) for x, y in zip(run(q, new), run(q, cache), strict=True))
    new.append(k[:, :5], v[:, :5])
    new.check()
    assert new.lengths.tolist() == [305, 22] and cache.lengths.tolist() == [300, 17]
    with pytest.raises(
        ValueError, match=r"load_state_dict: the state must be what .* got none of \['settings', 'lengths'"
    ):
        new.load_state_dict({})
    with pytest.raises(ValueError, match="load_state_dict: settings must be those of this cache"):
        TreeCache(2, 311, 2, 8, 6, compression_rate=4, dtype=F64, page_size=page_size).load_state_dict(
            cache.state_dict()
        )


def test_what_it_says():
    cache = new_cache(2, page_size=256)
    assert repr(cache) == (
        "TreeCache(batch_size=2, max_tokens=310, n_kv_heads=2, head_dim=8, v_head_dim=6, compression_rate=4, "
        f"dtype=torch.float64, device='cpu', num_layers=5, page_size=256, num_pages=4, nbytes={cache.nbytes})"
    )
    k, v = tokens(2, 310)
    plain = filled(k, v, (310, 9))
    assert plain.k.shape == (2, 310, 2, 8) and torch.equal(plain.k[0], k[0]) and torch.equal(plain.v[1, :9], v[1, :9])
    assert plain.k.untyped_storage().data_ptr() == plain._k.untyped_storage().data_ptr(), "a view"
