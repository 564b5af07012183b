"""htree attention, its backward and tree pooling in PyTorch operations. What is computed is `definition.py`; how:

* Everything runs on rows ``(b, h_kv, query)``. A chunk of queries walks the tree top-down once; the number of
  candidates of a query depends on its position alone, so no shape depends on data.
* At the top layer, candidates are the first nodes for every query: keys are rotated once, and all queries share one
  matrix product. Lower layers gather each query's candidates; position p of a candidate is its place in the gathered
  block, so one [n, K/2] table of angles serves every query.
* Rows that a query must not see (nodes beyond it, its rightmost node above the bottom, expanded nodes, padding) are
  zeroed in the gathered keys and values, not just given probability zero: 0 * NaN is NaN. The products of the
  top layer share their rows; where one is not finite (looked up once a call: the only synchronisation), the product
  runs without it and NaN is put back where it is attended. That changes no bit of any other number.
* The backward keeps nothing but the selection and walks again, chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..definition import accumulation_dtype, infinite_to_nan, layer_sizes
from ..params import TreeParams
from . import sinks
from .chunks import Scratch, budget
from .rotation import rope_tables, rotate

# --------------------------------------------------------------------------------------------------------------- tree


def _pool_once(x: Tensor, r: int) -> Tensor:
    """[BH, N, D] -> [BH, ceil(N / r), D]: children added ascending in the accumulation dtype, over their count."""
    full = x.shape[1] // r
    parts = []
    for children in (x[:, : full * r].unflatten(1, (full, r)), x[:, None, full * r :]):
        count = children.shape[2]
        if count == 0 or children.shape[1] == 0:
            continue
        total = children[:, :, 0].to(accumulation_dtype(x.dtype), copy=True)
        for c in range(1, count):
            total += children[:, :, c]
        # By a tensor: CUDA replaces a division by a Python number by a product with its rounded reciprocal.
        parts.append((total / total.new_full((1,), count)).to(x.dtype))
    return torch.cat(parts, dim=1)


def build_tree(x: Tensor, compression_rate: int, max_top_nodes: int) -> list[Tensor]:
    """[B, T, H_kv, D] -> [B*H_kv, N_l, D] contiguous for every layer, bottom first, in x's dtype."""
    B, T, H_kv, D = x.shape
    layers = [x.transpose(1, 2).reshape(B * H_kv, T, D).contiguous()]
    for _ in layer_sizes(T, compression_rate, max_top_nodes)[1:]:
        layers.append(_pool_once(layers[-1], compression_rate))
    return layers


def tree_pool(x: Tensor, compression_rate: int, max_top_nodes: int) -> Tensor:
    """[B, T, H_kv, D] -> [B, H_kv, M, D], the layers above the tokens concatenated along nodes, layer 1 first."""
    B, _, H_kv, D = x.shape
    upper = build_tree(x, compression_rate, max_top_nodes)[1:]
    if not upper:
        return x.new_empty(B, H_kv, 0, D)
    return torch.cat(upper, dim=1).unflatten(0, (B, H_kv))


def _unpool(grad: Tensor, below: int, r: int) -> Tensor:
    """Gradient of `_pool_once`: [BH, N, D] -> [BH, below, D], 1 / count of the parent's gradient to each child."""
    N = grad.shape[1]
    count = torch.full((N, 1), r, dtype=grad.dtype, device=grad.device)
    count[N - 1] = below - (N - 1) * r
    return (grad / count).repeat_interleave(r, dim=1)[:, :below]


# ------------------------------------------------------------------------------------------------------------- layers


class _Layer:
    """One layer for one chunk of queries: who the candidates are, and the products with their keys and values.

    n: [rows] number of candidates of each query; valid, rightmost: [rows, width] marks over candidate positions.
    """

    def __init__(self, layer: int, n: Tensor, width: int):
        position = torch.arange(width, device=n.device)
        self.layer = layer
        self.n = n
        self.valid = position < n[:, None]
        self.rightmost = position == n[:, None] - 1


