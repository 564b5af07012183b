"""The options of the rotation and attention sinks (`forward`, its backward, cached calls) against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import htree_cuda
from htree_cuda import definition, definition_varlen, pairs
from htree_cuda.params import TreeParams
from htree_cuda.torch_backend import sinks, tree

from .. import cached
from ..inputs import Config, configs, examples
from ..varlen_inputs import Pack, random_pack
from .calls import SMALL, TREE, qkv

F64 = torch.float64
TOLERANCE = 1e-10
QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def inv_freq(base: float, R: int) -> torch.Tensor:
    """The expression of the library, which gives the bits of rope_base."""
    return base ** (-2.0 * torch.arange(R // 2, dtype=F64) / R)


@st.composite
def options(draw, K: int, H: int) -> dict:
    """Some of the options, in any combination that is allowed; always at least one."""
    drawn = {}
    R = K
    if draw(st.booleans()):
        R = drawn["rope_dim"] = 2 * draw(st.integers(1, K // 2))
    drawn["rope_interleaved"] = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["base", "none", "table64", "table32", "negative"]))
    if kind == "none":
        drawn["rope_base"] = None
    elif kind == "base":
        drawn["rope_base"] = draw(st.sampled_from([0.5, 100.0, 1e6]))
    else:
        table = torch.rand(R // 2, generator=generator, dtype=F64) * 2
        drawn["rope_inv_freq"] = table.float() if kind == "table32" else -table if kind == "negative" else table
    if draw(st.booleans()):
        sink = torch.randn(H, generator=generator, dtype=F64) * 3
        sink[draw(st.integers(0, H - 1))] = draw(st.sampled_from([-math.inf, 0.0, 20.0, math.inf]))
        drawn["attn_sink"] = sink
    return drawn


@st.composite
def problems(draw) -> tuple[Config, dict]:
    config = draw(configs())
    return config, draw(options(config.K, config.G * config.H_kv))


@settings(max_examples=200, **QUICK)
@given(problem=problems())
def test_every_option_equals_the_definition(problem):
    config, drawn = problem
    q, k, v = (x.requires_grad_() for x in config.tensors())
    call = {**config.options, "strict_causal": config.strict_causal}
    call |= {"rope_base": 10000.0} if "rope_inv_freq" in drawn else {}
    inputs = (q, k, v)
    if "attn_sink" in drawn:
        inputs += (drawn["attn_sink"].requires_grad_(),)
    out, lse, selection = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **{**call, **drawn})
    exact_options = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in drawn.items()}
    with torch.no_grad():
        exact = definition.forward(q, k, v, **{**call, **exact_options})
    assert torch.equal(selection, exact.selection)
    torch.testing.assert_close(out, exact.out, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact.lse, rtol=0, atol=TOLERANCE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    call.pop("strict_causal")
    with torch.no_grad():
        theirs = definition.backward(dout, dlse, q, k, v, exact.selection, **{**call, **exact_options})
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


@st.composite
def packs(draw) -> tuple[Pack, dict]:
    pack = random_pack(draw(st.integers(0, 2**31)), most=60)
    return pack, draw(options(pack.K, pack.H))


@settings(max_examples=examples(200), **QUICK)
@given(problem=packs())
def test_every_option_of_packs_equals_the_definition(problem):
    pack, drawn = problem
    call = {**pack.options, **drawn}
    if "rope_inv_freq" in drawn:
        call.pop("rope_base")
    inputs = tuple(x.requires_grad_() for x in pack.tensors())
    if "attn_sink" in drawn:
        inputs += (drawn["attn_sink"].requires_grad_(),)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (pack.cu_q, pack.cu_k))
    out, lse, selection = htree_cuda.forward_varlen(
        *inputs[:3], cu_q, cu_k, pack.max_q, pack.max_k, return_lse=True, return_selection=True, **call
    )
    call = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    sequences = definition_varlen.sequences_of_pack(pack.cu_q, pack.cu_k)
    with torch.no_grad():
        exact = definition_varlen.forward(*inputs[:3], sequences, max_seqlen_k=pack.max_k, **call)
    assert torch.equal(selection, exact[2])
    torch.testing.assert_close(out, exact[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact[1], rtol=0, atol=TOLERANCE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    with torch.no_grad():
        theirs = definition_varlen.backward(dout, dlse, *inputs[:3], exact[2], sequences, **call)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


def test_the_definition_s_formula_is_the_gradient_of_its_forward():
    """Autograd through the definition, the selection being a constant, is a second derivation."""
    q, k, v = qkv(T=40, T_q=5, grad=True)
    sink = torch.randn(4, dtype=F64, requires_grad=True)
    tree = {"compression_rate": 4, "top_k_per_layer": 2, "rope_dim": 4, "rope_interleaved": True}
    tree["rope_inv_freq"] = torch.tensor([0.7, 0.1], dtype=F64)
    result = definition.forward(q, k, v, attn_sink=sink, **tree)
    dout, dlse = torch.randn_like(result.out), torch.randn_like(result.lse)
    taped = torch.autograd.grad((result.out, result.lse), (q, k, v, sink), (dout, dlse))
    with torch.no_grad():
        formula = definition.backward(dout, dlse, q, k, v, result.selection, attn_sink=sink, **tree)
    for x, y in zip(formula, taped, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_table_of_the_base_gives_its_bits():
    q, k, v = qkv(grad=True)
    for rope_dim in (None, 4):
        results = []
        for rotation in ({"rope_base": 500.0}, {"rope_inv_freq": inv_freq(500.0, rope_dim or 8)}):
            out, lse = htree_cuda.forward(q, k, v, return_lse=True, rope_dim=rope_dim, **rotation, **SMALL)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))))
        for x, y in zip(*results):
            assert torch.equal(x, y)
    narrow = htree_cuda.forward(q, k, v, rope_inv_freq=inv_freq(500.0, 8).float(), **SMALL)
    assert not torch.equal(narrow, htree_cuda.forward(q, k, v, rope_base=500.0, **SMALL)), "float32 is used as given"


def test_interleaved_pairs_are_a_permutation_of_halves():
    q, k, v = qkv()
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # element i of the interleaved is order[i] of the halves
    expected = htree_cuda.forward(q, k, v, rope_base=100.0, **SMALL)
    swapped = htree_cuda.forward(q[..., order], k[..., order], v, rope_base=100.0, rope_interleaved=True, **SMALL)
    torch.testing.assert_close(swapped, expected, rtol=0, atol=1e-14)


def test_no_rotation_is_an_angle_of_zero():
    q, k, v = qkv()
    none = htree_cuda.forward(q, k, v, rope_base=None, **SMALL)
    assert torch.equal(none, htree_cuda.forward(q, k, v, rope_inv_freq=torch.zeros(4), **SMALL))
    assert not torch.equal(none, htree_cuda.forward(q, k, v, **SMALL))


def test_a_sink_that_takes_everything_leaves_no_gradient():
    q, k, v = qkv(grad=True)
    sink = torch.tensor([math.inf, -math.inf, 0.3, 300.0], dtype=F64, requires_grad=True)
    out, lse = htree_cuda.forward(q, k, v, attn_sink=sink, return_lse=True, **SMALL)
    plain = htree_cuda.forward(q, k, v, **SMALL)
    assert not out[:, :, 0].any() and torch.equal(out[:, :, 1], plain[:, :, 1])
    dq, dk, dv, dsink = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v, sink))
    assert all(x.isfinite().all() for x in (dq, dk, dv, dsink)) and not dsink[:2].any() and dsink[2] != 0
    # dlse reaches q and k although the weights of out vanish.
    (alone,) = torch.autograd.grad(htree_cuda.forward(q, k, v, return_lse=True, **SMALL)[1].sum(), q)
    torch.testing.assert_close(dq[:, :, 3], alone[:, :, 3], rtol=1e-9, atol=1e-12)
    half = [x.detach().to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    sink = sink.detach().float().requires_grad_()
    out = htree_cuda.forward(*half, attn_sink=sink, **SMALL)
    grads = torch.autograd.grad(out.float().sum(), (*half, sink))
    assert all(x.isfinite().all() for x in grads) and grads[3].dtype == torch.float32


@pytest.mark.parametrize("sink", [None, torch.zeros(2, dtype=F64)])
def test_a_query_whose_scores_are_all_minus_infinity_is_nan(sink):
    """With a sink too; where another score is finite, a weight of 0 is what minus infinity stands for."""
    q, k, v = torch.zeros(1, 2, 2, 4, dtype=F64), torch.zeros(1, 2, 1, 4, dtype=F64), torch.randn(1, 2, 1, 4, dtype=F64)
    q[..., 0], k[0, 0, 0, 0] = 1, -math.inf
    tree = {"compression_rate": 4, "top_k_per_layer": 2, "rope_base": None, "attn_sink": sink}
    exact = definition.forward(q, k, v, **tree)
    for out, lse in (htree_cuda.forward(q, k, v, return_lse=True, **tree), (exact.out, exact.lse)):
        assert out[0, 0].isnan().all() and lse[0, 0].isnan().all()
        torch.testing.assert_close(out[0, 1], v[0, 1].expand(2, 4) * (1.0 if sink is None else 0.5))


def test_sinks_of_rows_without_a_key():
    """A row that no sequence has gives a sink no gradient, -inf sinks included, and its dlse stays a number."""
    sink = torch.tensor([-math.inf, 0.0, math.inf], dtype=F64)
    lse, dlse = torch.full((2, 3), -math.inf, dtype=F64), torch.ones(2, 3, dtype=F64)
    assert not sinks.gradient(torch.ones(2, 3, 5, dtype=F64), torch.zeros(2, 3, 5, dtype=F64), lse, sink).any()
    assert torch.equal(sinks.folded(lse, dlse, sink)[1], dlse)


def test_the_gradient_of_a_sink_in_pieces(monkeypatch):
    dout, out = torch.randn(2, 2, 37, 3, 5, dtype=F64)
    lse, sink = torch.randn(2, 37, 3, dtype=F64), torch.randn(3, dtype=F64)
    whole = sinks.gradient(dout, out, lse, sink)
    monkeypatch.setattr(sinks, "ELEMENTS", 100)
    torch.testing.assert_close(sinks.gradient(dout, out, lse, sink), whole, rtol=1e-12, atol=1e-12)
    assert not sinks.gradient(dout[:, :0], out[:, :0], lse[:, :0], sink).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_dimension_of_256(dtype):
    """What no kernel has: K = V = 256, four heads on one, as in Gemma 3 270M."""
    config = Config(1, 700, 12, 680, 4, 1, 256, 256, 16, 4, 64, True, seed=5, rope_base=1e6)
    q, k, v = (x.requires_grad_() for x in config.tensors(dtype))
    out, selection = htree_cuda.forward(q, k, v, return_selection=True, **config.options)
    exact = definition.forward(*(x.detach() for x in (q, k, v)), selection=selection, **config.options)
    torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    dout = torch.randn_like(out)
    mine = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        theirs = definition.backward(dout, None, q, k, v, selection, **config.options)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)


# ------------------------------------------------------------------------------------------------------ cached calls


@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_base": None},
        {"rope_dim": 4, "rope_base": 50.0},
        {"rope_interleaved": True},
        {"rope_inv_freq": torch.tensor([1.0, 0.3, -0.2, 0.05]), "attn_sink": torch.randn(4, dtype=F64)},
        {"rope_dim": 2, "rope_inv_freq": torch.tensor([0.5]), "rope_interleaved": True},
    ],
    ids=lambda rotation: "-".join(rotation),
)
def test_a_cached_call_equals_forward(rotation, rows):
    """Up to 8 rows go their own way; more are calls of `forward`, with its bits."""
    q, k, v = qkv(T=90, T_q=rows)
    cache = htree_cuda.TreeCache(1, 100, 2, 8, v_head_dim=6, compression_rate=4, dtype=F64)
    cache.append(k, v)
    mine = htree_cuda.forward_cached(
        q, cache, top_k_per_layer=4, return_lse=True, return_selection=True, **rotation
    )  # fmt: skip
    expected = htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **rotation, **SMALL)
    for x, y in zip(mine[:2], expected[:2]):
        torch.testing.assert_close(x, y, rtol=0, atol=0 if rows > 8 else 1e-12)
    assert torch.equal(mine[2][: expected[2].shape[0]], expected[2])


@st.composite
def cached_calls(draw) -> tuple[list[int], int, dict]:
    """Lengths of the sequences of a cache, rows of queries, and options."""
    lengths = draw(st.lists(st.sampled_from(cached.LENGTHS), min_size=1, max_size=3))
    return lengths, draw(st.sampled_from([1, 1, 2, 5, 8, 11])), draw(options(8, 4))


@settings(max_examples=examples(200), **QUICK)
@given(problem=cached_calls())
def test_every_option_of_cached_calls_equals_the_definition(problem):
    lengths, rows, drawn = problem
    q, (k, v) = cached.queries(len(lengths), rows), cached.tokens(len(lengths), max(*lengths, 1))
    cache = cached.filled(k, v, lengths)
    cached.check_rows(cached.run(q, cache, **drawn), q, k, v, lengths, oracle=definition.forward, **drawn)


# ------------------------------------------------------------------------------------- what the kernels are given


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_interleaved": True},
        {"rope_dim": 6},
        {"rope_interleaved": True, "rope_dim": 6},
        {"rope_base": None},
        {"rope_dim": 4, "rope_inv_freq": torch.tensor([0.7, 0.2]), "rope_base": None},
    ],
    ids=lambda rotation: "-".join(rotation),
)
def test_arranged_calls_are_the_same_function_on_halves(rotation):
    """q, k and a table as the kernels take them, and gradients back; what is not arranged is no call of a kernel."""
    q, k, v = qkv()
    params = TreeParams(58, 4, 4, 16, 0.25, **{"rope_base": 50.0, "strict_causal": True, **rotation})
    mine, keys, own = pairs.arranged(q, k, params)
    assert not own.rope_interleaved and own.rope_dim == 8
    assert own.rope_base == 50.0 if own.rope_inv_freq is None else own.rope_inv_freq.shape == (4,)
    for x, y in zip(tree.forward(mine, keys, v, own), tree.forward(q, k, v, params)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert torch.equal(pairs.from_halves(mine, params), q)
    pairs.check_arranged(own, 8)
    with pytest.raises(RuntimeError, match=r"that pairs\.arranged has not seen"):
        pairs.check_arranged(params, 8)


# ------------------------------------------------------------------------------------------------- ops, compile, errors


def test_opcheck_with_every_option():
    q, k, v = qkv(T=30, T_q=10, grad=True)
    sink = torch.randn(4, dtype=F64, requires_grad=True)
    table = torch.rand(2, dtype=F64)
    tree = {**TREE, "rope_base": None, "rope_dim": 4, "rope_interleaved": True, "backend": "auto"}
    torch.library.opcheck(torch.ops.htree_cuda.forward, (q, k, v, sink, table), {**tree, "need_selection": True})
    q, k, v, sink = (x.detach() for x in (q, k, v, sink))
    out, lse, selection = torch.ops.htree_cuda.forward(q, k, v, sink, table, need_selection=True, **tree)
    args = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, selection, sink, table)
    torch.library.opcheck(torch.ops.htree_cuda.backward, args, tree)
    torch.library.opcheck(torch.ops.htree_cuda.sink_gradient, (torch.randn_like(out), out, lse, sink))


def test_compile_with_every_option():
    q, k, v = qkv(grad=True)
    sink, table = torch.randn(4, dtype=F64, requires_grad=True), torch.rand(2)

    def call(q, k, v, sink, table):
        rotation = {"rope_inv_freq": table, "rope_dim": 4, "rope_interleaved": True}
        return htree_cuda.forward(q, k, v, attn_sink=sink, **rotation, **SMALL).square().sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(call(q, k, v, sink, table), (q, k, v, sink))
    for x, y in zip(eager, torch.autograd.grad(compiled(q, k, v, sink, table), (q, k, v, sink)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("match", "error", "options"),
    [
        (r"forward: rope_dim must be even, 2 .. K \(8\), got 3", ValueError, {"rope_dim": 3}),
        (r"forward: rope_dim must be even, 2 .. K \(8\), got 0", ValueError, {"rope_dim": 0}),
        (r"forward: rope_dim must be even, 2 .. K \(8\), got 10", ValueError, {"rope_dim": 10}),
        (r"rope_dim must be an int or None, got 4.0", TypeError, {"rope_dim": 4.0}),
        (r"rope_interleaved must be a bool, got 1", TypeError, {"rope_interleaved": 1}),
        (r"rope_inv_freq must be a torch.Tensor, got list", TypeError, {"rope_inv_freq": [1.0]}),
        (r"rope_inv_freq must be float32 or float64, got torch.bfloat16", ValueError,
         {"rope_inv_freq": torch.ones(4).bfloat16()}),
        (r"rope_inv_freq must have 1 dimensions \[R/2\]", ValueError, {"rope_inv_freq": torch.ones(1, 4)}),
        (r"dimension 0 of rope_inv_freq must equal rope_dim / 2 \(2\), got 4", ValueError,
         {"rope_inv_freq": torch.ones(4), "rope_dim": 4}),
        (r"rope_inv_freq takes the place of rope_base, which must be left alone, got 5.0", ValueError,
         {"rope_inv_freq": torch.ones(4), "rope_base": 5.0}),
        (r"rope_inv_freq must be finite, got \[1.0, 1.0, inf, 1.0\]", ValueError,
         {"rope_inv_freq": torch.tensor([1.0, 1.0, math.inf, 1.0])}),
        (r"rope_inv_freq must be on the device of q \(cpu\), got meta", ValueError,
         {"rope_inv_freq": torch.ones(4, device="meta")}),
        (r"rope_inv_freq must not require a gradient", ValueError,
         {"rope_inv_freq": torch.ones(4, requires_grad=True)}),
        (r"attn_sink must be float64 where q is torch.float64, got torch.float32", ValueError,
         {"attn_sink": torch.ones(4)}),
        (r"attn_sink must have 1 dimensions \[H\]", ValueError, {"attn_sink": torch.ones(1, 4, dtype=F64)}),
        (r"dimension 0 of attn_sink must equal H of q \(4\), got 2", ValueError,
         {"attn_sink": torch.ones(2, dtype=F64)}),
        (r"attn_sink must be a torch.Tensor, got float", TypeError, {"attn_sink": 1.0}),
        (r"attn_sink must be on the device of q \(cpu\), got meta", ValueError,
         {"attn_sink": torch.ones(4, dtype=F64, device="meta")}),
        (r"forward: softcap must be 0: scores are compared and summed as they are, without a soft-cap, got 50.0",
         ValueError, {"softcap": 50.0}),
    ],
)  # fmt: skip
def test_errors(match, error, options):
    with pytest.raises(error, match=match):
        htree_cuda.forward(*qkv(), **{**SMALL, **options})


def test_ops_refuse_what_the_function_never_passes():
    with pytest.raises(ValueError, match=r"rope_base must be None where rope_inv_freq is given, got 100\.0"):
        torch.ops.htree_cuda.forward(*qkv(), None, torch.ones(4), **TREE, need_selection=False, backend="auto")
