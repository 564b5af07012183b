"""The checkers of the build log and of the house rules find what they are for."""

from __future__ import annotations

import shutil

import check_build_log
import check_house_rules
import pytest

from .common import ROOT


def test_this_tree_follows_the_house_rules():
    assert check_house_rules.check(ROOT) == []


GOOD_LOG = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_build_log_checker(tmp_path):
    assert check_build_log.check(GOOD_LOG) == []
    spill = GOOD_LOG.replace("0 bytes spill stores, 0", "8 bytes spill stores, 12")
    assert check_build_log.check(spill) == ["_Z1kv spills 8 bytes of stores, 12 bytes of loads"]
    for code, bad in (
        (7507, False),
        (7508, True),
        (7509, False),
        (7510, True),
        (7519, True),
        (7520, True),
        (7521, False),
    ):
        line = f"ptxas info    : (C{code}) Potential Performance Loss: something in function '_Z1kv'\n"
        assert bool(check_build_log.check(GOOD_LOG + line)) is bad
    warning = "./csrc/tree/pack/kernel.cuh(312): warning #128-D: loop is not reachable"
    assert check_build_log.check(f"{GOOD_LOG}{warning}\n") == [warning]
    assert check_build_log.check("") == ["the log names no kernel: was it written by nvcc -Xptxas -v?"]
    path = tmp_path / "nvcc.log"
    path.write_text(spill)
    assert check_build_log.main([str(path)]) == 1
    path.write_text(GOOD_LOG)
    assert check_build_log.main([str(path)]) == 0
    assert check_build_log.main([str(tmp_path / "none")]) == 1


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("csrc/bindings.cpp", "#include <torch/extension.h>", "torch stops at Python"),
        ("csrc/tree/pool/kernel.cuh", "#include <ATen/ATen.h>", "torch stops at Python"),
        ("csrc/host/math.h", '#include "c10/util/Half.h"', "torch stops at Python"),
        ("csrc/tree/pool/kernel.cuh", 'void f() { asm volatile("nop;"); }', "inline assembly belongs in"),
        ("csrc/tree/pool/config.cuh", '#include "../../sm90/other/kernel.cuh"', "includes another op's"),
        ("csrc/tree/pool/config.cuh", '#include "nowhere.cuh"', "is no file of csrc"),
        ("csrc/tree/pool/kernel.cuh", "#include <cutlass/arch/barrier.h>", "memory clobber"),
        ("csrc/tree/pool/kernel.cuh", "using B = cutlass::arch::ClusterBarrier;", "memory clobber"),
        ("csrc/sm90/other/second.cu", "// no family", "csrc/sm90/other/second.cu:1: of no family"),
    ],
)
def test_house_rules_checker(tmp_path, monkeypatch, file, line, words):
    """Retired words, which take most of the time, have tests of their own."""
    monkeypatch.setattr(check_house_rules.retired_words, "check", lambda root: [])
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    other = tmp_path / "csrc" / "sm90" / "other" / "kernel.cuh"
    other.parent.mkdir(parents=True)
    other.write_text('#pragma once\n// asm volatile("nop;"); #include <torch/torch.h> in a comment is no violation\n')
    before = check_house_rules.check(tmp_path)
    with open(tmp_path / file, "a") as stream:
        stream.write(line + "\n")
    problems = [problem for problem in check_house_rules.check(tmp_path) if problem not in before]
    assert any(words in problem for problem in problems), problems


def test_house_rules_count_instantiations(tmp_path):
    folder = tmp_path / "csrc" / "sm90" / "htree_fwd" / "instantiations"
    folder.mkdir(parents=True)
    most = check_house_rules.MAX_INSTANTIATION_FILES
    names = [f"csrc/sm90/htree_fwd/instantiations/i{i}.cu" for i in range(most + 1)]
    for name in names:
        (tmp_path / name).write_text("__global__ void k() {}\n")
    words = f"csrc: {most + 1} kernel instantiation files, at most {most}"
    assert check_house_rules.check(tmp_path)[0] == words
    (tmp_path / names[-1]).unlink()
    assert check_house_rules.check(tmp_path) == []
