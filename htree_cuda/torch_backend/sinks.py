"""Attention sinks: exp(sink) joins the denominator of out, and neither lse nor the importance. In PyTorch operations on
what a call returns without them, for both backends; lse is [..., H], sink [H]."""

from __future__ import annotations

import torch
from torch import Tensor

# A sink further than this above lse counts as one that is so far: the weights are below 1e-26 either way, and what
# `folded` makes of dlse stays finite in float32.
FAR = 60.0
ELEMENTS = 1 << 24  # of out that `gradient` reads at once


def share(lse: Tensor, sink: Tensor) -> Tensor:
    """[..., H]: what is left to the keys, exp(lse) / (exp(lse) + exp(sink))."""
    return torch.sigmoid(lse - sink)


def folded(lse: Tensor, dlse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The lse and dlse with which a backward that knows no sinks gives the gradients of q, k, v with them.

    Its weights exp(s - lse) become those of out by the log of the denominator in place of lse; dlse, which they
    multiply too and which belongs to the weights without the sink, takes the quotient of the two."""
    sink = torch.minimum(sink, lse + FAR)
    return torch.logaddexp(lse, sink), dlse * (1.0 + torch.exp(sink - _finite(lse)))


def _finite(lse: Tensor) -> Tensor:
    """lse whose rows without a key are not -inf, so that a sink of -inf leaves a number there."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """[H]: minus the sum over all queries of <dout, out> times the share of the sink. dout, out [..., T, H, V]."""
    total = torch.zeros_like(sink)
    dims = tuple(range(lse.dim() - 1))
    step = max(1, ELEMENTS * max(1, out.shape[-3]) // max(1, out.numel()))
    for first in range(0, out.shape[-3], step):
        part = slice(first, first + step)
        delta = (dout[..., part, :, :].to(sink.dtype) * out[..., part, :, :].to(sink.dtype)).sum(-1)
        total -= (delta * torch.sigmoid(sink - _finite(lse[..., part, :]))).sum(dims)
    return total
