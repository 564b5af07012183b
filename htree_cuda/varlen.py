"""`forward_varlen`: packed sequences; and `forward` where the rows of a batch have lengths of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, ops_varlen  # noqa: F401  (importing ops_varlen registers its ops)
from .autocast import autocast


def _call(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple, tensors: tuple, maxima: tuple[int, int], options: dict[str, Any],
    flags: tuple[bool, bool],
):  # fmt: skip
    """The op, as `api.forward` calls its own; tensors are attn_sink, rope_inv_freq and selection, flags
    return_lse and return_selection."""
    q, k, v = autocast(q, k, v)
    differentiable = (q, k, v, *(x for x in tensors[:1] if x is not None))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in differentiable)
    deterministic, save_selection = options.pop("deterministic"), options.pop("save_selection")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    exporting = getattr(torch.compiler, "is_exporting", bool)  # newer than the oldest PyTorch that this runs on
    if save_selection == "auto" and exporting():
        save_selection = False  # as in `api.forward`
    save_mode = checks.common.SAVE_SELECTION[save_selection if needs_grad else False]
    return_lse, return_selection = flags
    out, lse, chosen = torch.ops.htree_cuda.forward_varlen(
        q, k, v, *lengths, *tensors, max_seqlen_q=maxima[0], max_seqlen_k=maxima[1], need_selection=return_selection,
        **options, deterministic=deterministic, save_selection=save_mode,
    )  # fmt: skip
    chosen = chosen if tensors[2] is None else tensors[2]
    extra = ([lse] if return_lse else []) + ([chosen] if return_selection else [])
    return (out, *extra) if extra else out


def ragged(
    q: Tensor, k: Tensor, v: Tensor, q_start, seqused_q, seqused_k, tensors: tuple, options: dict[str, Any],
    flags: tuple[bool, bool],
):  # fmt: skip
    """`api.forward` with seqused_k, seqused_q or several q_start; options and flags are checked."""
    op = "forward"
    for name, x, dims in (("q", q, "T_q"), ("k", k, "T")):
        checks.common.dimensions(op, name, x, ("B", dims, "H" if name == "q" else "H_kv", "K"))
    B, T_q, T = q.shape[0], q.shape[1], k.shape[1]
    if q_start is not None and not isinstance(q_start, Tensor):
        one = isinstance(q_start, (int, torch.SymInt))  # asked first, as in `api.forward`
        several = not one and (isinstance(q_start, Sequence) or getattr(q_start, "ndim", 0) == 1)
        starts = checks.varlen.start_numbers(op, q_start if several else [q_start] * B, B, T_q, T)
        if len(set(starts)) == 1:
            q_start = torch.full((B,), starts[0], dtype=torch.int32, device=q.device)
        else:
            q_start = torch.tensor(starts, dtype=torch.int32, device=q.device)
    for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if x is not None:
            checks.common.tensor(op, name, x)
    return _call(q, k, v, (None, None, seqused_q, seqused_k, q_start), tensors, (T_q, T), options, flags)


def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
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
) -> Tensor | tuple[Tensor, ...]:
    """`forward` of sequences of different lengths that lie packed one behind another.

    Each sequence has a tree of its own, and no query sees another sequence.

    The order of the positional arguments is that of FlashAttention's ``flash_attn_varlen_func``. The queries of a
    sequence are its last positions: query ``j`` of ``Tq_i`` stands at ``Tk_i - Tq_i + j``.

    Args:
        q: [total_q, H, K] float16, bfloat16, float32 or float64; sequence ``i`` has the rows ``cu_seqlens_q[i] ..
            cu_seqlens_q[i + 1] - 1``. K even.
        k: [total_k, H_kv, K], dtype of q, rows by cu_seqlens_k. Not rotated: RoPE is part of the operation.
        v: [total_k, H_kv, V], dtype of q.
        cu_seqlens_q: [N + 1] int32 on the device of q, begins at 0 and does not decrease; lengths of 0 are legal, and
            rows at and past its last entry are padding, which is never read. It is not checked; whatever it holds, no
            access is out of bounds.
        cu_seqlens_k: [N + 1] int32, likewise; for documents of a training batch the same tensor.
        max_seqlen_q: int >= 0, at least the largest number of queries of a sequence: a bound for grids and workspace.
            Results of a longer sequence are unspecified.
        max_seqlen_k: int >= 0, likewise of keys; the number of layers follows from it.
        compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, strict_causal, return_lse,
            return_selection, backend, deterministic, save_selection, rope_inv_freq, rope_dim, rope_interleaved,
            attn_sink, softcap: as in `forward`.
        selection: [L-1, total_q, H_kv, top_k] int32, as return_selection gives it, in place of choosing; default None.

    Returns:
        out [total_q, H, V] in the dtype of q; or a tuple (out[, lse][, selection]).
        lse: [total_q, H] float32 (float64 for float64 inputs).
        selection: [L-1, total_q, H_kv, top_k] int32, nodes counted within the sequence; L is the number of layers of
            max_seqlen_k tokens, and layers above those of a shorter sequence list all nodes up to the query's own.
        A query without a key (of a sequence with more queries than keys, the first ones) and padding give out 0, lse
        -inf, selection -1 and gradients of 0.

    Raises:
        TypeError, ValueError, UnsupportedError: as `forward`.
        ValueError: with HTREE_CUDA_CHECK=1 in the environment, where a length breaks a rule above; the message names
            sequence and value. The check reads the lengths, which waits for the device.

    Notes:
        Each sequence's out, lse, selection and dq are those of `forward` on it alone, from the kernels bit for bit
        where that call has more than one query; they depend neither on other sequences nor on padding nor on the order
        in the pack. dk and dv are equal up to the order of their sums.
        The kernels read no length on the host, forward and backward. The PyTorch backend runs sequences of one shape as
        a batch, one batch after another, and reads the lengths on the host.
        Gradients, determinism, memory, autocast: as `forward`.

    Example:
        >>> q, k, v = torch.randn(300, 8, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
        >>> cu = torch.tensor([0, 100, 117, 300], dtype=torch.int32)
        >>> out = htree_cuda.forward_varlen(q, k, v, cu, cu, 183, 183, top_k_per_layer=32)

    Source: docs/guides/packed.md; the form of a packed batch is FlashAttention's.
    """
    op = "forward_varlen"
    options = {
        "compression_rate": compression_rate, "top_k_per_layer": top_k_per_layer, "max_top_nodes": max_top_nodes,
        "scale": scale, "rope_base": rope_base, "strict_causal": strict_causal, "backend": backend,
        "deterministic": deterministic, "save_selection": save_selection, "rope_inv_freq": rope_inv_freq,
        "rope_dim": rope_dim, "rope_interleaved": rope_interleaved, "attn_sink": attn_sink, "softcap": softcap,
    }  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if selection is not None:
        tensors["selection"] = selection
    for name, x in tensors.items():
        checks.common.tensor(op, name, x)
    maxima = (
        checks.varlen.maximum(op, "max_seqlen_q", max_seqlen_q),
        checks.varlen.maximum(op, "max_seqlen_k", max_seqlen_k),
    )
    options = checks.tree.tree_option_types(op, options)
    for name, flag in (("return_lse", return_lse), ("return_selection", return_selection)):
        checks.common.boolean(op, name, flag)
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, None)
    flags = (return_lse, return_selection)
    return _call(q, k, v, lengths, (attn_sink, rope_inv_freq, selection), maxima, options, flags)
