"""The torch backend equals the definition in float64: outputs, lse, selection and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import htree_cuda
from htree_cuda import definition
from htree_cuda.torch_backend import chunks, rotation, visits
from htree_cuda.torch_backend import tree as torch_tree

from ..inputs import Config, configs, examples

TOLERANCE = 1e-10


def compare(config: Config) -> None:
    q, k, v = config.tensors()
    exact = definition.forward(q, k, v, strict_causal=config.strict_causal, **config.options)
    out, lse, selection = torch_tree.forward(q, k, v, config.params, need_selection=True)
    assert torch.equal(selection, exact.selection)
    torch.testing.assert_close(out, exact.out, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact.lse, rtol=0, atol=TOLERANCE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch_tree.backward(dout, dlse, q, k, v, out, lse, selection, config.params)
    theirs = definition.backward(dout, dlse, q, k, v, exact.selection, **config.options)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


@settings(max_examples=examples(320), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_equals_the_definition(config):
    compare(config)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_gradients_by_tiles_of_visits_equal_the_definition(config):
    """What a GPU does where many queries visit a parent, here in tiles of three visits wherever there is a layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "worthwhile", lambda *sizes: True)
        patch.setattr(visits, "TILE", 3)
        compare(config)


def test_tiles_of_visits_add_each_to_its_parent_and_nothing_else():
    g = torch.Generator().manual_seed(0)
    for n, parents, each in ((1, 1, 1), (64, 3, 4), (130, 50, 2), (96, 1, 3)):
        flat = torch.randint(parents, (n,), generator=g)
        weights = torch.randn(n, 2, 4, generator=g, dtype=torch.float64)
        rows = torch.randn(-(-n // each), 2, 5, generator=g, dtype=torch.float64)
        weights[n // 2, 1, 2], rows[0, 0, 0] = math.nan, math.inf
        expected = torch.zeros(parents, 4, 5, dtype=torch.float64)
        for i in range(n):
            expected[flat[i]] += weights[i].T @ rows[i // each]
        for deterministic in (False, True):
            total = torch.zeros_like(expected)
            visits.Visits(flat, parents).add(total, weights, rows, each, deterministic)
            torch.testing.assert_close(total, expected, equal_nan=True)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_public_function_and_autograd_equal_the_definition(config):
    """The same through `htree_cuda.forward`: every option arrives, and gradients come out of autograd."""
    q, k, v = (x.requires_grad_() for x in config.tensors())
    options = {**config.options, "strict_causal": config.strict_causal}
    out, lse, selection = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **options)
    exact = definition.forward(q.detach(), k.detach(), v.detach(), **options)
    assert torch.equal(selection, exact.selection)
    torch.testing.assert_close(out, exact.out, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact.lse, rtol=0, atol=TOLERANCE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        theirs = definition.backward(dout, dlse, q, k, v, exact.selection, **config.options)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


def test_defaults_are_the_documented_ones():
    """8,193 tokens give two layers only with top_k 512 and r 16; scale, rope_base and q_start by comparison."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 4, generator=g, dtype=torch.float64) for n in (1, 8193, 8193))
    out, lse, selection = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True)
    assert selection.shape == (1, 1, 1, 1, 512)
    exact = definition.forward(
        q, k, v, q_start=8192, compression_rate=16, top_k_per_layer=512, max_top_nodes=8192, scale=0.5, rope_base=1e4,
        strict_causal=True,
    )  # fmt: skip
    assert torch.equal(selection, exact.selection)
    torch.testing.assert_close(out, exact.out, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact.lse, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rope_tables_come_from_float64_angles(dtype):
    """A float32 angle at p = 8191 is off by 5e-4 in cos."""
    cos, sin = rotation.rope_tables(8192, 64, 10000.0, dtype, torch.device("cpu"))
    for m in (0, 1, 7, 31):
        angle = 8191 * 10000.0 ** (-2 * m / 64)
        assert abs(float(cos[8191, m]) - math.cos(angle)) < (1e-7 if dtype == torch.float32 else 1e-11)
        assert abs(float(sin[8191, m]) - math.sin(angle)) < (1e-7 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize(("T", "r"), [(5_000, 16), (70_000, 16), (100, 1 << 20), (3, 1 << 30)])
def test_chunks_hold_bounded_memory(T, r, monkeypatch):
    """The rows of a chunk times the bytes of a row stay within the budget, whatever T and r."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES_CPU", 4 << 20)
    top_k = 4
    config = Config(1, T, 64 if T > 64 else T, 0, 4, 2, 16, 16, r, top_k, top_k if T < 1000 else top_k * r, True, 0)
    q, k, v = config.tensors(torch.float32)
    descent = torch_tree._Descent(q, k, v, config.params)
    width = descent.widest
    assert width <= max(top_k * min(r, 2 * T), 64)
    largest = max((bh.stop - bh.start) * (queries.stop - queries.start) for bh, queries in descent.chunks())
    temporaries = 4 * width * (2 * (16 + 16) + 4 * 4)  # gathered and rotated keys, values, scores and their copies
    assert largest == 1 or largest * temporaries <= 4 << 20
    out = torch_tree.forward(q, k, v, config.params)[0]
    assert out.isfinite().all()


@pytest.mark.parametrize("what", ["q", "dout"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("T", [20, 70])
def test_a_poisoned_query_reaches_the_gradients_of_what_it_attends(what, poison, T):
    config = Config(1, T, T, 0, 2, 1, 4, 4, 4, 4, 16, True, 3)
    q, k, v = config.tensors()
    clean = torch_tree.forward(q, k, v, config.params, need_selection=True)
    dout, dlse = torch.randn_like(clean[0]), torch.zeros_like(clean[1])
    (q if what == "q" else dout)[:, 9] = poison
    out, lse, selection = torch_tree.forward(q, k, v, config.params, need_selection=True)
    _, dk, dv = torch_tree.backward(dout, dlse, q, k, v, out, lse, selection, config.params)
    for name, x in (("dk", dk), ("dv", dv)):
        reached = ~x.isfinite().all(-1)[0, :, 0]
        assert not reached[10:].any(), f"{name} of later tokens"
        assert reached[:10].all(), f"{name} of the tokens it attends"


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 30])
def test_any_chunk_size(chunk_bytes, monkeypatch):
    """One query and one (b, h_kv) at a time, a few, and everything at once."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES_CPU", chunk_bytes)
    compare(Config(2, 83, 17, 60, 3, 2, 6, 5, 4, 4, 9, True, seed=1))


@pytest.mark.parametrize("T", [4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257, 258])
def test_layer_count_boundaries(T):
    """top_k 4, r 4: 16 nodes at the top; layers are added at 17, 65 and 257 tokens."""
    compare(Config(1, T, min(T, 12), max(0, T - 12), 2, 1, 4, 3, 4, 4, 16, True, seed=T))


def test_float32_and_half_inputs_stay_close_to_float64():
    config = Config(1, 300, 24, 276, 4, 2, 16, 16, 4, 8, 32, True, seed=3)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        q, k, v = config.tensors(dtype)
        out, lse, selection = torch_tree.forward(q, k, v, config.params, need_selection=True)
        assert out.dtype == dtype and lse.dtype == torch.float32
        exact = definition.forward(q, k, v, selection=selection, **config.options)
        torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("r", [2, 8, 16])
def test_tree_is_bit_equal_to_the_definition(dtype, r):
    x = torch.randn(2, 211, 3, 5).to(dtype)
    trees = definition.build_tree(x, r, 7), torch_tree.build_tree(x, r, 7)
    for a, b in zip(*trees, strict=True):
        assert torch.equal(a.transpose(1, 2).reshape(b.shape), b)


def test_strided_offset_and_expanded_views():
    config = Config(2, 90, 9, 70, 2, 2, 6, 5, 4, 4, 16, True, seed=9)
    q, k, v = config.tensors()
    expected = torch_tree.forward(q, k, v, config.params)
    wide = torch.randn(2, 91, 4, 12, dtype=torch.float64)
    k_view = wide[:, 1:, ::2, 3:9]
    k_view.copy_(k)
    q_view = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x, y in zip(expected, torch_tree.forward(q_view, k_view, v, config.params)):
        assert torch.equal(x, y)
    shared = k[:1].expand(2, -1, -1, -1)
    both = torch_tree.forward(q, shared, v, config.params)[0]
    assert torch.equal(both, torch_tree.forward(q, shared.contiguous(), v, config.params)[0])
