"""RoPE in PyTorch operations: tables of angles, and the rotation by them."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    n: int, R: int, rope_base: float | None, dtype: torch.dtype, device: torch.device, inv_freq: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos, sin of p * base^(-2m/R), or of p * inv_freq[m]: [n, R/2]; [n, 0] where there is neither.

    Angles are float64: a float32 angle at p = 8191 is off by 5e-4."""
    if inv_freq is None:
        m = torch.arange(R // 2 if rope_base is not None else 0, dtype=torch.float64, device=device)
        inv_freq = (1.0 if rope_base is None else rope_base) ** (-2.0 * m / R)
    angle = torch.arange(n, dtype=torch.float64, device=device)[:, None] * inv_freq.to(torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second elements of the pairs in the first R elements of x [..., K]."""
    return (x[..., 0:R:2], x[..., 1:R:2]) if interleaved else (x[..., : R // 2], x[..., R // 2 : R])


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1, out: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    """RoPE of x [..., K] by tables that broadcast against [..., R/2]; sign -1 is the inverse. Pairs are the halves of
    the first R elements, or neighbours (interleaved); elements behind them stay."""
    R = 2 * cos.shape[-1]
    if out is None:
        shape = torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1]) + x.shape[-1:]
        out = torch.empty(shape, dtype=cos.dtype, device=x.device)
    if R:
        (lo, hi), (out_lo, out_hi) = pairs(x, R, interleaved), pairs(out, R, interleaved)
        torch.mul(lo, cos, out=out_lo)
        out_lo.addcmul_(hi, sin, value=-sign)
        torch.mul(hi, cos, out=out_hi)
        out_hi.addcmul_(lo, sin, value=sign)
    if x.shape[-1] > R:
        out[..., R:] = x[..., R:]
    return out
