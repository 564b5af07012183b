"""Rules of indexer_logits, topk_indices, indexer_topk, quantize_fp8 and hadamard_transform; and what the kernels do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from ..params import IndexerParams
from . import support
from .common import (
    FLOAT_DTYPES,
    MAX_POWER,
    backend_name,
    dimensions,
    equal,
    fail,
    float_dtype,
    one_kv_head,
    returned,
    same_device,
    same_dtype,
    size,
    strided,
)
from .lists import _batch_sizes, _batched, _index_list, _slot_numbers

FP8 = torch.float8_e4m3fn
SCALE_FORMATS = ("float32", "ue8m0")
MAX_HADAMARD = 32768


def _window(
    op: str,
    first: str,
    reference: Tensor,
    s_q: int,
    s_kv: int,
    batched: bool,
    k_start: Tensor | None,
    k_end: Tensor | None,
    q_start: Sequence[int] | None,
    k_stride: int,
) -> IndexerParams:
    """Rules of what bounds the visible rows of the s_q queries of `reference`, the tensor named `first`."""
    bounds = {name: x for name, x in (("k_start", k_start), ("k_end", k_end)) if x is not None}
    strided(op, **bounds)
    for name, x in bounds.items():
        dimensions(op, name, x, (*(("B",) if batched else ()), "s_q"))
        if x.dtype != torch.int32:
            fail(op, f"{name} must be int32", x.dtype)
        equal(op, f"s_q of {name}", x.shape[-1], f"s_q of {first}", s_q)
    if batched:
        _batch_sizes(op, first, reference, **bounds)
    starts = _slot_numbers(op, s_q, s_kv, reference.shape[0] if batched else None, q_start, k_stride)
    return IndexerParams(batched, starts, k_stride)


def _indexer_inputs(
    op: str, q: Tensor, k: Tensor, weights: Tensor, q_scale: Tensor | None, k_scale: Tensor | None
) -> bool:
    """Rules of queries, keys, weights and scales; returns whether they have a batch dimension."""
    given = {name: x for name, x in (("q_scale", q_scale), ("k_scale", k_scale)) if x is not None}
    strided(op, q=q, k=k, weights=weights, **given)
    batched = _batched(op, "q", q, ("s_q", "h_i", "d_i"))
    batch = ("B",) if batched else ()
    dimensions(op, "k", k, (*batch, "s_kv", "h_kv", "d_i"))
    dimensions(op, "weights", weights, (*batch, "s_q", "h_i"))
    if q.dtype not in (*FLOAT_DTYPES, FP8):
        fail(op, "q must be float16, bfloat16, float32, float64 or float8_e4m3fn", q.dtype)
    same_dtype(op, "q", q, k=k)
    acc = accumulation_dtype(q.dtype)
    if weights.dtype != acc:
        fail(op, f"weights must be {str(acc).removeprefix('torch.')} where q is {q.dtype}", weights.dtype)
    if given and q.dtype != FP8:
        fail(op, f"{next(iter(given))} belongs to float8_e4m3fn tensors; fold other scales into weights", q.dtype)
    for name, x in given.items():
        if x.dtype != torch.float32:
            fail(op, f"{name} must be float32", x.dtype)
    if q_scale is not None:
        dimensions(op, "q_scale", q_scale, (*batch, "s_q", "h_i"))
    if k_scale is not None:
        dimensions(op, "k_scale", k_scale, (*batch, "s_kv", "h_kv"))
    if batched:
        _batch_sizes(op, "q", q, k=k, weights=weights, **given)
    s_q, h_i, d_i = q.shape[-3:]
    size(op, "h_i", h_i)
    size(op, "d_i", d_i)
    one_kv_head(op, "k", k.shape[-2])
    equal(op, "d_i of k", k.shape[-1], "d_i of q", d_i)
    for name, x in (("weights", weights), ("q_scale", q_scale)):
        if x is not None:
            equal(op, f"s_q of {name}", x.shape[-2], "s_q of q", s_q)
            equal(op, f"h_i of {name}", x.shape[-1], "h_i of q", h_i)
    if k_scale is not None:
        equal(op, "s_kv of k_scale", k_scale.shape[-2], "s_kv of k", k.shape[-3])
        one_kv_head(op, "k_scale", k_scale.shape[-1])
    return batched


def indexer_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    indices: Tensor | None,
    topk_length: Tensor | None,
    k_start: Tensor | None,
    k_end: Tensor | None,
    *,
    q_start: Sequence[int] | None,
    k_stride: int,
    backend: str,
    deterministic: bool = False,
    op: str = "indexer_logits",
) -> IndexerParams:
    """Rules of ``htree_cuda::indexer_logits`` (and of its backward)."""
    backend_name(op, backend)
    batched = _indexer_inputs(op, q, k, weights, q_scale, k_scale)
    same_device(
        op, "q", q, k=k, weights=weights, q_scale=q_scale, k_scale=k_scale, indices=indices, topk_length=topk_length,
        k_start=k_start, k_end=k_end,
    )  # fmt: skip
    s_q, s_kv = q.shape[-3], k.shape[-3]
    if indices is not None:
        _index_list(op, "q", q, s_q, batched, indices, topk_length)
    elif topk_length is not None:
        fail(op, "topk_length belongs to indices", "topk_length without indices")
    return _window(op, "q", q, s_q, s_kv, batched, k_start, k_end, q_start, k_stride)


def no_fp8_gradient(op: str, q: Tensor, wanted: dict[str, bool]) -> None:
    """A gradient that is wanted of an FP8 call."""
    if q.dtype == FP8 and any(wanted.values()):
        names = ", ".join(name for name, needed in wanted.items() if needed)
        fail(op, f"float8_e4m3fn calls have no gradient ({names}): train with bfloat16", q.dtype)


def indexer_logits_backward(
    dlogits: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor | None, *rest: Tensor | None, **options: Any
) -> IndexerParams:
    """Rules of ``htree_cuda::indexer_logits_backward``; rest: topk_length, k_start, k_end."""
    op = "indexer_logits_backward"
    params = indexer_logits(q, k, weights, None, None, indices, *rest, op=op, **options)
    no_fp8_gradient(op, q, {"q": True})
    columns = k.shape[-3] if indices is None else indices.shape[-1]
    returned(op, q, dlogits=(dlogits, (*q.shape[:-2], columns), accumulation_dtype(q.dtype)))
    return params


def topk_indices(
    logits: Tensor,
    k_start: Tensor | None,
    k_end: Tensor | None,
    *,
    topk: int,
    q_start: Sequence[int] | None,
    k_stride: int,
    sorted: bool,
    return_values: bool,
    backend: str,
) -> IndexerParams:
    """Rules of ``htree_cuda::topk_indices``."""
    op = "topk_indices"
    backend_name(op, backend)
    strided(op, logits=logits)
    batched = _batched(op, "logits", logits, ("s_q", "n"))
    float_dtype(op, "logits", logits)
    same_device(op, "logits", logits, k_start=k_start, k_end=k_end)
    size(op, "topk", topk, 1, MAX_POWER)
    s_q, n = logits.shape[-2:]
    return _window(op, "logits", logits, s_q, n, batched, k_start, k_end, q_start, k_stride)


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    k_start: Tensor | None,
    k_end: Tensor | None,
    *,
    topk: int,
    sorted: bool,
    **options: Any,
) -> IndexerParams:
    """Rules of ``htree_cuda::indexer_topk``."""
    op = "indexer_topk"
    params = indexer_logits(q, k, weights, q_scale, k_scale, None, None, k_start, k_end, op=op, **options)
    size(op, "topk", topk, 1, MAX_POWER)
    return params


def quantize_fp8(x: Tensor, block_size: int | None, scale_format: str) -> None:
    """Rules of `htree_cuda.quantize_fp8` beyond the Python types."""
    op = "quantize_fp8"
    strided(op, x=x)
    float_dtype(op, "x", x)
    if x.dim() < 1:
        fail(op, "x must have at least 1 dimension", f"shape {tuple(x.shape)}")
    size(op, "D (the last dimension of x)", x.shape[-1])
    if block_size is not None:
        size(op, "block_size", block_size)
    if not isinstance(scale_format, str) or scale_format not in SCALE_FORMATS:
        fail(op, f"scale_format must be one of {', '.join(map(repr, SCALE_FORMATS))}", repr(scale_format))


def hadamard_transform(x: Tensor) -> None:
    """Rules of `htree_cuda.hadamard_transform` beyond the Python types."""
    op = "hadamard_transform"
    strided(op, x=x)
    float_dtype(op, "x", x)
    if x.dim() < 1:
        fail(op, "x must have at least 1 dimension", f"shape {tuple(x.shape)}")
    D = x.shape[-1]
    if D < 1 or D & (D - 1) or D > MAX_HADAMARD:
        fail(op, f"D (the last dimension of x) must be a power of two, 1 .. {MAX_HADAMARD}", D)


# ------------------------------------------------------------------------------------------- what the kernels do

KERNEL_DTYPES = (torch.bfloat16, torch.float16, FP8)
KERNEL_HEAD_DIMS = (64, 128)
KERNEL_MAX_HEADS = 64
KERNEL_MAX_ROW = 2**26  # logits of one query in the workspace of indexer_topk


def topk_indices_kernel(logits: Tensor) -> None:
    """What the topk_indices kernel supports of a valid call (tensors batched)."""
    op = "topk_indices"
    if logits.dtype != torch.float32:
        support._way_out(op, f"the kernel takes float32, logits is {logits.dtype}")
    support._contiguous_rows(op, logits=logits)


def indexer_kernel(op: str, q: Tensor, k: Tensor, indices: Tensor | None = None) -> None:
    """What the kernels of indexer_logits and indexer_topk support of a valid call (tensors batched)."""
    if indices is not None and q.dtype == FP8:
        support._way_out(op, f"the kernel of the listed form takes bfloat16 or float16, q is {q.dtype}")
    if q.dtype not in KERNEL_DTYPES:
        support._way_out(op, f"the kernel takes bfloat16, float16 or float8_e4m3fn, q is {q.dtype}")
    if q.shape[3] not in KERNEL_HEAD_DIMS:
        support._way_out(op, f"the kernel needs d_i to be 64 or 128, got {q.shape[3]}")
    if q.shape[2] > KERNEL_MAX_HEADS:
        support._way_out(op, f"the kernel needs h_i to be at most {KERNEL_MAX_HEADS}, got {q.shape[2]}")
    if op == "indexer_topk" and k.shape[1] > KERNEL_MAX_ROW:
        support._way_out(op, f"the kernel needs s_kv to be at most 2^26, got {k.shape[1]}")
    support._contiguous_rows(op, q=q, k=k)
    for name, x in (("q", q), ("k", k)):
        # TMA faults on anything else.
        if x.numel() and x.data_ptr() % 16:
            support._way_out(
                op, f"the kernel needs {name} to begin at a multiple of 16 bytes, it begins at {x.data_ptr()}"
            )
        for dim in range(3):
            if x.shape[dim] < 2:
                continue
            stride = x.stride(dim) * x.element_size()
            if stride % 16 or (stride == 0 and dim > 0):
                support._way_out(
                    op,
                    f"the kernel needs the strides of {name} to be positive multiples of 16 bytes, "
                    f"that of dimension {dim - 4} is {stride} bytes",
                )


def indexer_backward_kernel(q: Tensor, k: Tensor, indices: Tensor | None, deterministic: bool) -> None:
    """What the backward kernel supports of a valid call (tensors batched): the listed form, adding in any order."""
    op = "indexer_logits_backward"
    if indices is None:
        support._way_out(op, "there is no backward kernel for the dense form")
    if deterministic:
        support._way_out(op, "the backward kernel adds the gradient of k in any order, deterministic is True")
    indexer_kernel(op, q, k, indices)


def indexer_gradients(q: Tensor, k: Tensor, indices: Tensor | None, deterministic: bool) -> None:
    """A CUDA call whose gradients are wanted says before its forward what the backward would refuse."""
    batched = q.dim() == 4
    q, k, indices = (x if x is None or batched else x[None] for x in (q, k, indices))
    indexer_backward_kernel(q, k, indices, deterministic)
