"""The torch.library ops of the lightning indexer and of its selector: schema, fake, autograd, as in `ops.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, ops
from .definition import accumulation_dtype
from .torch_backend import indexer as torch_indexer

_WINDOW_SCHEMA = "SymInt[]? q_start, SymInt k_stride, str backend"


def _contiguous(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------- indexer_logits


@torch.library.custom_op(
    "htree_cuda::indexer_logits",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor weights, Tensor? q_scale, Tensor? k_scale, Tensor? indices, "
    f"Tensor? topk_length, Tensor? k_start, Tensor? k_end, *, {_WINDOW_SCHEMA}, bool deterministic=False) -> Tensor",
)
@ops._without_autocast
def indexer_logits(q, k, weights, q_scale, k_scale, indices, topk_length, k_start, k_end, **options):
    """[s_q, s_kv], or [s_q, topk] where indices are given (batched: a leading B). Contract: `dsa.indexer_logits`."""
    tensors = (q, k, weights, q_scale, k_scale, indices, topk_length, k_start, k_end)
    params = checks.dsa.indexer_logits(*tensors, **options)
    tensors = ops._with_batch(params, *tensors)
    if ops._use_torch("indexer_logits", q, options["backend"]):
        out = torch_indexer.indexer_logits(*tensors, params)
    else:
        from . import kernels

        q, k = tensors[:2]
        checks.dsa.indexer_kernel("indexer_logits", q, k, tensors[5])
        columns = k.shape[1] if indices is None else indices.shape[-1]
        out = q.new_empty(*q.shape[:2], columns, dtype=torch.float32)
        if out.numel() and indices is None:
            kernels.indexer_logits(*tensors[:5], *tensors[7:], out, params=params)
        elif out.numel():
            kernels.indexer_logits_listed(*tensors[:3], *tensors[5:], params=params, out=out)
    return out if params.batched else out[0]


@indexer_logits.register_fake
def _(q, k, weights, q_scale, k_scale, indices, topk_length, k_start, k_end, **options):
    checks.dsa.indexer_logits(q, k, weights, q_scale, k_scale, indices, topk_length, k_start, k_end, **options)
    columns = k.shape[-3] if indices is None else indices.shape[-1]
    return q.new_empty(*q.shape[:-2], columns, dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op(
    "htree_cuda::indexer_logits_backward",
    mutates_args=(),
    schema="(Tensor dlogits, Tensor q, Tensor k, Tensor weights, Tensor? indices, Tensor? topk_length, "
    f"Tensor? k_start, Tensor? k_end, *, {_WINDOW_SCHEMA}, bool deterministic=False) -> (Tensor, Tensor, Tensor)",
)
@ops._without_autocast
def indexer_logits_backward(dlogits, q, k, weights, indices, topk_length, k_start, k_end, **options):
    """(dq, dk, dweights) of `indexer_logits`. Nothing is taped: the products are computed again."""
    op = "indexer_logits_backward"
    tensors = (dlogits, q, k, weights, indices, topk_length, k_start, k_end)
    params = checks.dsa.indexer_logits_backward(*tensors, **options)
    tensors = ops._with_batch(params, *tensors)
    deterministic = options.get("deterministic", False)
    if ops._use_torch(op, q, options["backend"]):
        grads = torch_indexer.indexer_logits_backward(*tensors, params, deterministic=deterministic)
    else:
        from . import kernels

        dlogits, q, k, weights = tensors[:4]
        checks.dsa.indexer_backward_kernel(q, k, tensors[4], deterministic)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
        grads = _contiguous(q), dk, _contiguous(weights)
        if q.numel():
            kernels.indexer_logits_listed(q, k, weights, *tensors[4:], params=params, dlogits=dlogits, grads=grads)
        grads = grads[0], dk.to(k.dtype), grads[2]
    return grads if params.batched else tuple(x[0] for x in grads)


@indexer_logits_backward.register_fake
def _(dlogits, q, k, weights, indices, topk_length, k_start, k_end, **options):
    checks.dsa.indexer_logits_backward(dlogits, q, k, weights, indices, topk_length, k_start, k_end, **options)
    return _contiguous(q), _contiguous(k), _contiguous(weights)


def _save_logits(ctx, inputs, keyword_only_inputs, output):
    q, k, weights, _, _, *lists = inputs
    ctx.save_for_backward(q, k, weights, *lists)
    ctx.options = keyword_only_inputs


def _run_logits_backward(ctx, dlogits):
    dq, dk, dweights = torch.ops.htree_cuda.indexer_logits_backward(dlogits, *ctx.saved_tensors, **ctx.options)
    return dq, dk, dweights, None, None, None, None, None, None


torch.library.register_autograd("htree_cuda::indexer_logits", _run_logits_backward, setup_context=_save_logits)
torch.library.register_autograd("htree_cuda::indexer_logits_backward", ops._no_double_backward("indexer_logits"))


# --------------------------------------------------------------------------------------------------- topk_indices


@torch.library.custom_op(
    "htree_cuda::topk_indices",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor? k_start, Tensor? k_end, *, SymInt topk, {_WINDOW_SCHEMA}, bool sorted, "
    "bool return_values) -> (Tensor, Tensor)",
)
def topk_indices(logits, k_start, k_end, **options):
    """(indices [s_q, 1, topk] int32, values [s_q, topk]) (batched: a leading B); values has size 0 unless they are to
    be returned. Contract: `dsa.topk_indices`."""
    params = checks.dsa.topk_indices(logits, k_start, k_end, **options)
    numbers = {name: options[name] for name in ("topk", "sorted", "return_values")}
    tensors = ops._with_batch(params, logits, k_start, k_end)
    if ops._use_torch("topk_indices", logits, options["backend"]):
        indices, values = torch_indexer.topk_indices(*tensors, params, **numbers)
    else:
        from . import kernels

        checks.dsa.topk_indices_kernel(tensors[0])
        shape = tensors[0].shape[:2]
        indices = logits.new_empty(*shape, 1, options["topk"], dtype=torch.int32)
        values = logits.new_empty(*shape, options["topk"]) if options["return_values"] else None
        if indices.numel():
            kernels.topk_indices(*tensors, indices, values, params=params)
    values = logits.new_empty(0) if values is None else values if params.batched else values[0]
    return indices if params.batched else indices[0], values


@topk_indices.register_fake
def _(logits, k_start, k_end, *, topk, return_values, **options):
    checks.dsa.topk_indices(logits, k_start, k_end, topk=topk, return_values=return_values, **options)
    rows = logits.shape[:-1]
    values = logits.new_empty((*rows, topk) if return_values else (0,))
    return logits.new_empty(*rows, 1, topk, dtype=torch.int32), values


# --------------------------------------------------------------------------------------------------- indexer_topk


@torch.library.custom_op(
    "htree_cuda::indexer_topk",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor weights, Tensor? q_scale, Tensor? k_scale, Tensor? k_start, Tensor? k_end, *, "
    f"SymInt topk, {_WINDOW_SCHEMA}, bool sorted, bool deterministic=False) -> (Tensor, Tensor)",
)
@ops._without_autocast
def indexer_topk(q, k, weights, q_scale, k_scale, k_start, k_end, *, topk, sorted, **options):
    """(logits [s_q, topk], indices [s_q, 1, topk] int32) (batched: a leading B). Contract: `dsa.indexer_topk`."""
    tensors = (q, k, weights, q_scale, k_scale, k_start, k_end)
    params = checks.dsa.indexer_topk(*tensors, topk=topk, sorted=sorted, **options)
    tensors = ops._with_batch(params, *tensors)
    if ops._use_torch("indexer_topk", q, options["backend"]):
        results = torch_indexer.indexer_topk(*tensors, params, topk=topk, sorted=sorted)
    else:
        from . import kernels

        q, k = tensors[:2]
        checks.dsa.indexer_kernel("indexer_topk", q, k)
        logits = q.new_empty(*q.shape[:2], topk, dtype=torch.float32)
        indices = q.new_empty(*q.shape[:2], 1, topk, dtype=torch.int32)
        if indices.numel():
            size = kernels.indexer_topk_workspace(*tensors, topk, params=params)
            kernels.indexer_topk(*tensors, indices, logits, q.new_empty(size, dtype=torch.uint8), params=params)
        results = logits, indices
    return results if params.batched else tuple(x[0] for x in results)


@indexer_topk.register_fake
def _(q, k, weights, q_scale, k_scale, k_start, k_end, *, topk, **options):
    checks.dsa.indexer_topk(q, k, weights, q_scale, k_scale, k_start, k_end, topk=topk, **options)
    rows = q.shape[:-2]
    indices = q.new_empty(*rows, 1, topk, dtype=torch.int32)
    return q.new_empty(*rows, topk, dtype=accumulation_dtype(q.dtype)), indices


def _save_topk(ctx, inputs, keyword_only_inputs, output):
    q, k, weights, _, _, k_start, k_end = inputs
    ctx.save_for_backward(q, k, weights, output[1], k_start, k_end)
    ctx.options = {name: x for name, x in keyword_only_inputs.items() if name not in ("topk", "sorted")}
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _run_topk_backward(ctx, dlogits, _dindices):
    if dlogits is None:
        return (None,) * 7
    q, k, weights, indices, k_start, k_end = ctx.saved_tensors
    grads = torch.ops.htree_cuda.indexer_logits_backward(
        dlogits, q, k, weights, indices, None, k_start, k_end, **ctx.options
    )
    return *grads, None, None, None, None


torch.library.register_autograd("htree_cuda::indexer_topk", _run_topk_backward, setup_context=_save_topk)
