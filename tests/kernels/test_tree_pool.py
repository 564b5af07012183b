"""The tree pooling kernel: bit-equal to the torch backend, whatever the shape, the view and the surroundings.

The torch backend runs on the CPU, where it is the truth; on large inputs the arithmetic of the definition is
spelled out on the GPU (`spelled_out`), which a test holds against the torch backend.
"""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

import htree_cuda  # noqa: F401  (registers the ops)
from htree_cuda import kernels
from htree_cuda.definition import layer_sizes

from ..bits import same_bits

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
POISON = -1  # every bit set: NaN in both dtypes


def pool(k, v, r, top, backend="auto"):
    return torch.ops.htree_cuda.tree_pool(k, v, compression_rate=r, max_top_nodes=top, backend=backend)


def on_cpu(k, v, r, top):
    return pool(k.cpu(), v.cpu(), r, top)


def poisoned(x, r, top):
    M = sum(layer_sizes(x.shape[1], r, top)[1:])
    tree = torch.empty(x.shape[0], x.shape[2], M, x.shape[3], dtype=x.dtype, device=x.device)
    tree.view(torch.int16 if x.element_size() == 2 else torch.int32).fill_(POISON)
    return tree


def launch(k, v, r, top):
    """The kernel into poisoned outputs."""
    k_tree, v_tree = poisoned(k, r, top), poisoned(v, r, top)
    kernels.tree_pool(k, v, k_tree, v_tree, compression_rate=r, layers=len(layer_sizes(k.shape[1], r, top)))
    return k_tree, v_tree


def spelled_out(x, r, top):
    """The definition's arithmetic, one child at a time, on any device."""
    below, layers = x.movedim(1, 2), []
    while below.shape[2] > top:
        N = below.shape[2]
        mean = below[:, :, ::r].to(torch.float32, copy=True)
        for c in range(1, r):
            child = below[:, :, c::r]
            mean[:, :, : child.shape[2]] += child.float()
        first = torch.arange(0, N, r, device=x.device)
        # A tensor of counts: torch divides by a Python number through its rounded inverse on the GPU.
        mean /= (N - first).clamp(max=r).float()[:, None]
        below = mean.to(x.dtype)
        layers.append(below)
    return torch.cat(layers, 2) if layers else x.new_empty(x.shape[0], x.shape[2], 0, x.shape[3])


def check(k, v, r, top, nan=False):
    """Kernel = op = torch backend, bit for bit."""
    expected = on_cpu(k, v, r, top)
    for got in (launch(k, v, r, top), pool(k, v, r, top)):
        for tree, reference in zip(got, expected, strict=True):
            same_bits(tree, reference, nan)


def randn(*shape, dtype=BF16, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, device="cuda", generator=generator).to(dtype)


# ---- shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("T", [1, 2, 7, 15, 16, 17, 31, 127, 255, 256, 257, 271, 272, 273, 4093, 4096, 4097, 65537])
def test_lengths_and_layer_boundaries(T, dtype):
    """T = 1, primes, both sides of every tile and layer boundary."""
    for r, top in ((16, 16), (16, 1)):
        check(randn(1, T, 2, 64, dtype=dtype), randn(1, T, 2, 64, dtype=dtype, seed=1), r, top)


@pytest.mark.parametrize("r", [2, 4, 8, 16, 32, 64, 128, 1024, 4096])
def test_compression_rates(r):
    for T, top in (
        (1, 1),
        (r - 1, 1),
        (r, 1),
        (r + 1, 1),
        (r * r + 1 if r <= 64 else 3 * r + 5, 1),
        (20011, 2),
    ):
        check(randn(1, T, 1, 32), randn(1, T, 1, 16, seed=1), r, top)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("K", "V"),
    [
        (1, 1),
        (2, 3),
        (7, 9),
        (8, 8),
        (24, 40),
        (64, 65),
        (65, 64),
        (128, 128),
        (192, 128),
        (256, 33),
        (576, 512),
    ],
)
def test_head_dimensions(K, V, dtype):
    """Odd ones take the element path, multiples of 8 the 16-byte path, one of each both."""
    for B, H_kv in ((1, 1), (2, 3)):
        check(randn(B, 1021, H_kv, K, dtype=dtype), randn(B, 1021, H_kv, V, dtype=dtype, seed=1), 16, 4)


