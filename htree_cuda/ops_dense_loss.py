"""The ops behind `dense_indexer_loss` and the dense stage of `DSAttention`: schema, fake, autograd, validation."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .definition import accumulation_dtype
from .ops import _no_double_backward, _use_torch, _with_batch, _without_autocast
from .params import IndexerParams
from .torch_backend import dense_loss

_SCHEMA = "float? sm_scale, SymInt[]? q_start, SymInt k_stride, float lse_base, str group, str backend"
_TENSORS = "Tensor q_i, Tensor k_i, Tensor weights, Tensor q, Tensor k, Tensor lse, Tensor? k_start, Tensor? k_end"


def _problem(op: str, tensors: tuple[Tensor | None, ...], group: str, options: dict) -> dense_loss.Problem:
    params = checks.dense_loss.dense_indexer_loss(*tensors, op=op, **options)
    q_i, k_i, weights, q, k, lse, k_start, k_end = _with_batch(params, *tensors)
    attend = dense_loss.attention
    if not _use_torch(op, q, options["backend"]):
        checks.support.dense_indexer_loss(op, q, k, params.sm_scale)
        from . import dense_kernels

        attend = dense_kernels.attention
    rule = IndexerParams(params.batched, params.q_start, params.k_stride)
    window = dense_loss.Window(*q.shape[:2], q.device, rule, k_start, k_end)
    ranks = torch.distributed.distributed_c10d._resolve_process_group(group) if group else None
    numbers = (params.sm_scale, params.lse_base)
    return dense_loss.Problem(q_i, k_i, weights, q, k, lse, window, *numbers, ranks, attend)


@torch.library.custom_op(
    "htree_cuda::dense_indexer_loss",
    mutates_args=(),
    schema=f"({_TENSORS}, *, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
@_without_autocast
def dense_indexer_loss(q_i, k_i, weights, q, k, lse, k_start, k_end, *, group, **options):
    """(loss, sum of the attention, largest logit, log of the sum of exp(logit - largest)), each [s_q] (batched: [B,
    s_q]). The largest logit is -inf where a query sees no key. group: the name of a process group, or nothing."""
    tensors = (q_i, k_i, weights, q, k, lse, k_start, k_end)
    results = dense_loss.forward(_problem("dense_indexer_loss", tensors, group, options))
    return results if q_i.dim() == 4 else tuple(x[0] for x in results)


@dense_indexer_loss.register_fake
def _(q_i, k_i, weights, q, k, lse, k_start, k_end, *, group, **options):
    checks.dense_loss.dense_indexer_loss(q_i, k_i, weights, q, k, lse, k_start, k_end, **options)
    dtype = checks.dense_loss.loss_dtype(q_i, q)
    return tuple(q_i.new_empty(q_i.shape[:-2], dtype=dtype) for _ in range(4))


@torch.library.custom_op(
    "htree_cuda::dense_indexer_loss_backward",
    mutates_args=(),
    schema=f"(Tensor dloss, {_TENSORS}, Tensor total, Tensor largest, Tensor log_sum, *, {_SCHEMA}) -> "
    "(Tensor, Tensor, Tensor)",
)
@_without_autocast
def dense_indexer_loss_backward(
    dloss, q_i, k_i, weights, q, k, lse, k_start, k_end, total, largest, log_sum, *, group, **options
):
    """(dq_i, dk_i, dweights) of `dense_indexer_loss`: scores and logits are computed again, tile by tile."""
    op = "dense_indexer_loss_backward"
    problem = _problem(op, (q_i, k_i, weights, q, k, lse, k_start, k_end), group, options)
    checks.dense_loss.dense_indexer_loss_backward(dloss, total, largest, log_sum, q_i, q)
    rows = (dloss, total, largest, log_sum)
    if q_i.dim() == 4:
        return dense_loss.backward(problem, *rows)
    return tuple(x[0] for x in dense_loss.backward(problem, *(x[None] for x in rows)))


@dense_indexer_loss_backward.register_fake
def _(dloss, q_i, k_i, weights, q, k, lse, k_start, k_end, total, largest, log_sum, *, group, **options):
    op = "dense_indexer_loss_backward"
    checks.dense_loss.dense_indexer_loss(q_i, k_i, weights, q, k, lse, k_start, k_end, op=op, **options)
    checks.dense_loss.dense_indexer_loss_backward(dloss, total, largest, log_sum, q_i, q)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_i, k_i, weights))


def _save(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.options = keyword_only_inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _run_backward(ctx, dloss, *_others):
    if dloss is None:
        return (None,) * 8
    saved = ctx.saved_tensors
    gradients = torch.ops.htree_cuda.dense_indexer_loss_backward(dloss, *saved, **ctx.options)
    return (*gradients, None, None, None, None, None)


torch.library.register_autograd("htree_cuda::dense_indexer_loss", _run_backward, setup_context=_save)
torch.library.register_autograd("htree_cuda::dense_indexer_loss_backward", _no_double_backward("dense_indexer_loss"))


@torch.library.custom_op(
    "htree_cuda::dense_lse",
    mutates_args=(),
    schema="(Tensor q, Tensor k, *, float sm_scale, SymInt[] q_start, str backend) -> Tensor",
)
@_without_autocast
def dense_lse(q: Tensor, k: Tensor, *, sm_scale: float, q_start: list[int], backend: str) -> Tensor:
    """[B, s_q, h_q] natural lse of dense causal attention, q [B, s_q, h_q, d_qk], k [B, s_kv, 1, d_qk]. No gradient."""
    starts = checks.dense_loss.dense_lse(q, k, sm_scale=sm_scale, q_start=q_start, backend=backend)
    if not _use_torch("dense_lse", q, backend):
        checks.support.dense_lse(q, k, sm_scale)
        from . import dense_kernels

        return dense_kernels.dense_lse(q, k, starts, sm_scale)
    window = dense_loss.Window(*q.shape[:2], q.device, IndexerParams(True, starts, 1))
    return dense_loss.dense_lse(q, k, window, sm_scale)


@dense_lse.register_fake
def _(q, k, *, sm_scale, q_start, backend):
    checks.dense_loss.dense_lse(q, k, sm_scale=sm_scale, q_start=q_start, backend=backend)
    return q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
