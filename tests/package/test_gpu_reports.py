"""The programs that run tests and benchmarks on a GPU machine, and the report that they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import content_hash
import gpu_common
import gpu_test
import model_put_off
import pytest
import torch

from ..conftest import part_of
from .common import ROOT


def test_content_hash(tmp_path):
    for folder in ("csrc", "htree_cuda"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    before = content_hash.content_hash(tmp_path)
    assert before == content_hash.content_hash(ROOT)
    (tmp_path / "htree_cuda" / "libhtree_cuda.so").write_bytes(b"another build")
    (tmp_path / "htree_cuda" / "_build_info.json").write_text("{}")
    assert content_hash.content_hash(tmp_path) == before
    (tmp_path / "csrc" / "params.h").open("a").write("// changed\n")
    assert content_hash.content_hash(tmp_path) != before


def test_shards_cover_every_job_once():
    jobs = gpu_test.jobs(sanitizer=True)
    assert ("pytest", "", "tests/kernels/test_tree_pool.py") in jobs
    assert {job[1] for job in jobs if job[0] == "sanitizer"} == set(gpu_test.TOOLS)
    for n in (1, 2, 3, 5):
        parts = [jobs[i::n] for i, n in (gpu_common.parse_shard(f"{i}/{n}") for i in range(1, n + 1))]
        assert sorted(job for part in parts for job in part) == sorted(jobs)
    for text in ("0/2", "3/2", "1", "a/b", "1/0"):
        with pytest.raises(SystemExit, match="SHARD must be i/n"):
            gpu_common.parse_shard(text)


@pytest.mark.parametrize("at_once", [1, 4])
def test_gpu_jobs_all_run(at_once, monkeypatch):
    """One after the other or side by side; where side by side, the longest file begins."""
    begun = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu_test, "run_job", lambda job: (begun.append(job), (job, {}))[1])
    jobs = gpu_test.jobs(sanitizer=True)
    assert sorted(job for job, _ in gpu_test.run_jobs(jobs, at_once)) == sorted(jobs) == sorted(begun)
    if at_once > 1:
        first = [gpu_test.job_name(job) for job in begun[: 2 * at_once]]  # threads may overtake each other
        assert "tests/kernels/test_forward.py part 1/6" in first


def test_a_terminated_run_leaves_no_process(tmp_path):
    child = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {child}.new; mv {child}.new {child}; exec sleep 60"]
    program = f"import gpu_common as g; g.end_with_children(); g.run({command!r}, 60)"
    run = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT / "tools")})
    try:
        wait_for(child.exists)
        assert runs(int(child.read_text()))
        run.terminate()
        assert run.wait(20) == 128 + signal.SIGTERM
        wait_for(lambda: not runs(int(child.read_text())))
    finally:
        run.kill()


def wait_for(condition, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_parts_hold_every_test_once():
    for tests in (0, 1, 5, 11, 12):
        parts = [part_of(list(range(tests)), f"{i}/3") for i in (1, 2, 3)]
        assert sorted(i for part in parts for i in part) == list(range(tests))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_gpu_jobs_that_failed_are_named_last(monkeypatch, capsys, tmp_path):
    outcomes = {"memcheck": "failed: exit status 1"}
    monkeypatch.setattr(
        gpu_test, "run_job", lambda job: (job, {"outcome": outcomes.get(job[1], "passed"), "seconds": 1})
    )
    monkeypatch.setattr(gpu_test, "REPORT", gpu_test.ROOT / tmp_path / "report.json")
    monkeypatch.setattr(gpu_test, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(gpu_test, "ensure_built", lambda benchmarks: None)
    monkeypatch.setattr(gpu_test, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_test, "jobs", lambda sanitizer: [("sanitizer", "memcheck", "x"), ("pytest", "", "y")])
    assert gpu_test.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 jobs passed; report: report.json; failed: memcheck x"


def test_model_of_what_is_put_off(capsys):
    """The bound is the value of the wanted rank, among all where all are sampled; the program counts beyond it."""
    x = torch.randperm(1024, generator=torch.Generator().manual_seed(0)).float()
    assert model_put_off.bound(x, top_k=64, sample=1024, put_off=2.0) == 1023 - 128
    model_put_off.main(["--top-k", "16", "--lengths", "8192", "--sample", "512", "--put-off", "4", "--queries", "4"])
    rows = [row.split("|") for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[2].strip() for row in rows] == ["iid", "local"]
    for row in rows:  # all are sampled, or half
        assert 2 < float(row[5]) < 4.5 and row[6].strip() == "0 of 4"


def test_reports_merge(tmp_path):
    path = tmp_path / "report.json"
    gpu_common.merge_report(path, {"content_hash": "a", "gpu": "x"}, "jobs", {"one": {"outcome": "passed"}})
    report = gpu_common.merge_report(path, {"content_hash": "a", "gpu": "x"}, "jobs", {"two": {"outcome": "passed"}})
    assert list(report["jobs"]) == ["one", "two"]
    report = gpu_common.merge_report(path, {"content_hash": "b", "gpu": "x"}, "jobs", {"two": {"outcome": "passed"}})
    assert list(report["jobs"]) == ["two"]


def test_a_command_past_its_limit_is_killed():
    status, output = gpu_common.run([sys.executable, "-c", "print('begun'); import time; time.sleep(60)"], 2)
    assert status is None and "begun" in output


def recorded_failures(report):
    """Jobs and tests of a report that failed; a sanitizer's report that docs/sanitizers.md explains did not."""
    good = ("passed", "skipped", "explained: ")
    failures = [name for name, job in report["jobs"].items() if not job["outcome"].startswith(good)]
    for job in report["jobs"].values():
        failures += [name for name, outcome in job.get("tests", {}).items() if outcome.startswith("failed")]
    return failures


def test_recorded_gpu_tests_passed():
    """The committed report of the GPU machine: no failure in it; a stale one is said, not failed."""
    path = ROOT / "benchmarks" / "results" / "gpu_tests.json"
    if not path.exists():
        pytest.skip("no GPU report is committed")
    report = json.loads(path.read_text())
    assert report["jobs"] and recorded_failures(report) == []
    if report["content_hash"] != content_hash.content_hash():
        message = (
            f"gpu_tests.json is stale: it tested {report['content_hash'][:12]} on {report['date']}, "
            f"these sources are {content_hash.content_hash()[:12]}; run `make gpu-test` on a Hopper machine"
        )
        warnings.warn(message, stacklevel=1)


def test_recorded_failures_are_found():
    job = {"outcome": "passed", "tests": {"test_a": "passed", "test_b": "failed: bits", "test_c": "skipped: why"}}
    assert recorded_failures({"jobs": {"file": job, "memcheck": {"outcome": "failed: exit status 86"}}}) == [
        "memcheck",
        "test_b",
    ]
