"""Facts that the definition and the torch backend must both show, and the gradient of the definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from htree_cuda import definition
from htree_cuda.torch_backend import tree as torch_tree

from ..inputs import Config


def run(q, k, v, params, backend="torch"):
    """(out, lse, selection) of either implementation."""
    if backend == "torch":
        return torch_tree.forward(q, k, v, params, need_selection=True)
    result = definition.forward(
        q, k, v, q_start=params.q_start, compression_rate=params.compression_rate, top_k_per_layer=params.top_k,
        max_top_nodes=params.max_top_nodes, scale=params.scale, rope_base=params.rope_base,
        strict_causal=params.strict_causal, compute_dtype=definition.accumulation_dtype(q.dtype),
    )  # fmt: skip
    return result.out, result.lse, result.selection


def whole(T, r, top_k, max_top_nodes=None, *, G=2, H_kv=2, K=6, V=5, B=1, seed=0, strict=True):
    """A problem in which every position is a query."""
    return Config(B, T, T, 0, G, H_kv, K, V, r, top_k, max_top_nodes or top_k * r, strict, seed)


def dense(q, k, v, rope_base):
    """Ordinary dense causal attention with RoPE by token position."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    place = torch.arange(T)
    q_rot = definition.rope(q.transpose(1, 2), place, rope_base)
    k_rot = definition.rope(k.transpose(1, 2), place, rope_base).repeat_interleave(G, 1)
    s = q_rot @ k_rot.transpose(2, 3) * q.shape[3] ** -0.5
    s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    out = s.softmax(-1) @ v.transpose(1, 2).repeat_interleave(G, 1)
    return out.transpose(1, 2), s.logsumexp(-1).transpose(1, 2)


both = pytest.mark.parametrize("backend", ["torch", "definition"])
both_rules = pytest.mark.parametrize("strict", [True, False])


@both
@both_rules
def test_one_layer_is_dense_attention(backend, strict):
    config = whole(31, 4, 8, strict=strict)
    q, k, v = config.tensors()
    out, lse, selection = run(q, k, v, config.params, backend)
    assert selection.shape == (0, 1, 31, 2, 8)
    expected = dense(q, k, v, config.rope_base)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)


@both
@pytest.mark.parametrize(("T", "r", "top_k", "max_top_nodes", "layers"), [(64, 4, 16, 16, 2), (60, 2, 32, 32, 2)])
def test_every_node_selected_is_dense_attention(backend, T, r, top_k, max_top_nodes, layers):
    config = whole(T, r, top_k, max_top_nodes)
    q, k, v = config.tensors()
    assert len(definition.layer_sizes(T, r, max_top_nodes)) == layers
    out, lse, _ = run(q, k, v, config.params, backend)
    expected = dense(q, k, v, config.rope_base)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)


@both
def test_the_first_tokens_do_not_depend_on_how_many_follow(backend):
    """Also where a later token adds a layer: prefill and decoding agree."""
    config = whole(75, 4, 4, H_kv=1)
    q, k, v = config.tensors()
    full = run(q, k, v, config.params, backend)
    for T in (1, 15, 16, 17, 63, 64, 65):
        part = run(q[:, :T], k[:, :T], v[:, :T], config.params, backend)
        torch.testing.assert_close(part[0], full[0][:, :T], rtol=0, atol=1e-12)
        torch.testing.assert_close(part[1], full[1][:, :T], rtol=0, atol=1e-12)


@both
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300, 0.0])
@pytest.mark.parametrize("T", [40, 70])
def test_causality_bit_for_bit(backend, poison, T):
    """Change every token after t, in q, k and v: nothing at or before t changes, not one bit."""
    config = whole(T, 4, 4)
    q, k, v = config.tensors()
    before = run(q, k, v, config.params, backend)
    t = T // 2 + 3
    q2, k2, v2 = (x.clone() for x in (q, k, v))
    for x in (q2, k2, v2):
        x[:, t + 1 :] = poison
    after = run(q2, k2, v2, config.params, backend)
    for dim, x, y in ((1, before[0], after[0]), (1, before[1], after[1]), (2, before[2], after[2])):
        assert torch.equal(x.narrow(dim, 0, t + 1), y.narrow(dim, 0, t + 1))
        assert not x.isnan().any()


def test_causality_with_a_nan_key_alone():
    """NaN in one later key or value, every position of t around it."""
    config = whole(70, 4, 4, H_kv=1)
    q, k, v = config.tensors()
    clean = run(q, k, v, config.params)
    for which in (1, 2):
        for where in (0, 33, 64, 69):
            tensors = [q, k.clone(), v.clone()]
            tensors[which][:, where] = math.nan
            dirty = run(*tensors, config.params)
            assert torch.equal(clean[0][:, :where], dirty[0][:, :where])
            assert dirty[0][:, where:].isnan().any(dim=-1).all(), "every later query attends to it in some node"