class _TopLayer(_Layer):
    """Dense: candidates are nodes 0 .. width-1 for every query, so rows of one (b, h_kv) share their products.

    keys, rotated: [BH, width, K], values: [BH, width, V] in the accumulation dtype. ``bad_*`` mark non-finite entries
    (None where there is none): they are taken out of the products and put back as NaN only where a leaf holds them.
    """

    def __init__(self, layer: int, n: Tensor, keys_rot: Tensor, values: Tensor, bad_keys, bad_values, rotate_by):
        super().__init__(layer, n, values.shape[1])
        self.keys_rot, self.values, self.rotate_by = keys_rot, values, rotate_by
        self.bad_keys, self.bad_values = bad_keys, bad_values

    def _per_bh(self, x: Tensor) -> Tensor:
        return x.reshape(self.values.shape[0], -1, x.shape[-1])

    def _node(self, width: int) -> Tensor:
        return torch.arange(width, device=self.n.device).expand(self.n.shape[0], width)

    def nodes(self) -> Tensor:
        return self._node(self.values.shape[1])

    def scores(self, q_rot: Tensor) -> Tensor:
        s = self._per_bh(q_rot) @ self.keys_rot.transpose(1, 2)
        return s.reshape(*q_rot.shape[:2], -1)

    def value_products(self, dout: Tensor) -> Tensor:
        return (self._per_bh(dout) @ self.values.transpose(1, 2)).reshape(*dout.shape[:2], -1)

    def _masked_product(self, weights: Tensor, leaves: Tensor, rows: Tensor, bad: Tensor | None) -> Tensor:
        """weights [rows, G, width] @ rows [BH, width, D] -> [rows, G, D]; what is not finite counts at leaves only."""
        if bad is None:
            return (self._per_bh(weights) @ rows).reshape(*weights.shape[:2], -1)
        out = (self._per_bh(weights) @ rows.masked_fill(bad, 0.0)).reshape(*weights.shape[:2], -1)
        hit = (self._per_bh(leaves.to(weights.dtype)) @ bad.to(weights.dtype)).reshape(leaves.shape[0], 1, -1) > 0
        return torch.where(hit, math.nan, out)

    def _transposed_product(self, weights: Tensor, leaves: Tensor, rows: Tensor, all_finite: bool) -> Tensor:
        """weights [rows, G, width], transposed, @ rows [rows, G, D] -> [BH, width, D]; likewise."""
        if all_finite:
            return self._per_bh(weights).transpose(1, 2) @ self._per_bh(rows)
        bad = ~rows.isfinite()
        out = self._per_bh(weights).transpose(1, 2) @ self._per_bh(rows.masked_fill(bad, 0.0))
        marks = self._per_bh(leaves.to(weights.dtype)).transpose(1, 2)
        return torch.where(marks @ self._per_bh(bad.any(1).to(weights.dtype)) > 0, math.nan, out)

    def weighted_values(self, p: Tensor, leaves: Tensor) -> Tensor:
        return self._masked_product(p, leaves, self.values, self.bad_values)

    def weighted_keys(self, dS: Tensor, leaves: Tensor) -> Tensor:
        return self._masked_product(dS, leaves, self.keys_rot, self.bad_keys)

    def add_gradients(self, dk: Tensor, dv: Tensor, dS: Tensor, P: Tensor, q_rot: Tensor, dout: Tensor, leaves, finite):
        width = self.values.shape[1]
        dk_rot = self._transposed_product(dS, leaves, q_rot, finite)
        dk[:, :width] += self.rotate_by(slice(width), dk_rot, sign=-1)
        dv[:, :width] += self._transposed_product(P, leaves, dout, finite)


