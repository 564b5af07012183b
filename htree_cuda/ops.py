"""The torch.library ops: schema, fake, autograd. They validate, allocate and hand over to a backend.

Signatures are keyword-only after the tensors and append-only. An op with CPU tensors or ``backend="torch"`` runs the
PyTorch backend (`torch_backend`); with CUDA tensors and ``backend="auto"`` it runs the kernels or raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from . import checks, pairs
from .autocast import autocast_enabled
from .definition import accumulation_dtype, layer_sizes
from .params import IndexerParams, ListParams
from .torch_backend import lists as torch_lists
from .torch_backend import sinks
from .torch_backend import tree as torch_tree

_TREE_SCHEMA = (
    "SymInt? q_start, SymInt compression_rate, SymInt top_k_per_layer, SymInt? max_top_nodes, float? scale, "
    "float? rope_base, bool strict_causal"
)
# What was appended, each with its default: tensors behind the others, numbers at the end.
_TREE_TENSORS = "Tensor? attn_sink=None, Tensor? rope_inv_freq=None"
_ROTATION_SCHEMA = "SymInt? rope_dim=None, bool rope_interleaved=False"


def _use_torch(op: str, x: Tensor, backend: str) -> bool:
    if backend == "torch" or x.device.type == "cpu":
        return True
    checks.support.kernel_device(op, x)
    return False


def _without_autocast(body: Callable) -> Callable:
    """The public functions cast their inputs as autocast asks; inside an op it must not cast the accumulations too."""

    @functools.wraps(body)
    def run(first: Tensor, *args, **options):
        device_type = first.device.type
        if not autocast_enabled(device_type):
            return body(first, *args, **options)
        with torch.autocast(device_type, enabled=False):
            return body(first, *args, **options)

    return run


def _without_gradient(name: str, schema: str) -> Callable[[Callable], Callable]:
    """Registers the op ``htree_cuda::name``, through which no gradient passes. What `torch.library.custom_op` puts
    between a call and its body takes longer than a step of decoding."""

    def register(body: Callable) -> Callable:
        op = f"htree_cuda::{name}"
        torch.library.define(op, schema, tags=torch.Tag.pt2_compliant_tag)
        arguments = getattr(torch.ops.htree_cuda, name).default._schema.arguments
        mutated = [i for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]
        run = torch._disable_dynamo(_without_autocast(body))  # as custom_op: torch.compile looks into no body

        def mutate(*args, **options):
            run(*args, **options)
            for i in mutated:  # one by one: older versions take no lists
                if not args[i].is_inference():
                    torch.autograd.graph.increment_version(args[i])

        torch.library.impl(op, "default", mutate if mutated else run)
        return body

    return register


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
    sizes = checks.tree.tree_pool(k, v, compression_rate=compression_rate, max_top_nodes=max_top_nodes, backend=backend)
    if _use_torch("tree_pool", k, backend):
        pooled = tuple(torch_tree.tree_pool(x, compression_rate, max_top_nodes) for x in (k, v))
        return pooled
    from . import kernels

    checks.support.tree_pool(k, v)
    k_tree, v_tree = (x.new_empty(x.shape[0], x.shape[2], sum(sizes[1:]), x.shape[3]) for x in (k, v))
    if k_tree.numel():
        kernels.tree_pool(k, v, k_tree, v_tree, compression_rate=compression_rate, layers=len(sizes))
    return k_tree, v_tree


@tree_pool.register_fake
def _(k, v, *, compression_rate, max_top_nodes, backend):
    sizes = checks.tree.tree_pool(k, v, compression_rate=compression_rate, max_top_nodes=max_top_nodes, backend=backend)
    return tuple(x.new_empty(x.shape[0], x.shape[2], sum(sizes[1:]), x.shape[3]) for x in (k, v))


# ---------------------------------------------------------------------------------------------------------- forward


def _layers(k: Tensor, params) -> int:
    return len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))


def _keeps_selection(q: Tensor, k: Tensor, v: Tensor, params, save_selection: str) -> bool:
    """Whether the backward's copy is kept. "auto": where it takes no more bytes than q and out, which are kept anyway;
    counted for one token, so the rule depends on neither B nor T_q, and on T through the number of layers alone."""
    checks.common.save_mode("forward", save_selection)
    if save_selection != "auto":
        return save_selection == "always"
    fit = _layers_that_fit(q, k, v, params.top_k)
    # Where no layer fits, T is not asked: a graph that is traced for any T stays one for any T.
    return fit > 0 and _layers(k, params) - 1 <= fit


def _layers_that_fit(q: Tensor, k: Tensor, v: Tensor, top_k: int) -> int:
    return q.shape[2] * (q.shape[3] + v.shape[3]) * q.element_size() // (4 * k.shape[2] * top_k)


def _returns_selection(q, k, v, given: Tensor | None, params, save_selection: str, need_selection: bool) -> bool:
    """Whether `forward` returns the selection: never one that was given, which the caller has."""
    keeps = _keeps_selection(q, k, v, params, save_selection)
    if given is not None:
        checks.tree.given_selection("forward", given, q, k, params)
    return given is None and (keeps or need_selection)


def _empty_results(q: Tensor, k: Tensor, v: Tensor, params, need_selection: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T_q, H, _ = q.shape
    kept = _layers(k, params) - 1 if need_selection else 0
    return (
        q.new_empty(B, T_q, H, v.shape[3]),
        q.new_empty(B, T_q, H, dtype=accumulation_dtype(q.dtype)),
        q.new_empty(kept, B, T_q, k.shape[2], params.top_k, dtype=torch.int32),
    )


@torch.library.custom_op(
    "htree_cuda::forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_TREE_TENSORS}, Tensor? given=None, *, {_TREE_SCHEMA}, "
    f'bool need_selection, str backend, bool deterministic=False, str save_selection="never", {_ROTATION_SCHEMA}) '
    "-> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def forward(
    q: Tensor, k: Tensor, v: Tensor, attn_sink: Tensor | None = None, rope_inv_freq: Tensor | None = None,
    given: Tensor | None = None, *, need_selection: bool, backend: str, deterministic: bool = False,
    save_selection: str = "never", **tree,
):  # fmt: skip
    """(out, lse, selection); selection has size 0 in its first dimension unless kept. See `api.forward`.

    It is kept where it is needed as an output, or for the backward as save_selection says: "always", "never" or "auto"
    (`_keeps_selection`). The gradients are the same: a backward without it runs this op again. deterministic is the
    backward's; the forward always is. given: a selection to replay; the result's is then of size 0, and the backward
    reads the one that was given.
    """
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    params = checks.tree.forward(q, k, v, backend=backend, **tree)
    checks.rotation.finite("forward", rope_inv_freq)
    need_selection = _returns_selection(q, k, v, given, params, save_selection, need_selection)
    if _use_torch("forward", q, backend):
        return torch_tree.forward(q, k, v, params, need_selection=need_selection, given=given)
    from . import kernels

    checks.support.forward(q, k, v, params)
    checks.support.given_selection("forward", given)
    out, lse, selection = _empty_results(q, k, v, params, need_selection)
    if out.numel():
        q, k, params = pairs.arranged(q, k, params)
        workspace = q.new_empty(kernels.forward_workspace(q, k, v, params), dtype=torch.uint8)
        replayed = given if given is not None and given.numel() else None
        kernels.forward(q, k, v, out, lse, selection if selection.numel() else None, workspace, params, given=replayed)
    return out, lse, selection


@forward.register_fake
def _(
    q, k, v, attn_sink=None, rope_inv_freq=None, given=None, *, need_selection, backend, deterministic=False,
    save_selection="never", **tree,
):  # fmt: skip
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    params = checks.tree.forward(q, k, v, backend=backend, **tree)
    kept = _returns_selection(q, k, v, given, params, save_selection, need_selection)
    return _empty_results(q, k, v, params, kept)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@torch.library.custom_op(
    "htree_cuda::backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor selection, "
    f"{_TREE_TENSORS}, *, {_TREE_SCHEMA}, str backend, bool deterministic=False, {_ROTATION_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def backward(
    dout, dlse, q, k, v, out, lse, selection, attn_sink=None, rope_inv_freq=None, *, backend: str,
    deterministic: bool = False, **tree,
):  # fmt: skip
    """(dq, dk, dv) of `forward`: the descent is repeated from the selection, chunk by chunk, and nothing is taped. The
    gradient of attn_sink is `sink_gradient`."""
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    params = checks.tree.forward(q, k, v, backend=backend, op="backward", **tree)
    checks.tree.backward(dout, dlse, q, k, v, out, lse, selection, params)
    if _use_torch("backward", q, backend):
        return torch_tree.backward(dout, dlse, q, k, v, out, lse, selection, params, deterministic=deterministic)
    from . import kernels

    checks.support.backward(q, k, v, out, lse, selection, params)
    dq, dk, dv = _empty_gradients(q, k, v)
    if dk.numel():
        q, k, own = pairs.arranged(q, k, params)
        workspace = q.new_empty(kernels.backward_workspace(q, k, v, own), dtype=torch.uint8)
        if attn_sink is not None:
            lse, dlse = sinks.folded(lse, dlse, attn_sink)
        kernels.backward(dout, dlse, q, k, v, out, lse, selection, dq, dk, dv, workspace, own)
    return pairs.from_halves(dq, params), pairs.from_halves(dk, params), dv


@backward.register_fake
def _(
    dout, dlse, q, k, v, out, lse, selection, attn_sink=None, rope_inv_freq=None, *, backend, deterministic=False,
    **tree,
):  # fmt: skip
    tree = {**tree, "attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    checks.tree.forward(q, k, v, backend=backend, op="backward", **tree)
    return _empty_gradients(q, k, v)


@torch.library.custom_op(
    "htree_cuda::sink_gradient",
    mutates_args=(),
    schema='(Tensor dout, Tensor out, Tensor lse, Tensor attn_sink, *, str op="forward") -> Tensor',
)
@_without_autocast
def sink_gradient(dout, out, lse, attn_sink, *, op="forward"):
    """The gradient [H] of attn_sink, from what a forward returned: out [..., T, H, V], lse [..., T, H]. PyTorch
    operations on every device. op is the one whose gradient it is, which the refusal of a second one names."""
    return sinks.gradient(dout, out, lse, attn_sink)


@sink_gradient.register_fake
def _(dout, out, lse, attn_sink, *, op="forward"):
    return torch.empty_like(attn_sink)


def _save_for_backward(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, *output)
    others = ("need_selection", "save_selection")
    ctx.options = {name: x for name, x in keyword_only_inputs.items() if name not in others}
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # or autograd makes zeros as large as the selection


def _run_backward(ctx, dout, dlse, _dselection):
    q, k, v, attn_sink, rope_inv_freq, given, out, lse, selection = ctx.saved_tensors
    dout, dlse = (x.new_zeros(()).expand_as(x) if dx is None else dx for x, dx in ((out, dout), (lse, dlse)))
    tensors = (attn_sink, rope_inv_freq)
    tree = {name: x for name, x in ctx.options.items() if name != "deterministic"}
    tree |= {"rope_inv_freq": rope_inv_freq}
    if given is not None:
        selection = given
    elif selection.shape[0] != _layers(k, checks.tree.forward(q, k, v, **tree)) - 1:
        selection = torch.ops.htree_cuda.forward(q, k, v, *tensors, need_selection=True, **ctx.options)[2]
    grads = torch.ops.htree_cuda.backward(dout, dlse, q, k, v, out, lse, selection, *tensors, **ctx.options)
    needs_sink = attn_sink is not None and ctx.needs_input_grad[3]
    return *grads, torch.ops.htree_cuda.sink_gradient(dout, out, lse, attn_sink) if needs_sink else None, None, None


def _refuse_double_backward(op: str) -> NoReturn:
    raise RuntimeError(f"{op}: second derivatives (double backward) are not supported")


def _no_double_backward(op: str) -> Callable:
    def refuse(ctx, *grads):
        _refuse_double_backward(op)

    return refuse


def _save_op(ctx, inputs, keyword_only_inputs, output):
    ctx.op = keyword_only_inputs["op"]


torch.library.register_autograd("htree_cuda::forward", _run_backward, setup_context=_save_for_backward)
torch.library.register_autograd("htree_cuda::backward", _no_double_backward("forward"))
torch.library.register_autograd(
    "htree_cuda::sink_gradient", lambda ctx, *grads: _refuse_double_backward(ctx.op), setup_context=_save_op
)


# ----------------------------------------------------------------------------------------- attention over an index list

_LIST_SCHEMA = "float? sm_scale, SymInt[]? q_start, SymInt k_stride, float lse_base, str backend"


def _with_batch(params: ListParams | IndexerParams, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors with a batch dimension, which a call without one gets here."""
    return [x if x is None or params.batched else x[None] for x in tensors]


