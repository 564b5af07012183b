"""Packed and ragged sequences on the torch backend: the definition, a loop over sequences, hostile lengths, the ops."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch._dynamo.testing

import htree_cuda
from htree_cuda import definition_varlen
from tests.unit.calls import SMALL, qkv
from tests.varlen_inputs import Pack, lengths_around_layers, random_pack

TOLERANCE = 1e-10
PACKS = 300 if os.environ.get("HTREE_CUDA_THOROUGH") == "1" else 8


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(pack: Pack, q, k, v, **options):
    cu_q, cu_k = ints(pack.cu_q), ints(pack.cu_k)
    options = {"return_lse": True, "return_selection": True, **pack.options, **options}
    return htree_cuda.forward_varlen(q, k, v, cu_q, cu_k, pack.max_q, pack.max_k, **options)


def a_pack(keys=(30, 1, 0, 70, 17), queries=None, padding=5, seed=0, **options) -> Pack:
    queries = list(keys) if queries is None else list(queries)
    return Pack(list(keys), queries, padding, 4, 2, 8, 6, {**SMALL, **options}, seed)


# ---------------------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("seed", range(PACKS))
def test_equals_the_definition(seed):
    pack = random_pack(seed)
    q, k, v = (x.requires_grad_() for x in pack.tensors())
    strict = seed % 3 != 0
    out, lse, selection = packed(pack, q, k, v, strict_causal=strict)
    sequences = definition_varlen.sequences_of_pack(pack.cu_q, pack.cu_k)
    with torch.no_grad():
        exact = definition_varlen.forward(
            q, k, v, sequences, max_seqlen_k=pack.max_k, strict_causal=strict, **pack.options
        )
    assert torch.equal(selection, exact[2])
    torch.testing.assert_close(out, exact[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact[1], rtol=0, atol=TOLERANCE)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        theirs = definition_varlen.backward(dout, dlse, q, k, v, exact[2], sequences, **pack.options)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["seqused_k", "both", "starts", "list", "int"])
def test_ragged_equals_the_definition(form):
    B, T, T_q = 4, 40, 9
    q, k, v = qkv(T=T, T_q=T_q, B=B, grad=True)
    used_k, used_q, starts = [40, 7, 0, 33], [T_q] * B, None
    options = {"seqused_k": ints(used_k)}
    if form in ("both", "starts", "list"):
        used_q = [9, 9, 3, 0]
        options["seqused_q"] = ints(used_q)
    if form in ("starts", "list"):
        starts = [-2, 3, 0, 20]
        options["q_start"] = torch.tensor(starts) if form == "starts" else starts
    if form == "int":
        starts = [31] * B
        options["q_start"] = 31
    flags = {"return_lse": True, "return_selection": True}
    out, lse, selection = htree_cuda.forward(q, k, v, **options, **flags, **SMALL)
    sequences = definition_varlen.sequences_of_batch(used_q, used_k, starts)
    with torch.no_grad():
        exact = definition_varlen.forward(q, k, v, sequences, max_seqlen_k=T, **SMALL)
    assert torch.equal(selection, exact[2])
    torch.testing.assert_close(out, exact[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse, exact[1], rtol=0, atol=TOLERANCE)
    assert (lse == -math.inf).any() and not (lse == -math.inf).all()
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        theirs = definition_varlen.backward(dout, dlse, q, k, v, exact[2], sequences, **SMALL)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


def test_a_list_of_equal_starts_is_the_plain_call():
    q, k, v = qkv(B=2)
    expected = htree_cuda.forward(q, k, v, q_start=20, **SMALL)
    for q_start in ([20, 20], torch.tensor([20, 20]), torch.tensor([20, 20], dtype=torch.int32)):
        torch.testing.assert_close(htree_cuda.forward(q, k, v, q_start=q_start, **SMALL), expected, rtol=0, atol=1e-14)


# ------------------------------------------------------------------------------------------- independence, in bits


def test_packed_is_a_loop():
    """Sequences of lengths of their own run through the same operations as a call of each: the same bits."""
    pack = a_pack(keys=lengths_around_layers(4, 4, 70), padding=3)
    q, k, v = pack.tensors()
    out, lse, selection = packed(pack, q, k, v)
    for begin, end in zip(pack.cu_k, pack.cu_k[1:]):
        if begin == end:
            continue
        rows = slice(begin, end)
        one = htree_cuda.forward(
            q[rows][None], k[rows][None], v[rows][None], return_lse=True, return_selection=True, **SMALL
        )
        assert torch.equal(out[rows], one[0][0]) and torch.equal(lse[rows], one[1][0])
        found = one[2].shape[0]
        assert torch.equal(selection[:found, rows], one[2][:, 0])
        for layer in range(found + 1, selection.shape[0] + 1):  # the layers that the shorter sequence does not have
            for t in range(end - begin):
                nodes = [*range(t // 4**layer + 1), *[-1] * 4][:4]
                assert selection[layer - 1, begin + t].tolist() == [nodes] * 2


def test_a_permutation_permutes_the_results():
    pack = a_pack(keys=(30, 1, 70, 17, 5), padding=0)
    q, k, v = (x.requires_grad_() for x in pack.tensors())
    order = [3, 0, 4, 2, 1]
    rows = torch.cat([torch.arange(pack.cu_k[i], pack.cu_k[i + 1]) for i in order])
    other = a_pack(keys=[pack.keys[i] for i in order], padding=0)
    first = packed(pack, q, k, v)
    second = packed(other, *(x[rows] for x in (q, k, v)))
    assert torch.equal(first[0][rows], second[0]) and torch.equal(first[1][rows], second[1])
    assert torch.equal(first[2][:, rows], second[2])
    for x, y in zip(
        torch.autograd.grad(first[0].square().sum(), (q, k, v)),
        torch.autograd.grad(second[0].square().sum(), (q, k, v)),
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_sequence(bad):
    pack = a_pack(keys=(30, 12, 70), padding=4)
    clean = [x.requires_grad_() for x in pack.tensors()]
    expected = packed(pack, *clean)
    gradients = torch.autograd.grad(expected[0].square().sum(), clean)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[30:42] = bad
        x[112:] = bad
    dirty = [x.requires_grad_() for x in dirty]
    found = packed(pack, *dirty)
    keep = torch.tensor([*range(30), *range(42, 112)])
    for x, y in zip(expected[:2], found[:2]):
        assert torch.equal(x[keep], y[keep])
    assert torch.equal(expected[2][:, keep], found[2][:, keep])
    assert (found[0][112:] == 0).all() and (found[1][112:] == -math.inf).all() and found[0][30:42].isnan().all()
    dout = 2 * expected[0].detach()
    mine = torch.autograd.grad(found[0], dirty, dout)
    for x, y in zip(gradients, mine):
        assert torch.equal(x[keep], y[keep]) and (y[112:] == 0).all()


def test_what_lies_behind_seqused_is_never_read():
    q, k, v = qkv(T=40, T_q=40, B=2)
    used = ints([17, 40])
    expected = htree_cuda.forward(q, k, v, seqused_k=used, seqused_q=used, return_lse=True, **SMALL)
    for x in (q, k, v):
        x[0, 17:] = math.nan
    found = htree_cuda.forward(q, k, v, seqused_k=used, seqused_q=used, return_lse=True, **SMALL)
    assert all(torch.equal(x, y) for x, y in zip(expected, found))
    alone = htree_cuda.forward(q[:1, :17], k[:1, :17], v[:1, :17], return_lse=True, **SMALL)
    assert torch.equal(found[0][:1, :17], alone[0]) and torch.equal(found[1][:1, :17], alone[1])


def test_queries_without_a_key():
    pack = a_pack(keys=(3, 0, 20), queries=(5, 2, 20), padding=0)
    out, lse, selection = packed(pack, *pack.tensors())
    empty = torch.tensor([0, 1, 5, 6])
    assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all() and (selection[:, empty] == -1).all()
    assert (lse[2:5] > -math.inf).all() and (lse[7:] > -math.inf).all()


def test_no_sequence_and_no_row():
    q, k, v = torch.randn(4, 2, 8), torch.randn(4, 1, 8), torch.randn(4, 1, 6)
    out, lse = htree_cuda.forward_varlen(q, k, v, ints([0]), ints([0]), 0, 0, return_lse=True)
    assert out.shape == (4, 2, 6) and (out == 0).all() and (lse == -math.inf).all()
    out = htree_cuda.forward_varlen(q[:0], k[:0], v[:0], ints([0, 0, 0]), ints([0, 0, 0]), 0, 0)
    assert out.shape == (0, 2, 6)


# ------------------------------------------------------------------------------------------------- hostile lengths

HOSTILE = [
    [0, -5, 40, 70], [0, 2**31 - 1, 3, 70], [70, 30, 10, 0], [-(2**31), 2**31 - 1, -1, 2**31 - 1], [5, 5, 1000, 60],
]  # fmt: skip


@pytest.mark.parametrize("cu", HOSTILE)
def test_garbage_lengths_do_no_harm(cu):
    q, k, v = (x[0].requires_grad_() for x in qkv(T=70, T_q=70))
    for first, second in ((ints(cu), ints(cu)), (ints([0, 10, 20, 70]), ints(cu)), (ints(cu), ints([0, 10, 20, 70]))):
        out = htree_cuda.forward_varlen(q, k, v, first, second, 50, 40, **SMALL)
        assert out.shape == (70, 4, 6)
        torch.autograd.grad(out.sum(), (q, k, v))


@pytest.mark.parametrize("used", [[-3, 2**31 - 1], [2**31 - 1, -(2**31)]])
def test_garbage_in_seqused_is_clamped(used):
    q, k, v = qkv(T=30, T_q=30, B=2)
    inside = ints([min(max(x, 0), 30) for x in used])
    for name in ("seqused_k", "seqused_q"):
        found = htree_cuda.forward(q, k, v, **{name: ints(used)}, **SMALL)
        assert torch.equal(found, htree_cuda.forward(q, k, v, **{name: inside}, **SMALL))
    starts = torch.tensor([-(2**63), 2**63 - 1])
    assert (htree_cuda.forward(q, k, v, q_start=starts, **SMALL) == 0).all()


@pytest.mark.parametrize(
    ("match", "cu_q", "cu_k", "maxima"),
    [
        (r"cu_seqlens_q must begin at 0, got 1", [1, 10], [0, 10], (70, 70)),
        (r"cu_seqlens_k must not decrease, at sequence 1, got 10 and then 4", [0, 10, 10], [0, 10, 4], (70, 70)),
        (r"sequence 1 of cu_seqlens_q must have at most max_seqlen_q \(8\) rows, got 9", [0, 5, 14], [0, 5, 9], (8, 9)),
        (r"sequence 0 of cu_seqlens_k must have at most max_seqlen_k \(9\) rows, got 10", [0, 10], [0, 10], (70, 9)),
        (r"cu_seqlens_q must end at total_q \(70\) or before, got 71", [0, 71], [0, 70], (71, 71)),
    ],
)  # fmt: skip
def test_lengths_are_checked_on_demand(monkeypatch, match, cu_q, cu_k, maxima):
    q, k, v = (x[0] for x in qkv(T=70, T_q=70))
    htree_cuda.forward_varlen(q, k, v, ints(cu_q), ints(cu_k), *maxima, **SMALL)
    monkeypatch.setenv("HTREE_CUDA_CHECK", "1")
    with pytest.raises(ValueError, match=f"forward_varlen: {match}"):
        htree_cuda.forward_varlen(q, k, v, ints(cu_q), ints(cu_k), *maxima, **SMALL)


def test_seqused_is_checked_on_demand(monkeypatch):
    q, k, v = qkv(T=70, T_q=12, B=2)
    monkeypatch.setenv("HTREE_CUDA_CHECK", "1")
    with pytest.raises(ValueError, match=r"forward: seqused_q of row 1 must lie in 0 .. T_q \(12\), got 13"):
        htree_cuda.forward(q, k, v, seqused_q=ints([12, 13]), **SMALL)
    with pytest.raises(ValueError, match=r"forward: seqused_k of row 0 must lie in 0 .. T \(70\), got -1"):
        htree_cuda.forward(q, k, v, seqused_k=ints([-1, 70]), **SMALL)
    htree_cuda.forward(q, k, v, seqused_k=ints([0, 70]), **SMALL)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("match", "error", "changes"),
    [
        (r"q must have 3 dimensions \[total_q, H, K\]", ValueError, {"q": torch.zeros(1, 70, 4, 8)}),
        (r"v must have 3 dimensions \[total_k, H_kv, V\]", ValueError, {"v": torch.zeros(70, 6)}),
        (r"dimension -3 of v must equal total_k of k \(70\), got 71", ValueError, {"v": torch.zeros(71, 2, 6)}),
        (r"cu_seqlens_q must be int32, got torch.int64", ValueError, {"cu_q": torch.tensor([0, 70])}),
        (r"cu_seqlens_k must be a torch.Tensor, got list", TypeError, {"cu_k": [0, 70]}),
        (r"dimension 0 of cu_seqlens_k must equal N \+ 1 \(2\), got 3", ValueError, {"cu_k": ints([0, 1, 2])}),
        (r"cu_seqlens_q must have 1 dimensions \[N \+ 1\]", ValueError, {"cu_q": ints([[0, 70]])}),
        (r"N \+ 1 .* must be at least 1, got 0", ValueError, {"cu_q": ints([])}),
        (r"max_seqlen_q must be an int, got 1.5", TypeError, {"max_q": 1.5}),
        (r"max_seqlen_k must be at least 0, got -1", ValueError, {"max_k": -1}),
        (r"cu_seqlens_q must be on the device of q", ValueError, {"cu_q": ints([0, 70]).to("meta")}),
        (r"H .* must be a positive multiple of H_kv \(2\), got 3", ValueError, {"q": torch.zeros(70, 3, 8)}),
        (r"K .* must be even", ValueError, {"q": torch.zeros(70, 4, 7), "k": torch.zeros(70, 2, 7)}),
        (r"k must have the dtype", ValueError, {"k": torch.zeros(70, 2, 8).half()}),
    ],
)  # fmt: skip
def test_errors(match, error, changes):
    cu = ints([0, 70])
    given = {"q": torch.zeros(70, 4, 8), "k": torch.zeros(70, 2, 8), "v": torch.zeros(70, 2, 6), "cu_q": cu, "cu_k": cu}
    given = {**given, "max_q": 70, "max_k": 70, **changes}
    with pytest.raises(error, match=f"forward_varlen: {match}"):
        htree_cuda.forward_varlen(*given.values(), **SMALL)


@pytest.mark.parametrize(
    ("match", "error", "options"),
    [
        (r"seqused_k must be int32, got torch.int64", ValueError, {"seqused_k": torch.tensor([3, 4])}),
        (r"dimension 0 of seqused_q must equal B \(2\), got 1", ValueError, {"seqused_q": ints([3])}),
        (r"seqused_k must be a torch.Tensor, got list", TypeError, {"seqused_k": [3, 4]}),
        (r"q_start must be int32 or int64, got torch.float32", ValueError, {"q_start": torch.zeros(2)}),
        (r"the number of q_start must equal B of q \(2\), got 3", ValueError, {"q_start": [1, 2, 3]}),
        (r"q_start must lie in -T_q .. T \(-12 .. 70\) .*, got 71", ValueError, {"q_start": [1, 71]}),
        (r"q_start must be an int, got 1.5", TypeError, {"q_start": [1, 1.5]}),
    ],
)
def test_ragged_errors(match, error, options):
    with pytest.raises(error, match=f"forward: {match}"):
        htree_cuda.forward(*qkv(B=2), **options, **SMALL)


# ---------------------------------------------------------------------------------------------------------- the ops


@pytest.mark.parametrize("need_selection", [True, False])
def test_opcheck(need_selection):
    pack = a_pack()
    q, k, v = (x.requires_grad_() for x in pack.tensors())
    cu = ints(pack.cu_k)
    tree = {**SMALL, "max_top_nodes": None, "scale": None, "rope_base": 100.0, "strict_causal": True, "backend": "auto"}
    maxima = {"max_seqlen_q": 70, "max_seqlen_k": 70}
    options = {**maxima, **tree, "need_selection": need_selection}
    torch.library.opcheck(torch.ops.htree_cuda.forward_varlen, (q, k, v, cu, cu, None, None, None), options)
    if not need_selection:
        return
    with torch.no_grad():
        out, lse, selection = torch.ops.htree_cuda.forward_varlen(q, k, v, cu, cu, None, None, None, **options)
    args = (torch.randn_like(out), torch.randn_like(lse), q.detach(), k.detach(), v.detach(), out, lse, selection)
    torch.library.opcheck(torch.ops.htree_cuda.backward_varlen, (*args, cu, cu, None, None, None), {**maxima, **tree})


def test_opcheck_ragged():
    q, k, v = qkv(B=2, grad=True)
    tree = {**SMALL, "max_top_nodes": None, "scale": None, "rope_base": 100.0, "strict_causal": True, "backend": "auto"}
    options = {"max_seqlen_q": 12, "max_seqlen_k": 70, **tree, "need_selection": True}
    lengths = (None, None, ints([12, 5]), ints([70, 33]), torch.tensor([3, 4]))
    torch.library.opcheck(torch.ops.htree_cuda.forward_varlen, (q, k, v, *lengths), options)


def test_gradcheck():
    pack = Pack([5, 0, 21], [5, 0, 3], 0, 2, 1, 4, 3, {"compression_rate": 4, "top_k_per_layer": 2}, 0)
    tensors = [x.requires_grad_() for x in pack.tensors()]
    assert torch.autograd.gradcheck(lambda *x: packed(pack, *x, return_selection=False), tensors)


def test_compile_fullgraph_with_dynamic_totals_and_sequences():
    def call(q, k, v, cu, longest):
        return htree_cuda.forward_varlen(q, k, v, cu, cu, longest, longest, return_lse=True, **SMALL)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    packs = [a_pack(keys=keys, padding=0) for keys in ((70, 3), (80, 1, 9), (90, 20, 0, 5, 1))]  # three layers each
    for pack in packs:
        args = (*pack.tensors(), ints(pack.cu_k), pack.max_k)
        for x, y in zip(counted(*args), call(*args)):
            assert torch.equal(x, y)
    assert counter.frame_count <= 2, "one graph for any pack"


def test_compile_gradients():
    def call(q, k, v, cu):
        return htree_cuda.forward_varlen(q, k, v, cu, cu, 70, 70, **SMALL).square().sum()

    pack = a_pack()
    tensors = [x.requires_grad_() for x in pack.tensors()]
    cu = ints(pack.cu_k)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(call(*tensors, cu), tensors)
    for x, y in zip(eager, torch.autograd.grad(compiled(*tensors, cu), tensors)):
        torch.testing.assert_close(x, y)


def test_compile_ragged():
    def call(q, k, v, used):
        return htree_cuda.forward(q, k, v, seqused_k=used, **SMALL)

    args = (*qkv(B=2), ints([70, 9]))
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*args), call(*args))


def test_export():
    class Call(torch.nn.Module):
        def forward(self, q, k, v, cu):
            return htree_cuda.forward_varlen(q, k, v, cu, cu, 70, 70, **SMALL)

    total, count = torch.export.Dim("total", min=2, max=4096), torch.export.Dim("count", min=2, max=64)
    shapes = {"q": {0: total}, "k": {0: total}, "v": {0: total}, "cu": {0: count}}
    pack, other = a_pack(padding=0), a_pack(keys=(70, 50), padding=2)
    exported = torch.export.export(Call(), (*pack.tensors(), ints(pack.cu_k)), dynamic_shapes=shapes).module()
    for x in (pack, other):
        args = (*x.tensors(), ints(x.cu_k))
        assert torch.equal(exported(*args), Call()(*args))


def test_autocast_and_checkpoint():
    pack = a_pack()
    q, k, v = (x.requires_grad_() for x in pack.tensors(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, _ = packed(pack, q, k, v)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    expected, _, _ = packed(pack, *(x.bfloat16() for x in (q, k, v)))
    assert torch.equal(out, expected)

    def call(q, k, v):
        return packed(pack, q, k, v)[0].square().sum()

    plain = torch.autograd.grad(call(q, k, v), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    assert all(torch.equal(x, y) for x, y in zip(plain, torch.autograd.grad(again, (q, k, v))))


def test_a_selection_found_again_gives_the_same_bits():
    pack = a_pack(queries=(3, 1, 0, 20, 17))
    q, k, v = (x.requires_grad_() for x in pack.tensors())
    results = []
    for save_selection in (True, False):
        out, lse = packed(pack, q, k, v, return_selection=False, save_selection=save_selection)
        results.append(torch.autograd.grad((out[:21].sum() + lse[:21].sum()), (q, k, v)))
    assert all(torch.equal(x, y) and x.abs().sum() > 0 for x, y in zip(*results))


def test_options_of_the_rotation_and_sinks():
    """As a loop of `forward` with the same options; the gradient of the sinks is the sum over the sequences'."""
    pack = a_pack(keys=(30, 5, 70))
    tensors = [x.requires_grad_() for x in pack.tensors()]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = {"rope_inv_freq": torch.rand(3, dtype=torch.float64), "rope_dim": 6, "rope_interleaved": True}
    out, lse, _ = packed(pack, *tensors, attn_sink=sink, **options)
    weights = torch.randn_like(out)
    weights[105:] = math.nan  # of padding
    mine = torch.autograd.grad(out, (*tensors, sink), weights)
    loop, loop_lse = [], []
    for begin, end in zip(pack.cu_k, pack.cu_k[1:]):
        parts = [x[None, begin:end] for x in tensors]
        one = htree_cuda.forward(*parts, attn_sink=sink, return_lse=True, **options, **SMALL)
        loop.append(one[0][0]), loop_lse.append(one[1][0])
    assert torch.equal(torch.cat(loop), out[:105]) and torch.equal(torch.cat(loop_lse), lse[:105])
    theirs = torch.autograd.grad(torch.cat(loop), (*tensors, sink), weights[:105])
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_given_selection_is_replayed():
    pack = a_pack(queries=(3, 1, 0, 20, 17))
    tensors = [x.requires_grad_() for x in pack.tensors()]
    expected = packed(pack, *tensors)
    gradients = torch.autograd.grad(expected[0].square().sum(), tensors)
    found = packed(pack, *tensors, selection=expected[2])
    assert all(torch.equal(x, y) for x, y in zip(expected, found))
    assert all(map(torch.equal, gradients, torch.autograd.grad(found[0].square().sum(), tensors)))
    with pytest.raises(ValueError, match=r"forward_varlen: selection must have the shape \(2, 46, 2, 4\)"):
        packed(pack, *tensors, selection=expected[2][:, :-1])


