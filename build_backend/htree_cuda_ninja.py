"""Writes and runs the ninja file: kernel library, Python module, benchmark binaries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import htree_cuda_build as build

LIBRARY = "libhtree_cuda.so"
BUILD_INFO = "_build_info.json"
RUN_LOGGED = str(Path(__file__).with_name("run_logged.py"))


@dataclasses.dataclass
class Options:
    """One build: what to make and where."""

    root: Path  # the source tree
    build_dir: Path  # objects, logs, the library and the module
    kernel_sources: list[str]
    benchmark_sources: list[str] = dataclasses.field(default_factory=list)
    module: bool = True
    debug: bool = False


def module_name() -> str:
    return "_C" + sysconfig.get_config_var("EXT_SUFFIX")


def params_hash(root: Path) -> str:
    return hashlib.sha256((root / "csrc" / "params.h").read_bytes()).hexdigest()[:16]


def nvcc_flags(options: Options, tools: build.Toolchain) -> list[str]:
    """Flags of every .cu file. No --use_fast_math: the kernels ask for the intrinsics they mean."""
    flags = [
        "-gencode",
        f"arch=compute_{build.ARCH[3:]},code={build.ARCH}",
        "-std=c++17",
        "-ccbin",
        tools.cxx,
    ]
    flags += ["-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "--expt-relaxed-constexpr"]
    flags += ["-lineinfo", "-O3"]
    flags += ["-DHTREE_CUDA_DEBUG=1"] if options.debug else ["-DNDEBUG"]
    flags += ["-I", str(options.root / "csrc"), "-isystem", tools.cutlass_include]
    flags += [f'-DHTREE_CUDA_PARAMS_HASH="{params_hash(options.root)}"']
    return flags


def link_command(tools: build.Toolchain) -> list[str]:
    """What links objects to the library.

    Static CUDA runtime, none of its symbols exported: torch brings its own copy into the same process.
    """
    command = [tools.nvcc, "-shared", "-cudart", "static", "-ccbin", tools.cxx]
    command += [f"-L{folder}" for folder in tools.cuda_lib_dirs]
    return [*command, "-Xlinker", f"-soname={LIBRARY}", "-Xlinker", "--exclude-libs=ALL", "-Xlinker", "--no-undefined"]


def cxx_flags(root: Path) -> list[str]:
    """Flags of bindings.cpp."""
    try:
        import pybind11
    except ImportError as error:
        raise build.Missing("no pybind11: pip install pybind11") from error
    includes = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += [argument for include in includes for argument in ("-isystem", include)]
    return [*flags, "-I", str(root / "csrc"), f'-DHTREE_CUDA_PARAMS_HASH="{params_hash(root)}"']


def headers_of(root: Path, source: str) -> list[Path]:
    """The headers of csrc that a kernel source may include: all but those in the folders of other ops.

    Named besides the depfiles: nvcc was seen to leave an empty one, and with it an object that no header made stale.
    """
    csrc = root / "csrc"
    ops = [folder for place in ("sm90", "tree") for folder in (csrc / place).iterdir()]
    others = [folder for folder in ops if folder.is_dir() and folder not in (root / source).parents]
    headers = [path for suffix in ("h", "cuh") for path in csrc.rglob(f"*.{suffix}")]
    return sorted(path for path in headers if not any(folder in path.parents for folder in others))


def escape_path(path: str | Path) -> str:
    """A path on a ninja build line."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def command(arguments: list[str]) -> str:
    """A ninja command. Ninja hands it to sh, so every argument is quoted; $in and $out stay ninja's."""
    own = {"$in", "$out", "$out.d", "$out.log"}  # ninja quotes $in and $out itself
    return " ".join(a if a in own else shlex.quote(a).replace("$", "$$") for a in arguments)


