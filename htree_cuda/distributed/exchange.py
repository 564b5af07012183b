"""Tokens of all ranks gathered into their order, and gradients of all tokens summed over ranks, in bounded pieces.

On a GPU both run on a stream of their own beside the kernels: `_lane` opens it, and an event says when a stage is done.
Every rank issues the same collectives in the same order.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import Placement

# Bytes that one collective may hand to a rank: half of all, between these bounds. With the copies around it one costs
# the host 0.2 to 0.3 ms, and what follows the last kernels cannot be hidden.
MIN_STAGING_BYTES = 4 << 20
MAX_STAGING_BYTES = 32 << 20


@functools.cache
def _stream(device_index: int) -> torch.cuda.Stream:
    """Of high priority: a collective's few blocks then get an SM as soon as one is free."""
    return torch.cuda.Stream(device_index, priority=-1)


@contextlib.contextmanager
def _lane(x: Tensor):
    """Work inside runs behind what the current stream of x's device holds so far, and beside what follows there."""
    if not x.is_cuda:
        yield
        return
    stream = _stream(x.get_device())
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        yield


def _mark(x: Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None


def wait(x: Tensor, event: torch.cuda.Event | None) -> None:
    """What follows on the current stream of x's device comes after the event."""
    if event is not None:
        torch.cuda.current_stream(x.device).wait_event(event)


def _steps(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cuts the rows of a part; row_bytes: what one row of every rank takes."""
    bytes_ = min(max(rows * row_bytes // 2, MIN_STAGING_BYTES), MAX_STAGING_BYTES)
    step = max(1, bytes_ // row_bytes)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _flat(tensors: list[Tensor]) -> Tensor:
    """[rows, heads, D] each -> [rows, heads * D of all], contiguous."""
    return torch.cat([x.flatten(1) for x in tensors], dim=1)


def all_gather(mine: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[n, ..] contiguous, alike on all ranks -> [ranks, n, ..]."""
    found = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:])
    # The older name is deprecated where the newer one exists.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(found, mine, group=group)
    return found.unflatten(0, (ranks, mine.shape[0]))


class Gathered:
    """Tensors [T / ranks, heads, D] of this rank -> `whole`, [1, T, heads, D] of all ranks in the order of tokens.

    `start` enqueues the exchange; `ready(stage)` has the current stream wait until the tokens of a stage, and of those
    before it, are there.
    """

    def __init__(self, place: Placement, group: dist.ProcessGroup, tensors: list[Tensor]):
        self.place, self.group, self.tensors = place, group, tensors
        self.events: list[torch.cuda.Event | None] = []
        if place.ranks == 1:
            self.whole = [x[None] for x in tensors]
        else:
            self.whole = [x.new_empty(1, place.ranks * x.shape[0], *x.shape[1:]) for x in tensors]

    def start(self) -> Gathered:
        if self.place.ranks > 1:
            with _lane(self.tensors[0]):
                for stage in range(self.place.stages):
                    self._stage(stage)
                    self.events.append(_mark(self.tensors[0]))
        return self

    def ready(self, stage: int) -> None:
        if self.place.ranks > 1:
            wait(self.tensors[0], self.events[stage])

    def _stage(self, stage: int) -> None:
        place = self.place
        rows = self.tensors[0].shape[0] // place.stages
        own = [x.unflatten(0, (place.stages, rows))[stage] for x in self.tensors]
        parts = slice(stage * place.ranks, (stage + 1) * place.ranks)
        whole = [x[0].unflatten(0, (place.parts, rows))[parts] for x in self.whole]
        row_bytes = place.ranks * sum(x[0].numel() * x.element_size() for x in own)
        for first, end in _steps(rows, row_bytes):
            mine = _flat([x[first:end] for x in own])
            found = all_gather(mine, self.group, place.ranks)
            if place.reversed(stage):
                found = found.flip(0)
            for x, columns in zip(whole, found.split([x[0, 0].numel() for x in whole], dim=2), strict=True):
                x[:, first:end] = columns.unflatten(2, x.shape[2:])


def reduce(
    place: Placement, group: dist.ProcessGroup, stage: int, sums: list[Tensor], results: list[Tensor]
) -> torch.cuda.Event | None:
    """Sums over ranks of sums [1, T, heads, D], of which this rank gets its part of a stage: written to the rows of
    the stage of results [T / ranks, heads, D], rounded to their dtype. Returns the event of its end.

    The partial sums travel to the rank that owns the tokens and are added there in the order of ranks: as many bytes
    as a reduce-scatter, and the same bits in every run.
    """
    rows = results[0].shape[0] // place.stages
    own = [x.unflatten(0, (place.stages, rows))[stage] for x in results]
    if place.ranks == 1:
        for x, total in zip(own, sums, strict=True):
            x.copy_(total[0].unflatten(0, (place.parts, rows))[stage])
        return None
    parts = slice(stage * place.ranks, (stage + 1) * place.ranks)
    partial = [x[0].unflatten(0, (place.parts, rows))[parts] for x in sums]
    widths = [x[0, 0].numel() for x in partial]
    with _lane(sums[0]):
        for first, end in _steps(rows, place.ranks * sum(widths) * sums[0].element_size()):
            mine = torch.cat([x[:, first:end].flatten(2) for x in partial], dim=2)
            if place.reversed(stage):
                mine = mine.flip(0)
            theirs = torch.empty_like(mine)
            dist.all_to_all_single(theirs, mine, group=group)
            total = theirs[0]
            for x in theirs[1:]:
                total = total.add_(x)
            for x, columns in zip(own, total.split(widths, dim=1), strict=True):
                x[first:end] = columns.unflatten(1, x.shape[1:])
        return _mark(sums[0])
