"""The C++ programs of benchmarks/cpp over emulated kernels. They need kernels of both dtypes, which `make test` does
not translate: tools/emulated_tests.py runs them when one of their sources changed, and so does `make test-all`."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tools.ptx_emulator import make, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(
        os.environ.get("HTREE_CUDA_EMULATED", "sample") not in ("marked", "all"),
        reason="HTREE_CUDA_EMULATED=marked runs the C++ programs on the emulator",
    ),
]


@pytest.mark.parametrize(("name", "cases"), [("forward", 4), ("sparse_attention", 3), ("decode", 2)])
def test_a_benchmark_checks_itself(name, cases):
    """Its own oracle, and repeats."""
    program = make.build_benchmark(name)
    done = subprocess.run([program, "--check-only", "--small"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert checks["cases"] == cases and checks["failures"] == checks["repeat_differences"] == 0
