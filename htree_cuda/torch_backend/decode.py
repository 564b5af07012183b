"""The cached tree in PyTorch operations: appending, truncating, and attention of the last tokens. What is computed is
`definition.py`, for each sequence of the batch on its own; how:

* Everything runs on rows ``(b, h_kv, query)`` that gather their candidates of every layer from the cache. A row's
  position comes from the lengths, so widths are bounds that hold for every length of the cache.
* Only complete nodes are stored. The rightmost node of a layer above the tokens is expanded whatever it holds, so
  neither its key nor its value is read, and no more is a row behind it.
* Appending finds the tokens and the nodes that it completes by comparing lengths; a node is added up from its children
  as they are stored, in the order and with the roundings of `tree.tree_pool`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition import accumulation_dtype, infinite_to_nan, layer_sizes
from ..layout import TreeLayout
from ..params import CachedParams
from . import sinks
from .chunks import budget
from .layers import Layer
from .rotation import rotate
from .tree import _log_importance, _select


class CacheTensors(NamedTuple):
    """The tensors of a `TreeCache`. Without pages the last four have no elements but ``reserved``'s [B]."""

    lengths: Tensor  # [B] int32
    overflowed: Tensor  # [B] int32
    k: Tensor  # [B, H_kv, M, K]; with pages [num_pages, H_kv, page_rows, K]
    v: Tensor
    k_upper: Tensor  # [B, H_kv, M_upper, K]
    v_upper: Tensor
    block_table: Tensor  # [B, max_pages] int32
    reserved: Tensor  # [B] int32: tokens that the pages reserved hold; max_tokens without pages


# --------------------------------------------------------------------------------------------------------------- rows


