"""The topk_indices kernel against a stable sort: the selection has no tolerance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import htree_cuda
from htree_cuda import UnsupportedError, kernels
from htree_cuda.params import IndexerParams

from ..unit.test_indexer import hostile_rows

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
INF, NAN = math.inf, math.nan
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
TILE, BUFFERED = 8192, 4096  # csrc/sm90/topk_indices/config.cuh


def ints(x, like):
    return torch.as_tensor(x, dtype=torch.int32).expand(like.shape[:-1]).contiguous().to(like.device)


def stable_sort(logits, topk, first=None, end=None):
    """The selection by numpy's stable sort, [s_q, topk]; bounds [s_q]."""
    logits = logits.cpu().numpy().astype(np.float64)
    out = np.full((*logits.shape[:-1], topk), -1, dtype=np.int32)
    for s, row in enumerate(logits):
        low = 0 if first is None else max(int(first[s]), 0)
        high = len(row) if end is None else min(int(end[s]), len(row))
        rows = np.arange(low, max(low, high), dtype=np.int64)
        rows = rows[row[rows] != -INF]
        key = np.where(np.isnan(row[rows]), 1e300, np.clip(row[rows], -1e299, 1e299) + 0.0)
        best = np.sort(rows[np.argsort(-key, kind="stable")][:topk])
        out[s, : len(best)] = best
    return torch.from_numpy(out)


def poisoned(logits, topk, **window):
    """The kernel into outputs that hold garbage, past the op: what is not written shows."""
    batched = logits.dim() == 3
    batch = [x if x is None or batched else x[None] for x in (logits, window.get("k_start"), window.get("k_end"))]
    starts = window.get("q_start")
    starts = [starts] * batch[0].shape[0] if isinstance(starts, int) else starts
    indices = torch.full((*batch[0].shape[:2], 1, topk), 123456789, dtype=torch.int32, device=logits.device)
    values = torch.full((*indices.shape[:2], topk), NAN, device=logits.device)
    kernels.topk_indices(*batch, indices, values, params=IndexerParams(True, starts, window.get("k_stride", 1)))
    return (indices, values) if batched else (indices[0], values[0])


def check(logits, topk, **window):
    """Kernel, op and torch backend agree; returns the list [.., topk]."""
    indices, values = htree_cuda.topk_indices(logits, topk, return_values=True, **window)
    raw = poisoned(logits, topk, **window)
    assert torch.equal(indices, raw[0]) and torch.equal(values.view(torch.int32), raw[1].view(torch.int32))
    expected, expected_values = htree_cuda.topk_indices(logits, topk, return_values=True, backend="torch", **window)
    assert torch.equal(indices, expected)
    assert torch.equal(values.view(torch.int32), expected_values.view(torch.int32))
    return indices[..., 0, :]


@pytest.mark.emulated
@pytest.mark.parametrize("topk", [299, 301, pytest.param(7, marks=pytest.mark.sample)])
def test_hostile_rows(topk):
    names, logits = hostile_rows()
    out = check(logits.to(DEVICE), topk).cpu()
    wrong = [name for name, a, b in zip(names, out, stable_sort(logits, topk), strict=True) if not torch.equal(a, b)]
    assert wrong == []


@pytest.mark.emulated
@pytest.mark.parametrize("topk", [5000, 4097])
def test_more_slots_than_the_buffer_takes(topk):
    """The kernel that reads a row again for each histogram."""
    names, logits = hostile_rows(n=9001)
    keep = [0, 2, 4, 9, 11]
    out = check(logits[keep].to(DEVICE), topk).cpu()
    assert torch.equal(out, stable_sort(logits[keep], topk)), [names[i] for i in keep]


@pytest.mark.emulated
def test_rows_that_cut_the_buffer():
    """Rising rows pass every limit; the buffer is cut whenever a tile would not fit."""
    n = 3 * TILE + 77
    g = torch.Generator().manual_seed(0)
    random = torch.randn(n, generator=g)
    rows = [torch.arange(n).float(), random, torch.zeros(n), torch.where(torch.arange(n) < 2 * TILE, NAN, random)]
    logits = torch.stack(rows)
    assert torch.equal(check(logits.to(DEVICE), 100).cpu(), stable_sort(logits, 100))