def test_many_short_documents_are_one_batch(monkeypatch):
    calls = []
    original = htree_cuda.torch_backend.tree.forward
    monkeypatch.setattr(
        htree_cuda.torch_backend.tree, "forward", lambda *a, **o: calls.append(a[0].shape) or original(*a, **o)
    )
    cu = torch.arange(0, 4097, dtype=torch.int32) * 16
    x = torch.randn(65536, 1, 8)
    htree_cuda.forward_varlen(x, x, x, cu, cu, 16, 16, **SMALL)
    assert calls == [(4096, 16, 1, 8)]


# ------------------------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_module_takes_packs_and_lengths(qk_norm):
    module = htree_cuda.HTreeAttention(32, 4, 2, qk_norm=qk_norm, dtype=torch.float64, **SMALL)
    lengths = [20, 1, 33]
    cu, x = ints([0, 20, 21, 54]), torch.randn(60, 32, dtype=torch.float64, requires_grad=True)
    out = module(x, cu_seqlens=cu, max_seqlen=33)
    padded = torch.zeros(3, 33, 32, dtype=torch.float64)
    for b, (begin, length) in enumerate(zip([0, 20, 21], lengths)):
        alone = module(x[None, begin : begin + length])[0]
        torch.testing.assert_close(out[begin : begin + length], alone, rtol=0, atol=1e-12)
        padded[b, :length] = x[begin : begin + length].detach()
        padded[b, length:] = math.nan
    assert (out[54:] == 0).all()
    ragged = module(padded, seqused=ints(lengths))
    for b, (begin, length) in enumerate(zip([0, 20, 21], lengths)):
        torch.testing.assert_close(ragged[b, :length], out[begin : begin + length], rtol=0, atol=1e-12)
    (dx,) = torch.autograd.grad(out[:54].square().sum(), x)
    assert dx[:54].abs().sum() > 0 and (dx[54:] == 0).all()
    packed_out, (k, _) = module(x, return_kv=True, cu_seqlens=cu, max_seqlen=33)
    assert torch.equal(packed_out, out) and k.shape == (60, 2, 8)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"cu_seqlens and max_seqlen must be given together, got one of them", {"cu_seqlens": ints([0, 5])}),
        (r"cu_seqlens must not be given together with seqused, got both",
         {"cu_seqlens": ints([0, 5]), "max_seqlen": 5, "seqused": ints([5])}),
        (r"x must have 2 dimensions \[total, d_model\]", {"x": torch.zeros(1, 5, 32), "cu_seqlens": ints([0, 5])}),
        (r"x must have 3 dimensions \[B, T_q, d_model\]", {}),
        (r"seqused must not be given together with past, got both",
         {"x": torch.zeros(1, 5, 32), "seqused": ints([5]), "past": (torch.zeros(1, 2, 2, 8),) * 2}),
        (r"seqused must be int32, got torch.int64", {"x": torch.zeros(1, 5, 32), "seqused": torch.tensor([5])}),
        (r"dimension 0 of seqused must equal B \(1\), got 2", {"x": torch.zeros(1, 5, 32), "seqused": ints([5, 5])}),
        (r"seqused must have 1 dimensions \[B\]", {"x": torch.zeros(1, 5, 32), "seqused": ints([[5]])}),
        (r"seqused must be on the device of x \(cpu\), got meta",
         {"x": torch.zeros(1, 5, 32), "seqused": ints([5]).to("meta")}),
        (r"cu_seqlens must be int32, got torch.int64", {"cu_seqlens": torch.tensor([0, 5]), "max_seqlen": 5}),
        (r"cu_seqlens must have 1 dimensions \[N \+ 1\]", {"cu_seqlens": ints([[0, 5]]), "max_seqlen": 5}),
        (r"N \+ 1 \(dimension 0 of cu_seqlens\) must be at least 1", {"cu_seqlens": ints([]), "max_seqlen": 5}),
        (r"max_seqlen must be at least 0, got -1", {"cu_seqlens": ints([0, 5]), "max_seqlen": -1}),
    ],
)  # fmt: skip
def test_module_errors(match, options):
    module = htree_cuda.HTreeAttention(32, 4, 2, **SMALL)
    options = dict(options)
    x = options.pop("x", torch.zeros(5, 32))
    with pytest.raises(ValueError, match=f"HTreeAttention: {match}"):
        module(x, **options)


