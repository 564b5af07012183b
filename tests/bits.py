"""Equality of bits: 0 is not -0, and a NaN is itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], nan: bool = False) -> None:
    """Of two tensors, or pair by pair of as many: equal shapes, dtypes and bits; with `nan`, any NaN equals any NaN."""
    if not isinstance(found, Tensor):
        for x, y in zip(found, expected, strict=True):
            same_bits(x, y, nan)
        return
    assert found.shape == expected.shape and found.dtype == expected.dtype
    integer = INTEGERS[found.element_size()]
    expected = expected.to(found.device)
    differ = found.contiguous().view(integer) != expected.contiguous().view(integer)
    if nan:
        differ &= ~(found.isnan() & expected.isnan())
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} elements differ in bits"
