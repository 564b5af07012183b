"""Runs the emulated tests of the kernel families that changed since their last green run.

python tools/emulated_tests.py [FAMILY ...] [--all] [--list]

A family is its kernel sources and what they include, comments apart, its tests and the emulator. For each of them
tests/emulated_hashes.json holds a hash, written when its tests are green: commit it with the change. --list prints what
is stale.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "build_backend"), str(ROOT / "tools")]

import htree_cuda_build as build  # noqa: E402
import htree_cuda_compile as compiling  # noqa: E402
import htree_cuda_store as store  # noqa: E402
from check_house_rules import strip_comments  # noqa: E402

HASHES = ROOT / "tests" / "emulated_hashes.json"
EMULATOR = "tools/ptx_emulator"


@dataclasses.dataclass(frozen=True)
class Family:
    """Folders of kernels, and the test files that judge them; `beside`: folders that the tests call as well."""

    folders: tuple[str, ...]
    tests: tuple[str, ...]
    beside: tuple[str, ...] = ()


FAMILIES = {
    "emulator": Family((), (f"{EMULATOR}/tests/test_emulator.py",)),
    "attn_dist": Family(("csrc/sm90/attn_dist/",), ("tests/kernels/test_attn_dist.py",)),
    "sparse_attention": Family(
        ("csrc/sm90/sparse_attention/",), ("tests/kernels/test_sparse_attention.py",), ("csrc/sm90/attn_dist/",)
    ),
    "sparse_attention_bwd": Family(
        ("csrc/sm90/sparse_attention_bwd/",),
        ("tests/kernels/test_sparse_attention_bwd*.py",),
        ("csrc/sm90/sparse_attention/",),
    ),
    "indexer": Family(
        ("csrc/sm90/indexer/", "csrc/sm90/indexer_listed/"),
        ("tests/kernels/test_indexer.py",),
        ("csrc/sm90/topk_indices/",),
    ),
    "topk_indices": Family(("csrc/sm90/topk_indices/",), ("tests/kernels/test_topk_indices.py",)),
    "htree_fwd": Family(
        ("csrc/sm90/htree_fwd/", "csrc/tree/"),
        ("tests/kernels/test_forward*.py",),
        ("csrc/sm90/htree_bwd/",),
    ),
    "varlen": Family(
        ("csrc/sm90/htree_fwd/", "csrc/sm90/htree_bwd/", "csrc/tree/"),
        ("tests/kernels/test_varlen.py",),
    ),
    "htree_bwd": Family(
        ("csrc/sm90/htree_bwd/", "csrc/tree/"),
        ("tests/kernels/test_backward*.py", "tests/kernels/test_context_parallel.py"),
        ("csrc/sm90/htree_fwd/",),
    ),
    "htree_decode": Family(
        ("csrc/sm90/htree_decode/", "csrc/tree/"),
        ("tests/kernels/test_decode*.py", "tests/kernels/test_options.py", "tests/kernels/test_transformers.py"),
        ("csrc/sm90/htree_fwd/", "csrc/sm90/htree_bwd/"),
    ),
    "benchmarks": Family(
        (
            "benchmarks/cpp/",
            "csrc/sm90/htree_fwd/",
            "csrc/sm90/htree_decode/",
            "csrc/sm90/sparse_attention/",
            "csrc/tree/",
        ),
        (f"{EMULATOR}/tests/test_benchmarks.py",),
    ),
}


def test_files(family: Family) -> list[str]:
    found = {path for pattern in family.tests for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def words(text: str) -> str:
    """C++ without comments and without how it is laid out, neither of which a test can tell."""
    return " ".join(strip_comments(text).split())


def content(family: Family) -> str:
    """The hash of a family as it is."""
    sources = [*compiling.kernel_sources(ROOT), *compiling.benchmark_sources(ROOT)]
    folders = [ROOT / "csrc", ROOT / "benchmarks" / "cpp"]
    parts = {}
    for source in sources:
        if family.folders and source.startswith(family.folders):
            parts |= {name: words(text) for name, (text, _) in store.reachable(ROOT, source, folders).items()}
    emulator = sorted(path for path in (ROOT / EMULATOR).iterdir() if path.suffix in (".py", ".cpp", ".h"))
    tests = test_files(family)
    helpers = ["conftest.py", "baseline.py"]
    if any(name.startswith("tests/kernels/") for name in tests):
        helpers += ["kernels/conftest.py", "bits.py"]
    shared = [ROOT / "tests" / name for name in helpers]
    for path in [*emulator, *shared, *(ROOT / name for name in tests)]:
        text = path.read_text()
        parts[path.relative_to(ROOT).as_posix()] = text if path.suffix == ".py" else words(text)
    return store.key(f"{name} {value}" for name, value in sorted(parts.items()))


def kernels(family: Family) -> list[str]:
    """Of the kernels that `emulated` tests need, those of the family."""
    from tools.ptx_emulator import MARKED

    folders = (*family.folders, *family.beside)
    matching = [source for source in compiling.kernel_sources(ROOT) if any(text in source for text in MARKED)]
    return [source for source in matching if source.startswith(folders)]


def run(name: str) -> bool:
    """Runs one family's tests; whether they are green."""
    family = FAMILIES[name]
    environment = {
        **os.environ,
        "HTREE_CUDA_EMULATED": "marked",
        "HTREE_CUDA_EMULATED_KERNELS": ",".join(kernels(family)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(build.max_jobs()), "--dist", "worksteal"]
    start = time.time()
    status = subprocess.run([*command, *test_files(family)], cwd=ROOT, env=environment).returncode
    print(f"{name}: {'green' if status == 0 else 'failed'}, {time.time() - start:.0f} s", flush=True)
    return status == 0


def main(argv: list[str] | None = None) -> int:
    """Runs what is stale; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--all", action="store_true", help="those that did not change as well")
    parser.add_argument("--list", action="store_true", help="print the families that are stale and stop")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.families) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    green = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    now = {name: content(family) for name, family in FAMILIES.items() if test_files(family)}
    stale = [name for name in now if arguments.all or green.get(name) != now[name]]
    wanted = [name for name in stale if not arguments.families or name in arguments.families]
    print(f"stale: {', '.join(wanted) or 'none'}", flush=True)
    if arguments.list or not wanted:
        return 0
    from tools import ptx_emulator

    if why := ptx_emulator.why_not():
        print(f"not run: {why}")
        return 1
    failed = []
    for name in wanted:
        if run(name):
            # Another run may have written what it found in the meantime.
            green = (json.loads(HASHES.read_text()) if HASHES.exists() else {}) | {name: now[name]}
            HASHES.write_text(json.dumps(dict(sorted(green.items())), indent=1) + "\n")
        else:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"green: {', '.join(wanted)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
