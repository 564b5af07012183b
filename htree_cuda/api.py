"""The public functions: defaults, autocast, return conventions. Everything else happens in the ops (`ops.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, indexer, ops, varlen  # noqa: F401  (importing ops registers torch.ops.htree_cuda)
from .autocast import autocast as _autocast


def _one_each(op: str, q_start: object) -> bool:
    """Whether there is one start for every sequence: a list, or an array of NumPy."""
    if isinstance(q_start, (int, torch.SymInt)):  # torch.compile traces no question about an attribute of such an int
        return False
    if isinstance(q_start, Sequence):
        return not isinstance(q_start, (str, bytes))
    several = getattr(q_start, "ndim", 0) == 1
    if several and torch.compiler.is_compiling():  # which makes a tensor of an array, whose numbers nothing knows
        raise TypeError(f"{op}: q_start must be an int or a list of ints under torch.compile, got an array of NumPy")
    return several


def _starts(op: str, q_start: int | Sequence[int] | None, B: int | None) -> list[int] | None:
    """One start, or one for each of B batch elements (None: there is no batch), as the ops take them."""
    if q_start is None:
        return None
    if not _one_each(op, q_start):
        q_start = checks.common.integer(op, "q_start", q_start)
        if B == 0 and q_start < 0:
            checks.common.fail(op, "q_start must be at least 0", q_start)
        return [q_start]
    starts = [checks.common.integer(op, "q_start", start) for start in q_start]
    if B is not None and len(starts) != B:  # a list of one is no start of several elements
        checks.common.fail(op, f"q_start must be one int or a list of B ({B}) ints", f"{len(starts)} of them")
    return starts


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_start: int | Sequence[int] | Tensor | None = None,
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
    seqused_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    selection: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Hierarchical-tree sparse causal attention.

    Keys and values are mean-pooled into a tree with ``compression_rate`` children per node. Each query descends from
    the top: it scores the candidates of a layer (RoPE on their places in the candidate list), expands the ``top_k``
    most important ones into the next layer, and attends, in one softmax, to all nodes it did not expand and to the
    tokens it reached. The selection is shared by the query heads of a KV head, a group. With ``T <= max_top_nodes`` the
    result is ordinary dense causal attention with RoPE.

    Layouts are [B, T, H, D], sequence before heads, as in FlashAttention; an lse is a natural logarithm.

    Args:
        q: [B, T_q, H, K] float16, bfloat16, float32 or float64; queries at the positions
            ``q_start .. q_start + T_q - 1``; K even.
        k: [B, T, H_kv, K], dtype of q; H a multiple of H_kv; query head ``h`` uses KV head ``h // (H / H_kv)``.
            Not rotated: RoPE is part of the operation.
        v: [B, T, H_kv, V], dtype of q.
        q_start: int, 0 .. T - T_q, absolute position of the first query; default: the last T_q positions. Or one for
            each row of the batch: a list of B ints of -T_q .. T, or an int32 or int64 tensor [B] on the device of q;
            default then ``seqused_k - seqused_q``.
        compression_rate: int, power of two >= 2, children per node; default 16.
        top_k_per_layer: int, power of two >= 1, nodes expanded per layer; default 512.
        max_top_nodes: int, top_k .. top_k * compression_rate, upper bound on the nodes of the top layer;
            default top_k * compression_rate.
        scale: finite float, multiplies the scores; default K ** -0.5.
        rope_base: finite float > 0; None: no rotation; default 10000.
        strict_causal: bool; True (default) keeps the node that contains the query's position out of the softmax
            denominator of the importance, so that no later token can influence the selection. False includes it: the
            formula of the design documents, with a denominator for each head. It is not bitwise what upstream's
            published code selects, which scores with one maximum shared by the heads of a group: for groups of more
            than one head that selects other nodes (358 of 2,800 rows in a comparison with its ``naive.py``).
        return_lse: bool; also return lse; default False.
        return_selection: bool; also return the selected nodes; default False.
        backend: "auto" (default): CPU tensors use PyTorch operations, CUDA tensors the Hopper kernels or an error;
            "torch": PyTorch operations on any device.
        deterministic: bool; True: gradients are bitwise repeatable; default None: what
            ``torch.are_deterministic_algorithms_enabled()`` says at the call.
        save_selection: True keeps the selection for the backward; False has the backward run the forward once more,
            which selects the same nodes; "auto" (default) keeps it where it takes no more bytes than q and out
            together, ``4 (L-1) H_kv top_k <= H (K + V) * itemsize``, and never in a graph that torch.export makes.
        rope_inv_freq: [rope_dim / 2] float32 or float64, finite, on the device of q: pair m of position p is rotated
            by ``p * rope_inv_freq[m]``, in place of ``p * rope_base ** (-2 m / rope_dim)``; rope_base is then left
            alone. YaRN and NTK are such tables (YaRN's attention factor, squared, belongs into scale); default: None.
        rope_dim: int, even, 2 .. K, how many elements are rotated, the first ones; default K.
        rope_interleaved: bool; pairs are (2m, 2m + 1) instead of (m, m + rope_dim / 2); default False.
        attn_sink: [H] float32 (float64 for float64 inputs), natural units, any value: ``exp(attn_sink)`` is added to
            the softmax denominator of out, and neither to lse nor to the importance. -inf has no effect, +inf gives
            zeros, NaN gives NaN; default: None.
        softcap: must be 0. It is named only so that a model with soft-capped scores fails here and not in silence.
        seqused_k: [B] int32 on the device of q, 0 .. T, how many keys each row of the batch has, the first ones;
            default: T each. What lies behind them is never read. A value is not checked but brought into range.
        seqused_q: [B] int32, 0 .. T_q, likewise of queries; default: T_q each.
        selection: [L-1, B, T_q, H_kv, top_k] int32, as return_selection gives it, ascending, padded with -1; default
            None: chosen by importance. A given one is replayed: nothing is chosen, and scores are computed for leaves
            alone.

    Returns:
        out [B, T_q, H, V] in the dtype of q; or a tuple (out[, lse][, selection]).
        lse: [B, T_q, H] float32 (float64 for float64 inputs), natural log of the softmax denominator.
        selection: [L-1, B, T_q, H_kv, top_k] int32; entry ``l - 1`` holds the nodes expanded at layer ``l``,
        ascending, padded with -1; L is the number of layers. With a given selection it is that tensor.
        B = 0 or T_q = 0 give empty tensors. Every query attends at least to itself, so no row is empty, save padding:
        rows at and past seqused_q, and rows whose position is below 0 or at and past seqused_k, give out 0, lse -inf,
        selection -1 and gradients of 0.

    Raises:
        TypeError: an argument is not a tensor / number / bool. Numbers of NumPy are numbers.
        ValueError: a dtype, shape, range or device breaks a rule above; the message names the rule and the value.
        UnsupportedError: backend "auto" and CUDA tensors that the kernels do not cover; the message names the reason
            and the way out.

    Notes:
        Gradients: out and lse are differentiable with respect to q, k, v and attn_sink (the selection is a constant;
        rope_inv_freq has none). The backward
        descends again from the selection, 4 (L-1) B T_q H_kv top_k bytes, kept or selected again as save_selection
        says; the gradients are bitwise identical. With return_selection it is kept in any case: it is an output.
        Second derivatives raise.
        A given selection gives the same bits as the call that returned it, out, lse and gradients, so that rollouts and
        training agree, and several layers of a model may share one. Entries are trusted to be what a forward of the
        same shapes could return. Other content gives unspecified numbers: every query still expands
        ``min(top_k, n)`` of its own candidates, nothing is read out of range, and no later token reaches a query.
        Determinism: on CUDA, the PyTorch backend's dk and dv use atomic additions unless deterministic; everything
        else is bitwise repeatable.
        Speed: `python -m htree_cuda explain` shows which kernels run. The more query heads share a KV head, the faster:
        a group of 1 is the slowest, since a tensor core's tile is filled by the heads of a group.
        Memory: the PyTorch backend holds the tree (1 + 1/r + ... times k and v), plus a bounded chunk of temporaries;
        the kernels hold the tree, packed, and at most 384 MiB forward; backward see docs/kernels/htree_bwd.md.
        Support: what the kernels cover is the table in the README.
        Autocast: q, k, v are cast to the autocast dtype; attn_sink is not.
        Rotation: a float64 rope_inv_freq of ``rope_base ** (-2 * torch.arange(R // 2, dtype=torch.float64) / R)``, made
        on q's device, gives the bits of rope_base; a table on a GPU is not read by the host, so that what is not finite
        there gives NaN. With rope_interleaved, or rope_dim below K, the kernels work on a rearranged copy of q and k.
        A NaN or infinity reaches the output only where it is attended; later tokens never matter. A key whose score is
        -inf has the weight 0 or gives NaN.
        Rows of different lengths are right-padded: seqused_k says how many keys exist. `forward_varlen` takes them
        packed. Neither depends on its neighbours.
        Dropout and masks are not supported. For decoding, `TreeCache` keeps the tree.

    Example:
        >>> q = torch.randn(1, 4096, 8, 64); k, v = torch.randn(2, 1, 4096, 2, 64)
        >>> out, lse = htree_cuda.forward(q, k, v, top_k_per_layer=32, return_lse=True)

    Source: docs/algorithm.md; the algorithm comes from github.com/skywong14/htree.
    """
    op = "forward"
    options = {
        "compression_rate": compression_rate, "top_k_per_layer": top_k_per_layer, "max_top_nodes": max_top_nodes,
        "scale": scale, "rope_base": rope_base, "strict_causal": strict_causal, "backend": backend,
        "deterministic": deterministic, "save_selection": save_selection, "rope_inv_freq": rope_inv_freq,
        "rope_dim": rope_dim, "rope_interleaved": rope_interleaved, "attn_sink": attn_sink, "softcap": softcap,
    }  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.common.tensor(op, name, x)
    if selection is not None:
        checks.common.tensor(op, "selection", selection)
    several = isinstance(q_start, Tensor) or _one_each(op, q_start)
    if not several:
        q_start = checks.common.integer(op, "q_start", q_start, optional=True)
    options = checks.tree.tree_option_types(op, options)
    for name, flag in (("return_lse", return_lse), ("return_selection", return_selection)):
        checks.common.boolean(op, name, flag)
    if several or seqused_q is not None or seqused_k is not None:
        flags = (return_lse, return_selection)
        tensors = (attn_sink, rope_inv_freq, selection)
        return varlen.ragged(q, k, v, q_start, seqused_q, seqused_k, tensors, options, flags)
    q, k, v = _autocast(q, k, v)
    differentiable = [q, k, v] if attn_sink is None else [q, k, v, attn_sink]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    tree = {name: x for name, x in options.items() if name not in ("deterministic", "save_selection")}
    tree["q_start"] = q_start
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    exporting = getattr(torch.compiler, "is_exporting", bool)  # newer than the oldest PyTorch that this runs on
    if save_selection == "auto" and exporting():
        # What "auto" keeps depends on the number of layers, which would tie an exported graph to a range of lengths.
        save_selection = False
    save_mode = checks.common.SAVE_SELECTION[save_selection if needs_grad else False]
    out, lse, chosen = torch.ops.htree_cuda.forward(
        q, k, v, attn_sink, rope_inv_freq, selection, need_selection=return_selection, **tree,
        deterministic=deterministic, save_selection=save_mode,
    )  # fmt: skip
    if selection is not None:
        chosen = selection
    extra = ([lse] if return_lse else []) + ([chosen] if return_selection else [])
    return (out, *extra) if extra else out


