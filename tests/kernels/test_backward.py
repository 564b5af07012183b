"""The htree backward kernels against the definition in float64, within twice the error of the baseline.

out, lse and selection come from the forward kernels; the oracle is given their selection.
"""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError, checks, definition, kernels

from .. import baseline
from ..bits import same_bits
from ..inputs import skip_what_is_not_built

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"


def inputs(T, T_q, *, B=1, H_kv=1, G=16, K=64, V=64, dtype=BF16, seed=0):
    """q, k, v, dout, dlse, drawn on the CPU. dlse keeps away from 0: all that dq of a lone candidate comes from."""
    g = torch.Generator().manual_seed(seed)
    H = H_kv * G
    q, k, v, dout = (
        torch.randn(*shape, generator=g).to(dtype)
        for shape in ((B, T_q, H, K), (B, T, H_kv, K), (B, T, H_kv, V), (B, T_q, H, V))
    )
    return q, k, v, dout, torch.rand(B, T_q, H, generator=g) + 0.5


def forward(q, k, v, **options):
    return htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **options)


def gradients(q, k, v, dout, dlse, results=None, **options):
    """(dq, dk, dv) from the op, on the CPU, and the forward's results that they were made from, likewise."""
    tensors = [x.to(DEVICE) for x in (q, k, v, dout, dlse)]
    out, lse, selection = forward(*tensors[:3], **options) if results is None else [x.to(DEVICE) for x in results]
    tree = {
        "q_start": None, "compression_rate": 16, "max_top_nodes": None, "scale": None, "rope_base": 10000.0,
        "strict_causal": True, "backend": "auto", **options,
    }  # fmt: skip
    grads = torch.ops.htree_cuda.backward(*tensors[3:], *tensors[:3], out, lse, selection, **tree)
    return [x.cpu() for x in grads], [x.cpu() for x in (out, lse, selection)]


def tree_params(q, k, v, **options):
    defaults = {
        "q_start": None, "compression_rate": 16, "top_k_per_layer": 512, "max_top_nodes": None, "scale": None,
        "rope_base": 10000.0, "strict_causal": True, "backend": "auto",
    }  # fmt: skip
    return checks.tree.forward(q, k, v, **{**defaults, **options})


def check(q, k, v, dout, dlse, **options):
    """Gradients of the kernels against the definition; returns them and what the forward returned."""
    grads, results = gradients(q, k, v, dout, dlse, **options)
    exact = definition.backward(dout, dlse, q, k, v, results[2], **options)
    allowed = baseline.backward(dout, dlse, q, k, v, *results, **options)
    for name, x, base, truth in zip(("dq", "dk", "dv"), grads, allowed, exact):
        assert x.dtype == q.dtype and x.is_contiguous()
        baseline.assert_within(name, x, base, truth)
    return grads, results


# ---- shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 255, 256, 257, 509])
def test_small_lengths(T, dtype):
    """One layer and the first length with two; enough numbers that the errors are no accident."""
    check(*inputs(T, min(T, 40), B=16 if T < 20 else 1, G=8, dtype=dtype, seed=T), top_k_per_layer=16)


@pytest.mark.emulated
@pytest.mark.sample
@pytest.mark.parametrize("T", [1, 17, 257])
def test_smallest_lengths(T):
    check(*inputs(T, min(T, 8), B=4 if T < 20 else 1, G=8, seed=T), top_k_per_layer=16)


@pytest.mark.parametrize("T", [4095, 4096, 4097, 65535, 65537])
def test_three_and_four_layers(T):
    _, (_, _, selection) = check(*inputs(T, 4, G=3, seed=T), top_k_per_layer=16)
    assert selection.shape[0] == (1 if T < 4097 else 2 if T < 65537 else 3)


@pytest.mark.emulated
@pytest.mark.sample
def test_three_layers():
    """The last node of every layer has fewer children; queries end before the tokens do."""
    check(*inputs(4200, 6, G=3, seed=3), top_k_per_layer=16, q_start=4190)


