"""Chunks of queries of a forward call under way at the same time, the second on a stream of the library's own: the bits
of one after the other, whatever the caller's streams do.

Whether a call has two lanes follows from its size: small groups, and more tiles of 12 queries than a wave of CTAs.
"""

from __future__ import annotations

import threading

import pytest
import torch

import htree_cuda
from htree_cuda import kernels

from ..bits import same_bits
from .forward_checks import BF16, FP16, inputs, run
from .test_varlen import a_pack, check_against_loop

pytestmark = [pytest.mark.gpu, pytest.mark.hardware]

DEVICE = "cuda"
OPTIONS = {"top_k_per_layer": 16}


def several(T=2500, *, G=4, seed=0, **options):
    return inputs(T, T, H_kv=8, G=G, K=64, V=64, seed=seed, **options)[1]


def piece_by_piece(tensors, **options):
    """At most 3,000 queries of a KV head in each call, which has one lane then: small groups have waves of 132 CTAs of
    24 or 48 queries."""
    q, k, v = tensors
    G = q.shape[2] // k.shape[2]
    heads = []
    for head in range(k.shape[2]):
        group, own = slice(G * head, G * head + G), slice(head, head + 1)
        parts = [
            run((q[:, begin : begin + 3000, group], k[:, :, own], v[:, :, own]), q_start=begin, **options)
            for begin in range(0, q.shape[1], 3000)
        ]
        heads.append([torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 1, 2), strict=True)])
    return [torch.cat(x, dim) for x, dim in zip(zip(*heads, strict=True), (2, 2, 3), strict=True)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("G", [1, 4, 7])
def test_lanes_have_the_bits_of_one(G, dtype):
    tensors = several(2500, G=G, dtype=dtype)
    same_bits(run(tensors, **OPTIONS), piece_by_piece(tensors, **OPTIONS))


@pytest.mark.parametrize("top_k", [64, 512])
def test_lanes_of_several_chunks_have_the_bits_of_one(top_k):
    """Chunks that begin within a head, as many as leave one lane with more than the other."""
    tensors = several(18000)
    same_bits(run(tensors, top_k_per_layer=top_k), piece_by_piece(tensors, top_k_per_layer=top_k))


def test_a_replayed_selection():
    tensors = several()
    out, lse, selection = run(tensors, **OPTIONS)
    same_bits(htree_cuda.forward(*tensors, selection=selection, return_lse=True, **OPTIONS), [out, lse])


def test_packs():
    lengths = (2500, 17, 900, 1, 4200)
    check_against_loop(a_pack(lengths, H_kv=8, G=4, D=64), lengths, **OPTIONS)


def test_no_synchronisation():
    tensors = several()
    expected = run(tensors, **OPTIONS)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(tensors, **OPTIONS)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    same_bits(found, expected)


def test_two_streams_of_the_caller_and_threads():
    """Threads on streams of their own, then all on one."""
    both = several(), several(2200, seed=1)
    expected = [run(x, **OPTIONS) for x in both]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]
    for _ in range(10):
        found = []
        for stream, tensors in zip(streams, both, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(tensors, **OPTIONS))
        torch.cuda.synchronize()
        for x, y in zip(found, expected, strict=True):
            same_bits(x, y)

    results = {}

    def work(i, stream):
        with torch.cuda.stream(stream):
            results[i] = [run(both[i % 2], **OPTIONS) for _ in range(5)]
            torch.cuda.current_stream().synchronize()

    for shared in (False, True):
        stream = torch.cuda.Stream()
        threads = [threading.Thread(target=work, args=(i, stream if shared else torch.cuda.Stream())) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        for i, found in results.items():
            for x in found:
                same_bits(x, expected[i % 2])
        results.clear()


@pytest.mark.parametrize("used_before", [False, True])
def test_two_calls_in_one_graph(used_before):
    """A fork and a join each, also where the capturing stream is new to the library; other work goes on meanwhile."""
    first, second = several(), several(2200, seed=1)
    stream = torch.cuda.Stream()
    if used_before:
        with torch.cuda.stream(stream):
            run(first, **OPTIONS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run(first, **OPTIONS), run(second, **OPTIONS), run(first, **OPTIONS)
    for x, y in zip(first, several(seed=5), strict=True):
        x.copy_(y)
    for _ in range(2):
        graph.replay()
        same_bits(run(second, **OPTIONS), found[1])
    torch.cuda.synchronize()
    for x, tensors in zip(found, (first, second, first), strict=True):
        same_bits(x, run(tensors, **OPTIONS))


def test_memory_is_free_for_others_after_the_call():
    """The workspace goes back to the allocator while the side stream may still use it: what the caller's stream does
    with it comes later."""
    tensors = several(8000)
    expected = run(tensors, **OPTIONS)
    for _ in range(5):
        found = run(tensors, **OPTIONS)
        garbage = torch.full((1 << 28,), 0xFF, dtype=torch.uint8, device=DEVICE)
        del garbage
        same_bits(found, expected)


def test_the_workspace_has_no_second_chunk():
    """Two lanes share the room of one: the tree apart, 384 MiB at most."""
    for T, top_k in ((16384, 64), (65536, 64), (65536, 512), (131072, 512)):
        q, k = (torch.empty(1, T, H, 128, dtype=BF16, device="meta") for H in (32, 8))
        q, k = (torch.empty_like(x, device=DEVICE) for x in (q, k))
        params = htree_cuda.checks.tree.forward(
            q, k, k, q_start=None, compression_rate=16, top_k_per_layer=top_k, max_top_nodes=None, scale=None,
            rope_base=10000.0, strict_causal=True, backend="auto",
        )  # fmt: skip
        packed = 8 * T * (2 * 128 + 4) * 2  # of the bottom, half as much for all layers above and tables
        assert kernels.forward_workspace(q, k, k, params) < (384 << 20) + 2 * packed


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    tensors = several()
    expected = [x.cpu() for x in run(tensors, **OPTIONS)]
    for _ in range(2):
        found = run([x.to("cuda:1") for x in tensors], **OPTIONS)
        assert torch.cuda.current_device() == 0
        same_bits([x.cpu() for x in found], expected)
        same_bits([x.cpu() for x in run(tensors, **OPTIONS)], expected)
