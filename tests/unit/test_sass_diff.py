"""tools/sass_diff.py on two small objects, compiled here."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "setup.py").exists())


def load():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("sass_diff", ROOT / "tools" / "sass_diff.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sass_diff"] = module
    spec.loader.exec_module(module)
    return module


sass_diff = load()

OLD = """
namespace before {
template <int N> __global__ void __launch_bounds__(128) shift(float* x, int n) {
  __shared__ float tile[N];
  tile[threadIdx.x % N] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[(threadIdx.x * 7 + n) % N];
}
template __global__ void shift<32>(float*, int);
template __global__ void shift<64>(float*, int);
__global__ void add(float* x, float y) {
  for (int i = threadIdx.x; i < 1000; i += 32) x[i] = x[i] * 2.0f + y;
}
__global__ void gone(int* x) { atomicAdd(x, 3); }
}  // namespace before
"""
# Other names, another place in the file; `add` multiplies by another number, `gone` goes and `come` comes.
NEW = "\n// A comment.\n\n" + OLD.replace("before", "after").replace("shift", "rotate").replace("tile", "smem").replace(
    "2.0f", "3.0f"
).replace("__global__ void gone(int* x) { atomicAdd(x, 3); }", "__global__ void come(double* x) { x[0] = sin(x[1]); }")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The two objects."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not here to compile two small kernels")
    folder = tmp_path_factory.mktemp("sass_diff")
    for name, text in (("old", OLD), ("new", NEW)):
        (folder / f"{name}.cu").write_text(text)
        arguments = ["-gencode", "arch=compute_90a,code=sm_90a", "-O3", "-lineinfo", "-c"]
        subprocess.run([nvcc, *arguments, f"{name}.cu", "-o", f"{name}.o"], cwd=folder, check=True)
    return folder


def states(pairs):
    return {(pair.old and pair.old.name, pair.new and pair.new.name): pair.state for pair in pairs}


def test_kernels_are_found_again_by_content(objects):
    pairs = sass_diff.match(sass_diff.read_build(objects / "old.o"), sass_diff.read_build(objects / "new.o"))
    assert states(pairs) == {
        ("_ZN6before5shiftILi32EEEvPfi", "_ZN5after6rotateILi32EEEvPfi"): "identical",
        ("_ZN6before5shiftILi64EEEvPfi", "_ZN5after6rotateILi64EEEvPfi"): "identical",
        ("_ZN6before3addEPff", "_ZN5after3addEPff"): "changed",
        ("_ZN6before4goneEPi", None): "only in old",
        (None, "_ZN5after4comeEPd"): "only in new",
    }
    kernel = sass_diff.read_build(objects / "old.o")["_ZN6before5shiftILi64EEEvPfi"]
    assert (kernel.shared - 1024, kernel.parameters - 0x210, kernel.spills) == (256, 12, 0)
    assert kernel.instructions > 10 and kernel.registers > 0


def test_report_and_exit_status(objects, capsys, tmp_path):
    old, new = str(objects / "old.o"), str(objects / "new.o")
    assert sass_diff.main([old, old]) == 0
    assert "4 identical, 0 changed, 0 only in old, 0 only in new; 0 of" in capsys.readouterr().out
    assert sass_diff.main([old, new, "--markdown"]) == 1
    out = capsys.readouterr().out
    assert "2 identical, 1 changed, 1 only in old, 1 only in new; 2 of" in out
    assert "| `before::add -> after::add` | changed |" in out and "rotate" not in out
    (tmp_path / "text.o").write_text("no object")
    assert sass_diff.main([old, str(tmp_path / "text.o")]) == 2
    assert sass_diff.main([old, str(tmp_path / "missing.so")]) == 2
    assert "text.o: no ELF file" in capsys.readouterr().err


def test_compressed_code_is_the_same_code(objects):
    if shutil.which("zstd") is None and shutil.which("cuobjdump") is None:
        pytest.skip("neither zstd nor cuobjdump is here to read compressed device code")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    arguments = ["-gencode", "arch=compute_90a,code=sm_90a", "-O3", "--compress-mode=size", "-c"]
    subprocess.run([nvcc, *arguments, "old.cu", "-o", "small.o"], cwd=objects, check=True)
    plain, small = (sass_diff.read_build(objects / name) for name in ("old.o", "small.o"))
    assert {name: kernel.content for name, kernel in plain.items()} == {k: x.content for k, x in small.items()}


def test_a_mapping_pairs_what_structure_does_not(objects):
    old, new = sass_diff.read_build(objects / "old.o"), sass_diff.read_build(objects / "new.o")
    pairs = states(sass_diff.match(old, new, [("before::gone", "after::come")]))
    assert pairs["_ZN6before4goneEPi", "_ZN5after4comeEPd"] == "changed"
