"""The ops of packed and ragged sequences: schema, fake, autograd. One op serves both forms: packed where cu_seqlens are
given, else batched, with what the rows of the batch hold."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import checks, ops, pairs
from .definition import accumulation_dtype, layer_sizes
from .ops import (
    _ROTATION_SCHEMA,
    _TREE_SCHEMA,
    _TREE_TENSORS,
    _empty_gradients,
    _no_double_backward,
    _save_for_backward,
    _without_autocast,
)
from .params import VarlenParams
from .torch_backend import sinks
from .torch_backend import varlen as torch_varlen
from .torch_backend.varlen import Lengths

_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? q_start"
_NUMBERS = "SymInt max_seqlen_q, SymInt max_seqlen_k, " + _TREE_SCHEMA.removeprefix("SymInt? q_start, ")


def _layers(params: VarlenParams) -> int:
    return len(layer_sizes(params.max_seqlen_k, params.tree.compression_rate, params.tree.max_top_nodes))


def _keeps_selection(q: Tensor, k: Tensor, v: Tensor, params: VarlenParams, save_selection: str) -> bool:
    """The rule of `ops._keeps_selection`, with the number of layers that max_seqlen_k has."""
    checks.common.save_mode("forward_varlen", save_selection)
    if save_selection != "auto":
        return save_selection == "always"
    fit = q.shape[-2] * (q.shape[-1] + v.shape[-1]) * q.element_size() // (4 * k.shape[-2] * params.tree.top_k)
    return fit > 0 and _layers(params) - 1 <= fit


def empty_selection(q: Tensor, k: Tensor, params: VarlenParams, need_selection: bool) -> Tensor:
    kept = _layers(params) - 1 if need_selection else 0
    return q.new_empty(kept, *q.shape[:-2], k.shape[-2], params.tree.top_k, dtype=torch.int32)


def _empty_results(q: Tensor, k: Tensor, v: Tensor, params: VarlenParams, need_selection: bool) -> tuple[Tensor, ...]:
    return (
        q.new_empty(*q.shape[:-1], v.shape[-1]),
        q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype)),
        empty_selection(q, k, params, need_selection),
    )


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, lengths: Lengths,
    params: VarlenParams, given: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills out, lse and selection by the kernels; given: a selection to replay."""
    from . import kernels

    if params.sequences == 0 or k.shape[-3] == 0:
        out.zero_(), lse.fill_(-torch.inf), selection.fill_(-1)
    elif out.numel():
        q, k, tree = pairs.arranged(q, k, params.tree)
        params = dataclasses.replace(params, tree=tree)
        size = kernels.forward_varlen_workspace(q, k, v, *lengths, params)
        workspace = q.new_empty(size, dtype=torch.uint8)
        chosen, replayed = (x if x is not None and x.numel() else None for x in (selection, given))
        kernels.forward_varlen(q, k, v, out, lse, chosen, *lengths, workspace, params, given=replayed)


def launch_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, lengths: Lengths, params: VarlenParams,
) -> None:  # fmt: skip
    """Fills dq, dk and dv by the kernels, whose sums are always repeatable; float32 dk and dv are added to."""
    from . import kernels

    if params.sequences == 0 or k.shape[-3] == 0 or q.shape[-3] == 0:
        dq.zero_()
        if dk.dtype == q.dtype:
            dk.zero_(), dv.zero_()
    else:
        tree = params.tree
        if tree.attn_sink is not None:
            lse, dlse = sinks.folded(lse, dlse, tree.attn_sink)
        q, k, own = pairs.arranged(q, k, tree)
        params = dataclasses.replace(params, tree=own)
        own_dq, own_dk = pairs.to_halves(dq, tree), pairs.to_halves(dk, tree)  # dk holds what the kernels add to
        workspace = q.new_empty(kernels.backward_varlen_workspace(q, k, v, *lengths, params), dtype=torch.uint8)
        results = (dout, dlse, q, k, v, out, lse, selection)
        kernels.backward_varlen(*results, own_dq, own_dk, dv, *lengths, workspace, params)
        for mine, x in ((own_dq, dq), (own_dk, dk)):
            if mine is not x:
                x.copy_(pairs.from_halves(mine, tree))


def _returns_selection(q, k, v, given: Tensor | None, params: VarlenParams, save_selection: str, needed: bool) -> bool:
    """Whether the op returns the selection: never one that was given."""
    keeps = _keeps_selection(q, k, v, params, save_selection)
    if given is not None:
        checks.varlen.given_selection("forward_varlen" if params.packed else "forward", given, q, k, params)
    return given is None and (keeps or needed)


