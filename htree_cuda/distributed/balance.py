"""Which queries a rank computes for another one, so that the ranks of a zigzag have equal work.

Two ranks share a sequence as parts 0 and 3, and 1 and 2. Early queries pass fewer layers than late ones, so that the
middle of a sequence has some percent more work than its ends. The second rank therefore lends its last queries to the
first, whose own go on where they end: they travel there, and their results travel back. Keys and values are on both
ranks in any case, and both find the same loan, from shapes alone.

More ranks lend nothing. What a rank borrowed of several would lie apart from its own queries, in chunks of the backward
that are too short to pay.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

# What a candidate costs in a selected layer, in an entry layer, and where that is the bottom, which selects nothing.
SELECTED, ENTRY, BOTTOM = 10, 8, 5
# Fewer queries are not worth an exchange.
MIN_ROWS = 64
# Loans are multiples of this.
ROW_STEP = 16
# Cells of a part in which the work of a query counts as constant.
CELLS = 64


class Loan(NamedTuple):
    """Queries at positions start .. start + count - 1, of the late part of rank `lender`."""

    lender: int
    borrower: int
    start: int
    count: int


def work_of(t: int, r: int, top_k: int, max_nodes: int) -> int:
    """Of the query at position t, in tenths of a candidate of a selected layer. One of an entry layer counts less, as
    the times of ranks say (lab/README.md, forward and backward together)."""
    layers, nodes = 0, t + 1
    while nodes > max_nodes:
        layers, nodes = layers + 1, t // r ** (layers + 1) + 1
    return SELECTED * layers * top_k * r + (ENTRY if layers else BOTTOM) * nodes


class Work:
    """Of the queries of a sequence of T tokens, up to a position; and the position up to which so much work lies."""

    def __init__(self, T: int, parts: int, r: int, top_k: int, max_nodes: int):
        cells = min(T, parts * CELLS)
        self.bounds = [i * T // cells for i in range(cells + 1)]
        self.sums = [0]
        for begin, end in zip(self.bounds, self.bounds[1:], strict=False):
            self.sums.append(self.sums[-1] + (end - begin) * work_of((begin + end) // 2, r, top_k, max_nodes))

    def up_to(self, position: int) -> int:
        i = min(bisect.bisect_right(self.bounds, position), len(self.bounds) - 1) - 1
        begin, end = self.bounds[i], self.bounds[i + 1]
        return self.sums[i] + (position - begin) * (self.sums[i + 1] - self.sums[i]) // (end - begin)

    def position(self, sum_: int) -> int:
        i = min(bisect.bisect_right(self.sums, sum_), len(self.sums) - 1) - 1
        begin, end = self.bounds[i], self.bounds[i + 1]
        return begin + (sum_ - self.sums[i]) * (end - begin) // (self.sums[i + 1] - self.sums[i])


@functools.lru_cache(maxsize=64)
def loans(T: int, ranks: int, r: int, top_k: int, max_nodes: int) -> tuple[Loan, ...]:
    """Those of a sequence of T tokens in the zigzag layout."""
    if ranks != 2:
        return ()
    work = Work(T, 4, r, top_k, max_nodes)
    begin, end = T // 4, 3 * T // 4  # what the second rank has
    more = work.up_to(end) - work.up_to(begin) - work.up_to(T) // 2
    count = min(end - work.position(work.up_to(end) - more), T // 8) // ROW_STEP * ROW_STEP if more > 0 else 0
    return (Loan(1, 0, end - count, count),) if count >= MIN_ROWS else ()
