"""Pages of a cached tree: shared, copied, given back, too few; and any sequence of calls against a list of tokens."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from htree_cuda import TreeCache
from htree_cuda.torch_backend import decode

from ..cached import F64, check_rows, filled, int32, new_cache, queries, run, same_nodes, tokens

# --------------------------------------------------------------------------------------------------------------- pages


def test_shared_pages():
    """A common prefix is stored once, and each row has the results that it has with pages of its own."""
    prefix, ends = 512, (600, 512, 700)
    k, v = tokens(3, 800)
    k[1:, :prefix], v[1:, :prefix] = k[:1, :prefix], v[:1, :prefix]
    q = queries(3, 2)
    options = {"compression_rate": 4, "dtype": F64, "page_size": 256}
    apart = TreeCache(3, 800, 2, 8, 6, **options)
    apart.reserve(700)
    apart.append(k[:, :700], v[:, :700], seqused=int32(*ends))
    cache = TreeCache(3, 800, 2, 8, 6, num_pages=7, **options)
    cache.reserve([600, 0, 0])
    assert cache.free_pages == 4
    cache.append(k[:, :600], v[:, :600], seqused=int32(600, 0, 0))
    for row in (1, 2):
        cache.attach(row, cache.pages(0)[:2], prefix)
    assert cache.free_pages == 4 and cache.pages(1) == cache.pages(0)[:2]
    cache.reserve([0, 0, 188])
    assert cache.free_pages == 3
    cache.append(k[:, prefix:700], v[:, prefix:700], seqused=int32(0, 0, 188))
    cache.check()
    same_nodes(cache, apart, ends)
    assert all(torch.equal(x, y) for x, y in zip(run(q, cache), run(q, apart), strict=True))
    cache.reset(0)  # two of its pages are held by others
    assert cache.free_pages == 4
    check_rows(run(q, cache), q, k, v, (0, 512, 700))
    cache.reset([1, 2])
    assert cache.free_pages == 7


def test_no_more_is_attached_than_was_written():
    k, v = tokens(3, 310)
    cache = TreeCache(3, 800, 2, 8, 6, compression_rate=4, dtype=F64, page_size=256, num_pages=9)
    cache.reserve([800, 0, 0])
    cache.append(k[:, :300], v[:, :300], seqused=int32(300, 0, 0))
    pages = cache.pages(0)
    for length, message in (
        (512, "at most 300, the tokens .* have written .*, got 512"),
        (301, "at most 300, the tokens .* have written .*, got 301"),
        (513, "at most 300, the tokens .* have written .*, got 513"),
    ):
        with pytest.raises(ValueError, match=f"attach: length must be {message}"):
            cache.attach(1, pages[: -(-length // 256)], length)
    with pytest.raises(ValueError, match="attach: length must be at most 0, the tokens"):
        cache.attach(1, [pages[2], pages[0]], 300)
    assert cache.pages(1) == [] and cache.lengths.tolist() == [300, 0, 0]
    cache.attach(1, pages[:2], 300)
    cache.reset(0)  # what the second one holds is there still
    cache.attach(2, pages[:2], 300)
    q = queries(3, 2)
    check_rows(run(q, cache), q, k[[0, 0, 0]], v[[0, 0, 0]], (0, 300, 300))


def test_a_shared_page_is_copied_before_it_is_written():
    k, v = tokens(2, 800)
    other_k, other_v = tokens(2, 800, seed=4)
    q = queries(2, 2)
    cache = TreeCache(2, 800, 2, 8, 6, compression_rate=4, dtype=F64, page_size=256, num_pages=6)
    cache.reserve([700, 0])
    cache.append(k, v, seqused=int32(600, 0))
    cache.attach(1, cache.pages(0)[:2], 300)  # ends in the middle of its second page
    for row in (0, 1):
        used = int32(*(1 if b == row else 0 for b in range(2)))
        cache.append(other_k, other_v, seqused=used)
    assert cache.overflowed.bool().tolist() == [False, True], "no room before a page of its own is reserved"
    cache.truncate([600, 300])
    cache.reserve([0, 100])
    assert cache.pages(1)[0] == cache.pages(0)[0] and cache.pages(1)[1] not in cache.pages(0)
    cache.append(other_k[:, :100], other_v[:, :100], seqused=int32(0, 100))
    cache.check()
    joined = [x[[0, 0]].clone() for x in (k, v)]
    for x, y in zip(joined, (other_k, other_v)):
        x[1, 300:400] = y[1, :100]
    check_rows(run(q, cache), q, *joined, (600, 400))
    cache.truncate([100, 400])  # the owner's end comes to lie in a page that the other one holds
    cache.append(other_k[:, :1], other_v[:, :1], seqused=int32(1, 0))
    assert cache.overflowed.bool().tolist() == [True, False]
    cache.truncate(cache.lengths)
    cache.reserve([300, 0])
    assert set(cache.pages(0)) & set(cache.pages(1)) == set()
    cache.append(other_k[:, :300], other_v[:, :300], seqused=int32(300, 0))
    cache.check()
    for x, y in zip(joined, (other_k, other_v)):
        x[0, 100:400] = y[0, :300]
    check_rows(run(q, cache), q, *joined, (400, 400))


def test_pages_run_out():
    k, v = tokens(2, 310)
    cache = new_cache(2, page_size=256, num_pages=3)
    cache.append(k[:, :1], v[:, :1])
    assert cache.overflowed.all() and not cache.lengths.any(), "no page was reserved"
    cache.reset()
    with pytest.raises(RuntimeError, match="reserve: 4 pages are needed, 3 of 3 are free"):
        cache.reserve(300)
    assert cache.free_pages == 3 and not cache.reserved.any()
    cache.reserve([300, 200])
    cache.append(k[:, :300], v[:, :300], seqused=int32(300, 256))
    cache.append(k[:, :10], v[:, :10])
    assert cache.lengths.tolist() == [310, 256] and cache.overflowed.bool().tolist() == [False, True]
    cache.reset()
    cache.reserve([300, 100])
    cache.append(k[:, :300], v[:, :300], seqused=int32(300, 100))
    cache.reorder([0, 0])  # with the page that the second one loses
    cache.append(k[:, :10], v[:, :10])
    cache.check()
    assert cache.free_pages == 0 and len(set(cache.pages(0)) & set(cache.pages(1))) == 1
    few = new_cache(2, page_size=256, num_pages=2)
    few.reserve([300, 0])
    few.append(k[:, :300], v[:, :300], seqused=int32(300, 0))
    with pytest.raises(RuntimeError, match="reorder: 1 pages are needed, 0 are free"):
        few.reorder([0, 0])
    assert few.lengths.tolist() == [300, 0]


def test_a_table_of_the_caller():
    k, v = tokens(2, 310)
    q = queries(2, 2)
    table = int32(3, 0, 1, 2).view(2, 2)
    cache = new_cache(2, page_size=256, num_pages=4, block_table=table)
    assert cache.block_table is table
    cache.append(k[:, :300], v[:, :300], seqused=int32(300, 256))
    cache.check()
    check_rows(run(q, cache), q, k, v, (300, 256))
    table.copy_(table[[1, 0]].clone())
    cache.reorder([1, 0])
    assert torch.equal(run(q[[1, 0]], cache)[0], run(q, filled(k, v, (300, 256)))[0][[1, 0]])
    for call in (lambda: cache.reserve(1), lambda: cache.attach(0, [1], 5), lambda: cache.pages(0)):
        with pytest.raises(ValueError, match="must own its block_table, got a caller's"):
            call()


def test_states_of_other_caches_are_refused_before_anything_is_written():
    k, v = tokens(2, 310)
    own = filled(k, v, (300, 17), page_size=256)
    callers = new_cache(2, page_size=256, num_pages=4, block_table=int32(0, 1, 2, 3).view(2, 2))
    callers.append(k, v, seqused=int32(9, 8))
    state = own.state_dict()
    for cache, wrong, error, match in (
        (callers, state, ValueError, "the cache must count its pages, as the one of the state did, got a block_table"),
        (own, callers.state_dict(), ValueError, "pages of the state must be those of 2 sequences, got those of 0"),
        (own, None, TypeError, "the state must be a dict of state_dict of a TreeCache, got NoneType"),
        (own, {**state, "settings": None}, TypeError, "settings of the state must be a dict, got NoneType"),
        (own, {**state, "lengths": [1, 2]}, TypeError, "lengths of the state must be a torch.Tensor, got list"),
        (own, {**state, "k": state["k"][:1]}, ValueError, r"k of the state must have the shape \(4, .* got \(1, "),
        (own, {**state, "pages": [[0, 4], []]}, ValueError, "every page of the state must be at most 3, got 4"),
        (
            own,
            {**state, "pages": [[0, 1, 2], [3]]},
            ValueError,
            "sequence 0 of the state, of 300 tokens, must have at least 2 and at most 2",
        ),
        (
            own,
            {**state, "pages": [[0], [1]]},
            ValueError,
            "sequence 0 of the state, of 300 tokens, must have at least 2 and at most 2",
        ),
        (own, {**state, "pages": [[0, 0], [1]]}, ValueError, "pages of a sequence of the state must differ from each"),
        (own, {**state, "pages": None}, TypeError, "pages of the state must be a list, got NoneType"),
        (own, {**state, "pages": [1, 2]}, TypeError, "pages of a sequence of the state must be a list, got int"),
        (own, {**state, "lengths": state["lengths"].float()}, ValueError, "lengths of the state must be torch.int32"),
        (own, {**state, "lengths": int32(301, -1)}, ValueError, "lengths of the state must lie in 0 .. max_tokens"),
        (own, {**state, "lengths": int32(10**6, 0)}, ValueError, "lengths of the state must lie in 0 .. max_tokens"),
        (own, {**state, "k": state["k"].bool()}, ValueError, "k of the state must be torch.float64, got torch.bool"),
        (own, {**state, "k": state["k"].to_sparse()}, ValueError, "k of the state must be a dense"),
        (own, {**state, "k": state["k"].to("meta")}, ValueError, "k of the state must have values, got a meta tensor"),
    ):
        lengths, table = cache.lengths.tolist(), cache.block_table.tolist()
        with pytest.raises(error, match=f"load_state_dict: {match}"):
            cache.load_state_dict(wrong)
        assert (cache.lengths.tolist(), cache.block_table.tolist()) == (lengths, table)
    again = new_cache(2, page_size=256, num_pages=4, block_table=torch.zeros_like(callers.block_table))
    again.load_state_dict(callers.state_dict())
    q = queries(2, 2)
    assert torch.equal(run(q, again)[0], run(q, callers)[0])


# ------------------------------------------------------------------------------------------------ any sequence of calls


@st.composite
def programs(draw):
    page_size = draw(st.sampled_from([None, 256]))
    B = draw(st.integers(1, 3))
    row = st.integers(0, B - 1)
    number = st.one_of(st.integers(0, 6), st.integers(0, 300))
    calls = {
        "append": st.tuples(st.lists(number, min_size=B, max_size=B), st.integers(0, 2**20)),
        "truncate": st.lists(st.integers(0, 330), min_size=B, max_size=B),
        "reorder": st.lists(row, min_size=B, max_size=B),
        "reset": row,
        "clone": st.none(),
        "resize": st.integers(1, 700),
    }
    if page_size:
        calls["reserve"] = st.lists(number, min_size=B, max_size=B)
        calls["share"] = st.tuples(row, row, st.integers(1, 600))
    call = st.sampled_from(sorted(calls)).flatmap(lambda name: st.tuples(st.just(name), calls[name]))
    return page_size, B, draw(st.lists(call, min_size=1, max_size=12))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_any_sequence_of_calls(program):
    """Against a list of tokens for each sequence. An append that finds no room, whatever the reason, is seen in
    overflowed; then the model keeps what it had, too."""
    page_size, B, calls = program
    options = {"compression_rate": 4, "dtype": F64}
    cache = TreeCache(B, 310, 1, 2, 2, page_size=page_size, num_pages=page_size and 3 * B, **options)
    model = [torch.zeros(0, 2, dtype=F64) for _ in range(B)]
    for name, what in calls:
        if name == "append":
            counts, seed = what
            new = torch.randn(B, 300, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)
            if page_size and seed % 4 and all(len(x) + n <= cache.max_tokens for x, n in zip(model, counts)):
                with contextlib.suppress(RuntimeError):
                    cache.reserve(counts)
            if not page_size:
                full = [len(x) + n > cache.max_tokens for x, n in zip(model, counts)]
            cache.append(new[:, :, None], -new[:, :, None], seqused=int32(*counts))
            failed = cache.overflowed.bool().tolist()
            assert page_size or failed == full
            longer = [torch.cat((x, new[b, :n])) for b, (x, n) in enumerate(zip(model, counts))]
            model = [x if bad else y for x, y, bad in zip(model, longer, failed)]
            cache.truncate(cache.lengths)
        elif name == "truncate":
            cache.truncate(what)
            model = [x[:n] for x, n in zip(model, what)]
        elif name == "reorder":
            try:
                cache.reorder(what)
                model = [model[i] for i in what]
            except RuntimeError:
                assert page_size
        elif name == "reset":
            cache.reset(what)
            model[what] = model[what][:0]
        elif name == "clone":
            cache, old = cache.clone(), cache
            old._k.fill_(math.nan), old.lengths.zero_(), old.block_table.fill_(0)
        elif name == "resize":
            if max(map(len, model)) <= what:
                cache.resize(what)
        elif name == "reserve":
            if all(len(x) + n <= cache.max_tokens for x, n in zip(model, what)):
                try:
                    cache.reserve(what)
                    assert all(int(r) >= len(x) + n for r, x, n in zip(cache.reserved, model, what) if n)
                except RuntimeError as error:
                    assert "pages are needed" in str(error)
        elif name == "share":
            source, target, length = what
            length = min(length, len(model[source]))
            if source != target and length:
                cache.reset(target)
                cache.attach(target, cache.pages(source)[: -(-length // 256)], length)
                model[target] = model[source][:length]
        assert cache.lengths.tolist() == [len(x) for x in model]
        if page_size:
            held = [page for b in range(B) for page in cache.pages(b)]
            assert cache.free_pages == cache.num_pages - len(set(held))
    for b, x in enumerate(model):
        once = TreeCache(1, cache.max_tokens, 1, 2, 2, **options)
        once.append(x[None, :, None], -x[None, :, None])
        assert torch.equal(cache.k[b, : len(x), 0], x) and torch.equal(cache.v[b, : len(x), 0], -x)
        for layer in range(1, cache.num_layers):
            node = torch.arange(len(x) // 4**layer)[:, None]
            pair = []
            for c, i in ((cache, b), (once, 0)):
                rows, upper = decode._flat_rows(c._tensors(), c.layout, layer, torch.full_like(node, i), node * 0, node)
                pair.append([y[rows] for y in decode._buffers(c._tensors(), upper)])
            assert all(torch.equal(y, z) for y, z in zip(*pair))


def test_a_row_is_one_number():
    cache = new_cache(2, page_size=256)
    for call in (lambda: cache.pages([0, 0]), lambda: cache.attach([], [], 0)):
        with pytest.raises(TypeError, match="row must be an int, got"):
            call()
    with pytest.raises(ValueError, match=r"pages: row must lie in 0 .. batch_size - 1 \(1\), got 2"):
        cache.pages(2)
