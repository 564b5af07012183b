"""Which queries a rank computes for another one, so that the ranks of a zigzag have equal work.

Two ranks share a sequence as parts 0 and 3, and 1 and 2. Early queries pass fewer layers than late ones, so that the
middle of a sequence has some percent more work than its ends. The second rank therefore lends its last queries to the
first, whose own go on where they end: they travel there, and their results travel back. Keys and values are on both
ranks in any case, and both find the same loans, from shapes alone. Each rank waits for the other after a forward and
after a backward, which have loans of their own: layers weigh differently in them.

More ranks lend nothing. What a rank borrowed of several would lie apart from its own queries, in chunks of the backward
that are too short to pay.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

# Fewer queries are not worth an exchange.
MIN_ROWS = 64
# Loans are multiples of this.
ROW_STEP = 16
# Cells of a part in which the work of a query counts as constant.
CELLS = 64


class Weights(NamedTuple):
    """What a candidate costs: in the highest selected layer, whose nodes have few parents, so that neighbours share
    more of what they select; in a selected layer below; some of each layer cost nothing; in the entry layer above one
    selected layer, above more of them, and in an entry layer that is the bottom. Fitted to the times of ranks alone
    (lab/README.md, context parallelism)."""

    highest: int
    selected: int
    free: int  # candidates of each selected layer
    above_one: int
    above_more: int
    bottom: int


FORWARD = Weights(highest=6, selected=10, free=0, above_one=0, above_more=8, bottom=1)
# Of groups of more than 8 heads, and of smaller ones, whose kernels pack queries and hand dS over.
BACKWARD = Weights(highest=10, selected=10, free=512, above_one=4, above_more=8, bottom=3)
BACKWARD_SMALL_GROUPS = Weights(highest=10, selected=10, free=800, above_one=3, above_more=1, bottom=6)


def weights(group_size: int) -> tuple[Weights, Weights]:
    """Of the forward and of the backward."""
    return FORWARD, BACKWARD if group_size > 8 else BACKWARD_SMALL_GROUPS


class Loan(NamedTuple):
    """Queries at positions start .. start + count - 1, of the late part of rank `lender`."""

    lender: int
    borrower: int
    start: int
    count: int


class Loans(NamedTuple):
    """Of a call. The queries of the backward are the last ones of the forward's."""

    forward: Loan | None
    backward: Loan | None


def work_of(t: int, r: int, top_k: int, max_nodes: int, weights: Weights) -> int:
    """Of the query at position t, in tenths of a candidate of a selected layer."""
    layers, nodes = 0, t + 1
    while nodes > max_nodes:
        layers, nodes = layers + 1, t // r ** (layers + 1) + 1
    entry = (weights.bottom, weights.above_one, weights.above_more)[min(layers, 2)]
    selected = weights.highest + weights.selected * (layers - 1) if layers > 0 else 0
    return selected * max(1, top_k * r - weights.free) + entry * nodes


class Work:
    """Of the queries of a sequence of T tokens, up to a position; and the position up to which so much work lies."""

    def __init__(self, T: int, parts: int, r: int, top_k: int, max_nodes: int, weights: Weights):
        cells = min(T, parts * CELLS)
        self.bounds = [i * T // cells for i in range(cells + 1)]
        self.sums = [0]
        for begin, end in zip(self.bounds, self.bounds[1:], strict=False):
            work = work_of((begin + end) // 2, r, top_k, max_nodes, weights)
            self.sums.append(self.sums[-1] + (end - begin) * work)

    def up_to(self, position: int) -> int:
        i = min(bisect.bisect_right(self.bounds, position), len(self.bounds) - 1) - 1
        begin, end = self.bounds[i], self.bounds[i + 1]
        return self.sums[i] + (position - begin) * (self.sums[i + 1] - self.sums[i]) // (end - begin)

    def position(self, sum_: int) -> int:
        i = min(bisect.bisect_right(self.sums, sum_), len(self.sums) - 1) - 1
        begin, end = self.bounds[i], self.bounds[i + 1]
        return begin + (sum_ - self.sums[i]) * (end - begin) // (self.sums[i + 1] - self.sums[i])


def most_rows(T: int, group_size: int) -> int:
    """That may be lent of a sequence of T tokens: q and out of more would take over a twentieth of what a forward of
    half of the queries takes, which is K and V, their tree, and out."""
    return T * (8 + group_size) // (80 * group_size)


@functools.lru_cache(maxsize=64)
def loans(T: int, ranks: int, group_size: int, r: int, top_k: int, max_nodes: int) -> Loans:
    """Those of a sequence of T tokens in the zigzag layout, group_size query heads a KV head."""
    if ranks != 2:
        return Loans(None, None)
    begin, end = T // 4, 3 * T // 4  # what the second rank has
    counts = []
    for own in weights(group_size):
        work = Work(T, 4, r, top_k, max_nodes, own)
        more = max(0, work.up_to(end) - work.up_to(begin) - work.up_to(T) // 2)
        most = min(most_rows(T, group_size), T // 8, *counts)
        count = min(end - work.position(work.up_to(end) - more), most) // ROW_STEP * ROW_STEP
        counts.append(count if count >= MIN_ROWS else 0)
    return Loans(*(Loan(1, 0, end - count, count) if count else None for count in counts))
