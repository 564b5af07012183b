"""Wheels with kernels, for every Python that is found here: python tools/make_wheels.py [--out dist] [PYTHON ...]

The kernel library is one for all of them, and comes from the store of compiled objects where an earlier build left it.
What differs is csrc/bindings.cpp, compiled for each Python whose headers are there. auditwheel reads which versions of
the C and C++ libraries the binaries ask for; a wheel is tagged with the oldest manylinux that has them, or not at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build_inplace import ROOT, load_setup

OLDEST = (3, 10)
ASK = """
import json, sys, sysconfig
print(json.dumps([sys.version_info[:2], sys.implementation.name, sysconfig.get_config_var("Py_GIL_DISABLED") or 0,
                  sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_paths()["include"]]))
"""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that wheels can be made for."""

    minor: int  # of 3.minor
    ext_suffix: str
    include: str

    @property
    def tag(self) -> str:
        return f"cp3{self.minor}"


def ask(program: str) -> Interpreter | None:
    """What a Python says of itself; None where it does not run, is too old, or has no headers."""
    try:
        done = subprocess.run([program, "-c", ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    version, implementation, no_gil, suffix, include = json.loads(done.stdout)
    usable = tuple(version) >= OLDEST and implementation == "cpython" and not no_gil
    return Interpreter(version[1], suffix, include) if usable and Path(include, "Python.h").exists() else None


def interpreters() -> list[str]:
    """Programs that may be a Python: this one, those on PATH, and pyenv's."""
    found = [sys.executable]
    found += [f"python3.{minor}" for minor in range(OLDEST[1], 20) if shutil.which(f"python3.{minor}")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return found + sorted(str(path) for path in pyenv.glob("versions/*/bin/python3"))


def manylinux(wheel: Path) -> str | None:
    """The manylinux tag that auditwheel finds true of a wheel, or None."""
    program = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(program, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"auditwheel show {wheel.name}:\n{done.stdout}{done.stderr}")
    match = re.search(r'following\s+platform\s+tag:\s+"(\w+)"', done.stdout)
    return match[1] if match and match[1].startswith("manylinux") else None


def repack(base: Path, module: Path, interpreter: Interpreter, out: Path) -> Path:
    """`base` with the module of another Python."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "wheel"]
        subprocess.run([*run, "unpack", "--dest", folder, str(base)], check=True, stdout=subprocess.DEVNULL)
        (root,) = Path(folder).iterdir()
        for old in (root / "htree_cuda").glob("_C*.so"):
            old.unlink()
        shutil.copy2(module, root / "htree_cuda" / f"_C{interpreter.ext_suffix}")
        info = root / "htree_cuda" / "_build_info.json"
        python = {"python": f"3.{interpreter.minor}"}
        info.write_text(json.dumps(json.loads(info.read_text()) | python, indent=2) + "\n")
        platform = base.stem.split("-")[-1]
        (meta,) = root.glob("*.dist-info/WHEEL")
        tag = f"Tag: {interpreter.tag}-{interpreter.tag}-{platform}"
        meta.write_text(re.sub(r"^Tag: .*$", tag, meta.read_text(), flags=re.MULTILINE))
        subprocess.run([*run, "pack", "--dest-dir", str(out), str(root)], check=True, stdout=subprocess.DEVNULL)
    return out / f"{base.name.rsplit('-', 3)[0]}-{interpreter.tag}-{interpreter.tag}-{platform}.whl"


def main(argv: list[str] | None = None) -> int:
    """Makes the wheels; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="programs; by default all that are found")
    arguments = parser.parse_args(argv)
    wanted = {found.minor: found for found in map(ask, reversed(arguments.pythons or interpreters())) if found}
    if not wanted:
        raise SystemExit("no CPython 3.10 or newer with headers was found")
    setup = load_setup()
    build, compiling, store = setup.build, setup.compiling, setup.store
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        plan = build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"})
        tools, features = build.resolve(plan), build.features()
        compilation = compiling.Compilation(ROOT, tools, features, store.usable(store.folder(), ROOT / "build/objects"))
        kernels = compilation.kernels()
        library = compilation.library(kernels)
        pythons = {i: compiling.Python(f"3.{i.minor}", i.ext_suffix, i.include) for i in wanted.values()}
        modules = {i: compilation.module(python, library) for i, python in pythons.items()}
        jobs = [*kernels, library, *(job for pair in modules.values() for job in pair)]
        compilation.run(jobs, ROOT / "build" / "wheels")
    except (build.BuildError, build.Missing) as error:
        print(f"htree_cuda: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder]
        subprocess.run([*pip, str(ROOT)], check=True, env={**os.environ, "HTREE_CUDA_KERNELS": "on"})
        (base,) = Path(folder).glob("*.whl")
        repacked = Path(folder) / "repacked"
        repacked.mkdir()
        for interpreter, (_, module) in modules.items():
            wheel = repack(base, module.output, interpreter, repacked)
            platform = manylinux(wheel)
            if platform is not None:
                tags = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform, str(wheel)]
                subprocess.run(tags, check=True, stdout=subprocess.DEVNULL)
                wheel = wheel.with_name(f"{wheel.name.rsplit('-', 1)[0]}-{platform}.whl")
            shutil.copy2(wheel, out / wheel.name)
            print(f"{out / wheel.name}: {(out / wheel.name).stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
