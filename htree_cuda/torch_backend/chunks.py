"""How large a chunk of queries may be, and the temporaries that all chunks of one call share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bytes of temporaries one chunk of queries may hold (a single query may exceed it). On a CPU a chunk that fits the
# caches wins; on a GPU large chunks amortise launches, and its memory, not what is free of it, bounds them.
CHUNK_BYTES_CPU = 32 << 20
CHUNK_BYTES_GPU = 8 << 30
SHARE_OF_GPU = 10


def budget(device: torch.device) -> int:
    """Bytes of temporaries that one chunk of queries may hold on this device."""
    if device.type == "cpu":
        return CHUNK_BYTES_CPU
    if device.type != "cuda":
        return CHUNK_BYTES_GPU // 8
    return min(CHUNK_BYTES_GPU, torch.cuda.get_device_properties(device).total_memory // SHARE_OF_GPU)


class Scratch:
    """The large temporaries of a chunk, allocated once a call: malloc would give a chunk's pages back to the system and
    fault them in again for the next, which on a CPU doubles the time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        flat = self.flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self.flat[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return flat[:size].view(shape)
