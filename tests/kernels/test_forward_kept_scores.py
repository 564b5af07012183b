"""Scores that a score pass keeps in selected layers above the bottom, for small groups and small budgets."""

from __future__ import annotations

import math

import pytest
import torch

from ..bits import same_bits
from .forward_checks import BF16, check, inputs, run

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]

DEVICE = "cuda"
# With top_k 16 the layer above the tokens is a selected one from position 4,096 on.
T = 4500
GROUPS = pytest.mark.parametrize("G", [4, 7])


def on_device(*tensors):
    return tuple(x.to(DEVICE, copy=True) for x in tensors)


def replayed(device, result, **options):
    again = run(device, top_k_per_layer=16, selection=result[2], **options)
    same_bits(again[:2], result[:2])


@GROUPS
@pytest.mark.parametrize("strict_causal", [True, False])
def test_whole_tiles(G, strict_causal):
    """A CTA whose queries all select there visits the blocks once, and its attend pass copies values alone."""
    host, device = inputs(T, 96, G=G, K=64, V=64, seed=G)
    options = {"strict_causal": strict_causal}
    replayed(device, on_device(*check(host, device, 16, picks=(0, 50, 95), share=0.9, **options)), **options)


@GROUPS
def test_ties_go_to_the_lowest_positions(G):
    """Importance of kept scores lies in another order in the threads that select."""
    _, (q, k, v) = inputs(T, 48, G=G, K=64, V=64)
    q.zero_()
    above, below = run((q, k, v), top_k_per_layer=16)[2].flip(0)[:, 0, :, 0].cpu()
    assert torch.equal(above[:, :15].long(), torch.arange(15).expand(48, 15))
    # 15 of the candidates below node 0, and the rightmost
    assert torch.equal(below[:, :15].long(), torch.arange(15).expand(48, 15))
    assert torch.equal(below[:, 15].long(), torch.arange(T - 48, T) // 16)


@GROUPS
@pytest.mark.parametrize("size", [3e3, 1e5])
def test_logits_that_fp16_does_not_hold(G, size):
    """Such a query takes importance of a sweep of its own, its neighbours' results stay as they were."""
    host, device = inputs(T, 48, G=G, K=64, V=64, seed=2)
    before = run(device, top_k_per_layer=16)
    large = [3, 17, 40]
    host[0][:, large] *= size
    device = on_device(*host)
    after = check(host, device, 16, picks=(3, 17, 40), share=0.0, selection_rules=False)
    others = [i for i in range(48) if i not in large]
    same_bits([x[:, others].to(DEVICE) for x in after[:2]], [x[:, others] for x in before[:2]])
    replayed(device, on_device(*after))


@GROUPS
def test_nodes_of_different_sizes(G):
    """Where the keys of a block share no scale, in the layer above the tokens."""
    host, _ = inputs(T, 48, G=G, K=64, V=64, seed=3)
    g = torch.Generator().manual_seed(0)
    falls = torch.randint(0, 14, (-(-T // 16),), generator=g)
    size = 2.0 ** (1 - falls.float()).repeat_interleave(16)[None, :T, None, None]
    host = tuple(x.to(BF16) for x in (host[0], host[1] * size, host[2]))
    device = on_device(*host)
    replayed(device, on_device(*check(host, device, 16, picks=(0, 30, 47), share=0.9)))


@GROUPS
@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**100])
def test_later_tokens_have_no_effect(G, bad):
    _, (q, k, v) = inputs(T, 48, G=G, K=64, V=64, seed=4)
    before = run((q, k, v), top_k_per_layer=16)
    for x in (q[:, 25:], k[:, T - 48 + 25 :], v[:, T - 48 + 25 :]):
        x[:] = bad
    after = run((q, k, v), top_k_per_layer=16)
    same_bits([x[:, :25] for x in after[:2]], [x[:, :25] for x in before[:2]])
    same_bits([after[2][:, :, :25]], [before[2][:, :, :25]])


@GROUPS
def test_a_node_that_is_not_finite(G):
    """NaN where a query attends it, and distinct candidates all the same."""
    _, (q, k, v) = inputs(T, 48, G=G, K=64, V=64, seed=5)
    k[:, 1234, :, 5] = math.nan
    v[:, 77, :, 9] = math.inf
    out, lse, selection = run((q, k, v), top_k_per_layer=16)
    assert out.isnan().all() and lse.isnan().all()
    row = selection[0, 0, :, 0]
    assert (row[:, 1:] > row[:, :-1]).all() and (row >= 0).all() and (row <= T // 16).all()


def test_budgets_up_to_the_largest():
    """32 candidates of a thread in the selection; 256 keeps no scores."""
    for top_k, length in ((64, 17000), (128, 34000), (256, 68000)):
        host, device = inputs(length, 48, G=4, K=64, V=64, seed=top_k)
        result = check(host, device, top_k, picks=(47,), share=0.9)
        again = run(device, top_k_per_layer=top_k, selection=result[2].to(DEVICE))
        same_bits(again[:2], [x.to(DEVICE) for x in result[:2]])