@pytest.mark.parametrize("T", [8191, 8192, 8193, 131072, 131073])
def test_boundaries_of_the_default_top_k(T):
    check(*inputs(T, 2, G=4, K=128, V=128, seed=T), top_k_per_layer=512)


@pytest.mark.emulated
@pytest.mark.parametrize(("T", "q_start"), [(262, 253), (4101, 4094)])
def test_neighbours_with_different_entry_layers(T, q_start):
    """A tile of four queries and a block of eight hold rows of two entry layers, the upper one new at 256 and 4096."""
    check(*inputs(T, T - q_start, H_kv=2, G=3, seed=T), top_k_per_layer=16, q_start=q_start)


@pytest.mark.hardware
@pytest.mark.parametrize("T", [8197, 131077])
def test_neighbours_with_different_entry_layers_of_the_default_top_k(T):
    check(*inputs(T, 10, G=4, K=128, V=128, seed=T), top_k_per_layer=512, q_start=T - 10)


@pytest.mark.hardware
def test_every_entry_layer_in_one_chunk():
    """Queries of three entry layers, some of which have two layers below them."""
    check_with_the_torch_backend(*inputs(6000, 6000, G=4, K=128, V=128), top_k_per_layer=16)


@pytest.mark.emulated
@pytest.mark.parametrize("G", [1, 3, 4, 5, 8, 9, 16])
def test_groups_batches_and_heads(G):
    """Groups of up to 4, 8 and 16 heads have four, two and one query in the rows of a product."""
    check(*inputs(700, 7, B=2, H_kv=3, G=G, seed=G), top_k_per_layer=16)


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("G", range(1, 17))
def test_every_group(G, dtype):
    """Queries of three entry layers, most of them with two layers below; packs and tiles that are not full."""
    check_with_the_torch_backend(*inputs(5003, 4999, G=G, K=128, V=128, dtype=dtype, seed=G), top_k_per_layer=16)
    check(*inputs(4300, 23, G=G, dtype=dtype, seed=G), top_k_per_layer=16)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_head_dimensions(K, V, dtype):
    skip_what_is_not_built(K, V)
    check(*inputs(1500, 25, G=8, K=K, V=V, dtype=dtype, seed=K + V), top_k_per_layer=32)


@pytest.mark.parametrize("top_k", [16, 32, 64, 128, 256])
def test_top_k(top_k):
    check(*inputs(20000, 10, G=2, seed=top_k), top_k_per_layer=top_k, q_start=19000)


def check_with_the_torch_backend(*tensors, **options):
    """For sizes beyond the definition: the same bf16 numbers, rounded elsewhere."""
    mine, results = gradients(*tensors, **options)
    theirs, _ = gradients(*tensors, results=results, backend="torch", **options)
    for x, y in zip(mine, theirs):
        assert (x.float() - y.float()).square().mean() < (0.01 * y.float()).square().mean()


@pytest.mark.emulated
def test_more_tiles_at_the_top_than_stages():
    check(*inputs(700, 9, H_kv=2, G=3, seed=4), top_k_per_layer=64)


@pytest.mark.emulated
def test_more_than_one_unit_at_the_top():
    """Twelve parents at the top, no multiple of eight, and a layer below."""
    check(*inputs(3001, 6, H_kv=2, G=2, seed=6), top_k_per_layer=16)


@pytest.mark.emulated
def test_a_share_of_dq_smaller_than_its_tile():
    skip_what_is_not_built(64, 128)
    check(*inputs(300, 9, H_kv=2, G=3, K=64, V=128, seed=7), top_k_per_layer=16)


@pytest.mark.emulated
@pytest.mark.parametrize("G", [2, 12])
def test_rows_split_over_blocks(G):
    """As many queries as make two segments of the entry layer, and of selected layers two of a list (G 2) or two ranges
    (G 12), whose sums are added in order."""
    check_with_the_torch_backend(*inputs(520, 520, G=G, seed=5), top_k_per_layer=16)


