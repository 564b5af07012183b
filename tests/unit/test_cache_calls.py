"""Calls of a cached tree: the module, the ops in torch, and what a caller can get wrong."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import htree_cuda
from htree_cuda import TreeCache, forward_cached

from ..cached import (
    F64,
    TREE,
    filled,
    int32,
    new_cache,
    queries,
    run,
    same_nodes,
    tokens,
)

# ---------------------------------------------------------------------------------------------------------- the module


@torch.no_grad()
def test_module_with_a_cache():
    """Prefill and steps equal one call over all; a ragged batch equals its rows."""
    torch.manual_seed(3)
    options = {"qk_norm": True, "compression_rate": 4, "top_k_per_layer": 4, "dtype": F64}
    attention = htree_cuda.HTreeAttention(12, 6, 2, v_head_dim=4, head_dim=8, **options)
    x = torch.randn(2, 90, 12, dtype=F64)
    whole = attention(x)
    cache = attention.new_cache(2, 100, page_size=None)
    assert (cache.head_dim, cache.v_head_dim, cache.n_kv_heads, cache.dtype) == (8, 4, 2, F64)
    parts = [attention(part, cache=cache) for part in x.split((70, 1, 1, 8, 1, 9), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=0)
    ragged = attention.new_cache(2, 100, page_size=256)
    ragged.reserve(100)
    out = attention(x, cache=ragged, seqused=int32(90, 33))
    torch.testing.assert_close(out[1, :33], whole[1, :33], atol=1e-12, rtol=0)
    out = attention(x[:, 33:34], cache=ragged, seqused=int32(0, 1))
    assert ragged.lengths.tolist() == [90, 34]
    torch.testing.assert_close(out[1], whole[1, 33:34], atol=1e-12, rtol=0)
    k, v = tokens(2, 10)
    for options, error, message in (
        ({"cache": (k, v)}, TypeError, "HTreeAttention: cache must be a htree_cuda.TreeCache or None, got tuple"),
        (
            {"cache": cache, "return_kv": True},
            ValueError,
            "HTreeAttention: cache takes the place of past",
        ),
        ({"cache": new_cache(2, r=16)}, ValueError, "compression_rate of the cache must equal the module's"),
        (
            {"cache": attention.new_cache(3, 100)},
            ValueError,
            r"HTreeAttention: batch_size of the cache must equal B of x \(2\), got 3",
        ),
        (
            {"cache": TreeCache(2, 100, 2, 6, 4, compression_rate=4, dtype=F64)},
            ValueError,
            r"HTreeAttention: head_dim of the cache must equal the module's \(8\), got 6",
        ),
        (
            {"cache": attention.new_cache(2, 100, dtype=torch.float32)},
            ValueError,
            r"HTreeAttention: the cache must have the dtype of x \(torch.float64\), got torch.float32",
        ),
        (
            {"cache": attention.new_cache(2, 100, device="meta")},
            ValueError,
            r"HTreeAttention: the cache must be on the device of x \(cpu\), got meta",
        ),
    ):
        with pytest.raises(error, match=message):
            attention(x, **options)
    with pytest.raises(RuntimeError, match="a cached call has no gradient"), torch.enable_grad():
        attention(x[:, :1], cache=cache)
    assert cache.lengths.tolist() == [90, 90], "nothing was appended"


# --------------------------------------------------------------------------------------------------- the ops in torch


def op_arguments(page_size=None, T_new=3):
    k, v = tokens(2, 310, dtype=torch.float32)
    cache = filled(k[:, :100], v[:, :100], (100, 17), page_size=page_size)
    if page_size:
        cache.reserve(100)
    return cache, (k[:, :T_new], v[:, :T_new])


@pytest.mark.parametrize("page_size, seqused", [(None, None), (256, int32(2, 0))])
def test_opcheck(page_size, seqused):
    cache, new = op_arguments(page_size)
    options = {**cache._numbers(), "backend": "auto"}
    torch.library.opcheck(torch.ops.htree_cuda.tree_append, (*new, seqused, *cache._tensors()), options)
    for T_q in (2, 9):
        q = queries(2, T_q, dtype=torch.float32)
        table = cache._rope_table(4, None, 100.0, None, 8)
        tree = {
            "top_k_per_layer": 4, "max_top_nodes": None, "scale": None, "rope_base": 100.0, "rope_interleaved": False,
            "need_selection": True,
        }  # fmt: skip
        torch.library.opcheck(
            torch.ops.htree_cuda.forward_cached, (q, seqused, *cache._tensors(), table, None), {**options, **tree}
        )
    torch.library.opcheck(
        torch.ops.htree_cuda.tree_truncate,
        (cache.lengths, cache.overflowed, cache.reserved, cache._shared, int32(50, 3)),
    )
    torch.library.opcheck(
        torch.ops.htree_cuda.rope_table, (new[0], None), {"positions": 16, "rope_dim": 8, "rope_base": 10.0}
    )


def test_ops_called_by_their_names_have_no_gradient():
    cache, (k, v) = op_arguments()
    q, table = queries(2, 1, dtype=torch.float32).requires_grad_(), cache._rope_table(4, None, 100.0, None, 8)
    options = {**cache._numbers(), "backend": "auto"}
    tree = {"top_k_per_layer": 4, "max_top_nodes": None, "scale": None, "rope_base": 100.0, "rope_interleaved": False}
    call = (q, None, *cache._tensors(), table, None), {**options, **tree, "need_selection": False}
    with pytest.raises(RuntimeError, match="forward_cached: a cached call has no gradient"):
        torch.ops.htree_cuda.forward_cached(*call[0], **call[1])
    with pytest.raises(RuntimeError, match="append: a cached call has no gradient"):
        torch.ops.htree_cuda.tree_append(k.clone().requires_grad_(), v, None, *cache._tensors(), **options)
    with torch.no_grad():
        out, _, _ = torch.ops.htree_cuda.forward_cached(*call[0], **call[1])
    assert not out.requires_grad


def test_what_an_append_changes_has_new_versions():
    """As of every operation in place: autograd refuses what it saved of a tensor that has changed since."""
    cache, (k, v) = op_arguments(256)
    before = [x._version for x in cache._tensors()]
    cache.append(k, v)
    after = [x._version for x in cache._tensors()]
    assert [b > a for a, b in zip(before, after, strict=True)] == [True] * 6 + [False] * 2


@pytest.mark.parametrize("page_size, backend", [(None, "inductor"), (256, "aot_eager")])
def test_compiled_steps(page_size, backend):
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
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for i in range(0, 20, 2):
        part = slice(i, i + 2)
        found = compiled(q[:, part], k[:, part], v[:, part], compiled_cache)
        expected = step(q[:, part], k[:, part], v[:, part], eager_cache)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert torch.equal(compiled_cache.lengths, eager_cache.lengths)
    same_nodes(compiled_cache, eager_cache, eager_cache.lengths.tolist())


def test_a_compiled_step_hears_of_its_frequencies():
    """In one graph, given or closed over, also once they were written to."""
    cache, _ = op_arguments(None)
    q = queries(2, 1, dtype=torch.float32)
    given, closed = (torch.linspace(1.0, 0.1, cache.head_dim // 2) for _ in range(2))

    def step(q, inv_freq):
        return tuple(forward_cached(q, cache, rope_inv_freq=x, **TREE) for x in (inv_freq, closed))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    before = None
    for _ in range(3):
        found, expected = compiled(q, given), step(q, given)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert before is None or (not torch.equal(found[0], before[0]) and not torch.equal(found[1], before[1]))
        before = found
        given.mul_(0.5)
        closed.mul_(0.7)


@torch.no_grad()
def test_compiled_module():
    """A decoder's step by its own cache, in one graph."""
    torch.manual_seed(0)
    attention = htree_cuda.HTreeAttention(12, 6, 2, head_dim=8, qk_norm=True, compression_rate=4, top_k_per_layer=4)
    caches = [attention.new_cache(2, 100) for _ in range(2)]
    x = torch.randn(2, 30, 12)
    for cache in caches:
        attention(x[:, :20], cache=cache)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for i in range(20, 30):
        found, expected = compiled(x[:, i : i + 1], cache=caches[0]), attention(x[:, i : i + 1], cache=caches[1])
        torch.testing.assert_close(found, expected)
    assert caches[0].lengths.tolist() == [30, 30]


