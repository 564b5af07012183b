"""Builds the emulated library and its Python module into build/emulator; objects are kept as the kernels' are."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
OUT = ROOT / "build" / "emulator"
LIBRARY = "libhtree_cuda_emulated.so"
FAULTS = "libfaults.so"
# The smallest kernels of every family, of one dtype: what `make test` translates where there is no GPU.
SAMPLE = [
    "attn_dist/instantiations/bf16_128", "csrc/tree/", "htree_bwd/instantiations/bf16_64", "htree_bwd/pack/",
    "htree_bwd/reverse_index/", "htree_bwd/sequences/", "htree_fwd/instantiations/score_64",
    "htree_fwd/instantiations/attend_bf16_64_64",
    "htree_decode/instantiations/bf16_64", "sparse_attention/launch", "sparse_attention/instantiations/bf16_576",
    "topk_indices/instantiations/", "indexer/instantiations/bf16_64",
    "sparse_attention_bwd/launch", "sparse_attention_bwd/instantiations/bf16_576",
]  # fmt: skip
# What tests marked `emulated` need besides.
MARKED = [
    *SAMPLE, "attn_dist/instantiations/bf16_576", "htree_decode/instantiations/fp16_64",
    "htree_fwd/instantiations/attend_fp16_64_64",
    "sparse_attention/instantiations/fp16_512", "indexer/instantiations/bf16_128", "indexer_listed/instantiations/bf16",
    "sparse_attention_bwd/instantiations/fp16_512",
]  # fmt: skip
# What the small problems of the programs of benchmarks/cpp need besides: their fp16.
BENCHMARKS = [
    *SAMPLE, "htree_decode/instantiations/fp16_64", "htree_fwd/instantiations/attend_fp16_64_64",
    "sparse_attention/instantiations/fp16_512",
]  # fmt: skip
LAUNCHERS = "tests/kernels/steps.cu"  # entry points for tests of what has no binding
# Contraction would change the rounding of what PTX spells out.
CXX_FLAGS = ["-std=c++20", "-mavx2", "-mf16c", "-mfma", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w"]
TRANSLATED = [*CXX_FLAGS, "-O0"]  # long code that runs once or twice: -O1 compiles for longer than it saves
RUNTIME = ("scheduler", "memory", "warp", "barriers", "products", "races", "cudart")
PTX = "compute_90a"  # -code of nvcc: PTX in the object, no machine code, which takes ptxas half of the time

sys.path.insert(0, str(ROOT / "build_backend"))
try:
    import htree_cuda_build as build_plan
    import htree_cuda_compile as compiling
    import htree_cuda_store as store
finally:
    sys.path.pop(0)


@functools.cache
def _toolchain() -> build_plan.Toolchain:
    return build_plan.resolve(build_plan.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"}))


@functools.cache
def why_not() -> str:
    """Why the emulator cannot be built here; empty where it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the emulator runs on Linux on x86-64"
    with open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    if not {"avx2", "f16c", "fma"} <= set(flags):
        return "the emulator needs AVX2, F16C and FMA"
    try:
        _toolchain()
        compiling.pybind11_include()
    except (build_plan.Missing, build_plan.BuildError) as error:
        return f"the emulator is made from what nvcc makes of the kernels: {error}"
    return ""


def sources(only: Iterable[str]) -> list[str]:
    """The kernel sources whose path holds one of the texts; all of them where there is no text."""
    only = tuple(only)
    return [x for x in compiling.kernel_sources(ROOT) if not only or any(text in x for text in only)]