def with_a_sink(q, k):
    """All queries prefer the first KV block and shun the seventh, along the slowest pairs of a rotation."""
    slow = torch.zeros(q.shape[3], dtype=q.dtype)
    for half in slow.split(q.shape[3] // 2):
        half[-8:] = 1.25
    k[:, :16] += slow
    k[:, 96:112] -= slow
    return q + slow, k


@pytest.mark.emulated
def test_a_block_that_every_query_visits():
    """Its list is cut into as many segments as there may be, and one of a block that nobody visits is empty: the
    segments of the second range wait for both."""
    q, k, *rest = inputs(420, 420, G=16, seed=6)
    _, (_, _, selection) = check(*with_a_sink(q, k), *rest, top_k_per_layer=16)
    late = selection[0, 0, 300:, 0]
    assert (late == 0).any(1).all() and not (late == 6).any()


@pytest.mark.hardware
@pytest.mark.parametrize(("G", "top_k"), [(4, 64), (8, 64), (16, 64), (4, 512)])
def test_a_block_that_every_query_visits_in_several_ranges(G, top_k):
    q, k, *rest = inputs(30000, 30000, G=G, K=128, V=128)
    check_with_the_torch_backend(*with_a_sink(q, k), *rest, top_k_per_layer=top_k)


@pytest.mark.hardware
def test_first_chunk_is_shorter_than_a_segment():
    """42 rows of 4,224, with a layer below their first: ranges without rows have no items, nobody waits for them."""
    check_with_the_torch_backend(*inputs(6000, 4266, G=1, K=128, V=128), top_k_per_layer=16, q_start=1734)


@pytest.mark.hardware
def test_several_heads_at_once():
    check_with_the_torch_backend(*inputs(9000, 9000, B=2, H_kv=2, G=4), top_k_per_layer=64)


@pytest.mark.hardware
def test_one_head_in_several_chunks():
    check_with_the_torch_backend(*inputs(40007, 40007, G=2, K=128, V=128), top_k_per_layer=512)


@pytest.mark.hardware
def test_a_late_first_query_in_several_chunks():
    """Rows count from the first query, positions from the first token."""
    check_with_the_torch_backend(*inputs(12000, 9000, G=2, K=128, V=128), top_k_per_layer=16, q_start=1500)


@pytest.mark.hardware
@pytest.mark.parametrize("T", [300, 700])
def test_a_last_chunk_of_few_heads(T):
    """As many sequences as one chunk does not hold: those of the last one leave more sums apart than the others."""
    q, k, v, dout, dlse = inputs(T, T, B=65536 // T, K=128, V=128)
    grads, results = gradients(q, k, v, dout, dlse, top_k_per_layer=64)
    for b in (0, len(q) - 1):
        one = slice(b, b + 1)
        own = [x[one] for x in (q, k, v, dout, dlse)]
        kept = [results[0][one], results[1][one], results[2][:, one]]
        exact = definition.backward(own[3], own[4], *own[:3], kept[2], top_k_per_layer=64)
        allowed = baseline.backward(own[3], own[4], *own[:3], *kept, top_k_per_layer=64)
        for name, x, base, truth in zip(("dq", "dk", "dv"), grads, allowed, exact):
            baseline.assert_within(name, x[one], base, truth)


@pytest.mark.hardware
@pytest.mark.parametrize("T", [16384, 65536])
def test_peak_memory(T):
    """Beyond inputs, outputs and gradients at most what q and out take."""
    q, k, v = (torch.randn(1, T, H, 128, device="cuda", dtype=BF16, requires_grad=True) for H in (16, 1, 1))
    out = htree_cuda.forward(q, k, v)
    dout = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    beyond = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in grads)
    assert beyond <= q.nbytes + out.nbytes


# ---- hostile inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("q_size", "k_size"), [(30.0, 30.0), (1.0, 1e-6), (1e-3, 1e4), (1e4, 1e-3)])
def test_large_and_small_numbers(q_size, k_size, dtype):
    """Logits of 1e3 among them; powers of two keep queries and keys in the range of fp16 until they are multiplied."""
    q, k, v, dout, dlse = inputs(1200, 12, G=4, K=128, V=128, dtype=dtype)
    check((q.float() * q_size).to(dtype), (k.float() * k_size).to(dtype), v, dout, dlse, top_k_per_layer=16)


@pytest.mark.emulated
@pytest.mark.parametrize(("T", "G"), [(300, 2), (300, 6), (300, 16), (4400, 2)])
def test_logits_of_a_thousand_are_finite(T, G):
    """Up to 16,000: rounding makes the backward's differ from those that the forward summed, by 10 and more."""
    q, k, v, dout, dlse = inputs(T, 9, G=G)
    grads, (_, lse, _) = gradients(q * 60.0, k * 60.0, v, dout, dlse, top_k_per_layer=16)
    assert lse.abs().max() > 1e3 and all(x.isfinite().all() for x in grads)


@pytest.mark.emulated
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3])
def test_scales(scale):
    q, k, v, dout, dlse = inputs(400, 8, G=4)
    grads, (_, _, selection) = gradients(q, k, v, dout, dlse, top_k_per_layer=16, scale=scale)
    exact = definition.backward(dout, dlse, q, k, v, selection, top_k_per_layer=16, scale=scale)
    for x, truth in zip(grads, exact):
        assert (x.double() - truth).square().mean().sqrt() <= 0.01 * truth.square().mean().sqrt()