# Rows of at least this many logits are divided among CTAs where SMs would be idle otherwise.
DIVIDED = 4 * TILE


@pytest.mark.emulated(sms=24)
@pytest.mark.parametrize("topk", [2048, pytest.param(9, marks=pytest.mark.sample)])
def test_rows_divided_among_ctas(topk):
    names, logits = hostile_rows(n=DIVIDED + 813)
    keep = [names.index(name) for name in ("rising", "nan", "random")]
    out = check(logits[keep].to(DEVICE), topk).cpu()
    assert torch.equal(out, stable_sort(logits[keep], topk))


@pytest.mark.emulated(sms=8)
@pytest.mark.parametrize("row, topk", [("equal", 2048), ("few values", 9), ("rising", 2048), ("last wins", 1)])
def test_divided_rows_that_buffers_have_no_room_for(row, topk):
    """The first CTA cuts its buffer while it gathers; each CTA cuts one that holds too much for that; the last logit is
    part of the row."""
    g = torch.Generator().manual_seed(6)
    logits = {
        "equal": torch.ones(1, DIVIDED + 813),
        "few values": torch.randint(0, 3, (1, 40000), generator=g).float(),
        "rising": torch.arange(90000.0)[None],
        "last wins": torch.zeros(1, DIVIDED + 1).index_fill(1, torch.tensor([DIVIDED]), 1.0),
    }[row]
    assert torch.equal(check(logits.to(DEVICE), topk).cpu(), stable_sort(logits, topk))


@pytest.mark.emulated(sms=8)
def test_windows_of_a_divided_row():
    """Windows that end in the first CTA's part, begin in the last one's, or hold nothing."""
    logits = torch.randn(1, DIVIDED + 5, generator=torch.Generator().manual_seed(5))
    for first, end in ((3, 700), (DIVIDED - 900, DIVIDED + 2), (1, DIVIDED + 4), (50, 50)):
        start, stop = (torch.tensor([x], dtype=torch.int32) for x in (first, end))
        rows = torch.arange(logits.shape[1])
        row = logits.masked_fill((rows < first) | (rows >= end), NAN)
        window = {"k_start": start.to(DEVICE), "k_end": stop.to(DEVICE)}
        assert torch.equal(check(row.to(DEVICE), 300, **window).cpu(), stable_sort(row, 300, start, stop))


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 66, 67])
@pytest.mark.parametrize("n", [DIVIDED - 1, DIVIDED, 300001, 2**21 + 3])
def test_every_number_of_ctas_of_a_row(rows, n):
    logits = torch.randint(0, 999, (rows, n), generator=torch.Generator().manual_seed(rows)).float().to(DEVICE)
    for topk in (1, 2048, BUFFERED):
        check(logits, topk)


@pytest.mark.parametrize("n", [1, 4095, 4096, 4097, TILE - 1, TILE, TILE + 1, 12288, 12289, 40001, 131072])
@pytest.mark.parametrize("topk", [1, 64, 2048, BUFFERED, BUFFERED + 1])
def test_every_length(n, topk):
    names, logits = hostile_rows(n)
    assert torch.equal(check(logits.to(DEVICE), topk).cpu(), stable_sort(logits, topk)), names


@pytest.mark.emulated
def test_windows_at_odd_offsets_with_nan_outside():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(20, 1003, generator=g)
    start, end = (torch.randint(-50, 1100, (20,), generator=g, dtype=torch.int32) for _ in range(2))
    start[:15] = torch.minimum(start, end)[:15] - 300
    rows = torch.arange(1003)
    outside = (rows < start[:, None]) | (rows >= end[:, None])
    logits = logits.masked_fill(outside, NAN)
    window = {"k_start": start.to(DEVICE), "k_end": end.to(DEVICE)}
    out = check(logits.to(DEVICE), 64, **window).cpu()
    assert torch.equal(out, stable_sort(logits, 64, start, end))
    for low, high in ((INT_MIN, INT_MAX), (INT_MAX, INT_MIN), (7, 7)):
        window = {"k_start": ints(low, logits).to(DEVICE), "k_end": ints(high, logits).to(DEVICE)}
        check(logits.to(DEVICE), 64, **window)


