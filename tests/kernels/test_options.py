"""The options of the rotation and attention sinks on the kernels: forward, backward and decoding, within twice the
error of the baseline, as their own tests judge them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import htree_cuda
from htree_cuda import definition
from htree_cuda import distributed as cp

from .. import baseline
from ..bits import same_bits
from . import test_decode as decoding
from . import test_varlen as varlen
from .forward_checks import DEVICE, check, inputs, run

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


def table(R: int, factor: float = 1.0, base: float = 10000.0) -> torch.Tensor:
    return base ** (-2.0 * torch.arange(R // 2, dtype=torch.float64) / R) / factor


def yarn(R: int) -> torch.Tensor:
    """Some pairs slowed by 4, some left, some between: what YaRN makes."""
    ramp = torch.linspace(0, 1, R // 2, dtype=torch.float64).clamp(0.3, 0.7).sub(0.3).div(0.4)
    return table(R, 4.0) * ramp + table(R) * (1 - ramp)


def sinks(H: int) -> torch.Tensor:
    sink = torch.randn(H, generator=torch.Generator().manual_seed(5)) * 2 + 4
    sink[0], sink[-1] = -math.inf, 30.0
    return sink


OPTIONS = {
    "plain": lambda K, H: {},  # the control
    "none": lambda K, H: {"rope_base": None},
    "yarn": lambda K, H: {"rope_inv_freq": yarn(K)},
    "partial": lambda K, H: {"rope_dim": 32, "rope_base": 500.0},
    "interleaved": lambda K, H: {"rope_interleaved": True},
    "interleaved-partial": lambda K, H: {
        "rope_interleaved": True,
        "rope_dim": 48,
        "rope_inv_freq": table(48, 2.0).float(),
    },
    # From a block to the next about half a circle.
    "half-circles": lambda K, H: {
        "rope_inv_freq": torch.linspace(0.9, 1.1, K // 2, dtype=torch.float64) * math.pi / 16
    },
    "sink": lambda K, H: {"attn_sink": sinks(H)},
    "all": lambda K, H: {"rope_dim": 48, "rope_inv_freq": yarn(48), "attn_sink": sinks(H)},
}
EVERY = pytest.mark.parametrize("name", list(OPTIONS))


def on_device(options: dict) -> dict:
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def judged(host, device, top_k, options, **others):
    """`forward_checks.check`, whose oracle takes the options on the CPU and the call on the device."""
    original = htree_cuda.forward
    try:
        htree_cuda.forward = lambda *args, **kwargs: original(*args, **{**kwargs, **on_device(options)})
        return check(host, device, top_k, **options, **others)
    finally:
        htree_cuda.forward = original


@EVERY
@pytest.mark.parametrize(("G", "dtype", "D"), [(4, BF16, 64), (8, BF16, 128), (16, BF16, 128), (5, FP16, 64)])
def test_forward(name, G, dtype, D):
    """Three layers, a dense top, queries that share warps and queries that do not; enough queries that a maximum of the
    errors is no accident."""
    options = OPTIONS[name](D, 2 * G)
    host, device = inputs(4400, 120, H_kv=2, G=G, K=D, V=D, dtype=dtype, seed=G)
    judged(host, device, 16, options, share=0.9)
    host, device = inputs(300, 300, H_kv=2, G=G, K=D, V=D, dtype=dtype, seed=G)
    judged(host, device, 16, options, picks=[0, 1, 255, 256, *range(9, 300, 6)], share=0.9)


def check_backward(options, G, dtype, D, T=330, T_q=200, B=1):
    g = torch.Generator().manual_seed(G)
    q, k, v, dout = (torch.randn(B, T, n, D, generator=g).to(dtype) for n in (G, 1, 1, G))
    dlse = torch.rand(B, T, G, generator=g) + 0.5
    q, dout, dlse = q[:, -T_q:], dout[:, -T_q:], dlse[:, -T_q:]
    tensors = [x.to(DEVICE).detach().requires_grad_() for x in (q, k, v)]
    call = on_device(options)
    if "attn_sink" in call:
        tensors.append(call["attn_sink"].requires_grad_())
    results = run(tensors[:3], top_k_per_layer=16, **call)
    grads = torch.autograd.grad(results[:2], tensors, (dout.to(DEVICE), dlse.to(DEVICE)))
    results = [x.detach().cpu() for x in results]
    options = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    allowed = baseline.backward(dout, dlse, q, k, v, *results, top_k_per_layer=16, **options)
    exact = definition.backward(dout, dlse, q, k, v, results[2], top_k_per_layer=16, **options)
    for what, x, base, truth in zip(("dq", "dk", "dv"), grads, allowed, exact):
        baseline.assert_within(what, x.cpu(), base, truth)
    if len(grads) > 3:
        torch.testing.assert_close(grads[3].cpu().double(), exact[3], rtol=2e-2, atol=2e-2)


@EVERY
@pytest.mark.parametrize(("G", "dtype", "D"), [(4, BF16, 64), (7, BF16, 128), (16, BF16, 128), (5, FP16, 64)])
def test_backward(name, G, dtype, D):
    """Of fp16 the kernels' errors are nearly the baseline's; there are two rows, lest their maxima be chance."""
    check_backward(OPTIONS[name](D, G), G, dtype, D, B=2 if dtype == FP16 else 1)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["interleaved-partial", "all", "half-circles"])
def test_all_kernels_small(name):
    """K = V = 64, bf16, few queries: what the emulator runs."""
    options = OPTIONS[name](64, 4)
    host, device = inputs(290, 12, G=4, K=64, V=64)
    judged(host, device, 16, options, share=0.9)
    check_backward(options, 4, BF16, 64, T=290, T_q=12)
    host = decoding.inputs(2, 290, 1, H_kv=1, G=4, D=64)
    cache = decoding.filled(*host[1:], (290, 18))
    decoding.check(host, (290, 18), decoding.run(host[0], cache, 16, **on_device(options)), 16, share=0.9, **options)


def test_a_table_of_the_base_gives_its_bits():
    """Made on the device, where the kernels make theirs: a power in float64 has other last bits on a CPU."""
    _, device = inputs(5000, 700, G=4, K=128, V=128)
    expected = run(device, top_k_per_layer=16, rope_base=500.0)
    frequencies = 500.0 ** (-2.0 * torch.arange(64, dtype=torch.float64, device=DEVICE) / 128)
    same_bits(run(device, top_k_per_layer=16, rope_inv_freq=frequencies), expected)


def test_a_sink_without_effect_gives_the_bits_of_none():
    _, device = inputs(2000, 300, G=4, K=64, V=64)
    none = torch.full((4,), -math.inf, device=DEVICE)
    same_bits(run(device, top_k_per_layer=16, attn_sink=none), run(device, top_k_per_layer=16))
    out, lse, _ = run(device, top_k_per_layer=16, attn_sink=-none)
    assert not out.any()
    same_bits([lse], [run(device, top_k_per_layer=16)[1]])
    assert run(device, top_k_per_layer=16, attn_sink=none * math.nan)[0].isnan().all()


# ---- packed calls, and pieces of context parallelism --------------------------------------------------------------


def gradients(call, tensors, options):
    """out, lse, selection and the gradients of q, k, v and of a sink, of numbers that are drawn alike every time."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    options = on_device(options)
    if "attn_sink" in options:
        leaves.append(options["attn_sink"].detach().clone().requires_grad_())
        options = {**options, "attn_sink": leaves[3]}
    out, lse, selection = call(*leaves[:3], return_lse=True, return_selection=True, top_k_per_layer=16, **options)
    g = torch.Generator(device=DEVICE).manual_seed(3)
    dout = torch.randn(out.shape, generator=g, device=DEVICE).to(out.dtype)
    dlse = torch.rand(lse.shape, generator=g, device=DEVICE)
    return out.detach(), lse.detach(), selection, torch.autograd.grad((out, lse), leaves, (dout, dlse))


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["interleaved-partial", "all"])
def test_a_small_pack(name):
    keys, queries = [270, 17], [5, 3]
    pack = varlen.a_pack(keys, queries, G=4, D=64, padding=3)
    varlen.check_against_loop(pack, keys, queries, top_k_per_layer=16, **on_device(OPTIONS[name](64, 4)))


