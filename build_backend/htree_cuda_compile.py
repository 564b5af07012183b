"""Compiles and links: kernel library, Python module, benchmark programs. Objects come from htree_cuda_store."""

from __future__ import annotations

import dataclasses
import filecmp
import hashlib
import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import htree_cuda_build as build
import htree_cuda_store as store

LIBRARY = "libhtree_cuda.so"
BUILD_INFO = "_build_info.json"
# What nvcc compiles as one source, in the order of names, where it is more than the source: alone, each spends one to
# three seconds of a processor on headers. So many instantiations of a folder, two where nothing else is said; and of
# everything else what lies below the folders of a group. None takes much more than 20 s, since they set how long many
# processors build. Kernels whose shared memory a launch sizes stay apart: they would share a symbol and its alignment.
INSTANTIATIONS = {"csrc/sm90/attn_dist": 8, "csrc/sm90/htree_decode": 4, "csrc/sm90/indexer": 4}
LAUNCHERS = (
    ("csrc/host/", "csrc/sm90/"),
    ("csrc/tree/append/", "csrc/tree/pack/", "csrc/tree/replay/", "csrc/tree/select/"),
)


def pybind11_include() -> str:
    """The folder of pybind11's headers. Raises Missing."""
    try:
        import pybind11
    except ImportError as error:
        raise build.Missing("no pybind11: pip install pybind11") from error
    return pybind11.get_include()


def params_hash(root: Path) -> str:
    return hashlib.sha256((root / "csrc" / "params.h").read_bytes()).hexdigest()[:16]


def kernel_sources(root: Path, features: build.Features = build.EVERYTHING) -> list[str]:
    """Every .cu file of csrc/ that belongs to the families of this build, or to none."""
    sources = sorted(path.relative_to(root).as_posix() for path in (root / "csrc").rglob("*.cu"))
    present = [folder for family in features.families for folder in build.FAMILIES[family]]
    absent = {folder for folders in build.FAMILIES.values() for folder in folders} - set(present)
    return [source for source in sources if not source.startswith(tuple(f"{folder}/" for folder in absent))]


def units(sources: Iterable[str]) -> list[list[str]]:
    """The sources, those together that are compiled together."""
    found: list[list[str]] = []
    last: dict[str | tuple[str, ...], list[str]] = {}  # the last unit of each group
    for source in sources:
        family, instantiation, _ = source.partition("/instantiations/")
        if instantiation:
            group, most = family + instantiation, INSTANTIATIONS.get(family, 2)
        else:
            group, most = next((group for group in LAUNCHERS if source.startswith(group)), source), None
        if group not in last or len(last[group]) == most:
            last[group] = []
            found.append(last[group])
        last[group].append(source)
    return found


