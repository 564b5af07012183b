"""forward(..., selection=) on the kernels: the bits of the call that made a selection, and garbage in its place."""

from __future__ import annotations

import math

import pytest
import torch

import htree_cuda
from htree_cuda import definition

from .. import baseline
from ..bits import same_bits
from .forward_checks import BF16, FP16, inputs, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def check_bits(T, T_q, top_k, **shape):
    _, device = inputs(T, T_q, **shape)
    out, lse, selection = run(device, top_k_per_layer=top_k)
    again = run(device, top_k_per_layer=top_k, selection=selection)
    assert again[2] is selection
    same_bits(again[:2], (out, lse))


@pytest.mark.emulated
@pytest.mark.sample
@pytest.mark.parametrize(("T", "T_q", "G"), [(275, 30, 3), (4110, 20, 5)])
def test_the_bits_of_the_call_that_made_it(T, T_q, G):
    """Queries of two entry layers, two and three layers."""
    check_bits(T, T_q, 16, B=2, H_kv=2, G=G, K=64, V=64)


@pytest.mark.hardware
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("G", [1, 2, 4, 7, 8, 12, 16])
def test_the_bits_of_long_calls(G, dtype):
    check_bits(70003, 70003, 64, G=G, dtype=dtype)
    check_bits(20000, 19001, 512, B=2, H_kv=2, G=G, dtype=dtype)


@pytest.mark.emulated
def test_somebody_elses_selection():
    host, device = inputs(1100, 10, G=4, K=64, V=64, seed=1)
    other = torch.randn(device[0].shape, generator=torch.Generator().manual_seed(2)).to(device[0])
    options = {"top_k_per_layer": 16}
    selection = run((other, *device[1:]), **options)[2]
    out = htree_cuda.forward(*device, selection=selection, **options).cpu()
    selection = selection.cpu()
    exact = definition.forward(*host, selection=selection, **options)
    base = baseline.forward(*host, selection, **options)
    baseline.assert_within("out", out, base.out, exact.out)


@pytest.mark.emulated
@pytest.mark.parametrize("content", ["padding", "largest", "first", "descending", "random"])
def test_garbage_is_no_fault_and_lets_no_later_token_in(content):
    _, (q, k, v) = inputs(4300, 26, G=2, K=64, V=64)
    options = {"top_k_per_layer": 16, "return_lse": True}
    selection = run((q, k, v), top_k_per_layer=16)[2]
    if content == "first":
        selection[:] = selection[..., :1].clone()
    elif content == "descending":
        selection[:] = selection.flip(-1)
    elif content == "random":
        g = torch.Generator().manual_seed(0)
        selection[:] = torch.randint(-9, 300, selection.shape, generator=g, dtype=torch.int32)
    else:
        selection.fill_({"padding": -1, "largest": 2**31 - 1}[content])
    before = htree_cuda.forward(q, k, v, selection=selection, **options)
    assert all(x.isfinite().all() for x in before)
    for x in (k, v):
        x[:, 4274 + 9 :] = math.nan
    after = htree_cuda.forward(q, k, v, selection=selection, **options)
    same_bits([x[:, :9] for x in after], [x[:, :9] for x in before])


@pytest.mark.emulated
def test_gradients():
    _, device = inputs(1100, 20, H_kv=2, G=3, K=64, V=64)
    leaves = [x.requires_grad_() for x in device]
    out, selection = htree_cuda.forward(*leaves, top_k_per_layer=16, return_selection=True)
    again = htree_cuda.forward(*leaves, top_k_per_layer=16, selection=selection)
    dout = torch.ones_like(out)
    same_bits(torch.autograd.grad(again, leaves, dout), torch.autograd.grad(out, leaves, dout))


def test_what_the_kernels_need_of_a_selection():
    _, device = inputs(1100, 20, G=2, K=64, V=64)
    selection = run(device, top_k_per_layer=16)[2]
    with pytest.raises(htree_cuda.UnsupportedError, match="need selection contiguous"):
        strided = torch.stack((selection, selection), dim=-1)[..., 0]
        htree_cuda.forward(*device, top_k_per_layer=16, selection=strided)