def write_ninja(options: Options, tools: build.Toolchain) -> Path:
    """Writes build.ninja. Its targets: library, module, benchmarks."""
    root, out = options.root, options.build_dir
    # The real path: `python` and `python3` of one environment must not look like two different commands.
    logged = [os.path.realpath(sys.executable), RUN_LOGGED, "$out.log"]
    lines = ["ninja_required_version = 1.8", f"builddir = {escape_path(out)}", ""]

    def rule(name: str, arguments: list[str], description: str, depfile: bool = False) -> None:
        lines.extend([f"rule {name}", f"  command = {command(arguments)}", f"  description = {description} $out"])
        if depfile:
            lines.extend(["  depfile = $out.d", "  deps = gcc"])
        lines.append("")

    def edge(
        name: str, target: Path, inputs: list[Path], after: Path | None = None, headers: Sequence[Path] = ()
    ) -> None:
        """`after` is built before, but a newer one does not make the target stale: both load it at run time."""
        line = f"build {escape_path(target)}: {name} {' '.join(map(escape_path, inputs))}"
        line += f" | {' '.join(map(escape_path, headers))}" if headers else ""
        lines.extend([line + (f" || {escape_path(after)}" if after else ""), ""])

    libs = [f"-L{folder}" for folder in tools.cuda_lib_dirs]
    flags = nvcc_flags(options, tools)
    rule(
        "nvcc",
        [*logged, tools.nvcc, *flags, "-MD", "-MF", "$out.d", "-c", "$in", "-o", "$out"],
        "nvcc",
        depfile=True,
    )
    rule("link", [*logged, *link_command(tools), "-o", "$out", "$in"], "link")

    library = out / LIBRARY
    objects = []
    for source in options.kernel_sources:
        target = (out / "obj" / source).with_suffix(".o")
        objects.append(target)
        edge("nvcc", target, [root / source], headers=headers_of(root, source))
    edge("link", library, objects)
    lines.extend([f"build library: phony {escape_path(library)}", ""])

    if options.module:
        cxx = [*logged, tools.cxx, *cxx_flags(root), "-MD", "-MF", "$out.d", "-o", "$out", "$in"]
        cxx += [f"-L{out}", "-lhtree_cuda", "-Wl,-rpath,$ORIGIN", "-Wl,--no-undefined-version"]
        rule("module", cxx, "module", depfile=True)
        edge("module", out / module_name(), [root / "csrc" / "bindings.cpp"], after=library)
        lines.extend([f"build module: phony {escape_path(out / module_name())}", ""])

    if options.benchmark_sources:
        binaries = []
        rpath = f"$ORIGIN/{os.path.relpath(root / 'htree_cuda', out / 'bin')}"
        bench = [*logged, tools.nvcc, *flags, "-I", str(root / "benchmarks" / "cpp"), "-MD", "-MF", "$out.d"]
        bench += ["-cudart", "static", *libs, "-o", "$out", "$in", f"-L{out}", "-lhtree_cuda", "-ldl"]
        rule("benchmark", [*bench, "-Xlinker", f"-rpath={rpath}"], "nvcc", depfile=True)
        for source in options.benchmark_sources:
            binaries.append(out / "bin" / Path(source).stem)
            edge("benchmark", binaries[-1], [root / source], after=library)
        lines.extend([f"build benchmarks: phony {' '.join(map(escape_path, binaries))}", ""])

    out.mkdir(parents=True, exist_ok=True)
    path = out / "build.ninja"
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def run_ninja(options: Options, tools: build.Toolchain, targets: list[str]) -> None:
    """Builds and writes nvcc.log, the compilers' words on every object of this build."""
    path = write_ninja(options, tools)
    done = subprocess.run([tools.ninja, "-f", str(path), "-j", str(build.max_jobs()), *targets], cwd=options.root)
    logs = sorted((options.build_dir / "obj").rglob("*.o.log"))
    current = {
        str((options.build_dir / "obj" / source).with_suffix(".o")) + ".log" for source in options.kernel_sources
    }
    with open(options.build_dir / "nvcc.log", "w") as file:
        for log in logs:
            if str(log) in current:
                file.write(f"==== {log.relative_to(options.build_dir / 'obj').with_suffix('')}\n{log.read_text()}")
    if done.returncode:
        raise build.BuildError(f"compiling the kernels failed: see above, or {options.build_dir / 'nvcc.log'}")


def build_module_only(root: Path, library: Path, target_dir: Path, cxx: str) -> Path:
    """bindings.cpp alone, against a library that exists: seconds, no CUDA toolkit, any Python."""
    if not library.is_file():
        raise build.BuildError(f"{library} does not exist: build the kernels first, or leave out --module-only")
    target = target_dir / module_name()
    arguments = [cxx, *cxx_flags(root), "-o", str(target), str(root / "csrc" / "bindings.cpp")]
    done = subprocess.run([*arguments, f"-L{library.parent}", "-lhtree_cuda", "-Wl,-rpath,$ORIGIN"])
    if done.returncode:
        raise build.BuildError("compiling csrc/bindings.cpp failed: see above")
    return target


def build_info(root: Path, plan: build.Plan, tools: build.Toolchain | None, debug: bool = False) -> dict:
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
            "debug": debug,
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
