"""The options of the rotation as the forward and backward kernels take them: a table of angles over the halves of K.

The kernels rotate element m against element m + K / 2. Other pairs (rope_dim, rope_interleaved) are brought there by a
copy of q and k, and gradients back; the values, and every sum over K, do not know of it. Elements that are not rotated
are pairs whose angle is 0.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .params import TreeParams


def _partial(params: TreeParams, K: int) -> bool:
    return params.rope_dim not in (None, K)


def to_halves(x: Tensor, params: TreeParams) -> Tensor:
    """[..., K] with the first elements of all pairs before the second ones: a copy, or `x` where it is so already."""
    K, R = x.shape[-1], params.rope_dim
    if params.rope_interleaved:
        return torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    if _partial(params, K):
        rotated, rest = x[..., :R].chunk(2, -1), x[..., R:].chunk(2, -1)
        return torch.cat((rotated[0], rest[0], rotated[1], rest[1]), -1)
    return x


def from_halves(x: Tensor, params: TreeParams) -> Tensor:
    """The inverse of what `arranged` does to q and k, for their gradients."""
    K, R = x.shape[-1], params.rope_dim
    if params.rope_interleaved:
        return torch.stack(x.chunk(2, -1), -1).flatten(-2)
    if _partial(params, K):
        first, second = (half.split((R // 2, (K - R) // 2), -1) for half in x.chunk(2, -1))
        return torch.cat((first[0], second[0], first[1], second[1]), -1)
    return x


def _angles(params: TreeParams, K: int, device: torch.device) -> Tensor | None:
    """[K/2] float64, zeros behind the pairs that are rotated; None where rope_base says it all."""
    if params.rope_inv_freq is None and params.rope_base is not None and not _partial(params, K):
        return None
    angles = torch.zeros(K // 2, dtype=torch.float64, device=device)
    R = K if params.rope_dim is None else params.rope_dim
    if params.rope_inv_freq is not None:
        angles[: R // 2] = params.rope_inv_freq
    elif params.rope_base is not None:
        angles[: R // 2] = params.rope_base ** (-2.0 * torch.arange(R // 2, dtype=torch.float64, device=device) / R)
    return angles


def arranged(q: Tensor, k: Tensor, params: TreeParams) -> tuple[Tensor, Tensor, TreeParams]:
    """q, k and params for a kernel; q and k are copies where pairs are not the halves of K. The table lives as long as
    the params do."""
    sink = None if params.attn_sink is None else params.attn_sink.contiguous()
    table = _angles(params, q.shape[-1], q.device)
    own = dataclasses.replace(
        params, rope_base=params.rope_base if table is None else None, rope_inv_freq=table, rope_dim=q.shape[-1],
        rope_interleaved=False, attn_sink=sink,
    )  # fmt: skip
    return to_halves(q, params), to_halves(k, params), own


def check_arranged(params: TreeParams, K: int) -> None:
    """What a kernel would read wrongly is a mistake of the op that calls it without `arranged`."""
    table, sink = params.rope_inv_freq, params.attn_sink
    if (
        params.rope_interleaved
        or _partial(params, K)
        or (table is None and params.rope_base is None)
        or (table is not None and (table.dtype != torch.float64 or table.shape != (K // 2,) or table.stride() != (1,)))
        or (sink is not None and (sink.dtype != torch.float32 or not sink.is_contiguous()))
    ):
        raise RuntimeError("a kernel was called with options of the rotation that pairs.arranged has not seen")
