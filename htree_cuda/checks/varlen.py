"""Rules of packed and ragged calls: `forward_varlen`, and `forward` whose rows have lengths or starts of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..definition import accumulation_dtype, layer_sizes
from ..params import TreeParams, VarlenParams
from . import rotation, support
from .common import (
    MAX_INT32,
    backend_name,
    checks_values,
    dimensions,
    equal,
    fail,
    float_dtype,
    integer,
    returned,
    same_device,
    same_dtype,
    size,
    strided,
    tensor,
)
from .tree import even, tree_options

MAX_SEQUENCES = 2**27 - 1


def _lengths(
    op: str, q: Tensor, count: int, what: str, dtypes: Sequence[torch.dtype], first: str = "q",
    **tensors: Tensor | None,
) -> None:  # fmt: skip
    """One-dimensional tensors of `count` integers each, on the device of q, which the caller knows as `first`; None
    stands for one that was not given."""
    for name, x in tensors.items():
        if x is None:
            continue
        strided(op, **{name: x})
        dimensions(op, name, x, (what,))
        if x.dtype not in dtypes:
            fail(op, f"{name} must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}", x.dtype)
        equal(op, f"dimension 0 of {name}", x.shape[0], what, count)
        same_device(op, first, q, **{name: x})


def _heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    H, K, H_kv = q.shape[-2], q.shape[-1], k.shape[-2]
    size(op, "H_kv (dimension -2 of k)", H_kv)
    size(op, "K (dimension -1 of k)", k.shape[-1])
    size(op, "V (dimension -1 of v)", v.shape[-1])
    equal(op, "dimension -2 of v", v.shape[-2], "H_kv of k", H_kv)
    equal(op, "dimension -1 of k", k.shape[-1], "K of q", K)
    even(op, "K (dimension -1 of q)", K)
    if H_kv > H or H % H_kv:
        fail(op, f"H (dimension -2 of q) must be a positive multiple of H_kv ({H_kv})", H)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    starts: Tensor | None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    compression_rate: int,
    top_k_per_layer: int,
    max_top_nodes: int | None,
    scale: float | None,
    rope_base: float | None,
    strict_causal: bool,
    backend: str,
    attn_sink: Tensor | None = None,
    rope_inv_freq: Tensor | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
    op: str | None = None,
) -> VarlenParams:
    """Rules of ``htree_cuda::forward_varlen`` (and its backward); returns the numbers with every default resolved."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    op = op or ("forward_varlen" if packed else "forward")
    backend_name(op, backend)
    strided(op, q=q, k=k, v=v)
    rows = ("total_q", "total_k") if packed else ("T_q", "T")
    batch = () if packed else ("B",)
    dimensions(op, "q", q, (*batch, rows[0], "H", "K"))
    dimensions(op, "k", k, (*batch, rows[1], "H_kv", "K"))
    dimensions(op, "v", v, (*batch, rows[1], "H_kv", "V"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        float_dtype(op, name, x)
    same_dtype(op, "q", q, k=k, v=v)
    same_device(op, "q", q, k=k, v=v)
    _heads(op, q, k, v)
    equal(op, "dimension -3 of v", v.shape[-3], f"{rows[1]} of k", k.shape[-3])
    size(op, f"{rows[0]} (dimension -3 of q)", q.shape[-3], 0, MAX_INT32)
    size(op, f"{rows[1]} (dimension -3 of k)", k.shape[-3], 0 if packed else 1, MAX_INT32)
    if packed:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is None:
                fail(op, f"{name} must be given beside the other", None)
            dimensions(op, name, x, ("N + 1",))
            size(op, f"N + 1 (dimension 0 of {name})", x.shape[0], 1, MAX_SEQUENCES + 1)
        for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k), ("q_start", starts)):
            if x is not None:
                fail(op, f"{name} belongs to the batched form, not to packed sequences", f"shape {tuple(x.shape)}")
        count = cu_seqlens_q.shape[0]
        _lengths(op, q, count, "N + 1", (torch.int32,), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        sequences = count - 1
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            size(op, name, value, 0, MAX_INT32)
    else:
        sequences = q.shape[0]
        size(op, "B (dimension 0 of q)", sequences, 0, MAX_SEQUENCES)
        for name, x in (("k", k), ("v", v)):
            equal(op, f"dimension 0 of {name}", x.shape[0], "B of q", sequences)
        _lengths(op, q, sequences, "B", (torch.int32,), seqused_q=seqused_q, seqused_k=seqused_k)
        _lengths(op, q, sequences, "B", (torch.int32, torch.int64), q_start=starts)
        equal(op, "max_seqlen_q", max_seqlen_q, "T_q", q.shape[1])
        equal(op, "max_seqlen_k", max_seqlen_k, "T", k.shape[1])
    max_top_nodes, scale = tree_options(
        op, dtype=q.dtype, head_dim=q.shape[-1], compression_rate=compression_rate, top_k_per_layer=top_k_per_layer,
        max_top_nodes=max_top_nodes, scale=scale, rope_base=rope_base,
    )  # fmt: skip
    rope_dim = rotation.rotation(op, q.shape[-1], q.device, rope_base, rope_inv_freq, rope_dim)
    rotation.sink(op, q, attn_sink)
    tree = TreeParams(
        0, compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, strict_causal, rope_dim,
        rope_interleaved, rope_inv_freq, attn_sink,
    )  # fmt: skip
    return VarlenParams(tree, packed, sequences, max_seqlen_q, max_seqlen_k)


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, params: VarlenParams,
    H_kv: int,
) -> None:  # fmt: skip
    """Rules of ``htree_cuda::backward_varlen`` beyond the forward's: what forward returned, and gradients of that."""
    rows, acc = tuple(q.shape[:-1]), accumulation_dtype(q.dtype)
    out_shape = (*rows, v.shape[-1])
    layers = len(layer_sizes(params.max_seqlen_k, params.tree.compression_rate, params.tree.max_top_nodes))
    returned(
        "backward_varlen", q,
        dout=(dout, out_shape, q.dtype), out=(out, out_shape, q.dtype), dlse=(dlse, rows, acc), lse=(lse, rows, acc),
        selection=(selection, (layers - 1, *rows[:-1], H_kv, params.tree.top_k), torch.int32),
    )  # fmt: skip


