"""Rules of the options of the rotation and of attention sinks: one set for forward, its backward, `HTreeAttention` and
`forward_cached`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from .common import boolean, dimensions, equal, fail, integer, number, same_device, strided, tensor

DEFAULT_BASE = 10000.0


def option_types(
    op: str,
    *,
    rope_base: Any,
    rope_inv_freq: Any,
    rope_dim: Any,
    rope_interleaved: Any,
    attn_sink: Any,
    softcap: Any,
) -> dict[str, Any]:
    """Python types of the options; returns the numbers as the ops take them. An op gets no rope_base beside a table."""
    rope_base = number(op, "rope_base", rope_base, optional=True)
    rope_dim = integer(op, "rope_dim", rope_dim, optional=True)
    boolean(op, "rope_interleaved", rope_interleaved)
    for name, x in (("rope_inv_freq", rope_inv_freq), ("attn_sink", attn_sink)):
        if x is not None:
            tensor(op, name, x)
    if number(op, "softcap", softcap, optional=True) not in (None, 0):
        fail(op, "softcap must be 0: scores are compared and summed as they are, without a soft-cap", softcap)
    if rope_inv_freq is not None:
        if rope_base != DEFAULT_BASE:
            fail(op, "rope_inv_freq takes the place of rope_base, which must be left alone", rope_base)
        rope_base = None
    return {
        "rope_base": rope_base,
        "rope_dim": rope_dim,
        "rope_interleaved": rope_interleaved,
    }


def rotation(
    op: str, head_dim: int, device: torch.device | None, rope_base: float | None, rope_inv_freq: Tensor | None,
    rope_dim: int | None,
) -> int:  # fmt: skip
    """Rules of the options of the rotation; returns rope_dim with its default resolved. Without a device the table may
    lie on any."""
    R = head_dim if rope_dim is None else rope_dim
    if R % 2 or not 0 < R <= head_dim:
        fail(op, f"rope_dim must be even, 2 .. K ({head_dim})", rope_dim)
    if rope_inv_freq is not None:
        strided(op, rope_inv_freq=rope_inv_freq)
        dimensions(op, "rope_inv_freq", rope_inv_freq, ("R/2",))
        if rope_inv_freq.dtype not in (torch.float32, torch.float64):
            fail(op, "rope_inv_freq must be float32 or float64", rope_inv_freq.dtype)
        equal(op, "dimension 0 of rope_inv_freq", rope_inv_freq.shape[0], "rope_dim / 2", R // 2)
        if rope_inv_freq.requires_grad:
            fail(op, "rope_inv_freq must not require a gradient: there is none", "requires_grad=True")
        if device is not None and rope_inv_freq.device != device:
            fail(op, f"rope_inv_freq must be on the device of q ({device})", rope_inv_freq.device)
        if rope_base is not None:
            fail(op, "rope_base must be None where rope_inv_freq is given", rope_base)
    return R


def finite(op: str, rope_inv_freq: Tensor | None) -> None:
    """What no fake tensor can tell. A GPU's table is not read: that would wait for it, and NaN gives NaN."""
    if rope_inv_freq is not None and rope_inv_freq.device.type == "cpu" and not bool(rope_inv_freq.isfinite().all()):
        fail(op, "rope_inv_freq must be finite", rope_inv_freq.tolist())


def sink(op: str, q: Tensor, attn_sink: Tensor | None) -> None:
    """Rules of attn_sink [H] beside q [..., H, K]."""
    if attn_sink is None:
        return
    strided(op, attn_sink=attn_sink)
    dimensions(op, "attn_sink", attn_sink, ("H",))
    equal(op, "dimension 0 of attn_sink", attn_sink.shape[0], "H of q", q.shape[-2])
    wanted = accumulation_dtype(q.dtype)
    if attn_sink.dtype != wanted:
        fail(op, f"attn_sink must be {str(wanted).removeprefix('torch.')} where q is {q.dtype}", attn_sink.dtype)
    same_device(op, "q", q, attn_sink=attn_sink)