# ------------------------------------------------------------------------------------------ what a caller can get wrong


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_tokens": 0}, "TreeCache: max_tokens must be at least 1, got 0"),
        ({"batch_size": -1}, "TreeCache: batch_size must be at least 0, got -1"),
        ({"head_dim": 7}, "TreeCache: head_dim must be even"),
        ({"compression_rate": 12}, "TreeCache: compression_rate must be a power of two, at least 2, got 12"),
        ({"dtype": torch.int32}, "TreeCache: dtype must be float16, bfloat16, float32 or float64, got torch.int32"),
        ({"page_size": 100}, "TreeCache: page_size must be a positive multiple of 256 tokens, got 100"),
        ({"num_pages": 3}, "TreeCache: num_pages needs page_size, got page_size None"),
        ({"page_size": 256, "num_pages": 0}, "TreeCache: num_pages must be at least 1, got 0"),
        (
            {"page_size": 256, "block_table": int32(0, 1)},
            "TreeCache: block_table must have 2 dimensions",
        ),
        (
            {"page_size": 256, "block_table": int32(0, 1).view(2, 1)},
            r"TreeCache: block_table needs max_tokens / page_size \(2\) columns, got 1",
        ),
        (
            {"page_size": 256, "block_table": torch.zeros(2, 2)},
            "TreeCache: block_table must be int32, got torch.float32",
        ),
        (
            {"page_size": 256, "block_table": int32(0, 1, 2, 3).view(2, 2)},
            "TreeCache: num_pages must be given with a block_table of the caller, got None",
        ),
        ({"num_layers": 0}, "TreeCache: num_layers must be at least 1, got 0"),
    ],
)
def test_bad_caches(change, message):
    options = {"batch_size": 2, "max_tokens": 310, "n_kv_heads": 2, "head_dim": 8, "dtype": F64}
    with pytest.raises(ValueError, match=message):
        TreeCache(**{**options, **change})
    with pytest.raises(TypeError, match=r"TreeCache: max_tokens must be an int, got 3\.5"):
        TreeCache(**{**options, "max_tokens": 3.5})


