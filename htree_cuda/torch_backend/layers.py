"""One layer for one chunk of queries: who the candidates are, and the products with their keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import visits
from .chunks import Scratch
from .rotation import rotate


class Rotations(NamedTuple):
    """cos and sin [positions, R/2] of every position in a candidate list, and which elements are pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def at(self, places: Tensor | slice, x: Tensor, sign: int = 1, heads: bool = False, out: Tensor | None = None):
        """x [*places, K], with heads [*places, G, K], rotated by its places; sign -1 rotates back."""
        cos, sin = self.cos[places], self.sin[places]
        if heads:
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return rotate(x, cos, sin, sign, out, self.interleaved)


class Layer:
    """n: [rows] number of candidates of each query; valid, rightmost: [rows, width] marks over candidate positions."""

    def __init__(self, layer: int, n: Tensor, width: int):
        position = torch.arange(width, device=n.device)
        self.layer = layer
        self.n = n
        self.valid = position < n[:, None]
        self.rightmost = position == n[:, None] - 1

    def query_place(self) -> Tensor:
        """[rows] the position by which a query is rotated: that of the rightmost candidate."""
        return self.n - 1


class TopLayer(Layer):
    """Dense: candidates are nodes 0 .. width-1 for every query, so rows of one (b, h_kv) share their products.

    keys, rotated: [BH, width, K], values: [BH, width, V] in the accumulation dtype. ``bad_*`` mark non-finite entries
    (None where there is none): they are taken out of the products and put back as NaN only where a leaf holds them.
    """

    def __init__(
        self, layer: int, n: Tensor, keys_rot: Tensor, values: Tensor, bad_keys, bad_values, rotations: Rotations
    ):
        super().__init__(layer, n, values.shape[1])
        self.keys_rot, self.values, self.rotations = keys_rot, values, rotations
        self.bad_keys, self.bad_values = bad_keys, bad_values

    def _per_bh(self, x: Tensor) -> Tensor:
        return x.reshape(self.values.shape[0], -1, x.shape[-1])

    def nodes(self) -> Tensor:
        return torch.arange(self.values.shape[1], device=self.n.device).expand(self.valid.shape)

    def scores(self, q: Tensor) -> Tensor:
        """q [rows, G, K], not rotated -> [rows, G, width], not scaled."""
        self.q_rot = self.rotations.at(self.query_place(), q, heads=True)
        s = self._per_bh(self.q_rot) @ self.keys_rot.transpose(1, 2)
        return s.reshape(*q.shape[:2], -1)

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

    def query_gradient(self, dS: Tensor, leaves: Tensor) -> Tensor:
        return self.rotations.at(
            self.query_place(), self._masked_product(dS, leaves, self.keys_rot, self.bad_keys), -1, True
        )

    def add_gradients(self, dk: Tensor, dv: Tensor, dS: Tensor, P: Tensor, dout: Tensor, leaves: Tensor, finite: bool):
        """Adds to dk [BH, N, K] and dv [BH, N, V]; finite: q and dout are."""
        width = self.values.shape[1]
        dk[:, :width] += self.rotations.at(slice(width), self._transposed_product(dS, leaves, self.q_rot, finite), -1)
        dv[:, :width] += self._transposed_product(P, leaves, dout, finite)


class Siblings(NamedTuple):
    """The nodes of a layer by their parents, the last one's missing children being zeros."""

    keys: Tensor  # [BH, parents, r, K], rotated by the place among siblings and in the accumulation dtype, if `ready`
    values: Tensor  # [BH, parents, r, V], likewise in that dtype
    ready: bool  # else as they are stored: few queries look at few of them
    finite_keys: bool
    finite_values: bool