def test_lengths_of_the_module_are_checked_on_demand(monkeypatch):
    module = htree_cuda.HTreeAttention(32, 4, 2, **SMALL)
    monkeypatch.setenv("HTREE_CUDA_CHECK", "1")
    with pytest.raises(ValueError, match=r"HTreeAttention: seqused of row 1 must lie in 0 .. T_q \(5\), got 6"):
        module(torch.zeros(2, 5, 32), seqused=ints([5, 6]))
    with pytest.raises(ValueError, match=r"sequence 0 of cu_seqlens must have at most max_seqlen \(4\) rows, got 5"):
        module(torch.zeros(5, 32), cu_seqlens=ints([0, 5]), max_seqlen=4)
    with pytest.raises(ValueError, match=r"HTreeAttention: cu_seqlens must end at total of x \(5\) or before, got 6"):
        module(torch.zeros(5, 32), cu_seqlens=ints([0, 6]), max_seqlen=6)
    with pytest.raises(TypeError, match=r"HTreeAttention: max_seqlen must be an int, got 1.5"):
        module(torch.zeros(5, 32), cu_seqlens=ints([0, 5]), max_seqlen=1.5)


# ------------------------------------------------------------------------------- variants that must not pass, proven


def test_top_left_alignment_would_fail():
    """A query of a sequence with fewer queries than keys stands at its end, not at its beginning."""
    pack = a_pack(keys=(30,), queries=(5,), padding=0)
    q, k, v = pack.tensors()
    out = packed(pack, q, k, v)[0]
    assert not torch.allclose(out, htree_cuda.forward(q[None], k[None], v[None], q_start=0, **SMALL)[0])
    assert torch.equal(out, htree_cuda.forward(q[None], k[None], v[None], q_start=25, **SMALL)[0])


def test_a_tree_that_begins_with_the_pack_would_fail():
    """A document's nodes are counted from its own first token, not from the pack's."""
    pack = a_pack(keys=(5, 60), padding=0)
    q, k, v = pack.tensors()
    out = packed(pack, q, k, v)[0]
    whole = htree_cuda.forward(q[None], k[None], v[None], **SMALL)[0]
    assert not torch.allclose(out[5:], whole[5:])
