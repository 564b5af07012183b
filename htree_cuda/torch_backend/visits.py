"""Gradients of parents that many queries of a chunk visit: summed by products over tiles of visits.

Neighbouring queries visit the same parents. Additions of one visit each meet in the same memory on a GPU, which takes
them one by one; a product over a tile of visits to one parent leaves one addition a tile."""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 32  # visits


def worthwhile(device: torch.device, visits: int, parents: int, children: int) -> bool:
    """Whether tiles are faster than additions one by one. On one H100 forward and backward together take 16.4 and 14.8
    ms (rows, tiles; 4,096 queries, 4 heads on 1 of 16), 153 and 124 ms (16,384, 8 on 2 of 64, bfloat16), but 14.8 and
    19.5 ms with parents of 64 children (2026-11-25). Tiles are padded to whole ones, one a parent at most."""
    return device.type != "cpu" and children <= 16 and visits >= TILE * parents


class Visits:
    """flat: [n] which of `parents` parents each visit is to. Every tile holds visits to one parent, in their order."""

    def __init__(self, flat: Tensor, parents: int):
        n, device = flat.shape[0], flat.device
        found, order = torch.sort(flat.to(torch.int32), stable=True)
        begin = torch.searchsorted(found, torch.arange(parents + 1, dtype=torch.int32, device=device))
        last = ((begin.diff() + TILE - 1) // TILE).cumsum(0)  # tiles of each parent and of those before it
        self.tiles = n // TILE + min(parents, n)  # no fewer than there are: the host does not know how many
        first = torch.cat((last.new_zeros(1), last))
        place = first[found] * TILE + torch.arange(n, device=device) - begin[found]
        visit = order.new_full((self.tiles * TILE,), n).scatter_(0, place, order)
        self.missing = (visit == n)[:, None, None]
        self.visit = visit.clamp_(max=n - 1)
        tile = torch.arange(self.tiles, device=device)
        self.parent = torch.searchsorted(last, tile, right=True).clamp_(max=parents - 1)

    def add(self, total: Tensor, weights: Tensor, rows: Tensor, each: int, deterministic: bool) -> None:
        """Adds sum_g weights [n, G, r] * rows [n / each, G, D] of every visit to its parent in total [parents, r, D];
        `each` visits behind each other share a row."""
        w = weights.index_select(0, self.visit).masked_fill_(self.missing, 0.0)
        x = rows.index_select(0, self.visit // each).masked_fill_(self.missing, 0.0)
        w, x = (y.unflatten(0, (self.tiles, TILE)).flatten(1, 2) for y in (w, x))
        sums = torch.bmm(w.transpose(1, 2), x)
        if deterministic:
            total.index_put_((self.parent,), sums, accumulate=True)
        else:
            total.index_add_(0, self.parent, sums)
