"""Python types, and the pieces that every op's rules are made of."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..definition import accumulation_dtype

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("auto", "torch")
REDUCTIONS = ("mean", "sum", "none")
# What a caller says, and what the op is told.
SAVE_SELECTION = {True: "always", False: "never", "auto": "auto"}
MAX_INT32 = 2**31 - 1
MAX_FLOAT64 = int(sys.float_info.max)
MAX_POWER = 2**30  # of compression_rate and top_k: far beyond use, and no product of sizes overflows


class UnsupportedError(RuntimeError):
    """The call is valid, but the Hopper kernels do not cover it; ``backend="torch"`` does."""


def fail(op: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"{op}: {rule}, got {value}")


# ------------------------------------------------------------------------------------------------ Python-level types


def tensor(op: str, name: str, value: Any) -> None:
    """A plain tensor: neither nested nor inside a torch.func transform, and without a forward-mode tangent."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise ValueError(f"{op}: {name} must be a dense (strided) tensor, got a nested one")
    if torch.compiler.is_compiling():
        return
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(value) or functorch.is_gradtrackingtensor(value):
        raise RuntimeError(
            f"{op}: {name} is inside a torch.func transform (vmap, grad, jvp), which is not supported: "
            "the batch dimension takes the place of vmap, torch.autograd gives gradients"
        )
    if torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        raise RuntimeError(f"{op}: {name} carries a forward-mode tangent; only reverse-mode gradients are supported")


def integer(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int{' or None' if optional else ''}, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        fail(op, f"{name} must fit in 64 bits", value)


def number(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number{' or None' if optional else ''}, got {value!r}")
    if isinstance(value, int) and abs(value) > MAX_FLOAT64:
        fail(op, f"{name} must be finite in float64", f"an int of {value.bit_length()} bits")


def boolean(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def process_group(op: str, name: str, value: Any) -> None:
    if value is None:
        return
    if not torch.distributed.is_available() or not isinstance(value, torch.distributed.ProcessGroup):
        raise TypeError(f"{op}: {name} must be a torch.distributed.ProcessGroup that this rank is in, got {value!r}")


def backend_name(op: str, value: Any) -> None:
    if not isinstance(value, str) or value not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(map(repr, BACKENDS))}, got {value!r}")


def save_selection(op: str, value: Any) -> None:
    # 1 == True: an int is no answer to this question.
    if not isinstance(value, (bool, str)) or value not in SAVE_SELECTION:
        fail(op, f"save_selection must be one of {', '.join(map(repr, SAVE_SELECTION))}", repr(value))


def save_mode(op: str, value: str) -> None:
    if value not in SAVE_SELECTION.values():
        fail(op, f"save_selection must be one of {', '.join(map(repr, SAVE_SELECTION.values()))}", repr(value))


# ----------------------------------------------------------------------------------------------------- shared pieces


def dimensions(op: str, name: str, x: Tensor, dims: Sequence[str]) -> None:
    if x.dim() != len(dims):
        fail(op, f"{name} must have {len(dims)} dimensions [{', '.join(dims)}]", f"shape {tuple(x.shape)}")


def strided(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.layout != torch.strided:
            fail(op, f"{name} must be a dense (strided) tensor", x.layout)


def same_device(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.device != reference.device:
            fail(op, f"{name} must be on the device of {first} ({reference.device})", x.device)


def float_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        fail(op, f"{name} must be float16, bfloat16, float32 or float64", x.dtype)


def same_dtype(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.dtype != reference.dtype:
            fail(op, f"{name} must have the dtype of {first} ({reference.dtype})", x.dtype)


def size(op: str, what: str, value: int, least: int = 1, most: int | None = None) -> None:
    if value < least:
        fail(op, f"{what} must be at least {least}", value)
    if most is not None and value > most:
        fail(op, f"{what} must be at most {most}", value)


def equal(op: str, what: str, value: int, rule: str, expected: int) -> None:
    if value != expected:
        fail(op, f"{what} must equal {rule} ({expected})", value)


def power_of_two(op: str, name: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        fail(op, f"{name} must be a power of two, at least {least}", value)
    if value > MAX_POWER:
        fail(op, f"{name} must be at most 2^30", value)


def scale_number(op: str, name: str, value: float, dtype: torch.dtype) -> None:
    """Finite, and neither infinite nor lost in the accumulation dtype."""
    if not math.isfinite(value):
        fail(op, f"{name} must be finite", value)
    acc = torch.finfo(accumulation_dtype(dtype))
    if abs(value) > acc.max or 0 < abs(value) < acc.tiny:
        fail(op, f"{name} must be 0 or of a magnitude from {acc.tiny:.3g} to {acc.max:.3g} for {dtype}", value)


def returned(op: str, q: Tensor, **tensors: tuple[Tensor, tuple[int, ...], torch.dtype]) -> None:
    """What a forward op returned, or the gradient of it: the shape and dtype that it had, on the device of q."""
    for name, (x, shape, dtype) in tensors.items():
        if tuple(x.shape) != shape:
            fail(op, f"{name} must have the shape {shape}", tuple(x.shape))
        if x.dtype != dtype:
            fail(op, f"{name} must be {dtype}", x.dtype)
    same_device(op, "q", q, **{name: x for name, (x, _, _) in tensors.items()})
