"""Dense attention by the kernels over index lists: one list of all rows for every query, beside the PyTorch backend."""

from __future__ import annotations

import math

import pytest
import torch

from htree_cuda import dense_kernels
from htree_cuda.params import IndexerParams
from htree_cuda.torch_backend import dense_loss

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("poison", [False, True])
def test_attention_of_a_tile(poison, monkeypatch):
    """A tile inside larger tensors, heads in two launches. A NaN key stays in its column; a silent head adds 0."""
    monkeypatch.setattr(dense_kernels, "MAX_HEADS", 64)
    q = torch.randn(9, 70, 128, device=DEVICE).bfloat16()[2:7]
    k = torch.randn(200, 1, 128, device=DEVICE).bfloat16()[30:117, 0]
    lse = torch.randn(9, 70, device=DEVICE)[2:7] + 3
    lse[1, 3] = math.inf
    if poison:
        k[5] = math.nan
    found = dense_kernels.attention(q, k, lse, 0.09, 2.0, torch.float32)
    exact = dense_loss.attention(q.double(), k.double(), lse.double(), 0.09, 2.0, torch.float64)
    assert found.shape == (5, 87) and torch.equal(found.isnan(), exact.isnan())
    assert exact[:, 5].isnan().all() == poison and exact[:, 6:].isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_lse_of_dense_causal_attention(monkeypatch):
    """Chunks of two queries; keys after the last of a chunk are not listed, those after a query are not visible."""
    monkeypatch.setattr(dense_kernels, "MAX_OUT_BYTES", 2 * 6 * 512 * 2)
    q = torch.randn(2, 5, 6, 576, device=DEVICE).bfloat16()
    k = torch.randn(2, 70, 1, 576, device=DEVICE).bfloat16()
    starts = [65, 3]
    k[1, 8:] = math.nan
    found = dense_kernels.dense_lse(q, k, starts, 0.05)
    window = dense_loss.Window(2, 5, q.device, IndexerParams(True, starts, 1))
    exact = dense_loss.dense_lse(q.double(), k.double(), window, 0.05)
    assert exact.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