def test_bad_calls():
    k, v = tokens(2, 10)
    q = queries(2, 2)
    cache = new_cache(2)
    small = new_cache(2, num_layers=2)
    for call, message in (
        (lambda: cache.append(k[:1], v[:1]), r"append: B .* must equal batch_size of the cache \(2\), got 1"),
        (lambda: cache.append(k[..., :6], v), r"append: K .* must equal head_dim of the cache \(8\), got 6"),
        (lambda: cache.append(k, v[:, :3]), r"append: dimension 1 of v must equal T_new of k \(10\), got 3"),
        (
            lambda: cache.append(k.float(), v.float()),
            r"append: the cache must have the dtype of k \(torch.float32\), got torch.float64",
        ),
        (lambda: cache.append(k, v, seqused=torch.zeros(2)), "append: seqused must be int32, got torch.float32"),
        (lambda: cache.append(k, v, seqused=int32(1)), r"dimension 0 of seqused must equal B of k \(2\), got 1"),
        (lambda: cache.append(k, v, backend="cpu"), "append: backend must be one of 'auto', 'torch', got 'cpu'"),
        (lambda: cache.truncate([1]), r"truncate: the number of lengths must equal batch_size .* \(2\), got 1"),
        (lambda: cache.truncate(-1), "truncate: lengths must be at least 0, got -1"),
        (lambda: cache.truncate(torch.zeros(2)), "truncate: lengths must be int32 or int64, got torch.float32"),
        (lambda: cache.reorder([0, 2]), r"reorder: indices must lie in 0 .. batch_size - 1 \(1\), got 2"),
        (lambda: cache.reset([5]), r"reset: rows must lie in 0 .. batch_size - 1 \(1\), got 5"),
        (lambda: cache.reserve(311), r"reserve: the length of sequence 0 \(0\) and tokens must be at most max_tokens"),
        (lambda: cache.attach(0, [0], 1), r"attach: the cache must have pages \(page_size\), got a cache without"),
        (lambda: run(q[:1], cache), r"forward_cached: B .* must equal batch_size of the cache \(2\), got 1"),
        (lambda: run(q[:, :, :3], cache), r"forward_cached: H .* must be a positive multiple of n_kv_heads"),
        (lambda: run(q.float(), cache), "forward_cached: the cache must have the dtype of q"),
        (lambda: run(q, cache, top_k_per_layer=3), "forward_cached: top_k_per_layer must be a power of two"),
        (lambda: run(q, cache, backend=1), "forward_cached: backend must be one of 'auto', 'torch', got 1"),
        (lambda: run(q.to("meta"), cache), "forward_cached: q must be on the device of the cache"),
        (lambda: run(q, cache, rope_inv_freq=torch.ones(4, device="meta")), r"on the device of the cache \(cpu\)"),
        (lambda: cache.truncate(int32(1, 1).to("meta")), "truncate: lengths must be on the device of the cache"),
        (lambda: cache.reorder(int32(1, 1).to("meta")), "reorder: indices must be on the device of the cache"),
        (lambda: cache.select(torch.tensor([True, False])), "select: indices must be int32 or int64, got torch.bool"),
        (lambda: cache.select(int32(0, 1)[None]), "select: indices must have 1 dimensions"),
        (lambda: new_cache(2, page_size=256).attach(0, [], -5), "attach: length must be at least 0, got -5"),
        (lambda: run(q, cache, rope_base=-1.0), "forward_cached: rope_base must be finite and greater than 0"),
        (
            lambda: run(q, small),
            "forward_cached: max_top_nodes must be at least 78, the nodes of",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: run(q, k), "forward_cached: cache must be a htree_cuda.TreeCache, got Tensor"),
        (lambda: run([1], cache), "forward_cached: q must be a torch.Tensor, got list"),
        (lambda: cache.append(k, None), "append: v must be a torch.Tensor, got NoneType"),
        (lambda: new_cache(2, page_size=256).attach(0, None, 0), "attach: pages must be a sequence of ints"),
        (lambda: run(q, cache, top_k_per_layer=4.0), "forward_cached: top_k_per_layer must be an int, got 4.0"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert not cache.lengths.any() and not cache._k.any()


def test_values_are_checked_where_that_is_asked_for(monkeypatch):
    k, v = tokens(2, 10)
    cache = new_cache(2)
    cache.append(k, v)
    q = queries(2, 2)
    monkeypatch.setenv("HTREE_CUDA_CHECK", "1")
    for call, message in (
        (lambda: cache.append(k, v, seqused=int32(1, 11)), r"append: seqused\[1\] must lie in 0 .. T_new of k \(10\)"),
        (lambda: run(q, cache, seqused_q=int32(-1, 2)), r"forward_cached: seqused_q\[0\] must lie in 0 .. T_q of q"),
        (lambda: cache.reorder(int32(0, 2)), r"reorder: indices must lie in 0 .. 1, got 2"),
        (lambda: cache.select(int32(0, -1)), r"select: indices must lie in 0 .. 1, got -1"),
        (lambda: cache.truncate(int32(0, -1)), r"truncate: lengths must lie in 0 .. 310, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.lengths.tolist() == [10, 10]
    cache.append(k, v, seqused=int32(0, 10))
    run(q, cache, seqused_q=int32(0, 2))
    monkeypatch.setenv("HTREE_CUDA_CHECK", "yes")
    with pytest.raises(ValueError, match="HTREE_CUDA_CHECK in the environment must be 0 or 1, got 'yes'"):
        run(q, cache)


def test_tables_of_rotations_belong_to_their_numbers():
    """Neither a copy of a cache nor a write that no tensor counts leaves a table of other frequencies behind."""
    k, v = tokens(1, 40)
    q, other = queries(1, 2), new_cache(1)
    other.append(k, v)
    wanted = {}
    for seed in range(12):
        table = torch.rand(4, generator=torch.Generator().manual_seed(seed))
        wanted[seed] = run(q, other.clone(), rope_inv_freq=table)[0]
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        cache = new_cache(1)
        cache.append(k, v)
        for seed in range(12):
            table = torch.rand(4, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(run(q, cache, rope_inv_freq=table)[0], wanted[seed])
            del table
            cache = copied(cache)
    table = torch.rand(4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run(q, cache, rope_inv_freq=table)[0], wanted[0])
    table.data.copy_(torch.rand(4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(run(q, cache, rope_inv_freq=table)[0], wanted[1])
    with torch.inference_mode():
        table = torch.rand(4, generator=torch.Generator().manual_seed(2))
        assert torch.equal(run(q, cache, rope_inv_freq=table)[0], wanted[2])
        table.copy_(torch.rand(4, generator=torch.Generator().manual_seed(3)))
        assert torch.equal(run(q, cache, rope_inv_freq=table)[0], wanted[3])


def test_no_gradient():
    k, v = tokens(2, 10)
    q = queries(2, 2).requires_grad_()
    cache = new_cache(2)
    cache.append(k.requires_grad_(), v)  # constants
    with pytest.raises(RuntimeError, match="forward_cached: a cached call has no gradient"):
        run(q, cache)
    with pytest.raises(RuntimeError, match="forward_cached: a cached call has no gradient"):
        run(q.detach(), cache, attn_sink=torch.zeros(4, dtype=F64, requires_grad=True))
    with torch.no_grad():
        assert not run(q, cache)[0].requires_grad
    with torch.inference_mode():
        run(q, cache)


@pytest.mark.parametrize("B, T_q", [(0, 1), (0, 9), (2, 0)])
def test_empty_sizes(B, T_q):
    cache = new_cache(B)
    cache.append(*tokens(B, 0))
    out, lse, selection = run(queries(B, T_q), cache)
    assert out.shape == (B, T_q, 4, 6) and lse.shape == (B, T_q, 4) and selection.shape == (3, B, T_q, 2, 4)
    cache.truncate(0), cache.reset(), cache.reorder(list(range(B)))
    assert cache.select(torch.arange(B)).batch_size == B
    if B == 0:
        with pytest.raises(ValueError, match="select: indices must be empty: the cache has no sequence, got 1 of them"):
            cache.select(torch.tensor([0]))


def test_autocast():
    k, v = tokens(2, 100, dtype=torch.bfloat16)
    q = queries(2, 2, dtype=torch.bfloat16)
    cache = filled(k, v, (100, 100))
    other = new_cache(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        other.append(k.float(), v.float())
        found = run(q.float(), other)
    assert all(torch.equal(x, y) for x, y in zip(found, run(q, cache), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        for bad in (k.long(), k.bool()):
            with pytest.raises(ValueError, match="append: k must be float16, bfloat16, float32 or float64, got"):
                other.append(bad, v)


@torch.no_grad()
def test_meta_tensors():
    """No autocast exists on meta, and no call asks for it there."""
    k, v = (x.to("meta") for x in tokens(2, 5))
    cache = new_cache(2, device="meta")
    cache.append(k, v)
    assert forward_cached(queries(2, 3).to("meta"), cache, **TREE).shape == (2, 3, 4, 6)
    attention = htree_cuda.HTreeAttention(16, 4, 2, top_k_per_layer=4, device="meta")
    x = torch.empty(1, 3, 16, device="meta")
    _, past = attention(x, return_kv=True)
    out, past = attention(x, past=past, return_kv=True)
    assert out.is_meta and past[0].shape == (1, 6, 2, 4)
    assert attention(x, cache=attention.new_cache(1, 100)).is_meta
    with pytest.raises(ValueError, match="x must have the dtype of the parameters"):
        attention(x.double())


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [(np.array(3), [3, 3]), (np.int64(3), [3, 3]), ([np.array(3), np.array(2)], [3, 2]), ((4, np.uint8(1)), [4, 1])],
)
def test_numbers_of_numpy_truncate(lengths, expected):
    """Arrays without a dimension have an index, and count as ints."""
    k, v = tokens(2, 10)
    cache = filled(k, v, (10, 10))
    cache.truncate(lengths)
    assert cache.lengths.tolist() == expected
    with pytest.raises(TypeError, match=r"truncate: lengths must be an int, got array\(\[3\]\)"):
        cache.truncate(np.array([3]))


def test_numbers_of_numpy_as_pages_of_a_state():
    k, v = tokens(2, 310)
    cache = filled(k, v, (300, 17), page_size=256)
    state = cache.state_dict()
    expected = state["pages"]
    state["pages"] = [[np.array(page) for page in held] for held in expected]
    new = new_cache(2, page_size=256)
    new.load_state_dict(state)
    assert [new.pages(b) for b in range(2)] == expected
    assert {type(page) for b in range(2) for page in new.pages(b)} == {int}
