"""Rules of `DSAttention` and of its rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rotation
from .common import (
    FLOAT_DTYPES,
    MAX_POWER,
    backend_name,
    boolean,
    dimensions,
    dtype_of_parameters,
    equal,
    fail,
    integer,
    number,
    same_device,
    same_dtype,
    scale_number,
    size,
    tensor,
)

OP = "DSAttention"
STAGES = ("sparse", "warmup")


def stage(value: Any) -> str:
    if not isinstance(value, str) or value not in STAGES:
        fail(OP, f"stage must be one of {', '.join(map(repr, STAGES))}", repr(value))
    return value


def module(
    sizes: dict[str, Any],
    *,
    rope_base: Any,
    rope_inv_freq: Any,
    flags: dict[str, Any],
    sm_scale: Any,
    stage: Any,
    backend: Any,
    dtype: torch.dtype,
) -> tuple[dict[str, int], float | None, float]:
    """Rules of the arguments; returns the sizes, rope_base (None where there is a table) and sm_scale."""
    sizes = {name: integer(OP, name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        size(OP, name, value, most=MAX_POWER)
    dims = sizes["qk_rope_head_dim"]
    if dims % 2:
        fail(OP, "qk_rope_head_dim must be even: RoPE rotates pairs", dims)
    if sizes["index_head_dim"] < dims:
        fail(OP, f"index_head_dim must be at least qk_rope_head_dim ({dims})", sizes["index_head_dim"])
    for name, flag in flags.items():
        boolean(OP, name, flag)
    rope_base = frequencies(OP, dims, rope_base, rope_inv_freq)
    if dtype not in FLOAT_DTYPES:
        fail(OP, "dtype must be float16, bfloat16, float32 or float64", dtype)
    sm_scale = number(OP, "sm_scale", sm_scale, optional=True)
    if sm_scale is None:
        sm_scale = float(sizes["qk_nope_head_dim"] + dims) ** -0.5
    else:
        scale_number(OP, "sm_scale", sm_scale, dtype)
    if not isinstance(stage, str) or stage not in STAGES:
        fail(OP, f"stage must be one of {', '.join(map(repr, STAGES))}", repr(stage))
    backend_name(OP, backend)
    return sizes, rope_base, float(sm_scale)


def frequencies(op: str, dims: int, rope_base: Any, rope_inv_freq: Any) -> float | None:
    """Rules of the frequencies of RoPE: a base or a table. Returns the base, None where there is a table."""
    rope_base = number(op, "rope_base", rope_base, optional=True)
    if rope_inv_freq is None:
        if rope_base is None:
            fail(op, "rope_base must be a number where rope_inv_freq is not given", rope_base)
        if not 0 < rope_base < float("inf"):
            fail(op, "rope_base must be finite and positive", rope_base)
        return float(rope_base)
    tensor(op, "rope_inv_freq", rope_inv_freq)
    if rope_base not in (None, rotation.DEFAULT_BASE):
        fail(
            op,
            f"rope_inv_freq takes the place of rope_base, which must be None or {rotation.DEFAULT_BASE:g}",
            rope_base,
        )
    rotation.rotation(op, dims, None, None, rope_inv_freq, dims)
    rotation.finite(op, rope_inv_freq)
    return None


def rope(x: Tensor, positions: Tensor, *, dims: Any, first: Any, interleaved: Any, base: Any, freqs: Any) -> None:
    """Rules of `dsa_module.rope`."""
    op = "rope"
    tensor(op, "x", x)
    tensor(op, "positions", positions)
    dims = integer(op, "dims", dims)
    if dims % 2 or not 0 < dims <= x.shape[-1]:
        fail(op, f"dims must be even, 2 .. {x.shape[-1]} (the last dimension of x)", dims)
    for name, flag in (("first", first), ("interleaved", interleaved)):
        boolean(op, name, flag)
    if (base is None) == (freqs is None):
        fail(op, "either base or freqs must be given", "both" if base is not None else "none")
    equal(op, "the size of positions", positions.shape[-1], "dimension -3 of x", x.shape[-3])


def module_input(x: Tensor, past: Any, return_kv: Any, weight: Tensor, widths: tuple[int, int]) -> None:
    """Rules of what the module is called with; weight: of its first projection; widths: of the two parts of past."""
    tensor(OP, "x", x)
    dimensions(OP, "x", x, ("B", "T_q", "d_model"))
    if x.dtype not in FLOAT_DTYPES:
        fail(OP, "x must be float16, bfloat16, float32 or float64", x.dtype)
    dtype_of_parameters(OP, "x", x, weight)
    equal(OP, "dimension 2 of x", x.shape[2], "d_model", weight.shape[1])
    same_device(OP, "the parameters", weight, x=x)
    boolean(OP, "return_kv", return_kv)
    if past is None:
        return
    if not isinstance(past, (tuple, list)) or len(past) != 2:
        raise TypeError(f"{OP}: past must be a pair (latents, indexer keys) of tensors or None, got {past!r:.60}")
    names = ("latents of past", "indexer keys of past")
    for name, part, width in zip(names, past, widths, strict=True):
        tensor(OP, name, part)
        dimensions(OP, name, part, ("B", "T_past", "width"))
        equal(OP, f"dimension 0 of {name}", part.shape[0], "B of x", x.shape[0])
        equal(OP, f"dimension 2 of {name}", part.shape[2], "the width of the module's", width)
        same_device(OP, "x", x, **{name: part})
    same_dtype(OP, names[0], past[0], **{names[1]: past[1]})
    if past[0].dtype not in FLOAT_DTYPES:
        fail(OP, f"{names[0]} must be float16, bfloat16, float32 or float64", past[0].dtype)
    dtype_of_parameters(OP, names[0], past[0], weight, x)
    equal(OP, f"dimension 1 of {names[1]}", past[1].shape[1], f"T_past of {names[0]}", past[0].shape[1])