def given_selection(op: str, selection: Tensor, q: Tensor, k: Tensor, params: VarlenParams) -> None:
    """Rules of a selection to replay: the shape that the call returns. Its content is not looked at."""
    layers = len(layer_sizes(params.max_seqlen_k, params.tree.compression_rate, params.tree.max_top_nodes))
    strided(op, selection=selection)
    returned(op, q, selection=(selection, (layers - 1, *q.shape[:-2], k.shape[-2], params.tree.top_k), torch.int32))


def start_numbers(op: str, q_start: Sequence[int], B: int, T_q: int, T: int) -> list[int]:
    """Rules of starts on the host: B ints, each of -T_q .. T, beyond which a row has padding alone."""
    values = [integer(op, "q_start", start) for start in q_start]
    equal(op, "the number of q_start", len(values), "B of q", B)
    for value in values:
        if not -T_q <= value <= T:
            fail(op, f"q_start must lie in -T_q .. T ({-T_q} .. {T}) where rows have lengths of their own", value)
    return values


def maximum(op: str, name: str, value: Any) -> int:
    """max_seqlen_q or max_seqlen_k as the ops take it."""
    return integer(op, name, value)


def module_lengths(
    x: Tensor, cu_seqlens: Any, max_seqlen: Any, seqused: Any, past: Any, cache: Any, shared: bool
) -> None:
    """Rules of the lengths that ``HTreeAttention`` is called with. Where ranks share a sequence, of whose tokens x is
    a part, `context_parallel_forward` finds the rest."""
    op = "HTreeAttention"
    if (cu_seqlens is None) != (max_seqlen is None):
        fail(op, "cu_seqlens and max_seqlen must be given together", "one of them")
    for name, value in (("cu_seqlens", cu_seqlens), ("seqused", seqused)):
        if value is None:
            continue
        tensor(op, name, value)
        others = (("past", past), *((("cache", cache), ("seqused", seqused)) if name == "cu_seqlens" else ()))
        for other, given in others:
            if given is not None:
                fail(op, f"{name} must not be given together with {other}", "both")
    if shared:
        return
    reads = checks_values() and not torch.compiler.is_compiling()
    if seqused is not None:
        _lengths(op, x, x.shape[0], "B", (torch.int32,), first="x", seqused=seqused)
        for b, value in enumerate(seqused.tolist() if reads else []):
            if not 0 <= value <= x.shape[1]:
                fail(op, f"seqused of row {b} must lie in 0 .. T_q ({x.shape[1]})", value)
    if cu_seqlens is not None:
        dimensions(op, "cu_seqlens", cu_seqlens, ("N + 1",))
        size(op, "N + 1 (dimension 0 of cu_seqlens)", cu_seqlens.shape[0], 1, MAX_SEQUENCES + 1)
        _lengths(op, x, cu_seqlens.shape[0], "N + 1", (torch.int32,), first="x", cu_seqlens=cu_seqlens)
        max_seqlen = integer(op, "max_seqlen", max_seqlen)
        size(op, "max_seqlen", max_seqlen, 0, MAX_INT32)
        if reads:
            total = x.shape[0]
            cumulative(op, "cu_seqlens", cu_seqlens.tolist(), total, max_seqlen, "total of x", "max_seqlen")


