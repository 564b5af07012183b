"""Rules of dense_indexer_loss and of the lse of dense attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from ..params import ListParams
from .common import (
    REDUCTIONS,
    backend_name,
    dimensions,
    equal,
    fail,
    float_dtype,
    one_kv_head,
    returned,
    same_device,
    same_dtype,
    scale_number,
    size,
    strided,
)
from .dsa import _window
from .lists import _accumulated, _batch_sizes, _batched, _slot_numbers

OP = "dense_indexer_loss"


def _queries_and_keys(op: str, names: tuple[str, str], q: Tensor, k: Tensor, dims: tuple[str, str]) -> bool:
    """q [s_q, heads, dim] and k [s_kv, 1, dim] of one dtype; returns whether they have a batch dimension."""
    (q_name, k_name), (heads, dim) = names, dims
    strided(op, **{q_name: q, k_name: k})
    batched = _batched(op, q_name, q, ("s_q", heads, dim))
    dimensions(op, k_name, k, (*(("B",) if batched else ()), "s_kv", "h_kv", dim))
    float_dtype(op, q_name, q)
    same_dtype(op, q_name, q, **{k_name: k})
    if batched:
        _batch_sizes(op, q_name, q, **{k_name: k})
    size(op, heads, q.shape[-2])
    size(op, dim, q.shape[-1])
    one_kv_head(op, k_name, k.shape[-2])
    equal(op, f"{dim} of {k_name}", k.shape[-1], f"{dim} of {q_name}", q.shape[-1])
    return batched


def _of_heads(op: str, name: str, x: Tensor, q_name: str, q: Tensor, heads: str, batch: tuple[str, ...]) -> None:
    """x [s_q, heads] in the accumulation dtype of q."""
    strided(op, **{name: x})
    dimensions(op, name, x, (*batch, "s_q", heads))
    if q_name == "q":
        _accumulated(op, name, x, q)
    elif x.dtype != (wanted := accumulation_dtype(q.dtype)):
        fail(op, f"{name} must be {str(wanted).removeprefix('torch.')} where {q_name} is {q.dtype}", x.dtype)
    if batch:
        _batch_sizes(op, q_name, q, **{name: x})
    equal(op, f"s_q of {name}", x.shape[-2], f"s_q of {q_name}", q.shape[-3])
    equal(op, f"{heads} of {name}", x.shape[-1], f"{heads} of {q_name}", q.shape[-2])


def dense_indexer_loss(
    q_i: Tensor,
    k_i: Tensor,
    weights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    k_start: Tensor | None,
    k_end: Tensor | None,
    *,
    sm_scale: float | None,
    q_start: Sequence[int] | None,
    k_stride: int,
    lse_base: float,
    backend: str,
    op: str = OP,
) -> ListParams:
    """Rules of ``htree_cuda::dense_indexer_loss`` and of its backward."""
    backend_name(op, backend)
    batched = _queries_and_keys(op, ("q_i", "k_i"), q_i, k_i, ("h_i", "d_i"))
    if (q.dim() == 4) != batched:
        fail(op, "either every tensor has a batch dimension or none", f"q_i {tuple(q_i.shape)} and q {tuple(q.shape)}")
    _queries_and_keys(op, ("q", "k"), q, k, ("h_q", "d_qk"))
    batch = ("B",) if batched else ()
    same_device(op, "q_i", q_i, k_i=k_i, weights=weights, q=q, k=k, lse=lse, k_start=k_start, k_end=k_end)
    _of_heads(op, "weights", weights, "q_i", q_i, "h_i", batch)
    _of_heads(op, "lse", lse, "q", q, "h_q", batch)
    if batched:
        _batch_sizes(op, "q_i", q_i, q=q)
    equal(op, "s_q of q", q.shape[-3], "s_q of q_i", q_i.shape[-3])
    equal(op, "s_kv of k", k.shape[-3], "s_kv of k_i", k_i.shape[-3])
    s_q, s_kv = q_i.shape[-3], k_i.shape[-3]
    window = _window(op, "q_i", q_i, s_q, s_kv, batched, k_start, k_end, q_start, k_stride)
    if sm_scale is None:
        sm_scale = float(q.shape[-1]) ** -0.5
    else:
        scale_number(op, "sm_scale", sm_scale, q.dtype)
    if lse_base not in (2.0, math.e):
        fail(op, "lse_base must be 2 or math.e", lse_base)
    return ListParams(batched, sm_scale, window.q_start, k_stride, lse_base)


def reduction(op: str, value: str) -> None:
    if not isinstance(value, str) or value not in REDUCTIONS:
        fail(op, f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}", repr(value))


def dense_indexer_loss_backward(
    dloss: Tensor, total: Tensor, largest: Tensor, log_sum: Tensor, q_i: Tensor, q: Tensor
) -> None:
    """Rules of ``htree_cuda::dense_indexer_loss_backward`` beyond the forward's."""
    rows = tuple(q_i.shape[:-2])
    acc = loss_dtype(q_i, q)
    numbers = {"dloss": dloss, "total": total, "largest": largest, "log_sum": log_sum}
    returned(f"{OP}_backward", q_i, **{name: (x, rows, acc) for name, x in numbers.items()})


def loss_dtype(q_i: Tensor, q: Tensor) -> torch.dtype:
    """Of the loss and of everything that is added: float64 where one of the inputs is."""
    return torch.promote_types(accumulation_dtype(q_i.dtype), accumulation_dtype(q.dtype))


def dense_lse(q: Tensor, k: Tensor, *, sm_scale: float, q_start: Sequence[int], backend: str) -> list[int] | None:
    """Rules of ``htree_cuda::dense_lse``, which has a batch dimension; returns the starts."""
    op = "dense_lse"
    backend_name(op, backend)
    dimensions(op, "q", q, ("B", "s_q", "h_q", "d_qk"))
    _queries_and_keys(op, ("q", "k"), q, k, ("h_q", "d_qk"))
    same_device(op, "q", q, k=k)
    scale_number(op, "sm_scale", sm_scale, q.dtype)
    return _slot_numbers(op, q.shape[1], k.shape[1], q.shape[0], q_start, 1)
