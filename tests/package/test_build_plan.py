"""What the build decides from the environment and the machine, and what it says where it cannot."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys

import htree_cuda_build as build
import pytest

from .common import ROOT, command


class FakeProbe(build.Probe):
    """A machine that has what the test says."""

    def __init__(self, nvcc=None, driver=None, cxx="g++", platform=("linux", "x86_64")):
        self.has = {"nvcc": nvcc, "driver": driver, "cxx": cxx, "platform": platform}

    def nvcc(self, environ):
        return self.has["nvcc"]

    def driver(self):
        return self.has["driver"]

    def cxx(self, environ):
        return self.has["cxx"]

    def platform(self):
        return self.has["platform"]


COMPILER = {
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
}


@pytest.mark.parametrize(
    ("mode", "nvcc", "driver", "kernels", "wheels"),
    [
        ("off", None, None, False, False),
        ("off", "nvcc", "driver", False, False),
        ("auto", None, None, False, False),
        ("auto", "nvcc", None, True, False),
        ("auto", None, "driver", True, True),
        ("auto", "nvcc", "driver", True, False),
        (None, "nvcc", None, True, False),
        ("", None, None, False, False),
        ("AUTO", None, "driver", True, True),
        ("on", None, None, True, True),
        ("on", "nvcc", None, True, False),
        ("on", None, "driver", True, True),
    ],
)
def test_plan_and_requirements(mode, nvcc, driver, kernels, wheels):
    environ = {} if mode is None else {"HTREE_CUDA_KERNELS": mode}
    plan = build.plan(environ, FakeProbe(nvcc, driver))
    assert (plan.kernels, plan.kernels and plan.nvcc is None) == (kernels, wheels)
    assert plan.reason
    needs = set(build.requirements(plan, environ))
    expected = set()
    if kernels:
        expected = {*build.KERNEL_REQUIREMENTS, "nvidia-cutlass==4.2.0.0"} | (COMPILER if wheels else set())
    assert needs == expected


@pytest.mark.parametrize("value", ["yes", "1", "true", "on off", "kernels"])
def test_other_values_are_errors(value):
    with pytest.raises(build.BuildError, match=r"HTREE_CUDA_KERNELS must be auto, on or off, got '.*'"):
        build.plan({"HTREE_CUDA_KERNELS": value}, FakeProbe("nvcc"))


def test_nvcc_override(tmp_path):
    nvcc = tmp_path / "nvcc"
    for mode in ("auto", "on"):
        environ = {"HTREE_CUDA_KERNELS": mode, "HTREE_CUDA_NVCC": str(nvcc)}
        nvcc.unlink(missing_ok=True)
        with pytest.raises(build.BuildError, match="HTREE_CUDA_NVCC must be `wheels` or the path of nvcc"):
            build.plan(environ, FakeProbe("other"))
        nvcc.write_text("")
        with pytest.raises(build.BuildError, match="is no executable file"):
            build.plan(environ, FakeProbe("other"))
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        assert build.plan(environ, FakeProbe("other")).nvcc == str(nvcc)
        wheels = build.plan({**environ, "HTREE_CUDA_NVCC": "wheels"}, FakeProbe("other"))
        assert wheels.kernels and wheels.nvcc is None and set(build.requirements(wheels, {})) >= COMPILER
    assert not build.plan({"HTREE_CUDA_KERNELS": "off", "HTREE_CUDA_NVCC": "nowhere"}, FakeProbe()).kernels


def test_no_compiler_and_other_platforms():
    assert "no C++ compiler: g++" in build.plan({}, FakeProbe("nvcc", cxx=None)).reason
    assert not build.plan({}, FakeProbe("nvcc", cxx=None)).kernels
    with pytest.raises(build.BuildError, match=r"HTREE_CUDA_KERNELS=on, but no C\+\+ compiler: clang was not found"):
        build.plan({"HTREE_CUDA_KERNELS": "on", "CXX": "clang"}, FakeProbe("nvcc", cxx=None))
    assert not build.plan({}, FakeProbe("nvcc", platform=("darwin", "arm64"))).kernels
    with pytest.raises(build.BuildError, match="Linux x86_64 and aarch64 only, this is win32 AMD64"):
        build.plan({"HTREE_CUDA_KERNELS": "on"}, FakeProbe("nvcc", platform=("win32", "AMD64")))


def test_cutlass_override(tmp_path):
    environ = {"HTREE_CUDA_CUTLASS_DIR": str(tmp_path / "none")}
    with pytest.raises(build.BuildError, match=r"HTREE_CUDA_CUTLASS_DIR='.*none' is no folder"):
        build.plan(environ, FakeProbe("nvcc"))
    environ = {"HTREE_CUDA_CUTLASS_DIR": str(tmp_path)}
    with pytest.raises(build.BuildError, match=r"holds neither include/cutlass/version\.h nor cutlass/version\.h"):
        build.plan(environ, FakeProbe("nvcc"))
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 3\n#define CUTLASS_PATCH 1 \n")
    plan = build.plan(environ, FakeProbe("nvcc"))
    assert "nvidia-cutlass==4.2.0.0" not in build.requirements(plan, environ)
    include = build.find_cutlass(environ)
    assert include == (tmp_path / "include").resolve() and build.cutlass_version(include) == "4.3.1"
    header.write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 0\n")
    with pytest.raises(build.BuildError, match=r"CUTLASS 3\.9\.0 at .* is too old: 4\.2\.0 or newer"):
        build.cutlass_version(include)
    header.write_text("")
    with pytest.raises(build.BuildError, match="defines no CUTLASS_MAJOR"):
        build.cutlass_version(include)


def fake_tool(folder, name, output):
    tool = folder / name
    tool.write_text(f"#!{sys.executable}\nprint({output!r})\n")
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        (
            "Cuda compilation tools, release 11.8, V11.8.89",
            build.Missing,
            "older than 12.8: set HTREE_CUDA_NVCC=wheels",
        ),
        ("hello", build.BuildError, "names no release: is it nvcc?"),
    ],
)
def test_unusable_nvcc(tmp_path, output, error, words):
    nvcc = fake_tool(tmp_path, "nvcc", output)
    plan = build.plan({"HTREE_CUDA_NVCC": nvcc}, FakeProbe())
    with pytest.raises(error, match=re.escape(words)):
        build.resolve(plan, {})


def test_max_jobs():
    assert build.max_jobs({"MAX_JOBS": "3"}) == 3
    assert build.max_jobs({}) >= 1
    for value in ("0", "-1", "many"):
        with pytest.raises(build.BuildError, match="MAX_JOBS must be a positive integer"):
            build.max_jobs({"MAX_JOBS": value})


def test_hooks_ask_for_the_compiler(tmp_path):
    """The PEP 517 hooks themselves, in a fresh process as pip runs them."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import htree_cuda_backend as b; "
        "print(b.get_requires_for_build_wheel(), b.get_requires_for_build_editable(), b.get_requires_for_build_sdist())"
    )
    hook = [sys.executable, "-c", script, ROOT / "build_backend"]
    text = command(*hook, cwd=ROOT, HTREE_CUDA_KERNELS="on", HTREE_CUDA_NVCC="wheels", HTREE_CUDA_CUTLASS_DIR="")
    for need in COMPILER | {"nvidia-cutlass==4.2.0.0"}:
        assert text.count(need) == 2, text
    assert "nvidia" not in command(*hook, cwd=ROOT, HTREE_CUDA_KERNELS="off")
    done = subprocess.run(
        [str(a) for a in hook],
        cwd=ROOT,
        env={**os.environ, "HTREE_CUDA_KERNELS": "maybe"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "htree_cuda: HTREE_CUDA_KERNELS must be auto, on or off" in done.stderr
