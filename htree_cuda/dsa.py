"""Public functions of DeepSeek Sparse Attention before the attention itself: the lightning indexer, its selector, and
what FP8 inputs need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, ops_dsa  # noqa: F401  (importing ops_dsa registers its ops)
from .api import _autocast, _starts
from .definition import accumulation_dtype

E4M3_MAX = 448.0
MIN_AMAX = 1e-4
E4M3_NAN = 0x7F


def _tensors(op: str, required: dict[str, Tensor], optional: dict[str, Tensor | None]) -> None:
    for name, x in required.items():
        checks.common.tensor(op, name, x)
    for name, x in optional.items():
        if x is not None:
            checks.common.tensor(op, name, x)


def _call_options(op: str, B: int | None, q_start, k_stride, backend, deterministic) -> dict:
    checks.common.backend_name(op, backend)
    if deterministic is not None:
        checks.common.boolean(op, "deterministic", deterministic)
    return {
        "q_start": _starts(op, q_start, B),
        "k_stride": checks.common.integer(op, "k_stride", k_stride),
        "backend": backend,
        "deterministic": torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    }


def _wanted(**tensors: Tensor | None) -> dict[str, bool]:
    """Which tensors a gradient is wanted for."""
    grad = torch.is_grad_enabled()
    return {name: grad and x is not None and x.requires_grad for name, x in tensors.items()}


def indexer_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """Scores of the lightning indexer: the weighted sum over heads of ReLU(q k).

    ``logits[s, j] = k_scale[j] * sum_h (weights[s, h] * q_scale[s, h]) * relu(<q[s, h], k[j]>)``, for all key rows, or
    for those that a list names.

    Args:
        q: [s_q, h_i, d_i] float16, bfloat16, float32, float64 or float8_e4m3fn, rotated already. Either no tensor or
            every tensor has a leading batch dimension B.
        k: [s_kv, 1, d_i], dtype of q (one KV head).
        weights: [s_q, h_i] float32 (float64 where q is), any sign; constant factors such as d_i ** -0.5 are folded in
            by the caller.
        q_scale, k_scale: [s_q, h_i] and [s_kv, 1] float32, any value, only with float8_e4m3fn; default None: 1. The
            scales of `quantize_fp8` with ``block_size=None``.
        indices, topk_length: [s_q, 1, topk] and [s_q] int32: the listed form, which scores only these slots; as in
            `attn_dist`. Default None: the dense form.
        k_start, k_end: [s_q] int32, any value: query s sees rows ``k_start[s] <= j < k_end[s]``; default None.
        q_start, k_stride: the causal rule ``j < (q_start + s + 1) // k_stride``, as in `attn_dist`; default None, 1.
        backend: "auto" or "torch", as in `forward`.
        deterministic: bool; whether the gradient of k of the listed form adds in a fixed order on CUDA; default None:
            ``torch.are_deterministic_algorithms_enabled()``.

    Returns:
        [s_q, s_kv], or [s_q, topk] in the listed form (batched: a leading B), float32 (float64 for float64 inputs).
        Rows outside a query's window and invalid slots hold -inf; a query with an empty window holds nothing else.
        A visible row for which all heads are off holds 0.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`. A gradient that is wanted of float8_e4m3fn inputs is a
            ValueError.

    Notes:
        Gradients: q, k and weights; the ReLU has gradient 0 at 0. Second derivatives raise. Nothing but inputs is kept.
        Everything is bitwise repeatable, the gradient of k of the listed form on CUDA only where ``deterministic``.
        A NaN in a key shows in its column, a NaN in a query in its row; rows that no window holds are never used.
        Autocast: q and k are cast to the autocast dtype, FP8 tensors, weights and scales are not.

    Example:
        >>> q, k, weights = torch.randn(16, 4, 32), torch.randn(256, 1, 32), torch.randn(16, 4)
        >>> logits = htree_cuda.indexer_logits(q, k, weights, q_start=240)  # [16, 256]

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "indexer_logits"
    lists = {"indices": indices, "topk_length": topk_length, "k_start": k_start, "k_end": k_end}
    scales = {"q_scale": q_scale, "k_scale": k_scale}
    _tensors(op, {"q": q, "k": k, "weights": weights}, {**scales, **lists})
    options = _call_options(op, q.shape[0] if q.dim() == 4 else None, q_start, k_stride, backend, deterministic)
    q, k = _autocast_indexer(q, k)
    wanted = _wanted(q=q, k=k, weights=weights, **scales)
    checks.dsa.no_fp8_gradient(op, q, wanted)
    if any(wanted.values()) and q.is_cuda and backend == "auto":
        # What is wrong with the call comes before what is not supported.
        checks.dsa.indexer_logits(q, k, weights, q_scale, k_scale, *lists.values(), **options)
        checks.dsa.indexer_gradients(q, k, indices, options["deterministic"])
    return torch.ops.htree_cuda.indexer_logits(q, k, weights, q_scale, k_scale, *lists.values(), **options)


def _autocast_indexer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x if x.dtype == checks.dsa.FP8 else _autocast(x)[0] for x in (q, k))


def topk_indices(
    logits: Tensor,
    topk: int,
    *,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    sorted: bool = True,
    return_values: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The ``topk`` key rows of the largest logits of each query, exactly and repeatably: what `sparse_attention` takes.

    Larger logits come first, NaN above +inf; of equal logits the smaller row does, -0 equals +0. A row whose logit is
    -inf is never selected.

    Args:
        logits: [s_q, n] float32 (the torch backend takes float16, bfloat16 and float64 too), batched [B, s_q, n].
        topk: int, 1 .. 2^30, slots of the list; may exceed n.
        k_start, k_end, q_start, k_stride: the window, as in `indexer_logits`; default: all rows.
        sorted: bool; True lists the selected rows in ascending order, False in some order that is the same in every
            call; default True.
        return_values: bool; also return the selected logits; default False.
        backend: "auto" or "torch", as in `forward`.

    Returns:
        indices, or (indices, values) with ``return_values``.
        indices: [s_q, 1, topk] int32, batched [B, s_q, 1, topk]: the selected rows, then -1 where the query has fewer
        than topk candidates.
        values: [s_q, topk] in the dtype of logits, slot for slot, -inf where the index is -1.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`.

    Notes:
        Not differentiable: `indexer_logits` at these indices is. Bitwise repeatable; ties never depend on timing.
        No number of equal logits changes the answer. A row of NaN selects the first topk rows of its window.

    Example:
        >>> indices = htree_cuda.topk_indices(torch.randn(16, 256), 32, q_start=240)  # [16, 1, 32]

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "topk_indices"
    _tensors(op, {"logits": logits}, {"k_start": k_start, "k_end": k_end})
    topk = checks.common.integer(op, "topk", topk)
    checks.common.boolean(op, "sorted", sorted)
    checks.common.boolean(op, "return_values", return_values)
    options = _call_options(op, logits.shape[0] if logits.dim() == 3 else None, q_start, k_stride, backend, None)
    del options["deterministic"]
    indices, values = torch.ops.htree_cuda.topk_indices(
        logits.detach(), k_start, k_end, topk=topk, sorted=sorted, return_values=return_values, **options
    )
    return (indices, values) if return_values else indices


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    sorted: bool = True,
    return_logits: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`topk_indices` of `indexer_logits`, without the matrix of all logits.

    Args:
        q, k, weights: as in `indexer_logits`.
        topk: int, 1 .. 2^30, slots of the list, as in `topk_indices`.
        q_scale, k_scale: as in `indexer_logits`; default None.
        k_start, k_end, q_start, k_stride: the window, as in `indexer_logits`; default: all rows.
        sorted: as in `topk_indices`; default True.
        return_logits: bool; also return the logits of the selected rows; default False.
        backend, deterministic: as in `indexer_logits`.

    Returns:
        indices, or (indices, logits) with ``return_logits``.
        indices: [s_q, 1, topk] int32, batched [B, s_q, 1, topk], as `topk_indices` returns them.
        logits: [s_q, topk] float32 (float64 for float64 inputs), slot for slot, -inf where the index is -1.

    Raises:
        TypeError, ValueError, UnsupportedError: as `indexer_logits`; a gradient is wanted only with ``return_logits``.

    Notes:
        Bitwise identical to the two functions on the same backend. Memory: at most 256 MiB beyond inputs and results.
        Gradients: logits is differentiable with respect to q, k and weights, as `indexer_logits` at these indices;
        the selection is a constant.

    Example:
        >>> q, k, weights = torch.randn(16, 4, 32), torch.randn(256, 1, 32), torch.randn(16, 4)
        >>> indices, logits = htree_cuda.indexer_topk(q, k, weights, 32, q_start=240, return_logits=True)

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "indexer_topk"
    tensors = {"q_scale": q_scale, "k_scale": k_scale, "k_start": k_start, "k_end": k_end}
    _tensors(op, {"q": q, "k": k, "weights": weights}, tensors)
    topk = checks.common.integer(op, "topk", topk)
    checks.common.boolean(op, "sorted", sorted)
    checks.common.boolean(op, "return_logits", return_logits)
    options = _call_options(op, q.shape[0] if q.dim() == 4 else None, q_start, k_stride, backend, deterministic)
    q, k = _autocast_indexer(q, k)
    if return_logits:
        wanted = _wanted(q=q, k=k, weights=weights, q_scale=q_scale, k_scale=k_scale)
        checks.dsa.no_fp8_gradient(op, q, wanted)
        if any(wanted.values()) and q.is_cuda and backend == "auto":
            checks.dsa.indexer_topk(q, k, weights, *tensors.values(), topk=topk, sorted=sorted, **options)
            checks.dsa.indexer_gradients(q, k, q.new_empty(*q.shape[:-2], 1, 0), options["deterministic"])
    else:
        q, k, weights = q.detach(), k.detach(), weights.detach()
    logits, indices = torch.ops.htree_cuda.indexer_topk(
        q, k, weights, *tensors.values(), topk=topk, sorted=sorted, **options
    )
    return (indices, logits) if return_logits else indices


