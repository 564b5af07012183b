"""Compiled objects kept by content: a second build, in whatever folder or environment, compiles what changed.

A key is a hash of everything that decides an object: the source and every header that it can reach, below csrc/ and
of CUTLASS, the flags, and the versions of the compilers. Where these files lie is no part of it. pip builds in an
environment of its own each time, where CUTLASS lies elsewhere, and finds its objects all the same.

The folder is $HTREE_CUDA_BUILD_DIR, else $XDG_CACHE_HOME/htree_cuda, else ~/.cache/htree_cuda. Removing it is safe.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

RUN_LOGGED = str(Path(__file__).with_name("run_logged.py"))
SECONDS = Path(__file__).with_name("compile_seconds.json")
LIMIT_BYTES = 2 << 30
OUT = "$out"  # stands for the output in a job's command

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where objects are kept. It may not exist yet."""
    environ = os.environ if environ is None else environ
    if environ.get("HTREE_CUDA_BUILD_DIR"):
        return Path(environ["HTREE_CUDA_BUILD_DIR"]).absolute()
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "htree_cuda"


def usable(wanted: Path, otherwise: Path) -> Path:
    """`wanted` if it can be written to, else `otherwise`; the one that is returned exists."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
    except OSError:
        pass
    otherwise.mkdir(parents=True, exist_ok=True)
    return otherwise


@functools.cache
def _read(path: Path, changed: int) -> tuple[str, str, tuple[tuple[str, bool], ...]]:
    """Text, hash and includes (name, whether in quotes) of a file; `changed` is its time of modification."""
    data = path.read_bytes()
    text = data.decode(errors="replace")
    includes = tuple((quoted or angled, bool(quoted)) for quoted, angled in _INCLUDE.findall(text))
    return text, hashlib.sha256(data).hexdigest(), includes


def reachable(root: Path, source: str, folders: Iterable[Path]) -> dict[str, tuple[str, str]]:
    """Name -> (text, hash) of `source`, a path below `root`, and the files that it includes, directly or not, as far as
    they lie beside the file that names them or in `folders`. Conditions are not evaluated: a file too many only costs
    a compilation."""
    folders = [os.path.normpath(folder) for folder in folders]
    found: dict[str, tuple[str, str]] = {}
    waiting = [(source, os.path.normpath(root / source))]
    seen = set()
    while waiting:
        name, path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        text, digest, includes = _read(Path(path), os.stat(path).st_mtime_ns)
        # Two files of one name are both part of the key.
        found[name if name not in found else f"{name} {digest}"] = (text, digest)
        here = os.path.dirname(path)
        for included, quoted in includes:
            for base in [here, *folders] if quoted else folders:
                candidate = os.path.normpath(os.path.join(base, included))
                if os.path.isfile(candidate):
                    inside = next((f for f in folders if candidate.startswith(f + os.sep)), here)
                    waiting.append((os.path.relpath(candidate, inside), candidate))
                    break
    return found


def key(parts: Iterable[str]) -> str:
    """A hash of the parts, in their order."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:40]


@dataclasses.dataclass(frozen=True)
class Job:
    """One command with one output in the store; `needs` are outputs of other jobs."""

    name: str
    output: Path
    command: tuple[str, ...]  # OUT stands for the output
    needs: tuple[Path, ...] = ()

    @property
    def digest(self) -> str:
        """The key under which the output is kept."""
        return "".join(self.output.parent.parts[-2:])

    @property
    def log(self) -> Path:
        """What the command printed when it made the output, and the seconds of a processor that it took."""
        return Path(f"{self.output}.log")


def place(store: Path, name: str, digest: str) -> Path:
    """Where an output lies: a folder by key, the name as people know it."""
    return store / digest[:2] / digest[2:] / name


@functools.cache
def expected_seconds() -> dict[str, float]:
    """Seconds of a processor that each source took when the list was written (tools/build_inplace.py --times)."""
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def _ninja_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _ninja_command(arguments: Iterable[str]) -> str:
    return " ".join(shlex.quote(argument).replace("$", "$$") for argument in arguments)


def run(jobs: Iterable[Job], ninja: str, parallel: int, build_dir: Path, cwd: Path, quiet: bool = False) -> list[Job]:
    """Runs the jobs whose output or log is missing, the longest first; returns them. Raises CalledProcessError."""
    jobs = {job.output: job for job in jobs}.values()
    missing = {job.output: job for job in jobs if not (job.output.exists() and job.log.exists())}
    for job in jobs:
        if job.output in missing:
            job.output.unlink(missing_ok=True)  # without its log, which ninja knows nothing of
        else:
            for used in (job.output, job.log):
                os.utime(used)  # prune() removes what was not used
    if not missing:
        return []
    seconds = expected_seconds()
    unknown = statistics.median(seconds.values()) if seconds else 0.0
    waiting = sorted(missing.values(), key=lambda job: -seconds.get(job.name.split()[0], unknown))
    # Links wait for all that compiles. ninja begins with what most is built upon, and would leave the binding for last.
    compiled = " ".join(_ninja_path(job.output) for job in waiting if not job.needs)
    python = os.path.realpath(sys.executable)
    lines = ["ninja_required_version = 1.8", f"builddir = {_ninja_path(build_dir)}", ""]
    lines += ["rule job", "  command = $what", "  description = $name", ""]
    lines += [f"build compiled: phony || {compiled}", ""] if compiled else []
    for job in waiting:
        command = [str(job.output) if argument == OUT else argument for argument in job.command]
        needs = [_ninja_path(path) for path in job.needs if path in missing]
        needs += ["compiled"] if compiled and job.needs else []
        lines.append(f"build {_ninja_path(job.output)}: job{' || ' + ' '.join(needs) if needs else ''}")
        lines.append(f"  what = {_ninja_command([python, RUN_LOGGED, str(job.output), *command])}")
        lines.extend([f"  name = {job.name}", ""])
        job.output.parent.mkdir(parents=True, exist_ok=True)
    build_dir.mkdir(parents=True, exist_ok=True)
    file = build_dir / "build.ninja"
    file.write_text("\n".join(lines))
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(
        [ninja, "-f", str(file), "-j", str(parallel)], cwd=cwd, stdout=output, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout)
    return waiting


def prune(store: Path, limit: int = LIMIT_BYTES) -> int:
    """Removes the outputs that were not used for longest, each with its log and whatever else lies beside it, until the
    store holds at most `limit` bytes; returns how many bytes it removed."""
    files: dict[Path, list[tuple[os.stat_result, Path]]] = {}
    for path in store.glob("??/*/*"):
        if path.is_file():
            files.setdefault(path.parent, []).append((path.stat(), path))
    total = sum(stat.st_size for kept in files.values() for stat, _ in kept)
    removed = 0
    for kept in sorted(files.values(), key=lambda kept: max(stat.st_mtime for stat, _ in kept)):
        if total - removed <= limit:
            break
        for stat, path in kept:
            path.unlink(missing_ok=True)
            removed += stat.st_size
    return removed
