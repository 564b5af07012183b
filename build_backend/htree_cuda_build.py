"""What to build, with what: the decisions of the build, without building anything.

Used by the PEP 517 backend (before any build requirement is installed), by setup.py and by the tools.
Standard library only.

Environment:
    HTREE_CUDA_KERNELS      auto (default): kernels where nvcc or an NVIDIA driver is present; on; off
    HTREE_CUDA_NVCC         path of nvcc, or `wheels`: NVIDIA's compiler wheels even where a toolkit exists
    HTREE_CUDA_CUTLASS_DIR  a CUTLASS checkout (or its include folder) instead of the headers of nvidia-cutlass
    HTREE_CUDA_FAMILIES     the kernels to build, of htree, decode, dsa (default: all); calls of others say so
    HTREE_CUDA_MIXED_DIMS   1: kernels for K != V too
    HTREE_CUDA_PROFILE      1: line numbers in the kernels, for ncu and compute-sanitizer; four times the size
    HTREE_CUDA_BUILD_DIR    where compiled objects and CUTLASS headers are kept from build to build
                            (build_backend/htree_cuda_store.py, htree_cuda_cutlass.py)
    CXX                     C++ compiler (default g++)
    MAX_JOBS                compilers at a time
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import htree_cuda_cutlass as cutlass

ARCH = "sm_90a"
KERNEL_REQUIREMENTS = ("ninja>=1.11", "pybind11>=2.13")
# NVIDIA's compiler as wheels. All five are pinned: they share one folder and must be of one release.
COMPILER_REQUIREMENTS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
# Family -> its folders of csrc. What lies in none of them belongs to every build.
FAMILIES = {
    "htree": ("csrc/tree", "csrc/sm90/htree_fwd", "csrc/sm90/htree_bwd"),
    "decode": ("csrc/tree", "csrc/sm90/htree_decode"),
    "dsa": (
        "csrc/sm90/attn_dist",
        "csrc/sm90/sparse_attention",
        "csrc/sm90/sparse_attention_bwd",
        "csrc/sm90/indexer",
        "csrc/sm90/indexer_listed",
        "csrc/sm90/topk_indices",
    ),
}
MIN_NVCC = (12, 8)  # cudaGetDriverEntryPointByVersion is 12.5; 12.8 is the oldest that CUTLASS 4.2 recommends
MIN_CUTLASS = (4, 2, 0)


class BuildError(RuntimeError):
    """The request itself is wrong, or something that was asked for is missing. Always ends the build."""


class Missing(RuntimeError):
    """Something the kernels need is missing: ends the build with `on`, drops the kernels with `auto`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Whether kernels are wanted, and where nvcc comes from."""

    kernels: bool
    mode: str  # auto, on, off
    reason: str  # one sentence, for the build log and `python -m htree_cuda info`
    nvcc: str | None = None  # path of nvcc; None: the compiler wheels
    cxx: str | None = None


@dataclasses.dataclass(frozen=True)
class Features:
    """Which kernels, and how."""

    families: tuple[str, ...] = tuple(FAMILIES)
    mixed_dims: bool = False
    profile: bool = False
    debug: bool = False  # bounded waits and device assertions


EVERYTHING = Features()


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """Everything the compilers need, found and checked."""

    nvcc: str
    nvcc_version: str
    nvcc_source: str  # toolkit or wheels
    cuda_lib_dirs: tuple[str, ...]
    cxx: str
    cxx_version: str
    cutlass_include: str
    cutlass_version: str
    ninja: str


class Probe:
    """What the machine has. Tests replace it."""

    def platform(self) -> tuple[str, str]:
        return sys.platform, platform.machine()

    def nvcc(self, environ: Mapping[str, str]) -> str | None:
        candidates = [shutil.which("nvcc", path=environ.get("PATH"))]
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if environ.get(variable):
                candidates.append(os.path.join(environ[variable], "bin", "nvcc"))
        candidates.append("/usr/local/cuda/bin/nvcc")
        return next((path for path in candidates if path and os.access(path, os.X_OK)), None)

    def driver(self) -> str | None:
        """A sign of an NVIDIA driver, or None."""
        signs = (
            "/proc/driver/nvidia/version",
            "/dev/nvidiactl",
            "/dev/nvidia0",
            "/usr/lib/wsl/lib/libcuda.so.1",
        )
        return next((sign for sign in signs if os.path.exists(sign)), None)

    def cxx(self, environ: Mapping[str, str]) -> str | None:
        return shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH"))


def plan(environ: Mapping[str, str] | None = None, probe: Probe | None = None) -> Plan:
    """Decides from the environment and the machine. Raises BuildError where the request cannot be met."""
    environ = os.environ if environ is None else environ
    probe = probe or Probe()
    mode = (environ.get("HTREE_CUDA_KERNELS") or "auto").strip().lower()
    if mode not in ("auto", "on", "off"):
        raise BuildError(f"HTREE_CUDA_KERNELS must be auto, on or off, got {environ['HTREE_CUDA_KERNELS']!r}")
    if mode == "off":
        return Plan(False, mode, "HTREE_CUDA_KERNELS=off")
    cutlass_override(environ)

    override = (environ.get("HTREE_CUDA_NVCC") or "").strip()
    nvcc: str | None
    if override == "wheels":
        nvcc, found = None, "HTREE_CUDA_NVCC=wheels"
    elif override:
        if not (os.path.isfile(override) and os.access(override, os.X_OK)):
            raise BuildError(
                f"HTREE_CUDA_NVCC must be `wheels` or the path of nvcc; {override!r} is no executable file"
            )
        nvcc, found = os.path.abspath(override), "HTREE_CUDA_NVCC names nvcc"
    else:
        nvcc = probe.nvcc(environ)
        driver = probe.driver()
        if nvcc:
            found = "nvcc was found"
        elif driver:
            found = "an NVIDIA driver was found and no nvcc: using NVIDIA's compiler wheels"
        elif mode == "auto":
            return Plan(False, mode, "HTREE_CUDA_KERNELS=auto found neither nvcc nor an NVIDIA driver")
        else:
            found = "HTREE_CUDA_KERNELS=on and no nvcc: using NVIDIA's compiler wheels"

    problem = None
    system, machine = probe.platform()
    cxx = probe.cxx(environ)
    if system != "linux" or machine not in ("x86_64", "aarch64"):
        problem = f"the kernels build on Linux x86_64 and aarch64 only, this is {system} {machine}"
    elif cxx is None:
        problem = f"no C++ compiler: {environ.get('CXX') or 'g++'} was not found (install g++ or set CXX)"
    if problem is not None:
        if mode == "on":
            raise BuildError(f"HTREE_CUDA_KERNELS=on, but {problem}")
        return Plan(False, mode, problem)
    return Plan(True, mode, found, nvcc, cxx)


def features(environ: Mapping[str, str] | None = None, *, debug: bool = False) -> Features:
    """The kernels that the environment asks for. Raises BuildError where it asks for what there is not."""
    environ = os.environ if environ is None else environ

    def switch(name: str) -> bool:
        value = environ.get(name, "").strip()
        if value not in ("", "0", "1"):
            raise BuildError(f"{name} must be 0 or 1, got {value!r}")
        return value == "1"

    wanted = [name.strip() for name in environ.get("HTREE_CUDA_FAMILIES", "").split(",") if name.strip()]
    unknown = sorted(set(wanted) - set(FAMILIES))
    if unknown:
        raise BuildError(f"HTREE_CUDA_FAMILIES must be of {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    families = tuple(name for name in FAMILIES if name in wanted or not wanted)
    return Features(families, switch("HTREE_CUDA_MIXED_DIMS"), switch("HTREE_CUDA_PROFILE"), debug)


def requirements(the_plan: Plan, environ: Mapping[str, str] | None = None) -> list[str]:
    """Build requirements beyond setuptools. Those of CUTLASS are none where its headers alone could be fetched."""
    environ = os.environ if environ is None else environ
    if not the_plan.kernels:
        return []
    needed = list(KERNEL_REQUIREMENTS)
    if not environ.get("HTREE_CUDA_CUTLASS_DIR") and cutlass.fetch(environ) is None:
        needed.append(cutlass.REQUIREMENT)
    if the_plan.nvcc is None:
        needed.extend(COMPILER_REQUIREMENTS)
    return needed


def cutlass_override(environ: Mapping[str, str]) -> Path | None:
    """The include folder that HTREE_CUDA_CUTLASS_DIR names, checked for cutlass/version.h."""
    override = environ.get("HTREE_CUDA_CUTLASS_DIR")
    if not override:
        return None
    for include in (Path(override) / "include", Path(override)):
        if (include / "cutlass" / "version.h").is_file():
            return include.resolve()
    state = (
        "holds neither include/cutlass/version.h nor cutlass/version.h" if Path(override).is_dir() else "is no folder"
    )
    raise BuildError(f"HTREE_CUDA_CUTLASS_DIR={override!r} {state}")


def find_cutlass(environ: Mapping[str, str]) -> Path:
    include = cutlass_override(environ)
    if include is not None:
        return include
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations if spec else None) or ():
        include = Path(location) / "source" / "include"
        if (include / "cutlass" / "version.h").is_file():
            return include
    include = cutlass.fetch(environ)
    if include is not None:
        return include
    raise Missing(f"no CUTLASS headers: install {cutlass.REQUIREMENT} beside the build, or set HTREE_CUDA_CUTLASS_DIR")


def cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text()
    parts = []
    for name in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"#define\s+CUTLASS_{name}\s+(\d+)", text)
        if match is None:
            raise BuildError(f"{include / 'cutlass' / 'version.h'} defines no CUTLASS_{name}")
        parts.append(int(match[1]))
    version = ".".join(map(str, parts))
    if tuple(parts) < MIN_CUTLASS:
        raise BuildError(
            f"CUTLASS {version} at {include} is too old: {'.'.join(map(str, MIN_CUTLASS))} or newer is needed"
        )
    return version


def find_nvcc_wheels() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations if spec else None) or ():
        for root in sorted(Path(location).glob("cu1?")):
            if os.access(root / "bin" / "nvcc", os.X_OK):
                return root / "bin" / "nvcc"
    raise Missing(f"no nvcc: install {' '.join(COMPILER_REQUIREMENTS)}, or a CUDA toolkit")


def capture(command: list[str]) -> str:
    """Output of a command, without a shell."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise Missing(f"{command[0]} does not run: {detail.strip()}") from error
    return done.stdout + done.stderr


