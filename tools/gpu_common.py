"""What gpu_test.py and gpu_bench.py share: shards, the machine, builds, subprocesses with a wall limit."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from content_hash import ROOT, csrc_hash

RESULTS = ROOT / "benchmarks" / "results"
BINARIES = ROOT / "build" / "kernels" / "bin"


def benchmark_names() -> list[str]:
    """The C++ benchmark programs."""
    return sorted(path.stem for path in (ROOT / "benchmarks" / "cpp").glob("*.cu"))


def parse_shard(text: str | None) -> tuple[int, int]:
    """`i/n` as (i - 1, n)."""
    if not text:
        return 0, 1
    try:
        i, n = (int(part) for part in text.split("/"))
    except ValueError:
        i, n = 0, 0
    if not 1 <= i <= n:
        raise SystemExit(f"SHARD must be i/n with 1 <= i <= n, got {text!r}")
    return i - 1, n


_running: set[int] = set()  # process groups


def end_with_children() -> None:
    """A terminated program takes its processes along: what they leave running would disturb the next timing."""

    def end(*_) -> None:
        for group in tuple(_running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def run(command: list[str], limit_s: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Exit status (None: killed at the limit) and output. A hung kernel dies with its process."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    finally:
        _running.discard(process.pid)


def machine() -> dict:
    """GPU, driver, torch of this machine; exits where there is no Hopper GPU."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this needs a Hopper GPU (compute capability 9.0) that torch can see")
    status, driver = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"], 30)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.strip().splitlines()[0] if status == 0 and driver.strip() else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def ensure_built(benchmarks: bool = False) -> None:
    """Uses kernels that were built from these sources, builds what is missing, exits where neither works."""
    info_file = ROOT / "htree_cuda" / "_build_info.json"
    info = json.loads(info_file.read_text()) if info_file.exists() else {}
    library = (ROOT / "htree_cuda" / "libhtree_cuda.so").exists()
    current = library and info.get("csrc_hash") == csrc_hash(ROOT)
    complete = not benchmarks or all((BINARIES / name).exists() for name in benchmark_names())
    builder = [sys.executable, str(ROOT / "tools" / "build_inplace.py")]
    if not (current and complete):
        print("building the kernels" if not current else "building the benchmarks", flush=True)
        status, output = run([*builder, "--benchmarks"], 1500)
        if status != 0:
            raise SystemExit(f"the kernels here are missing or stale, and building them failed:\n{output}")
    load = [sys.executable, "-c", "from htree_cuda import kernels; kernels.load()"]
    status, output = run(load, 300)
    if status != 0:
        # A library from another Python: its module takes seconds.
        print("building the Python module against the library that is there", flush=True)
        status, output = run([*builder, "--module-only"], 600)
        if status == 0:
            status, output = run(load, 300)
        if status != 0:
            raise SystemExit(f"the kernels do not load:\n{output}")


def merge_report(path: Path, identity: dict, section: str, entries: dict) -> dict:
    """Adds entries to the report at `path` if its sources and machine are the same, else begins a new one."""
    report = json.loads(path.read_text()) if path.exists() else {}
    if any(report.get(key) != value for key, value in identity.items()):
        report = dict(identity)
    report["date"] = today()
    report.setdefault(section, {}).update(entries)
    report[section] = dict(sorted(report[section].items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report