def test_random_configurations():
    rng = random.Random(20)
    for seed in range(150):
        r = 2 ** rng.randint(1, 8)
        B, H_kv = rng.randint(1, 3), rng.randint(1, 9)
        T = int(2 ** rng.uniform(0, 14))
        K, V = (rng.choice([rng.randint(1, 100), 8 * rng.randint(1, 24)]) for _ in range(2))
        dtype = rng.choice([BF16, FP16])
        top = 2 ** rng.randint(0, 8)
        k, v = randn(B, T, H_kv, K, dtype=dtype, seed=seed), randn(B, T, H_kv, V, dtype=dtype, seed=-seed)
        check(k, v, r, top)


def test_float32():
    """The library takes float32 too."""
    k, v = randn(2, 5003, 3, 64, dtype=torch.float32), randn(2, 5003, 3, 33, dtype=torch.float32, seed=1)
    for tree, x in zip(launch(k, v, 16, 4), (k, v), strict=True):
        same_bits(tree, spelled_out(x.cpu(), 16, 4))


def test_spelled_out_is_the_torch_backend():
    k, v = randn(2, 4801, 3, 40), randn(2, 4801, 3, 24, seed=1)
    for reference, x in zip(on_cpu(k, v, 16, 4), (k, v), strict=True):
        same_bits(spelled_out(x, 16, 4), reference)


def test_empty_batch_and_one_layer():
    k_tree, v_tree = pool(randn(0, 300, 2, 64), randn(0, 300, 2, 32), 16, 16)
    assert k_tree.shape == (0, 2, 19 + 2, 64) and v_tree.shape == (0, 2, 19 + 2, 32)
    k_tree, v_tree = pool(randn(1, 300, 2, 64), randn(1, 300, 2, 32), 16, 512)
    assert k_tree.shape == (1, 2, 0, 64) and v_tree.shape == (1, 2, 0, 32)


def test_more_than_2_31_elements():
    """Offsets are 64-bit: 2^31 elements lie before the last tokens of k and of v."""
    T, H_kv, D = 2_100_003, 8, 128
    assert T * H_kv * D > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of free GPU memory, {free / 2**30:.0f} are there")
    k, v = (torch.empty(1, T, H_kv, D, dtype=BF16, device="cuda").normal_() for _ in range(2))
    for tree, x in zip(launch(k, v, 16, 8192), (k, v), strict=True):
        for h in range(H_kv):
            same_bits(tree[:, h : h + 1], spelled_out(x[:, :, h : h + 1], 16, 8192))


# ---- views -------------------------------------------------------------------------------------------------


def views():
    B, T, H, D = 2, 1033, 3, 64
    packed = randn(B, T, H, 3 * D)
    yield "slices of a packed projection", packed[..., D : 2 * D], packed[..., 2 * D :]
    heads_first = randn(2, B, H, T, D)
    yield "heads before tokens", heads_first[0].transpose(1, 2), heads_first[1].transpose(1, 2)
    long = randn(B, 3 * T, H, D)
    yield "every third token, offset", long[:, 1::3], long[:, 2::3]
    flat = randn(B * T * H * D + 8)
    yield "misaligned by one element", flat[1 : 1 + B * T * H * D].view(B, T, H, D), packed[..., :D]
    yield (
        "misaligned by 8 bytes",
        flat[4 : 4 + B * T * H * D].view(B, T, H, D),
        flat[4:-4].view(B, T, H, D),
    )
    odd_rows = randn(B, T, H, D + 1)
    yield "rows of an odd pitch", odd_rows[..., :D], odd_rows[..., 1:]
    yield (
        "one head for all",
        packed[:, :, :1, :D].expand(B, T, H, D),
        packed[:, :, 1:2, :D].expand(B, T, H, D),
    )
    yield "one batch for all", packed[:1, ..., :D].expand(B, T, H, D), packed[1:, ..., :D].expand(B, T, H, D)
    yield (
        "one token for all",
        packed[:, :1, :, :D].expand(B, T, H, D),
        packed[:, 5:6, :, :D].expand(B, T, H, D),
    )
    backwards = heads_first.permute(0, 3, 1, 2, 4)  # [2, T, B, H, D]: tokens slowest
    yield "tokens before batch", backwards[0].transpose(0, 1), backwards[1].transpose(0, 1)


