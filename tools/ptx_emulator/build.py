"""Builds the emulated library and its Python module into build/emulator, incrementally.

python -m tools.ptx_emulator.build [--only TEXT ...]    translate only the .cu files whose path holds one of the texts
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "emulator"
LIBRARY = "libhtree_cuda_emulated.so"
FAULTS = "libfaults.so"
BENCHMARKS = ["benchmarks/cpp/forward.cu", "benchmarks/cpp/sparse_attention.cu"]
USUAL = [  # in every test run
    "attn_dist/instantiations/bf16_576", "attn_dist/instantiations/bf16_128",
    "htree_bwd/instantiations/bf16_64", "htree_bwd/pack",
    "htree_fwd/instantiations/score_64", "htree_fwd/instantiations/attend_bf16_64_64",
    "htree_fwd/instantiations/attend_bf16_64_128", "htree_fwd/instantiations/attend_fp16_64_64", "csrc/tree",
    "sparse_attention/instantiations/bf16_576", "sparse_attention/instantiations/fp16_512",
]  # fmt: skip
# Contraction would change the rounding of what PTX spells out; the translated code is long, so -O1.
CXX_FLAGS = ["-std=c++20", "-mavx2", "-mf16c", "-mfma", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w"]


@functools.cache
def setup():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from build_inplace import load_setup
    finally:
        sys.path.pop(0)
    return load_setup()


@functools.cache
def why_not() -> str:
    """Why the emulator cannot be built here; empty where it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the emulator runs on Linux on x86-64"
    with open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    if not {"avx2", "f16c", "fma"} <= set(flags):
        return "the emulator needs AVX2, F16C and FMA"
    tree = setup()
    try:
        tree.build.resolve(tree.build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"}))
        tree.ninja.cxx_flags(ROOT)
    except (tree.build.Missing, tree.build.BuildError) as error:
        return f"the emulator is made from what nvcc makes of the kernels: {error}"
    return ""


def _write_ninja(only: tuple[str, ...], tools, kernels_dir: Path) -> None:
    tree = setup()
    ninja = tree.ninja
    flags = [x for x in ninja.nvcc_flags(ninja.Options(ROOT, OUT, []), tools) if x != "-lineinfo"]
    flags[flags.index("-gencode") + 1] = "arch=compute_90a,code=compute_90a"
    python = os.path.realpath(sys.executable)
    lines = ["ninja_required_version = 1.8", f"builddir = {ninja.escape_path(OUT)}", ""]

    def rule(name: str, arguments: list[str], depfile: bool = False) -> None:
        lines.extend([f"rule {name}", f"  command = {ninja.command(arguments)}", f"  description = {name} $out"])
        lines.extend(["  depfile = $out.d", "  deps = gcc"] if depfile else [])
        lines.append("")

    def edge(name: str, target: Path, inputs: list[Path], implicit: Sequence[Path] = ()) -> None:
        after = f" | {' '.join(map(ninja.escape_path, implicit))}" if implicit else ""
        inputs = " ".join(map(ninja.escape_path, inputs))
        lines.extend([f"build {ninja.escape_path(target)}: {name} {inputs}{after}", ""])

    rule("ptx", [tools.nvcc, *flags, "-MD", "-MF", "$out.d", "--ptx", "$in", "-o", "$out"], depfile=True)
    rule("translate", [python, str(HERE / "translate.py"), "$in", "$out"])
    rule("kernel", [tools.cxx, *CXX_FLAGS, "-O1", "-I", str(HERE), "-c", "$in", "-o", "$out"])
    host = ["-std=c++20", "-ccbin", tools.cxx, "-Xcompiler", ",".join(CXX_FLAGS[1:])]
    runtime = [tools.nvcc, *host, "-O2", "-I", str(HERE), "-MD", "-MF", "$out.d", "-c", "$in", "-o", "$out"]
    rule("runtime", runtime, depfile=True)  # nvcc knows where the CUDA headers are
    rule("library", [tools.cxx, "-shared", f"-Wl,-soname={LIBRARY}", "-Wl,--no-undefined", "-o", "$out", "$in"])
    module = [*ninja.cxx_flags(ROOT), "-MD", "-MF", "$out.d", "-o", "$out", "$in", f"-L{OUT}", "-lhtree_cuda_emulated"]
    rule("module", [tools.cxx, *module, "-Wl,-rpath,$ORIGIN"], depfile=True)

    runtime_objects = []
    for name in ("scheduler", "memory", "warp", "barriers", "products", "races", "cudart"):
        runtime_objects.append(OUT / f"{name}.o")
        edge("runtime", runtime_objects[-1], [HERE / f"{name}.cpp"])

    def kernel(source: Path, stem: Path, headers: Sequence[Path] = ()) -> Path:
        edge("ptx", stem.with_suffix(".ptx"), [source], headers)
        translator = [HERE / "translate.py", HERE / "instructions.py"]
        edge("translate", stem.with_suffix(".cpp"), [stem.with_suffix(".ptx")], translator)
        edge("kernel", stem.with_suffix(".o"), [stem.with_suffix(".cpp")], [HERE / "runtime.h"])
        return stem.with_suffix(".o")

    # The kernels of test_emulator.py.
    rule("host", [tools.nvcc, *flags, "-c", "$in", "-o", "$out"])
    faults = HERE / "tests" / "faults.cu"
    edge("host", OUT / "faults_host.o", [faults])
    edge("library", OUT / FAULTS, [*runtime_objects, OUT / "faults_host.o", kernel(faults, OUT / "faults")])

    # A C++ benchmark: its own kernels, and the emulated library.
    benchmark = [tools.nvcc, *flags, "-I", str(ROOT / "benchmarks" / "cpp")]
    rule("benchmark_host", [*benchmark, "-MD", "-MF", "$out.d", "-c", "$in", "-o", "$out"], depfile=True)
    rule("benchmark_ptx", [*benchmark, "-MD", "-MF", "$out.d", "--ptx", "$in", "-o", "$out"], depfile=True)
    program = [tools.cxx, "-o", "$out", "$in", f"-L{OUT}", "-lhtree_cuda_emulated", "-Wl,-rpath,$ORIGIN/..", "-ldl"]
    rule("program", [*program, "-pthread"])
    for source in BENCHMARKS:
        stem = (OUT / "kernel" / source).with_suffix("")
        edge("benchmark_host", stem.with_suffix(".host.o"), [ROOT / source])
        edge("benchmark_ptx", stem.with_suffix(".ptx"), [ROOT / source])
        translator = [HERE / "translate.py", HERE / "instructions.py"]
        edge("translate", stem.with_suffix(".cpp"), [stem.with_suffix(".ptx")], translator)
        edge("kernel", stem.with_suffix(".o"), [stem.with_suffix(".cpp")], [HERE / "runtime.h"])
        parts = [stem.with_suffix(".host.o"), stem.with_suffix(".o")]
        edge("program", OUT / "bin" / stem.name, parts, [OUT / LIBRARY])

    # Launchers without a binding, for tests.
    steps = OUT / "steps.o"
    edge("host", steps, [ROOT / "tests" / "kernels" / "steps.cu"], ninja.headers_of(ROOT, "csrc/tree/select/launch.cu"))

    objects = [*runtime_objects, steps]
    for source in tree.KERNEL_SOURCES:
        objects.append((kernels_dir / "obj" / source).with_suffix(".o"))  # its launchers; the code for the GPU rests
        if not only or any(text in source for text in only):
            objects.append(kernel(ROOT / source, OUT / "kernel" / source, ninja.headers_of(ROOT, source)))
    edge("library", OUT / LIBRARY, objects)
    edge("module", OUT / ninja.module_name(), [ROOT / "csrc" / "bindings.cpp"], [OUT / LIBRARY])
    path = OUT / "build.ninja"
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


@functools.cache
def _build(only: tuple[str, ...], target: str) -> Path:
    tree = setup()
    tools = tree.build.resolve(tree.build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"}))
    kernels_dir = tree.in_place_build_dir(False)
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "lock", "w") as lock:  # test processes side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target != FAULTS:
            tree.ninja.run_ninja(tree.ninja.Options(ROOT, kernels_dir, tree.KERNEL_SOURCES), tools, ["library"])
        _write_ninja(only, tools, kernels_dir)
        jobs = str(tree.build.max_jobs())
        command = [tools.ninja, "-f", str(OUT / "build.ninja"), "-j", jobs, str(OUT / target)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"building the emulator failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return OUT / target


def build(only: Sequence[str] = ()) -> Path:
    """Builds, and returns the Python module; `only` selects the kernels that are translated (none: all)."""
    return _build(tuple(only), setup().ninja.module_name())


def build_benchmark(name: str) -> Path:
    """Builds a program of benchmarks/cpp over the emulated library, with the usual kernels."""
    return _build(tuple(USUAL), f"bin/{name}")


def build_faults() -> Path:
    """Builds the library of small right and wrong kernels."""
    return _build(tuple(USUAL), FAULTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="texts; all kernels when none is given")
    print(build(parser.parse_args().only))