@pytest.mark.emulated
def test_later_tokens_have_no_effect():
    """NaN in every later token and in the gradient of every later query reaches no gradient at or before t."""
    q, k, v, dout, dlse = inputs(300, 300, G=2, seed=7)
    t = 139
    before, _ = gradients(*(x[:, : t + 1] for x in (q, k, v, dout, dlse)), top_k_per_layer=16)
    for x in (k, v):
        x[:, t + 1 :] = math.nan
    options = {"top_k_per_layer": 16, "q_start": 0}
    after, _ = gradients(q[:, : t + 1], k, v, dout[:, : t + 1], dlse[:, : t + 1], **options)
    for x, y in zip(after, before):
        assert x[:, : t + 1].isfinite().all()
        assert (x[:, : t + 1].float() - y.float()).abs().max() <= 0.02 * y.float().abs().max()
        assert not x[:, t + 1 :].any()


@pytest.mark.emulated
@pytest.mark.parametrize("which", ["q", "dout"])
def test_nan_reaches_what_the_query_attends_and_nothing_else(which):
    q, k, v, dout, dlse = inputs(300, 60, G=2, seed=8)
    results = [x.cpu() for x in forward(*(x.to(DEVICE) for x in (q, k, v)), top_k_per_layer=16)]
    clean, _ = gradients(q, k, v, dout, dlse, results=results, top_k_per_layer=16)
    bad = 20  # of head 1
    {"q": q, "dout": dout}[which][0, bad, 1, 5] = math.nan
    (dq, dk, dv), _ = gradients(q, k, v, dout, dlse, results=results, top_k_per_layer=16)
    assert dq[0, bad, 1].isnan().all()
    dq[0, bad, 1] = clean[0][0, bad, 1]
    same_bits([dq], [clean[0]])
    t = 300 - 60 + bad
    for x, y in ((dk, clean[1]), (dv, clean[2])):
        assert x[0, : t + 1].isnan().all()  # each token at or before t is a leaf of this query, or a leaf holds it
        same_bits([x[:, t + 1 :]], [y[:, t + 1 :]])


@pytest.mark.emulated
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_in_a_token_spares_the_queries_before_it(which):
    q, k, v, dout, dlse = inputs(300, 60, G=2, seed=9)
    options = {"top_k_per_layer": 16, "q_start": 70}
    clean, _ = gradients(q, k, v, dout, dlse, **options)
    bad = 100
    {"k": k, "v": v}[which][0, bad, 0, 3] = math.nan
    (dq, dk, dv), _ = gradients(q, k, v, dout, dlse, **options)
    same_bits([dq[:, : bad - 70]], [clean[0][:, : bad - 70]])
    assert dq[0, bad - 70 :].isnan().all() and dk[0, : 70 + 60].isnan().all()
    assert not dk[0, 70 + 60 :].any() and not dv[0, 70 + 60 :].any()