def _flat_rows(cache: CacheTensors, layout: TreeLayout, layer: int, b: Tensor, h: Tensor, node: Tensor):
    """The row of each node (b, h and node broadcast, int64) in the flattened buffer that holds its layer, and whether
    that is the buffer of the layers above the pages. Pages are clamped into the pool, whatever the table holds."""
    H_kv = cache.k.shape[1]
    if layer >= layout.paged_layers:
        return (b * H_kv + h) * layout.sequence_rows + layout.layer_begin[layer] + node, layout.page_size > 0
    nodes = layout.page_layer_rows(layer)
    slot = (node // nodes).clamp(0, cache.block_table.shape[1] - 1)
    page = cache.block_table[b.expand_as(slot), slot].long().clamp_(0, cache.k.shape[0] - 1)
    return (page * H_kv + h) * layout.page_rows + layout.page_layer_begin[layer] + node % nodes, False


def _buffers(cache: CacheTensors, upper: bool) -> tuple[Tensor, Tensor]:
    """The buffers of k and v as rows [rows, D]."""
    pair = (cache.k_upper, cache.v_upper) if upper else (cache.k, cache.v)
    return tuple(x.view(-1, x.shape[-1]) for x in pair)


def tokens(cache: CacheTensors, layout: TreeLayout, b: int, length: int) -> tuple[Tensor, Tensor]:
    """k [1, length, H_kv, K] and v of one sequence: views without pages, gathered with pages."""
    if not layout.page_size:
        return tuple(x[b : b + 1, :, :length].transpose(1, 2) for x in (cache.k, cache.v))
    device = cache.k.device
    h, t = torch.arange(cache.k.shape[1], device=device), torch.arange(length, device=device)[:, None]
    rows, upper = _flat_rows(cache, layout, 0, torch.full_like(t, b), h, t)
    return tuple(x[rows][None] for x in _buffers(cache, upper))


# ------------------------------------------------------------------------------------------------------------- append


def append(k: Tensor, v: Tensor, seqused: Tensor | None, cache: CacheTensors, layout: TreeLayout) -> None:
    """Writes k [B, T_new, H_kv, K] and v behind the lengths, completes nodes, then raises the lengths. A sequence
    without the room is marked, once and for all later calls, and keeps what it has."""
    T_new = k.shape[1]
    old = cache.lengths.long().clamp(0, layout.max_tokens)
    used = torch.full_like(old, T_new) if seqused is None else seqused.long().clamp(0, T_new)
    room = cache.reserved.long().clamp(max=layout.max_tokens)
    over = (cache.overflowed != 0) | ((used > 0) & (old + used > room))
    new = torch.where(over, old, old + used)
    b, j = (torch.arange(T_new, device=k.device) < (new - old)[:, None]).nonzero(as_tuple=True)
    if b.numel():
        h = torch.arange(k.shape[2], device=k.device)
        rows, upper = _flat_rows(cache, layout, 0, b[:, None], h, (old[b] + j)[:, None])
        for buffer, x in zip(_buffers(cache, upper), (k, v)):
            buffer[rows] = x[b, j]
        complete_nodes(cache, layout, old, new)
    cache.overflowed.copy_(over)
    cache.lengths.copy_(new)


def complete_nodes(cache: CacheTensors, layout: TreeLayout, old: Tensor, new: Tensor, from_layer: int = 1) -> None:
    """Writes the nodes of from_layer and above that are complete with `new` [B] tokens and were not with `old`."""
    r = layout.compression_rate
    h = torch.arange(cache.k.shape[1], device=old.device)[:, None]
    for layer in range(from_layer, layout.num_layers):
        first, last = old // r**layer, new // r**layer
        most = int((last - first).max())
        if most <= 0:
            return
        b, i = (torch.arange(most, device=old.device) < (last - first)[:, None]).nonzero(as_tuple=True)
        node = first[b] + i
        children = node[:, None, None] * r + torch.arange(r, device=old.device)
        below, below_upper = _flat_rows(cache, layout, layer - 1, b[:, None, None], h, children)
        rows, upper = _flat_rows(cache, layout, layer, b[:, None], h[:, 0], node[:, None])
        for source, target in zip(_buffers(cache, below_upper), _buffers(cache, upper)):
            total = source[below[..., 0]].to(accumulation_dtype(source.dtype))
            for c in range(1, r):
                total += source[below[..., c]]
            # By a tensor: CUDA replaces a division by a Python number by a product with its rounded reciprocal.
            target[rows] = (total / total.new_full((1,), r)).to(target.dtype)


def truncate(cache_lengths: Tensor, overflowed: Tensor, reserved: Tensor, shared: Tensor, lengths: Tensor) -> None:
    """Shortens to lengths, clamped to what there is. Where the new end lies in pages that other sequences hold too,
    the room ends there until `reserve` gives the sequence a page of its own."""
    cache_lengths.copy_(torch.minimum(lengths, cache_lengths).clamp_(min=0))
    overflowed.zero_()
    reserved.copy_(torch.where(cache_lengths < shared, cache_lengths, reserved))


# ------------------------------------------------------------------------------------------------------------- attend


class _Candidates(Layer):
    """Candidates of one layer; ``readable`` marks the valid ones whose keys and values are stored and may be read."""

    def __init__(self, layer: int, n: Tensor, node: Tensor):
        super().__init__(layer, n, node.shape[1])
        self.node = node
        self.readable = self.valid if layer == 0 else self.valid & ~self.rightmost

    def nodes(self) -> Tensor:
        return self.node


class _Rows(NamedTuple):
    """Some rows (b, h_kv, query) of a call."""

    q: Tensor  # [rows, G, K] in the accumulation dtype
    b: Tensor  # [rows, 1]
    h: Tensor  # [rows, 1]
    t: Tensor  # [rows] position


def _gather(cache: CacheTensors, layout: TreeLayout, layer: int, rows: _Rows, node: Tensor, dtype: torch.dtype):
    """Keys and values [rows, width, D] of nodes [rows, width]; zeros where the layer can have no complete node."""
    if not (layer < layout.paged_layers or layout.layer_rows[layer]):
        return tuple(x.new_zeros(*node.shape, x.shape[-1], dtype=dtype) for x in (cache.k, cache.v))
    place, upper = _flat_rows(cache, layout, layer, rows.b, rows.h, node)
    place = place.flatten()
    return tuple(x.index_select(0, place).view(*node.shape, -1).to(dtype) for x in _buffers(cache, upper))


def _attend(rows: _Rows, cache: CacheTensors, layout: TreeLayout, table: Tensor, params: CachedParams, longest: int):
    """out [rows, G, V], lse [rows, G] and, top layer first, the nodes [rows, at most top_k] chosen of each layer."""
    # With more children than tokens there is one node anyway: gathers need not be wider.
    r = min(params.compression_rate, max(2, 1 << (layout.max_tokens - 1).bit_length()))
    acc = rows.q.dtype
    cos, sin = table[:, : params.rope_dim // 2].unbind(2)
    scores, values, selection = [], [], []
    parents = n = None
    for layer in reversed(range(len(layer_sizes(longest, r, params.max_top_nodes)))):
        if parents is None:
            width = -(-longest // r**layer)
            n = rows.t // r**layer + 1
            node = torch.arange(width, device=rows.t.device).expand(rows.t.shape[0], width)
        else:
            n = (n.clamp(max=params.top_k) - 1) * r + rows.t // r**layer % r + 1
            node = (parents[:, :, None] * r + torch.arange(r, device=rows.t.device)).flatten(1)
        candidates = _Candidates(layer, n, node)
        keys, layer_values = _gather(cache, layout, layer, rows, node.masked_fill(~candidates.readable, 0), acc)
        width = node.shape[1]
        keys = rotate(keys, cos[:width], sin[:width], interleaved=params.rope_interleaved)
        query = rotate(rows.q, cos[n - 1][:, None], sin[n - 1][:, None], interleaved=params.rope_interleaved)
        s = torch.bmm(query, keys.transpose(1, 2)).mul_(params.scale)
        s.masked_fill_(~candidates.readable[:, None], -math.inf)
        leaves = candidates.readable
        if layer > 0:
            marks, parents = _select(_log_importance(s, candidates, True), candidates, params.top_k)
            selection.append(parents)
            leaves = leaves & ~marks
            s.masked_fill_(~leaves[:, None], -math.inf)
        scores.append(s)
        values.append(layer_values.masked_fill_(~leaves[:, :, None], 0.0))
    row_max = torch.cat([s.amax(2, keepdim=True) for s in scores], 2).amax(2, keepdim=True)
    weights = [(s - row_max).exp_() for s in scores]
    row_sum = sum(p.sum(2) for p in weights)
    out = sum(torch.bmm(p, v) for p, v in zip(weights, values)) / row_sum[:, :, None]
    return infinite_to_nan(out), infinite_to_nan(row_max[:, :, 0] + row_sum.log()), selection


def query_positions(lengths: Tensor, seqused_q: Tensor | None, T_q: int, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Each query's position [B, T_q], below 0 where there is no key for it, and whether it is within seqused_q."""
    lengths = lengths.long().clamp(0, max_tokens)[:, None]
    used = T_q if seqused_q is None else seqused_q.long().clamp(0, T_q)[:, None]
    j = torch.arange(T_q, device=lengths.device)
    position = lengths - used + j
    return position, (j < used).expand_as(position)


def whole_layers(t: Tensor, compression_rate: int, layer: int, top_k: int) -> Tensor:
    """[..., top_k]: all nodes of a layer up to that of position t, then -1: what is chosen of a layer above a tree."""
    node = torch.arange(top_k, device=t.device)
    return torch.where(node <= (t // compression_rate**layer)[..., None], node, -1)


def forward_cached(
    q: Tensor, seqused_q: Tensor | None, cache: CacheTensors, layout: TreeLayout, table: Tensor, params: CachedParams,
    *, need_selection: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [B, T_q, H, K], the last tokens of each sequence -> out, lse, selection, as the op returns them."""
    B, T_q, H, K = q.shape
    H_kv, V = cache.k.shape[1], cache.v.shape[3]
    G, acc, device = H // H_kv, accumulation_dtype(q.dtype), q.device
    r, layers = (
        params.compression_rate,
        len(layer_sizes(layout.max_tokens, params.compression_rate, params.max_top_nodes)),
    )
    position, used = query_positions(cache.lengths, seqused_q, T_q, layout.max_tokens)
    t = position.clamp(min=0).masked_fill(~used, 0)  # rows that do not exist lie in the tree too
    # On a CPU lengths are read, which waits for nothing; elsewhere the cache's bound stands in for the longest.
    longest = int(t.max()) + 1 if device.type == "cpu" and t.numel() else layout.max_tokens

    rows = _Rows(
        q.unflatten(2, (H_kv, G)).permute(0, 2, 1, 3, 4).reshape(B * H_kv * T_q, G, K),
        torch.arange(B, device=device).repeat_interleave(H_kv * T_q)[:, None],
        torch.arange(H_kv, device=device).repeat_interleave(T_q).repeat(B)[:, None],
        t[:, None].expand(B, H_kv, T_q).flatten(),
    )
    out = torch.empty(rows.t.shape[0], G, V, dtype=acc, device=device)
    lse = torch.empty(rows.t.shape[0], G, dtype=acc, device=device)
    kept = layers - 1 if need_selection else 0
    selection = torch.full((kept, rows.t.shape[0], params.top_k), -1, dtype=torch.int32, device=device)
    widest = layers * params.top_k * r if layers > 1 else layout.max_tokens
    step = max(1, budget(device) // (min(widest, 2 * longest) * out.element_size() * (3 * K + 2 * V + 6 * G + 8)))
    for first in range(0, rows.t.shape[0], step):
        part = slice(first, first + step)
        mine = _Rows(*(x[part] for x in rows))
        mine = mine._replace(q=mine.q.to(acc))
        out[part], lse[part], chosen = _attend(mine, cache, layout, table, params, longest)
        if need_selection:
            for layer, nodes in enumerate(reversed(chosen), 1):
                selection[layer - 1, part, : nodes.shape[1]] = nodes.to(torch.int32)
            for layer in range(len(chosen) + 1, layers):
                selection[layer - 1, part] = whole_layers(mine.t, r, layer, params.top_k).to(torch.int32)

    def back(x: Tensor, *tail: int) -> Tensor:
        return x.view(B, H_kv, T_q, *tail).transpose(1, 2)

    missing = ~used | (position < 0)
    failed = used & (cache.overflowed != 0)[:, None]
    lse = back(lse, G).reshape(B, T_q, H)
    out = back(out, G, V).reshape(B, T_q, H, V)
    if params.attn_sink is not None:
        out *= sinks.share(lse, params.attn_sink)[..., None]
    out.masked_fill_(missing[..., None, None], 0.0).masked_fill_(failed[..., None, None], math.nan)
    lse.masked_fill_(missing[..., None], -math.inf)
    lse.masked_fill_(failed[..., None], math.nan)
    selection = selection.view(kept, B, H_kv, T_q, params.top_k).transpose(2, 3).contiguous()
    selection.masked_fill_((missing | failed)[..., None, None], -1)
    return out.to(q.dtype), lse, selection
