"""Python types, and the pieces that every op's rules are made of."""

from __future__ import annotations

import math
import numbers
import operator
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..autocast import brings_together
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


def checks_values() -> bool:
    """HTREE_CUDA_CHECK of the environment: whether every call reads lengths and indices on the host and checks them."""
    value = os.environ.get("HTREE_CUDA_CHECK", "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"HTREE_CUDA_CHECK in the environment must be 0 or 1, got {value!r}")
    return value == "1"


# ------------------------------------------------------------------------------------------------ Python-level types


@torch.compiler.assume_constant_result
def _traces_transform() -> bool:
    """Whether torch.compile traces the inside of a torch.func transform. A traced tensor does not tell, its level does,
    which dynamo enters while it traces."""
    return torch._C._functorch.maybe_current_level() is not None


def tensor(op: str, name: str, value: Any) -> None:
    """A plain tensor: neither nested nor inside a torch.func transform, and without a forward-mode tangent."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise ValueError(f"{op}: {name} must be a dense (strided) tensor, got a nested one")
    if torch.compiler.is_compiling():
        transformed, tangent = _traces_transform(), torch.autograd.forward_ad._current_level >= 0
    else:
        functorch = torch._C._functorch
        transformed = functorch.is_batchedtensor(value) or functorch.is_gradtrackingtensor(value)
        tangent = not transformed and torch.autograd.forward_ad.unpack_dual(value).tangent is not None
    if transformed:
        raise RuntimeError(
            f"{op}: {name} is inside a torch.func transform (vmap, grad, jvp), which is not supported: "
            "the batch dimension takes the place of vmap, torch.autograd gives gradients"
        )
    if tangent:
        raise RuntimeError(f"{op}: {name} carries a forward-mode tangent; only reverse-mode gradients are supported")


def integer(op: str, name: str, value: Any, *, optional: bool = False) -> Any:
    """Returns the value as the ops take it: an int (NumPy's become one), a SymInt, or None where that is allowed."""
    if (optional and value is None) or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        # A tensor has an index too, but reading it would wait for its device.
        if isinstance(value, (bool, Tensor)) or not isinstance(value, SupportsIndex):
            raise TypeError(f"{op}: {name} must be an int{' or None' if optional else ''}, got {value!r}")
        try:
            value = operator.index(value)
        except TypeError:  # NumPy's booleans and arrays have the method, and refuse.
            raise TypeError(f"{op}: {name} must be an int{' or None' if optional else ''}, got {value!r}") from None
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        fail(op, f"{name} must fit in 64 bits", value)
    return value


def number(op: str, name: str, value: Any, *, optional: bool = False) -> Any:
    """Returns the value as the ops take it: an int or a float (NumPy's become one), or what `integer` lets through."""
    if (optional and value is None) or isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{op}: {name} must be a number{' or None' if optional else ''}, got {value!r}")
        try:
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        except OverflowError:
            fail(op, f"{name} must be finite in float64", type(value).__name__)
    if isinstance(value, int) and abs(value) > MAX_FLOAT64:
        fail(op, f"{name} must be finite in float64", f"an int of {value.bit_length()} bits")
    return value


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


def float_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        fail(op, f"{name} must be float16, bfloat16, float32 or float64", x.dtype)


def _agree(op: str, what: str, values: dict[str, Any]) -> None:
    """Raises where the values differ, and names the one that differs from most; of two, the second."""
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return
    common, count = Counter(values.values()).most_common(1)[0]
    like = [name for name, value in values.items() if value == common]
    odd = next(name for name in values if name not in like)
    others = f"{', '.join(like[:-1])} and {like[-1]}" if count > 1 else like[0]
    fail(op, f"{odd} must {what} {others} ({common})", values[odd])


def same_dtype(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    """`reference` is the tensor named `first`; the message blames the odd one of all, which it may be."""
    if any(x.dtype != reference.dtype for x in others.values()):
        _agree(op, "have the dtype of", {first: reference.dtype, **{name: x.dtype for name, x in others.items()}})


def dtype_of_parameters(op: str, name: str, x: Tensor, weight: Tensor, *others: Tensor) -> None:
    """x has the dtype of a module's parameters or of `others`, or autocast makes one dtype of all."""
    allowed = (weight, *others)
    if x.dtype in [t.dtype for t in allowed] or brings_together(x.dtype, weight.dtype, device_type=x.device.type):
        return
    rule = f"{name} must have the dtype of the parameters ({weight.dtype})"
    fail(op, f"{rule}, or autocast be enabled and neither be float64", x.dtype)


def same_device(op: str, first: str, reference: Tensor, **others: Tensor | None) -> None:
    """As `same_dtype`; None stands for a tensor that was not given."""
    given = {name: x.device for name, x in others.items() if x is not None}
    if any(device != reference.device for device in given.values()):
        _agree(op, "be on the device of", {first: reference.device, **given})


def size(op: str, what: str, value: int, least: int = 1, most: int | None = None) -> None:
    if value < least:
        fail(op, f"{what} must be at least {least}", value)
    if most is not None and value > most:
        fail(op, f"{what} must be at most {most}", value)


def equal(op: str, what: str, value: int, rule: str, expected: int) -> None:
    if value != expected:
        fail(op, f"{what} must equal {rule} ({expected})", value)


def one_kv_head(op: str, name: str, h_kv: int) -> None:
    if h_kv != 1:
        fail(op, f"{name} must have one KV head (dimension -2 must be 1: multi-query attention)", h_kv)


def power_of_two(op: str, name: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        fail(op, f"{name} must be a power of two, at least {least}", value)
    if value > MAX_POWER:
        fail(op, f"{name} must be at most 2^30", value)


def scale_number(op: str, name: str, value: float, dtype: torch.dtype) -> None:
    """Finite, and neither infinite nor lost in the accumulation dtype. By comparisons, which torch.compile traces."""
    if not -math.inf < value < math.inf:
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
    for name, (x, _, _) in tensors.items():
        same_device(op, "q", q, **{name: x})
