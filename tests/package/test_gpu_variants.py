"""Variants of the kernels: edits, patches, and how they are timed."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import gpu_timeline
import gpu_variants
import htree_cuda_compile as compiling
import htree_cuda_store as store
import pytest

from .common import ROOT


def test_timeline_adds_up_phases():
    rows = [("a", 4.0, 4.0), ("b", 5.0, 6.0), ("a", 1.0, 1.5)]
    assert gpu_timeline.by_phase(rows, str.upper) == {"A": (5.0, 5.5, 2), "B": (5.0, 6.0, 1)}


@pytest.mark.parametrize("part", list(gpu_variants.PARTS))
def test_parts_of_the_forward_can_be_left_out(part, tmp_path):
    """Each edit meets the sources as they are, once, and only kernels of the forward are compiled again."""
    sources = compiling.kernel_sources(ROOT)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")

    def keys(root):
        contents = {source: store.reachable(root, source, [root / "csrc"]) for source in sources}
        return {source: {name: digest for name, (_, digest) in files.items()} for source, files in contents.items()}

    before = keys(ROOT)
    assert keys(tmp_path) == before
    gpu_variants.leave_out(tmp_path, part)
    again = [source for source, files in keys(tmp_path).items() if files != before[source]]
    assert again and all("sm90/htree_fwd" in source for source in again)
    for file, _, _ in gpu_variants.PARTS[part]:
        (tmp_path / file).write_text("")
    with pytest.raises(SystemExit, match="holds 0 times"):
        gpu_variants.leave_out(tmp_path, part)


def test_all_parts_can_be_left_out_together(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for part in gpu_variants.PARTS:
        gpu_variants.leave_out(tmp_path, part)


def test_patches_apply_in_their_order(tmp_path):
    """Those that wait to be timed fit csrc/ as it is, and each other."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    patches = sorted((ROOT / "benchmarks" / "variants").glob("*.patch"))
    for patch in patches:
        before = {path: path.read_bytes() for path in (tmp_path / "csrc").rglob("*") if path.is_file()}
        gpu_variants.apply_patch(tmp_path, patch)
        assert any(path.read_bytes() != text for path, text in before.items())


def test_a_patch_applies_below_a_repository(tmp_path):
    """As build/variants is below this one: git would skip what lies outside of the folder it stands in."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    root = tmp_path / "build" / "variant"
    (root / "csrc").mkdir(parents=True)
    file = root / "csrc" / "a.h"
    file.write_text("old\n")
    patch = tmp_path / "own.patch"
    patch.write_text("--- a/csrc/a.h\n+++ b/csrc/a.h\n@@ -1 +1 @@\n-old\n+new\n")
    gpu_variants.apply_patch(root, patch)
    assert file.read_text() == "new\n"
    with pytest.raises(SystemExit, match=r"csrc/a\.h"):
        gpu_variants.apply_patch(root, patch)


def test_variants_do_not_overwrite_what_they_are_made_of():
    with pytest.raises(SystemExit, match="NAME must be"):
        gpu_variants.build_variant("../kernels", None, None, [], [])
    with pytest.raises(SystemExit, match="another NAME"):
        gpu_variants.build_variant("a", gpu_variants.VARIANTS / "a" / "csrc", None, [], [])


def test_a_variant_is_timed_in_a_copy_of_the_package(tmp_path, monkeypatch, capsys):
    """With the library that was built for it; here the benchmark runs on the CPU, which needs none."""
    monkeypatch.setattr(gpu_variants, "VARIANTS", tmp_path)
    with pytest.raises(SystemExit, match="does not exist"):
        list(gpu_variants.time_variants(["a"], "forward", [], 1))
    for name in "ab":
        (tmp_path / f"{name}.so.gz").write_bytes(gzip.compress(name.encode()))
    options = ["--device", "cpu", "--dtype", "float32", "--lengths", "40", "--heads", "2", "--kv-heads", "1"]
    options += ["--inputs", "iid", "--dim", "4", "--top-k", "4"]
    ((name, figures),) = gpu_variants.time_variants(["a"], "backward", options, 1)
    assert name == "a" and [f["T"] for f in figures] == [40] and figures[0]["ms"] > 0
    libraries = []

    def run(command, limit_s):
        folder = re.search(r"sys.path\[0\] = '(.*?)'", command[2])[1]
        libraries.append((Path(folder) / "htree_cuda" / "libhtree_cuda.so").read_bytes())
        Path(command[-1]).write_text(json.dumps({"figures": figures}))
        return 0, ""

    monkeypatch.setattr(gpu_variants, "run", run)
    timed = list(gpu_variants.time_variants(["a", "b"], "backward", options, 2))
    assert timed == [("a", figures), ("b", figures)] * 2 and libraries == [b"a", b"b"] * 2
    gpu_variants.print_table(timed, 1)
    head, *rows = capsys.readouterr().out.splitlines()
    assert "40 iid" in head and [row.split()[0] for row in rows] == ["a", "b"] * 2 and rows[0].count(" ms ") == 1