@pytest.mark.emulated
def test_causal_batches_of_any_strides():
    g = torch.Generator().manual_seed(2)
    wide = torch.randn(3, 5, 2, 700, generator=g).to(DEVICE)
    logits = wide[:, :, 1, 3:650]  # rows at any offset, strides of a view
    bound = torch.randint(0, 700, (5, 3), generator=g, dtype=torch.int32).to(DEVICE).T
    for window in ({"q_start": 300}, {"q_start": [0, 640, 2000], "k_stride": 4}, {"k_end": bound}, {}):
        got = check(logits, 33, **window)
        assert torch.equal(got, htree_cuda.topk_indices(logits.contiguous(), 33, **window)[..., 0, :])
    one = torch.zeros(1, dtype=torch.int32, device=logits.device).expand(3, 5)
    check(logits, 33, k_start=one)


@pytest.mark.emulated
def test_empty_shapes_and_refusals():
    assert htree_cuda.topk_indices(torch.zeros(0, 5, device=DEVICE), 3).shape == (0, 1, 3)
    indices, values = htree_cuda.topk_indices(torch.zeros(4, 0, device=DEVICE), 3, return_values=True)
    assert (indices == -1).all() and (values == -INF).all()
    if DEVICE == "cuda":
        with pytest.raises(UnsupportedError, match=r"the kernel takes float32, logits is torch\.float64"):
            htree_cuda.topk_indices(torch.zeros(4, 5, device=DEVICE, dtype=torch.float64), 3)


@pytest.mark.hardware
def test_sums_past_2_31():
    """Offsets of rows and of lists past 2^31 elements."""
    n, s_q = 2**20, 2100
    logits = torch.zeros(s_q, n, device=DEVICE)
    logits[:, ::3] = 1.0
    logits[-1, 5] = 2.0
    assert s_q * n > 2**31
    out = htree_cuda.topk_indices(logits, 2048)[:, 0]
    expected = torch.arange(2048, device=DEVICE, dtype=torch.int32) * 3
    assert (out[:-1] == expected).all()
    assert torch.equal(out[-1].sort().values, torch.cat((expected[:2047], expected.new_tensor([5]))).sort().values)


@pytest.mark.hardware
def test_a_thousand_repeats_are_bitwise_equal():
    for topk, n in ((2048, 40000), (5000, 20000)):
        logits = torch.randint(0, 9, (64, n), device=DEVICE).float()
        first = htree_cuda.topk_indices(logits, topk)
        for _ in range(1000):
            assert torch.equal(htree_cuda.topk_indices(logits, topk), first)


@pytest.mark.hardware
@pytest.mark.parametrize("rows, n", [(50, 20000), (5, 70000)])
def test_streams_graphs_and_compile(rows, n):
    logits = torch.randn(rows, n, device=DEVICE)
    expected = htree_cuda.topk_indices(logits, 512)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.equal(htree_cuda.topk_indices(logits, 512), expected)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = htree_cuda.topk_indices(logits, 512)
    logits.mul_(-1)
    graph.replay()
    assert torch.equal(out, htree_cuda.topk_indices(logits, 512)) and not torch.equal(out, expected)


@pytest.mark.parametrize("topk", [40, 3000])
def test_sanitizer_of_divided_rows(topk):
    names, logits = hostile_rows(n=DIVIDED + 813)
    indices, _ = (x.cpu() for x in poisoned(logits[:6].to(DEVICE), topk))
    assert torch.equal(indices[:, 0], stable_sort(logits[:6], topk)), names[:6]


@pytest.mark.parametrize("topk", [40, 4500])
def test_sanitizer(topk):
    """Inputs come from the host and results are judged there: compute-sanitizer watches the project's kernels alone."""
    names, logits = hostile_rows(n=9001)
    indices, values = (x.cpu() for x in poisoned(logits[:6].to(DEVICE), topk))
    assert torch.equal(indices[:, 0], stable_sort(logits[:6], topk)), names[:6]
    _, expected = htree_cuda.topk_indices(logits[:6], topk, return_values=True, backend="torch")
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
