"""The lightning indexer, its backward and its selector in PyTorch operations. What is computed is `definition_dsa.py`.

Tiles of queries and keys bound the temporaries. Which tile computes a logit follows from shapes alone, and
`indexer_topk` passes through the tiles of `indexer_logits`: so both have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from ..params import IndexerParams, start_of
from .chunks import Scratch, budget
from .lists import valid_slots

MAX_TILE_BYTES = 256 << 20
TILE_KEYS = 4096
MAX_ROW = 2**31 - 1


def visible_rows(
    rows: Tensor,
    first: int,
    b: int,
    queries: slice,
    params: IndexerParams,
    k_start: Tensor | None,
    k_end: Tensor | None,
) -> Tensor | None:
    """Marks [n, m] of the key rows [m] or [n, m] that each query of a chunk sees; None: all of them."""
    parts = []
    rows = rows if rows.dim() == 2 else rows[None]
    if k_start is not None:
        parts.append(rows >= k_start[b, queries, None])
    if k_end is not None:
        parts.append(rows < k_end[b, queries, None])
    if params.q_start is not None:
        position = torch.arange(first, first + queries.stop - queries.start, device=rows.device)
        position += start_of(params.q_start, b)
        parts.append(rows < ((position + 1) // params.k_stride)[:, None])
    if not parts:
        return None
    marks = parts[0]
    for part in parts[1:]:
        marks = marks & part
    return marks


class _Indexer:
    """What all tiles of one call share. q [B, s_q, h_i, d_i], k [B, s_kv, 1, d_i], the rest batched likewise."""

    def __init__(self, q, k, weights, q_scale, k_scale, k_start, k_end, params: IndexerParams):
        self.q, self.k, self.k_scale = q, k, k_scale
        self.k_start, self.k_end, self.params = k_start, k_end, params
        self.B, self.s_q, self.h_i, self.d_i = q.shape
        self.s_kv = k.shape[1]
        self.acc = accumulation_dtype(q.dtype)
        self.item = torch.finfo(self.acc).bits // 8
        self.weights = weights if q_scale is None else weights * q_scale
        self.scratch = Scratch(q.device)
        self.bytes = min(budget(q.device), MAX_TILE_BYTES)

    def query_chunks(self, numbers: int) -> Iterator[tuple[int, slice]]:
        """(batch element, queries), each query with so many numbers of temporaries."""
        step = max(1, self.bytes // (self.item * max(1, numbers)))
        for b in range(self.B):
            for first in range(0, self.s_q, step):
                yield b, slice(first, min(first + step, self.s_q))

    def key_tiles(self) -> Iterator[slice]:
        for first in range(0, self.s_kv, TILE_KEYS):
            yield slice(first, min(first + TILE_KEYS, self.s_kv))

    def tile_numbers(self, products: int) -> int:
        """Numbers of temporaries that one query of a dense tile takes."""
        return min(TILE_KEYS, max(1, self.s_kv)) * (products * self.h_i + 4)

    def visible(self, b: int, queries: slice, keys: slice) -> Tensor | None:
        rows = torch.arange(keys.start, keys.stop, device=self.q.device)
        return visible_rows(rows, queries.start, b, queries, self.params, self.k_start, self.k_end)

    def z(self, b: int, queries: slice, keys: slice) -> Tensor:
        """The products [n, h_i, m] of a dense tile, a temporary that the next tile overwrites."""
        n, m = queries.stop - queries.start, keys.stop - keys.start
        q = self.q[b, queries].to(self.acc).reshape(n * self.h_i, self.d_i)
        out = self.scratch.get("z", (n * self.h_i, m), self.acc)
        return torch.mm(q, self.k[b, keys, 0].to(self.acc).T, out=out).view(n, self.h_i, m)

    def logits(self, b: int, queries: slice, keys: slice) -> Tensor:
        """[n, m] of a dense tile, -inf outside the window."""
        z = self.z(b, queries, keys).relu_()
        logits = torch.bmm(self.weights[b, queries, None], z)[:, 0]
        if self.k_scale is not None:
            logits *= self.k_scale[b, keys, 0]
        visible = self.visible(b, queries, keys)
        return logits if visible is None else logits.masked_fill_(~visible, -math.inf)

    def lists(self, indices: Tensor, topk_length: Tensor | None, rows_per_slot: int, products: int):
        """(batch element, queries, key row of each slot [n, topk], marks of the valid slots, keys [n, topk, d_i])."""
        topk = indices.shape[3]
        if not topk or not self.s_kv:
            return
        # Keys are gathered as bytes: FP8 tensors have no gather of their own.
        bytes_of = self.k.view(torch.uint8) if self.k.element_size() == 1 else self.k
        for b, queries in self.query_chunks(topk * (rows_per_slot * self.d_i + products * self.h_i + 8)):
            index = indices[b, queries, 0].to(torch.int64)
            length = None if topk_length is None else topk_length[b, queries]
            valid = valid_slots(index, s_kv=self.s_kv, position=None, k_stride=1, topk_length=length)
            window = visible_rows(index, queries.start, b, queries, self.params, self.k_start, self.k_end)
            valid = valid if window is None else valid & window
            index = torch.where(valid, index, 0)
            keys = bytes_of[b, :, 0].index_select(0, index.flatten()).view(self.k.dtype)
            keys = keys.to(self.acc).view(*index.shape, self.d_i).masked_fill_(~valid[:, :, None], 0.0)
            yield b, queries, index, valid, keys


def indexer_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    indices: Tensor | None,
    topk_length: Tensor | None,
    k_start: Tensor | None,
    k_end: Tensor | None,
    params: IndexerParams,
) -> Tensor:
    """[B, s_q, s_kv], or [B, s_q, topk] where indices are given, in the accumulation dtype."""
    call = _Indexer(q, k, weights, q_scale, k_scale, k_start, k_end, params)
    if indices is None:
        out = q.new_empty(call.B, call.s_q, call.s_kv, dtype=call.acc)
        for b, queries in call.query_chunks(call.tile_numbers(1)):
            for keys in call.key_tiles():
                out[b, queries, keys] = call.logits(b, queries, keys)
        return out
    out = q.new_full((call.B, call.s_q, indices.shape[3]), -math.inf, dtype=call.acc)
    for b, queries, index, valid, keys in call.lists(indices, topk_length, 2, 1):
        z = torch.bmm(q[b, queries].to(call.acc), keys.transpose(1, 2)).relu_()
        logits = torch.bmm(call.weights[b, queries, None], z)[:, 0]
        if k_scale is not None:
            logits *= k_scale[b, :, 0][index]
        out[b, queries] = logits.masked_fill_(~valid, -math.inf)
    return out


def indexer_logits_backward(
    dlogits: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor | None,
    topk_length: Tensor | None,
    k_start: Tensor | None,
    k_end: Tensor | None,
    params: IndexerParams,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk in the dtype of q, dweights in the accumulation dtype); the products are computed again."""
    call = _Indexer(q, k, weights, None, None, k_start, k_end, params)
    dq = torch.zeros(q.shape, dtype=call.acc, device=q.device)
    dk = torch.zeros(call.B, call.s_kv, call.d_i, dtype=call.acc, device=q.device)
    dweights = torch.zeros(weights.shape, dtype=call.acc, device=q.device)
    if indices is None:
        _dense_backward(call, dlogits, dq, dk, dweights)
    else:
        for b, queries, index, valid, keys in call.lists(indices, topk_length, 4, 3):
            q_rows = q[b, queries].to(call.acc)
            g = dlogits[b, queries].masked_fill(~valid, 0.0)
            z = torch.bmm(q_rows, keys.transpose(1, 2))
            dz = torch.where(z > 0, g[:, None] * weights[b, queries, :, None], 0.0)
            # An invalid slot has no product, also where the query holds a NaN.
            z = z.relu_().masked_fill_(~valid[:, None], 0.0)
            dweights[b, queries] = torch.bmm(z, g[:, :, None])[:, :, 0]
            dq[b, queries] = torch.bmm(dz, keys)
            dkeys = torch.bmm(dz.transpose(1, 2), q_rows).masked_fill_(~valid[:, :, None], 0.0).flatten(0, 1)
            if deterministic and dk.is_cuda:
                # On CUDA index_add_ adds atomically, in any order; index_put_ sorts stably first.
                dk[b].index_put_((index.flatten(),), dkeys, accumulate=True)
            else:
                dk[b].index_add_(0, index.flatten(), dkeys)
    return dq.to(q.dtype), dk[:, :, None].to(k.dtype), dweights


