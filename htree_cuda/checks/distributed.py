"""Rules of `htree_cuda.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .common import MAX_INT32, equal, fail, process_group

LAYOUTS = ("contiguous", "zigzag")


def group(op: str, value: Any) -> dist.ProcessGroup:
    """A process group, or that of a DeviceMesh with one dimension."""
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(value, DeviceMesh):
            if value.ndim != 1:
                fail(op, 'group must be a DeviceMesh of one dimension, mesh["name"]', f"{value.ndim} dimensions")
            return value.get_group()
    if value is None:
        raise TypeError(f"{op}: group must be a torch.distributed.ProcessGroup or a DeviceMesh, got None")
    process_group(op, "group", value)
    return value


def layout(op: str, value: Any, name: str = "layout") -> None:
    if not isinstance(value, str) or value not in LAYOUTS:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, LAYOUTS))}, got {value!r}")


def length(op: str, what: str, T: int, ranks: int, name: str) -> None:
    """A sequence of T tokens in equal parts of at least two."""
    parts = 2 * ranks if name == "zigzag" else ranks
    if T % parts:
        fail(op, f"{what} must be a multiple of the {parts} parts that layout {name!r} has on {ranks} ranks", T)
    if 2 * parts > T:
        fail(op, f"{what} must be at least {2 * parts}, two tokens for each of the {parts} parts", T)
    if T > MAX_INT32:
        fail(op, f"{what} must be at most {MAX_INT32}", T)


def dimension(op: str, x: Tensor, dim: int) -> int:
    """`dim` as an index from the front."""
    if not -x.dim() <= dim < x.dim():
        fail(op, f"dim must lie in {-x.dim()} .. {x.dim() - 1}", dim)
    return dim % x.dim()


def tokens(op: str, q: Tensor, k: Tensor, ranks: int, name: str, dim: int) -> None:
    """Beyond the rules of forward: every rank has as many queries as keys, in whole parts."""
    equal(op, f"dimension {dim} of q", q.shape[dim], f"the rank's tokens, dimension {dim} of k", k.shape[dim])
    what = f"{'total' if dim == 0 else 'T'} (dimension {dim} of k, times {ranks} ranks)"
    length(op, what, ranks * k.shape[dim], ranks, name)


def packed_layout(op: str, name: str) -> None:
    """In zigzag the middle of a document would be on one rank and its ends on others, or none."""
    if name != "contiguous":
        fail(op, 'cu_seqlens needs layout "contiguous"', repr(name))


def packed_causality(op: str, strict_causal: bool, ranks: int) -> None:
    """Otherwise a sequence has keys behind a rank's queries, which the kernels take for its last ones."""
    if ranks > 1 and not strict_causal:
        fail(op, f"cu_seqlens needs strict_causal True on {ranks} ranks", strict_causal)


def module_call(**given: Any) -> None:
    """What ``HTreeAttention`` does not do with tokens of several ranks."""
    for name, value in given.items():
        if value is not None:
            fail("HTreeAttention", f"{name} needs a module without context_parallel_group", "both")
