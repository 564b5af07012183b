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

# Bytes of other ranks' sums that one step of `reduce` receives into memory of its own.
STAGING_BYTES = 32 << 20


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
    """Cuts the rows of a part; row_bytes: what is received of one row."""
    step = max(1, STAGING_BYTES // row_bytes)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _takes_lists(x: Tensor) -> bool:
    """Whether the backend of x's device has all_to_all of lists of tensors: NCCL has, gloo has not."""
    return x.is_cuda


def _swap(group: dist.ProcessGroup, rank: int, sent: list[Tensor], received: list[Tensor]) -> None:
    """sent[i] travels to rank i, where it is received[rank]; this rank's own pair stays as it is, and what has no
    elements does not travel. All are contiguous, views of what the kernels read and wrote: nothing is packed."""
    if _takes_lists(sent[0]):
        nothing = sent[rank].new_empty(0)
        lists = ([nothing if i == rank else x for i, x in enumerate(some)] for some in (received, sent))
        dist.all_to_all(*lists, group=group)
        return
    for work in [
        call(x, dist.get_global_rank(group, i), group=group)
        for call, some in ((dist.irecv, received), (dist.isend, sent))
        for i, x in enumerate(some)
        if i != rank and x.numel()
    ]:
        work.wait()


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
        for x, whole in zip(self.tensors, self.whole, strict=True):
            parts = place.parts_of(whole[0], stage)
            parts[place.rank].copy_(place.own(x, stage))
            _swap(self.group, place.rank, [parts[place.rank]] * place.ranks, parts)


def reduce(
    place: Placement, group: dist.ProcessGroup, stage: int, sums: list[Tensor], results: list[Tensor]
) -> torch.cuda.Event | None:
    """Sums over ranks of sums [1, T, heads, D], of which this rank gets its part of a stage: written to the rows of
    the stage of results [T / ranks, heads, D], rounded to their dtype. Returns the event of its end.

    The partial sums travel to the rank that owns the tokens and are added there in the order of ranks: as many bytes
    as a reduce-scatter, and the same bits in every run.
    """
    if place.ranks == 1:
        for x, total in zip(results, sums, strict=True):
            place.own(x, stage).copy_(place.parts_of(total[0], stage)[0])
        return None
    with _lane(sums[0]):
        for x, total in zip(results, sums, strict=True):
            own, parts = place.own(x, stage), place.parts_of(total[0], stage)
            row_bytes = (place.ranks - 1) * parts[0][0].numel() * total.element_size()
            for first, end in _steps(own.shape[0], row_bytes):
                partial = [part[first:end] for part in parts]
                theirs = [torch.empty_like(part) for part in partial]
                theirs[place.rank] = partial[place.rank]
                _swap(group, place.rank, partial, theirs)
                *before, last = theirs
                found = before[0]
                for other in before[1:]:
                    found = found + other
                torch.add(found, last, out=own[first:end])
        return _mark(sums[0])


def trade(
    place: Placement, group: dist.ProcessGroup, tensors: list[tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]]
) -> torch.cuda.Event | None:
    """Of each tensor, rows that this rank sends to others and rows that it receives, by rank, contiguous; the tensor
    says their dtype and device. Every rank makes the call. Returns the event of its end, until which they must live."""
    like = tensors[0][0]
    with _lane(like):
        for x, sent, received in tensors:
            nothing = x.new_empty(0)
            _swap(group, place.rank, *([some.get(i, nothing) for i in range(place.ranks)] for some in (sent, received)))
        return _mark(like)