def test_views():
    for name, k, v in views():
        try:
            check(k, v, 16, 4)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# ---- hostile values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_special_values(dtype):
    """NaN, infinities of both signs, signed zeros, subnormals, overflow of the sum's rounding."""
    k = randn(1, 4801, 2, 64, dtype=dtype)
    v = k.clone()
    special = [
        float("nan"),
        float("inf"),
        -float("inf"),
        -0.0,
        torch.finfo(dtype).tiny / 8,
        torch.finfo(dtype).max,
    ]
    positions = torch.randperm(k.numel(), device="cuda")[: k.numel() // 50]
    k.view(-1)[positions] = torch.tensor(special, device="cuda").to(dtype)[positions % len(special)]
    v[:, 1000:1100] = -0.0
    v[:, 2000:2100] = torch.finfo(dtype).max
    v[:, 3000:3100] = torch.finfo(dtype).tiny / 16
    check(k, v, 16, 1, nan=True)


def test_nan_stays_in_its_subtree():
    k = randn(1, 4096, 1, 64)
    clean, _ = launch(k, k, 16, 16)
    bad = k.clone()
    bad[:, 1600] = float("nan")
    dirty, _ = launch(bad, bad, 16, 16)
    touched = torch.zeros(clean.shape[2], dtype=torch.bool, device="cuda")
    touched[1600 // 16] = True
    touched[256 + 1600 // 256] = True
    assert dirty[:, :, touched].isnan().all()
    same_bits(dirty[:, :, ~touched], clean[:, :, ~touched])


def test_layers_do_not_depend_on_the_number_of_layers():
    """A node is the same bits whether its launch pools one layer, two or a whole stack."""
    k = randn(1, 5000, 2, 64)
    deep, _ = launch(k, k, 2, 1)
    for top in (4, 64, 1024):
        shallow, _ = launch(k, k, 2, top)
        same_bits(shallow, deep[:, :, : shallow.shape[2]])


# ---- determinism -------------------------------------------------------------------------------------------


def test_a_thousand_calls_are_bitwise_equal():
    k, v = randn(2, 9973, 4, 128), randn(2, 9973, 4, 64, seed=1)
    expected = launch(k, v, 16, 16)
    for _ in range(1000):
        got = launch(k, v, 16, 16)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- surroundings ------------------------------------------------------------------------------------------


def test_side_stream():
    k, v = randn(1, 70001, 4, 128), randn(1, 70001, 4, 128, seed=1)
    expected = launch(k, v, 16, 16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Work before it on the same stream: had the kernel gone elsewhere, it would read the old values.
        torch.cuda._sleep(20_000_000)
        k2 = k * 2
        got = launch(k2, v, 16, 16)
    torch.cuda.current_stream().wait_stream(stream)
    same_bits(got[0], expected[0] * 2)
    same_bits(got[1], expected[1])


def test_two_streams_at_once():
    inputs = [randn(1, 70001, 4, 128, seed=s) for s in range(2)]
    expected = [launch(x, x, 16, 16) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(launch(inputs[i], inputs[i], 16, 16))
    torch.cuda.synchronize()
    for i, j in itertools.product(range(2), range(20)):
        assert all(torch.equal(a, b) for a, b in zip(got[i][j], expected[i], strict=True))


def test_two_threads_at_once():
    inputs = [randn(1, 30011, 2, 128, seed=s) for s in range(2)]
    expected = [launch(x, x, 16, 16) for x in inputs]
    torch.cuda.synchronize()
    problems = []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    got = launch(inputs[i], inputs[i], 16, 16)
                torch.cuda.current_stream().synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True))
        except BaseException as error:  # a thread's assertion must fail the test
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_graph_capture_and_replay():
    k, v = randn(1, 70001, 2, 128), randn(1, 70001, 2, 96, seed=1)
    r, top = 4, 1  # several launches
    k_tree, v_tree = poisoned(k, r, top), poisoned(v, r, top)
    layers = len(layer_sizes(k.shape[1], r, top))
    launch(k, v, r, top)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.tree_pool(k, v, k_tree, v_tree, compression_rate=r, layers=layers)
    for seed in (2, 3):
        k.copy_(randn(*k.shape, seed=seed))
        v.copy_(randn(*v.shape, seed=-seed))
        graph.replay()
        expected = on_cpu(k, v, r, top)
        same_bits(k_tree, expected[0])
        same_bits(v_tree, expected[1])


def test_no_allocation_and_no_synchronisation():
    k = randn(1, 70001, 2, 128)
    k_tree, v_tree = poisoned(k, 16, 16), poisoned(k, 16, 16)
    layers = len(layer_sizes(k.shape[1], 16, 16))
    kernels.tree_pool(k, k, k_tree, v_tree, compression_rate=16, layers=layers)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    kernels.tree_pool(k, k, k_tree, v_tree, compression_rate=16, layers=layers)
    assert not torch.cuda.current_stream().query(), "the launcher waited for the device"
    assert (torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()) == before
    torch.cuda.synchronize()


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    k = randn(1, 9973, 2, 64)
    expected = launch(k, k, 16, 16)
    assert torch.cuda.current_device() == 0
    other = k.to("cuda:1")
    got = launch(other, other, 16, 16)
    assert got[0].device.index == 1 and torch.cuda.current_device() == 0
    assert torch.empty(1, device="cuda").device.index == 0
    for a, b in zip(got, expected, strict=True):
        same_bits(a.cpu(), b.cpu())


def test_malformed_requests_raise():
    """The library's own last line of defence, below the op's checks."""
    k = randn(1, 100, 1, 16)
    tree = poisoned(k, 16, 16)
    for arguments, words in (
        ({"compression_rate": 3}, "power of two"),
        ({"compression_rate": 0}, "power of two"),
        ({"layers": 0}, "layers must be"),
        ({"layers": 64}, "layers must be"),
    ):
        request = {"compression_rate": 16, "layers": 2} | arguments
        with pytest.raises(ValueError, match=words):
            kernels.tree_pool(k, k, tree, tree.clone(), **request)


# ---- small shapes for compute-sanitizer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("B", "T", "H_kv", "K", "V", "r", "top"),
    [
        (1, 1, 1, 8, 8, 16, 1),
        (2, 523, 3, 64, 40, 16, 1),
        (1, 301, 2, 33, 64, 4, 1),
        (1, 4099, 1, 128, 128, 16, 16),
    ],
)
def test_sanitizer_shapes(B, T, H_kv, K, V, r, top):
    """Inputs come from the host, so that the sanitizer needs to watch the project's kernels alone."""
    k, v = torch.randn(B, T, H_kv, K).to(BF16), torch.randn(B, T, H_kv, V).to(BF16)
    expected = pool(k, v, r, top)
    k, v = k.cuda(), v.cuda()
    layers = layer_sizes(T, r, top)
    trees = [torch.empty(B, H_kv, sum(layers[1:]), x.shape[3], dtype=BF16, device="cuda") for x in (k, v)]
    kernels.tree_pool(k, v, *trees, compression_rate=r, layers=len(layers))
    for tree, reference in zip(trees, expected, strict=True):
        same_bits(tree.cpu(), reference)
