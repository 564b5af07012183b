"""Packed and ragged sequences on the kernels: the bits of a loop over sequences, independence of everything else, and
lengths that nobody should give."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import htree_cuda
from htree_cuda import kernels

from ..bits import same_bits
from .forward_checks import BF16, FP16

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def cu_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def a_pack(keys, queries=None, *, H_kv=1, G=16, D=128, dtype=BF16, padding=0, seed=0):
    """q, k, v, cu_seqlens_q, cu_seqlens_k on the device."""
    queries = keys if queries is None else queries
    g = torch.Generator().manual_seed(seed)
    rows_q, rows_k = sum(queries) + padding, sum(keys) + padding
    shapes = (rows_q, H_kv * G, D), (rows_k, H_kv, D), (rows_k, H_kv, D)
    q, k, v = (torch.randn(*shape, generator=g).to(dtype).to(DEVICE) for shape in shapes)
    return q, k, v, cu_of(queries).to(DEVICE), cu_of(keys).to(DEVICE)


def packed(pack, keys, queries=None, **options):
    queries = keys if queries is None else queries
    maxima = options.pop("maxima", (max(queries, default=0), max(keys, default=0)))
    flags = {"return_lse": True, "return_selection": True}
    return htree_cuda.forward_varlen(*pack, *maxima, **flags, **options)


def alone(q, k, v, **options):
    """`forward` of one sequence, in a call of several queries."""
    count, T = q.shape[0], k.shape[0]
    if count == 1:  # a call of one query splits it, and rounds otherwise
        q = torch.cat([torch.zeros_like(q), q]) if T > 1 else torch.cat([q, torch.zeros_like(q)])
        if T == 1:
            k, v = (torch.cat([x, torch.zeros_like(x)]) for x in (k, v))
    found = htree_cuda.forward(q[None], k[None], v[None], return_lse=True, return_selection=True, **options)
    keep = slice(None) if count > 1 else slice(0, 1) if T == 1 else slice(1, 2)
    return found[0][0, keep], found[1][0, keep], found[2][:, 0, keep]


def check_against_loop(pack, keys, queries=None, **options):
    queries = keys if queries is None else queries
    out, lse, selection = packed(pack, keys, queries, **options)
    options = {name: x for name, x in options.items() if name != "maxima"}
    q, k, v = pack[:3]
    top_k = options["top_k_per_layer"]
    first_q = first_k = 0
    for count, T in zip(queries, keys):
        rows = slice(first_q, first_q + count)
        missing = max(0, count - T)
        assert (out[rows][:missing] == 0).all() and (lse[rows][:missing] == -math.inf).all()
        assert (selection[:, rows][:, :missing] == -1).all()
        mine = slice(first_q + missing, first_q + count)
        if count > missing:
            tokens = slice(first_k, first_k + T)
            one = alone(q[mine], k[tokens], v[tokens], **options)
            found = one[2].shape[0]
            same_bits((out[mine], lse[mine], selection[:found, mine]), one)
            t = torch.arange(T - (count - missing), T)
            for layer in range(found + 1, selection.shape[0] + 1):
                node = torch.arange(top_k)
                whole = torch.where(node <= (t // 16**layer)[:, None], node, -1).int()
                assert (selection[layer - 1, mine].cpu() == whole[:, None]).all()
        first_q, first_k = first_q + count, first_k + T
    assert (out[first_q:] == 0).all() and (lse[first_q:] == -math.inf).all() and (selection[:, first_q:] == -1).all()


SMALL = {"top_k_per_layer": 16}


@pytest.mark.emulated
@pytest.mark.parametrize(
    "G", [pytest.param(16, marks=pytest.mark.sample), 7, pytest.param(4, marks=pytest.mark.sample)]
)
def test_a_small_pack_is_a_loop(G):
    """Entry layers 0 and 1; sequences of no key, of one, of less than a tile and of more."""
    keys = [1, 0, 270, 17, 300]
    queries = [1, 3, 14, 13, 2]
    pack = a_pack(keys, queries, G=G, D=64, padding=5)
    check_against_loop(pack, keys, queries, **SMALL)


@pytest.mark.emulated
def test_a_pack_of_several_heads_is_a_loop():
    keys, queries = [259, 30, 4111], [5, 2, 13]
    pack = a_pack(keys, queries, H_kv=2, G=3, D=64)
    check_against_loop(pack, keys, queries, **SMALL)
    check_against_loop(pack, keys, queries, maxima=(50, 70000), **SMALL)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("H_kv", "G"), [(1, 16), (2, 8), (2, 4), (1, 1)])
@pytest.mark.parametrize("top_k", [16, 64, 512])
def test_packs_are_loops(H_kv, G, top_k, dtype):
    edges = [0, 1, 15, 16, 17, 256 * top_k // 16 - 1, 16 * top_k, 16 * top_k + 1, 12, 11, 13, 24, 500]
    keys = [*edges, 256 * top_k + 5 if top_k < 512 else 20000, 1, 9000]
    pack = a_pack(keys, H_kv=H_kv, G=G, dtype=dtype, padding=7, seed=top_k)
    check_against_loop(pack, keys, top_k_per_layer=top_k)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("strict_causal", [True, False])
def test_prefixes_are_loops(D, strict_causal):
    """Fewer queries than keys, and more."""
    keys, queries = [5000, 3, 70001, 0, 900, 33], [50, 7, 24, 2, 1, 33]
    pack = a_pack(keys, queries, H_kv=2, G=8, D=D, seed=D)
    check_against_loop(pack, keys, queries, strict_causal=strict_causal, **SMALL)


@pytest.mark.hardware
def test_one_long_sequence_among_many_of_one_token():
    keys = [1] * 2000 + [40000] + [1] * 2095
    pack = a_pack(keys, G=8)
    check = packed(pack, keys, **SMALL)
    q, k, v = pack[:3]
    long = slice(2000, 42000)
    same_bits((check[0][long], check[1][long], check[2][:, long]), alone(q[long], k[long], v[long], **SMALL))
    ones = torch.tensor([i for i in range(len(q)) if not 2000 <= i < 42000], device=DEVICE)
    torch.testing.assert_close(check[0][ones], v[ones].expand(-1, 8, -1), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("keys", "queries", "order"),
    [
        ([700, 1, 5000, 33, 16, 300], None, [4, 2, 0, 5, 1, 3]),
        pytest.param([290, 1, 17, 300], [6, 1, 17, 5], [2, 3, 0, 1], marks=pytest.mark.emulated),
    ],
    ids=["long", "small"],
)
def test_a_permutation_permutes_the_results(keys, queries, order):
    queries = keys if queries is None else queries
    pack = a_pack(keys, queries, G=8, D=64)
    first = packed(pack, keys, queries, **SMALL)
    begin_q, begin_k = (cu.tolist() for cu in pack[3:])
    rows_q, rows_k = (
        torch.cat([torch.arange(begin[i], begin[i + 1]) for i in order]).to(DEVICE) for begin in (begin_q, begin_k)
    )
    mixed_q, mixed_k = ([lengths[i] for i in order] for lengths in (queries, keys))
    tensors = (pack[0][rows_q], pack[1][rows_k], pack[2][rows_k], cu_of(mixed_q).to(DEVICE), cu_of(mixed_k).to(DEVICE))
    second = packed(tensors, mixed_k, mixed_q, **SMALL)
    same_bits((first[0][rows_q], first[1][rows_q], first[2][:, rows_q]), second)


@pytest.mark.emulated
def test_what_is_not_finite_stays_in_its_sequence():
    keys, queries = [280, 40, 300], [6, 6, 6]
    pack = a_pack(keys, queries, G=8, D=64, padding=9)
    before = packed(pack, keys, queries, **SMALL)
    q, k, v = (x.clone() for x in pack[:3])
    q[6:12], k[280:320], v[280:320] = math.nan, math.inf, math.nan
    q[18:], k[620:], v[620:] = math.nan, math.nan, math.inf
    after = packed((q, k, v, *pack[3:]), keys, queries, **SMALL)
    keep = torch.tensor([*range(6), *range(12, 27)], device=DEVICE)
    same_bits([x[keep] for x in before[:2]], [x[keep] for x in after[:2]])
    assert torch.equal(before[2][:, keep], after[2][:, keep]) and after[0][6:12].isnan().all()


@pytest.mark.emulated
def test_ragged_is_a_loop():
    g = torch.Generator().manual_seed(0)
    B, T, T_q = 4, 300, 14
    q = torch.randn(B, T_q, 4, 64, generator=g).to(BF16).to(DEVICE)
    k, v = (torch.randn(B, T, 1, 64, generator=g).to(BF16).to(DEVICE) for _ in range(2))
    used_k = torch.tensor([300, 9, 0, 270], dtype=torch.int32, device=DEVICE)
    used_q = torch.tensor([14, 14, 5, 3], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([3, -4, 0, 262], device=DEVICE)
    for options in ({}, {"seqused_q": used_q}, {"seqused_q": used_q, "q_start": starts}):
        counts = options.get("seqused_q", torch.full((B,), T_q)).tolist()
        dirty = [x.clone() for x in (q, k, v)]
        for b in range(B):
            dirty[0][b, counts[b] :], dirty[1][b, used_k[b] :], dirty[2][b, used_k[b] :] = (math.nan,) * 3
        out, lse, selection = htree_cuda.forward(
            *dirty, seqused_k=used_k, **options, return_lse=True, return_selection=True, **SMALL
        )
        seen = torch.zeros(B, T_q, dtype=torch.bool)
        for b, (count, keys) in enumerate(zip(counts, used_k.tolist())):
            start = starts[b].item() if "q_start" in options else keys - count
            first, last = max(0, -start), min(count, keys - start)
            if first >= last:
                continue
            seen[b, first:last] = True
            one = htree_cuda.forward(
                q[b : b + 1, first:last], k[b : b + 1, :keys], v[b : b + 1, :keys], q_start=start + first,
                return_lse=True, return_selection=True, **SMALL,
            )  # fmt: skip
            rows = (b, slice(first, last))
            found = one[2].shape[0]
            same_bits((out[rows], lse[rows]), (one[0][0], one[1][0]))
            assert torch.equal(selection[:found, b, first:last], one[2][:, 0])
        hidden = ~seen.to(DEVICE)
        assert (out[hidden] == 0).all() and (lse[hidden] == -math.inf).all() and (selection[:, hidden] == -1).all()


@pytest.mark.emulated
def test_a_given_selection_is_replayed():
    """The bits of the call that returned it; other content leaves every access in bounds."""
    keys, queries = [300, 20, 4200], [14, 20, 3]
    pack = a_pack(keys, queries, G=8, D=64, padding=2)
    first = packed(pack, keys, queries, **SMALL)
    again = packed(pack, keys, queries, selection=first[2], **SMALL)
    same_bits(first[:2], again[:2])
    garbage = torch.randint(-5, 2**20, first[2].shape, dtype=torch.int32, device=DEVICE)
    out = packed(pack, keys, queries, selection=garbage, **SMALL)[0]
    assert out[:37].isfinite().all() and (out[37:] == 0).all()


HOSTILE = [[0, -5, 40, 270], [0, 2**31 - 1, 3, 270], [270, 30, 10, 0], [-(2**31), 2**31 - 1, -1, 2**31 - 1]]


@pytest.mark.emulated
@pytest.mark.parametrize("cu", HOSTILE)
def test_garbage_lengths_do_no_harm(cu):
    q, k, v, _, good = a_pack([10, 10, 250], G=4, D=64)
    cu = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    for cu_q, cu_k in ((cu, cu), (good, cu)):
        out = htree_cuda.forward_varlen(q, k, v, cu_q, cu_k, 20, 265, **SMALL)
        assert out.shape == q.shape
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# ---- backward ---------------------------------------------------------------------------------------------------


def with_gradients(pack, keys, queries=None, dlse=True, **options):
    """out, dq, dk, dv of a pack, and the gradients that went in."""
    queries = keys if queries is None else queries
    maxima = options.pop("maxima", (max(queries, default=0), max(keys, default=0)))
    tensors = [x.detach().requires_grad_() for x in pack[:3]]
    out, lse = htree_cuda.forward_varlen(*tensors, *pack[3:], *maxima, return_lse=True, **options)
    g = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=g).to(out.dtype).to(DEVICE)
    dlse = (torch.rand(lse.shape, generator=g) + 0.5).to(DEVICE) if dlse else torch.zeros_like(lse)
    return out.detach(), torch.autograd.grad((out, lse), tensors, (dout, dlse)), (dout, dlse)


def gradients_alone(q, k, v, dout, dlse, **options):
    """Of `forward` of one sequence, in a call of several queries as in `alone`."""
    count, T = q.shape[0], k.shape[0]
    if count == 1:
        before = T > 1
        q, dout, dlse = (
            (torch.cat([torch.zeros_like(x), x] if before else [x, torch.zeros_like(x)])) for x in (q, dout, dlse)
        )
        if not before:
            k, v = (torch.cat([x, torch.zeros_like(x)]) for x in (k, v))
    parts = [x[None].clone().requires_grad_() for x in (q, k, v)]
    results = htree_cuda.forward(*parts, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(results, parts, (dout[None], dlse[None]))
    keep = slice(None) if count > 1 else slice(1, 2) if T > 1 else slice(0, 1)
    return dq[0, keep], dk[0, :T], dv[0, :T]


def same_sums(found, expected):
    """dk and dv of a pack beside those of its sequences: the last place of the rounded result, and sums that cancel."""
    for x, y in zip(found, expected, strict=True):
        allowed = torch.finfo(y.dtype).eps * y.float().abs() + 1e-3 * y.float().abs().max()
        assert ((x.float() - y.float()).abs() <= allowed).all()


def check_gradients_against_loop(pack, keys, queries=None, **options):
    """dq bit for bit; dk and dv up to the order of their float32 sums, far below the rounding of the result."""
    queries = keys if queries is None else queries
    _, (dq, dk, dv), gradients = with_gradients(pack, keys, queries, **options)
    options = {name: x for name, x in options.items() if name != "maxima"}
    q, k, v = pack[:3]
    first_q = first_k = 0
    for count, T in zip(queries, keys):
        missing = max(0, count - T)
        mine, tokens = slice(first_q + missing, first_q + count), slice(first_k, first_k + T)
        assert (dq[first_q : first_q + missing] == 0).all()
        if count > missing:
            one = gradients_alone(q[mine], k[tokens], v[tokens], *(x[mine] for x in gradients), **options)
            same_bits([dq[mine]], [one[0]])
            same_sums((dk[tokens], dv[tokens]), one[1:])
        else:
            assert (dk[tokens] == 0).all() and (dv[tokens] == 0).all()
        first_q, first_k = first_q + count, first_k + T
    assert (dq[first_q:] == 0).all() and (dk[first_k:] == 0).all() and (dv[first_k:] == 0).all()


@pytest.mark.emulated
@pytest.mark.parametrize(
    "G", [pytest.param(16, marks=pytest.mark.sample), 7, pytest.param(4, marks=pytest.mark.sample)]
)
def test_gradients_of_a_small_pack_are_a_loops(G):
    """Entry layers 0 and 1; sequences of no key, of one, of less than a tile and of more."""
    keys, queries = [1, 0, 270, 17, 300], [1, 3, 14, 13, 2]
    check_gradients_against_loop(a_pack(keys, queries, G=G, D=64, padding=5), keys, queries, **SMALL)


@pytest.mark.emulated
def test_gradients_of_a_pack_of_several_heads_are_a_loops():
    keys, queries = [259, 30, 4111], [5, 2, 13]
    pack = a_pack(keys, queries, H_kv=2, G=3, D=64)
    check_gradients_against_loop(pack, keys, queries, **SMALL)
    check_gradients_against_loop(pack, keys, queries, maxima=(50, 70000), **SMALL)


@pytest.mark.emulated
def test_gradients_of_a_sequence_in_all_its_layers():
    """A whole sequence beside others: queries on both sides of the change of the entry layer, empty work items."""
    keys = [40, 290, 9]
    check_gradients_against_loop(a_pack(keys, G=8, D=64, padding=1), keys, **SMALL)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("H_kv", "G"), [(1, 16), (2, 8), (2, 4), (1, 1)])
@pytest.mark.parametrize("top_k", [16, 64, 512])
def test_gradients_of_packs_are_those_of_loops(H_kv, G, top_k, dtype):
    edges = [0, 1, 15, 16, 17, 256 * top_k // 16 - 1, 16 * top_k, 16 * top_k + 1, 12, 11, 13, 24, 500]
    keys = [*edges, 256 * top_k + 5 if top_k < 512 else 20000, 1, 9000]
    pack = a_pack(keys, H_kv=H_kv, G=G, dtype=dtype, padding=7, seed=top_k)
    check_gradients_against_loop(pack, keys, top_k_per_layer=top_k)


@pytest.mark.parametrize("D", [64, 128])
def test_gradients_of_prefixes_are_those_of_loops(D):
    keys, queries = [5000, 3, 70001, 0, 900, 33], [50, 7, 24, 2, 1, 33]
    pack = a_pack(keys, queries, H_kv=2, G=8, D=D, seed=D)
    check_gradients_against_loop(pack, keys, queries, **SMALL)


def test_gradients_do_not_depend_on_neighbours_or_order():
    """Other values in the neighbours, bits of all three; another order, dq bit for bit."""
    keys = [700, 1, 5000, 33, 16, 300]
    pack = a_pack(keys, G=8, D=64, padding=4)
    first = with_gradients(pack, keys, **SMALL)[1]
    q, k, v = (x.clone() for x in pack[:3])
    begin = pack[4].tolist()
    q[begin[2] : begin[3]], k[begin[2] : begin[3]], v[begin[2] : begin[3]] = math.nan, math.inf, 3e4
    q[begin[-1] :], k[begin[-1] :], v[begin[-1] :] = math.nan, math.nan, math.inf
    second = with_gradients((q, k, v, *pack[3:]), keys, **SMALL)[1]
    keep = [i for i in range(begin[-1]) if not begin[2] <= i < begin[3]]
    for x, y in zip(first, second):
        same_bits([x[keep]], [y[keep]])
        assert (y[begin[-1] :] == 0).all()
    order = [4, 2, 0, 5, 1, 3]
    rows = torch.cat([torch.arange(begin[i], begin[i + 1]) for i in order])
    mixed = [keys[i] for i in order]
    q, k, v = (x[rows.to(DEVICE)] for x in pack[:3])
    cu = cu_of(mixed).to(DEVICE)
    gradients = [x[rows.to(DEVICE)] for x in with_gradients(pack, keys, **SMALL)[2]]
    tensors = [x.requires_grad_() for x in (q, k, v)]
    results = htree_cuda.forward_varlen(*tensors, cu, cu, max(keys), max(keys), return_lse=True, **SMALL)
    third = torch.autograd.grad(results, tensors, gradients)
    same_bits([first[0][rows.to(DEVICE)]], third[:1])
    same_sums([x[rows.to(DEVICE)] for x in first[1:]], third[1:])


@pytest.mark.emulated
def test_gradients_of_ragged_rows_are_a_loops():
    g = torch.Generator().manual_seed(0)
    B, T, T_q = 4, 300, 14
    tensors = [torch.randn(B, rows, heads, 64, generator=g).to(BF16) for rows, heads in ((T_q, 8), (T, 1), (T, 1))]
    dout = torch.randn(B, T_q, 8, 64, generator=g).to(BF16).to(DEVICE)
    used_k, used_q, starts = (
        torch.tensor(x, dtype=torch.int32) for x in ([300, 9, 0, 270], [14, 14, 5, 3], [3, -4, 0, 262])
    )
    dirty = [x.clone() for x in tensors]
    for b in range(B):
        dirty[0][b, used_q[b] :], dirty[1][b, used_k[b] :], dirty[2][b, used_k[b] :] = (math.nan,) * 3
    dirty = [x.to(DEVICE).requires_grad_() for x in dirty]
    lengths = {"seqused_k": used_k.to(DEVICE), "seqused_q": used_q.to(DEVICE), "q_start": starts.to(DEVICE)}
    out = htree_cuda.forward(*dirty, **lengths, **SMALL)
    found = torch.autograd.grad(out, dirty, dout)
    expected = [torch.zeros_like(x) for x in found]
    for b in range(B):
        start, keys = starts[b].item(), used_k[b].item()
        first, last = max(0, -start), min(used_q[b].item(), keys - start)
        if first < last:
            rows, tokens = (slice(b, b + 1), slice(first, last)), (slice(b, b + 1), slice(0, keys))
            parts = [x[at].to(DEVICE).requires_grad_() for x, at in zip(tensors, (rows, tokens, tokens))]
            one = htree_cuda.forward(*parts, q_start=start + first, **SMALL)
            for x, at, y in zip(expected, (rows, tokens, tokens), torch.autograd.grad(one, parts, dout[rows])):
                x[at] = y
    same_bits(found[:1], expected[:1])
    for x, y in zip(found[1:], expected[1:]):
        torch.testing.assert_close(x.float(), y.float(), atol=1e-3 * y.abs().max().item(), rtol=2.0**-7)
        assert ((y != 0) | (x == 0)).all()


@pytest.mark.emulated
@pytest.mark.parametrize("cu", HOSTILE)
def test_garbage_lengths_do_no_harm_in_the_backward(cu):
    q, k, v, _, good = a_pack([10, 10, 250], G=4, D=64)
    cu = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    for cu_q, cu_k in ((cu, cu), (good, cu), (cu, good)):
        with_gradients((q, k, v, cu_q, cu_k), [265], [20], **SMALL)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.hardware
def test_a_pack_of_several_chunks_of_rows_and_heads():
    """Chunks begin and end within sequences; heads in several runs, and the sums of a block in several chunks."""
    keys = [70000, 3, 30001, 0, 9000]
    pack = a_pack(keys, H_kv=2, G=16, padding=100)
    check_gradients_against_loop(pack, keys, top_k_per_layer=64)


@pytest.mark.hardware
def test_more_elements_than_32_bits_count():
    """q and out past 2^31 elements: the last sequences, and padding behind them."""
    keys = [66000] * 8 + [5000, 1, 17]
    first = sum(keys) - 5018
    g = torch.Generator(device=DEVICE).manual_seed(0)
    shape = (sum(keys) + 9, 32, 128)
    assert shape[0] * 32 * 128 > 2**31
    q, dout = (torch.randn(shape, generator=g, device=DEVICE, dtype=BF16) for _ in range(2))
    k, v = (torch.randn(shape[0], 2, 128, generator=g, device=DEVICE, dtype=BF16) for _ in range(2))
    cu = cu_of(keys).to(DEVICE)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out, lse = htree_cuda.forward_varlen(*tensors, cu, cu, 66000, 66000, return_lse=True, top_k_per_layer=64)
    grads = torch.autograd.grad(out, tensors, dout)
    parts = [x.detach()[first : first + 5000, None].transpose(0, 1).requires_grad_() for x in (q, k, v)]
    alone_out, alone_lse = htree_cuda.forward(*parts, return_lse=True, top_k_per_layer=64)
    expected = torch.autograd.grad(alone_out, parts, dout[None, first : first + 5000])
    rows = slice(first, first + 5000)
    same_bits((out[rows], lse[rows], grads[0][rows]), (alone_out[0], alone_lse[0], expected[0][0]))
    same_sums([x[rows] for x in grads[1:]], [x[0] for x in expected[1:]])
    assert not out[-9:].any() and (lse[-9:] == -math.inf).all() and not any(x[-9:].any() for x in grads)


@pytest.mark.hardware
@pytest.mark.parametrize("G", [16, 4])
def test_gradients_repeat(G):
    keys = [700, 1, 5000, 33, 16, 300, 9000]
    pack = a_pack(keys, H_kv=2, G=G)
    first = with_gradients(pack, keys, **SMALL)[1]
    for _ in range(30):
        same_bits(first, with_gradients(pack, keys, **SMALL)[1])


@pytest.mark.hardware
def test_the_backward_synchronises_nothing_and_fits_a_graph():
    keys = [3000, 700, 64, 1, 4427]
    pack = a_pack(keys, G=8)
    cu = cu_of([1, 1, 1, 1, 1]).to(DEVICE)
    tensors = [x.detach().requires_grad_() for x in pack[:3]]
    dout = torch.randn_like(pack[0])

    def step(cu):
        out = htree_cuda.forward_varlen(*tensors, cu, cu, 8192, 8192, top_k_per_layer=64)
        return torch.autograd.grad(out, tensors, dout)

    good = cu_of(keys).to(DEVICE)
    step(good)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(good)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(cu)
    for lengths in (keys, [8192, 0, 0, 0, 0], [100, 5000, 1, 2000, 1091]):
        cu.copy_(cu_of(lengths))
        graph.replay()
        same_bits(captured, step(cu.clone()))


@pytest.mark.hardware
def test_no_synchronisation_and_a_graph_for_other_lengths():
    keys = [3000, 700, 64, 1, 4427]
    pack = a_pack(keys, G=8)
    expected = packed(pack, keys, maxima=(8192, 8192), top_k_per_layer=64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = packed(pack, keys, maxima=(8192, 8192), top_k_per_layer=64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same_bits(found, expected)
    cu = cu_of([1, 1, 1, 1, 1]).to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = packed((*pack[:3], cu, cu), keys, maxima=(8192, 8192), top_k_per_layer=64)
    for lengths in (keys, [8192, 0, 0, 0, 0], [100, 5000, 1, 2000, 1091]):
        cu.copy_(cu_of(lengths))
        graph.replay()
        own = (*pack[:3], cu.clone(), cu.clone())
        same_bits(captured, packed(own, lengths, maxima=(8192, 8192), top_k_per_layer=64))


def workspaces(count, *, G, H_kv, top_k, total):
    """Bytes of workspace, forward and backward, of a pack of `count` sequences, of which one may have all tokens."""
    q, k = (torch.empty(total, heads, 128, dtype=BF16, device=DEVICE) for heads in (H_kv * G, H_kv))
    cu = torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
    params = htree_cuda.checks.varlen.forward(
        q, k, k, cu, cu, None, None, None, max_seqlen_q=total, max_seqlen_k=total, compression_rate=16,
        top_k_per_layer=top_k, max_top_nodes=None, scale=None, rope_base=1e4, strict_causal=True, backend="auto",
    )  # fmt: skip
    sizes = kernels.forward_varlen_workspace, kernels.backward_varlen_workspace
    return [size(q, k, k, cu, cu, None, None, None, params) for size in sizes]


@pytest.mark.emulated
@pytest.mark.sample
@pytest.mark.parametrize(("H_kv", "G"), [(1, 16), (8, 4)])
@pytest.mark.parametrize("top_k", [16, 64, 512])
def test_memory_does_not_grow_with_the_number_of_sequences(H_kv, G, top_k):
    """Forward: a sequence takes 64 bytes and up to eight query tiles that it does not fill, and up to a tile for every
    12 tokens of the call is listed once more. Backward: 64 bytes a sequence and KV tile."""
    for total in (4096, 65536):
        sizes = {n: workspaces(n, G=G, H_kv=H_kv, top_k=top_k, total=total) for n in (1, 16, 256, 1024, 4096, total)}
        print(f"workspace of {total} tokens, forward and backward, by sequences:", sizes)
        for n, (forward, backward) in sizes.items():
            assert forward - sizes[1][0] <= n * 64 * 9 + total // 12 * 16
            assert backward - sizes[1][1] <= 64 * (n + total // 64)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("keys", "at", "padding", "G"),
    [([1] * 200 + [290] + [2] * 100 + [70] + [0, 1] * 50, 241, 3, 4), ([1] * 400, 200, 7800, 16)],
    ids=["mixed", "tokens"],
)
def test_a_pack_in_parts_is_its_parts(keys, at, padding, G):
    """More sequences than there are KV tiles for: the pack is computed in two parts, each of which leaves the rows of
    the other as they are; padding is zeros. A part of single tokens has as many sequences as KV tiles."""
    first, most = sum(keys[:at]), max(keys)
    pack = a_pack(keys, G=G, D=64, padding=padding)
    out, gradients, given = with_gradients(pack, keys, maxima=(most, most), **SMALL)
    for rows, own in ((slice(0, first), keys[:at]), (slice(first, sum(keys)), keys[at:])):
        parts = [x[rows].detach().clone().requires_grad_() for x in pack[:3]]
        cu = cu_of(own).to(DEVICE)
        results = htree_cuda.forward_varlen(*parts, cu, cu, most, most, return_lse=True, **SMALL)
        expected = torch.autograd.grad(results, parts, [x[rows].clone() for x in given])
        same_bits([out[rows], gradients[0][rows]], [results[0].detach(), expected[0]])
        same_sums([x[rows] for x in gradients[1:]], expected[1:])
    assert not any(x[-padding:].any() for x in (out, *gradients))


@pytest.mark.emulated
def test_garbage_lengths_do_no_harm_in_parts():
    """Two parts for 400 sequences, whose lengths leave room for more of them or for fewer than they take."""
    q, k, v, _, _ = a_pack([810], G=4, D=64)
    g = torch.Generator().manual_seed(1)
    cu = torch.randint(-50, 900, (401,), generator=g, dtype=torch.int32)
    ascending, wide = cu.sort().values, torch.cat([cu.sort().values[::40], cu]).to(torch.int32)[:401]
    for lengths in (cu, ascending, ascending.flip(0), wide):
        lengths = lengths.to(DEVICE)
        with_gradients((q, k, v, lengths, lengths), [290], [290], **SMALL)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.hardware
@pytest.mark.parametrize(("H_kv", "G"), [(1, 16), (2, 4)])
def test_thousands_of_sequences_are_a_loop_of_packs(H_kv, G):
    """Lengths of 0 to 40 with a few long ones among them, and padding; parts begin anywhere."""
    g = torch.Generator().manual_seed(3)
    keys = torch.randint(0, 41, (5000,), generator=g).tolist()
    keys[70], keys[2499], keys[4999] = 9000, 5000, 1100
    pack = a_pack(keys, H_kv=H_kv, G=G, padding=77)
    options = {"maxima": (9000, 9000), "top_k_per_layer": 64}
    out, gradients, given = with_gradients(pack, keys, **options)
    begin = [0, *itertools.accumulate(keys)]
    for i in range(0, 5000, 200):
        rows = slice(begin[i], begin[i + 200])
        parts = [x[rows].detach().clone().requires_grad_() for x in pack[:3]]
        cu = cu_of(keys[i : i + 200]).to(DEVICE)
        results = htree_cuda.forward_varlen(*parts, cu, cu, 9000, 9000, return_lse=True, top_k_per_layer=64)
        expected = torch.autograd.grad(results, parts, [x[rows].clone() for x in given])
        same_bits([out[rows], gradients[0][rows]], [results[0].detach(), expected[0]])
        same_sums([x[rows] for x in gradients[1:]], expected[1:])
    assert not any(x[-77:].any() for x in (out, *gradients))


# ---- prefill of a cache -----------------------------------------------------------------------------------------


def a_cache(k, v, lengths, page_size=None):
    """Pages of the last sequences come first, and what no sequence has written is NaN."""
    B, T, H_kv, D = k.shape
    place = {"dtype": k.dtype, "device": k.device, "page_size": page_size}
    cache = htree_cuda.TreeCache(B, T, H_kv, D, **place)
    if page_size is not None:
        cache._k.fill_(math.nan), cache._v.fill_(math.nan)
        for row in reversed(range(B)):
            cache.reserve([lengths[b] if b == row else 0 for b in range(B)])
    cache.append(k, v, seqused=torch.tensor(lengths, dtype=torch.int32).to(k.device))
    return cache


def prefill(q, cache, used=None):
    return htree_cuda.forward_cached(
        q, cache, seqused_q=used, top_k_per_layer=16, return_lse=True, return_selection=True
    )


@pytest.mark.emulated
def test_a_prefill_over_pages_has_the_bits_of_one_without():
    g = torch.Generator().manual_seed(0)
    lengths = [300, 9, 0, 270]
    q, k, v = (
        torch.randn(4, rows, heads, 64, generator=g).to(BF16).to(DEVICE)
        for rows, heads in ((12, 4), (300, 1), (300, 1))
    )
    used = torch.tensor([12, 12, 5, 3], dtype=torch.int32).to(DEVICE)
    for seqused in (None, used):
        same_bits(prefill(q, a_cache(k, v, lengths, 256), seqused), prefill(q, a_cache(k, v, lengths), seqused))


@pytest.mark.hardware
@pytest.mark.parametrize("page_size", [None, 256])
def test_a_prefill_synchronises_nothing_and_fits_a_graph(page_size):
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, rows, heads, 64, generator=g).to(BF16).to(DEVICE)
        for rows, heads in ((40, 8), (3000, 2), (3000, 2))
    )
    cache = a_cache(k, v, [2900, 700, 3000], page_size)
    prefill(q, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill(q, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prefill(q, cache)
    for lengths in ([2900, 700, 3000], [2900, 40, 1500], [3, 0, 77]):
        cache.truncate(lengths)
        graph.replay()
        same_bits(captured, prefill(q, cache))


# ---- compute-sanitizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("G", [16, 3])
def test_sanitizer_packs(G, dtype):
    """One entry layer and two, a sequence without keys, padding; every result is read on the host."""
    keys, queries = [1, 0, 270, 17, 300], [1, 3, 6, 5, 20]
    out, gradients, _ = with_gradients(a_pack(keys, queries, G=G, D=64, dtype=dtype, padding=5), keys, queries, **SMALL)
    assert all(x.cpu().isfinite().all() for x in (out, *gradients))


def test_sanitizer_ragged_rows():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 64, generator=g).to(BF16).to(DEVICE).requires_grad_() for heads in (4, 2, 2))
    used = torch.tensor([300, 9], dtype=torch.int32).to(DEVICE)
    out, lse = htree_cuda.forward(q, k, v, seqused_q=used, seqused_k=used, return_lse=True, **SMALL)
    dlse = torch.rand(lse.shape, generator=g).to(DEVICE)  # autograd's zeros would be a kernel's that no tool watches
    gradients = torch.autograd.grad((out, lse), (q, k, v), (out.detach(), dlse))
    assert all(x.cpu().isfinite().all() for x in (out.detach(), *gradients))
