"""Helpers of the forward alone, emulated: selection of rows that a layer would hardly write, unions of any lists."""

from __future__ import annotations

import ctypes
import math
import os

import pytest
import torch

from tools.ptx_emulator import build, device, why_not

from ..conftest import emulated_kernels

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "available")

BLOCK = 12  # queries
TINY = 2.0**-149
THOROUGH = os.environ.get("HTREE_CUDA_THOROUGH") == "1"


@pytest.fixture(scope="module")
def launch():
    """launch(name, seed, *arguments) runs a launcher of tests/kernels/steps.cu, tensors as pointers."""
    build(emulated_kernels())
    library = device.library()

    def run(name, seed, *arguments):
        library.emulator_configure(seed, 3, True)
        library.emulator_forget_allocations()
        values = []
        for x in arguments:
            if isinstance(x, torch.Tensor):
                library.emulator_allow(x.data_ptr(), x.numel() * x.element_size())
                values.append(ctypes.c_void_p(x.data_ptr()))
            else:
                values.append(x)
        function = getattr(library, f"emulator_{name}")
        function.restype = ctypes.c_char_p
        error = function(*values)
        assert error == b"", error.decode()

    return run


@pytest.fixture(scope="module")
def select(launch):
    """Runs the kernel on twelve rows; returns nodes, closed bits and selection."""

    def run(importance, top_k, q_start, layer=1, layers=2, parents=None, seed=0):
        width = importance.shape[1]
        if parents is None:
            parents = torch.full((BLOCK, top_k), -7, dtype=torch.int32)
        nodes = torch.full((BLOCK, top_k), -99, dtype=torch.int32)
        selection = nodes.clone()
        closed = torch.zeros(BLOCK, width // 16, dtype=torch.int16)
        place = ctypes.c_longlong(BLOCK), ctypes.c_longlong(q_start), layer, layers, top_k
        launch("select", seed, *place, importance, ctypes.c_longlong(width), parents, nodes, closed, selection)
        return nodes, closed, selection

    return run


def expected(row, n, top_k):
    """Positions that are selected: a stable sort, NaN as infinity, the rightmost last."""
    row = torch.where(row.isnan(), math.inf, row)[: n - 1]
    best = row.sort(descending=True, stable=True).indices[: top_k - 1]
    return torch.cat([best.sort().values, torch.tensor([n - 1])])


def check(select, rows, n, top_k, width, **place):
    """Candidates as in an entry layer, or below parents; what lies beyond the candidates is NaN."""
    assert len(rows) <= BLOCK
    importance = torch.full((BLOCK, width), math.nan)
    for i in range(BLOCK):
        importance[i, : n - 1] = rows[i % len(rows)]
    parents = place.get("parents")
    nodes, closed, selection = select(importance, top_k, **place)
    for i in range(BLOCK):
        positions = expected(importance[i], n, top_k)
        chosen = positions if parents is None else parents[i][positions // 16].long() * 16 + positions % 16
        assert torch.equal(nodes[i].long(), chosen), (i, n, top_k)
        bits = torch.ones(-(-n // 16) * 16, dtype=torch.long)
        bits[:n] = 0
        bits[positions] = 1
        words = (bits.view(-1, 16) << torch.arange(16)).sum(1)
        assert torch.equal(closed[i, : words.numel()].long() & 0xFFFF, words), (i, n, top_k)
    assert torch.equal(selection, nodes)


def first(select, rows, n, top_k, width=None, seed=0):
    """Of an entry layer: the queries at 16 (n - 1) .. 16 (n - 1) + 11 have n candidates in layer 1."""
    check(select, rows, n, top_k, width or 16 * top_k, q_start=16 * (n - 1), seed=seed)


def hostile(n, top_k, seed=0):
    """Rows of n - 1 importances."""
    g = torch.Generator().manual_seed(seed)
    n, k = n - 1, top_k - 1

    def normal():
        return torch.randn(n, generator=g)

    def shuffled(x):
        return x[torch.randperm(n, generator=g)]

    one_huge = torch.rand(n, generator=g) * 1e-3
    one_huge[n // 3] = 3e38
    straddle = torch.rand(n, generator=g) * 0.5  # k equal ones around the threshold, a few above, all else below
    straddle[torch.randperm(n, generator=g)[: min(n, k + 3)]] = 0.75
    straddle[torch.randperm(n, generator=g)[:3]] = 0.8
    nans = normal().exp()
    nans[torch.rand(n, generator=g) < 0.02] = math.nan
    nans[torch.rand(n, generator=g) < 0.02] = math.inf
    more_nans = torch.full((n,), math.nan)
    more_nans[torch.rand(n, generator=g) < 0.5] = math.inf
    more_nans[torch.rand(n, generator=g) < 0.5] = -math.nan
    more_nans[torch.rand(n, generator=g) < 0.2] = 1.0
    cluster = torch.rand(n, generator=g) * 1e-6
    begin = n // 2 - n // 4
    cluster[begin : begin + 2 * k] += torch.rand(cluster[begin : begin + 2 * k].shape, generator=g)
    zeros = torch.zeros(n)
    zeros[torch.randperm(n, generator=g)[: k // 2]] = TINY  # fewer than wanted: zeros fill up, lowest first
    return [
        (1 + 0.06 * normal()).abs(),
        torch.full((n,), 0.125),
        torch.randint(0, 3, (n,), generator=g).float(),
        (8 * normal()).exp2() * torch.randint(1, 2**20, (n,), generator=g),
        torch.full((n,), math.nan),
        one_huge,
        torch.randint(0, 50, (n,), generator=g).float() * TINY,
        straddle,
        nans if seed % 2 else more_nans,
        cluster if seed % 2 else torch.linspace(0, 3e38, n),
        shuffled(torch.arange(n) + 2.0**23) if seed % 2 else torch.arange(n).flip(0) * 2.0**-140,
        zeros,
    ]


@pytest.mark.parametrize("n", [513, 514, 767, 1025, 4096, 4097, 8191, 8192])
def test_rows_of_the_default_top_k(select, n):
    first(select, hostile(n, 512, seed=n), n, 512, seed=n)


@pytest.mark.parametrize("top_k", [64, 512])
@pytest.mark.parametrize("n", [513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097])
def test_calls_of_short_rows(select, n, top_k):
    """How many threads have a row follows from the longest one of the call."""
    n = min(n, 16 * top_k)
    first(select, hostile(n, top_k, seed=n), n, top_k, width=-(-n // 32) * 32, seed=n)


@pytest.mark.parametrize("top_k", [16, 32, 64, 128, 256])
def test_other_top_k(select, top_k):
    for n in (top_k + 1, top_k + 2, 5 * top_k + 3, 16 * top_k - 15, 16 * top_k):
        first(select, hostile(n, top_k, seed=n + 1), n, top_k, seed=n)


def test_every_n_of_the_smallest_top_k(select):
    for n in range(17, 257):
        rows = hostile(n, 16, seed=n)
        first(select, rows if n % 16 == 0 else rows[n % 12 :][:1], n, 16, width=-(-n // 16) * 16)


def test_everything_is_selected(select):
    for n in (1, 2, 15, 16):
        nodes, _, selection = select(torch.full((BLOCK, 256), math.nan), 16, q_start=16 * (n - 1), layer=1, layers=2)
        assert torch.equal(nodes[:, :n].long(), torch.arange(n).expand(BLOCK, n)) and (nodes[:, n:] == -1).all()
        assert torch.equal(selection, nodes)


@pytest.mark.parametrize("digit", [0, 7, 15])
@pytest.mark.parametrize("top_k", [16, 512])
def test_below_selected_parents(select, top_k, digit):
    """In the middle one of three layers candidates are the children of the nodes that were selected above."""
    g = torch.Generator().manual_seed(digit)
    t = 256 * (3 * top_k) + 16 * digit
    n = 16 * (top_k - 1) + digit + 1
    parents = torch.stack([torch.randperm(3 * top_k, generator=g)[:top_k].sort().values for _ in range(BLOCK)])
    place = {"q_start": t, "layer": 1, "layers": 3, "parents": parents.int()}
    check(select, hostile(n, top_k, seed=digit), n, top_k, 16 * top_k, **place)


@pytest.mark.parametrize("seed", range(6))
def test_random_lengths(select, seed):
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(513, 8193, (), generator=g))
    first(select, hostile(n, 512, seed=seed), n, 512, seed=seed)


@pytest.mark.parametrize(
    ("top_k", "T_q", "reach", "blocks"),
    [
        (512, 12, 513, 1),  # all alike, but for one
        (512, 12, 8192, 1),
        (512, 12, 65536, 1),
        (64, 5, 2**26, 1),  # a window for nearly every node
        (512, 1, 8192, 1),
        (16, 12, 40, 1),
        (16, 7, 2**26, 1),
        (512, 24, 8192, 2),
        (64, 17, 65536, 2),
        (16, 5, 40, 2),
        (512, 48, 8192, 4),
        (64, 43, 2**20, 4),
        (16, 5, 2**26, 4),
        (16, 30, 65536, 4),
        (512, 2, 513, 4),
    ],
)
def test_unions(launch, top_k, T_q, reach, blocks):
    """Ascending lists of different queries, whose nodes lie within `reach`, wherever the first of them is; of a group
    of blocks, which may not all be there."""
    g = torch.Generator().manual_seed(reach + T_q)

    def nodes():
        few = torch.arange(reach) if reach <= 65536 else torch.randint(0, reach, (2 * top_k,), generator=g).unique()
        return few[torch.randperm(few.numel(), generator=g)[:top_k]].sort().values.int()

    dtype = {1: torch.int16, 2: torch.int32, 4: torch.int64}[blocks]
    room = -(-T_q // BLOCK) * BLOCK
    offsets = (0, 12345, 2**27 - reach)
    if reach > 65536 and not THOROUGH:  # a window for nearly every node takes seconds
        offsets = offsets[1:2]
    for seed, offset in enumerate(offsets):
        lists = torch.stack([nodes() for _ in range(room)]) + offset
        union = torch.full((room * top_k,), -1, dtype=torch.int32)
        masks = torch.zeros(room * top_k, dtype=dtype)
        count = torch.zeros(1, dtype=torch.int32)
        q_start = 2**31 - 64  # deep enough that every query has top_k parents in the bottom layer
        place = ctypes.c_longlong(T_q), ctypes.c_longlong(q_start), 0, 6 if top_k == 512 else 7, top_k
        launch("build_union", seed, *place, blocks, lists, union, masks, count)
        expected, where = lists[:T_q].flatten().unique(return_inverse=True)
        bits = torch.zeros(expected.numel(), dtype=torch.int64)
        bits.scatter_add_(0, where, (1 << torch.arange(T_q)).repeat_interleave(top_k))
        n = int(count)
        assert torch.equal(union[:n], expected) and torch.equal(masks[:n], bits.to(dtype))
