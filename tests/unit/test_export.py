"""torch.export with a dynamic length: no length of the example is burnt into the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import htree_cuda

LENGTHS = (7, 60, 300, 1100)  # 1, 1, 2 and 3 layers with the options below; 300 is exported
OPTIONS = {"compression_rate": 16, "top_k_per_layer": 4}


class Forward(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return htree_cuda.forward(q, k, v, **OPTIONS, **self.options)


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_with_parameters_is_exported_for_any_length(strict):
    """Its parameters ask for gradients, so that "auto" would keep the selection, whose size follows from the layers."""
    module = htree_cuda.HTreeAttention(32, 4, 2, **OPTIONS)
    program = export(
        module, (torch.randn(1, 300, 32),), dynamic_shapes={"x": {1: Dim("T", min=2, max=1 << 20)}}, strict=strict
    ).module()
    for T in LENGTHS:
        x = torch.randn(1, T, 32)
        assert torch.equal(program(x), module(x)), T


@pytest.mark.parametrize("options", [{}, {"save_selection": False}, {"return_lse": True}])
@pytest.mark.parametrize("grad", [False, True])
def test_the_function_is_exported_for_any_length(options, grad):
    def inputs(T):
        q, k, v = torch.randn(1, T, 4, 8), torch.randn(1, T, 2, 8), torch.randn(1, T, 2, 6)
        return q.requires_grad_(grad), k, v

    T = Dim("T", min=2, max=1 << 20)
    program = export(Forward(**options), inputs(300), dynamic_shapes={name: {1: T} for name in "qkv"}).module()
    for length in LENGTHS:
        tensors = inputs(length)
        torch.testing.assert_close(program(*tensors), Forward(**options)(*tensors), rtol=0, atol=0)


def test_no_layer_is_counted_where_none_can_be_kept(monkeypatch):
    """ "auto" where one layer's selection is larger than q and out together: a dynamic graph gets no guard on T."""
    asked = []
    original = htree_cuda.ops._layers
    monkeypatch.setattr(htree_cuda.ops, "_layers", lambda *args: asked.append(args) or original(*args))
    for top_k, expected in ((64, 0), (4, 1)):
        asked.clear()
        q, k, v = (torch.randn(1, 20, 4, 8, device="meta").requires_grad_() for _ in range(3))
        htree_cuda.forward(q, k, v, top_k_per_layer=top_k, save_selection="auto")
        assert len(asked) >= expected and bool(asked) == bool(expected)