def attn_dist(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    lse_base: float = 2,
    backend: str = "auto",
) -> Tensor:
    """Attention probabilities over a sparse index list, summed over groups of 64 heads.

    For each group of 64 query heads and each slot ``j`` of a query's index list, the sum over the group's heads of
    ``exp(<q, k[indices[j]]> * sm_scale - lse)``: the target of the indexer loss of DeepSeek Sparse Attention. It is
    not normalised, so partial sums over heads may be added across ranks.

    Args:
        q: [s_q, h_q, d_qk] float16, bfloat16, float32 or float64. Either no tensor or every tensor has a leading
            batch dimension B.
        k: [s_kv, 1, d_qk], dtype of q (multi-query attention: one KV head).
        indices: [s_q, 1, topk] int32, key rows of each query; anything outside ``[0, s_kv)`` is an invalid slot;
            a row named twice counts in each of its slots.
        lse: [s_q, h_q] float32 (float64 where q is), log-sum-exp of the *scaled* scores in base ``lse_base``.
        sm_scale: finite float, natural score scale; default d_qk ** -0.5.
        q_start: int >= 0, absolute position of query 0 (a list of B of them when batched); default None: no causal
            rule, k_stride is ignored.
        k_stride: int >= 1; key row i is visible to query s iff ``i <= (q_start + s + 1) // k_stride - 1``.
        topk_length: [s_q] int32; slots at and past it are invalid; default None: all slots count.
        lse_base: 2 or math.e (what `forward` and current FlashMLA return); default 2.
        backend: "auto" or "torch", as in `forward`.

    Returns:
        [ceil(h_q / 64), s_q, topk] float32 (float64 for float64 inputs), batched [B, ceil(h_q / 64), s_q, topk].
        Invalid slots hold 0; every element is written. A head with an infinite lse (of either sign) contributes 0, a
        NaN lse gives NaN in the valid slots of its group. It never requires grad.
        s_q = 0, topk = 0 or B = 0 give an empty tensor, s_kv = 0 gives zeros.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`.

    Notes:
        Deterministic. Keys that no valid slot names are never used, whatever they hold.
        Autocast: q and k are cast to the autocast dtype; lse is not.

    Example:
        >>> q, k = torch.randn(16, 8, 64), torch.randn(256, 1, 64)
        >>> indices = torch.randint(0, 256, (16, 1, 32), dtype=torch.int32)
        >>> s = torch.einsum("shd,skd->shk", q, k[indices[:, 0].long(), 0]) * 64**-0.5
        >>> dist = htree_cuda.attn_dist(q, k, indices, s.logsumexp(2), lse_base=math.e)  # rows sum to 8

    Source: the indexer loss of DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/algorithm.md.
    """
    op = "attn_dist"
    checks.common.backend_name(op, backend)
    for name, x in (("q", q), ("k", k), ("indices", indices), ("lse", lse)):
        checks.common.tensor(op, name, x)
    if topk_length is not None:
        checks.common.tensor(op, "topk_length", topk_length)
    sm_scale = checks.common.number(op, "sm_scale", sm_scale, optional=True)
    q_start = _starts(op, q_start, q.shape[0] if q.dim() == 4 else None)
    k_stride = checks.common.integer(op, "k_stride", k_stride)
    lse_base = checks.common.number(op, "lse_base", lse_base)
    q, k = _autocast(q, k)
    return torch.ops.htree_cuda.attn_dist(
        q.detach(),
        k.detach(),
        indices,
        lse.detach(),
        topk_length,
        sm_scale=sm_scale,
        q_start=q_start,
        k_stride=k_stride,
        lse_base=lse_base,
        backend=backend,
    )


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = 512,
    sm_scale: float | None = None,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    return_lse: bool = True,
    lse_base: float = 2,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-query attention over a list of keys per query, as in MLA with DeepSeek Sparse Attention.

    Each query attends, in one softmax, to the key rows that its list names. A row of ``kv`` is the key, and its first
    ``d_v`` numbers are the value. The lse is what `attn_dist` takes.

    Args:
        q: [s_q, h_q, d_qk] float16, bfloat16, float32 or float64. Either no tensor (attn_sink apart) or every tensor
            has a leading batch dimension B.
        kv: [s_kv, 1, d_qk], dtype of q (multi-query attention: one KV head).
        indices: [s_q, 1, topk] int32, key rows of each query; anything outside ``[0, s_kv)`` is an invalid slot;
            a row named twice counts in each of its slots.
        d_v: int, 1 .. d_qk; default 512.
        sm_scale: finite float, natural score scale; default d_qk ** -0.5.
        q_start, k_stride, topk_length: which slots count, as in `attn_dist`; default: all.
        attn_sink: [h_q] float32 (float64 where q is), natural units, any value: ``exp(attn_sink)`` is added to the
            softmax denominator of ``out``, never to ``lse``. -inf has no effect, +inf gives zeros, NaN gives NaN.
            Default None.
        return_lse: bool; False returns ``out`` alone.
        lse_base: 2 or math.e, the base of ``lse``; default 2, that of `attn_dist`.
        backend: "auto" or "torch", as in `forward`.
        deterministic: bool; True: the gradient of kv is bitwise repeatable; default None: what
            ``torch.are_deterministic_algorithms_enabled()`` says at the call.

    Returns:
        (out, lse), or out alone with ``return_lse=False``.
        out: [s_q, h_q, d_v] in the dtype of q, batched [B, s_q, h_q, d_v].
        lse: [s_q, h_q] float32 (float64 for float64 inputs), batched [B, s_q, h_q]: log-sum-exp of the scaled scores
        over the valid slots, without the sink.
        A query without a valid slot gets zeros, and lse -inf. s_q = 0 or B = 0 give empty tensors.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`.

    Notes:
        Gradients: out and lse are differentiable with respect to q, kv and attn_sink; a query without a valid slot
        contributes none. The backward gathers again; nothing but inputs and outputs is kept. Second derivatives raise.
        On CUDA, the gradient of kv uses atomic additions unless deterministic; everything else is bitwise repeatable.
        The backward kernel keeps the gradient of kv in float32 until it is complete (deterministic: in integers of 64
        bits, each row in multiples of a power of two of its own): 4 (8) bytes for each number of kv.
        A call of few queries cuts their lists into parts, by a rule of shapes: up to 17 MB of sums, and the bits of a
        query in a call of many are others.
        A key row that no valid slot names is never used, whatever it holds. A score that is not finite (a NaN or an
        infinity in the query's head or in a row that a valid slot names, or an overflow) makes out and lse of that
        query and head NaN.
        Autocast: q and kv are cast to the autocast dtype; attn_sink is not.

    Example:
        >>> q, kv = torch.randn(16, 8, 64), torch.randn(256, 1, 64)
        >>> indices = torch.randint(0, 256, (16, 1, 32), dtype=torch.int32)
        >>> out, lse = htree_cuda.sparse_attention(q, kv, indices, d_v=48)
        >>> dist = htree_cuda.attn_dist(q, kv, indices, lse)  # rows sum to 8

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "sparse_attention"
    checks.common.backend_name(op, backend)
    for name, x in (("q", q), ("kv", kv), ("indices", indices)):
        checks.common.tensor(op, name, x)
    for name, x in (("topk_length", topk_length), ("attn_sink", attn_sink)):
        if x is not None:
            checks.common.tensor(op, name, x)
    d_v = checks.common.integer(op, "d_v", d_v)
    sm_scale = checks.common.number(op, "sm_scale", sm_scale, optional=True)
    q_start = _starts(op, q_start, q.shape[0] if q.dim() == 4 else None)
    k_stride = checks.common.integer(op, "k_stride", k_stride)
    checks.common.boolean(op, "return_lse", return_lse)
    lse_base = checks.common.number(op, "lse_base", lse_base)
    q, kv = _autocast(q, kv)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    checks.common.boolean(op, "deterministic", deterministic)
    options = {
        "d_v": d_v, "sm_scale": sm_scale, "q_start": q_start, "k_stride": k_stride, "lse_base": lse_base,
        "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    out, lse = torch.ops.htree_cuda.sparse_attention(q, kv, indices, topk_length, attn_sink, **options)
    return (out, lse) if return_lse else out


def normalize_attn_dist(attn_dist: Tensor, *, group: torch.distributed.ProcessGroup | None = None) -> Tensor:
    """The target of the indexer loss: `attn_dist` summed over all heads, then divided by its sum over the slots.

    Args:
        attn_dist: [G, s_q, topk] or [B, G, s_q, topk] float32 or float64, as `attn_dist` returns it: a sum for each
            group of 64 heads.
        group: torch.distributed process group whose ranks hold the other heads of the same queries and lists (tensor
            parallelism); every rank of it must make the call, and all get the same result. Default None: all heads are
            here.

    Returns:
        [s_q, topk] or [B, s_q, topk], dtype of attn_dist, a fresh tensor: every query's slots sum to 1. A query whose
        slots are all 0 stays 0; one that holds a NaN or an infinity is NaN in all slots. It never requires grad.

    Raises:
        TypeError, ValueError: as `forward`.

    Notes:
        One all-reduce of [s_q, topk] numbers where a group is given. Plain PyTorch operations on any device.

    Example:
        >>> target = htree_cuda.normalize_attn_dist(dist)  # dist: [2, 16, 32] of 128 heads -> [16, 32]

    Source: the indexer loss of DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "normalize_attn_dist"
    checks.common.tensor(op, "attn_dist", attn_dist)
    checks.common.process_group(op, "group", group)
    checks.lists.normalize_attn_dist(attn_dist)
    return indexer.normalize_attn_dist(attn_dist.detach(), group)


def indexer_loss(
    logits: Tensor,
    attn_dist: Tensor,
    indices: Tensor,
    *,
    s_kv: int,
    q_start: int | Sequence[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """KL divergence of the indexer's softmax over the valid slots from the attention distribution.

    For each query, with ``target`` its row of attn_dist divided by the row's sum over the valid slots:
    ``sum over valid slots of target * (log(target) - log_softmax(logits))``.

    Args:
        logits: [s_q, topk] or [B, s_q, topk] float16, bfloat16, float32 or float64, the indexer's score of each slot.
        attn_dist: float32 or float64, either [s_q, topk] (batched [B, s_q, topk]), as `normalize_attn_dist` returns
            it, or [G, s_q, topk] (batched [B, G, s_q, topk]), as `attn_dist` does: it is summed over G. It need not be
            normalised: only its proportions count. Not negative.
        indices: [s_q, 1, topk] int32 (batched [B, s_q, 1, topk]), the list that attn_dist was computed on.
        s_kv: int >= 0, number of key rows.
        q_start, k_stride, topk_length: as given to `attn_dist`.
        reduction: "mean": over the queries that have a valid slot (0 where none has); "sum"; "none".

    Returns:
        float32 (float64 for float64 logits), a scalar, or [s_q] (batched [B, s_q]) with reduction "none".
        A query without a valid slot, and one whose target is 0 in all of them, gives 0 and no gradient; the second
        counts in the mean.

    Raises:
        TypeError, ValueError: as `forward`.

    Notes:
        Gradient: to logits alone, ``softmax(logits) - target`` times that of the result; attn_dist is a constant.
        Plain PyTorch operations on any device, so that torch.compile fuses them; deterministic.
        What an invalid slot holds, in logits or in attn_dist, never matters. A NaN in a valid slot gives NaN for its
        query. A logit of -inf in a valid slot whose target is not 0 gives +inf; where all are -inf the gradient is 0.

    Example:
        >>> logits = torch.randn(16, 32, requires_grad=True)
        >>> htree_cuda.indexer_loss(logits, dist, indices, s_kv=256).backward()

    Source: the indexer loss of DeepSeek-V3.2 (DeepSeek Sparse Attention), docs/guides/dsa.md.
    """
    op = "indexer_loss"
    for name, x in (("logits", logits), ("attn_dist", attn_dist), ("indices", indices)):
        checks.common.tensor(op, name, x)
    if topk_length is not None:
        checks.common.tensor(op, "topk_length", topk_length)
    s_kv = checks.common.integer(op, "s_kv", s_kv)
    q_start = _starts(op, q_start, logits.shape[0] if logits.dim() == 3 else None)
    k_stride = checks.common.integer(op, "k_stride", k_stride)
    starts = checks.lists.indexer_loss(
        logits, attn_dist, indices, topk_length, s_kv=s_kv, q_start=q_start, k_stride=k_stride, reduction=reduction
    )
    return indexer.indexer_loss(
        logits,
        attn_dist.detach(),
        indices,
        s_kv=s_kv,
        q_start=starts,
        k_stride=k_stride,
        topk_length=topk_length,
        reduction=reduction,
    )