@EVERY
@pytest.mark.parametrize(("G", "dtype", "D"), [(4, BF16, 64), (16, FP16, 128)])
def test_a_pack_is_a_loop(name, G, dtype, D):
    """Results and gradients; of sequences of one length they are those of a batch, sums in another order."""
    keys, queries, options = [900, 0, 4400, 17, 300], [40, 2, 60, 17, 13], OPTIONS[name](D, 2 * G)
    pack = varlen.a_pack(keys, queries, H_kv=2, G=G, D=D, dtype=dtype, padding=5)
    varlen.check_against_loop(pack, keys, queries, top_k_per_layer=16, **on_device(options))
    keys = [700, 700]
    q, k, v, *cu = varlen.a_pack(keys, H_kv=2, G=G, D=D, dtype=dtype)
    *found, grads = gradients(lambda *x, **o: htree_cuda.forward_varlen(*x, *cu, 700, 700, **o), (q, k, v), options)
    *whole, expected = gradients(htree_cuda.forward, [x.unflatten(0, (2, 700)) for x in (q, k, v)], options)
    same_bits(found[:2], [x.flatten(0, 1) for x in whole[:2]])
    dq, *sums = (x.flatten(0, 1) for x in expected[:3])
    same_bits(grads[:1], [dq])
    varlen.same_sums(grads[1:3], sums)
    torch.testing.assert_close(grads[3:], expected[3:], rtol=1e-4, atol=1e-5)


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def check_pieces(group, name, T, H_kv, G, dtype, D):
    options = OPTIONS[name](D, H_kv * G)
    _, tensors = inputs(T, T, H_kv=H_kv, G=G, K=D, V=D, dtype=dtype)
    in_pieces = lambda *x, **o: cp.context_parallel_forward(*x, group=group, layout="zigzag", **o)  # noqa: E731
    *whole, (dq, *expected) = gradients(htree_cuda.forward, tensors, options)
    *found, (own_dq, *grads) = gradients(in_pieces, tensors, options)
    same_bits([*found, own_dq], [*whole, dq])
    for x, y in zip(grads[:2], expected[:2], strict=True):
        error = (x.float() - y.float()).abs() / (y.float().abs() + 2.0**-7 * y.float().abs().max())
        assert error.max() <= 2.0**-6
    torch.testing.assert_close(grads[2:], expected[2:], rtol=1e-4, atol=1e-4)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["interleaved-partial", "all"])
