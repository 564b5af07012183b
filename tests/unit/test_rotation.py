"""What rounding adds up to while a query is rotated in place (csrc/sm90/htree_fwd/attend_selected.cuh), by the
arithmetic of csrc/tree/rope.cuh in numpy: how many ranks a query may rotate through before it restarts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
POSITIONS = [4321, 8191]


def half(x):
    return x.astype(np.float16).astype(np.float64)


def rounded(x, dtype):
    return torch.from_numpy(x).to(dtype).double().numpy()


def rotated(x, angles):
    lo, hi = np.split(x, 2, axis=-1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([lo * c - hi * s, hi * c + lo * s], -1)


def multiplied(x, rotation):
    """By the matrices of complex numbers: both products of a sum are exact, and it is rounded once."""
    lo, hi = np.split(x, 2, axis=-1)
    c, s = half(rotation.real), half(rotation.imag)
    return np.concatenate([half(lo * c - hi * s), half(lo * s + hi * c)], -1)


def packed(x, rotation):
    """By two products and two fused ones of packed elements (htree_fwd/attend_selected_swapab.cuh): rounded twice."""
    lo, hi = np.split(x, 2, axis=-1)
    c, s = half(rotation.real), half(rotation.imag)
    return np.concatenate([half(lo * c - half(hi * s)), half(hi * c + half(lo * s))], -1)


def compensation(step, period):
    """What undoes half of what the rounded step adds to the exact one over a period."""
    off = (half(step.real) + 1j * half(step.imag)) / step
    return off ** (-(period - 1) / 2)


def error_ratio(
    dtype, period, K=128, base=10000.0, rows=400, compensated=True, bottom=False, sign=-1, rotate=multiplied
):
    """Root mean square error of scores over a period, in that of a baseline whose rotated q and k are rounded. Keys of
    the bottom are as precise as the dtype, others as fp16. The query rotates by sixteen positions times `sign`: to the
    next rank, or over a parent left out, where keys are rotated by their node."""
    rng = np.random.default_rng(0)
    frequency = base ** (-2.0 * np.arange(K // 2) / K)
    step = np.exp(sign * 16j * frequency)
    compensate = compensation(step, period) if compensated else 1.0
    errors, baseline = [], []
    for position in POSITIONS:
        q, k = (rounded(rng.standard_normal((rows, K)), dtype) for _ in range(2))
        child = rng.integers(0, 16, (rows, 1))
        query = rotate(q, np.exp(1j * position * frequency) * compensate)
        for rank in range(period):
            parent = 2 * rank if sign > 0 else 0  # as many left out as taken
            key = rotated(k, (16 * parent + child) * frequency)
            exact = (rotated(q, (position + sign * 16 * rank) * frequency) * key).sum(1)
            errors.append((query * half(rounded(key, dtype) if bottom else key)).sum(1) - exact)
            rounded_key = rounded(rotated(k, (16 * rank + child) * frequency), dtype)
            baseline.append((rounded(rotated(q, position * frequency), dtype) * rounded_key).sum(1) - exact)
            query = rotate(query, step)
    return float(np.sqrt(np.mean(np.square(errors)) / np.mean(np.square(baseline))))


def constant(path, name):
    return float(re.search(rf"constexpr \w+ {name} = ([\d.]+);", (ROOT / path).read_text())[1])


def period_of(dtype):
    return int(
        constant("csrc/sm90/htree_fwd/dispatch.h", "kRestartPeriodFp16" if dtype == torch.float16 else "kRestartPeriod")
    )


@pytest.mark.parametrize("base", [30.0, 100.0, 8000.0, 10000.0, 5e5])
@pytest.mark.parametrize("K", [64, 128])
def test_rotation_in_place_stays_below_the_rounding_of_operands(K, base):
    assert error_ratio(torch.bfloat16, period_of(torch.bfloat16), K, base) < 0.55
    assert error_ratio(torch.bfloat16, period_of(torch.bfloat16), K, base, bottom=True) < 0.85
    assert error_ratio(torch.float16, period_of(torch.float16), K, base) < 1.3
    assert error_ratio(torch.float16, period_of(torch.float16), K, base, rotate=packed) < 1.35
    assert error_ratio(torch.bfloat16, period_of(torch.bfloat16), K, base, sign=1) < 0.55
    assert error_ratio(torch.bfloat16, period_of(torch.bfloat16), K, base, bottom=True, sign=1) < 0.88
    assert error_ratio(torch.bfloat16, period_of(torch.bfloat16), K, base, bottom=True, rotate=packed) < 0.88


def test_restarts_are_needed():
    assert error_ratio(torch.float16, period_of(torch.bfloat16)) > 2


def test_compensation_is_needed():
    period = period_of(torch.bfloat16)
    assert error_ratio(torch.bfloat16, period, compensated=False) > 1.3 * error_ratio(torch.bfloat16, period)


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float16):
        for period in (1, 2, 4, 8, 16, 32):
            with_, without = (error_ratio(dtype, period, compensated=x) for x in (True, False))
            bottom = error_ratio(dtype, period, bottom=True)
            shared = error_ratio(dtype, period, bottom=True, rotate=packed)
            print(
                f"{dtype}, a restart every {period} ranks: {with_:.2f} of the baseline's error, {bottom:.2f} at the "
                f"bottom, {shared:.2f} where queries share a warp there, {without:.2f} uncompensated"
            )
