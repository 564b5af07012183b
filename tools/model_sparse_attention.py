"""A model of the schedule of csrc/sm90/sparse_attention: cycles for a tile of 64 keys and 64 heads in the steady state.

python tools/model_sparse_attention.py

Modelled: the dependences between scores, softmax, values and gather, the tensor cores as one server for the two
consumers' queues, the gather as a pipe of limited width followed by a fixed latency, everything else as fixed delays.
Not modelled: contention for shared memory, clocks, L2. It compares schedules; it does not predict milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

TILES = 96
SCORE_CYCLES = 34.0  # a WGMMA m64n64k16: 32 and a little
VALUE_CYCLES = 130.0  # m64n256k16
SOFTMAX_CYCLES = 600.0  # 32 exponentials a thread are 256, the rest maxima, sums, conversions, stores and the fence
HAND_OVER_CYCLES = 80.0  # from landed to seen: proxy fence and barrier
ISSUE_CYCLES = 40.0

Process = Generator["Event | float", None, None]


class Clock:
    """Runs processes, generators that yield an event to wait for or a delay."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._count), call))

    def start(self, process: Process) -> None:
        def step() -> None:
            try:
                awaited = next(process)
            except StopIteration:
                return
            if isinstance(awaited, Event):
                awaited.then(step)
            else:
                self.after(awaited, step)

        self.after(0.0, step)

    def run(self) -> None:
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()


class Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._set, self._waiting = clock, False, []

    def set(self) -> None:
        self._set = True
        for call in self._waiting:
            self._clock.after(0.0, call)

    def then(self, call: Callable[[], None]) -> None:
        if self._set:
            self._clock.after(0.0, call)
        else:
            self._waiting.append(call)


class TensorCores:
    """Takes instructions from the two consumers' queues alternately."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._queues, self._busy, self._last = clock, ([], []), False, 0

    def issue(self, consumer: int, count: int, cycles: float) -> Event:
        """The event of the last of `count` instructions."""
        done = Event(self._clock)
        self._queues[consumer].extend([(cycles, None)] * (count - 1) + [(cycles, done)])
        self._next()
        return done

    def _next(self) -> None:
        waiting = [c for c in (1 - self._last, self._last) if self._queues[c]]
        if self._busy or not waiting:
            return
        self._busy, self._last = True, waiting[0]
        cycles, done = self._queues[waiting[0]].pop(0)

        def finish() -> None:
            self._busy = False
            if done:
                done.set()
            self._next()

        self._clock.after(cycles, finish)


@dataclass
class Schedule:
    parts: int  # in which a half of the value columns lands
    keys_first: bool  # whether the columns past the values come with the first half or with the second
    scores_before_values: int  # parts of the scores that are issued before the other consumer's P is waited for


def cycles_per_tile(schedule: Schedule, latency: float, width: float) -> float:
    """Gather: `width` bytes a cycle, `latency` cycles from the last byte's slot to its arrival."""
    clock = Clock()
    tensor = TensorCores(clock)
    near = [f"near {i}" for i in range(schedule.parts)]
    far = [f"far {i}" for i in range(schedule.parts)]
    groups = (["keys", *near], far) if schedule.keys_first else (near, ["keys", *far])
    names = [*near, *far, "keys"]
    landed = {(t, name): Event(clock) for t in range(TILES) for name in names}
    freed = {(t, name): Event(clock) for t in range(TILES) for name in names}
    probabilities = [Event(clock) for _ in range(TILES)]
    size = dict.fromkeys(near + far, 32768 // schedule.parts) | {"keys": 8192}
    pipe_free = [0.0]
    finished = {}

    def gather(name: str) -> Event:
        arrived = Event(clock)
        pipe_free[0] = max(clock.now, pipe_free[0]) + size[name] / width
        clock.after(pipe_free[0] - clock.now + latency, arrived.set)
        return arrived

    def producer(group: list[str]) -> Process:
        for t in range(TILES):
            arrivals = []
            for name in group:
                if t >= 2:
                    yield freed[t - 2, group[-1]]  # a half at a time
                yield ISSUE_CYCLES
                arrivals.append((name, gather(name)))
            for name, arrived in arrivals:
                yield arrived
                yield HAND_OVER_CYCLES
                landed[t, name].set()

    def consumer(me: int) -> Process:
        for t in range(me, TILES, 2):
            values_of_other = None
            order = [near[0], "keys", *near[1:], *far] if schedule.keys_first else [*near, far[0], "keys", *far[1:]]
            for i, name in enumerate(order):
                if t > 0 and i == schedule.scores_before_values:
                    yield probabilities[t - 1]
                    yield ISSUE_CYCLES
                    values_of_other = tensor.issue(me, 4, VALUE_CYCLES)
                yield landed[t, name]
                scores = tensor.issue(me, 4 if name == "keys" else 16 // schedule.parts, SCORE_CYCLES)
            if t > 0 and values_of_other is None:
                yield probabilities[t - 1]
                yield ISSUE_CYCLES
                values_of_other = tensor.issue(me, 4, VALUE_CYCLES)
            yield scores
            yield SOFTMAX_CYCLES
            probabilities[t].set()
            if values_of_other is not None:
                yield values_of_other
                for name in far:
                    freed[t - 1, name].set()
            yield ISSUE_CYCLES
            yield tensor.issue(me, 4, VALUE_CYCLES)
            for name in near:
                freed[t, name].set()
            finished[t] = clock.now

    for group in groups:
        clock.start(producer(group))
    clock.start(consumer(0))
    clock.start(consumer(1))
    clock.run()
    first, last = 20, TILES - 20
    return (finished[last] - finished[first]) / (last - first)


SCHEDULES = {
    "halves land whole, columns past the values with the second": Schedule(1, False, 99),
    "halves land whole, columns past the values with the first": Schedule(1, True, 99),
    "halves land in two parts (the kernel)": Schedule(2, True, 99),
    "in four parts": Schedule(4, True, 99),
    "in two, the other's values before the second half's scores": Schedule(2, True, 3),
    "in two, the other's values before all scores": Schedule(2, True, 0),
}
GATHERS = ((500, 60), (700, 60), (1000, 60), (700, 40), (1000, 40), (1300, 40))


def main() -> int:
    """Prints the table of docs/kernels/sparse_attention.md."""
    print("| latency of the gather, cycles / bytes a cycle | " + " | ".join(f"{a} / {b}" for a, b in GATHERS) + " |")
    print("|---" * (len(GATHERS) + 1) + "|")
    for name, schedule in SCHEDULES.items():
        row = (f"{cycles_per_tile(schedule, latency, width):.0f}" for latency, width in GATHERS)
        print(f"| {name} | " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
