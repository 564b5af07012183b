"""forward(..., selection=): a selection that was made before, in place of choosing."""

from __future__ import annotations

import pytest
import torch

import htree_cuda
from htree_cuda import definition
from tests.unit.calls import SMALL, TREE, qkv

LAYERS = [(40, 40), (70, 12), (300, 20)]  # two, three and four layers


def call(q, k, v, **options):
    return htree_cuda.forward(q, k, v, return_lse=True, return_selection=True, **SMALL, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("T", "T_q"), LAYERS)
def test_the_bits_of_the_call_that_made_it(T, T_q, dtype):
    q, k, v = qkv(T=T, T_q=T_q, B=2, dtype=dtype, grad=True)
    out, lse, selection = call(q, k, v)
    again = call(q, k, v, selection=selection)
    assert again[2] is selection
    grads = [torch.autograd.grad((x, y.sum()), (q, k, v), (torch.ones_like(x), torch.ones(()).to(y)))
             for x, y in ((out, lse), again[:2])]  # fmt: skip
    for x, y in zip((out, lse, *grads[0]), (*again[:2], *grads[1]), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("save_selection", [True, False, "auto"])
def test_somebody_elses_selection_is_what_the_definition_computes(save_selection):
    """Of other queries: another set, which the leaves and the gradients follow."""
    q, k, v = qkv(T=300, T_q=4, B=2, grad=True)
    other = torch.randn_like(q)
    selection = call(other, k, v)[2]
    assert not torch.equal(selection, call(q, k, v)[2])
    out = htree_cuda.forward(q, k, v, selection=selection, save_selection=save_selection, **SMALL)
    exact = definition.forward(q, k, v, selection=selection, **SMALL)
    torch.testing.assert_close(out, exact.out)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for x, y in zip(grads, definition.backward(dout, None, *(x.detach() for x in (q, k, v)), selection, **SMALL)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "content", ["padding", "smallest", "largest", "zero", "first", "descending", "random", "later"]
)
def test_garbage_is_no_fault_and_lets_no_later_token_in(content):
    q, k, v = qkv(T=300, T_q=40, H=2, H_kv=1)
    selection = call(q, k, v)[2]
    if content == "first":
        selection[:] = selection[..., :1].clone()
    elif content == "descending":
        selection[:] = selection.flip(-1)
    elif content == "random":
        selection.random_(-5, 80)
    elif content == "later":
        selection += 3
    else:
        values = {"padding": -1, "smallest": -(2**31), "largest": 2**31 - 1, "zero": 0}
        selection.fill_(values[content])
    before = htree_cuda.forward(q, k, v, selection=selection, return_lse=True, **SMALL)
    t = 277  # the position of query 17
    for x in (k, v):
        x[:, t + 1 :] = torch.nan
    after = htree_cuda.forward(q, k, v, selection=selection, return_lse=True, **SMALL)
    for x, y in zip(before, after):
        assert x.isfinite().all() and torch.equal(x[:, :18], y[:, :18])
    leaves = [x.requires_grad_() for x in (q[:, :18].clone(), k, v)]
    out = htree_cuda.forward(*leaves, q_start=260, selection=selection[:, :, :18], **SMALL)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq.isfinite().all() and not dk[:, t + 1 :].any() and not dv[:, t + 1 :].any()


def test_opcheck_with_a_selection():
    args = qkv(grad=True)
    selection = call(*args)[2]
    options = {"need_selection": False, "backend": "auto", "save_selection": "auto"}
    torch.library.opcheck(torch.ops.htree_cuda.forward, (*args, None, None, selection), {**TREE, **options})


def test_the_rules_of_a_selection():
    q, k, v = qkv()
    selection = call(q, k, v)[2]
    for bad, message in (
        (selection[:1], r"forward: selection must have the shape \(2, 1, 12, 2, 4\), got \(1, 1, 12, 2, 4\)"),
        (selection.long(), "forward: selection must be torch.int32, got torch.int64"),
        (selection.to("meta"), "forward: selection must be on the device of q"),
    ):
        with pytest.raises(ValueError, match=message):
            htree_cuda.forward(q, k, v, selection=bad, **SMALL)
    with pytest.raises(TypeError, match="forward: selection must be a"):
        htree_cuda.forward(q, k, v, selection=[[0]], **SMALL)


def test_one_layer_has_an_empty_selection():
    q, k, v = qkv(T=10, T_q=10)
    out, _, selection = call(q, k, v)
    assert selection.shape[0] == 0
    assert torch.equal(htree_cuda.forward(q, k, v, selection=selection, **SMALL), out)