@pytest.mark.emulated
@pytest.mark.parametrize("hostile", ["padding", "least", "largest", "repeated", "descending"])
def test_lists_that_no_forward_wrote(hostile):
    """Numbers are unspecified; nothing is read or written out of bounds, nothing hangs, and numbers repeat."""
    q, k, v, dout, dlse = inputs(4200, 10, G=2, B=2)
    results = [x.cpu() for x in forward(*(x.to(DEVICE) for x in (q, k, v)), top_k_per_layer=16)]
    selection = results[2]
    if hostile == "repeated":
        selection[:] = selection[..., :1]
    elif hostile == "descending":
        selection[:] = selection.flip(-1)
    else:
        selection.fill_({"padding": -1, "least": -(2**31), "largest": 2**31 - 1}[hostile])
    first, _ = gradients(q, k, v, dout, dlse, results=results, top_k_per_layer=16)
    again, _ = gradients(q, k, v, dout, dlse, results=results, top_k_per_layer=16)
    same_bits(first, again)


# ---- rows that agree -----------------------------------------------------------------------------------------------


def neighbours(T, T_q, *, noise=0.2, seed=0, **shape):
    """Queries that differ little from each other, so that they select much the same."""
    q, k, v, dout, dlse = inputs(T, T_q, seed=seed, **shape)
    return (q[:, :1].float() + noise * q.float()).to(q.dtype), k, v, dout, dlse


def agreement(selection):
    """Visits of a parent that some row of a block of eight visits, on average, of each whole block."""
    found = []
    for first in range(0, selection.shape[2] - 7, 8):
        lists = selection[:, 0, first : first + 8, 0]
        visits = sum(int((layer >= 0).sum()) for layer in lists)
        found.append(visits / sum(len(set(layer[layer >= 0].tolist())) for layer in lists))
    return found


@pytest.mark.emulated
@pytest.mark.parametrize(("T", "noise"), [(1500, 0.05), (1501, 0.3), (4300, 0.2)])
def test_rows_that_agree(T, noise):
    """Eight rows share most of their parents; 4,300 tokens have two layers below the first."""
    _, (_, _, selection) = check(*neighbours(T, 19, G=5, noise=noise, seed=T), top_k_per_layer=16)
    assert min(agreement(selection)) >= 3


@pytest.mark.emulated
def test_gradients_of_neighbours_differ_in_size():
    """Of rows that share their parents one has gradients 2^40 times as large, another 2^40 times smaller."""
    q, k, v, dout, dlse = neighbours(1500, 16, G=4, seed=5)
    for row, size in ((3, 2.0**40), (6, 2.0**-40)):
        dout[0, row] *= size
        dlse[0, row] *= size
    check(q, k, v, dout, dlse, top_k_per_layer=16)


# ---- bits and surroundings --------------------------------------------------------------------------------------


def check_repeats(tensors, times, top_k):
    first, results = gradients(*tensors, top_k_per_layer=top_k)
    for _ in range(times):
        same_bits(gradients(*tensors, results=results, top_k_per_layer=top_k)[0], first)


@pytest.mark.hardware
def test_repeats_are_bitwise_equal():
    check_repeats(inputs(5000, 3000, H_kv=2, G=16, K=128, V=128), 100, 32)


@pytest.mark.emulated
def test_repeats_under_another_schedule():
    check_repeats(inputs(600, 24, H_kv=2, G=4, seed=2), 1, 16)


@pytest.mark.hardware
@pytest.mark.parametrize("G", [4, 8])
def test_repeats_of_small_groups_are_bitwise_equal(G):
    check_repeats(inputs(5000, 3000, H_kv=2, G=G, K=128, V=128), 100, 32)


