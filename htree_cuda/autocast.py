"""What autocast does to the tensors of the public functions."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a type of device; not where it does not exist, as for meta tensors."""
    # torch.compile of older versions cannot trace the question whether autocast exists: not asked where it does.
    exists = device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type)
    return exists and torch.is_autocast_enabled(device_type)


def brings_together(*dtypes: torch.dtype, device_type: str) -> bool:
    """Whether products of tensors of these dtypes have one dtype: theirs, or that of autocast, which float64 stays out
    of."""
    return len(set(dtypes)) == 1 or (autocast_enabled(device_type) and torch.float64 not in dtypes)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, floating tensors (float64 apart) take the autocast dtype, as in PyTorch's own attention."""
    device_type = tensors[0].device.type
    if not autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
