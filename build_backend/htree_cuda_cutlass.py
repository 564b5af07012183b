"""The headers of the nvidia-cutlass package, without the packages that it requires.

They are all that a build takes of it, and its requirements (cuda-python, scipy, numpy and more) take longer to install
than the rest of a build environment. pip fetches the package, and its headers stay in the store of compiled objects.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import htree_cuda_store as store

REQUIREMENT = "nvidia-cutlass==4.2.0.0"
HEADERS = "cutlass_library/source/include/"  # of the wheel
LIMIT_S = 300  # of the download


def kept(environ: Mapping[str, str]) -> Path | None:
    """The include folder in the store, or None."""
    include = _folder(environ) / "include"
    return include if (include / "cutlass" / "version.h").is_file() else None


def fetch(environ: Mapping[str, str]) -> Path | None:
    """The include folder in the store, which pip fills where it is missing. None where there is no pip, where pip does
    not find the package, or where the store cannot be written to: a build then requires the whole package."""
    found = kept(environ)
    pip = None if found else _pip()
    if pip is None:
        return found
    folder = _folder(environ)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            # Where no index answers, the build goes on without long waiting.
            options = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=1", "--dest", temporary]
            subprocess.run([*pip, "download", *options, REQUIREMENT], check=True, capture_output=True, timeout=LIMIT_S)
            new = Path(temporary) / "new"
            _unpack(next(Path(temporary).glob("*.whl")), new / "include")
            os.rename(new, folder)
    except (OSError, subprocess.SubprocessError, StopIteration, zipfile.BadZipFile):
        pass  # another build may have been faster
    return kept(environ)


def _folder(environ: Mapping[str, str]) -> Path:
    return store.folder(environ) / REQUIREMENT.replace("==", "-")


def _pip() -> list[str] | None:
    """A build environment of pip has no pip, but Python brings one."""
    # Not by importlib.util: setuptools takes such a question for an import of pip, and gives up its distutils.
    if importlib.machinery.PathFinder.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    wheels = sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")) if spec and spec.origin else []
    return [sys.executable, str(wheels[-1] / "pip")] if wheels else None


def _unpack(wheel: Path, include: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            relative = name.removeprefix(HEADERS)
            if relative == name or name.endswith("/"):
                continue
            path = include / relative
            if ".." in path.parts:
                raise zipfile.BadZipFile(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