def test_gradients_never_see_later_tokens():
    config = whole(70, 4, 4)
    q, k, v = config.tensors()
    out, lse, selection = torch_tree.forward(q, k, v, config.params, need_selection=True)
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    t = 41
    dout[:, : t + 1], dlse[:, : t + 1] = torch.randn_like(dout)[:, : t + 1], torch.randn_like(dlse)[:, : t + 1]
    clean = torch_tree.backward(dout, dlse, q, k, v, out, lse, selection, config.params)
    k2, v2 = k.clone(), v.clone()
    k2[:, t + 1 :] = math.nan
    v2[:, t + 1 :] = math.nan
    short = Config(1, 70, t + 1, 0, 2, 2, 6, 5, 4, 4, 16, True, 0).params
    rows = slice(0, t + 1)
    args = (dout[:, rows], dlse[:, rows], q[:, rows], k2, v2, out[:, rows], lse[:, rows], selection[:, :, rows])
    dirty = torch_tree.backward(*args, short)
    torch.testing.assert_close(dirty[0], clean[0][:, rows], rtol=0, atol=1e-13)
    for x, y in zip(clean[1:], dirty[1:]):
        torch.testing.assert_close(x[:, rows], y[:, rows], rtol=0, atol=1e-13)
        assert (x[:, t + 1 :] == 0).all() and (y[:, t + 1 :] == 0).all()


@both
@both_rules
def test_any_split_into_chunks_equals_the_whole(backend, strict):
    config = whole(75, 4, 4, B=2, strict=strict)
    q, k, v = config.tensors()
    full = run(q, k, v, config.params, backend)
    for cuts in ((0, 1, 75), (0, 30, 31, 60, 75)):
        for first, last in itertools.pairwise(cuts):
            params = Config(2, 75, last - first, first, 2, 2, 6, 5, 4, 4, 16, strict, 0).params
            part = run(q[:, first:last], k, v, params, backend)
            torch.testing.assert_close(part[0], full[0][:, first:last], rtol=0, atol=1e-12)
            torch.testing.assert_close(part[1], full[1][:, first:last], rtol=0, atol=1e-12)
            assert torch.equal(part[2], full[2][:, :, first:last])


def test_strict_causal_matters_and_only_for_groups():
    """The rightmost node weighs the heads of a group against each other: with G = 1 both rules select the same."""
    differs = {}
    for G in (1, 4):
        strict, loose = (whole(150, 4, 4, G=G, strict=s) for s in (True, False))
        q, k, v = strict.tensors()
        differs[G] = not torch.equal(run(q, k, v, strict.params)[2], run(q, k, v, loose.params)[2])
    assert differs == {1: False, 4: True}


@both
@pytest.mark.parametrize("zero", ["q", "k"])
def test_ties_go_to_the_lowest_positions(backend, zero):
    config = whole(150, 4, 4)
    q, k, v = config.tensors()
    (q if zero == "q" else k).zero_()
    _, lse, selection = run(q, k, v, config.params, backend)
    for t in (149, 70, 20):
        n = t // 16 + 1
        expected = sorted({*range(min(4, n) - 1), n - 1})
        assert selection[1, 0, t, 0, : len(expected)].tolist() == expected
    assert torch.isfinite(lse).all()


def test_ties_count_every_leaf_once():
    """q = 0: every leaf weighs the same, so exp(lse) is their number and out their plain mean."""
    config = whole(150, 4, 4, H_kv=1)
    q, k, v = config.tensors()
    q.zero_()
    result = definition.forward(q, k, v, traces=True, **config.options)
    counts = torch.tensor([sum(int(step.leaves.sum()) for step in trace.layers) for trace in result.traces])
    torch.testing.assert_close(result.lse[0, :, 0].exp(), counts.double(), rtol=1e-12, atol=0)
    lse = run(q, k, v, config.params)[1]
    torch.testing.assert_close(lse[0, :, 0].exp(), counts.double(), rtol=1e-12, atol=0)


@both
def test_large_logits_stay_finite(backend):
    config = whole(90, 4, 4)
    q, k, v = config.tensors()
    out, lse, _ = run(q * 1e3, k * 1e3, v, config.params, backend)
    assert out.isfinite().all() and lse.isfinite().all()
    importance = run(q * 40, k * 40, v, config.params, backend)[2]
    assert torch.equal(importance, run(q * 40, k * 40, v, config.params, "definition")[2])


@pytest.mark.parametrize("magnitude", [1e-6, 1e6])
def test_key_magnitudes(magnitude):
    config = whole(90, 4, 4)
    q, k, v = config.tensors()
    k = k * magnitude
    mine, exact = run(q, k, v, config.params), run(q, k, v, config.params, "definition")
    assert torch.equal(mine[2], exact[2])
    torch.testing.assert_close(mine[0], exact[0], rtol=0, atol=1e-8)