@pytest.mark.hardware
@pytest.mark.parametrize("G", [4, 16])
def test_repeats_of_long_calls_are_bitwise_equal(G):
    """Kernels of two streams run for milliseconds beside each other: what one reads and the other writes would show."""
    check_repeats(inputs(16384, 16384, H_kv=2, G=G, K=128, V=128), 30, 64)


@pytest.mark.parametrize(
    ("T", "T_q", "parts", "G"),
    [
        pytest.param(700, 20, ((3, 9), (13, 20)), 3, marks=pytest.mark.emulated),
        *(
            pytest.param(6007, 2000, ((0, 2), (5, 1007), (1990, 2000)), G, marks=pytest.mark.hardware)
            for G in (2, 4, 7, 8, 16)
        ),
    ],
)
def test_dq_does_not_depend_on_other_queries(T, T_q, parts, G):
    """Bit for bit: which queries share a pack, a tile or a warp decides nothing."""
    q, k, v, dout, dlse = inputs(T, T_q, G=G, seed=11)
    (dq, _, _), results = gradients(q, k, v, dout, dlse, top_k_per_layer=16)
    for first, end in parts:
        some = slice(first, end)
        of_part = (results[0][:, some], results[1][:, some], results[2][:, :, some].contiguous())
        part, _ = gradients(
            q[:, some], k, v, dout[:, some], dlse[:, some], top_k_per_layer=16, q_start=T - T_q + first,
            results=[x.contiguous() for x in of_part],
        )  # fmt: skip
        same_bits(part[:1], [dq[:, some]])


@pytest.mark.emulated
def test_strided_views():
    q, k, v, dout, dlse = inputs(270, 9, B=2, H_kv=2, G=3)
    expected, results = gradients(q, k, v, dout, dlse, top_k_per_layer=16)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout, dlse)]
    same_bits(gradients(*swapped, results=results, top_k_per_layer=16)[0], expected)
    odd = []
    for x in (q, k, v, dout):  # rows that begin at an odd element
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype, device=DEVICE)
        wide[..., 1:-2] = x.to(DEVICE)
        odd.append(wide[..., 1:-2])
    same_bits(gradients(*odd, dlse, results=results, top_k_per_layer=16)[0], expected)
    one = torch.ones((), dtype=BF16).expand_as(dout)  # the gradient of a sum
    whole = gradients(q, k, v, one.contiguous(), dlse, results=results, top_k_per_layer=16)[0]
    same_bits(gradients(q, k, v, one, dlse, results=results, top_k_per_layer=16)[0], whole)


@pytest.mark.emulated
def test_every_gradient_is_written():
    tensors = [x.to(DEVICE) for x in inputs(300, 7, B=2, H_kv=2, G=3)]
    q, k, v, dout, dlse = tensors
    expected, _ = gradients(*tensors, top_k_per_layer=16, q_start=100)
    params = tree_params(q, k, v, q_start=100, top_k_per_layer=16)
    results = forward(q, k, v, top_k_per_layer=16, q_start=100)
    for byte in (0xFF, 0x7F):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        workspace = torch.empty(kernels.backward_workspace(q, k, v, params), dtype=torch.uint8, device=DEVICE)
        for x in (*grads, workspace):
            x.view(torch.uint8).fill_(byte)
        kernels.backward(dout, dlse, q, k, v, *results, *grads, workspace, params)
        same_bits([x.cpu() for x in grads], expected)


@pytest.mark.emulated
def test_zero_sizes():
    q, k, v, dout, dlse = inputs(100, 10, G=2)
    for part in ((q[:, :0], k, v, dout[:, :0], dlse[:, :0]), (q[:0], k[:0], v[:0], dout[:0], dlse[:0])):
        (dq, dk, dv), _ = gradients(*part, top_k_per_layer=16)
        assert dq.shape == part[0].shape and dk.shape == part[1].shape and dv.shape == part[2].shape
        assert not dk.any() and not dv.any()