class LowerLayer(Layer):
    """Gathered: candidates are the children of each query's own parents [rows, P], ascending, padded with -1.

    <R(q, n-1), R(k, r j + c)> = <R(q, n-1 - r j), R(k, c)>: keys are rotated by their place c among siblings, once a
    layer, and a query once for each of its parents, of rank j. One row of a gather is a parent with all its children.
    """

    def __init__(
        self, layer: int, n: Tensor, t: Tensor, parents: Tensor, siblings: Siblings, rotations: Rotations,
        scratch: Scratch, deterministic: bool,
    ):  # fmt: skip
        self.BH, count, self.r, _ = siblings.keys.shape
        super().__init__(layer, n, parents.shape[1] * self.r)
        self.t, self.parents = t, parents
        self.siblings, self.rotations, self.scratch, self.deterministic = siblings, rotations, scratch, deterministic
        first = torch.arange(self.BH, device=n.device).repeat_interleave(n.shape[0] // self.BH) * count
        self.flat = (parents.clamp(0, count - 1) + first[:, None]).flatten()
        self.keys = self._gather("keys", siblings.keys)
        self.values = self._gather("values", siblings.values)

    def _gather(self, name: str, x: Tensor) -> Tensor:
        """[BH, parents, r, D] -> [rows * P, r, D] in the accumulation dtype, keys rotated."""
        acc = self.rotations.cos.dtype
        shape = (self.flat.shape[0], self.r, x.shape[3])
        rows = self.scratch.get(name, (shape[0], self.r * x.shape[3]), x.dtype)
        torch.index_select(x.flatten(0, 1).flatten(1), 0, self.flat, out=rows)
        rows = rows.view(shape)
        if self.siblings.ready:
            return rows
        if name == "keys":
            return self.rotations.at(slice(self.r), rows, out=self.scratch.get("rotated keys", shape, acc))
        return rows if rows.dtype == acc else self.scratch.get("wide values", shape, acc).copy_(rows)

    def _by_query(self, x: Tensor) -> Tensor:
        """[rows * P, r, D] -> [rows, P * r, D]."""
        return x.view(self.n.shape[0], -1, x.shape[-1])

    def _by_parent(self, x: Tensor) -> Tensor:
        """[rows, G, P * r] -> [rows * P, G, r]."""
        return x.unflatten(2, (-1, self.r)).transpose(1, 2).flatten(0, 1)

    def _place_of_parent(self) -> Tensor:
        """[rows, P]: by how much a query rotates for each of its parents."""
        rank = torch.arange(self.parents.shape[1], device=self.n.device)
        return (self.query_place()[:, None] - self.r * rank).clamp_(min=0)

    def nodes(self) -> Tensor:
        """[rows, width], ascending; padding repeats the rightmost."""
        children = (self.parents[:, :, None] * self.r + torch.arange(self.r, device=self.n.device)).flatten(1)
        return torch.where(self.valid, children, (self.t // self.r**self.layer)[:, None])

    def scores(self, q: Tensor) -> Tensor:
        """q [rows, G, K], not rotated -> [rows, G, width], not scaled."""
        rows, G, K = q.shape
        P = self.parents.shape[1]
        out = self.scratch.get("queries", (rows, P, G, K), q.dtype)
        self.q_rot = self.rotations.at(self._place_of_parent(), q[:, None], heads=True, out=out).flatten(0, 1)
        s = torch.bmm(self.q_rot, self.keys.transpose(1, 2))
        return s.view(rows, P, G, self.r).transpose(1, 2).reshape(rows, G, P * self.r)

    def value_products(self, dout: Tensor) -> Tensor:
        return torch.bmm(dout, self._by_query(self.values).transpose(1, 2))

    def weighted_values(self, p: Tensor, leaves: Tensor) -> Tensor:
        values = self._by_query(self.values)
        if not self.siblings.finite_values:
            values.masked_fill_(~leaves[:, :, None], 0.0)
        return torch.bmm(p, values)

    def query_gradient(self, dS: Tensor, leaves: Tensor) -> Tensor:
        if not self.siblings.finite_keys:
            self._by_query(self.keys).masked_fill_(~leaves[:, :, None], 0.0)
        dq = torch.bmm(self._by_parent(dS), self.keys).view(self.n.shape[0], -1, dS.shape[1], self.keys.shape[2])
        return self.rotations.at(self._place_of_parent(), dq, -1, True).sum(1)

    def _add_rows(self, total: Tensor, rows: Tensor, leaves: Tensor, finite: bool) -> None:
        """Adds rows [rows * P, r, D] to the children of their parents in total [BH, parents, r, D]."""
        if not finite:
            self._by_query(rows).masked_fill_(~leaves[:, :, None], 0.0)
        total, rows = total.flatten(0, 1).flatten(1), rows.flatten(1)
        if self.deterministic and total.is_cuda:
            # On CUDA index_add_ adds atomically, in any order; index_put_ sorts stably first and adds in that order.
            total.index_put_((self.flat,), rows, accumulate=True)
        else:
            total.index_add_(0, self.flat, rows)

    def add_gradients(self, dk: Tensor, dv: Tensor, dS: Tensor, P: Tensor, dout: Tensor, leaves: Tensor, finite: bool):
        """Adds to dk and dv [BH, parents, r, D]; dk is that of the keys as they were rotated among their siblings."""
        parents = dk.shape[0] * dk.shape[1]
        if finite and visits.worthwhile(dk.device, self.flat.shape[0], parents, self.r):
            tiles = visits.Visits(self.flat, parents)
            tiles.add(dk.flatten(0, 1), self._by_parent(dS), self.q_rot, 1, self.deterministic)
            tiles.add(dv.flatten(0, 1), self._by_parent(P), dout, self.parents.shape[1], self.deterministic)
            return
        out = self.scratch.get("products", self.keys.shape, dS.dtype)
        rows = torch.bmm(self._by_parent(dS).transpose(1, 2), self.q_rot, out=out)
        self._add_rows(dk, rows, leaves, finite)
        out = self.scratch.get("products", (P.shape[0], P.shape[2], dout.shape[2]), P.dtype)
        rows = torch.bmm(P.transpose(1, 2), dout, out=out).view(self.values.shape)
        self._add_rows(dv, rows, leaves, finite)
