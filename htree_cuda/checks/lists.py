"""Rules of attn_dist, sparse_attention and the indexer's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from ..params import ListParams
from .common import (
    MAX_INT32,
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


def _batched(op: str, name: str, x: Tensor, dims: tuple[str, ...]) -> bool:
    """Whether x has a leading batch dimension; it decides for every other tensor of the call."""
    if x.dim() not in (len(dims), len(dims) + 1):
        plain = ", ".join(dims)
        fail(op, f"{name} must have the dimensions [{plain}] or [B, {plain}]", f"shape {tuple(x.shape)}")
    return x.dim() == len(dims) + 1


def _batch_sizes(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        equal(op, f"dimension 0 of {name}", x.shape[0], f"B of {first}", reference.shape[0])


def _index_list(
    op: str, first: str, reference: Tensor, s_q: int, batched: bool, indices: Tensor, topk_length: Tensor | None
) -> None:
    """Rules of indices and topk_length for the s_q queries of `reference`, the tensor named `first`."""
    tensors = {"indices": indices} if topk_length is None else {"indices": indices, "topk_length": topk_length}
    batch = ("B",) if batched else ()
    strided(op, **tensors)
    dimensions(op, "indices", indices, (*batch, "s_q", "h_kv", "topk"))
    if topk_length is not None:
        dimensions(op, "topk_length", topk_length, (*batch, "s_q"))
    for name, x in tensors.items():
        if x.dtype != torch.int32:
            fail(op, f"{name} must be int32", x.dtype)
    if batched:
        _batch_sizes(op, first, reference, **tensors)
    one_kv_head(op, "indices", indices.shape[-2])
    equal(op, "s_q of indices", indices.shape[-3], f"s_q of {first}", s_q)
    if topk_length is not None:
        equal(op, "s_q of topk_length", topk_length.shape[-1], f"s_q of {first}", s_q)


def _slot_numbers(
    op: str, s_q: int, s_kv: int, B: int | None, q_start: Sequence[int] | None, k_stride: int
) -> list[int] | None:
    """Rules of the numbers that decide which slots are valid; B is None without a batch. Returns the starts, one for
    every batch element or B of them."""
    size(op, "s_kv", s_kv, 0, MAX_INT32)
    size(op, "s_q", s_q, 0, MAX_INT32)
    size(op, "k_stride", k_stride)
    if q_start is None:
        return None
    if len(q_start) != 1 and (B is None or len(q_start) != B):
        rule = "q_start must be one int" if B is None else f"q_start must be one int or a list of B ({B}) ints"
        fail(op, rule, f"{len(q_start)} of them")
    for start in q_start:
        if not 0 <= start <= MAX_INT32 - s_q:
            fail(op, f"q_start must lie in 0 .. 2^31 - 1 - s_q ({MAX_INT32 - s_q})", start)
    return list(q_start)


def _accumulated(op: str, name: str, x: Tensor, q: Tensor) -> None:
    wanted = accumulation_dtype(q.dtype)
    if x.dtype != wanted:
        fail(op, f"{name} must be {str(wanted).removeprefix('torch.')} where q is {q.dtype}", x.dtype)


def _sparse(
    op: str,
    q: Tensor,
    k_name: str,
    k: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    others: dict[str, Tensor | None],
    *,
    sm_scale: float | None,
    q_start: Sequence[int] | None,
    k_stride: int,
    lse_base: float,
    backend: str,
) -> ListParams:
    """What attn_dist and sparse_attention demand alike; `k_name` is what the call names its keys, `others` are the
    call's other tensors, which have to be on the same device."""
    backend_name(op, backend)
    strided(op, **{"q": q, k_name: k})
    batched = _batched(op, "q", q, ("s_q", "h_q", "d_qk"))
    dimensions(op, k_name, k, (*(("B",) if batched else ()), "s_kv", "h_kv", "d_qk"))
    float_dtype(op, "q", q)
    same_dtype(op, "q", q, **{k_name: k})
    same_device(op, "q", q, **{k_name: k}, indices=indices, topk_length=topk_length, **others)
    if batched:
        _batch_sizes(op, "q", q, **{k_name: k})
    s_q, h_q, d_qk = q.shape[-3:]
    size(op, "h_q", h_q)
    size(op, "d_qk", d_qk)
    one_kv_head(op, k_name, k.shape[-2])
    equal(op, f"d_qk of {k_name}", k.shape[-1], "d_qk of q", d_qk)
    _index_list(op, "q", q, s_q, batched, indices, topk_length)
    starts = _slot_numbers(op, s_q, k.shape[-3], q.shape[0] if batched else None, q_start, k_stride)
    if sm_scale is None:
        sm_scale = float(d_qk) ** -0.5
    else:
        scale_number(op, "sm_scale", sm_scale, q.dtype)
    if lse_base not in (2.0, math.e):
        fail(op, "lse_base must be 2 or math.e", lse_base)
    return ListParams(batched, sm_scale, starts, k_stride, lse_base)


