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


def test_batches_of_list_ops_stay_open():
    """One start serves every batch size: a list of starts would fix it."""
    rank = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "index_rope_interleaved": False}
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    layer = htree_cuda.DSAttention(16, 2, **rank, **index, rope_base=1e4, rope_interleaved=True)
    compiled = torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)
    for B in (2, 3, 5):
        x = torch.randn(B, 9, 16)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    assert len(made) == 1
    for starts, B in (([1], 2), ([1, 2, 3], 2)):
        q, kv, indices = torch.randn(B, 4, 2, 4), torch.randn(B, 7, 1, 4), torch.zeros(B, 4, 1, 5, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"q_start must be one int or a list of B \(2\) ints"):
            htree_cuda.sparse_attention(q, kv, indices, d_v=2, q_start=starts)


def test_a_warm_up_layer_is_loaded_again(tmp_path):
    rank = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "index_rope_interleaved": False}
    layer = htree_cuda.DSAttention(16, 2, **rank, **index, rope_base=1e4, rope_interleaved=True, stage="warmup").eval()
    x = torch.randn(2, 9, 16)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "layer.pt2").module()(x)[0], layer(x)[0])


class Quantize(nn.Module):
    def __init__(self, block_size):
        super().__init__()
        self.block_size = block_size

    def forward(self, x):
        return htree_cuda.quantize_fp8(x, block_size=self.block_size)


@pytest.mark.parametrize(
    ("block_size", "sizes"), [(None, (2, 7, 300)), (128, (7, 100, 128)), (128, (129, 256, 500)), (1 << 40, (7, 300))]
)
def test_quantize_fp8_is_exported_for_any_last_dimension(block_size, sizes):
    """On either side of block_size, where there is one block or several."""
    module, D = Quantize(block_size), Dim("D", min=min(sizes), max=128 if max(sizes) == 128 else 1 << 20)
    program = export(module, (torch.randn(3, sizes[1]),), dynamic_shapes={"x": {1: D}}).module()
    for size in sizes:
        x = torch.randn(3, size)
        (y, scale), (expected, of_block) = program(x), module(x)
        assert torch.equal(y.float(), expected.float()) and torch.equal(scale, of_block), size
