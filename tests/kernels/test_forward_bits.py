"""Bits of the forward that must not depend on what else a call holds, nor on when it runs."""

from __future__ import annotations

import pytest

from ..bits import same_bits
from .forward_checks import inputs, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.parametrize("strict_causal", [True, False])
@pytest.mark.parametrize(
    ("T", "parts"),
    [
        pytest.param(290, ((0, 2), (250, 290), (5, 290), (288, 290)), marks=pytest.mark.emulated),
        pytest.param(
            6007, ((0, 2), (0, 13), (255, 700), (4090, 4100), (5, 6007), (6005, 6007)), marks=pytest.mark.hardware
        ),
    ],
)
def test_any_split_of_the_queries_equals_the_whole(T, parts, strict_causal):
    """Bit for bit, a single query apart: its sums are split over warps."""
    _, (q, k, v) = inputs(T, T, H_kv=2, G=3, K=64, V=64)
    whole = run((q, k, v), top_k_per_layer=16, strict_causal=strict_causal)
    for first, last in parts:
        options = {"top_k_per_layer": 16, "strict_causal": strict_causal, "q_start": first}
        part = run((q[:, first:last], k, v), **options)
        same_bits(part[:2], [x[:, first:last] for x in whole[:2]])
        same_bits(part[2:], [whole[2][:, :, first:last]])


@pytest.mark.parametrize(
    ("T", "T_q", "top_k"),
    [
        pytest.param(700, 11, 16, marks=pytest.mark.emulated),  # one block of queries a head
        pytest.param(700, 31, 16, marks=pytest.mark.emulated),  # three, in pairs
        pytest.param(275, 37, 16, marks=pytest.mark.emulated),  # whose entry layers differ
        pytest.param(20000, 20000, 512, marks=pytest.mark.hardware),  # in chunks that begin within a head
    ],
)
def test_heads_do_not_depend_on_others(T, T_q, top_k):
    """Bit for bit, each as in a call of its own."""
    _, (q, k, v) = inputs(T, T_q, B=2, H_kv=3, G=3, K=64, V=64)
    whole = run((q, k, v), top_k_per_layer=top_k)
    for b in range(2):
        for head in range(3):
            group = slice(3 * head, 3 * head + 3)
            one = run(
                (q[b : b + 1, :, group], *(x[b : b + 1, :, head : head + 1] for x in (k, v))), top_k_per_layer=top_k
            )
            same_bits(one[:2], [x[b : b + 1, :, group] for x in whole[:2]])
            same_bits(one[2:], [whole[2][:, b : b + 1, :, head : head + 1]])


@pytest.mark.hardware
def test_several_chunks():
    """More queries than one chunk of the workspace holds, T_q not a multiple of anything."""
    _, (q, k, v) = inputs(40007, 40007, G=2, K=64, V=64)
    whole = run((q, k, v))
    for first in (0, 3168 * 2 - 5, 12000, 39000):
        part = run((q[:, first : first + 1007], k, v), q_start=first)
        same_bits(part[:2], [x[:, first : first + 1007] for x in whole[:2]])


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        pytest.param(300, (30, 256, 257), marks=pytest.mark.emulated),
        pytest.param(4200, (200, 257, 4096, 4097), marks=pytest.mark.hardware),
    ],
)
def test_the_first_tokens_do_not_depend_on_how_many_follow(most, lengths):
    """Also where a later token adds a layer: prefill and decoding agree."""
    _, (q, k, v) = inputs(most, most, G=2, K=64, V=64)
    long = run((q, k, v), top_k_per_layer=16)
    for T in lengths:
        short = run((q[:, :T], k[:, :T], v[:, :T]), top_k_per_layer=16)
        same_bits(short[:2], [x[:, :T] for x in long[:2]])


@pytest.mark.hardware
def test_repeats_are_bitwise_equal():
    _, device = inputs(5000, 3000, H_kv=2, G=16)
    first = run(device, top_k_per_layer=32)
    for _ in range(300):
        same_bits(run(device, top_k_per_layer=32), first)