def _numbers(params: ListParams) -> dict:
    return {name: getattr(params, name) for name in ("sm_scale", "q_start", "k_stride", "lse_base")}


@torch.library.custom_op(
    "htree_cuda::attn_dist",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor indices, Tensor lse, Tensor? topk_length, *, {_LIST_SCHEMA}) -> Tensor",
)
@_without_autocast
def attn_dist(q, k, indices, lse, topk_length, **options):
    """[ceil(h_q / 64), s_q, topk] (batched: a leading B), a fresh tensor. Contract: `api.attn_dist`."""
    params = checks.lists.attn_dist(q, k, indices, lse, topk_length, **options)
    q, k, indices, lse, topk_length = _with_batch(params, q, k, indices, lse, topk_length)
    if _use_torch("attn_dist", q, options["backend"]):
        out = torch_lists.attn_dist(q, k, indices, lse, topk_length=topk_length, **_numbers(params))
    else:
        from . import kernels

        checks.support.attn_dist(q, k, indices, lse, topk_length, params.sm_scale)
        out = lse.new_empty(q.shape[0], (q.shape[2] + 63) // 64, q.shape[1], indices.shape[3])
        if out.numel():
            kernels.attn_dist(q, k, indices, lse, out, topk_length=topk_length, **_numbers(params))
    return out if params.batched else out[0]


@attn_dist.register_fake
def _(q, k, indices, lse, topk_length, **options):
    checks.lists.attn_dist(q, k, indices, lse, topk_length, **options)
    groups = (q.shape[-2] + 63) // 64
    return q.new_empty(*q.shape[:-3], groups, q.shape[-3], indices.shape[-1], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op(
    "htree_cuda::sparse_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, *, SymInt d_v, "
    f"{_LIST_SCHEMA}, bool deterministic=False) -> (Tensor, Tensor)",
)
@_without_autocast
def sparse_attention(q, kv, indices, topk_length, attn_sink, *, d_v, deterministic=False, **options):
    """(out [s_q, h_q, d_v], lse [s_q, h_q]) (batched: a leading B). Contract: `api.sparse_attention`. deterministic is
    the backward's; the forward always is."""
    params = checks.lists.sparse_attention(q, kv, indices, topk_length, attn_sink, d_v=d_v, **options)
    q, kv, indices, topk_length = _with_batch(params, q, kv, indices, topk_length)
    numbers = {"topk_length": topk_length, "attn_sink": attn_sink, **_numbers(params)}
    if _use_torch("sparse_attention", q, options["backend"]):
        results = torch_lists.sparse_attention(q, kv, indices, d_v=d_v, **numbers)
    else:
        from . import kernels

        checks.support.sparse_attention(q, kv, indices, topk_length, attn_sink, params.sm_scale, d_v)
        results = q.new_empty(*q.shape[:-1], d_v), q.new_empty(q.shape[:-1], dtype=torch.float32)
        if results[0].numel():
            workspace = q.new_empty(kernels.sparse_attention_workspace(q, indices), dtype=torch.uint8)
            kernels.sparse_attention(q, kv, indices, *results, workspace, **numbers)
    return results if params.batched else tuple(x[0] for x in results)


@sparse_attention.register_fake
def _(q, kv, indices, topk_length, attn_sink, *, d_v, deterministic=False, **options):
    checks.lists.sparse_attention(q, kv, indices, topk_length, attn_sink, d_v=d_v, **options)
    return q.new_empty(*q.shape[:-1], d_v), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op(
    "htree_cuda::sparse_attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor dlse, Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    f"Tensor out, Tensor lse, *, SymInt d_v, {_LIST_SCHEMA}, bool deterministic=False) -> (Tensor, Tensor, Tensor)",
)
@_without_autocast
def sparse_attention_backward(
    dout, dlse, q, kv, indices, topk_length, attn_sink, out, lse, *, d_v, deterministic=False, **options
):
    """(dq, dkv, dsink) of `sparse_attention`; dsink has size 0 without a sink. Nothing is taped: it gathers again."""
    op = "sparse_attention_backward"
    params = checks.lists.sparse_attention(q, kv, indices, topk_length, attn_sink, d_v=d_v, op=op, **options)
    checks.lists.sparse_attention_backward(dout, dlse, q, out, lse, d_v=d_v)
    tensors = _with_batch(params, dout, dlse, q, kv, indices, out, lse)
    numbers = {"topk_length": _with_batch(params, topk_length)[0], "attn_sink": attn_sink, **_numbers(params)}
    if _use_torch(op, q, options["backend"]):
        dq, dkv, dsink = torch_lists.sparse_attention_backward(*tensors, **numbers, deterministic=deterministic)
    else:
        dq, dkv, dsink = _sparse_backward_kernel(*tensors, **numbers, deterministic=deterministic)
    return (dq, dkv, dsink) if params.batched else (dq[0], dkv[0], dsink)


def _sparse_backward_kernel(dout, dlse, q, kv, indices, out, lse, *, deterministic, **numbers):
    from . import kernels

    attn_sink = numbers["attn_sink"]
    rule = (numbers["topk_length"], attn_sink, numbers["sm_scale"], out.shape[3])
    checks.support.sparse_attention(q, kv, indices, *rule, op="sparse_attention_backward")
    if not checks.support.loads_by_tma(dout):
        dout = dout.contiguous()  # a gradient that autograd expanded, such as that of a sum
    dq, dkv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv))
    dsink = lse.new_empty(0 if attn_sink is None else attn_sink.shape[0])
    if dq.numel() or dkv.numel() or dsink.numel():
        size = kernels.sparse_attention_backward_workspace(q, kv, attn_sink, deterministic)
        workspace = q.new_empty(size, dtype=torch.uint8)
        kernels.sparse_attention_backward(
            dout, dlse, q, kv, indices, out.contiguous(), lse.contiguous(), dq, dkv, dsink, workspace, **numbers,
            deterministic=deterministic,
        )  # fmt: skip
    return dq, dkv, dsink


@sparse_attention_backward.register_fake
def _(dout, dlse, q, kv, indices, topk_length, attn_sink, out, lse, *, d_v, deterministic=False, **options):
    op = "sparse_attention_backward"
    checks.lists.sparse_attention(q, kv, indices, topk_length, attn_sink, d_v=d_v, op=op, **options)
    checks.lists.sparse_attention_backward(dout, dlse, q, out, lse, d_v=d_v)
    dq, dkv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, kv))
    return dq, dkv, lse.new_empty(0 if attn_sink is None else attn_sink.shape[0])


def _save_lists(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.options = keyword_only_inputs


def _run_lists_backward(ctx, dout, dlse):
    dq, dkv, dsink = torch.ops.htree_cuda.sparse_attention_backward(dout, dlse, *ctx.saved_tensors, **ctx.options)
    return dq, dkv, None, None, dsink if ctx.needs_input_grad[4] else None


torch.library.register_autograd("htree_cuda::sparse_attention", _run_lists_backward, setup_context=_save_lists)
torch.library.register_autograd("htree_cuda::sparse_attention_backward", _no_double_backward("sparse_attention"))