def _dense_backward(call: _Indexer, dlogits: Tensor, dq: Tensor, dk: Tensor, dweights: Tensor) -> None:
    """Adds the gradients of the dense form. A row that is not finite is left out of the products, which sum over
    queries or keys that do not see it; those that do get NaN."""
    for b, queries in call.query_chunks(call.tile_numbers(4)):
        q_rows = call.q[b, queries].to(call.acc)
        q_bad = ~q_rows.isfinite()
        q_clean = q_rows.masked_fill(q_bad, 0.0)
        for keys in call.key_tiles():
            k_rows = call.k[b, keys, 0].to(call.acc)
            k_bad = ~k_rows.isfinite()
            visible = call.visible(b, queries, keys)
            g = dlogits[b, queries, keys]
            z = call.z(b, queries, keys)
            if visible is None:
                seen = torch.ones_like(g)
            else:
                g, seen = g.masked_fill(~visible, 0.0), visible.to(call.acc)
            dz = torch.where(z > 0, g[:, None] * call.weights[b, queries, :, None], 0.0)
            z.relu_()
            if visible is not None:
                # What is not finite, a weight as well, reaches no key outside the window.
                hidden = ~visible[:, None]
                dz.masked_fill_(hidden, 0.0)
                z.masked_fill_(hidden, 0.0)
            dweights[b, queries] += torch.bmm(z, g[:, :, None])[:, :, 0]
            dz = dz.flatten(0, 1)
            dq[b, queries] += torch.mm(dz, k_rows.masked_fill(k_bad, 0.0)).view_as(q_rows)
            dq[b, queries] += _poison(seen @ k_bad.to(call.acc))[:, None]
            dk[b, keys] += torch.mm(dz.T, q_clean.flatten(0, 1))
            dk[b, keys] += _poison(seen.T @ q_bad.any(1).to(call.acc))