def quantize_fp8(x: Tensor, *, block_size: int | None = 128, scale_format: str = "float32") -> tuple[Tensor, Tensor]:
    """Quantises to float8_e4m3fn with one scale for each block of the last dimension.

    Args:
        x: [..., D] float16, bfloat16, float32 or float64, D >= 1.
        block_size: int >= 1, numbers that share a scale; the last block may be short. None: one scale for all D, what
            `indexer_logits` takes. Default 128.
        scale_format: "float32": the largest magnitude over 448; "ue8m0": that rounded up to a power of two, as
            DeepSeek-V3.2 does. Default "float32".

    Returns:
        (y, scale); ``y * scale`` approximates x.
        y: [..., D] float8_e4m3fn.
        scale: float32 [..., ceil(D / block_size)], or [...] with ``block_size=None``.
        Magnitudes below 1e-4 count as 1e-4 for the scale, so a block of zeros gives zeros. A block that holds a NaN, an
        infinity or a float64 beyond float32's range has scale NaN and holds NaN only. Empty leading dimensions give
        empty tensors.

    Raises:
        TypeError, ValueError: as `forward`.

    Notes:
        Not differentiable. Plain PyTorch operations with the same bits on every device, which torch.compile fuses.
        `torch.export` takes a dynamic D whose range lies at or below block_size, or above it.
        An element is off by at most 2^-4 of itself where ``|x / scale| >= 2^-6``, and by 2^-10 scale below.

    Example:
        >>> y, scale = htree_cuda.quantize_fp8(torch.randn(16, 256))  # scale: [16, 2]
        >>> x = y.float().view(16, 2, 128) * scale[:, :, None]

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "quantize_fp8"
    checks.common.tensor(op, "x", x)
    block_size = checks.common.integer(op, "block_size", block_size, optional=True)
    checks.dsa.quantize_fp8(x, block_size, scale_format)
    x = x.detach()
    D = x.shape[-1]
    if block_size is None or block_size >= D:  # one block, of any D: what pads leaves torch.export guards on D
        size, amax = D, x.abs().amax(-1, keepdim=True)
    else:
        size, blocks = block_size, (D + block_size - 1) // block_size
        padded = torch.nn.functional.pad(x, (0, blocks * size - D)).reshape(*x.shape[:-1], blocks, size)
        amax = padded.abs().amax(-1)
    amax = amax.to(accumulation_dtype(x.dtype)).clamp(min=MIN_AMAX).float()
    scale = amax / E4M3_MAX
    if scale_format == "ue8m0":
        # The exponent alone, one up where the fraction is not 0: a power of two that is not smaller.
        bits = scale.view(torch.int32)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)
    bad = ~amax.isfinite()
    scale = scale.masked_fill(bad, math.nan)
    # By the block of each number, not by blocks of padded rows: torch.compile gave wrong numbers in a short last block.
    of_block = torch.arange(D, device=x.device) // size
    y = (x.float() / scale[..., of_block]).clamp(-E4M3_MAX, E4M3_MAX).to(checks.dsa.FP8)
    y = y.view(torch.uint8).masked_fill(bad[..., of_block], E4M3_NAN).view(checks.dsa.FP8)
    return y.contiguous(), scale[..., 0] if block_size is None else scale


def hadamard_transform(x: Tensor, *, scale: float | None = None) -> Tensor:
    """``scale * H x`` along the last dimension, with the Hadamard matrix H in Sylvester's order.

    Args:
        x: [..., D] float16, bfloat16, float32 or float64; D a power of two, 1 .. 32768.
        scale: finite float; default D ** -0.5, with which the transform is orthogonal and its own inverse.

    Returns:
        [..., D] in the dtype of x. Empty leading dimensions give an empty tensor.

    Raises:
        TypeError, ValueError: as `forward`.

    Notes:
        Differentiable. Plain PyTorch operations on any device: log2(D) additions in float32 (float64 for float64
        inputs), rounded once; infinite only where a result is. DeepSeek-V3.2 transforms the indexer's queries and keys
        after RoPE and before `quantize_fp8`: their products stay, and outliers spread over the row.

    Example:
        >>> x = torch.randn(16, 128)
        >>> y = htree_cuda.hadamard_transform(x)

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "hadamard_transform"
    checks.common.tensor(op, "x", x)
    scale = checks.common.number(op, "scale", scale, optional=True)
    checks.dsa.hadamard_transform(x)
    D = x.shape[-1]
    if scale is None:
        scale = D**-0.5
    else:
        checks.common.scale_number(op, "scale", scale, x.dtype)
        scale = float(scale) if isinstance(scale, int) else scale
    y = x.to(accumulation_dtype(x.dtype))
    # A row whose sums could be infinite where its results are not is summed as a D-th, a power of two.
    large = None
    if x.dtype != torch.float16:  # whose numbers are too small for that
        large = y.abs().amax(-1, keepdim=True) > torch.finfo(y.dtype).max / D
        y = torch.where(large, y / D, y)
    half = 1
    while half < D:
        a, b = y.reshape(*x.shape[:-1], D // (2 * half), 2, half).unbind(-2)
        y = torch.stack((a + b, a - b), -2).reshape(x.shape)
        half *= 2
    y = y * scale
    return (y if large is None else torch.where(large, y * D, y)).to(x.dtype)
