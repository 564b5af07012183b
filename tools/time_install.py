"""Times an installation with kernels, and tries one wheel beside several versions of PyTorch.

python tools/time_install.py [build] [wheel] [--torch 2.6.0,2.11.0,2.13.0]    writes benchmarks/results/install.json

`build` runs `pip install --no-deps .` of a fresh clone of the last commit in an environment of its own, twice: from
nothing, which includes what pip fetches for the build, and again. `wheel` makes a wheel (tools/make_wheels.py),
installs it beside each PyTorch in an environment of its own, loads the compiled module there and runs calls of the
PyTorch backend. Where pip finds the versions is pip's configuration (PIP_EXTRA_INDEX_URL). What pip has in its cache
makes times shorter, as it does for a newcomer. Entries that are not run are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from content_hash import ROOT, content_hash

sys.path.insert(0, str(ROOT))

from htree_cuda.bench.protocol import cpu_name

RESULT = ROOT / "benchmarks" / "results" / "install.json"
CALL = """
import json, torch, htree_cuda
from htree_cuda import kernels
q, k, v = torch.randn(1, 300, 4, 16), torch.randn(1, 300, 2, 16), torch.randn(1, 300, 2, 16)
out = htree_cuda.forward(q, k, v, top_k_per_layer=4, compression_rate=4)
one = htree_cuda.forward(q[:, -1:], k, v, top_k_per_layer=4, compression_rate=4)
assert torch.allclose(out[:, -1:], one, atol=1e-5)
kernels.load()
print(json.dumps(torch.__version__))
"""


def run(*command: object, **options: object) -> str:
    """A command that must succeed; its output."""
    done = subprocess.run([str(c) for c in command], text=True, capture_output=True, **options)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def environment(folder: Path) -> Path:
    """The Python of a new environment."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def time_build() -> dict:
    """Seconds of two installations from one clone, and what was built."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "htree_cuda"
        run("git", "clone", "--quiet", "--no-local", ROOT, clone)
        python = environment(Path(folder) / "env")
        # A store of objects of its own, so that nothing compiled before is used again.
        place = {**os.environ, "HTREE_CUDA_KERNELS": "on", "HTREE_CUDA_BUILD_DIR": str(Path(folder) / "store")}
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            run(python, "-m", "pip", "install", "--no-deps", "--force-reinstall", ".", cwd=clone, env=place)
            seconds.append(round(time.perf_counter() - start, 1))
        (library,) = (Path(folder) / "env").rglob("libhtree_cuda.so")
        return {"first_s": seconds[0], "again_s": seconds[1], "library_mb": round(library.stat().st_size / 1e6, 1)}


def try_wheel(versions: list[str]) -> dict:
    """The wheel for this Python beside each version of PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dist"
        run(sys.executable, ROOT / "tools" / "make_wheels.py", "--out", out, sys.executable)
        (wheel,) = out.glob("*.whl")
        beside, seconds = [], 0.0
        for version in versions:
            python = environment(Path(folder) / version)
            run(python, "-m", "pip", "install", "-q", f"torch=={version}", "numpy")
            start = time.perf_counter()
            run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
            seconds = max(seconds, time.perf_counter() - start)
            beside.append(json.loads(run(python, "-c", CALL, cwd=folder)))
        size = round(wheel.stat().st_size / 1e6, 1)
        return {"name": wheel.name, "mb": size, "install_s": round(seconds, 1), "torch": beside}


def main(argv: list[str] | None = None) -> int:
    """Runs what is asked for and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="build, wheel; default: both")
    parser.add_argument("--torch", default="2.6.0,2.11.0,2.13.0", help="versions beside which the wheel is tried")
    arguments = parser.parse_args(argv)
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for what in arguments.what or ["build", "wheel"]:
        report[what] = {
            **(time_build() if what == "build" else try_wheel(arguments.torch.split(","))),
            "content_hash": content_hash(),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