class _Emulation:
    """The jobs of an emulated library."""

    def __init__(self) -> None:
        tools = _toolchain()
        objects_dir = store.usable(store.folder(), OUT / "objects")
        self.compilation = compiling.Compilation(ROOT, tools, build_plan.Features(), objects_dir)

    def runtime(self) -> list[store.Job]:
        """The emulator itself. nvcc compiles it, since nvcc knows where the headers of CUDA are."""
        tools = self.compilation.tools
        command = [tools.nvcc, "-std=c++20", "-Xcompiler", ",".join(CXX_FLAGS[1:]), "-O2", "-c"]
        paths = ["-ccbin", tools.cxx, "-I", str(HERE)]
        versions = [tools.nvcc_version, tools.cxx_version]
        sources = [f"tools/ptx_emulator/{name}.cpp" for name in RUNTIME]
        return [self.compilation.compile(x, x, ".o", command, paths, *versions) for x in sources]

    def host(self, source: str) -> store.Job:
        """The host code of a .cu file: its launchers."""
        return self.compilation.kernel(source, code=PTX)

    def translated(self, source: str) -> store.Job:
        """The host code of a .cu file and its kernels, from PTX by way of C++; both texts lie beside the object."""
        tools = self.compilation.tools
        nvcc = self.compilation.kernel(source, code=PTX)
        files = [HERE / name for name in ("translate.py", "instructions.py", "emulate.py", "runtime.h")]
        digest = store.key([nvcc.digest, tools.cxx_version, *TRANSLATED, *(path.read_text() for path in files)])
        output = store.place(self.compilation.store, f"emulated-{nvcc.output.name}", digest)
        python = os.path.realpath(sys.executable)
        cxx = [tools.cxx, *TRANSLATED, "-I", str(HERE)]
        command = (python, str(HERE / "emulate.py"), store.OUT, str(len(cxx)), *cxx, *nvcc.command)
        return store.Job(f"{source}, emulated", output, command)

    def library(self, name: str, objects: Sequence[store.Job]) -> store.Job:
        """Links. A kernel that was not translated becomes a function that says so."""
        python = os.path.realpath(sys.executable)
        link = str(HERE / "link.py")
        digest = store.key([name, Path(link).read_text(), *(job.digest for job in objects)])
        inputs = [str(job.output) for job in objects]
        command = (python, link, store.OUT, self.compilation.tools.cxx, name, *inputs)
        output = store.place(self.compilation.store, name, digest)
        return store.Job(f"link {name}", output, command, tuple(job.output for job in objects))


def _make(emulation: _Emulation, jobs: list[store.Job], *products: tuple[store.Job, Path]) -> None:
    """Runs what is missing and puts the products where tests look for them."""
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "lock", "w") as lock:  # test processes side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        emulation.compilation.run(jobs, OUT, quiet=True)
        for job, target in products:
            compiling.place(job.output, target)


@functools.cache
def _build(only: tuple[str, ...], program: str | None = None) -> Path:
    emulation = _Emulation()
    chosen = set(sources(only))
    objects = [*emulation.runtime(), emulation.host(LAUNCHERS)]
    for source in compiling.kernel_sources(ROOT):
        if source in chosen:
            objects.append(emulation.translated(source))
        elif "/instantiations/" not in source:
            objects.append(emulation.host(source))
    library = emulation.library(LIBRARY, objects)
    python = compiling.Python.here()
    binding, module = emulation.compilation.module(python, library)
    jobs = [*objects, library, binding, module]
    folder = OUT / library.digest[:16]  # one for each selection of kernels: test processes differ in theirs
    products = [(library, folder / LIBRARY), (module, folder / python.module)]
    if program is not None:  # its own kernels, and the emulated library
        compiled = emulation.translated(f"benchmarks/cpp/{program}.cu")
        command = [emulation.compilation.tools.cxx, "-Wl,-rpath,$ORIGIN/..", "-pthread"]
        linked = emulation.compilation.link(program, command, [compiled], library)
        jobs += [compiled, linked]
        products.append((linked, folder / "bin" / program))
    _make(emulation, jobs, *products)
    return products[-1][1]


_module: Path | None = None


def build(only: Sequence[str] = ()) -> Path:
    """Builds the library and its Python module, which `emulated` uses from then on; returns the module. `only` selects
    the kernels that are translated (none: all)."""
    global _module
    _module = _build(tuple(only))
    return _module


def built() -> Path:
    """The module that `build` built last."""
    if _module is None:
        raise RuntimeError("build() comes before emulated()")
    return _module


def build_benchmark(name: str) -> Path:
    """Builds a program of benchmarks/cpp over the emulated library, with the kernels of its small problems."""
    return _build(tuple(BENCHMARKS), name)


@functools.cache
def build_faults() -> Path:
    """Builds the library of small right and wrong kernels (tests/faults.cu)."""
    emulation = _Emulation()
    objects = [*emulation.runtime(), emulation.translated("tools/ptx_emulator/tests/faults.cu")]
    library = emulation.library(FAULTS, objects)
    _make(emulation, [*objects, library], (library, OUT / FAULTS))
    return OUT / FAULTS


def ptx(source: str) -> Path:
    """The PTX of a kernel source that `build` has translated."""
    return Path(f"{_Emulation().translated(source).output}.ptx")


def real_log(source: str) -> Path:
    """Where the compilers' words on the real object lie, if a build has made it."""
    return _Emulation().compilation.kernel(source).log
