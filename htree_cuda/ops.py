"""The torch.library ops: schema, fake, autograd. They validate, allocate and hand over to a backend.

Signatures are keyword-only after the tensors and append-only. An op with CPU tensors or ``backend="torch"`` runs the
vectorised PyTorch backend; with CUDA tensors and ``backend="auto"`` it runs the kernels or raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import checks
from .reference import vectorised
from .reference.definition import accumulation_dtype, layer_sizes

_TREE_SCHEMA = (
    "SymInt? q_start, SymInt compression_rate, SymInt top_k_per_layer, SymInt? max_top_nodes, float? scale, "
    "float rope_base, bool strict_causal"
)


def _use_torch(op: str, x: Tensor, backend: str) -> bool:
    if backend == "torch" or x.device.type == "cpu":
        return True
    checks.kernel_device(op, x)
    return False


def _without_autocast(body: Callable) -> Callable:
    """The public functions cast their inputs as autocast asks; inside an op it must not cast the accumulations too."""

    @functools.wraps(body)
    def run(first: Tensor, *args, **options):
        device_type = first.device.type
        available = torch.amp.is_autocast_available(device_type)
        with torch.autocast(device_type, enabled=False) if available else contextlib.nullcontext():
            return body(first, *args, **options)

    return run


# -------------------------------------------------------------------------------------------------------- tree_pool


@torch.library.custom_op(
    "htree_cuda::tree_pool",
    mutates_args=(),
    schema="(Tensor k, Tensor v, *, SymInt compression_rate, SymInt max_top_nodes, str backend) -> (Tensor, Tensor)",
)
@_without_autocast
def tree_pool(k: Tensor, v: Tensor, *, compression_rate: int, max_top_nodes: int, backend: str):
    """All layers above the tokens: [B, T, H_kv, D] -> [B, H_kv, N_1 + ... + N_{L-1}, D], layer 1 first, for k and v.

    A node is the mean of its existing children, added in ascending order in float32, divided by their count and
    rounded to the dtype; both backends give the same bits. No gradient: the forward op has its own.
    """
    sizes = checks.tree_pool(k, v, compression_rate=compression_rate, max_top_nodes=max_top_nodes, backend=backend)
    if _use_torch("tree_pool", k, backend):
        pooled = tuple(vectorised.tree_pool(x, compression_rate, max_top_nodes) for x in (k, v))
        return pooled
    from . import kernels

    checks.tree_pool_kernel(k, v)
    k_tree, v_tree = (x.new_empty(x.shape[0], x.shape[2], sum(sizes[1:]), x.shape[3]) for x in (k, v))
    if k_tree.numel():
        kernels.tree_pool(k, v, k_tree, v_tree, compression_rate=compression_rate, layers=len(sizes))
    return k_tree, v_tree


@tree_pool.register_fake
def _(k, v, *, compression_rate, max_top_nodes, backend):
    sizes = checks.tree_pool(k, v, compression_rate=compression_rate, max_top_nodes=max_top_nodes, backend=backend)
    return tuple(x.new_empty(x.shape[0], x.shape[2], sum(sizes[1:]), x.shape[3]) for x in (k, v))


# ---------------------------------------------------------------------------------------------------------- forward


def _empty_results(q: Tensor, k: Tensor, v: Tensor, params, need_selection: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T_q, H, _ = q.shape
    layers = len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))
    kept = layers - 1 if need_selection else 0
    return (
        q.new_empty(B, T_q, H, v.shape[3]),
        q.new_empty(B, T_q, H, dtype=accumulation_dtype(q.dtype)),
        q.new_empty(kept, B, T_q, k.shape[2], params.top_k, dtype=torch.int32),
    )


@torch.library.custom_op(
    "htree_cuda::forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, *, {_TREE_SCHEMA}, bool need_selection, str backend)"
    " -> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, *, need_selection: bool, backend: str, **tree):
    """(out, lse, selection); selection has size 0 in its first dimension unless needed. See `interface.forward`."""
    params = checks.forward(q, k, v, backend=backend, **tree)
    if _use_torch("forward", q, backend):
        return vectorised.forward(q, k, v, params, need_selection=need_selection)
    from . import kernels

    checks.forward_kernel(q, k, v, params)
    out, lse, selection = _empty_results(q, k, v, params, need_selection)
    if out.numel():
        workspace = q.new_empty(kernels.forward_workspace(q, k, v, params), dtype=torch.uint8)
        kernels.forward(q, k, v, out, lse, selection if selection.numel() else None, workspace, params)
    return out, lse, selection


@forward.register_fake
def _(q, k, v, *, need_selection, backend, **tree):
    return _empty_results(q, k, v, checks.forward(q, k, v, backend=backend, **tree), need_selection)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@torch.library.custom_op(
    "htree_cuda::backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor selection, *, "
    f"{_TREE_SCHEMA}, str backend) -> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def backward(dout, dlse, q, k, v, out, lse, selection, *, backend: str, **tree):
    """(dq, dk, dv) of `forward`, walked again from the selection chunk by chunk: nothing is taped."""
    params = checks.forward(q, k, v, backend=backend, op="backward", **tree)
    checks.backward(dout, dlse, q, k, v, out, lse, selection, params)
    if _use_torch("backward", q, backend):
        return vectorised.backward(dout, dlse, q, k, v, out, lse, selection, params)
    from . import kernels

    checks.backward_kernel(q, k, v, out, lse, selection, params)
    dq, dk, dv = _empty_gradients(q, k, v)
    if dk.numel():
        workspace = q.new_empty(kernels.backward_workspace(q, k, v, params), dtype=torch.uint8)
        kernels.backward(dout, dlse, q, k, v, out, lse, selection, dq, dk, dv, workspace, params)
    return dq, dk, dv


@backward.register_fake
def _(dout, dlse, q, k, v, out, lse, selection, *, backend, **tree):
    checks.forward(q, k, v, backend=backend, op="backward", **tree)
    return _empty_gradients(q, k, v)


def _save_for_backward(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.tree = {name: x for name, x in keyword_only_inputs.items() if name != "need_selection"}
    ctx.has_selection = keyword_only_inputs["need_selection"]
    ctx.mark_non_differentiable(output[2])


def _run_backward(ctx, dout, dlse, _dselection):
    q, k, v, out, lse, selection = ctx.saved_tensors
    if not ctx.has_selection:
        raise RuntimeError("forward: gradients need the selection; call the op with need_selection=True")
    return torch.ops.htree_cuda.backward(dout, dlse, q, k, v, out, lse, selection, **ctx.tree)


def _no_double_backward(ctx, *grads):
    raise RuntimeError("forward: second derivatives (double backward) are not supported")


torch.library.register_autograd("htree_cuda::forward", _run_backward, setup_context=_save_for_backward)
torch.library.register_autograd("htree_cuda::backward", _no_double_backward)


# -------------------------------------------------------------------------------------------------------- attn_dist


@torch.library.custom_op(
    "htree_cuda::attn_dist",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor indices, Tensor lse, Tensor? topk_length, *, float? sm_scale, "
    "SymInt[]? q_start, SymInt k_stride, float lse_base, str backend) -> Tensor",
)
@_without_autocast
def attn_dist(q, k, indices, lse, topk_length, *, sm_scale, q_start, k_stride, lse_base, backend):
    """[ceil(h_q / 64), s_q, topk] (batched: a leading B), a fresh tensor. Contract: `interface.attn_dist`."""
    params = checks.attn_dist(
        q, k, indices, lse, topk_length, sm_scale=sm_scale, q_start=q_start, k_stride=k_stride, lse_base=lse_base,
        backend=backend,
    )  # fmt: skip
    if not params.batched:
        q, k, indices, lse = (x[None] for x in (q, k, indices, lse))
        topk_length = None if topk_length is None else topk_length[None]
    numbers = {"sm_scale": params.sm_scale, "q_start": params.q_start, "k_stride": params.k_stride}
    if _use_torch("attn_dist", q, backend):
        out = vectorised.attn_dist(q, k, indices, lse, topk_length=topk_length, lse_base=params.lse_base, **numbers)
    else:
        from . import kernels

        checks.attn_dist_kernel(q, k, indices, lse, topk_length, params.sm_scale)
        out = lse.new_empty(q.shape[0], (q.shape[2] + 63) // 64, q.shape[1], indices.shape[3])
        if out.numel():
            kernels.attn_dist(q, k, indices, lse, out, topk_length=topk_length, lse_base=params.lse_base, **numbers)
    return out if params.batched else out[0]


@attn_dist.register_fake
def _(q, k, indices, lse, topk_length, *, sm_scale, q_start, k_stride, lse_base, backend):
    checks.attn_dist(
        q, k, indices, lse, topk_length, sm_scale=sm_scale, q_start=q_start, k_stride=k_stride, lse_base=lse_base,
        backend=backend,
    )  # fmt: skip
    groups = (q.shape[-2] + 63) // 64
    return q.new_empty(*q.shape[:-3], groups, q.shape[-3], indices.shape[-1], dtype=accumulation_dtype(q.dtype))