# ------------------------------------------------------------------------------- values on the host, HTREE_CUDA_CHECK


def cumulative(op: str, name: str, values: list[int], total: int, most: int, total_name: str, most_name: str) -> None:
    """Rules of cu_seqlens as numbers."""
    if values[0] != 0:
        fail(op, f"{name} must begin at 0", values[0])
    for i, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            fail(op, f"{name} must not decrease, at sequence {i}", f"{begin} and then {end}")
        if end - begin > most:
            fail(op, f"sequence {i} of {name} must have at most {most_name} ({most}) rows", end - begin)
    if values[-1] > total:
        fail(op, f"{name} must end at {total_name} ({total}) or before", values[-1])


def read_lengths(
    op: str, q: Tensor, k: Tensor, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, params: VarlenParams
) -> None:
    """HTREE_CUDA_CHECK=1: reads the lengths, which waits for the device, and checks them."""
    for name, x, rows, most, total, bound in (
        ("cu_seqlens_q", cu_seqlens_q, q, params.max_seqlen_q, "total_q", "max_seqlen_q"),
        ("cu_seqlens_k", cu_seqlens_k, k, params.max_seqlen_k, "total_k", "max_seqlen_k"),
    ):
        if x is not None:
            cumulative(op, name, x.tolist(), rows.shape[0], most, total, bound)
    for name, x, most, bound in (
        ("seqused_q", seqused_q, params.max_seqlen_q, "T_q"), ("seqused_k", seqused_k, params.max_seqlen_k, "T"),
    ):  # fmt: skip
        for b, value in enumerate([] if x is None else x.tolist()):
            if not 0 <= value <= most:
                fail(op, f"{name} of row {b} must lie in 0 .. {bound} ({most})", value)


# ------------------------------------------------------------------------------------------------------------ kernels


def kernel(q: Tensor, k: Tensor, v: Tensor, params: VarlenParams, *others: Tensor | None, op: str) -> None:
    """What the Hopper kernels support of a valid call: what those of `forward` do."""
    if params.packed:
        q, k, v = (x[None] for x in (q, k, v))
    support.forward(q, k, v, params.tree, op)
    for name, x in (("B * T_q", q), ("B * T", k)):
        if x.shape[0] * x.shape[1] > MAX_INT32:
            support._way_out(op, f"the kernels need {name} below 2^31, got {x.shape[0] * x.shape[1]}")
    for x in others:
        if x is not None and not x.is_contiguous():
            support._way_out(op, f"the kernels need lengths contiguous, the strides of one are {tuple(x.stride())}")


def backward_kernel(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, params: VarlenParams,
    *lengths: Tensor | None,
) -> None:  # fmt: skip
    """What the backward kernels support of a valid call: what the forward's do, with results as it wrote them."""
    kernel(q, k, v, params, *lengths, op="backward_varlen")
    support.contiguous_results("backward_varlen", out, lse, selection)
