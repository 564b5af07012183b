"""What surrounds a call of the forward: views, streams, graphs, devices, compilation, sanitizers, errors."""

from __future__ import annotations

import threading

import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError, kernels

from ..bits import same_bits
from .forward_checks import BF16, FP16, inputs, odd_rows, run

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.mark.emulated
def test_strided_views():
    _, (q, k, v) = inputs(1000, 100, B=2, H_kv=2, G=3, K=64, V=64)
    expected = run((q, k, v), top_k_per_layer=16)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    same_bits(run(swapped, top_k_per_layer=16), expected)
    same_bits(run([odd_rows(x) for x in (q, k, v)], top_k_per_layer=16), expected)
    one = k[:, :1].expand(-1, 1000, -1, -1)
    same_bits(run((q, one, v), top_k_per_layer=16), run((q, one.contiguous(), v), top_k_per_layer=16))


def test_every_output_is_written():
    _, (q, k, v) = inputs(3000, 50, B=2, H_kv=2, G=3, K=128, V=128)
    params = htree_cuda.checks.tree.forward(
        q, k, v, q_start=None, compression_rate=16, top_k_per_layer=16, max_top_nodes=None, scale=None,
        rope_base=10000.0, strict_causal=True, backend="auto",
    )  # fmt: skip
    expected = run((q, k, v), top_k_per_layer=16)
    poisoned = [torch.empty_like(x) for x in expected]
    workspace = torch.empty(kernels.forward_workspace(q, k, v, params), dtype=torch.uint8, device=DEVICE)
    for byte in (0xFF, 0x7F, 0):
        for x in (*poisoned, workspace):
            x.view(torch.uint8).fill_(byte)
        kernels.forward(q, k, v, *poisoned, workspace, params)
        same_bits(poisoned, expected)


@pytest.mark.emulated
@pytest.mark.parametrize(
    "rule", ["selection must be 16-byte aligned, got an address 4 bytes past", "the workspace must have"]
)
def test_what_a_launcher_refuses(rule):
    """Nothing is written then. Tensors that `forward` makes are neither, but the launcher has other callers."""
    _, (q, k, v) = inputs(600, 10, G=2, K=64, V=64)
    params = htree_cuda.checks.tree.forward(
        q, k, v, q_start=None, compression_rate=16, top_k_per_layer=16, max_top_nodes=None, scale=None,
        rope_base=10000.0, strict_causal=True, backend="auto",
    )  # fmt: skip
    outputs = [torch.full_like(x, -7) for x in run((q, k, v), top_k_per_layer=16)]
    workspace = torch.empty(kernels.forward_workspace(q, k, v, params), dtype=torch.uint8, device=DEVICE)
    out, lse, selection = outputs
    if rule.startswith("selection"):
        selection = torch.full((selection.numel() + 1,), -7, dtype=selection.dtype, device=DEVICE)[1:]
        assert selection.data_ptr() % 16 == 4
    else:
        workspace = workspace[:-1]
    with pytest.raises(ValueError, match=f"forward: {rule}"):
        kernels.forward(q, k, v, out, lse, selection, workspace, params)
    assert all((x == -7).all() for x in (out, lse, selection))


@pytest.mark.emulated
def test_zero_sizes():
    _, (q, k, v) = inputs(100, 10, G=2, K=64, V=64)
    for tensors in ((q[:, :0], k, v), (q[:0], k[:0], v[:0])):
        out, lse, _ = run(tensors, top_k_per_layer=16)
        assert out.shape == (*tensors[0].shape[:3], 64) and out.numel() == lse.numel() == 0


@pytest.mark.hardware
def test_streams_and_threads():
    _, device = inputs(3000, 500, G=4, K=64, V=64)
    expected = run(device, top_k_per_layer=16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run(device, top_k_per_layer=16)
    stream.synchronize()
    same_bits(result, expected)
    results = {}

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = run(device, top_k_per_layer=16)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for result in results.values():
        same_bits(result, expected)


@pytest.mark.hardware
def test_threads_with_other_budgets():
    """Launches of the same kernels with more and with less shared memory, of unions and of decoding: neither takes from
    the other what it is about to use."""
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, heads, 128, generator=g, device="cuda", dtype=torch.bfloat16)
        for n, heads in ((300, 8), (1 << 18, 2), (1 << 18, 2))
    )

    def calls(top_k):
        cache = htree_cuda.TreeCache(1, k.shape[1], 2, 128, dtype=k.dtype, device="cuda")
        cache.append(k, v)
        return [
            *run((q, k, v), top_k_per_layer=top_k),
            htree_cuda.forward_cached(q[:, -1:], cache, top_k_per_layer=top_k),
        ]

    def work(top_k):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[top_k].append(calls(top_k))
            torch.cuda.current_stream().synchronize()

    expected = {top_k: calls(top_k) for top_k in (64, 512)}
    torch.cuda.synchronize()
    found = {top_k: [] for top_k in expected}
    threads = [threading.Thread(target=work, args=(top_k,)) for top_k in found]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for top_k, results in found.items():
        assert len(results) == 20  # a thread that raises says so and has fewer
        for result in results:
            same_bits(result, expected[top_k])


