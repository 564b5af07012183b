"""sdist -> wheel -> import, licences, and what an installed package runs."""

from __future__ import annotations

import email
import json
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import htree_cuda_build as build
import pytest

from htree_cuda import __main__

from .common import ROOT, command

NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".ci")


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


def test_command_line_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        __main__.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("info", "demo", "bench"))
    about = command(sys.executable, "-m", "htree_cuda", "--version", cwd=ROOT)
    assert about.split() == ["htree_cuda", build.read_version(ROOT)]