def test_small_pieces_of_a_sequence(name, group):
    """Context parallelism calls the kernels by a door of its own (`distributed/pieces.py`), which adds to dk and dv."""
    check_pieces(group, name, 92, 1, 3, BF16, 64)


@EVERY
@pytest.mark.parametrize(("G", "dtype", "D"), [(4, BF16, 64), (8, FP16, 128)])
def test_pieces_of_a_sequence(name, group, G, dtype, D):
    check_pieces(group, name, 1300, 2, G, dtype, D)


# ---- decoding ---------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("page_size", [None, 256])
@pytest.mark.parametrize(("G", "dtype", "D"), [(4, BF16, 64), (8, BF16, 128), (16, FP16, 128)])
def test_decode(name, G, dtype, D, page_size):
    options = OPTIONS[name](D, 2 * G)
    lengths = (1, 17, 300, 4097)
    host = decoding.inputs(len(lengths), max(lengths), 2, H_kv=2, G=G, D=D, dtype=dtype)
    cache = decoding.filled(*host[1:], lengths, page_size=page_size)
    results = decoding.run(host[0], cache, 16, **on_device(options))
    decoding.check(host, lengths, results, 16, share=0.9, **options)


def test_a_prefill_is_a_call_of_forward():
    host = decoding.inputs(1, 700, 40, H_kv=1, G=4, D=64)
    options = on_device(OPTIONS["all"](64, 4))
    cache = decoding.filled(*host[1:], (700,))
    device = [x.to(DEVICE) for x in host]
    mine = decoding.run(host[0], cache, 16, **options)
    same_bits(mine[:2], run(device, top_k_per_layer=16, **options)[:2])


def test_the_decode_kernel_refuses_some_partial_rotations():
    host = decoding.inputs(1, 100, 1, H_kv=1, G=4, D=64)
    cache = decoding.filled(*host[1:], (100,))
    with pytest.raises(
        htree_cuda.UnsupportedError, match="the decode kernel needs rope_dim to be a multiple of 16, got 24"
    ):
        decoding.run(host[0], cache, 16, rope_dim=24)
    decoding.run(host[0], cache, 16, rope_dim=24, rope_interleaved=True)
