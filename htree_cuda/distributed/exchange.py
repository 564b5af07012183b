"""Tokens of all ranks gathered into their order, and gradients of all tokens summed over ranks, in bounded pieces.

On a GPU both run on a stream of their own beside the kernels: `_lane` opens it, and an event says when a stage is done.
Every rank issues the same collectives in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .placement import Placement

# Bytes of other ranks' sums that one step of `reduce` receives into memory of its own; there are two at a time. Between
# two GPUs of a host NCCL carries 16 MiB at 163 GB/s, 64 MiB at 263 and 256 MiB at 304 (lab/README.md).
STAGING_BYTES = 64 << 20


@functools.cache
def _stream(device_index: int) -> torch.cuda.Stream:
    """Of high priority: the few blocks of what `_swap` sends then get an SM as soon as one is free."""
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


@contextlib.contextmanager
def joined(x: Tensor, place: Placement):
    """Whatever is raised inside, what follows on the current stream of x's device comes after all that was begun in the
    lane: the memory of what still travels is given on then. Where nothing can have begun, the lane is left alone: a
    graph that captures one rank's calls must not wait for it."""
    try:
        yield
    finally:
        if x.is_cuda and x.numel() and place.ranks > 1:
            torch.cuda.current_stream(x.device).wait_stream(_stream(x.get_device()))


def wait(x: Tensor, event: torch.cuda.Event | None) -> None:
    """What follows on the current stream of x's device comes after the event."""
    if event is not None:
        torch.cuda.current_stream(x.device).wait_event(event)


class Travel:
    """An exchange under way; what it sends and receives lives until it is waited for."""

    def __init__(self, event: torch.cuda.Event | None, *tensors):
        self.event, self.tensors = event, tensors

    def wait(self, x: Tensor) -> None:
        """What follows on the current stream of x's device comes after the exchange."""
        wait(x, self.event)
        self.tensors = ()