def benchmark_sources(root: Path) -> list[str]:
    """Programs without Python, each linked to the kernel library."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "benchmarks" / "cpp").glob("*.cu"))


def nvcc_flags(features: build.Features = build.EVERYTHING, code: str = build.ARCH) -> list[str]:
    """Flags of every .cu file, without paths. No --use_fast_math: the kernels ask for the intrinsics they mean.

    -O1 is of host code, which checks and launches; device code is optimised as ever.
    The library holds no debug sections, which are four fifths of it with -lineinfo; and what the driver unpacks when
    it first needs a kernel is compressed to a quarter.
    """
    flags = ["-gencode", f"arch=compute_{build.ARCH[3:]},code={code}", "-std=c++17", "-Xptxas", "-v", "-Xcompiler"]
    flags += ["-fPIC,-fvisibility=hidden,-Wall", "--expt-relaxed-constexpr", "-O1", "--compress-mode=size"]
    flags += ["-lineinfo"] if features.profile else []
    return [*flags, "-DHTREE_CUDA_DEBUG=1"] if features.debug else [*flags, "-DNDEBUG"]


def cxx_flags() -> list[str]:
    """Flags of bindings.cpp, without paths."""
    return ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def defines(root: Path, features: build.Features) -> dict[str, str]:
    """Macros that the build decides. A file gets those that it, or what it includes, names."""
    families = {f"HTREE_CUDA_FAMILY_{name.upper()}": str(int(name in features.families)) for name in build.FAMILIES}
    mixed = {"HTREE_CUDA_MIXED_DIMS": str(int(features.mixed_dims))}
    return families | mixed | {"HTREE_CUDA_PARAMS_HASH": f'"{params_hash(root)}"'}


@dataclasses.dataclass(frozen=True)
class Python:
    """What compiling for a Python interpreter needs to know of it."""

    version: str  # 3.11
    ext_suffix: str
    include: str

    @classmethod
    def here(cls) -> Python:
        """The interpreter that runs."""
        suffix, include = sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_paths()["include"]
        return cls(sysconfig.get_python_version(), suffix, include)

    @property
    def module(self) -> str:
        """File name of the Python module."""
        return f"_C{self.ext_suffix}"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The sources of one tree, the tools, and where objects are kept: makes the jobs of a build."""

    root: Path
    tools: build.Toolchain
    features: build.Features
    store: Path

    def compile(
        self, name: str, source: str, suffix: str, command: list[str], paths: list[str], *versions: str,
        together: Sequence[str] = (),
    ) -> store.Job:  # fmt: skip
        """Compiles a source, after those `together` with it. The key knows `command`'s flags and the versions, not
        where tools and headers lie."""
        folders = [self.root / "csrc", self.root / "benchmarks" / "cpp", Path(self.tools.cutlass_include)]
        files = {}
        for one in (source, *together):
            files |= store.reachable(self.root, one, folders)
        macros = [
            f"-D{macro}={value}"
            for macro, value in defines(self.root, self.features).items()
            if any(macro in text for text, _ in files.values())
        ]
        contents = [f"{file} {digest}" for file, (_, digest) in sorted(files.items())]
        digest = store.key([*versions, suffix, *command[1:], *macros, *contents, *together])
        output = store.place(self.store, Path(source).with_suffix(suffix).as_posix().replace("/", "-"), digest)
        more = [word for one in together for word in ("-include", one)]
        return store.Job(name, output, (*command, *macros, *paths, source, *more, "-o", store.OUT))

    def kernels(self) -> list[store.Job]:
        """Compiles every kernel of this build."""
        return [self.kernel(last, together=before) for *before, last in units(kernel_sources(self.root, self.features))]

    def kernel(
        self, source: str, code: str = build.ARCH, more: Iterable[str] = (), suffix: str = ".o",
        together: Sequence[str] = (),
    ) -> store.Job:  # fmt: skip
        """Compiles a .cu file, by default to an object of host and device code, after those `together` with it."""
        tools = self.tools
        command = [tools.nvcc, *nvcc_flags(self.features, code), *(more or ["-c"])]
        paths = ["-ccbin", tools.cxx, "-I", "csrc", "-I", "benchmarks/cpp", "-isystem", tools.cutlass_include]
        versions = tools.nvcc_version, tools.cxx_version
        return self.compile(source, source, suffix, command, paths, *versions, together=together)

    def binding(self, python: Python) -> store.Job:
        """Compiles bindings.cpp for one Python."""
        import pybind11

        versions = [self.tools.cxx_version, pybind11.__version__, python.version]
        paths = ["-isystem", pybind11_include(), "-isystem", python.include, "-I", "csrc"]
        name = f"csrc/bindings.cpp for Python {python.version}"
        command = [self.tools.cxx, *cxx_flags(), "-c"]
        return self.compile(name, "csrc/bindings.cpp", f"{python.ext_suffix}.o", command, paths, *versions)

    def link(self, name: str, command: list[str], objects: Iterable[store.Job], library: store.Job | None = None):
        """Links objects, against `library` where there is one."""
        objects = tuple(objects)
        against = [] if library is None else [f"-L{library.output.parent}", f"-l{library.output.stem[3:]}"]
        inputs = [*objects, *([] if library is None else [library])]
        versions = [self.tools.nvcc_version, self.tools.cxx_version]
        digest = store.key([name, *versions, *command[1:], *(job.digest for job in inputs)])
        paths = [f"-L{folder}" for folder in self.tools.cuda_lib_dirs] if command[0] == self.tools.nvcc else []
        command = (*command, *paths, "-o", store.OUT, *(str(job.output) for job in objects), *against, "-ldl")
        needs = tuple(job.output for job in inputs)
        return store.Job(f"link {name}", store.place(self.store, name, digest), command, needs)

    def library(self, objects: Iterable[store.Job]) -> store.Job:
        """The kernel library. Static CUDA runtime, none of its symbols exported: torch brings its own copy into the
        same process."""
        command = [self.tools.nvcc, "-shared", "-cudart", "static", "-ccbin", self.tools.cxx]
        command += ["-Xlinker", f"-soname={LIBRARY}", "-Xlinker", "--exclude-libs=ALL", "-Xlinker", "--no-undefined"]
        return self.link(LIBRARY, [*command, "-Xlinker", "--strip-all"], objects)

    def module(self, python: Python, library: store.Job) -> tuple[store.Job, store.Job]:
        """The Python module: its object and the link against the library, which it finds beside itself."""
        compiled = self.binding(python)
        command = [self.tools.cxx, "-shared", "-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined-version", "-Wl,--strip-all"]
        return compiled, self.link(python.module, command, [compiled], library)

    def benchmark(self, source: str, library: store.Job, library_folder: str) -> tuple[store.Job, store.Job]:
        """A benchmark program, which looks for the library in `library_folder`, a path from its own folder."""
        compiled = self.kernel(source)
        command = [self.tools.nvcc, "-cudart", "static", "-ccbin", self.tools.cxx]
        command += ["-Xlinker", f"-rpath=$ORIGIN/{library_folder}"]
        return compiled, self.link(Path(source).stem, command, [compiled], library)

    def run(self, jobs: Iterable[store.Job], build_dir: Path, quiet: bool = False) -> list[store.Job]:
        """Runs what is missing, and returns it."""
        try:
            return store.run(jobs, self.tools.ninja, build.max_jobs(), build_dir, self.root, quiet)
        except subprocess.CalledProcessError as error:
            raise build.BuildError(f"compiling the kernels failed: {error.stdout or 'see above'}") from error


