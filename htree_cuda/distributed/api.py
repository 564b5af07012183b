"""The public functions of `htree_cuda.distributed`: contracts, checks, defaults."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks, ops
from ..autocast import autocast
from . import agreement
from .attention import Attention, Call
from .exchange import Gathered, reduce, staging
from .placement import Placement


def _place(op: str, group: object, layout: object) -> tuple[dist.ProcessGroup, Placement]:
    group = checks.distributed.group(op, group)
    checks.distributed.layout(op, layout)
    return group, Placement(layout, dist.get_rank(group), dist.get_world_size(group))


def positions(T: int, group, layout: str = "zigzag", *, device: torch.device | str | None = None) -> Tensor:
    """The positions in the sequence of the tokens that this rank has, in the order in which it has them.

    Args:
        T: int, tokens of the whole sequence; a multiple of ``ranks`` (layout "contiguous") or ``2 * ranks`` ("zigzag"),
            at least two tokens for each of those parts.
        group: torch.distributed process group, or `DeviceMesh` of one dimension, whose ranks share the sequence.
        layout: "contiguous": rank ``i`` has the tokens ``i * T / ranks ..``; "zigzag" (default): of ``2 * ranks`` equal
            parts it has the parts ``i`` and ``2 * ranks - 1 - i``, so that causal work is balanced.
        device: of the result; default: the CPU.

    Returns:
        [T / ranks] int64, ascending.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; the message names the rule and the value.

    Notes:
        No communication. Position embeddings that a model adds itself, and targets, need it; htree attention has
        none (RoPE counts places in lists).

    Example:
        >>> where = htree_cuda.distributed.positions(4096, group)

    Source: docs/guides/context_parallel.md; the zigzag layout is that of Megatron-LM's context parallelism.
    """
    op = "positions"
    group, place = _place(op, group, layout)
    T = checks.common.integer(op, "T", T)
    checks.distributed.length(op, "T", T, place.ranks, layout)
    n = T // place.parts
    starts = torch.tensor([place.part(stage) * n for stage in range(place.stages)], device=device)
    return (starts[:, None] + torch.arange(n, device=device)).flatten()


def shard(x: Tensor, dim: int, group, layout: str = "zigzag") -> Tensor:
    """This rank's tokens of a tensor that every rank has whole.

    Args:
        x: any shape and dtype; dimension ``dim`` is the sequence.
        dim: int, -x.dim() .. x.dim() - 1.
        group, layout: as in `positions`, whose rules hold for the size of dimension ``dim``.

    Returns:
        x with ``dim`` cut to the rank's share, contiguous, the tokens in the order of `positions`.

    Raises:
        TypeError, ValueError: as `positions`.

    Notes:
        No communication. Differentiable: each rank's gradient of x holds its own tokens and zeros.

    Example:
        >>> own = htree_cuda.distributed.shard(tokens, 1, group)  # [B, T] -> [B, T / ranks]

    Source: docs/guides/context_parallel.md.
    """
    op = "shard"
    checks.common.tensor(op, "x", x)
    _, place = _place(op, group, layout)
    dim = checks.distributed.dimension(op, x, checks.common.integer(op, "dim", dim))
    checks.distributed.length(op, f"dimension {dim} of x", x.shape[dim], place.ranks, layout)
    n = x.shape[dim] // place.parts
    return torch.cat([x.narrow(dim, place.part(stage) * n, n) for stage in range(place.stages)], dim).contiguous()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup, place: Placement) -> Tensor:
        ctx.dim, ctx.group, ctx.place, ctx.shape = dim, group, place, x.shape
        rows = x.movedim(dim, 0)
        whole = Gathered(place, group, [rows.reshape(rows.shape[0], 1, -1)], place.seen(False)).start()
        whole.ready(place.stages - 1)
        found = whole.whole[0].reshape(place.ranks * rows.shape[0], *rows.shape[1:]).movedim(0, dim).contiguous()
        return found.clone() if found.data_ptr() == x.data_ptr() else found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dwhole: Tensor):
        if dwhole.numel() == 0:
            return dwhole.new_zeros(ctx.shape), None, None, None
        rows = dwhole.movedim(ctx.dim, 0)
        sums = [rows.reshape(1, rows.shape[0], 1, -1).contiguous()]
        result = rows.new_empty(ctx.shape[ctx.dim], 1, sums[0].shape[3])
        received = staging(ctx.place, sums[0], rows.shape[0] // ctx.place.parts, sums[0].shape[3])
        reduce(ctx.place, ctx.group, sums, [result], ctx.place.seen(False), received).wait(dwhole)
        return result.reshape(ctx.shape[ctx.dim], *rows.shape[1:]).movedim(0, ctx.dim), None, None, None


@torch.compiler.disable
def unshard(x: Tensor, dim: int, group, layout: str = "zigzag") -> Tensor:
    """The whole of a tensor of which every rank has its share: the inverse of `shard`.

    Args:
        x: any shape and dtype, alike on all ranks; dimension ``dim`` holds this rank's tokens.
        dim: int, -x.dim() .. x.dim() - 1.
        group, layout: as in `positions`.

    Returns:
        x with dimension ``dim`` times ``ranks``, the tokens in their order, on every rank.

    Raises:
        TypeError, ValueError: as `positions`.

    Notes:
        Every rank of the group must make the call. Differentiable: the gradient is that of the sum of the losses of
        all ranks, added in the order of ranks, so a loss that all ranks compute alike counts once for each.

    Example:
        >>> logits = htree_cuda.distributed.unshard(own, 1, group)  # [B, T / ranks, V] -> [B, T, V]

    Source: docs/guides/context_parallel.md.
    """
    op = "unshard"
    checks.common.tensor(op, "x", x)
    group, place = _place(op, group, layout)
    dim = checks.distributed.dimension(op, x, checks.common.integer(op, "dim", dim))
    T = place.ranks * x.shape[dim]
    checks.distributed.length(op, f"T (dimension {dim} of x, times {place.ranks} ranks)", T, place.ranks, layout)
    return _Unshard.apply(x, dim, group, place)


@torch.compiler.disable
def context_parallel_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group,
    layout: str = "zigzag",
    compression_rate: int = 16,
    top_k_per_layer: int = 512,
    max_top_nodes: int | None = None,
    scale: float | None = None,
    rope_base: float | None = checks.rotation.DEFAULT_BASE,
    strict_causal: bool = True,
    return_lse: bool = False,
    return_selection: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    save_selection: bool | str = "auto",
    rope_inv_freq: Tensor | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
    attn_sink: Tensor | None = None,
    softcap: float = 0.0,
    selection: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`htree_cuda.forward` of sequences whose tokens lie on several ranks, a share of each sequence on each.

    Every rank of the group makes the call with its own tokens and gets the results of its own queries. Keys and values
    are gathered, since any query may select any earlier token. In the zigzag layout the second of two ranks lends some
    per cent of its queries to the first, which has less work, and gets their results back.

    Args:
        q: [B, T / ranks, H, K] float16, bfloat16, float32 or float64, this rank's tokens of a sequence of T, in the
            order of `positions`; T and layout keep the rules there. With cu_seqlens [total / ranks, H, K].
        k: [B, T / ranks, H_kv, K], dtype of q; with cu_seqlens [total / ranks, H_kv, K].
        v: [B, T / ranks, H_kv, V], dtype of q; with cu_seqlens [total / ranks, H_kv, V].
        group: torch.distributed process group (NCCL for CUDA tensors, gloo for CPU tensors), or `DeviceMesh` of one
            dimension, whose ranks share the sequence.
        layout: "zigzag" (default) or "contiguous", as in `positions`.
        compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, strict_causal, return_lse,
            return_selection, backend, deterministic, save_selection, rope_inv_freq, rope_dim, rope_interleaved,
            attn_sink, softcap: as in `htree_cuda.forward`, alike on all ranks.
        selection: [L-1, B, T / ranks, H_kv, top_k] int32, one that an earlier call returned for the same tokens, to be
            replayed, as in `htree_cuda.forward`; default None. Not with cu_seqlens.
        cu_seqlens: [N + 1] int32 on the device of q, where each of N packed sequences begins and the last one ends, as
            in `htree_cuda.forward_varlen`, of the pack of all ranks and alike on them; a sequence may span ranks.
            Needs layout "contiguous", and strict_causal on more than one rank. Default None: nothing is packed.
        max_seqlen: int, with cu_seqlens: at least the longest sequence.

    Returns:
        out [B, T / ranks, H, V] in the dtype of q; or a tuple (out[, lse][, selection]).
        lse: [B, T / ranks, H] float32 (float64 for float64 inputs).
        selection: [L-1, B, T / ranks, H_kv, top_k] int32, nodes of the whole sequence, L its number of layers.
        With cu_seqlens the first two dimensions are one, [total / ranks], and padding is as in `forward_varlen`.

    Raises:
        TypeError, ValueError, UnsupportedError: as `htree_cuda.forward`.
        ValueError: on every rank, where ranks disagree on a shape, a dtype or an argument, or one of them raised; this
            is found in the first call of a group, and in every call with HTREE_CUDA_CHECK=1 in the environment (which
            waits for the device). In other calls ranks that disagree wait until the time-out of the group, or, where
            the sizes of what they exchange are equal, take each other's numbers.

    Notes:
        Numbers: out, lse and selection are those of one device, from the kernels bit for bit.
        Gradients: of out and lse with respect to q, k, v and attn_sink. Those of k and v are for the sum of the losses
            of all ranks; the sums over ranks are made in float32 (float64) in the order of ranks, so that they are
            repeatable where ``deterministic`` makes those of one rank so, and round differently than on one device.
            That of attn_sink is partial, as are those of all parameters before q, k and v: sum them over the group, as
            over any group that splits the tokens of a batch. Every rank must run its backward where one does.
        Memory: beyond what `htree_cuda.forward` takes for these queries over T tokens, one gathered k and v, not kept
            for the backward, which gathers them again; there also dk and dv in float32 for as many KV heads as 512 MiB
            hold (one at least); at most 128 MiB of what other ranks added to them; and what borrowed queries have,
            of which those of the backward keep q, out and lse, and the selection where it is kept.
        Time: keys and values travel beside the kernels that do not need them, sums of gradients beside
            those of the next KV heads. With return_selection or a selection to replay no query is lent.
        torch.compile: the graph breaks at the call.

    Example:
        >>> own = [htree_cuda.distributed.shard(x, 1, group) for x in (q, k, v)]
        >>> out = htree_cuda.distributed.context_parallel_forward(*own, group=group, top_k_per_layer=32)

    Source: docs/guides/context_parallel.md.
    """
    op = "context_parallel_forward"
    options = {
        "compression_rate": compression_rate, "top_k_per_layer": top_k_per_layer, "max_top_nodes": max_top_nodes,
        "scale": scale, "rope_base": rope_base, "strict_causal": strict_causal, "backend": backend,
        "deterministic": deterministic, "save_selection": save_selection, "rope_inv_freq": rope_inv_freq,
        "rope_dim": rope_dim, "rope_interleaved": rope_interleaved, "attn_sink": attn_sink, "softcap": softcap,
    }  # fmt: skip
    group = checks.distributed.group(op, group)
    due, call, error = agreement.is_due(group), None, None
    try:
        flags = (return_lse, return_selection)
        q, k, v, call = _checked(op, q, k, v, group, layout, options, flags, selection, cu_seqlens, max_seqlen)
        facts = _facts(q, k, v, layout, options, call) if due else {}
    except Exception as found:  # whatever it is, the other ranks are told
        error, facts = found, {}
    if due:
        agreement.check(op, group, q, facts, error)
    elif error is not None:
        raise error
    packed, given = cu_seqlens is not None, selection
    out, lse, selection = Attention.apply(*(x[None] if packed else x for x in (q, k, v)), attn_sink, call)
    if packed:
        out, lse, selection = out[0], lse[0], selection[:, 0]
    extra = ([lse] if return_lse else []) + ([selection if given is None else given] if return_selection else [])
    return (out, *extra) if extra else out


