"""On a Hopper GPU: gradients of the torch backend that are asked to be repeatable."""

from __future__ import annotations

import pytest
import torch

import htree_cuda
from htree_cuda.torch_backend import visits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_gradients_have_the_same_bits(dtype):
    q, k, v = (torch.randn(2, 2000, h, 64).to("cuda", dtype).requires_grad_() for h in (8, 2, 2))
    options = {"top_k_per_layer": 16, "backend": "torch", "deterministic": True}

    def gradients(save_selection):
        out = htree_cuda.forward(q, k, v, save_selection=save_selection, **options)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v))

    first = gradients(True)
    for i in range(20):
        for x, y in zip(gradients(i % 2 == 0), first, strict=True):
            assert torch.equal(x, y) and x.abs().sum() > 0
    atomic = torch.autograd.grad(
        htree_cuda.forward(q, k, v, **{**options, "deterministic": False}).float().square().sum(), (q, k, v)
    )
    for x, y in zip(atomic, first, strict=True):
        assert (x - y).float().norm() <= 1e-2 * y.float().norm(), "the same sum in another order"


def test_gradients_by_tiles_of_visits_are_those_of_single_additions(monkeypatch):
    q, k, v = (torch.randn(2, 2000, h, 64, dtype=torch.float64, device="cuda").requires_grad_() for h in (8, 2, 2))

    def gradients():
        out = htree_cuda.forward(q, k, v, top_k_per_layer=16, backend="torch")
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    calls, tiles = [], visits.Visits
    monkeypatch.setattr(visits, "Visits", lambda *args: calls.append(args) or tiles(*args))
    by_tiles = gradients()
    assert calls
    monkeypatch.setattr(visits, "worthwhile", lambda *sizes: False)
    for x, y in zip(by_tiles, gradients(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