def place(output: Path, target: Path) -> None:
    """Copies a build product, unless it is there already."""
    if target.exists() and filecmp.cmp(output, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # A fresh file: overwriting one that a running process has mapped would crash it.
    target.unlink(missing_ok=True)
    shutil.copy2(output, target)


def write_log(path: Path, jobs: Iterable[store.Job]) -> None:
    """nvcc.log: the compilers' words on every object of a build, whenever each was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for job in jobs:
            file.write(f"==== {job.name}\n{job.log.read_text()}")


def build_module_only(root: Path, library: Path, target_dir: Path, cxx: str) -> Path:
    """bindings.cpp alone, against a library that exists: seconds, no CUDA toolkit, any Python."""
    if not library.is_file():
        raise build.BuildError(f"{library} does not exist: build the kernels first, or leave out --module-only")
    python = Python.here()
    target = target_dir / python.module
    arguments = [cxx, *cxx_flags(), "-shared", "-isystem", pybind11_include(), "-isystem", python.include]
    arguments += ["-I", str(root / "csrc"), f'-DHTREE_CUDA_PARAMS_HASH="{params_hash(root)}"']
    arguments += ["-o", str(target), str(root / "csrc" / "bindings.cpp")]
    done = subprocess.run([*arguments, f"-L{library.parent}", "-lhtree_cuda", "-Wl,-rpath,$ORIGIN"])
    if done.returncode:
        raise build.BuildError("compiling csrc/bindings.cpp failed: see above")
    return target


def build_info(root: Path, plan: build.Plan, tools: build.Toolchain | None, features: build.Features) -> dict:
    """What `python -m htree_cuda info` says about the build. Holds no paths."""
    info = {
        "version": build.read_version(root),
        "kernels": plan.kernels,
        "mode": plan.mode,
        "reason": plan.reason,
    }
    if tools is not None:
        import pybind11

        info |= {
            "arch": build.ARCH,
            "families": list(features.families),
            "mixed_dims": features.mixed_dims,
            "debug": features.debug,
            "nvcc": tools.nvcc_version,
            "nvcc_source": tools.nvcc_source,
            "cxx": tools.cxx_version,
            "cutlass": tools.cutlass_version,
            "pybind11": pybind11.__version__,
            "python": sysconfig.get_python_version(),
            "csrc_hash": build.csrc_hash(root),
        }
    return info


def write_build_info(folder: Path, info: dict) -> Path:
    path = folder / BUILD_INFO
    path.write_text(json.dumps(info, indent=2) + "\n")
    return path