@pytest.mark.hardware
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    _, first = inputs(3000, 500, G=4, K=64, V=64)
    second = [x.to("cuda:1") for x in first]
    results = []
    for tensors in (first, second):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse, selection = run(leaves, top_k_per_layer=16)
        (out.float().square().sum() + lse.sum()).backward()
        assert torch.cuda.current_device() == 0
        assert {x.device for x in (out, lse, selection, *(x.grad for x in leaves))} == {tensors[0].device}
        results.append([x.detach().cpu() for x in (out, lse, selection, *(x.grad for x in leaves))])
    same_bits(*results)
    with pytest.raises(ValueError, match="device"):
        run((first[0], second[1], second[2]), top_k_per_layer=16)


@pytest.mark.hardware
def test_graph_capture_and_replay():
    _, (q, k, v) = inputs(2000, 200, G=4, K=64, V=64)
    run((q, k, v), top_k_per_layer=16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run((q, k, v), top_k_per_layer=16)
    _, fresh = inputs(2000, 200, G=4, K=64, V=64, seed=5)
    for x, y in zip((q, k, v), fresh):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(result, run(fresh, top_k_per_layer=16))


@pytest.mark.hardware
def test_compile():
    _, device = inputs(1000, 100, G=4, K=64, V=64)
    compiled = torch.compile(lambda q, k, v: run((q, k, v), top_k_per_layer=16), fullgraph=True, backend="aot_eager")
    same_bits(compiled(*device), run(device, top_k_per_layer=16))


@pytest.mark.parametrize("strict_causal", [True, False])
@pytest.mark.parametrize(("T", "T_q", "K", "V", "dtype"), [(40, 40, 64, 64, BF16), (300, 14, 128, 128, FP16)])
def test_sanitizer_small_shapes(T, T_q, K, V, dtype, strict_causal):
    """One layer and two, a last block that is not full; every row of the outputs is read."""
    _, device = inputs(T, T_q, B=2, H_kv=2, G=3, K=K, V=V, dtype=dtype)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=16, strict_causal=strict_causal))
    assert out.isfinite().all() and lse.isfinite().all() and (selection >= -1).all()


@pytest.mark.emulated
def test_sanitizer_three_layers():
    _, device = inputs(4200, 3, G=2, K=64, V=64)
    out, lse, selection = (x.cpu() for x in run(device, top_k_per_layer=16))
    assert out.isfinite().all() and lse.isfinite().all() and selection.shape[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16, q is torch.float32"),
        ({"K": 32}, "K .* 64 or 128, got 32"),
        ({"V": 96}, "V .* 64 or 128, got 96"),
        ({"G": 17}, "at most 16 query heads .* got 17"),
        ({"top_k_per_layer": 8}, "top_k_per_layer in 16 .. 512, got 8"),
        ({"top_k_per_layer": 1024}, "top_k_per_layer in 16 .. 512, got 1024"),
        ({"compression_rate": 8}, "compression_rate 16, got 8"),
        ({"max_top_nodes": 100}, "max_top_nodes = .*256.*, got 100"),
    ],
)
def test_what_is_not_supported_says_so(change, message):
    shape = {"G": 2, "K": 64, "V": 64} | {n: x for n, x in change.items() if n in ("G", "K", "V", "dtype")}
    _, device = inputs(20, 2, **shape)
    options = {"top_k_per_layer": 16} | {n: x for n, x in change.items() if n not in shape}
    with pytest.raises(UnsupportedError, match=rf'(?s)forward: .*{message}.*backend="torch"'):
        htree_cuda.forward(*device, **options)


def test_wrong_comes_before_unsupported():
    _, (q, k, v) = inputs(20, 2, G=2, K=64, V=64)
    with pytest.raises(ValueError, match="q_start must lie in 0"):
        htree_cuda.forward(q, k.transpose(1, 3).contiguous().transpose(1, 3), v, q_start=-1)
    with pytest.raises(UnsupportedError, match="last dimension of k contiguous"):
        htree_cuda.forward(q, k.transpose(1, 3).contiguous().transpose(1, 3), v)
