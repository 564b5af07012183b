"""More than 8 queries over a cache: the ragged forward by device lengths is the forward of each sequence."""

from __future__ import annotations

import pytest
import torch

import htree_cuda
from htree_cuda import ops_cache
from htree_cuda.params import CachedParams
from tests.unit.calls import qkv


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("seqused", [None, [12, 3, 0, 9]])
@pytest.mark.parametrize("page_size", [None, 256])
def test_prefill_by_lengths(monkeypatch, at_once, seqused, page_size):
    """Both ways on the PyTorch backend, since the glue is what differs; one sequence overflowed, one is too short.
    Pages are out of order, and rows that no sequence has written hold NaN."""
    T = 60 if page_size is None else 560
    q, k, v = qkv(T=T, T_q=12, B=4)
    cache = htree_cuda.TreeCache(4, T + 4, 2, 8, 6, compression_rate=4, dtype=torch.float64, page_size=page_size)
    if page_size is not None:
        cache._k.fill_(torch.nan), cache._v.fill_(torch.nan)
        for row in (2, 0, 3, 1):
            cache.reserve([T if b == row else 0 for b in range(4)])
    lengths = torch.tensor([T, 5, T - 20, 17], dtype=torch.int32)
    cache.append(k, v, seqused=lengths)
    cache.overflowed[2] = 1
    used = None if seqused is None else torch.tensor(seqused, dtype=torch.int32)
    params = CachedParams(4, 4, 16, 8**-0.5, 100.0, 8, False)
    tensors = cache._tensors()
    monkeypatch.setattr(ops_cache, "_PREFILL_BYTES", at_once * (T + 4) * 2 * (8 + 6) * 8)
    args = (q, used, tensors, cache.layout, params, True, "torch")
    expected, found = ops_cache._prefill(*args), ops_cache._prefill_by_lengths(*args)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12, equal_nan=True)
    assert expected[0].isnan().any() == (seqused is None or seqused[2] > 0) and (expected[2] >= 0).any()