class _LowerLayer(_Layer):
    """Gathered: candidates are the children of each query's own parents.

    keys: [BH, N_l, K], values: [BH, N_l, V] in the input dtype; parents: [rows, P] ascending, padded with anything.
    """

    def __init__(
        self, layer: int, n: Tensor, t: Tensor, parents: Tensor, keys, values, rotate_by, r: int, scratch, deterministic
    ):
        width = parents.shape[1] * r
        super().__init__(layer, n, width)
        self.rotate_by = rotate_by
        children = (parents[:, :, None] * r + torch.arange(r, device=n.device)).flatten(1)
        self.node = torch.where(self.valid, children, (t // r**layer)[:, None])
        BH, N, _ = keys.shape
        rows_per_bh = n.shape[0] // BH
        first = torch.arange(BH, device=n.device).repeat_interleave(rows_per_bh) * N
        self.flat = (self.node + first[:, None]).flatten()
        self.scratch, self.acc, self.deterministic = scratch, accumulation_dtype(keys.dtype), deterministic
        gathered = self._gather(keys, "gathered")
        self.keys_rot = rotate_by(slice(width), gathered, out=self._buffer("keys", gathered.shape[2]))
        self.values = self._gather(values, "values")
        if self.values.dtype != self.acc:
            self.values = self._buffer("values", values.shape[2]).copy_(self.values)

    def _buffer(self, name: str, dim: int) -> Tensor:
        return self.scratch.get(name, (*self.node.shape, dim), self.acc)

    def _gather(self, x: Tensor, name: str) -> Tensor:
        rows = self.scratch.get(name, (self.flat.shape[0], x.shape[2]), x.dtype)
        torch.index_select(x.flatten(0, 1), 0, self.flat, out=rows)
        return rows.view(*self.node.shape, x.shape[2])

    def _add_rows(self, total: Tensor, rows: Tensor) -> None:
        """Adds rows [rows, width, D] to their nodes of total [BH, N_l, D]."""
        total, rows = total.flatten(0, 1), rows.flatten(0, 1)
        if self.deterministic and total.is_cuda:
            # On CUDA index_add_ adds atomically, in any order; index_put_ sorts stably first and adds in that order.
            total.index_put_((self.flat,), rows, accumulate=True)
        else:
            total.index_add_(0, self.flat, rows)

    def nodes(self) -> Tensor:
        return self.node

    def scores(self, q_rot: Tensor) -> Tensor:
        return torch.bmm(q_rot, self.keys_rot.transpose(1, 2))

    def value_products(self, dout: Tensor) -> Tensor:
        return torch.bmm(dout, self.values.transpose(1, 2))

    def weighted_values(self, p: Tensor, leaves: Tensor) -> Tensor:
        return torch.bmm(p, self.values.masked_fill_(~leaves[:, :, None], 0.0))

    def weighted_keys(self, dS: Tensor, leaves: Tensor) -> Tensor:
        return torch.bmm(dS, self.keys_rot.masked_fill_(~leaves[:, :, None], 0.0))

    def add_gradients(self, dk: Tensor, dv: Tensor, dS: Tensor, P: Tensor, q_rot: Tensor, dout: Tensor, leaves, finite):
        not_leaf = ~leaves[:, :, None]
        dk_rot = torch.bmm(dS.transpose(1, 2), q_rot, out=self._buffer("products", q_rot.shape[2]))
        dk_rot.masked_fill_(not_leaf, 0.0)
        rows = self.rotate_by(slice(dk_rot.shape[1]), dk_rot, sign=-1, out=self._buffer("rotated", q_rot.shape[2]))
        self._add_rows(dk, rows)
        rows = torch.bmm(P.transpose(1, 2), dout, out=self._buffer("products", dout.shape[2]))
        rows.masked_fill_(not_leaf, 0.0)
        self._add_rows(dv, rows)


# --------------------------------------------------------------------------------------------------------------- walk


def _bad(x: Tensor) -> Tensor | None:
    bad = ~x.isfinite()
    return bad if bool(bad.any()) else None


class _Walk:
    """What every chunk of one call shares: the tree, the tables, the rotated keys of the top layer."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, params: TreeParams, *, deterministic: bool = False):
        self.deterministic = deterministic
        # With more children than tokens there is one node anyway: tables and gathers need not be wider.
        r = min(params.compression_rate, max(2, 1 << (k.shape[1] - 1).bit_length()))
        params = dataclasses.replace(params, compression_rate=r)
        self.params = params
        self.acc = accumulation_dtype(q.dtype)
        self.B, self.T_q, self.H, self.K = q.shape
        self.H_kv, self.V = k.shape[2], v.shape[3]
        self.G = self.H // self.H_kv
        self.BH = self.B * self.H_kv
        self.q = q
        self.scratch = Scratch(q.device)
        self.tree_k = build_tree(k, params.compression_rate, params.max_top_nodes)
        self.tree_v = build_tree(v, params.compression_rate, params.max_top_nodes)
        self.L = len(self.tree_k)
        widest = self.tree_k[-1].shape[1]
        if self.L > 1:
            widest = max(widest, min(params.top_k, self.tree_k[1].shape[1]) * r)
        R = self.K if params.rope_dim is None else params.rope_dim
        self.widest = widest
        self.cos, self.sin = rope_tables(widest, R, params.rope_base, self.acc, q.device, params.rope_inv_freq)
        self.top_keys_rot = self.rotate_by(slice(self.tree_k[-1].shape[1]), self.tree_k[-1])
        self.top_values = self.tree_v[-1].to(self.acc)
        self.bad_keys, self.bad_values = _bad(self.top_keys_rot), _bad(self.top_values)

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """(slice of b*H_kv + h_kv, slice of queries). Their sizes follow from shapes alone."""
        if self.BH == 0 or self.T_q == 0:
            return
        row_bytes = self.widest * self.top_values.element_size() * (3 * self.K + 3 * self.V + 6 * self.G + 8)
        rows = max(1, budget(self.q.device) // row_bytes)
        bh_step = min(self.BH, rows)
        q_step = max(1, rows // bh_step)
        for bh in range(0, self.BH, bh_step):
            for first in range(0, self.T_q, q_step):
                yield slice(bh, min(bh + bh_step, self.BH)), slice(first, min(first + q_step, self.T_q))

    def rows(self, x: Tensor, bh: slice, queries: slice) -> Tensor:
        """[B, T_q, H, D] -> the chunk's rows [bh * queries, G, D] in the accumulation dtype."""
        if self.B == 1:  # a view first: only the chunk is copied
            part = x[0, queries].unflatten(1, (self.H_kv, self.G))[:, bh].transpose(0, 1)
        else:
            part = x[:, queries].unflatten(2, (self.H_kv, self.G)).permute(0, 2, 1, 3, 4).flatten(0, 1)[bh]
        return part.to(self.acc).reshape(-1, self.G, x.shape[-1])

    def put_rows(self, x: Tensor, bh: slice, queries: slice, rows: Tensor) -> None:
        """Inverse of `rows`: writes [bh * queries, G, D] (or [..., G]) into x [B, T_q, H, D] (or [B, T_q, H])."""
        rows = rows.reshape(bh.stop - bh.start, queries.stop - queries.start, self.G, *x.shape[3:])
        heads = x.unflatten(2, (self.H_kv, self.G))
        for i in range(bh.start, bh.stop):
            heads[i // self.H_kv, queries, i % self.H_kv] = rows[i - bh.start].to(x.dtype)

    def positions(self, bh: slice, queries: slice) -> Tensor:
        t = torch.arange(queries.start, queries.stop, device=self.q.device) + self.params.q_start
        return t.repeat(bh.stop - bh.start)

    def top_layer(self, t: Tensor, bh: slice, queries: slice) -> _TopLayer:
        layer = self.L - 1
        stride = self.params.compression_rate**layer
        width = (self.params.q_start + queries.stop - 1) // stride + 1
        bad_keys = None if self.bad_keys is None else self.bad_keys[bh, :width]
        bad_values = None if self.bad_values is None else self.bad_values[bh, :width]
        keys_rot, values = self.top_keys_rot[bh, :width], self.top_values[bh, :width]
        return _TopLayer(layer, t // stride + 1, keys_rot, values, bad_keys, bad_values, self.rotate_by)

    def lower_layer(self, above: _Layer, t: Tensor, parents: Tensor, bh: slice) -> _LowerLayer:
        r, layer = self.params.compression_rate, above.layer - 1
        n = (above.n.clamp(max=self.params.top_k) - 1) * r + t // r**layer % r + 1
        keys, values = self.tree_k[layer][bh], self.tree_v[layer][bh]
        return _LowerLayer(layer, n, t, parents, keys, values, self.rotate_by, r, self.scratch, self.deterministic)

    def query_at(self, q: Tensor, layer: _Layer, sign: int = 1) -> Tensor:
        """q [rows, G, K] rotated to each query's own position n - 1 (sign -1: rotated back)."""
        cos, sin = self.cos[layer.n - 1][:, None], self.sin[layer.n - 1][:, None]
        return rotate(q, cos, sin, sign, interleaved=self.params.rope_interleaved)

    def rotate_by(self, places: slice, x: Tensor, sign: int = 1, out: Tensor | None = None) -> Tensor:
        """x [..., places, K] rotated by places of a candidate list."""
        return rotate(x, self.cos[places], self.sin[places], sign, out, self.params.rope_interleaved)

    def heads(self, x: Tensor, bh: slice, queries: int) -> Tensor:
        """[H] -> [bh * queries, G], one row for each of so many queries."""
        return x.view(1, self.H_kv, self.G).expand(self.B, -1, -1).flatten(0, 1)[bh].repeat_interleave(queries, 0)

    def given(self, selection: Tensor, layer: _Layer, bh: slice, queries: slice) -> tuple[Tensor, Tensor]:
        """What `_select` returns, from a selection that was made before."""
        nodes = selection[layer.layer - 1][:, queries].transpose(1, 2).flatten(0, 1)[bh]
        return _replay(nodes.flatten(0, 1).to(torch.int64), layer, self.params.top_k)


def _log_importance(s: Tensor, layer: _Layer, strict_causal: bool) -> Tensor:
    """s: [rows, G, width] with -inf at invalid positions -> [rows, width]; NaN ranks as +inf, as in the definition."""
    visible = s.masked_fill(layer.rightmost[:, None], -math.inf) if strict_causal else s
    lse = torch.logsumexp(visible, dim=2, keepdim=True)
    log_imp = torch.logsumexp(s - lse, dim=1)
    return log_imp.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _select(log_imp: Tensor, layer: _Layer, top_k: int) -> tuple[Tensor, Tensor]:
    """The min(top_k, n) most important candidates, ties to the lower position, the rightmost always.

    Returns marks [rows, width] and nodes [rows, min(top_k, width)], ascending, padded with -1. No sort: the k-th
    largest value splits the candidates into above, equal and below, and positions decide among the equal ones.
    """
    width = log_imp.shape[1]
    k = min(top_k, width)
    other = layer.valid & ~layer.rightmost
    # The rightmost takes one of the places, by definition; -inf is also a real importance, hence the lowest finite.
    ranked = log_imp.clamp(min=torch.finfo(log_imp.dtype).min).masked_fill_(~other, -math.inf)
    marks = layer.rightmost.clone()
    if k > 1:
        threshold = torch.topk(ranked, k - 1, dim=1, sorted=True).values[:, -1:]
        above = ranked > threshold
        equal = ranked == threshold
        room = (k - 1) - above.sum(1, keepdim=True)
        marks |= (above | (equal & (equal.cumsum(1) <= room))) & other
    return marks, _marked(marks, layer, k)


def _marked(marks: Tensor, layer: _Layer, k: int) -> Tensor:
    """The nodes of marked candidates, at most k a row, ascending, padded with -1: [rows, k]."""
    nodes = torch.full((marks.shape[0], k + 1), -1, dtype=torch.int64, device=marks.device)
    return nodes.scatter_(1, torch.where(marks, marks.cumsum(1) - 1, k), layer.nodes())[:, :k]


def _replay(given: Tensor, layer: _Layer, top_k: int) -> tuple[Tensor, Tensor]:
    """Marks and nodes as of `_select`, for nodes [rows, top_k] that somebody else selected. Whatever they are,
    min(top_k, n) candidates are marked, the rightmost among them: what is no candidate is left out, and the lowest
    candidates stand in for what is missing."""
    rows, width = layer.valid.shape
    # Candidates ascend and their padding repeats the last one, so a search finds each node's place.
    candidates = layer.nodes().contiguous()
    place = torch.searchsorted(candidates, given.contiguous()).clamp_(max=width - 1)
    chosen = torch.zeros(rows, width + 1, dtype=torch.bool, device=given.device)
    chosen.scatter_(1, torch.where(candidates.gather(1, place) == given, place, width), True)
    other = layer.valid & ~layer.rightmost
    wanted = layer.n.clamp(max=top_k)[:, None] - 1
    marks = chosen[:, :width] & other
    marks &= marks.cumsum(1) <= wanted
    free = other & ~marks
    marks |= free & (free.cumsum(1) <= wanted - marks.sum(1, keepdim=True))
    marks |= layer.rightmost
    return marks, _marked(marks, layer, min(top_k, width))


# ------------------------------------------------------------------------------------------------- forward, backward


def forward(
    q: Tensor, k: Tensor, v: Tensor, params: TreeParams, *, need_selection: bool = False, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,T_q,H,K], k [B,T,H_kv,K], v [B,T,H_kv,V] -> out [B,T_q,H,V] (their dtype), lse [B,T_q,H] (accumulation
    dtype), selection [L-1,B,T_q,H_kv,top_k] int32 (first dimension 0 unless needed). given: a selection to replay."""
    walk = _Walk(q, k, v, params)
    out = q.new_empty(walk.B, walk.T_q, walk.H, walk.V)
    lse = torch.empty(walk.B, walk.T_q, walk.H, dtype=walk.acc, device=q.device)
    kept = walk.L - 1 if need_selection else 0
    selection = torch.full((kept, walk.B, walk.T_q, walk.H_kv, params.top_k), -1, dtype=torch.int32, device=q.device)
    for bh, queries in walk.chunks():
        t = walk.positions(bh, queries)
        q_rows = walk.rows(q, bh, queries)
        row_max = q_rows.new_full(q_rows.shape[:2], -math.inf)
        row_sum = q_rows.new_zeros(q_rows.shape[:2])
        acc = q_rows.new_zeros(*q_rows.shape[:2], walk.V)
        layer: _Layer = walk.top_layer(t, bh, queries)
        while True:
            s = layer.scores(walk.query_at(q_rows, layer)).mul_(params.scale)
            s.masked_fill_(~layer.valid[:, None], -math.inf)
            leaves, parents = layer.valid, None
            if layer.layer > 0:
                if given is not None:
                    marks, parents = walk.given(given, layer, bh, queries)
                else:
                    marks, parents = _select(_log_importance(s, layer, params.strict_causal), layer, params.top_k)
                leaves = layer.valid & ~marks
                s.masked_fill_(~leaves[:, None], -math.inf)
                if need_selection:
                    for i in range(bh.start, bh.stop):
                        b, h_kv = divmod(i, walk.H_kv)
                        rows = parents.reshape(bh.stop - bh.start, -1, parents.shape[1])[i - bh.start]
                        selection[layer.layer - 1, b, queries, h_kv, : rows.shape[1]] = rows.to(torch.int32)
            new_max = torch.maximum(row_max, s.amax(2))
            base = new_max.masked_fill(new_max == -math.inf, 0.0)  # no leaf so far: exp(-inf - 0) = 0
            decay = torch.exp(row_max - base)
            p = s.sub_(base[:, :, None]).exp_()
            row_sum = row_sum * decay + p.sum(2)
            acc = acc * decay[:, :, None] + layer.weighted_values(p, leaves)
            row_max = new_max
            if parents is None:
                break
            layer = walk.lower_layer(layer, t, parents, bh)
        lse_rows = infinite_to_nan(row_max + row_sum.log())
        out_rows = infinite_to_nan(acc / row_sum[:, :, None])
        if params.attn_sink is not None:
            out_rows *= sinks.share(lse_rows, walk.heads(params.attn_sink, bh, queries.stop - queries.start))[..., None]
        walk.put_rows(out, bh, queries, out_rows)
        walk.put_rows(lse, bh, queries, lse_rows)
    return out, lse, selection


def backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Tensor,
    params: TreeParams,
    *,
    deterministic: bool = False,
    add_to: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtype of the inputs. dlse [B,T_q,H]; out, lse, selection as `forward` returned them. The
    gradient of attn_sink is `sinks.gradient`.

    deterministic: no atomic additions, on a device that has them. add_to: dk and dv are added to these tensors, of the
    accumulation dtype, which are then returned.
    """
    walk = _Walk(q, k, v, params, deterministic=deterministic)
    finite = _bad(q) is None and _bad(dout) is None
    if params.attn_sink is not None:
        lse, dlse = sinks.folded(lse, dlse, params.attn_sink)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtree_k = [torch.zeros(x.shape, dtype=walk.acc, device=x.device) for x in walk.tree_k]
    dtree_v = [torch.zeros(x.shape, dtype=walk.acc, device=x.device) for x in walk.tree_v]
    for bh, queries in walk.chunks():
        t = walk.positions(bh, queries)
        q_rows = walk.rows(q, bh, queries)
        do = walk.rows(dout, bh, queries)
        lse_rows = walk.rows(lse[..., None], bh, queries)
        offset = walk.rows(dlse[..., None], bh, queries)
        offset = offset - (do * walk.rows(out, bh, queries)).sum(2, keepdim=True)
        dq_rows = torch.zeros_like(q_rows)
        layer: _Layer = walk.top_layer(t, bh, queries)
        while True:
            leaves, parents = layer.valid, None
            if layer.layer > 0:
                marks, parents = walk.given(selection, layer, bh, queries)
                leaves = layer.valid & ~marks
            q_rot = walk.query_at(q_rows, layer)
            not_leaf = ~leaves[:, None]
            P = layer.scores(q_rot).mul_(params.scale).sub_(lse_rows).masked_fill_(not_leaf, -math.inf).exp_()
            dS = layer.value_products(do).add_(offset).mul_(P).mul_(params.scale).masked_fill_(not_leaf, 0.0)
            dq_rows += walk.query_at(layer.weighted_keys(dS, leaves), layer, sign=-1)
            layer.add_gradients(dtree_k[layer.layer][bh], dtree_v[layer.layer][bh], dS, P, q_rot, do, leaves, finite)
            if parents is None:
                break
            layer = walk.lower_layer(layer, t, parents, bh)
        walk.put_rows(dq, bh, queries, dq_rows)
    for dtree in (dtree_k, dtree_v):
        for i in reversed(range(1, walk.L)):
            dtree[i - 1] += _unpool(dtree[i], dtree[i - 1].shape[1], walk.params.compression_rate)
    sums = [dtree[0].unflatten(0, (walk.B, walk.H_kv)).transpose(1, 2) for dtree in (dtree_k, dtree_v)]
    if add_to is not None:
        return dq, *(x.add_(own) for x, own in zip(add_to, sums, strict=True))
    return dq, *(own.to(q.dtype).contiguous() for own in sums)
