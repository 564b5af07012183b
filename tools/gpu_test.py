"""Runs the GPU tests and compute-sanitizer on a Hopper machine and records every outcome.

    python tools/gpu_test.py [--shard i/n] [--no-sanitizer] [--only TEXT] [--at-once n] [--list]

Each test file runs in its own process under a wall limit, since a hung kernel can only be killed with its
process. compute-sanitizer runs the tests whose name contains `sanitizer`: small shapes, inputs from the host.
The report, benchmarks/results/gpu_tests.json, is committed with the sources it tested; shards of the same sources
on the same kind of machine merge into one report.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from content_hash import ROOT, content_hash
from gpu_common import (
    BINARIES,
    RESULTS,
    benchmark_names,
    end_with_children,
    ensure_built,
    machine,
    merge_report,
    parse_shard,
    run,
)

REPORT = RESULTS / "gpu_tests.json"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TEST_LIMIT_S = 300
SANITIZER_LIMIT_S = 180
SANITIZERS_AT_ONCE = 4
# The first compares the device's free memory before and after a call; the second takes two GPUs.
ALONE = {"tests/kernels/test_tree_pool.py", "tests/kernels/test_context_parallel.py"}
SANITIZER_ERROR = 86  # exit status of compute-sanitizer where it has something to report
# Files whose oracles take minutes, in parts that run side by side.
PARTS = {
    "tests/kernels/test_forward.py": 6,
    "tests/kernels/test_backward.py": 4,
    "tests/kernels/test_decode.py": 4,
    "tests/kernels/test_forward_hostile.py": 2,
    "tests/kernels/test_forward_surroundings.py": 2,
    "tests/kernels/test_options.py": 5,
    "tests/kernels/test_sparse_attention_bwd.py": 4,
    "tests/kernels/test_varlen.py": 3,
}
# Reports that are known and wrong (docs/sanitizers.md). The tests themselves have to pass all the same.
ONE_LANE = "racecheck does not count what a warp did before one of its lanes arrives at an mbarrier for it"
HALF_STORES = "initcheck sees the first 32 bytes of what a bulk store writes"
EXPLAINED = {
    ("initcheck", "tests/kernels/test_attn_dist.py"): HALF_STORES,
    ("racecheck", "tests/kernels/test_attn_dist.py"): ONE_LANE,
    ("racecheck", "tests/kernels/test_backward.py"): ONE_LANE,
    ("racecheck", "tests/kernels/test_forward_surroundings.py"): ONE_LANE,
    ("racecheck", "tests/kernels/test_sparse_attention.py"): ONE_LANE,
    ("racecheck", "tests/kernels/test_sparse_attention_bwd_facts.py"): ONE_LANE,
    ("racecheck", "tests/kernels/test_varlen.py"): ONE_LANE,
}


def gpu_test_files() -> list[str]:
    """Test files that hold tests marked gpu."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in files if "mark.gpu" in path.read_text()]


def jobs(sanitizer: bool) -> list[tuple[str, ...]]:
    """(kind, tool or part, target) of everything to run, dealt to the shards one by one."""
    files = gpu_test_files()
    found: list[tuple[str, ...]] = []
    for file in files:
        parts = PARTS.get(file, 1)
        found += [("pytest", "" if parts == 1 else f"{i}/{parts}", file) for i in range(1, parts + 1)]
    found += [("binary", "", name) for name in benchmark_names()]
    if sanitizer:
        with_shapes = [file for file in files if "def test_sanitizer" in (ROOT / file).read_text()]
        found += [("sanitizer", tool, file) for file in with_shapes for tool in TOOLS]
    return found


def job_name(job: tuple[str, ...]) -> str:
    kind, tool, target = job
    part = f" part {tool}" if tool else ""
    return {"pytest": target + part, "binary": f"{target} --check-only", "sanitizer": f"{tool} {target}"}[kind]


def read_junit(path: Path) -> dict[str, str]:
    """Test name -> passed, skipped: why, failed: why."""
    outcomes = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = "passed"
        for child in case:
            if child.tag == "skipped":
                outcome = f"skipped: {child.get('message', '')}"
            elif child.tag in ("failure", "error"):
                message = (child.get("message") or child.tag).splitlines()[0]
                outcome = f"failed: {message[:300]}"
        outcomes[case.get("name", "?")] = outcome
    return outcomes


