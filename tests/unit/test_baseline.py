"""The yardstick itself: correct code passes it, code that is wrong in one small way does not.

The torch backend in bf16/fp16 stands for a kernel here: it rounds less than the baseline, so it must pass; each wrong
variant below is a bug that a kernel could have, and must fail every numerical test.
"""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import definition
from htree_cuda.torch_backend import layers
from htree_cuda.torch_backend import tree as torch_tree

from .. import baseline
from ..inputs import Config

CONFIG = Config(1, 700, 12, 640, 4, 2, 32, 32, 4, 16, 64, True, seed=11, rope_base=10000.0)
DTYPES = [torch.bfloat16, torch.float16]


def run(q, k, v, config=CONFIG):
    return torch_tree.forward(q, k, v, config.params, need_selection=True)


def check(out, lse, q, k, v, selection, config=CONFIG):
    exact = definition.forward(q, k, v, selection=selection, **config.options)
    base = baseline.forward(q, k, v, selection, **config.options)
    baseline.assert_within("out", out, base.out, exact.out)
    baseline.assert_lse_within(lse, base.lse, exact.lse)
    return base


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_forward_passes(dtype):
    q, k, v = CONFIG.tensors(dtype)
    out, lse, selection = run(q, k, v)
    assert len(definition.layer_sizes(CONFIG.T, 4, 64)) == 3
    base = check(out, lse, q, k, v, selection)
    share = baseline.check_selection(q, k, selection, base.score_error, strict_causal=True, **CONFIG.options)
    assert share > 0.99


def one_parent_dropped(q, k, v):
    selection = run(q, k, v)[2]
    fewer = selection.clone()
    fewer[0, ..., 0] = fewer[0, ..., 1]  # the first parent of layer 0 is lost, the second one read twice
    result = definition.forward(q, k, v, selection=fewer.sort(-1).values, compute_dtype=torch.float32, **CONFIG.options)
    return result.out.to(q.dtype), result.lse, selection


def rank_off_by_one(q, k, v):
    """Candidate positions shifted by one against the query."""
    original = layers.Layer.query_place
    try:
        layers.Layer.query_place = lambda self: self.n.clamp(max=int(self.n.max()) - 1)
        out, lse, _ = run(q, k, v)
    finally:
        layers.Layer.query_place = original
    return out, lse, run(q, k, v)[2]


def two_heads_swapped(q, k, v):
    out, lse, selection = run(q, k, v)
    order = [1, 0, *range(2, out.shape[2])]
    return out[:, :, order], lse[:, :, order], selection


def one_tile_stale(q, k, v):
    """Sixteen keys and values, among the tokens the query reaches, replaced by their neighbours'."""
    selection = run(q, k, v)[2]
    k, v = k.clone(), v.clone()
    last = CONFIG.q_start
    k[:, last - 16 : last], v[:, last - 16 : last] = k[:, last - 32 : last - 16], v[:, last - 32 : last - 16]
    result = definition.forward(q, k, v, selection=selection, compute_dtype=torch.float32, **CONFIG.options)
    return result.out.to(q.dtype), result.lse, selection


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [one_parent_dropped, rank_off_by_one, two_heads_swapped, one_tile_stale])
def test_wrong_forwards_fail(wrong, dtype):
    q, k, v = CONFIG.tensors(dtype)
    out, lse, selection = wrong(q, k, v)
    exact = definition.forward(q, k, v, selection=selection, **CONFIG.options)
    base = baseline.forward(q, k, v, selection, **CONFIG.options)
    with pytest.raises(AssertionError):
        baseline.assert_within("out", out, base.out, exact.out)
    with pytest.raises(AssertionError):
        baseline.assert_lse_within(lse, base.lse, exact.lse)


def gradients_of(q, k, v, results, dout, dlse):
    return torch_tree.backward(dout, dlse, q, k, v, *results, CONFIG.params)