@torch.library.custom_op(
    "htree_cuda::forward_varlen",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_TREE_TENSORS}, Tensor? given=None, *, {_NUMBERS}, "
    'bool need_selection, str backend, bool deterministic=False, str save_selection="never", '
    f"{_ROTATION_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def forward_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start, attn_sink=None, rope_inv_freq=None, given=None,
    *, need_selection: bool, backend: str, deterministic: bool = False, save_selection: str = "never", **tree,
):  # fmt: skip
    """(out, lse, selection) of `api.forward_varlen`, or of `api.forward` with seqused or several q_start; selection is
    kept, or given, as in `ops.forward`."""
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start)
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    params = checks.varlen.forward(q, k, v, *lengths, backend=backend, **tree)
    checks.rotation.finite("forward_varlen", rope_inv_freq)
    op = "forward_varlen" if params.packed else "forward"
    if checks.common.checks_values():
        checks.varlen.read_lengths(op, q, k, *lengths[:4], params)
    need_selection = _returns_selection(q, k, v, given, params, save_selection, need_selection)
    if ops._use_torch("forward_varlen", q, backend):
        return torch_varlen.forward(q, k, v, lengths, params, need_selection=need_selection, given=given)
    checks.varlen.kernel(q, k, v, params, *lengths, op=op)
    checks.support.given_selection(op, given)
    out, lse, selection = _empty_results(q, k, v, params, need_selection)
    launch(q, k, v, out, lse, selection, lengths, params, given)
    return out, lse, selection


@forward_varlen.register_fake
def _(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start, attn_sink=None, rope_inv_freq=None, given=None,
    *, need_selection, backend, deterministic=False, save_selection="never", **tree,
):  # fmt: skip
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start)
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    params = checks.varlen.forward(q, k, v, *lengths, backend=backend, **tree)
    kept = _returns_selection(q, k, v, given, params, save_selection, need_selection)
    return _empty_results(q, k, v, params, kept)


@torch.library.custom_op(
    "htree_cuda::backward_varlen",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor selection, "
    f"{_LENGTHS}, {_TREE_TENSORS}, *, {_NUMBERS}, str backend, bool deterministic=False, {_ROTATION_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def backward_varlen(
    dout, dlse, q, k, v, out, lse, selection, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start,
    attn_sink=None, rope_inv_freq=None, *, backend: str, deterministic: bool = False, **tree,
):  # fmt: skip
    """(dq, dk, dv) of `forward_varlen`, from the selection; rows of no sequence get 0."""
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start)
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    params = checks.varlen.forward(q, k, v, *lengths, backend=backend, op="backward_varlen", **tree)
    checks.varlen.backward(dout, dlse, q, v, out, lse, selection, params, k.shape[-2])
    if ops._use_torch("backward_varlen", q, backend):
        results = (dout, dlse, q, k, v, out, lse, selection)
        return torch_varlen.backward(*results, lengths, params, deterministic=deterministic)
    checks.varlen.backward_kernel(q, k, v, out, lse, selection, params, *lengths)
    gradients = _empty_gradients(q, k, v)
    launch_backward(dout, dlse, q, k, v, out, lse, selection, *gradients, lengths, params)
    return gradients


@backward_varlen.register_fake
def _(
    dout, dlse, q, k, v, out, lse, selection, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start,
    attn_sink=None, rope_inv_freq=None, *, backend, deterministic=False, **tree,
):  # fmt: skip
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, q_start)
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    checks.varlen.forward(q, k, v, *lengths, backend=backend, op="backward_varlen", **tree)
    return _empty_gradients(q, k, v)


def _run_backward(ctx, dout, dlse, _dselection):
    q, k, v, *lengths, attn_sink, rope_inv_freq, given, out, lse, selection = ctx.saved_tensors
    dout, dlse = (x.new_zeros(()).expand_as(x) if dx is None else dx for x, dx in ((out, dout), (lse, dlse)))
    tensors = (*lengths, attn_sink, rope_inv_freq)
    tree = {name: x for name, x in ctx.options.items() if name != "deterministic"}
    params = checks.varlen.forward(q, k, v, *lengths, **tree, rope_inv_freq=rope_inv_freq)
    if given is not None:
        selection = given
    elif selection.shape[0] != _layers(params) - 1:
        selection = torch.ops.htree_cuda.forward_varlen(q, k, v, *tensors, need_selection=True, **ctx.options)[2]
    grads = torch.ops.htree_cuda.backward_varlen(dout, dlse, q, k, v, out, lse, selection, *tensors, **ctx.options)
    dsink = None
    if attn_sink is not None and ctx.needs_input_grad[8]:
        seen = torch.where((lse == -torch.inf)[..., None], dout.new_zeros(()), dout)  # padding is no part of the sum
        dsink = torch.ops.htree_cuda.sink_gradient(seen, out, lse, attn_sink, op="forward_varlen")
    return *grads, None, None, None, None, None, dsink, None, None


torch.library.register_autograd("htree_cuda::forward_varlen", _run_backward, setup_context=_save_for_backward)
torch.library.register_autograd("htree_cuda::backward_varlen", _no_double_backward("forward_varlen"))
