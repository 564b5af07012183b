"""Wheels with kernels: one library, a module for each Python, the tag that the binaries allow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile

import htree_cuda_build as build
import htree_cuda_compile as compiling
import htree_cuda_store as store
import make_wheels
import pytest

from .common import ROOT, command


def compiled() -> str:
    """Why a wheel with kernels would take minutes here; empty where everything is compiled."""
    try:
        tools = build.resolve(build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"}))
        features = build.features()
    except (build.Missing, build.BuildError) as error:
        return str(error)
    compilation = compiling.Compilation(ROOT, tools, features, store.folder())
    jobs = compilation.kernels()
    missing = sum(not job.output.exists() for job in jobs)
    return f"{missing} kernel sources are not compiled: make check-kernels" if missing else ""


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")
def test_a_wheel_with_kernels_installs_in_seconds(tmp_path):
    """From objects that are there: made, tagged, installed into an empty folder, loaded."""
    if why := compiled():
        pytest.skip(why)
    pytest.importorskip("auditwheel")
    command(sys.executable, "tools/make_wheels.py", "--out", tmp_path, sys.executable, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.stem.split("-")[2:4] == [tag, tag] and "linux" in wheel.stem.split("-")[4]
    assert wheel.stat().st_size < 20e6
    with zipfile.ZipFile(wheel) as archive:
        assert "htree_cuda/libhtree_cuda.so" in archive.namelist()
        headers = command("readelf", "-S", "-W", archive.extract("htree_cuda/libhtree_cuda.so", tmp_path / "extracted"))
        assert ".debug" not in headers and ".nv_fatbin" in headers
    site, start = tmp_path / "site", time.perf_counter()
    command(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel)
    assert time.perf_counter() - start < 60
    script = (
        "from htree_cuda import kernels; import json; module = kernels.load(); "
        "print(json.dumps([module.__file__, module.params_hash, kernels.build_info()['families']]))"
    )
    said = command(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()[-1]
    place, params_hash, families = json.loads(said)
    assert place.startswith(str(site)) and params_hash == compiling.params_hash(ROOT)
    assert families == list(build.FAMILIES)


def test_a_wheel_is_repacked_for_another_python(tmp_path):
    files = {
        "htree_cuda/__init__.py": "",
        "htree_cuda/libhtree_cuda.so": "library",
        "htree_cuda/_C.cpython-311-x86_64-linux-gnu.so": "module of 3.11",
        "htree_cuda/_build_info.json": '{"python": "3.11", "arch": "sm_90a"}',
        "htree_cuda-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: htree_cuda\nVersion: 1.0\n",
        "htree_cuda-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
    }
    for name, text in files.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command(sys.executable, "-m", "wheel", "pack", "--dest-dir", tmp_path, tmp_path / "files")
    base = tmp_path / "htree_cuda-1.0-cp311-cp311-linux_x86_64.whl"
    module = tmp_path / "module"
    module.write_text("module of 3.12")
    other = make_wheels.Interpreter(12, ".cpython-312-x86_64-linux-gnu.so", "/include")
    wheel = make_wheels.repack(base, module, other, tmp_path)
    assert wheel.name == "htree_cuda-1.0-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "_C" in name]
        assert names == ["htree_cuda/_C.cpython-312-x86_64-linux-gnu.so"]
        assert archive.read(names[0]) == b"module of 3.12"
        assert archive.read("htree_cuda/libhtree_cuda.so") == b"library"
        info = json.loads(archive.read("htree_cuda/_build_info.json"))
        assert info == {"python": "3.12", "arch": "sm_90a"}
        assert b"Tag: cp312-cp312-linux_x86_64" in archive.read("htree_cuda-1.0.dist-info/WHEEL")


def test_which_pythons_get_a_wheel(tmp_path):
    here = make_wheels.ask(sys.executable)
    assert here is None or here.tag == f"cp3{sys.version_info.minor}"
    assert make_wheels.ask(str(tmp_path / "none")) is None
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\necho \'[[3, 9], "cpython", 0, ".so", "/usr/include"]\'\n')
    old.chmod(0o755)
    assert make_wheels.ask(str(old)) is None
    assert make_wheels.interpreters()[0] == sys.executable


def test_what_auditwheel_says_is_the_tag(tmp_path, monkeypatch):
    """In the words of auditwheel 6, which breaks lines where it likes."""
    said = 'x.whl is\nconsistent with the following\nplatform tag: "manylinux_2_34_x86_64".\n'
    answers = iter([(0, said), (0, said.replace("manylinux_2_34_x86_64", "linux_x86_64")), (1, "no wheel")])

    def run(*arguments, **options):
        status, output = next(answers)
        return subprocess.CompletedProcess(arguments, status, output, "")

    monkeypatch.setattr(make_wheels.subprocess, "run", run)
    assert make_wheels.manylinux(tmp_path / "x.whl") == "manylinux_2_34_x86_64"
    assert make_wheels.manylinux(tmp_path / "x.whl") is None
    with pytest.raises(SystemExit, match="no wheel"):
        make_wheels.manylinux(tmp_path / "x.whl")