def resolve(the_plan: Plan, environ: Mapping[str, str] | None = None) -> Toolchain:
    """Finds and checks every tool of a plan with kernels. Raises Missing or BuildError."""
    environ = os.environ if environ is None else environ
    assert the_plan.kernels and the_plan.cxx
    nvcc = Path(the_plan.nvcc) if the_plan.nvcc else find_nvcc_wheels()
    release = re.search(r"release (\d+)\.(\d+), V([\d.]+)", capture([str(nvcc), "--version"]))
    if release is None:
        raise BuildError(f"{nvcc} --version names no release: is it nvcc?")
    if (int(release[1]), int(release[2])) < MIN_NVCC:
        raise Missing(
            f"nvcc {release[3]} at {nvcc} is older than {MIN_NVCC[0]}.{MIN_NVCC[1]}: "
            "set HTREE_CUDA_NVCC=wheels to compile with NVIDIA's compiler wheels"
        )
    root = nvcc.resolve().parent.parent
    include = find_cutlass(environ)
    return Toolchain(
        nvcc=str(nvcc),
        nvcc_version=release[3],
        nvcc_source="toolkit" if the_plan.nvcc else "wheels",
        # The wheels keep libcudart_static.a in lib, where nvcc.profile looks in lib64 alone.
        cuda_lib_dirs=tuple(str(root / name) for name in ("lib", "lib64") if (root / name).is_dir()),
        cxx=the_plan.cxx,
        cxx_version=capture([the_plan.cxx, "--version"]).splitlines()[0],
        cutlass_include=str(include),
        cutlass_version=cutlass_version(include),
        ninja=find_ninja(environ),
    )