def _poison(count: Tensor) -> Tensor:
    return torch.where(count > 0, math.nan, 0.0)


# ---------------------------------------------------------------------------------------------------- selection


def order_keys(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Integers in the order of the logits: NaN highest, -0 equal to +0; a row that is no candidate has the lowest."""
    if logits.dtype == torch.float64:
        x, integer, sign = logits, torch.int64, 63
    else:
        x, integer, sign = logits.float(), torch.int32, 31
    info = torch.iinfo(integer)
    bits = (x + 0.0).view(integer)
    keys = bits ^ ((bits >> sign) & info.max)
    keys = keys.masked_fill_(x.isnan(), info.max)
    out = x == -math.inf if visible is None else (x == -math.inf) | ~visible
    return keys.masked_fill_(out, info.min)


class _Best:
    """The best topk of a chunk of rows, in tiles of ascending columns: keys, rows and values [n, c], best first."""

    def __init__(self, topk: int):
        self.topk = topk
        self.keys = self.rows = self.values = None

    def add(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Merges a tile of keys and values [n, m] whose first column is row `first`."""
        rows = torch.arange(first, first + keys.shape[1], device=keys.device).expand_as(keys)
        if self.keys is not None:
            keys, rows = torch.cat((self.keys, keys), 1), torch.cat((self.rows, rows), 1)
            values = torch.cat((self.values, values), 1)
        count = min(self.topk, keys.shape[1])
        # Of equal keys the smaller row comes first: what is kept precedes the tile, and is in that order itself.
        if keys.dtype == torch.int64:
            place = keys.sort(dim=1, descending=True, stable=True).indices[:, :count]
        else:
            # Key and place in one number: no two are equal, so any top-k is exact.
            both = (keys.to(torch.int64) << 31) + torch.arange(MAX_ROW, MAX_ROW - keys.shape[1], -1, device=keys.device)
            place = MAX_ROW - (both.topk(count, 1, sorted=True).values & MAX_ROW)
        self.keys, self.rows, self.values = (x.gather(1, place) for x in (keys, rows, values))

    def write(self, indices: Tensor, values: Tensor | None, sorted: bool) -> None:
        """Fills indices [n, topk] int32 and, where given, values [n, topk]: the selected rows, then -1 and -inf."""
        indices.fill_(-1)
        if values is not None:
            values.fill_(-math.inf)
        if self.keys is None:
            return
        candidate = self.keys > torch.iinfo(self.keys.dtype).min
        rows = torch.where(candidate, self.rows, MAX_ROW + 1)
        picked = self.values.masked_fill(~candidate, -math.inf)
        if sorted:
            rows, order = rows.sort(1)
            picked = picked.gather(1, order)
        indices[:, : rows.shape[1]] = rows.masked_fill(rows > MAX_ROW, -1).to(torch.int32)
        if values is not None:
            values[:, : rows.shape[1]] = picked


def topk_indices(
    logits: Tensor,
    k_start: Tensor | None,
    k_end: Tensor | None,
    params: IndexerParams,
    *,
    topk: int,
    sorted: bool,
    return_values: bool,
) -> tuple[Tensor, Tensor | None]:
    """indices [B, s_q, 1, topk] int32 and, where asked for, values [B, s_q, topk]; logits [B, s_q, n]."""
    B, s_q, n = logits.shape
    indices = torch.empty(B, s_q, 1, topk, dtype=torch.int32, device=logits.device)
    values = torch.empty(B, s_q, topk, dtype=logits.dtype, device=logits.device) if return_values else None
    columns = torch.arange(n, device=logits.device)
    step = max(1, min(budget(logits.device), MAX_TILE_BYTES) // (48 * max(1, n)))
    for b in range(B):
        for first in range(0, s_q, step):
            rows = slice(first, min(first + step, s_q))
            visible = visible_rows(columns, first, b, rows, params, k_start, k_end)
            best = _Best(topk)
            if n:
                best.add(order_keys(logits[b, rows], visible), logits[b, rows], 0)
            best.write(indices[b, rows, 0], None if values is None else values[b, rows], sorted)
    return indices, values


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    k_start: Tensor | None,
    k_end: Tensor | None,
    params: IndexerParams,
    *,
    topk: int,
    sorted: bool,
) -> tuple[Tensor, Tensor]:
    """logits [B, s_q, topk] and indices [B, s_q, 1, topk] int32, from the tiles of `indexer_logits`."""
    call = _Indexer(q, k, weights, q_scale, k_scale, k_start, k_end, params)
    indices = torch.empty(call.B, call.s_q, 1, topk, dtype=torch.int32, device=q.device)
    logits = torch.empty(call.B, call.s_q, topk, dtype=call.acc, device=q.device)
    for b, queries in call.query_chunks(call.tile_numbers(1)):
        best = _Best(topk)
        for keys in call.key_tiles():
            tile = call.logits(b, queries, keys)
            best.add(order_keys(tile, None), tile, keys.start)
        best.write(indices[b, queries, 0], logits[b, queries], sorted)
    return logits, indices