def _checked(
    op, q, k, v, group, layout, options, flags, given, cu_seqlens, max_seqlen
) -> tuple[Tensor, Tensor, Tensor, Call]:  # fmt: skip
    """Everything that a rank can find out by itself; the tensors as autocast has them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.common.tensor(op, name, x)
    checks.distributed.layout(op, layout)
    place = Placement(layout, dist.get_rank(group), dist.get_world_size(group))
    attn_sink, rope_inv_freq = options["attn_sink"], options["rope_inv_freq"]
    options = checks.tree.tree_option_types(op, options)
    # 2 and 2.0 are the same call, also to the other ranks.
    options |= {name: float(x) for name in ("scale", "rope_base") if isinstance(x := options[name], int)}
    if given is not None:
        checks.common.tensor(op, "selection", given)
    for name, flag in zip(("return_lse", "return_selection"), flags, strict=True):
        checks.common.boolean(op, name, flag)
    q, k, v = autocast(q, k, v)
    differentiable = [q, k, v] if attn_sink is None else [q, k, v, attn_sink]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    tree = {name: x for name, x in options.items() if name not in ("deterministic", "save_selection")}
    tensors = {"attn_sink": attn_sink, "rope_inv_freq": rope_inv_freq}
    if cu_seqlens is None:
        if max_seqlen is not None:
            checks.common.fail(op, "max_seqlen belongs to cu_seqlens, which was not given", max_seqlen)
        params = checks.tree.forward(q, k, v, q_start=None, op=op, **tree, **tensors)
        if not ops._use_torch("forward", q, options["backend"]):
            checks.support.forward(q, k, v, params, op)
        if given is not None:
            whole = k[:, :1].expand(-1, place.ranks * k.shape[1], -1, -1)  # for its shape, which says how many layers
            checks.tree.given_selection(op, given, q, whole, params)
    else:
        checks.common.tensor(op, "cu_seqlens", cu_seqlens)
        max_seqlen = checks.varlen.maximum(op, "max_seqlen", max_seqlen)
        checks.distributed.packed_layout(op, layout)
        checks.distributed.packed_causality(op, options["strict_causal"], place.ranks)
        if given is not None:
            checks.common.fail(op, "selection belongs to sequences that are not packed", f"shape {tuple(given.shape)}")
        lengths = (cu_seqlens, cu_seqlens, None, None, None)
        maxima = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
        packed = checks.varlen.forward(q, k, v, *lengths, **maxima, op=op, **tree, **tensors)
        if not ops._use_torch("forward_varlen", q, options["backend"]):
            checks.varlen.kernel(q, k, v, packed, op=op)
        if checks.common.checks_values():
            total = place.ranks * k.shape[0]
            values = cu_seqlens.tolist()
            checks.varlen.cumulative(op, "cu_seqlens", values, total, max_seqlen, "total", "max_seqlen")
    checks.rotation.finite(op, rope_inv_freq)
    checks.distributed.tokens(op, q, k, place.ranks, layout, 1 if cu_seqlens is None else 0)
    deterministic = options["deterministic"]
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    keep = checks.common.SAVE_SELECTION[options["save_selection"] if needs_grad else False]
    call = Call(
        place, group, tree, deterministic, keep, flags[1] and given is None, needs_grad, rope_inv_freq, cu_seqlens,
        max_seqlen, given,
    )  # fmt: skip
    return q, k, v, call


def _facts(q, k, v, layout, options, call) -> dict:
    """What must be alike on all ranks; of small tensors every number."""
    tensors = {"q": q, "k": k, "v": v}
    small = {"attn_sink": options["attn_sink"], "rope_inv_freq": call.rope_inv_freq, "cu_seqlens": call.cu_seqlens}
    return {
        **{f"the shape of {name}": tuple(x.shape) for name, x in tensors.items()}, "dtype": q.dtype,
        "device": q.device.type, "layout": layout, **call.tree,
        **{name: None if x is None else agreement.digest(x) for name, x in small.items()},
        "deterministic": call.deterministic, "return_selection": call.need_selection,
        "selection": call.given is not None, "max_seqlen": call.max_seqlen, "save_selection": options["save_selection"],
        "whether a gradient is wanted": call.needs_grad,
    }  # fmt: skip