def find_ninja(environ: Mapping[str, str]) -> str:
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        import ninja

        path = os.path.join(ninja.BIN_DIR, "ninja")
        if os.access(path, os.X_OK):
            return path
    path = shutil.which("ninja", path=environ.get("PATH"))
    if path is None:
        raise Missing("no ninja: pip install ninja")
    return path


def max_jobs(environ: Mapping[str, str] | None = None) -> int:
    environ = os.environ if environ is None else environ
    value = environ.get("MAX_JOBS")
    if value:
        if not value.isdigit() or int(value) < 1:
            raise BuildError(f"MAX_JOBS must be a positive integer, got {value!r}")
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tree_hash(root: Path, folders: tuple[str, ...], suffixes: tuple[str, ...]) -> str:
    """sha256 over the names and contents of the source files below `folders`."""
    digest = hashlib.sha256()
    files = [
        path
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts
    ]
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


CSRC_SUFFIXES = (".h", ".cuh", ".cu", ".cpp")


def csrc_hash(root: Path) -> str:
    """Hash of the kernels' sources: tells whether a built library belongs to this checkout."""
    return tree_hash(root, ("csrc",), CSRC_SUFFIXES)


def read_version(root: Path) -> str:
    """The version of htree_cuda/_version.py, read without importing the package."""
    match = re.search(r'^__version__ = "([^"]+)"$', (root / "htree_cuda" / "_version.py").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError('htree_cuda/_version.py has no line __version__ = "..."')
    return match[1]


def main(argv: list[str]) -> int:
    """Prints the build requirements of this machine's plan, one a line; `--kernels`: exit 0 if kernels get built."""
    try:
        the_plan = plan()
    except BuildError as error:
        sys.exit(f"htree_cuda: {error}")
    if argv == ["--kernels"]:
        if not the_plan.kernels:
            print(f"htree_cuda: no kernels: {the_plan.reason}")
        return 0 if the_plan.kernels else 1
    print("\n".join(requirements(the_plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
