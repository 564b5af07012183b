"""Times what a newcomer does: a fresh clone, then `make demo`, and another fresh clone, then `make test`.

python tools/first_run.py [demo] [test]      writes benchmarks/results/first_run.json (entries not run are kept)

Each command gets its own clone of the last commit in a temporary folder and no virtual environment; what pip has in
its cache and the speed of the package index are part of the time, as they are for a newcomer.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from content_hash import ROOT, content_hash

sys.path.insert(0, str(ROOT))

from htree_cuda.bench.protocol import cpu_name

RESULT = ROOT / "benchmarks" / "results" / "first_run.json"


def timed(target: str) -> dict:
    """One clone, one command, twice; its output goes to stderr as it comes. Nothing that was compiled before is used.
    Beside it: the load of the machine before, and the processor time of the first run."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "htree_cuda"
        subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), str(clone)], check=True)
        environment = {**os.environ, "HTREE_CUDA_BUILD_DIR": str(Path(folder) / "objects")}
        report: dict = {"load": round(os.getloadavg()[0], 1)}
        for name in ("first_s", "again_s"):
            start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(["make", target], cwd=clone, env=environment, stdout=sys.stderr, check=True)
            report[name] = round(time.perf_counter() - start, 1)
            now = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
            report.setdefault("first_cpu_s", round(cpu_s, 1))
        return report


def main(targets: list[str]) -> int:
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for target in targets or ["demo", "test"]:
        report[target] = {
            **timed(target),
            "content_hash": content_hash(),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
