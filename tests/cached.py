"""What the tests of a cached tree share: tokens, caches filled in any way, and the oracle of each sequence."""

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
    found, h = [], torch.arange(cache.n_kv_heads, device=cache.device)
    for layer in range(cache.num_layers):
        node = torch.arange(length // cache.compression_rate**layer, device=cache.device)[:, None]
        rows, upper = decode._flat_rows(cache._tensors(), cache.layout, layer, torch.full_like(node, b), h, node)
        found.append([x[rows] for x in decode._buffers(cache._tensors(), upper)])
    return [torch.cat(x) for x in zip(*found)]


def same_nodes(a, b, lengths):
    for i, n in enumerate(lengths):
        for x, y in zip(nodes(a, i, n), nodes(b, i, n)):
            assert torch.equal(x, y)


def run(q, cache, **options):
    return forward_cached(q, cache, return_lse=True, return_selection=True, **{**TREE, **options})


def by_forward(q, k, v, **options):
    results = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **options)
    return definition.Result(*results, traces=[])


def check_rows(results, q, k, v, lengths, used=None, oracle=None, **options):
    """Each sequence against a forward on its own tokens: the torch backend's, which equals the definition, or the
    oracle. Queries without a key are empty."""
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
        arguments = (q[b : b + 1, mine], k[b : b + 1, :n], v[b : b + 1, :n])
        exact = (oracle or by_forward)(*arguments, compression_rate=4, **{**TREE, **options})
        layers = exact.selection.shape[0]
        assert torch.equal(selection[:layers, b, mine], exact.selection[:, 0])
        for layer in range(layers + 1, selection.shape[0] + 1):
            for i in range(count):
                row = selection[layer - 1, b, mine][i, 0]
                last = (n - count + i) // 4**layer
                assert row.tolist() == [*range(last + 1), *[-1] * (row.shape[0] - last - 1)]
        torch.testing.assert_close(out[b, mine], exact.out[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(lse[b, mine], exact.lse[0], atol=1e-12, rtol=0)


PAGES = pytest.mark.parametrize("page_size", [None, 256])
