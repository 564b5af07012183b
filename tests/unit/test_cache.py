"""A cached tree on the torch backend: what it stores, what it attends to, and what a caller can get wrong.

The oracle is the definition on the tokens of each sequence alone. The bits of the cache are judged by filling it in
other ways, and by the pooling op.
"""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import TreeCache, definition, forward_cached
from htree_cuda.torch_backend import decode

F64 = torch.float64
TREE = {"top_k_per_layer": 4}
LENGTHS = (0, 1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300)


def tokens(B, T, H_kv=2, K=8, V=6, dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, T, H_kv, D, generator=g, dtype=F64).to(dtype) for D in (K, V))


def queries(B, T_q, H=4, K=8, dtype=F64, seed=1):
    return torch.randn(B, T_q, H, K, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def new_cache(B, max_tokens=310, *, page_size=None, dtype=F64, r=4, **options):
    return TreeCache(B, max_tokens, 2, 8, 6, compression_rate=r, dtype=dtype, page_size=page_size, **options)


def filled(k, v, lengths, cuts=(), **options):
    """A cache of the first lengths[b] tokens, appended in one call or in calls that end at each of the cuts."""
    cache = new_cache(k.shape[0], dtype=k.dtype, **options)
    if cache.page_size:
        cache.reserve(list(lengths))
    done = 0
    for cut in (*cuts, max(lengths)):
        used = int32(*(min(max(0, n - done), cut - done) for n in lengths))
        cache.append(k[:, done:cut], v[:, done:cut], seqused=used)
        done = cut
    cache.check()
    assert cache.lengths.tolist() == list(lengths)
    return cache


def nodes(cache, b, length):
    """Every complete node of a sequence, tokens first: [nodes, H_kv, K] and values, wherever they are stored."""
    found = []
    for layer in range(cache.num_layers):
        node = torch.arange(length // cache.compression_rate**layer)[:, None]
        rows, upper = decode._flat_rows(
            cache._tensors(), cache.layout, layer, torch.full_like(node, b), torch.arange(2), node
        )
        found.append([x[rows] for x in decode._buffers(cache._tensors(), upper)])
    return [torch.cat(x) for x in zip(*found)]


def same_nodes(a, b, lengths):
    for i, n in enumerate(lengths):
        for x, y in zip(nodes(a, i, n), nodes(b, i, n)):
            assert torch.equal(x, y)


def run(q, cache, **options):
    return forward_cached(q, cache, return_lse=True, return_selection=True, **{**TREE, **options})


def check_rows(results, q, k, v, lengths, used=None, atol=1e-12, **options):
    """Each sequence against the definition on its own tokens; queries without a key are empty."""
    out, lse, selection = results
    T_q = q.shape[1]
    for b, n in enumerate(lengths):
        rows = T_q if used is None else used[b]
        count = min(rows, n)
        for empty in (slice(0, rows - count), slice(rows, T_q)):
            assert (out[b, empty] == 0).all() and (lse[b, empty] == -math.inf).all()
            assert (selection[:, b, empty] == -1).all()
        if not count:
            continue
        mine = slice(rows - count, rows)
        exact = definition.forward(
            q[b : b + 1, mine], k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=4, **{**TREE, **options}
        )
        layers = exact.selection.shape[0]
        assert torch.equal(selection[:layers, b, mine], exact.selection[:, 0])
        for layer in range(layers + 1, selection.shape[0] + 1):
            for i in range(count):
                row = selection[layer - 1, b, mine][i, 0]
                last = (n - count + i) // 4**layer
                assert row.tolist() == [*range(last + 1), *[-1] * (row.shape[0] - last - 1)]
        torch.testing.assert_close(out[b, mine].double(), exact.out[0], atol=atol, rtol=0)
        torch.testing.assert_close(lse[b, mine].double(), exact.lse[0], atol=atol, rtol=0)


PAGES = pytest.mark.parametrize("page_size", [None, 256])


# ------------------------------------------------------------------------------------------------- what it attends to


@PAGES
@pytest.mark.parametrize("T_q", [1, 3, 8, 9, 12])
def test_equals_the_definition_on_each_sequence(T_q, page_size):
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


@pytest.mark.parametrize("T_q", [2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, T_q):
    """The definition in float64 on what was stored; the backend accumulates in float32 and rounds the output."""
    k, v = tokens(2, 310, dtype=dtype)
    q = queries(2, T_q, dtype=dtype)
    cache = filled(k, v, (300, 33))
    out, lse, _ = run(q, cache)
    assert out.dtype == dtype and lse.dtype == torch.float32
    for b, n in enumerate((300, 33)):
        exact = definition.forward(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=4, **TREE)
        atol = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(out[b].double(), exact.out[0], atol=atol, rtol=0)
        torch.testing.assert_close(lse[b].double(), exact.lse[0], atol=1e-5, rtol=0)


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
        exact = definition.forward(
            q[b : b + 1, 2 - count :], k[b : b + 1, :n], v[b : b + 1, :n], compression_rate=r, **options
        )
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


# --------------------------------------------------------------------------------------------------- the ops in torch


def op_arguments(page_size=None, T_new=3):
    k, v = tokens(2, 310, dtype=torch.float32)
    cache = filled(k[:, :100], v[:, :100], (100, 17), page_size=page_size)
    if page_size:
        cache.reserve(100)
    return cache, (k[:, :T_new], v[:, :T_new])


@PAGES
@pytest.mark.parametrize("seqused", [None, int32(2, 0)])
def test_opcheck(page_size, seqused):
    cache, new = op_arguments(page_size)
    options = {**cache._numbers(), "backend": "auto"}
    torch.library.opcheck(torch.ops.htree_cuda.tree_append, (*new, seqused, *cache._tensors()), options)
    for T_q in (2, 9):
        q = queries(2, T_q, dtype=torch.float32)
        table = cache._rope_table(4, None, 100.0)
        tree = {"top_k_per_layer": 4, "max_top_nodes": None, "scale": None, "rope_base": 100.0, "need_selection": True}
        torch.library.opcheck(
            torch.ops.htree_cuda.forward_cached, (q, seqused, *cache._tensors(), table), {**options, **tree}
        )
    torch.library.opcheck(
        torch.ops.htree_cuda.tree_truncate,
        (cache.lengths, cache.overflowed, cache.reserved, cache._shared, int32(50, 3)),
    )
    torch.library.opcheck(
        torch.ops.htree_cuda.rope_table, (new[0],), {"positions": 16, "head_dim": 8, "rope_base": 10.0}
    )


@PAGES
def test_compiled_steps(page_size):
    """A step of decoding in one graph: append, attend, and a speculative token taken back."""
    compiled_cache, _ = op_arguments(page_size)
    eager_cache = compiled_cache.clone()
    k, v = tokens(2, 310, dtype=torch.float32, seed=5)
    q = queries(2, 310, dtype=torch.float32)

    def step(q, k, v, cache):
        cache.append(k, v)
        out, lse = forward_cached(q, cache, return_lse=True, **TREE)
        cache.truncate(cache.lengths - 1)
        return out, lse

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    for i in range(0, 20, 2):
        part = slice(i, i + 2)
        found = compiled(q[:, part], k[:, part], v[:, part], compiled_cache)
        expected = step(q[:, part], k[:, part], v[:, part], eager_cache)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert torch.equal(compiled_cache.lengths, eager_cache.lengths)
    same_nodes(compiled_cache, eager_cache, eager_cache.lengths.tolist())
