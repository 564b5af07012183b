"""Which emulated tests run: the choice of a run, and the families that changed since they were green."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import emulated_tests
import pytest

from .. import conftest
from .common import ROOT

OF_THE_EMULATOR = {"emulator", "benchmarks"}  # their tests lie beside it and choose their kernels themselves


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of what the hashes are made of."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("csrc", "tests", "tools/ptx_emulator"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    monkeypatch.setattr(emulated_tests, "ROOT", tmp_path)
    monkeypatch.setattr(emulated_tests, "HASHES", tmp_path / "tests" / "emulated_hashes.json")
    hashes = {name: emulated_tests.content(family) for name, family in emulated_tests.FAMILIES.items()}
    emulated_tests.HASHES.write_text(json.dumps(hashes))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "edit", "stale"),
    [
        ("csrc/sm90/attn_dist/kernel.cuh", "int more;\n", {"attn_dist"}),
        ("csrc/sm90/attn_dist/kernel.cuh", "// A comment.\n", set()),
        ("csrc/tree/rope.cuh", "int more;\n", {"htree_fwd", "htree_bwd"}),
        ("tests/kernels/test_backward.py", "more = 1\n", {"htree_bwd"}),
        ("tools/ptx_emulator/memory.cpp", "int more;\n", set(emulated_tests.FAMILIES)),
        ("tests/unit/test_ops.py", "more = 1\n", set()),
    ],
)
def test_an_edit_makes_its_families_stale(tree, capsys, file, edit, stale):
    with open(tree / file, "a") as stream:
        stream.write(edit)
    assert emulated_tests.main(["--list"]) == 0
    said = capsys.readouterr().out.strip().removeprefix("stale: ")
    assert stale <= ({*said.split(", ")} if said != "none" else set())
    if "htree_fwd" not in stale:  # kernels of decoding include what the forward does
        assert said == (", ".join(name for name in emulated_tests.FAMILIES if name in stale) or "none")


def test_green_families_are_written_down_and_others_are_not(tree, monkeypatch, capsys):
    from tools import ptx_emulator

    monkeypatch.setattr(ptx_emulator, "why_not", lambda: "")
    emulated_tests.HASHES.unlink()
    ran = []
    monkeypatch.setattr(emulated_tests, "run", lambda name: (ran.append(name), name != "htree_fwd")[1])
    assert emulated_tests.main(["attn_dist", "htree_fwd"]) == 1
    assert ran == ["attn_dist", "htree_fwd"] and "failed: htree_fwd" in capsys.readouterr().out
    assert list(json.loads(emulated_tests.HASHES.read_text())) == ["attn_dist"]
    assert emulated_tests.main(["attn_dist"]) == 0 and ran == ["attn_dist", "htree_fwd"]
    with pytest.raises(SystemExit):
        emulated_tests.main(["trees"])


def test_every_family_has_kernels_and_tests():
    """Every test of a kernel that the emulator can run is of one family; every family has sources to translate."""
    files = [file for family in emulated_tests.FAMILIES.values() for file in emulated_tests.test_files(family)]
    assert len(files) == len(set(files))
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.emulated\n" in path.read_text()]
    assert {path.relative_to(ROOT).as_posix() for path in marked} <= set(files)
    for name, family in emulated_tests.FAMILIES.items():
        if name not in OF_THE_EMULATOR and any((ROOT / folder).exists() for folder in family.folders[:1]):
            sources = emulated_tests.kernels(family)
            assert any(source.startswith(family.folders[0]) and "instantiations" in source for source in sources), name


def test_the_sample_meets_every_family():
    """`make test` runs some tests of each: a family whose sample lost its tests would pass unseen."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "sample", "tests/kernels"]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, family in emulated_tests.FAMILIES.items():
        if name not in OF_THE_EMULATOR and (ROOT / family.folders[0]).exists():
            assert any(file in done.stdout for file in emulated_tests.test_files(family)), name


def test_a_wrong_choice_is_an_error(monkeypatch):
    monkeypatch.delenv("HTREE_CUDA_EMULATED_KERNELS", raising=False)
    monkeypatch.setenv("HTREE_CUDA_EMULATED", "some")
    with pytest.raises(pytest.UsageError, match="HTREE_CUDA_EMULATED must be of none, sample, marked, all, got 'some'"):
        conftest.emulated_kernels()
