"""What the kernels of one call are for, and how long each delays the end of the call."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable

import torch

# What the kernels of one call are for, by their names; the first that matches. The phases are those of `explain`, whose
# gather is done by the kernel that packs.
PHASES = {
    "rotations": r"rotations_kernel",
    "pool": r"tree_pool",
    "pack": r"tree_pack",
    "union": r"build_union_kernel",
    "select": r"select_kernel",
    "replay": r"replay_kernel",
    # One launch may serve queries of all layer kinds.
    "score": r"htree_fwd_kernel<[^>]*Pass\)0",
    "attend": r"htree_fwd_kernel<[^>]*Pass\)1",
}


def phase_of(kernel: str) -> str:
    """The phase that a kernel of `forward` belongs to, by its demangled name."""
    return next((phase for phase, pattern in PHASES.items() if re.search(pattern, kernel)), "other")


PROFILED_CALLS = 3


def increments(events: Iterable[tuple[str, float, float]], calls: int) -> list[tuple[str, float, float]]:
    """Of the last of several equal calls: name, how much later each kernel ends than the one before, and its own time.

    Launches overlap, so that a kernel's own time counts what it waited for the one before it, and own times add up to
    more than the call. From end to end they add up to the call.

    Args:
      events: name, start and end of every kernel of all calls, in any unit and order.
      calls: how many there were; at least two, since the first kernel of the last follows another.

    Raises:
      ValueError: these are not the kernels of so many equal calls.
    """
    ordered = sorted(events, key=lambda event: event[2])
    if calls < 2 or not ordered or len(ordered) % calls:
        raise ValueError(f"{len(ordered)} kernels are not those of {calls} equal calls, two at least")
    last = ordered[-(len(ordered) // calls) - 1 :]
    return [(name, end - before[2], end - start) for before, (name, start, end) in itertools.pairwise(last)]


def kernels(call: Callable[[], object], calls: int = PROFILED_CALLS) -> list[tuple[str, float, float]]:
    """Kernels of a call on a GPU, of the last of several back to back: demangled name, milliseconds from the end of the
    one before to its own end, and its own time (see `increments`)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    found = [(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events]
    return increments(found, calls)


def phases(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds by which the kernels of a call on a GPU delay its end, by phase, in the order of PHASES."""
    sums: dict[str, float] = {}
    for name, ms, _ in kernels(call):
        phase = phase_of(name)
        sums[phase] = sums.get(phase, 0.0) + ms
    return {phase: round(sums[phase], 4) for phase in (*PHASES, "other") if phase in sums}


# The kernels of the backward that multiply, patterns of their names: in selected layers, where small groups have
# dq_gather in place of dq_selected, and in the entry layer of a query.
GRADIENT_KERNELS = {
    "dq_selected": r"dq_(selected|gather)_kernel", "dkdv_selected": "dkdv_selected_kernel",
    "dq_entry": "dq_entry_kernel", "dkdv_entry": "dkdv_entry_kernel",
}  # fmt: skip
