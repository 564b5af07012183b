"""Packs and ragged batches that tests of both backends draw."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """A packed problem: numbers of the tree, and the lengths of each sequence."""

    keys: list[int]
    queries: list[int]
    padding: int  # rows behind the last sequence
    H: int
    H_kv: int
    K: int
    V: int
    options: dict
    seed: int

    @property
    def max_k(self) -> int:
        return max(self.keys, default=0)

    @property
    def max_q(self) -> int:
        return max(self.queries, default=0)

    def cu(self, lengths: list[int]) -> list[int]:
        found = [0]
        for length in lengths:
            found.append(found[-1] + length)
        return found

    @property
    def cu_q(self) -> list[int]:
        return self.cu(self.queries)

    @property
    def cu_k(self) -> list[int]:
        return self.cu(self.keys)

    def tensors(self, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        rows_q, rows_k = sum(self.queries) + self.padding, sum(self.keys) + self.padding
        shapes = ((rows_q, self.H, self.K), (rows_k, self.H_kv, self.K), (rows_k, self.H_kv, self.V))
        return tuple(torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)


def lengths_around_layers(r: int, top_k: int, most: int) -> list[int]:
    """Lengths at which something changes: a node, a block, a layer."""
    edges = {0, 1, 2, r - 1, r, r + 1}
    size = top_k * r
    while size <= most:
        edges |= {size - 1, size, size + 1}
        size *= r
    return sorted(x for x in edges if x <= most)


def random_pack(seed: int, most: int = 90) -> Pack:
    rng = random.Random(seed)
    r = rng.choice([2, 4, 8, 16])
    top_k = rng.choice([1, 2, 4, 8, 16])
    edges = lengths_around_layers(r, top_k, most)
    N = rng.choice([0, 1, 1, 2, 3, 5, 8])
    keys = [rng.choice([rng.choice(edges), rng.randint(0, most)]) for _ in range(N)]
    if rng.random() < 0.3:
        keys = [keys[0]] * N if N else keys
    same = rng.random() < 0.3
    queries = (
        keys if same else [rng.choice([n, rng.randint(0, max(1, min(n, 6))), n + rng.randint(0, 3)]) for n in keys]
    )
    room = 40
    for i, n in enumerate(queries):  # the definition takes one query after another
        queries[i] = min(n, room)
        room -= queries[i]
    H_kv = rng.choice([1, 2])
    options = {
        "compression_rate": r, "top_k_per_layer": top_k, "max_top_nodes": rng.choice([top_k * r, top_k]),
        "rope_base": rng.choice([2.0, 100.0, 10000.0]), "scale": rng.choice([None, 1.3]),
    }  # fmt: skip
    return Pack(
        keys, queries, rng.choice([0, 0, 3]), H_kv * rng.choice([1, 2, 3]), H_kv, 2 * rng.randint(1, 4),
        rng.randint(1, 5), options, seed,
    )  # fmt: skip