def attn_dist(
    q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, topk_length: Tensor | None, **options: Any
) -> ListParams:
    """Rules of ``htree_cuda::attn_dist``; options as `_sparse` names them."""
    op = "attn_dist"
    params = _sparse(op, q, "k", k, indices, topk_length, {"lse": lse}, **options)
    strided(op, lse=lse)
    dimensions(op, "lse", lse, (*(("B",) if params.batched else ()), "s_q", "h_q"))
    _accumulated(op, "lse", lse, q)
    if params.batched:
        _batch_sizes(op, "q", q, lse=lse)
    equal(op, "s_q of lse", lse.shape[-2], "s_q of q", q.shape[-3])
    equal(op, "h_q of lse", lse.shape[-1], "h_q of q", q.shape[-2])
    return params


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    *,
    d_v: int,
    op: str = "sparse_attention",
    **options: Any,
) -> ListParams:
    """Rules of ``htree_cuda::sparse_attention`` (and its backward); options as `_sparse` names them."""
    params = _sparse(op, q, "kv", kv, indices, topk_length, {"attn_sink": attn_sink}, **options)
    if not 1 <= d_v <= q.shape[-1]:
        fail(op, f"d_v must lie in 1 .. d_qk ({q.shape[-1]})", d_v)
    if attn_sink is not None:
        strided(op, attn_sink=attn_sink)
        dimensions(op, "attn_sink", attn_sink, ("h_q",))
        _accumulated(op, "attn_sink", attn_sink, q)
        equal(op, "h_q of attn_sink", attn_sink.shape[0], "h_q of q", q.shape[-2])
    return params


def sparse_attention_backward(dout: Tensor, dlse: Tensor, q: Tensor, out: Tensor, lse: Tensor, *, d_v: int) -> None:
    """Rules of ``htree_cuda::sparse_attention_backward`` beyond the forward's."""
    rows = tuple(q.shape[:-1])
    acc = accumulation_dtype(q.dtype)
    returned(
        "sparse_attention_backward", q,
        dout=(dout, (*rows, d_v), q.dtype), out=(out, (*rows, d_v), q.dtype),
        dlse=(dlse, rows, acc), lse=(lse, rows, acc),
    )  # fmt: skip


def normalize_attn_dist(attn_dist: Tensor) -> None:
    """Rules of `htree_cuda.normalize_attn_dist` beyond the Python types."""
    op = "normalize_attn_dist"
    strided(op, attn_dist=attn_dist)
    _batched(op, "attn_dist", attn_dist, ("G", "s_q", "topk"))
    _distribution_dtype(op, attn_dist)


def _distribution_dtype(op: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        fail(op, "attn_dist must be float32 or float64", x.dtype)


def indexer_loss(
    logits: Tensor,
    attn_dist: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    *,
    s_kv: int,
    q_start: Sequence[int] | None,
    k_stride: int,
    reduction: str,
) -> list[int] | None:
    """Rules of `htree_cuda.indexer_loss`; returns the starts, one for each batch element."""
    op = "indexer_loss"
    strided(op, logits=logits, attn_dist=attn_dist)
    batched = _batched(op, "logits", logits, ("s_q", "topk"))
    float_dtype(op, "logits", logits)
    _distribution_dtype(op, attn_dist)
    same_device(op, "logits", logits, attn_dist=attn_dist, indices=indices, topk_length=topk_length)
    shape = tuple(logits.shape)
    summed = attn_dist.dim() == logits.dim()
    if tuple(attn_dist.shape if summed else (*attn_dist.shape[:-3], *attn_dist.shape[-2:])) != shape:
        with_groups = f"({''.join(f'{n}, ' for n in shape[:-2])}G, {shape[-2]}, {shape[-1]})"
        fail(op, f"attn_dist must have the shape {shape} of logits, or {with_groups}", tuple(attn_dist.shape))
    _index_list(op, "logits", logits, shape[-2], batched, indices, topk_length)
    equal(op, "topk of indices", indices.shape[-1], "topk of logits", shape[-1])
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        fail(op, f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}", repr(reduction))
    return _slot_numbers(op, shape[-2], s_kv, shape[0] if batched else None, q_start, k_stride)
