"""What the build decides from the environment and the machine, and what it says where it cannot."""

from __future__ import annotations

import importlib.machinery
import os
import re
import stat
import subprocess
import sys
import zipfile

import htree_cuda_build as build
import htree_cuda_cutlass as cutlass
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
@pytest.mark.parametrize("fetched", [False, True])
def test_plan_and_requirements(monkeypatch, mode, nvcc, driver, kernels, wheels, fetched):
    """The whole package of CUTLASS only where its headers cannot be fetched."""
    monkeypatch.setattr(cutlass, "fetch", lambda environ: ROOT if fetched else None)
    environ = {} if mode is None else {"HTREE_CUDA_KERNELS": mode}
    plan = build.plan(environ, FakeProbe(nvcc, driver))
    assert (plan.kernels, plan.kernels and plan.nvcc is None) == (kernels, wheels)
    assert plan.reason
    needs = set(build.requirements(plan, environ))
    expected = set()
    if kernels:
        expected = set(build.KERNEL_REQUIREMENTS) | (COMPILER if wheels else set())
        expected |= set() if fetched else {"nvidia-cutlass==4.2.0.0"}
    assert needs == expected


@pytest.mark.parametrize("value", ["yes", "1", "true", "on off", "kernels"])
def test_other_values_are_errors(value):
    with pytest.raises(build.BuildError, match=r"HTREE_CUDA_KERNELS must be auto, on or off, got '.*'"):
        build.plan({"HTREE_CUDA_KERNELS": value}, FakeProbe("nvcc"))


def test_nvcc_override(tmp_path, monkeypatch):
    monkeypatch.setattr(cutlass, "fetch", lambda environ: None)
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


def cutlass_wheel(path):
    """A wheel with one header, a module that no build wants, and a requirement that nobody has."""
    info = "nvidia_cutlass-4.2.0.0.dist-info"
    files = {
        "cutlass_library/__init__.py": "",
        "cutlass_library/source/include/cutlass/version.h": "".join(
            f"#define CUTLASS_{name} {value}\n" for name, value in zip(("MAJOR", "MINOR", "PATCH"), (4, 2, 0))
        ),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: 4.2.0.0\nRequires-Dist: nowhere\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))


def test_python_brings_a_pip(monkeypatch):
    """A build environment of pip has none of its own."""
    found = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(
        importlib.machinery.PathFinder, "find_spec", lambda name, *more: None if name == "pip" else found(name, *more)
    )
    pip = cutlass._pip()
    if pip is None:
        pytest.skip("this Python has no ensurepip")
    assert pip[1].endswith("/pip") and command(*pip, "--version").startswith("pip ")


def test_a_store_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    environ = {"HTREE_CUDA_BUILD_DIR": str(tmp_path / "file" / "store")}
    monkeypatch.setattr(cutlass, "_pip", lambda: [sys.executable, "-c", "raise SystemExit"])
    assert cutlass.fetch(environ) is None
    with pytest.raises(build.Missing, match=r"no CUTLASS headers: install nvidia-cutlass==4\.2\.0\.0"):
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
        build.find_cutlass(environ)


def test_hooks_ask_for_the_compiler(tmp_path):
    """The PEP 517 hooks themselves, in a fresh process as pip runs them."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import htree_cuda_backend as b; "
        "print(b.get_requires_for_build_wheel(), b.get_requires_for_build_editable(), b.get_requires_for_build_sdist())"
    )
    hook = [sys.executable, "-c", script, ROOT / "build_backend"]
    wanted = {"HTREE_CUDA_KERNELS": "on", "HTREE_CUDA_NVCC": "wheels", "HTREE_CUDA_CUTLASS_DIR": ""}
    wanted |= {"HTREE_CUDA_BUILD_DIR": str(tmp_path / "store"), "PIP_NO_INDEX": "1"}
    text = command(*hook, cwd=ROOT, **wanted)
    for need in COMPILER | {"nvidia-cutlass==4.2.0.0"}:
        assert text.count(need) == 2, text
    cutlass_wheel(tmp_path / "nvidia_cutlass-4.2.0.0-py3-none-any.whl")
    text = command(*hook, cwd=ROOT, **wanted, PIP_FIND_LINKS=str(tmp_path))
    assert "cutlass" not in text and all(text.count(need) == 2 for need in COMPILER), text
    include = cutlass.kept(wanted)
    assert build.cutlass_version(include) == "4.2.0" and not list((tmp_path / "store").rglob("*.py"))
    assert "nvidia" not in command(*hook, cwd=ROOT, HTREE_CUDA_KERNELS="off")
    done = subprocess.run(
        [str(a) for a in hook],
        cwd=ROOT,
        env={**os.environ, "HTREE_CUDA_KERNELS": "maybe"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "htree_cuda: HTREE_CUDA_KERNELS must be auto, on or off" in done.stderr