@pytest.mark.emulated
def test_autograd():
    """Through the public function; out and lse both carry a gradient, and either may carry none."""
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs(300, 9, H_kv=2, G=3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = htree_cuda.forward(*leaves, top_k_per_layer=16, return_lse=True)
    mine = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    parts = [torch.autograd.grad(x, leaves, g, retain_graph=True) for x, g in ((out, dout), (lse, dlse))]
    expected, _ = gradients(*(x.detach() for x in leaves), dout, dlse, top_k_per_layer=16)
    same_bits([x.cpu() for x in mine], expected)
    for whole, one, other in zip(mine, *parts):
        assert (one.float() + other.float() - whole.float()).abs().max() <= 0.02 * whole.float().abs().max()


@pytest.mark.hardware
@pytest.mark.parametrize(
    ("shape", "top_k"),
    [({"T": 2000, "T_q": 200, "G": 4}, 16), ({"T": 5000, "T_q": 3000, "H_kv": 3, "K": 128, "V": 128}, 32)],
)
def test_graph_capture_and_replay(shape, top_k):
    """One chunk of KV heads, and several: their sums are distributed on the second stream."""
    tensors = [x.cuda() for x in inputs(**shape)]
    leaves = [x.requires_grad_() for x in tensors[:3]]

    def step():
        out, lse = htree_cuda.forward(*leaves, top_k_per_layer=top_k, return_lse=True)
        return torch.autograd.grad((out, lse), leaves, tensors[3:])

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    graph.replay()
    torch.cuda.synchronize()
    same_bits(result, expected)


@pytest.mark.emulated
@pytest.mark.parametrize("top_k", [64, 128, 512])
@pytest.mark.parametrize(("H", "H_kv"), [(16, 1), (32, 8), (64, 8)])
def test_memory_beyond_inputs_and_gradients(H, H_kv, top_k):
    """At most q + out, at the heads of the benchmark; the op allocates gradients and workspace, nothing else."""
    for T in (16384, 65536, 131072, 1 << 20):
        q, k, v = (torch.empty(1, dtype=BF16, device=DEVICE).expand(1, T, heads, 128) for heads in (H, H_kv, H_kv))
        workspace = kernels.backward_workspace(q, k, v, tree_params(q, k, v, top_k_per_layer=top_k))
        assert workspace <= 2 * T * H * (128 + 128), T


@pytest.mark.emulated
def test_chunks_of_a_part_of_the_queries_are_as_large():
    """The queries of a rank of context parallelism are few beside its tokens: they take what k and v take, too."""
    _, *kv = (torch.empty(1, dtype=BF16, device=DEVICE).expand(1, 1 << 17, heads, 128) for heads in (12, 3, 3))
    part, whole = (torch.empty(1, dtype=BF16, device=DEVICE).expand(1, T_q, 12, 128) for T_q in (1 << 15, 1 << 17))
    of_part, of_whole = (kernels.backward_workspace(q, *kv, tree_params(q, *kv)) for q in (part, whole))
    assert of_part > 0.6 * of_whole


@pytest.mark.parametrize(("T", "T_q", "K", "V", "dtype"), [(40, 40, 64, 64, BF16), (300, 14, 128, 128, FP16)])
def test_sanitizer_small_shapes(T, T_q, K, V, dtype):
    """One layer and two, a last block that is not full; every gradient is read."""
    grads, _ = gradients(*inputs(T, T_q, B=2, H_kv=2, G=3, K=K, V=V, dtype=dtype), top_k_per_layer=16)
    assert all(x.isfinite().all() for x in grads)


def test_sanitizer_three_layers():
    grads, _ = gradients(*inputs(4200, 3, G=2), top_k_per_layer=16)
    assert all(x.isfinite().all() for x in grads)


def test_what_is_not_supported_says_so():
    q, k, v, dout, dlse = inputs(20, 2, G=17)
    out, lse, selection = forward(q, k, v, top_k_per_layer=16, backend="torch")
    with pytest.raises(UnsupportedError, match=r'backward: .*at most 16 query heads .* got 17.*backend="torch"'):
        gradients(q, k, v, dout, dlse, results=(out, lse, selection), top_k_per_layer=16)
