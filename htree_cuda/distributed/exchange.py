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

# Bytes of other ranks' sums that one step of `reduce` receives into memory of its own; there are two at a time. The two
# links of a pair of GPUs carry steps of 32 MiB at 213 GB/s, of 128 MiB at 285 (lab/README.md).
STAGING_BYTES = 128 << 20


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


def _steps(rows: int, ranks: int, parts: list[Tensor]) -> list[tuple[int, int]]:
    """Cuts the rows of a part, which others send each."""
    row_bytes = (ranks - 1) * parts[0][0].numel() * parts[0].element_size()
    step = max(1, STAGING_BYTES // row_bytes)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _takes_lists(x: Tensor) -> bool:
    """Whether the backend of x's device has all_to_all of lists of tensors: NCCL has, gloo has not."""
    return x.is_cuda


def _begin_swap(group: dist.ProcessGroup, rank: int, sent: list[Tensor], received: list[Tensor]) -> list[dist.Work]:
    """sent[i] begins to travel to rank i, where it is received[rank]; this rank's own pair stays as it is, and what has
    no elements does not travel. All are contiguous, views of what the kernels read and wrote: nothing is packed. What
    comes after the waiting for all that is returned comes after the exchange."""
    if _takes_lists(sent[0]):
        return [_all_to_all(group, rank, sent, received, async_op=True)]
    return [
        call(x, dist.get_global_rank(group, i), group=group)
        for call, some in ((dist.irecv, received), (dist.isend, sent))
        for i, x in enumerate(some)
        if i != rank and x.numel()
    ]


def _all_to_all(group: dist.ProcessGroup, rank: int, sent: list[Tensor], received: list[Tensor], async_op: bool):
    nothing = sent[rank].new_empty(0)
    lists = ([nothing if i == rank else x for i, x in enumerate(some)] for some in (received, sent))
    return dist.all_to_all(*lists, group=group, async_op=async_op)


def _swap(group: dist.ProcessGroup, rank: int, sent: list[Tensor], received: list[Tensor]) -> None:
    """The same on the current stream, so with its priority: an asynchronous collective has a stream of its own."""
    if _takes_lists(sent[0]):
        _all_to_all(group, rank, sent, received, async_op=False)
        return
    for work in _begin_swap(group, rank, sent, received):
        work.wait()


def all_gather(mine: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[n, ..] contiguous, alike on all ranks -> [ranks, n, ..]."""
    found = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:])
    # The older name is deprecated where the newer one exists.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(found, mine, group=group)
    return found.unflatten(0, (ranks, mine.shape[0]))


class Gathered:
    """Tensors [T / ranks, heads, D] of this rank -> `whole`, [1, T, heads, D] of all ranks in the order of tokens.
    Parts that a rank does not see (`Placement.seen`) do not travel to it: there `whole` has no values.

    `start` enqueues the exchange; `ready(stage)` has the current stream wait until the tokens of a stage, and of those
    before it, are there.
    """

    def __init__(self, place: Placement, group: dist.ProcessGroup, tensors: list[Tensor], seen: list[int]):
        self.place, self.group, self.tensors, self.seen = place, group, tensors, seen
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
            own, nothing = parts[place.rank], x.new_empty(0)
            own.copy_(place.own(x, stage))
            sent = [own if place.part(stage) < self.seen[i] else nothing for i in range(place.ranks)]
            number = [place.part_of(i, stage) for i in range(place.ranks)]
            received = [y if i < self.seen[place.rank] else nothing for i, y in zip(number, parts, strict=True)]
            _swap(self.group, place.rank, sent, received)


def reduce(
    place: Placement, group: dist.ProcessGroup, sums: list[Tensor], results: list[Tensor], seen: list[int]
) -> None:
    """Sums over ranks of sums [1, T, heads, D], of which this rank gets its parts: written to results
    [T / ranks, heads, D], rounded to their dtype. A rank has nothing to add to parts that it does not see
    (`Placement.seen`). What follows on the current stream comes after its end.

    The partial sums travel to the rank that owns the tokens and are added there in the order of ranks: no more bytes
    than a reduce-scatter has, and the same bits in every run. One step travels while what the step before brought is
    added.
    """
    pairs = [
        (stage, place.own(x, stage), place.parts_of(total[0], stage))
        for stage in range(place.stages)
        for x, total in zip(results, sums, strict=True)
    ]
    if place.ranks == 1:
        for _, own, parts in pairs:
            own.copy_(parts[0])
        return
    steps = [
        (stage, own, parts, *step) for stage, own, parts in pairs for step in _steps(own.shape[0], place.ranks, parts)
    ]
    room = max((place.ranks - 1) * parts[0][first:end].numel() for _, _, parts, first, end in steps)
    # Of the memory of the current stream, which has just freed what the kernels worked in.
    staging = [sums[0].new_empty(room) for _ in range(min(2, len(steps)))]
    nothing = sums[0].new_empty(0)
    with _lane(sums[0]):
        waiting = None
        for i, (stage, own, parts, first, end) in enumerate(steps):
            number = [place.part_of(rank, stage) for rank in range(place.ranks)]
            mine = parts[place.rank][first:end]
            sent = [x[first:end] if n < seen[place.rank] else nothing for n, x in zip(number, parts, strict=True)]
            slots = iter(staging[i % 2][: (place.ranks - 1) * mine.numel()].view(-1, *mine.shape))
            theirs = [
                mine if rank == place.rank else next(slots) if place.part(stage) < many else nothing
                for rank, many in enumerate(seen)
            ]
            works = _begin_swap(group, place.rank, sent, theirs)
            if waiting is not None:
                _add(*waiting)
            waiting = works, theirs, own[first:end]
        _add(*waiting)
        end_of_all = _mark(sums[0])
    wait(sums[0], end_of_all)


def _add(works: list[dist.Work], theirs: list[Tensor], own: Tensor) -> None:
    """The sum of what has come, in the order of ranks."""
    for work in works:
        work.wait()
    *before, last = (x for x in theirs if x.numel())
    if not before:
        own.copy_(last)
        return
    found = before[0]
    for other in before[1:]:
        found = found + other
    torch.add(found, last, out=own)


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
