"""The torch.library ops of a cached tree. They take the tensors of a `TreeCache` and change them in place.

Of every cache: lengths, overflowed and reserved [B] int32. Without pages k [B, H_kv, M, K], v likewise, and k_upper,
v_upper of no rows; with pages k [num_pages, H_kv, page_rows, K] and k_upper [B, H_kv, M_upper, K]. `layout.TreeLayout`
says which row is which node.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from . import checks, ops
from .checks.cache import FEW_QUERIES
from .definition import accumulation_dtype, layer_sizes
from .layout import TreeLayout
from .params import CachedParams
from .torch_backend import decode
from .torch_backend.decode import CacheTensors
from .torch_backend.rotation import rope_tables

_LAYOUT_SCHEMA = "int compression_rate, int max_tokens, int num_layers, int page_size"


@functools.lru_cache(maxsize=64)
def _layout(compression_rate: int, max_tokens: int, num_layers: int, page_size: int) -> TreeLayout:
    """The layout, whose sizes are computed once and not in every step of decoding."""
    return TreeLayout(compression_rate, max_tokens, num_layers, page_size)


# ----------------------------------------------------------------------------------------------- append, truncate


@ops._without_gradient(
    "tree_append",
    "(Tensor k_new, Tensor v_new, Tensor? seqused, Tensor(a!) lengths, Tensor(b!) overflowed, Tensor(c!) k, "
    "Tensor(d!) v, Tensor(e!) k_upper, Tensor(f!) v_upper, Tensor block_table, Tensor reserved, *, "
    f"{_LAYOUT_SCHEMA}, str backend) -> ()",
)
def tree_append(
    k_new, v_new, seqused, lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, *, backend: str, **layout
) -> None:
    """Writes the first seqused [B] of k_new, v_new [B, T_new, H_kv, D] behind lengths, the nodes that they complete,
    and then lengths. A sequence without room for all of its tokens is marked in overflowed and keeps what it has."""
    cache = CacheTensors(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved)
    layout = _layout(**layout)
    checks.cache.append(k_new, v_new, seqused, cache, layout, backend)
    checks.cache.no_gradient("append", k_new, v_new)
    if not k_new.shape[0] or not k_new.shape[1]:
        return
    if ops._use_torch("append", k_new, backend):
        decode.append(k_new, v_new, seqused, cache, layout)
        return
    from . import kernels

    checks.cache.append_kernel(k_new, v_new)
    kernels.tree_append(k_new, v_new, seqused, *cache, layout=layout)


@torch.library.register_fake("htree_cuda::tree_append")
def _(
    k_new, v_new, seqused, lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, *, backend, **layout
) -> None:
    cache = CacheTensors(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved)
    checks.cache.append(k_new, v_new, seqused, cache, _layout(**layout), backend)


@torch.library.custom_op(
    "htree_cuda::tree_truncate",
    mutates_args=("lengths", "overflowed", "reserved"),
    schema="(Tensor(a!) lengths, Tensor(b!) overflowed, Tensor(c!) reserved, Tensor shared, Tensor new_lengths) -> ()",
)
def tree_truncate(lengths, overflowed, reserved, shared, new_lengths) -> None:
    """Shortens lengths [B] to new_lengths [B], clamped to 0 .. lengths, and clears overflowed. Where the end comes to
    lie before shared [B], tokens in pages that other sequences hold too, reserved falls to it. Element by element, by
    PyTorch operations on every device."""
    decode.truncate(lengths, overflowed, reserved, shared, new_lengths)


@tree_truncate.register_fake
def _(lengths, overflowed, reserved, shared, new_lengths) -> None:
    return None


# -------------------------------------------------------------------------------------------------- forward_cached


@ops._without_gradient(
    "forward_cached",
    "(Tensor q, Tensor? seqused_q, Tensor lengths, Tensor overflowed, Tensor k, Tensor v, Tensor k_upper, "
    "Tensor v_upper, Tensor block_table, Tensor reserved, Tensor rope_table, Tensor? attn_sink, "
    f"Tensor? rope_inv_freq=None, *, {_LAYOUT_SCHEMA}, SymInt top_k_per_layer, SymInt? max_top_nodes, float? scale, "
    "float? rope_base, bool rope_interleaved, bool need_selection, str backend, SymInt? rope_dim=None) "
    "-> (Tensor, Tensor, Tensor)",
)
def forward_cached(
    q, seqused_q, lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, rope_table, attn_sink,
    rope_inv_freq=None, *, compression_rate, max_tokens, num_layers, page_size, need_selection: bool, backend: str,
    **tree,
):  # fmt: skip
    """(out, lse, selection) of the last T_q tokens of each sequence; selection has size 0 in its first dimension
    unless needed. rope_table [positions, K/2, 2] holds cos and sin of each position in a candidate list, in float32
    (float64 for float64), as `rope_table` makes it of rope_base, rope_inv_freq and rope_dim. See
    `cache.forward_cached`."""
    cache = CacheTensors(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved)
    layout = _layout(compression_rate, max_tokens, num_layers, page_size)
    tree = {**tree, "rope_inv_freq": rope_inv_freq}
    params = checks.cache.forward_cached(q, seqused_q, cache, layout, rope_table, attn_sink, backend=backend, **tree)
    checks.cache.no_gradient("forward_cached", q, attn_sink)
    torch_backend = ops._use_torch("forward_cached", q, backend)
    if not torch_backend:
        checks.cache.forward_cached_kernel(q, cache, params)
    if q.shape[1] > FEW_QUERIES and q.shape[0]:
        if not torch_backend:
            return _prefill_by_lengths(q, seqused_q, cache, layout, params, need_selection, backend)
        return _prefill(q, seqused_q, cache, layout, params, need_selection, backend)
    if torch_backend and q.shape[0] and q.shape[1]:
        return decode.forward_cached(q, seqused_q, cache, layout, rope_table, params, need_selection=need_selection)
    out, lse, selection = _empty_results(q, cache, layout, params, need_selection)
    if out.numel():
        from . import kernels

        chosen = selection if selection.numel() else None
        kernels.tree_decode(q, seqused_q, *cache, rope_table, out, lse, chosen, layout=layout, params=params)
    return out, lse, selection


@torch.library.register_fake("htree_cuda::forward_cached")
def _(
    q, seqused_q, lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved, rope_table, attn_sink,
    rope_inv_freq=None, *, compression_rate, max_tokens, num_layers, page_size, need_selection, backend, **tree,
):  # fmt: skip
    cache = CacheTensors(lengths, overflowed, k, v, k_upper, v_upper, block_table, reserved)
    layout = _layout(compression_rate, max_tokens, num_layers, page_size)
    tree = {**tree, "rope_inv_freq": rope_inv_freq}
    params = checks.cache.forward_cached(q, seqused_q, cache, layout, rope_table, attn_sink, backend=backend, **tree)
    return _empty_results(q, cache, layout, params, need_selection)


def _empty_results(
    q: Tensor, cache: CacheTensors, layout: TreeLayout, params: CachedParams, need_selection: bool
) -> tuple[Tensor, Tensor, Tensor]:
    B, T_q, H, _ = q.shape
    layers = len(layer_sizes(layout.max_tokens, params.compression_rate, params.max_top_nodes))
    kept = layers - 1 if need_selection else 0
    return (
        q.new_empty(B, T_q, H, cache.v.shape[3]),
        q.new_empty(B, T_q, H, dtype=accumulation_dtype(q.dtype)),
        q.new_empty(kept, B, T_q, cache.k.shape[1], params.top_k, dtype=torch.int32),
    )


def _prefill(
    q: Tensor, seqused_q: Tensor | None, cache: CacheTensors, layout: TreeLayout, params: CachedParams,
    need_selection: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """More than 8 queries by the PyTorch backend: the forward op on each sequence. Lengths are read on the host."""
    B, T_q = q.shape[:2]
    out, lse, selection = _empty_results(q, cache, layout, params, need_selection)
    out.zero_(), lse.fill_(-math.inf), selection.fill_(-1)
    lengths = [min(max(0, n), layout.max_tokens) for n in cache.lengths.tolist()]
    used = [T_q] * B if seqused_q is None else [min(max(0, n), T_q) for n in seqused_q.tolist()]
    options = {
        "compression_rate": params.compression_rate, "top_k_per_layer": params.top_k, "scale": params.scale,
        "max_top_nodes": params.max_top_nodes, "rope_base": params.rope_base, "strict_causal": True,
        "need_selection": need_selection, "backend": backend, "rope_dim": params.rope_dim,
        "rope_interleaved": params.rope_interleaved,
    }  # fmt: skip
    tables = (params.attn_sink, None if params.rope_inv_freq is None else params.rope_inv_freq.to(q.device))
    for b, failed in enumerate(cache.overflowed.tolist()):
        if failed:
            out[b, : used[b]], lse[b, : used[b]] = math.nan, math.nan
            continue
        count = min(used[b], lengths[b])  # the queries before these have no key
        if count == 0:
            continue
        rows, start = slice(used[b] - count, used[b]), lengths[b] - count
        k, v = decode.tokens(cache, layout, b, lengths[b])
        mine = q[b : b + 1, rows]
        if count == 1:
            # A call of one query splits it otherwise and rounds otherwise: a second one, of no consequence, joins it.
            mine = mine.expand(1, 2, *mine.shape[2:])
            if lengths[b] == 1:
                k, v = (x.expand(1, 2, *x.shape[2:]) for x in (k, v))
        options["q_start"] = max(0, start - (mine.shape[1] - count))
        results = torch.ops.htree_cuda.forward(mine, k, v, *tables, **options)
        keep = slice(0, 1) if lengths[b] == 1 else slice(mine.shape[1] - count, None)
        out[b, rows], lse[b, rows] = results[0][0, keep], results[1][0, keep]
        if need_selection:
            found = results[2].shape[0]
            selection[:found, b, rows] = results[2][:, 0, keep]
            t = torch.arange(start, start + count, device=q.device)
            for layer in range(found + 1, selection.shape[0] + 1):
                chosen = decode.whole_layers(t, params.compression_rate, layer, params.top_k)
                selection[layer - 1, b, rows] = chosen[:, None].to(torch.int32)
    return out, lse, selection


# Bytes of keys and values that the sequences of one ragged call may take, one sequence at least.
_PREFILL_BYTES = 1 << 30


def _rows_of_tokens(cache: CacheTensors, layout: TreeLayout, part: slice) -> tuple[Tensor, Tensor]:
    """k [b, max_tokens, H_kv, K] and v of some sequences: views without pages. With pages copies of all pages that the
    table names, so that no length is read; an entry that is no page stands for some page, whose rows lie behind the
    length."""
    if not layout.page_size:
        return tuple(x[part, :, : layout.max_tokens].transpose(1, 2) for x in (cache.k, cache.v))
    pages = cache.block_table[part, : layout.max_pages].long().clamp(0, cache.k.shape[0] - 1)
    rows = (x[:, :, : layout.page_size].transpose(1, 2)[pages] for x in (cache.k, cache.v))
    return tuple(x.flatten(1, 2)[:, : layout.max_tokens] for x in rows)


def _prefill_by_lengths(
    q: Tensor, seqused_q: Tensor | None, cache: CacheTensors, layout: TreeLayout, params: CachedParams,
    need_selection: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """More than 8 queries: the ragged forward, whose lengths stay on the device."""
    B, T_q = q.shape[:2]
    out, lse, selection = _empty_results(q, cache, layout, params, need_selection)
    inv_freq = None if params.rope_inv_freq is None else params.rope_inv_freq.to(q.device)
    row_bytes = layout.max_tokens * cache.k.shape[1] * (cache.k.shape[3] + cache.v.shape[3]) * cache.k.element_size()
    step = max(1, _PREFILL_BYTES // row_bytes)
    for first in range(0, B, step):
        part = slice(first, first + step)
        used = None if seqused_q is None else seqused_q[part]
        k, v = _rows_of_tokens(cache, layout, part)
        results = torch.ops.htree_cuda.forward_varlen(
            q[part], k, v, None, None, used, cache.lengths[part], None, params.attn_sink, inv_freq,
            max_seqlen_q=T_q, max_seqlen_k=layout.max_tokens, compression_rate=params.compression_rate,
            top_k_per_layer=params.top_k, max_top_nodes=params.max_top_nodes, scale=params.scale,
            rope_base=params.rope_base, strict_causal=True, need_selection=need_selection, backend=backend,
            rope_dim=params.rope_dim, rope_interleaved=params.rope_interleaved,
        )  # fmt: skip
        if step >= B:
            out, lse, selection = results
        else:
            out[part], lse[part], selection[:, part] = results
    failed = (cache.overflowed != 0)[:, None]
    selection.masked_fill_(failed[..., None, None], -1)
    if seqused_q is not None:
        failed = failed & (torch.arange(T_q, device=q.device) < seqused_q[:, None])
    out.masked_fill_(failed[..., None, None], math.nan)
    lse.masked_fill_(failed[..., None], math.nan)
    return out, lse, selection


# ------------------------------------------------------------------------------------------------------ rope_table


@torch.library.custom_op(
    "htree_cuda::rope_table",
    mutates_args=(),
    schema="(Tensor like, Tensor? inv_freq, *, int positions, int rope_dim, float? rope_base) -> Tensor",
)
def rope_table(
    like: Tensor, inv_freq: Tensor | None, *, positions: int, rope_dim: int, rope_base: float | None
) -> Tensor:
    """[positions, K / 2, 2], K being the last dimension of `like`: cos and sin of p * inv_freq[m], or of
    p * rope_base ** (-2 m / rope_dim), and of 0 behind rope_dim / 2 or where both are None; from float64, in the
    accumulation dtype of `like` and on its device."""
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "forward_cached: the table of rotations of these options is made in their first call, which cannot be "
            "captured in a CUDA graph; call forward_cached once before the capture"
        )
    place = {"dtype": accumulation_dtype(like.dtype), "device": like.device}
    if inv_freq is not None:
        inv_freq = inv_freq.cpu()
        checks.rotation.finite("forward_cached", inv_freq)
        inv_freq = inv_freq.to(like.device)
    table = torch.zeros(positions, like.shape[-1] // 2, 2, **place)
    table[..., 0] = 1.0
    for i, x in enumerate(rope_tables(positions, rope_dim, rope_base, **place, inv_freq=inv_freq)):
        table[:, : x.shape[1], i] = x
    return table


@rope_table.register_fake
def _(like, inv_freq, *, positions, rope_dim, rope_base):
    return like.new_empty(positions, like.shape[-1] // 2, 2, dtype=accumulation_dtype(like.dtype))
