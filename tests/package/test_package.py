"""The package: sdist -> wheel -> import, the build's decisions and messages, licences, the house rules' checkers."""

from __future__ import annotations

import email
import gzip
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "tools")]

import check_build_log  # noqa: E402
import check_house_rules  # noqa: E402
import content_hash  # noqa: E402
import gpu_common  # noqa: E402
import gpu_test  # noqa: E402
import gpu_timeline  # noqa: E402
import gpu_variants  # noqa: E402
import htree_cuda_build as build  # noqa: E402
import htree_cuda_ninja as ninja  # noqa: E402
import model_put_off  # noqa: E402

NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".ci")


def command(*arguments, cwd=None, **environment):
    """Output of a command; its whole output in the failure where it fails."""
    done = subprocess.run(
        [str(a) for a in arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}"
    return done.stdout


# ---- sdist -> wheel -> import --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """An sdist of a copy of this tree, build products of the tree included in the copy."""
    copy = tmp_path_factory.mktemp("tree") / "source"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    (copy / "htree_cuda" / "libhtree_cuda.so").write_bytes(b"a build product")
    (copy / "htree_cuda" / "_build_info.json").write_text("{}")
    out = tmp_path_factory.mktemp("sdist")
    command(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, cwd=copy)
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory):
    """A wheel without kernels, built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (source,) = folder.iterdir()
    out = tmp_path_factory.mktemp("wheel")
    build_wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out]
    output = command(*build_wheel, cwd=source, HTREE_CUDA_KERNELS="off")
    assert "building WITHOUT kernels: HTREE_CUDA_KERNELS=off" in output
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    command(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def test_sdist_is_complete(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    expected = {"setup.py", "pyproject.toml", "LICENSE", "NOTICE", "README.md"}
    for folder in (
        "csrc",
        "htree_cuda",
        "build_backend",
        "tools",
        "tests",
        "benchmarks",
        "docs",
        "examples",
        "third_party",
    ):
        for path in (ROOT / folder).rglob("*"):
            built = path.suffix in (".so", ".pyc") or path.name == "_build_info.json" or "__pycache__" in path.parts
            if path.is_file() and not built:
                expected.add(path.relative_to(ROOT).as_posix())
    assert expected <= names, f"missing from the sdist: {sorted(expected - names)}"
    assert not [name for name in names if name.endswith((".so", ".pyc", "_build_info.json"))]


def test_wheel_without_kernels(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licences = {Path(name).name: archive.read(name).decode() for name in names if "/licenses/" in name}
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
        info = json.loads(archive.read("htree_cuda/_build_info.json"))
    assert "MIT License" in licences["LICENSE"] and "the htree_cuda authors" in licences["LICENSE"]
    assert "BSD-3-Clause" in licences["NOTICE"] and "libcudart_static.a" in licences["NOTICE"]
    assert "htree_cuda/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"htree_cuda"}
    assert not [name for name in names if name.endswith(".so") or name.startswith(("csrc", "tests"))]
    parsed = email.message_from_string(metadata)
    assert parsed["Requires-Python"] == ">=3.10" and parsed["License-Expression"] == "MIT"
    assert parsed["Version"] == build.read_version(ROOT)
    needs = [need for need in parsed.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(needs) == ["numpy", "torch>=2.6"]
    assert info == {
        "version": build.read_version(ROOT),
        "kernels": False,
        "mode": "off",
        "reason": "HTREE_CUDA_KERNELS=off",
    }


def test_installed_wheel_runs(installed, tmp_path):
    """From another folder, from the wheel's files alone: import, one call, the info report."""
    script = """
import pathlib, torch, htree_cuda
assert pathlib.Path(htree_cuda.__file__).is_relative_to({site!r}), htree_cuda.__file__
q, k, v = torch.randn(1, 70, 2, 8), torch.randn(1, 70, 1, 8), torch.randn(1, 70, 1, 4)
out = htree_cuda.forward(q, k, v, compression_rate=4, top_k_per_layer=4)
assert out.shape == (1, 70, 2, 4) and out.isfinite().all()
from htree_cuda import kernels
assert not kernels.built() and kernels.why_not_built() == "built without kernels: HTREE_CUDA_KERNELS=off"
try:
    kernels.load()
except RuntimeError as error:
    assert "HTREE_CUDA_KERNELS=off" in str(error)
else:
    raise AssertionError
"""
    command(sys.executable, "-c", script.format(site=str(installed)), cwd=tmp_path, PYTHONPATH=str(installed))
    report = command(sys.executable, "-m", "htree_cuda", "info", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "kernels: NOT built: built without kernels: HTREE_CUDA_KERNELS=off" in report
    text = command(sys.executable, "-m", "htree_cuda", "info", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert json.loads(text)["auto"]["cpu_tensors"] == "torch"


def test_command_line_help():
    text = command(sys.executable, "-m", "htree_cuda", "--help", cwd=ROOT)
    assert all(name in text for name in ("info", "demo", "bench"))
    about = command(sys.executable, "-m", "htree_cuda", "--version", cwd=ROOT)
    assert about.split() == ["htree_cuda", build.read_version(ROOT)]


# ---- what the build decides ----------------------------------------------------------------------------------


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


def test_ninja_file_quotes_everything(tmp_path):
    """A path with blanks, dollars and quotes reaches the compilers whole."""
    pytest.importorskip("pybind11")
    root = tmp_path / "a b$c'd"
    shutil.copytree(ROOT / "csrc", root / "csrc")
    tools = build.Toolchain(
        "/x y/nvcc", "13.0", "toolkit", ("/lib dir",), "g++", "g++ 12", "/cut lass", "4.2.0", "ninja"
    )
    options = ninja.Options(root, root / "build", ["csrc/host/library.cu"])
    text = ninja.write_ninja(options, tools).read_text()
    assert "'/x y/nvcc'" in text and "'-L/lib dir'" in text and "'/cut lass'" in text
    assert f"build {tmp_path}/a$ b$$c'd/build/libhtree_cuda.so: link" in text
    for line in text.splitlines():
        if line.startswith("  command ="):
            assert not re.search(r"(?<!\$)\$(?!\$|in\b|out\b)", line), line


def test_every_source_is_listed():
    assert check_house_rules.check(ROOT) == []


# ---- the built library ---------------------------------------------------------------------------------------


@pytest.fixture
def library():
    spec = importlib.util.find_spec("htree_cuda")
    path = Path(spec.origin).parent / "libhtree_cuda.so"
    if not path.exists():
        pytest.skip("the kernels are not built here")
    return path


def test_library_needs_no_torch_and_no_cuda(library):
    module = next(library.parent.glob("_C*.so"), None)
    for path in filter(None, (library, module)):
        if shutil.which("ldd"):
            linked = [line.split()[0] for line in command("ldd", path).splitlines()]
            assert not [name for name in linked if re.search(r"torch|c10|libcuda", name)], linked
            assert "not found" not in command("ldd", path)
        if shutil.which("nm"):
            symbols = command("nm", "-D", path)
            undefined = [line for line in symbols.splitlines() if " U " in line]
            assert not re.search(r"\b(cuda|cu[A-Z])|torch|c10|at::", "\n".join(undefined)), undefined
            defined = "\n".join(line for line in symbols.splitlines() if re.search(r" [TDBR] ", line))
            assert not re.search(r" (cuda|__cuda|cu[A-Z])\w*$", defined, re.MULTILINE), "the CUDA runtime is exported"


def test_module_imports_without_a_gpu(library):
    if not any(library.parent.glob(ninja.module_name())):
        pytest.skip("the module was built for another Python")
    from htree_cuda import kernels

    assert kernels.built() and kernels.why_not_built() == ""
    assert kernels.load().params_hash == ninja.params_hash(ROOT), "stale build: python tools/build_inplace.py"


@pytest.fixture
def bare_kernels(monkeypatch, tmp_path):
    """htree_cuda.kernels of a package folder that is still empty."""
    from htree_cuda import kernels

    monkeypatch.setattr(kernels, "_PACKAGE", tmp_path)
    monkeypatch.setattr(kernels, "_LIBRARY", tmp_path / "libhtree_cuda.so")
    cached = (kernels.build_info, kernels._load, kernels.device_supported)
    for function in cached:
        function.cache_clear()
    yield kernels
    for function in cached:
        function.cache_clear()


def test_reasons_for_no_kernels(bare_kernels, tmp_path, monkeypatch):
    assert not bare_kernels.built() and "tools/build_inplace.py" in bare_kernels.why_not_built()
    bare_kernels._load.cache_clear()
    bare_kernels.build_info.cache_clear()
    (tmp_path / "_build_info.json").write_text(json.dumps({"kernels": False, "reason": "no C++ compiler"}))
    assert bare_kernels.why_not_built() == "built without kernels: no C++ compiler"
    bare_kernels._load.cache_clear()
    (tmp_path / "libhtree_cuda.so").write_bytes(b"")

    def fail(name):
        raise ImportError("params.h differs")

    monkeypatch.setattr(bare_kernels.importlib, "import_module", fail)
    with pytest.raises(
        RuntimeError, match=r"htree_cuda has no kernels: .* does not load: ImportError: params.h differs"
    ):
        bare_kernels.load()


def test_supported_devices(bare_kernels, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bare_kernels.device_supported(0) == (False, "torch finds no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        bare_kernels.device_supported.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, c=capability: c)
        supported, reason = bare_kernels.device_supported(0)
        assert supported is (capability == (9, 0))
        assert (
            supported or f"capability {capability[0]}.{capability[1]}, the kernels are built for exactly 9.0" in reason
        )


def test_driver_too_old(bare_kernels, monkeypatch):
    import types

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for driver, expected in ((0, False), (12090, False), (13000, True), (13020, True), (14000, True)):
        module = types.SimpleNamespace(runtime_version=lambda: 13010, driver_version=lambda d=driver: d)
        monkeypatch.setattr(bare_kernels, "_load", lambda m=module: (m, ""))
        bare_kernels.device_supported.cache_clear()
        supported, reason = bare_kernels.device_supported(0)
        assert supported is expected
        assert supported or f"built with CUDA 13.1, the NVIDIA driver runs CUDA {driver // 1000}." in reason


# ---- the checkers find what they are for -----------------------------------------------------------------------

GOOD_LOG = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_build_log_checker(tmp_path):
    assert check_build_log.check(GOOD_LOG) == []
    spill = GOOD_LOG.replace("0 bytes spill stores, 0", "8 bytes spill stores, 12")
    assert check_build_log.check(spill) == ["_Z1kv spills 8 bytes of stores, 12 bytes of loads"]
    for code, bad in (
        (7507, False),
        (7508, True),
        (7509, False),
        (7510, True),
        (7519, True),
        (7520, True),
        (7521, False),
    ):
        line = f"ptxas info    : (C{code}) Potential Performance Loss: something in function '_Z1kv'\n"
        assert bool(check_build_log.check(GOOD_LOG + line)) is bad
    assert check_build_log.check("") == ["the log names no kernel: was it written by nvcc -Xptxas -v?"]
    path = tmp_path / "nvcc.log"
    path.write_text(spill)
    assert check_build_log.main([str(path)]) == 1
    path.write_text(GOOD_LOG)
    assert check_build_log.main([str(path)]) == 0
    assert check_build_log.main([str(tmp_path / "none")]) == 1


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("csrc/bindings.cpp", "#include <torch/extension.h>", "torch stops at Python"),
        ("csrc/tree/pool/kernel.cuh", "#include <ATen/ATen.h>", "torch stops at Python"),
        ("csrc/host/math.h", '#include "c10/util/Half.h"', "torch stops at Python"),
        ("csrc/tree/pool/kernel.cuh", 'void f() { asm volatile("nop;"); }', "inline assembly belongs in"),
        ("csrc/tree/pool/config.cuh", '#include "../../sm90/other/kernel.cuh"', "includes another op's"),
        ("csrc/tree/pool/config.cuh", '#include "nowhere.cuh"', "is no file of csrc"),
        ("csrc/tree/pool/kernel.cuh", "#include <cutlass/arch/barrier.h>", "memory clobber"),
        ("csrc/tree/pool/kernel.cuh", "using B = cutlass::arch::ClusterBarrier;", "memory clobber"),
        ("csrc/tree/pool/second.cu", "// not in setup.py", "KERNEL_SOURCES lacks csrc/tree/pool/second.cu"),
    ],
)
def test_house_rules_checker(tmp_path, file, line, words):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copy(ROOT / "setup.py", tmp_path)
    other = tmp_path / "csrc" / "sm90" / "other" / "kernel.cuh"
    other.parent.mkdir(parents=True)
    other.write_text('#pragma once\n// asm volatile("nop;"); #include <torch/torch.h> in a comment is no violation\n')
    before = check_house_rules.check(tmp_path)
    with open(tmp_path / file, "a") as stream:
        stream.write(line + "\n")
    problems = [problem for problem in check_house_rules.check(tmp_path) if problem not in before]
    assert any(words in problem for problem in problems), problems


def test_house_rules_count_instantiations(tmp_path):
    folder = tmp_path / "csrc" / "sm90" / "op" / "instantiations"
    folder.mkdir(parents=True)
    names = [f"csrc/sm90/op/instantiations/i{i}.cu" for i in range(41)]
    for name in names:
        (tmp_path / name).write_text("__global__ void k() {}\n")
    (tmp_path / "setup.py").write_text(f"KERNEL_SOURCES = {names}\n")
    assert check_house_rules.check(tmp_path) == ["csrc: 41 kernel instantiation files, at most 40"]
    (tmp_path / names[-1]).unlink()
    assert check_house_rules.check(tmp_path) == [f"setup.py: KERNEL_SOURCES lists {names[-1]}, which does not exist"]


# ---- the GPU reports -------------------------------------------------------------------------------------------


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
        assert "tests/kernels/test_forward.py" in first


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


def test_timeline_adds_up_phases():
    rows = [("a", 4.0, 4.0), ("b", 5.0, 6.0), ("a", 1.0, 1.5)]
    assert gpu_timeline.by_phase(rows, str.upper) == {"A": (5.0, 5.5, 2), "B": (5.0, 6.0, 1)}


@pytest.mark.parametrize("part", list(gpu_variants.PARTS))
def test_parts_of_the_forward_can_be_left_out(part, tmp_path):
    """Each edit meets the sources as they are, once, and only kernels of the forward are compiled again."""
    sources = check_house_rules.listed_sources(ROOT / "setup.py")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    assert gpu_variants.differing(ninja, tmp_path, sources) == []
    gpu_variants.leave_out(tmp_path, part)
    again = gpu_variants.differing(ninja, tmp_path, sources)
    assert again and again == [source for source in sources if "sm90/htree_fwd" in source]
    for file, _, _ in gpu_variants.PARTS[part]:
        (tmp_path / file).write_text("")
    with pytest.raises(SystemExit, match="holds 0 times"):
        gpu_variants.leave_out(tmp_path, part)


def test_all_parts_can_be_left_out_together(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for part in gpu_variants.PARTS:
        gpu_variants.leave_out(tmp_path, part)


def test_patches_apply_in_their_order(tmp_path):
    """Those that wait to be timed fit csrc/ as it is, and each other."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    patches = sorted((ROOT / "benchmarks" / "variants").glob("*.patch"))
    for patch in patches:
        before = {path: path.read_bytes() for path in (tmp_path / "csrc").rglob("*") if path.is_file()}
        gpu_variants.apply_patch(tmp_path, patch)
        assert any(path.read_bytes() != text for path, text in before.items())


def test_a_patch_applies_below_a_repository(tmp_path):
    """As build/variants is below this one: git would skip what lies outside of the folder it stands in."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    root = tmp_path / "build" / "variant"
    (root / "csrc").mkdir(parents=True)
    file = root / "csrc" / "a.h"
    file.write_text("old\n")
    patch = tmp_path / "own.patch"
    patch.write_text("--- a/csrc/a.h\n+++ b/csrc/a.h\n@@ -1 +1 @@\n-old\n+new\n")
    gpu_variants.apply_patch(root, patch)
    assert file.read_text() == "new\n"
    with pytest.raises(SystemExit, match=r"csrc/a\.h"):
        gpu_variants.apply_patch(root, patch)


def test_variants_do_not_overwrite_what_they_are_made_of(monkeypatch):
    with pytest.raises(SystemExit, match="NAME must be"):
        gpu_variants.build_variant("../kernels", None, None, [], [])
    with pytest.raises(SystemExit, match="another NAME"):
        gpu_variants.build_variant("a", gpu_variants.VARIANTS / "a" / "csrc", None, [], [])
    monkeypatch.setattr(gpu_variants, "csrc_hash", lambda root: "other sources")
    with pytest.raises(SystemExit, match=r"run tools/build_inplace\.py first"):
        gpu_variants.build_variant("a", None, None, [], [])


def test_a_variant_is_timed_in_a_copy_of_the_package(tmp_path, monkeypatch, capsys):
    """With the library that was built for it; here the benchmark runs on the CPU, which needs none."""
    monkeypatch.setattr(gpu_variants, "VARIANTS", tmp_path)
    with pytest.raises(SystemExit, match="does not exist"):
        list(gpu_variants.time_variants(["a"], "forward", [], 1))
    for name in "ab":
        (tmp_path / f"{name}.so.gz").write_bytes(gzip.compress(b"no library"))
    options = ["--device", "cpu", "--dtype", "float32", "--lengths", "40", "--heads", "2", "--kv-heads", "1"]
    options += ["--dim", "4", "--top-k", "4", "--queries", "2"]
    timed = list(gpu_variants.time_variants(["a", "b"], "forward", options, 2))
    assert [(name, [f["T"] for f in figures]) for name, figures in timed] == [("a", [40]), ("b", [40])] * 2
    assert all(f["ms"] > 0 for _, figures in timed for f in figures)
    gpu_variants.print_table(timed, 1)
    head, *rows = capsys.readouterr().out.splitlines()
    assert "40 iid" in head and [row.split()[0] for row in rows] == ["a", "b"] * 2 and rows[0].count(" ms ") == 1
