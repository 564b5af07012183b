"""Numbers of NumPy and of other libraries stand for Python's; what only looks like one is refused."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch

import htree_cuda


def qkv():
    return torch.randn(1, 5, 4, 8), torch.randn(1, 70, 2, 8), torch.randn(1, 70, 2, 6)


def test_forward_takes_numbers_of_numpy():
    q, k, v = qkv()
    plain = {"q_start": 3, "compression_rate": 4, "top_k_per_layer": 4, "max_top_nodes": 8, "scale": 0.25}
    other = {
        "q_start": np.int64(3), "compression_rate": np.uint8(4), "top_k_per_layer": np.int32(4),
        "max_top_nodes": np.int16(8), "scale": np.float32(0.25),
    }  # fmt: skip
    expected = htree_cuda.forward(q, k, v, **plain, rope_base=100.0)
    for rope_base in (np.float64(100), np.float16(100), np.int64(100), fractions.Fraction(100)):
        assert torch.equal(htree_cuda.forward(q, k, v, **other, rope_base=rope_base), expected)


def test_list_ops_take_numbers_of_numpy():
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 40, 1, 8)
    indices = torch.randint(0, 40, (2, 5, 1, 9), dtype=torch.int32)
    plain = {"sm_scale": 0.5, "q_start": [30, 20], "k_stride": 2}
    for starts in (np.array([30, 20]), [np.int64(30), np.int32(20)]):
        other = {"sm_scale": np.float32(0.5), "q_start": starts, "k_stride": np.int64(2)}
        out, lse = htree_cuda.sparse_attention(q, k, indices, d_v=np.int64(6), lse_base=np.float64(math.e), **other)
        expected = htree_cuda.sparse_attention(q, k, indices, d_v=6, lse_base=math.e, **plain)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        dist = htree_cuda.attn_dist(q, k, indices, lse, lse_base=np.float64(math.e), **other)
        assert torch.equal(dist, htree_cuda.attn_dist(q, k, indices, lse, lse_base=math.e, **plain))
        loss = {"s_kv": 40, "q_start": [30, 20], "k_stride": 2}
        logits, dist = torch.randn(2, 5, 9), dist.sum(1)
        found = htree_cuda.indexer_loss(logits, dist, indices, **{**loss, "s_kv": np.int64(40), "q_start": starts})
        assert torch.equal(found, htree_cuda.indexer_loss(logits, dist, indices, **loss))


def test_the_module_takes_numbers_of_numpy():
    module = htree_cuda.HTreeAttention(np.int64(32), np.int32(4), np.int8(2), top_k_per_layer=np.int64(4))
    assert {type(x) for x in (module.d_model, module.n_heads, module.head_dim, module.options["top_k_per_layer"])} == {
        int
    }
    assert module(torch.randn(1, 9, 32)).shape == (1, 9, 32)


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, np.float64(1), "1"])
def test_what_is_no_int_is_refused(value):
    with pytest.raises(TypeError, match="forward: q_start must be an int or None, got "):
        htree_cuda.forward(*qkv(), q_start=value)


def test_starts_of_sequences_are_ints_in_one_dimension():
    with pytest.raises(TypeError, match=r"forward: q_start must be an int, got np\.float64\(1\.0\)"):
        htree_cuda.forward(*qkv(), q_start=np.array([1.0]))
    with pytest.raises(ValueError, match=r"forward: q_start must have 1 dimensions \[B\], got shape \(\)"):
        htree_cuda.forward(*qkv(), q_start=torch.tensor(1))


@pytest.mark.parametrize("value", [True, np.bool_(True), 1j, "1", torch.tensor(1.0), np.array([1.0])])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="forward: scale must be a number or None, got "):
        htree_cuda.forward(*qkv(), scale=value)


def test_starts_in_a_tensor_are_refused():
    """Reading them would wait for the device."""
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 40, 1, 8)
    indices = torch.zeros(2, 5, 1, 9, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"sparse_attention: q_start must be an int, got tensor\(3"):
        htree_cuda.sparse_attention(q, k, indices, d_v=6, q_start=torch.tensor([3, 4]))


def test_an_array_of_starts_is_refused_under_compile():
    """Dynamo makes a tensor of it, whose numbers nothing knows; a number of NumPy, and a list of them, is traced."""
    q, k = torch.randn(2, 5, 64, 8), torch.randn(2, 40, 1, 8)
    indices = torch.zeros(2, 5, 1, 9, dtype=torch.int32)
    calls = {
        "forward": lambda starts: htree_cuda.forward(q, k, k, top_k_per_layer=4, q_start=starts),
        "sparse_attention": lambda starts: htree_cuda.sparse_attention(q, k, indices, d_v=6, q_start=starts)[0],
    }
    for op, call in calls.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=f"{op}: q_start must be an int or a list of ints under torch.compile, got"):
            compiled(np.array([30, 20]))
        for starts in (np.int64(3), [np.int64(30), np.int64(20)]):
            assert torch.equal(compiled(starts), call(starts))