def backward_variants(q, k, v, results, dout, dlse):
    """name -> (gradients that are wrong in one small way, those of them that must fail)."""
    out, lse, selection = results
    fewer = selection.clone()
    fewer[0, ..., 0] = fewer[0, ..., 1]  # the first parent of layer 0 is lost, the second one read twice
    stale = k.clone()
    last = CONFIG.q_start
    stale[:, last - 16 : last] = k[:, last - 32 : last - 16]
    swapped = dout[:, :, [1, 0, *range(2, dout.shape[2])]]
    unpool = torch_tree._unpool
    try:
        torch_tree._unpool = lambda grad, below, r: unpool(grad, below, r) * r
        undivided = gradients_of(q, k, v, results, dout, dlse)
    finally:
        torch_tree._unpool = unpool
    everything = ("dq", "dk", "dv")
    return {
        "one parent dropped": (gradients_of(q, k, v, (out, lse, fewer.sort(-1).values), dout, dlse), everything),
        "two heads swapped": (gradients_of(q, k, v, results, swapped, dlse), everything),
        "one key tile stale": (gradients_of(q, stale, v, results, dout, dlse), everything),
        "no gradient through lse": (gradients_of(q, k, v, results, dout, torch.zeros_like(dlse)), ("dq", "dk")),
        "delta forgotten": (gradients_of(q, k, v, (torch.zeros_like(out), lse, selection), dout, dlse), ("dq", "dk")),
        "shares not divided": (undivided, ("dk", "dv")),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_yardstick_of_the_backward(dtype):
    q, k, v = CONFIG.tensors(dtype)
    results = run(q, k, v)
    dout, dlse = torch.randn(results[0].shape).to(dtype), torch.randn(results[1].shape)
    options = CONFIG.options
    exact = dict(zip(("dq", "dk", "dv"), definition.backward(dout, dlse, q, k, v, results[2], **options)))
    base = dict(zip(exact, baseline.backward(dout, dlse, q, k, v, *results, **options)))
    for name, x in zip(exact, gradients_of(q, k, v, results, dout, dlse)):
        baseline.assert_within(name, x, base[name], exact[name])
    for variant, (wrong, names) in backward_variants(q, k, v, results, dout, dlse).items():
        for name, x in zip(exact, wrong):
            if name in names:
                with pytest.raises(AssertionError):
                    baseline.assert_within(f"{variant}: {name}", x, base[name], exact[name])


def test_nan_never_passes():
    exact = torch.randn(3, 8, dtype=torch.float64)
    bad = exact.clone()
    bad[1, 2] = float("nan")
    with pytest.raises(AssertionError):
        baseline.assert_within("x", bad, exact.float(), exact)


@pytest.mark.parametrize("damage", ["not ascending", "without the rightmost", "not among", "not important", "padded"])
def test_wrong_selections_fail(damage):
    q, k, v = CONFIG.tensors(torch.bfloat16)
    selection = run(q, k, v)[2]
    base = baseline.forward(q, k, v, selection, **CONFIG.options)
    row = selection[1, 0, 3, 0]  # the upper of two selecting layers
    if damage == "not ascending":
        row[[0, 1]] = row[[1, 0]]
    elif damage == "without the rightmost":
        row[-1] -= 1 if row[-2] != row[-1] - 1 else 0
        row[:] = torch.tensor(sorted({*row.tolist()} | {*range(20)})[:16], dtype=torch.int32)
    elif damage == "not among":
        row[-1] = 10_000
    elif damage == "not important":
        trace = definition.forward(q[:, 3:4], k, v, traces=True, **{**CONFIG.options, "q_start": CONFIG.q_start + 3})
        weakest = int(trace.traces[0].layers[0].log_importance.argmin())
        keep = [x for x in row.tolist() if x != weakest][-15:]
        row[:] = torch.tensor(sorted([weakest, *keep]), dtype=torch.int32)
    else:
        row[5:] = -1
    with pytest.raises(AssertionError):
        baseline.check_selection(q, k, selection, base.score_error, strict_causal=True, **CONFIG.options)


# -------------------------------------------------------------------------------------------------------- attn_dist


def dist_problem():
    q, k = torch.randn(6, 70, 64, dtype=torch.float64), torch.randn(200, 1, 64, dtype=torch.float64)
    indices = torch.rand(6, 1, 200).argsort(-1)[..., :64].to(torch.int32)
    lse = torch.randn(6, 70) + 8
    return q, k, indices, lse


def dist_variants(q, k, indices, lse):
    """name -> a result that is wrong in one small way."""
    right = definition.attn_dist(q, k, indices, lse, compute_dtype=torch.float32)
    swapped = lse.clone()
    swapped[:, [0, 1]] = lse[:, [1, 0]]
    stale = k.clone()
    stale[indices[0, 0, :8].long()] = k[indices[0, 0, 8:16].long()]
    shifted = right.roll(1, -1)
    dropped = right.clone()
    dropped[0] -= definition.attn_dist(q[:, 5:6], k, indices, lse[:, 5:6], compute_dtype=torch.float32)[0]
    return {
        "two heads swapped": definition.attn_dist(q, k, indices, swapped, compute_dtype=torch.float32),
        "one key tile stale": definition.attn_dist(q, stale, indices, lse, compute_dtype=torch.float32),
        "slot off by one": shifted,
        "one head dropped": dropped,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_attn_dist_yardstick(dtype):
    q, k, indices, lse = dist_problem()
    args = (q.to(dtype), k.to(dtype), indices, lse)
    exact, base = definition.attn_dist(q, k, indices, lse), baseline.attn_dist(*args)
    right = torch.ops.htree_cuda.attn_dist(
        *args, None, sm_scale=None, q_start=None, k_stride=1, lse_base=2.0, backend="torch"
    )
    baseline.assert_within("attn_dist", right, base, exact)
    on_rounded = definition.attn_dist(*args)
    assert ((right - on_rounded).abs() <= baseline.attn_dist_arithmetic_bound(*args[:2], on_rounded, lse)).all()
    for name, wrong in dist_variants(*args).items():
        with pytest.raises(AssertionError):
            baseline.assert_within(name, wrong, base, exact)


# -------------------------------------------------------------------------------------------------- sparse_attention


def list_problem(dtype):
    """Unit-variance q and kv, lists with invalid and repeated slots, a causal rule and sinks."""
    q, kv = torch.randn(9, 12, 64).to(dtype), torch.randn(200, 1, 64).to(dtype)
    indices = torch.rand(9, 1, 200).argsort(-1)[..., :64].to(torch.int32)
    indices[:, :, 5:8] = indices[:, :, 8:11]
    indices[:, :, 20] = -1
    options = {"d_v": 48, "q_start": 170, "attn_sink": torch.randn(12) + 2, "lse_base": 2.0}
    return (q, kv, indices), options


def list_variants(q, kv, indices, **options):
    """name -> (out, lse) that is wrong in one small way, and which of the two must show it."""

    def run(q=q, kv=kv, indices=indices, **change):
        out, lse = definition.sparse_attention(q, kv, indices, compute_dtype=torch.float32, **{**options, **change})
        return out.to(q.dtype), lse

    out, lse = run()
    dropped, once, late = indices.clone(), indices.clone(), indices.clone()
    dropped[:, :, 30] = -1
    once[:, :, 5:8] = -1
    late[:, :, 40:48] = indices[:, :, 32:40]
    order = [1, 0, *range(2, q.shape[1])]
    sink2 = options["attn_sink"] * math.log2(math.e)
    return {
        "one slot dropped": (*run(indices=dropped), "out, lse"),
        "sink in lse": (out, torch.logaddexp2(lse, sink2), "lse"),
        "sink in base 2": (*run(attn_sink=options["attn_sink"] / math.log2(math.e)), "out"),
        "sink left out": (*run(attn_sink=None), "out"),
        "duplicates counted once": (*run(indices=once), "out, lse"),
        "one key tile stale": (*run(indices=late), "out, lse"),
        "two heads swapped": (*run(q=q[:, order]), "out, lse"),
        "causal rule off by one key": (*run(q_start=options["q_start"] - 1), "out, lse"),
        "values one column on": (out.roll(1, -1), lse, "out"),
        "lse in the other base": (out, lse * math.log(2.0), "lse"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_attention_yardstick(dtype):
    args, options = list_problem(dtype)
    exact = definition.sparse_attention(*args, **options)
    base = baseline.sparse_attention(*args, **options)
    right = htree_cuda.sparse_attention(*args, **options)
    baseline.assert_within("out", right[0], base[0], exact[0])
    baseline.assert_lse_within(right[1], base[1], exact[1])
    for name, (out, lse, shows) in list_variants(*args, **options).items():
        if "out" in shows:
            with pytest.raises(AssertionError):
                baseline.assert_within(name, out, base[0], exact[0])
        if "lse" in shows:
            with pytest.raises(AssertionError):
                baseline.assert_lse_within(lse, base[1], exact[1])