def _steps(rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cuts the rows of a part, of which others send so many bytes each."""
    step = max(1, STAGING_BYTES // row_bytes)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _takes_lists(x: Tensor) -> bool:
    """Whether the backend of x's device has all_to_all of lists of tensors: NCCL has, gloo has not."""
    return x.is_cuda


def _groups_transfers(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Whether several transfers of x's device are one call: NCCL groups them unless something is wrapped around it, as
    TORCH_DISTRIBUTED_DEBUG=DETAIL does in some versions of PyTorch. One after the other they would wait for ever."""
    backend = group._get_backend(x.device) if x.is_cuda and hasattr(group, "_get_backend") else None
    return type(group) is dist.ProcessGroup and bool(getattr(backend, "supports_coalescing", False))


class Swap(NamedTuple):
    """sent[i] travels to rank i, where it is received[rank]; a rank's own pair stays as it is, and what has no elements
    does not travel. All are contiguous, views of what the kernels read and wrote: nothing is packed."""

    sent: list[Tensor]
    received: list[Tensor]


def _begin_swaps(group: dist.ProcessGroup, rank: int, swaps: list[Swap]) -> list[dist.Work]:
    """What comes after the waiting for all that is returned comes after the exchange."""
    like = swaps[0].sent[rank]
    if _takes_lists(like) and not _groups_transfers(group, like):
        return [_all_to_all(group, rank, *swap, async_op=True) for swap in swaps]
    transfers = [
        (call, x, dist.get_global_rank(group, i))
        for swap in swaps
        for call, some in ((dist.irecv, swap.received), (dist.isend, swap.sent))
        for i, x in enumerate(some)
        if i != rank and x.numel()
    ]
    if transfers and _takes_lists(like):
        return dist.batch_isend_irecv([dist.P2POp(*transfer, group) for transfer in transfers])
    return [call(x, peer, group=group) for call, x, peer in transfers]


def _all_to_all(group: dist.ProcessGroup, rank: int, sent: list[Tensor], received: list[Tensor], async_op: bool):
    nothing = sent[rank].new_empty(0)
    lists = ([nothing if i == rank else x for i, x in enumerate(some)] for some in (received, sent))
    return dist.all_to_all(*lists, group=group, async_op=async_op)


def _swap(group: dist.ProcessGroup, rank: int, sent: list[Tensor], received: list[Tensor]) -> None:
    """The same on the current stream, so with its priority: what `_begin_swaps` begins has a stream of its own."""
    if _takes_lists(sent[0]):
        _all_to_all(group, rank, sent, received, async_op=False)
        return
    _wait_for(_begin_swaps(group, rank, [Swap(sent, received)]))


def all_gather(mine: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor:
    """[n, ..] contiguous, alike on all ranks -> [ranks, n, ..]."""
    found = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:])
    # The older name is deprecated where the newer one exists.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(found, mine, group=group)
    return found.unflatten(0, (ranks, mine.shape[0]))


class Gathered:
    """Tensors [T / ranks, heads, D] of this rank -> `whole`, [1, T, heads, D] of all ranks in the order of tokens,
    views of one tensor that has the columns of all. Parts that a rank does not see (`Placement.seen`) do not travel to
    it: there `whole` has no values.

    `start` enqueues the exchange; `ready(stage)` has the current stream wait until the tokens of a stage, and of those
    before it, are there.
    """

    def __init__(self, place: Placement, group: dist.ProcessGroup, tensors: list[Tensor], seen: list[int]):
        self.place, self.group, self.tensors, self.seen = place, group, tensors, seen
        self.events: list[torch.cuda.Event | None] = []
        if place.ranks == 1:
            self.whole = [x[None] for x in tensors]
        else:
            rows, heads, _ = tensors[0].shape
            columns = [x.shape[2] for x in tensors]
            self.all = tensors[0].new_empty(place.ranks * rows, heads, sum(columns))
            self.whole = [x[None] for x in self.all.split(columns, dim=2)]

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
            place.parts_of(whole[0], stage)[place.rank].copy_(place.own(x, stage))
        parts = place.parts_of(self.all, stage)
        own, nothing = parts[place.rank], self.all.new_empty(0)
        sent = [own if place.part(stage) < self.seen[i] else nothing for i in range(place.ranks)]
        number = [place.part_of(i, stage) for i in range(place.ranks)]
        received = [y if i < self.seen[place.rank] else nothing for i, y in zip(number, parts, strict=True)]
        _swap(self.group, place.rank, sent, received)


def staging(place: Placement, like: Tensor, rows: int, numbers: int) -> list[Tensor]:
    """Memory for what `reduce` receives at a time, of parts of so many rows and, in all sums, so many numbers a row at
    most, of the dtype and device of `like`."""
    row = (place.ranks - 1) * numbers
    return [like.new_empty(min(max(STAGING_BYTES // like.element_size(), row), row * rows)) for _ in range(2)]


def reduce(
    place: Placement, group: dist.ProcessGroup, sums: list[Tensor], results: list[Tensor], seen: list[int],
    received: list[Tensor],
) -> Travel:  # fmt: skip
    """Sums over ranks of sums [1, T, heads, D], of which this rank gets its parts: written to results
    [T / ranks, heads, D], rounded to their dtype. A rank has nothing to add to parts that it does not see
    (`Placement.seen`). received: of `staging`. No tensor is to be touched before it has been waited for.

    The partial sums travel to the rank that owns the tokens and are added there in the order of ranks: no more bytes
    than a reduce-scatter has, and the same bits in every run. One step travels while what the step before brought is
    added.
    """
    if place.ranks == 1:
        for x, total in zip(results, sums, strict=True):
            for stage in range(place.stages):
                place.own(x, stage).copy_(place.parts_of(total[0], stage)[0])
        return Travel(None)
    rows = results[0].shape[0] // place.stages
    row_bytes = (place.ranks - 1) * sum(x[0, 0].numel() for x in sums) * sums[0].element_size()
    steps = [(stage, *step) for stage in range(place.stages) for step in _steps(rows, row_bytes)]
    nothing = sums[0].new_empty(0)
    with _lane(sums[0]):
        waiting = None
        for i, (stage, first, end) in enumerate(steps):
            number = [place.part_of(rank, stage) for rank in range(place.ranks)]
            free = received[i % 2]
            swaps, own = [], []
            for x, total in zip(results, sums, strict=True):
                parts = [part[first:end] for part in place.parts_of(total[0], stage)]
                mine = parts[place.rank]
                slots = iter(free[: (place.ranks - 1) * mine.numel()].view(-1, *mine.shape))
                free = free[(place.ranks - 1) * mine.numel() :]
                sent = [part if n < seen[place.rank] else nothing for n, part in zip(number, parts, strict=True)]
                theirs = [
                    mine if rank == place.rank else next(slots) if place.part(stage) < many else nothing
                    for rank, many in enumerate(seen)
                ]
                swaps.append(Swap(sent, theirs))
                own.append(place.own(x, stage)[first:end])
            works = _begin_swaps(group, place.rank, swaps)
            try:
                if waiting is not None:
                    _add(*waiting)
            except BaseException:
                _wait_for(works)  # its memory is given on
                raise
            waiting = works, swaps, own
        _add(*waiting)
        return Travel(_mark(sums[0]), sums, received)


def _wait_for(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _add(works: list[dist.Work], swaps: list[Swap], results: list[Tensor]) -> None:
    """The sums of what has come, in the order of ranks."""
    _wait_for(works)
    for swap, own in zip(swaps, results, strict=True):
        *before, last = (x for x in swap.received if x.numel())
        if not before:
            own.copy_(last)
            continue
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
