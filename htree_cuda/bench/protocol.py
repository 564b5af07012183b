"""How a call is timed, and which sources ran on which machine; the protocol is the package's docstring."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__

WARM_UP_S, TIMED_S = 0.5, 1.0
LEAST_CALLS_GPU, LEAST_CALLS_CPU = 5, 3
ROUNDS = 3  # of calls whose measurements are interleaved
LEAST_PAUSE_MS = 0.5  # the host enqueues a call in less


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def identity(device: str) -> dict:
    """Which sources ran where, found out once: programs write it with every row. Not to be changed by the caller."""
    script = Path(__file__).resolve().parent.parent.parent / "tools" / "content_hash.py"
    about = {
        "version": __version__,
        "content_hash": _output([sys.executable, str(script)]) if script.exists() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", _this_gpu()])
        about |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    else:
        about |= {"cpu": cpu_name(), "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    return about


def write_report(path: Path, program: str, about: dict, figures: list[dict]) -> None:
    """What was measured so far, whole or not at all: a run that is cut off leaves the file of its last call."""
    write_whole(path, json.dumps({"program": program, **about, "figures": figures}, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes the file of --out, whose folder is made. The path holds what it held before or the text whole, and no
    draft stays beside it. Raises ValueError where it cannot be written."""
    draft = path.with_name(path.name + ".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        raise ValueError(f"--out {path}: cannot be written ({error.strerror or error})") from None


def _this_gpu() -> str:
    """The option of nvidia-smi that picks the current device."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return "--id=0" if uuid is None else f"--id=GPU-{uuid}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _quantile(times: list[float], q: float) -> float:
    times = sorted(times)
    return times[min(len(times) - 1, math.ceil(q * len(times)) - 1)]


def summary(times: list[float], **extra) -> dict:
    """Median, 90th percentile and number of the milliseconds of calls."""
    median, p90 = (round(_quantile(times, q), 4) for q in (0.5, 0.9))
    return {"ms": median, "p90_ms": p90, "calls": len(times), **extra}


def sample(
    call: Callable[[], object],
    device: str,
    pause_ms: float = 0.0,
    *,
    before: Callable[[], object] | None = None,
    repeats: int = 1,
    seconds: tuple[float, float] | None = None,
    probed: bool = True,
) -> tuple[list[float], dict]:
    """Milliseconds of each call by the protocol above, and what was read meanwhile. With a pause before each call: the
    GPU spends it in a kernel of one thread, while the host enqueues the call behind it, so that no time of the host is
    in the call's. With repeats, a time is the mean of as many calls back to back, for calls so short that two events
    around each would show; `before` runs before each of these intervals and is in no time. seconds: of warm-up and of
    timed calls, in place of the protocol's, for what is only set beside a result. Not probed: clock and power are not
    read, which takes as long as some samples."""
    times: list[float] = []
    warm_up, timed = (WARM_UP_S, TIMED_S) if seconds is None else seconds

    def calls() -> None:
        for _ in range(repeats):
            call()

    def prepare() -> None:
        if before is not None:
            before()

    if device == "cpu":
        prepare()
        calls()
        while len(times) < LEAST_CALLS_CPU or repeats * sum(times) < 1e3 * timed:
            time.sleep(pause_ms / 1e3)
            prepare()
            start = time.perf_counter()
            calls()
            times.append(1e3 * (time.perf_counter() - start) / repeats)
        return times, {}
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up:
        prepare()
        calls()
        torch.cuda.synchronize()
        time.sleep(pause_ms / 1e3)
    clocks = round(max(pause_ms, LEAST_PAUSE_MS) * _clocks_per_ms()) if pause_ms else 0
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", _this_gpu()]
    probe = None
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    start = time.perf_counter()
    while len(pairs) < LEAST_CALLS_GPU or time.perf_counter() - start < timed:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        if clocks:
            torch.cuda._sleep(clocks)
        prepare()
        pair[0].record()
        calls()
        pair[1].record()
        pairs.append(pair)
        if len(pairs) % 16 == 0:  # keeps the queue short, never empty
            pairs[-8][1].synchronize()
        if probed and probe is None and time.perf_counter() - start > 0.3 * timed:
            probe = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    torch.cuda.synchronize()
    clock = power = None
    if probe is not None:
        fields = probe.communicate(timeout=60)[0].split(",")
        if len(fields) == 2:
            clock, power = (float(x) for x in fields)
    about = {"clock_mhz": clock, "power_w": power, "peak_bytes": torch.cuda.max_memory_allocated() - allocated}
    if clocks:
        pauses = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(pairs)]
        about["pause_ms"] = round(_quantile(pauses, 0.5), 4)
    return [a.elapsed_time(b) / repeats for a, b in pairs], about


@dataclass(frozen=True)
class Short:
    """A protocol for tables of many rows: a first call, then calls for warm_up_s, then for timed_s and at least `least`
    of them. Where the first call takes long_s or more, `long_calls` follow and count: a first one makes plans and takes
    memory, which added up to 0.8 s to dense attention's."""

    warm_up_s: float = 0.05
    timed_s: float = 0.12
    long_s: float = 0.3
    least: int = 2
    long_calls: int = 1


def laps(call: Callable[[Callable[[], None]], object], device: str, short: Short) -> list[list[float]]:
    """Milliseconds of the parts of each call, call by call: from its beginning to the first time that it calls what it
    is given, from there to the next time, and to its end."""
    calls: list[list] = []

    def one() -> None:
        marks: list = []

        def mark() -> None:
            if device == "cpu":
                marks.append(time.perf_counter())
            else:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()

        mark()
        call(mark)
        mark()
        calls.append(marks)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def parts(marks: list) -> list[float]:
        if device == "cpu":
            return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    wait()
    one()
    wait()
    if sum(parts(calls[0])) < 1e3 * short.long_s:
        for seconds, least in ((short.warm_up_s, 0), (short.timed_s, short.least)):
            calls.clear()
            start = time.perf_counter()
            while len(calls) < least or time.perf_counter() - start < seconds:
                one()
                if device == "cuda" and len(calls) > 4:  # keeps the queue short, never empty
                    calls[-4][-1].synchronize()
    else:
        calls.clear()
        for _ in range(short.long_calls):
            one()
    wait()
    return [parts(marks) for marks in calls]


def _clocks_per_ms() -> float:
    """Of the kernel that torch.cuda._sleep launches: it counts clocks, and their rate follows power."""
    clocks = 1_000_000
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(clocks)  # the host enqueues the rest meanwhile
    first.record()
    torch.cuda._sleep(clocks)
    last.record()
    last.synchronize()
    return clocks / first.elapsed_time(last)


def _pooled(samples: list[tuple[list[float], dict]]) -> dict:
    """One summary of a call's samples: over all calls; of what was read beside them, the median of the samples."""
    known = {key: [about[key] for _, about in samples if about[key] is not None] for key in samples[0][1]}
    read = {key: _quantile(values, 0.5) if values else None for key, values in known.items()}
    return summary([ms for times, _ in samples for ms in times], **read)


def measure(call: Callable[[], object], device: str, **options) -> dict:
    """Median and p90 in milliseconds by the protocol above; options as `sample` takes them."""
    return _pooled([sample(call, device, **options)])


def measure_interleaved(calls: dict[str, Callable[[], object]], device: str) -> dict[str, dict]:
    """`measure` of several calls, round by round, so that all meet the same machine; `spaced`: with pauses as long as
    each call."""
    results: dict[str, dict] = {}
    for spaced in (False, True):
        samples: dict[str, list] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                samples[name].append(sample(call, device, results[name]["ms"] if spaced else 0.0))
        for name, own in samples.items():
            if spaced:
                results[name]["spaced"] = _pooled(own)
            else:
                results[name] = _pooled(own)
    return results


def measure_once(call: Callable[[], object], device: str) -> dict:
    """One call without warm-up, by the wall clock: for a peer that takes seconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return summary([1e3 * (time.perf_counter() - start)])
