"""Ranks that disagree about a call raise, all of them: what each was given, gathered in one small collective.

In the first call of a group, and in every call with HTREE_CUDA_CHECK=1 in the environment.
"""

from __future__ import annotations

import hashlib
import json
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks.common import checks_values
from .exchange import all_gather

_BYTES = 4096
_agreed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def is_due(group: dist.ProcessGroup) -> bool:
    return group not in _agreed or checks_values()


def _encode(text: str) -> bytes:
    data = text.encode()
    if len(data) > _BYTES:  # what is cut off still counts
        data = data[: _BYTES - 64] + hashlib.sha256(data).hexdigest().encode()
    return data.ljust(_BYTES, b"\0")


def _device(x: object, group: dist.ProcessGroup) -> torch.device:
    """Follows from the group, not from a rank's tensor: a rank whose tensors lie elsewhere takes part too."""
    if "nccl" not in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return x.device if isinstance(x, Tensor) and x.is_cuda else torch.device("cuda", torch.cuda.current_device())


def _named(value: object) -> object:
    """As JSON keeps it."""
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def digest(x: Tensor) -> str:
    """Of shape and content."""
    return f"{tuple(x.shape)} {hashlib.sha256(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]}"


def check(op: str, group: dist.ProcessGroup, x: object, facts: dict, error: Exception | None) -> None:
    """Raises ValueError on every rank where the facts of the ranks differ, or where a rank found an error of its own,
    which is raised there. x: a tensor of the call, if all is well. Waits for the device."""
    device = _device(x, group)
    text = json.dumps(
        {"error": f"{type(error).__name__}: {error}"} if error else {name: _named(x) for name, x in facts.items()}
    )
    mine = torch.frombuffer(bytearray(_encode(text)), dtype=torch.uint8).to(device)
    found = all_gather(mine, group, dist.get_world_size(group))
    if error is not None:
        raise error
    rows = [bytes(row).rstrip(b"\0") for row in found.cpu().numpy()]
    if all(row == rows[0] for row in rows):
        _agreed.add(group)
        return
    rule = "all ranks of the group must make the same call"
    try:
        theirs = [json.loads(row) for row in rows]
    except ValueError:  # one was cut off
        raise ValueError(f"{op}: {rule}, got calls that differ") from None
    for rank, row in enumerate(theirs):
        if "error" in row:
            raise ValueError(f"{op}: {rule}, rank {rank} refused its own: {row['error']}")
    for name, first in theirs[0].items():
        for rank, row in enumerate(theirs):
            if row.get(name) != first:
                raise ValueError(f"{op}: {rule}, got {name} {first} on rank 0 and {row.get(name)} on rank {rank}")
    raise ValueError(f"{op}: {rule}, got calls that differ")