def pytest_command(file: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", file, "-m", "gpu", "-q", "-p", "no:cacheprovider", *options]


def run_pytest(file: str, part: str = "") -> dict:
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = pytest_command(file, "--maxfail=20", f"--junitxml={junit}", f"--part={part or '1/1'}")
        status, output = run(command, TEST_LIMIT_S)
        tests = read_junit(junit) if junit.exists() else {}
    if status is None:
        state = f"failed: ran past {TEST_LIMIT_S} s"
    elif status == 5:
        state = "skipped: no gpu tests"
    else:
        state = "passed" if status == 0 else "failed"
    if state.startswith("failed"):
        print(output[-6000:])
    return {"outcome": state, "tests": tests}


def run_binary(name: str) -> dict:
    status, output = run([str(BINARIES / name), "--check-only"], TEST_LIMIT_S)
    if status != 0:
        print(output[-3000:])
    return {"outcome": "passed" if status == 0 else f"failed: exit status {status}"}


def run_sanitizer(tool: str, file: str) -> dict:
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return {"outcome": "failed: compute-sanitizer was not found"}
    # The project's kernels alone are instrumented: their mangled names hold the namespace.
    command = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
    if tool == "synccheck":  # the backward has more barriers, over all blocks, than it has room for otherwise
        command += ["--num-cuda-barriers", "16384"]
    command += ["--kernel-name"]
    command += ["kernel_substring=htree_cuda", *pytest_command(file, "-k", "sanitizer")]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, output = run(command, SANITIZER_LIMIT_S, environment)
    summary = re.findall(r"=+ (\w+ SUMMARY: .*)", output)
    passed = re.search(r"(\d+) passed", output)
    if status is None:
        state = f"failed: ran past {SANITIZER_LIMIT_S} s"
    elif status == SANITIZER_ERROR and passed and (tool, file) in EXPLAINED:
        state = f"explained: {EXPLAINED[tool, file]}"
    elif status != 0 or not summary or not passed:
        state = f"failed: exit status {status}"
    else:
        state = "passed"
    if state.startswith("failed"):
        first = re.search(r"^=+ (?:Error|Warning|Invalid|Uninitialized|Race)", output, re.MULTILINE)
        print(
            output[first.start() :][:4000] if first else output[-6000:]
        )  # the first report, not the last one's frames
    return {"outcome": state, "summary": summary, "tests_run": int(passed[1]) if passed else 0}


def main(argv: list[str] | None = None) -> int:
    """Runs this shard's jobs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", help="i/n: the i-th of n parts")
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--no-sanitizer", action="store_true", help="tests only")
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side (80 GiB of GPU memory: 1)")
    parser.add_argument("--list", action="store_true", help="print the jobs and stop")
    arguments = parser.parse_args(argv)
    end_with_children()
    shard, shards = parse_shard(arguments.shard)
    mine = [job for job in jobs(not arguments.no_sanitizer)[shard::shards] if arguments.only in job_name(job)]
    if arguments.list:
        print("\n".join(map(job_name, mine)))
        return 0
    identity = {"content_hash": content_hash(), **machine()}
    ensure_built(benchmarks=True)
    failed = [job_name(job) for job, entry in run_jobs(mine, arguments.at_once) if not record(job, entry, identity)]
    names = f"; failed: {', '.join(failed)}" if failed else ""  # in the last line: a log may be cut to its end
    print(f"{len(mine) - len(failed)} of {len(mine)} jobs passed; report: {REPORT.relative_to(ROOT)}{names}")
    return 1 if failed else 0


def run_jobs(mine: list[tuple[str, ...]], at_once: int) -> Iterator[tuple[tuple[str, ...], dict]]:
    """Tests one after the other, since they take the GPU's memory, unless more are asked for. The small shapes under
    compute-sanitizer spend their time in its start-up, so they run side by side, afterwards."""
    if at_once > 1:  # most of the time is the oracles', on a few of the machine's cores; the longest file comes first
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // at_once, 1)))
        alone = [job for job in mine if job[0] == "pytest" and job[2] in ALONE]
        yield from map(run_job, alone)
        mine = sorted(set(mine) - set(alone), key=lambda job: (job[0] == "sanitizer", -PARTS.get(job[2], 1), job))
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for finished in concurrent.futures.as_completed([pool.submit(run_job, job) for job in mine]):
                yield finished.result()
        return
    yield from map(run_job, [job for job in mine if job[0] != "sanitizer"])
    with concurrent.futures.ThreadPoolExecutor(SANITIZERS_AT_ONCE) as pool:
        yield from pool.map(run_job, [job for job in mine if job[0] == "sanitizer"])


def run_job(job: tuple[str, ...]) -> tuple[tuple[str, ...], dict]:
    kind, tool, target = job
    start = time.time()
    if kind == "pytest":
        entry = run_pytest(target, tool)
    elif kind == "binary":
        entry = run_binary(target)
    else:
        entry = run_sanitizer(tool, target)
    entry["seconds"] = round(time.time() - start, 1)
    return job, entry


def record(job: tuple[str, ...], entry: dict, identity: dict) -> bool:
    """Prints an outcome and merges it into the report; whether the job passed."""
    counts = list(entry.get("tests", {}).values())
    passed = sum(outcome == "passed" for outcome in counts)
    detail = f", {passed} of {len(counts)} tests passed" if counts else ""
    print(f"{job_name(job)}: {entry['outcome']}{detail}, {entry['seconds']} s", flush=True)
    merge_report(REPORT, identity, "jobs", {job_name(job): entry})
    return not entry["outcome"].startswith("failed")


if __name__ == "__main__":
    sys.exit(main())
