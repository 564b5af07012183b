"""htree attention, its backward and tree pooling in PyTorch operations. What is computed is `definition.py`; how:

* Everything runs on rows ``(b, h_kv, query)``. A chunk of queries descends the tree top-down once; the number of
  candidates of a query depends on its position alone, so no shape depends on data.
* At the top layer, candidates are the first nodes for every query: keys are rotated once, and all queries share one
  matrix product. Lower layers gather each query's parents with all their children (`layers.py`).
* Rows that a query must not see (nodes after it, its rightmost node above the bottom, expanded nodes, padding) are
  zeroed in the gathered keys and values where some are not finite, not just given probability zero: 0 * NaN is NaN. The
  products of the top layer share their rows; where one is not finite, the product runs without it and NaN is put back
  where it is attended. That changes no bit of any other number. What is not finite is looked up once a call, which is
  the only synchronisation.
* The backward keeps nothing but the selection and descends again, chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..definition import accumulation_dtype, infinite_to_nan, layer_sizes
from ..params import TreeParams
from . import sinks
from .chunks import Scratch, budget
from .layers import Layer, LowerLayer, Rotations, Siblings, TopLayer
from .rotation import rope_tables

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


# ------------------------------------------------------------------------------------------------------------ descent


def _all_finite(*tensors: Tensor) -> list[bool]:
    """Whether each is finite throughout; one synchronisation for all."""
    return torch.stack([x.isfinite().all() for x in tensors]).tolist()


def _by_parent(x: Tensor, r: int) -> Tensor:
    """[BH, N, D] -> [BH, ceil(N / r), r, D], a view unless the last parent has missing children, which become zeros."""
    missing = -x.shape[1] % r
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(1, (-1, r))


class _Descent:
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
        cos, sin = rope_tables(widest, R, params.rope_base, self.acc, q.device, params.rope_inv_freq)
        self.rotations = Rotations(cos, sin, params.rope_interleaved)
        self.top_keys_rot = self.rotations.at(slice(self.tree_k[-1].shape[1]), self.tree_k[-1])
        self.top_values = self.tree_v[-1].to(self.acc)
        finite = _all_finite(*self.tree_k[:-1], self.top_keys_rot, *self.tree_v)
        self.finite_keys, self.finite_values = finite[: self.L], finite[self.L :]
        self.bad_keys = None if self.finite_keys[-1] else ~self.top_keys_rot.isfinite()
        self.bad_values = None if self.finite_values[-1] else ~self.top_values.isfinite()
        self.siblings_of: tuple[slice, dict[int, Siblings]] = slice(0), {}

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """(slice of b*H_kv + h_kv, slice of queries). Their sizes follow from shapes alone."""
        if self.BH == 0 or self.T_q == 0:
            return
        candidate = 2 * self.K + 2 * self.V + 3 * self.G * self.K // self.params.compression_rate + 6 * self.G + 8
        rows = max(1, budget(self.q.device) // (self.widest * self.top_values.element_size() * candidate))
        # Few heads at once and many queries: what is made for all queries of a head stays small.
        bh_step = min(self.BH, max(1, rows // self.T_q))
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

    def top_layer(self, t: Tensor, bh: slice, queries: slice) -> TopLayer:
        layer = self.L - 1
        stride = self.params.compression_rate**layer
        width = (self.params.q_start + queries.stop - 1) // stride + 1
        bad_keys = None if self.bad_keys is None else self.bad_keys[bh, :width]
        bad_values = None if self.bad_values is None else self.bad_values[bh, :width]
        keys_rot, values = self.top_keys_rot[bh, :width], self.top_values[bh, :width]
        return TopLayer(layer, t // stride + 1, keys_rot, values, bad_keys, bad_values, self.rotations)

    def siblings(self, layer: int, bh: slice) -> Siblings:
        """The layer by parents; where queries look at more than it has, made ready once for all of them."""
        if self.siblings_of[0] != bh:
            self.siblings_of = bh, {}
        kept = self.siblings_of[1]
        if layer not in kept:
            keys, values = (
                _by_parent(tree[layer][bh], self.params.compression_rate) for tree in (self.tree_k, self.tree_v)
            )
            ready = self.T_q * self.params.top_k >= keys.shape[1]
            if ready:
                keys = self.rotations.at(slice(self.params.compression_rate), keys)
                values = values.to(self.acc)
            kept[layer] = Siblings(keys, values, ready, self.finite_keys[layer], self.finite_values[layer])
        return kept[layer]

    def lower_layer(self, above: Layer, t: Tensor, parents: Tensor, bh: slice) -> LowerLayer:
        r, layer = self.params.compression_rate, above.layer - 1
        n = (above.n.clamp(max=self.params.top_k) - 1) * r + t // r**layer % r + 1
        siblings = self.siblings(layer, bh)
        return LowerLayer(layer, n, t, parents, siblings, self.rotations, self.scratch, self.deterministic)

    def empty_gradients(self, tree: list[Tensor]) -> list[Tensor]:
        """Zeros for every layer, as its `add_gradients` takes them."""
        shapes = [_by_parent(x[:1, :, :0], self.params.compression_rate).shape[1:3] for x in tree[:-1]]
        shapes = [(self.BH, *shape, tree[0].shape[2]) for shape in shapes] + [tree[-1].shape]
        return [torch.zeros(shape, dtype=self.acc, device=self.q.device) for shape in shapes]

    def heads(self, x: Tensor, bh: slice, queries: int) -> Tensor:
        """[H] -> [bh * queries, G], one row for each of so many queries."""
        return x.view(1, self.H_kv, self.G).expand(self.B, -1, -1).flatten(0, 1)[bh].repeat_interleave(queries, 0)

    def given(self, selection: Tensor, layer: Layer, bh: slice, queries: slice) -> tuple[Tensor, Tensor]:
        """What `_select` returns, from a selection that was made before."""
        nodes = selection[layer.layer - 1][:, queries].transpose(1, 2).flatten(0, 1)[bh]
        return _replay(nodes.flatten(0, 1).to(torch.int64), layer, self.params.top_k)


def _log_importance(s: Tensor, layer: Layer, strict_causal: bool) -> Tensor:
    """s: [rows, G, width] with -inf at invalid positions -> [rows, width]; NaN ranks as +inf, as in the definition."""
    visible = s.masked_fill(layer.rightmost[:, None], -math.inf) if strict_causal else s
    lse = torch.logsumexp(visible, dim=2, keepdim=True)
    log_imp = torch.logsumexp(s - lse, dim=1)
    return log_imp.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _select(log_imp: Tensor, layer: Layer, top_k: int) -> tuple[Tensor, Tensor]:
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


def _marked(marks: Tensor, layer: Layer, k: int) -> Tensor:
    """The nodes of marked candidates, at most k a row, ascending, padded with -1: [rows, k]."""
    nodes = torch.full((marks.shape[0], k + 1), -1, dtype=torch.int64, device=marks.device)
    return nodes.scatter_(1, torch.where(marks, marks.cumsum(1) - 1, k), layer.nodes())[:, :k]


def _replay(given: Tensor, layer: Layer, top_k: int) -> tuple[Tensor, Tensor]:
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
    descent = _Descent(q, k, v, params)
    out = q.new_empty(descent.B, descent.T_q, descent.H, descent.V)
    lse = torch.empty(descent.B, descent.T_q, descent.H, dtype=descent.acc, device=q.device)
    kept = descent.L - 1 if need_selection else 0
    selection = torch.full(
        (kept, descent.B, descent.T_q, descent.H_kv, params.top_k), -1, dtype=torch.int32, device=q.device
    )
    for bh, queries in descent.chunks():
        t = descent.positions(bh, queries)
        q_rows = descent.rows(q, bh, queries)
        row_max = q_rows.new_full(q_rows.shape[:2], -math.inf)
        row_sum = q_rows.new_zeros(q_rows.shape[:2])
        acc = q_rows.new_zeros(*q_rows.shape[:2], descent.V)
        layer: Layer = descent.top_layer(t, bh, queries)
        while True:
            s = layer.scores(q_rows).mul_(params.scale)
            s.masked_fill_(~layer.valid[:, None], -math.inf)
            leaves, parents = layer.valid, None
            if layer.layer > 0:
                if given is not None:
                    marks, parents = descent.given(given, layer, bh, queries)
                else:
                    marks, parents = _select(_log_importance(s, layer, params.strict_causal), layer, params.top_k)
                leaves = layer.valid & ~marks
                s.masked_fill_(~leaves[:, None], -math.inf)
                if need_selection:
                    for i in range(bh.start, bh.stop):
                        b, h_kv = divmod(i, descent.H_kv)
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
            layer = descent.lower_layer(layer, t, parents, bh)
        lse_rows = infinite_to_nan(row_max + row_sum.log())
        out_rows = infinite_to_nan(acc / row_sum[:, :, None])
        if params.attn_sink is not None:
            sink_rows = descent.heads(params.attn_sink, bh, queries.stop - queries.start)
            out_rows *= sinks.share(lse_rows, sink_rows)[..., None]
        descent.put_rows(out, bh, queries, out_rows)
        descent.put_rows(lse, bh, queries, lse_rows)
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
    descent = _Descent(q, k, v, params, deterministic=deterministic)
    finite = all(_all_finite(q, dout))
    if params.attn_sink is not None:
        lse, dlse = sinks.folded(lse, dlse, params.attn_sink)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtree_k, dtree_v = descent.empty_gradients(descent.tree_k), descent.empty_gradients(descent.tree_v)
    for bh, queries in descent.chunks():
        t = descent.positions(bh, queries)
        q_rows = descent.rows(q, bh, queries)
        do = descent.rows(dout, bh, queries)
        lse_rows = descent.rows(lse[..., None], bh, queries)
        offset = descent.rows(dlse[..., None], bh, queries)
        offset = offset - (do * descent.rows(out, bh, queries)).sum(2, keepdim=True)
        dq_rows = torch.zeros_like(q_rows)
        layer: Layer = descent.top_layer(t, bh, queries)
        while True:
            leaves, parents = layer.valid, None
            if layer.layer > 0:
                marks, parents = descent.given(selection, layer, bh, queries)
                leaves = layer.valid & ~marks
            not_leaf = ~leaves[:, None]
            P = layer.scores(q_rows).mul_(params.scale).sub_(lse_rows).masked_fill_(not_leaf, -math.inf).exp_()
            dS = layer.value_products(do).add_(offset).mul_(P).mul_(params.scale).masked_fill_(not_leaf, 0.0)
            dq_rows += layer.query_gradient(dS, leaves)
            layer.add_gradients(dtree_k[layer.layer][bh], dtree_v[layer.layer][bh], dS, P, do, leaves, finite)
            if parents is None:
                break
            layer = descent.lower_layer(layer, t, parents, bh)
        descent.put_rows(dq, bh, queries, dq_rows)
    r = descent.params.compression_rate
    for i, x in enumerate(descent.tree_k[:-1]):
        dtree_k[i] = descent.rotations.at(slice(r), dtree_k[i], -1).flatten(1, 2)[:, : x.shape[1]]
        dtree_v[i] = dtree_v[i].flatten(1, 2)[:, : x.shape[1]]
    for dtree in (dtree_k, dtree_v):
        for i in reversed(range(1, descent.L)):
            dtree[i - 1] += _unpool(dtree[i], dtree[i - 1].shape[1], r)
    sums = [dtree[0].unflatten(0, (descent.B, descent.H_kv)).transpose(1, 2) for dtree in (dtree_k, dtree_v)]
    if add_to is not None:
        return dq, *(x.add_(own) for x, own in zip(add_to, sums, strict=True))
    return dq, *(own.to(q.dtype).contiguous() for own in sums)
