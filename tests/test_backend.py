"""The torch backend equals the definition in float64: outputs, lse, selection and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from htree_cuda.reference import definition, vectorised

from .inputs import Config, configs

TOLERANCE = 1e-10


def compare(config: Config) -> None:
    q, k, v = config.tensors()
    exact = definition.forward(q, k, v, strict_causal=config.strict_causal, **config.options)
    out, lse, selection = vectorised.forward(q, k, v, config.params, need_selection=True)
    assert torch.equal(selection, exact.selection)
    torch.testing.assert_close(out, exact.out, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact.lse, rtol=0, atol=TOLERANCE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = vectorised.backward(dout, dlse, q, k, v, out, lse, selection, config.params)
    theirs = definition.backward(dout, dlse, q, k, v, exact.selection, **config.options)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


@settings(max_examples=320, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_equals_the_definition(config):
    compare(config)


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 30])
def test_any_chunk_size(chunk_bytes, monkeypatch):
    """One query and one (b, h_kv) at a time, a few, and everything at once."""
    monkeypatch.setattr(vectorised, "CHUNK_BYTES_CPU", chunk_bytes)
    compare(Config(2, 83, 17, 60, 3, 2, 6, 5, 4, 4, 9, True, seed=1))


@pytest.mark.parametrize("T", [4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 258])
def test_layer_count_boundaries(T):
    """top_k 4, r 4: 16 nodes at the top; layers are added at 17, 65 and 257 tokens."""
    compare(Config(1, T, min(T, 12), max(0, T - 12), 2, 1, 4, 3, 4, 4, 16, True, seed=T))


def test_float32_and_half_inputs_stay_close_to_float64():
    config = Config(1, 300, 24, 276, 4, 2, 16, 16, 4, 8, 32, True, seed=3)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        q, k, v = config.tensors(dtype)
        out, lse, selection = vectorised.forward(q, k, v, config.params, need_selection=True)
        assert out.dtype == dtype and lse.dtype == torch.float32
        exact = definition.forward(q, k, v, selection=selection, **config.options)
        torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("r", [2, 8, 16])
def test_tree_is_bit_equal_to_the_definition(dtype, r):
    x = torch.randn(2, 211, 3, 5).to(dtype)
    trees = definition.build_tree(x, r, 7), vectorised.build_tree(x, r, 7)
    for a, b in zip(*trees, strict=True):
        assert torch.equal(a.transpose(1, 2).reshape(b.shape), b)


def test_strided_offset_and_expanded_views():
    config = Config(2, 90, 9, 70, 2, 2, 6, 5, 4, 4, 16, True, seed=9)
    q, k, v = config.tensors()
    expected = vectorised.forward(q, k, v, config.params)
    wide = torch.randn(2, 91, 4, 12, dtype=torch.float64)
    k_view = wide[:, 1:, ::2, 3:9]
    k_view.copy_(k)
    q_view = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x, y in zip(expected, vectorised.forward(q_view, k_view, v, config.params)):
        assert torch.equal(x, y)
    shared = k[:1].expand(2, -1, -1, -1)
    both = vectorised.forward(q, shared, v, config.params)[0]
    assert torch.equal(both, vectorised.forward(q, shared.contiguous(), v, config.params)[0])