@both
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poisoned_tokens_leave_a_proper_selection(backend, poison):
    """NaN and infinity inside the context: still min(top_k, n) distinct candidates, ascending, with the rightmost."""
    config = whole(150, 4, 4, H_kv=1)
    q, k, v = config.tensors()
    k[:, 5], k[:, 77, :, 1], q[:, 100] = poison, poison, poison
    out, _, selection = run(q, k, v, config.params, backend)
    assert not out.isinf().any(), "what an infinity reaches is NaN"
    if math.isnan(poison):
        assert out[:, 5:].isnan().all()
    for t in range(150):
        n, parents = t // 16 + 1, [0]
        for layer in (2, 1):
            row = selection[layer - 1, 0, t, 0]
            row = row[row >= 0].tolist()
            assert row == sorted(set(row)) and row[-1] == t // 4**layer and len(row) == min(4, n)
            assert layer == 2 or {node // 4 for node in row} <= set(parents)
            n, parents = (len(row) - 1) * 4 + t // 4 ** (layer - 1) % 4 + 1, row


@both
def test_an_infinite_value_gives_nan_where_it_is_attended(backend):
    config = whole(70, 4, 4, H_kv=1)
    q, k, v = config.tensors()
    clean = run(q, k, v, config.params, backend)[0]
    v[:, 20, 0, 2] = math.inf
    out = run(q, k, v, config.params, backend)[0]
    assert out[:, 20:, :, 2].isnan().all() and torch.equal(out[:, :20], clean[:, :20])
    keep = [0, 1, 3, 4]
    assert torch.equal(out[..., keep], clean[..., keep])


def test_infinite_mean_of_finite_values_stays_where_it_belongs():
    """Sixteen values of 3e38 overflow their float32 mean; expanded nodes must not carry that into the output."""
    config = Config(1, 130, 1, 129, 2, 1, 4, 3, 4, 4, 16, True, 7)
    q, k, v = config.tensors(torch.float32)
    v[:, 64:80] = 3e38  # layer 2 node 4; its mean overflows at layer 1 already
    selected = run(q, k, v, config.params)[2]
    params = config.params
    for _ in range(50):
        if 4 in selected[1, 0, 0, 0].tolist():
            break
        q = torch.randn_like(q)
        selected = run(q, k, v, params)[2]
    assert 4 in selected[1, 0, 0, 0].tolist()
    exact = definition.forward(q, k, v, selection=selected, **config.options)
    mine = run(q, k, v, params)[0]
    assert torch.equal(mine.isfinite(), exact.out.to(torch.float32).isfinite())


# ------------------------------------------------------------------------------------------------------- gradients


def test_definition_gradcheck():
    config = Config(1, 22, 3, 19, 2, 2, 4, 3, 4, 2, 5, True, 5)  # three layers
    q, k, v = (x.requires_grad_() for x in config.tensors())

    def f(q, k, v):
        result = definition.forward(q, k, v, **config.options)
        return result.out, result.lse

    assert torch.autograd.gradcheck(f, (q, k, v))


def test_backward_formula_equals_autograd_of_the_definition():
    for seed in range(3):
        config = Config(2, 60, 5, 50, 3, 2, 6, 5, 4, 4, 7, True, seed)
        q, k, v = (x.requires_grad_() for x in config.tensors())
        result = definition.forward(q, k, v, **config.options)
        dout, dlse = torch.randn_like(result.out), torch.randn_like(result.lse)
        by_autograd = torch.autograd.grad((result.out * dout).sum() + (result.lse * dlse).sum(), (q, k, v))
        by_formula = definition.backward(dout, dlse, q, k, v, result.selection, **config.options)
        for x, y in zip(by_autograd, by_formula):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


def test_margins_separate_selected_from_the_rest():
    config = whole(100, 4, 4)
    q, k, v = config.tensors()
    for trace in definition.forward(q, k, v, traces=True, **config.options).traces:
        for step in trace.layers:
            assert step.margin >= 0
            assert step.leaves.sum() + min(4, len(step.candidates)) * (step.layer > 0) == len(step.candidates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_keys_are_tied(dtype):
    """The definition expands the lower of equal keys, whatever their place among the candidates."""
    T, K = 230, 64
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        q, key = torch.randn(1, 3, 2, K, generator=g, dtype=dtype), torch.randn(1, 1, 1, K, generator=g, dtype=dtype)
        k, v = key.expand(1, T, 1, K).contiguous(), torch.randn(1, T, 1, 3, generator=g, dtype=dtype)
        result = definition.forward(
            q, k, v, q_start=T - 3, compression_rate=4, top_k_per_layer=4, max_top_nodes=16, scale=0.125,
            rope_base=None, strict_causal=True, compute_dtype=dtype,
        )  # fmt: skip
        top = result.selection[-1, 0, :, 0]  # all candidates of the highest layer are equal
        assert (top[:, :3] == torch.arange(3)).all()
