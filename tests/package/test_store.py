"""Compiled objects are kept by content: what a second build compiles, in another folder or after an edit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import htree_cuda_build as build
import htree_cuda_compile as compiling
import htree_cuda_store as store
import pytest

from .common import ROOT

COMPILER = """#!{python}
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
out.write_text(" ".join(sys.argv[1:]))
with open({calls!r}, "a") as file:
    file.write(next((a for a in sys.argv if a.endswith((".cu", ".cpp"))), "link") + "\\n")
print("warning: loud" if "loud" in " ".join(sys.argv) else "quiet")
sys.exit("bad" in out.name)
"""


class Tree:
    """A small csrc/ in `folder`, compilers that only write down what they are asked, and a store beside them."""

    def __init__(self, folder, kept):
        self.folder, self.kept, self.calls = folder, kept, kept / "calls"
        kept.mkdir(exist_ok=True)
        compiler = kept / "compiler"
        compiler.write_text(COMPILER.format(python=sys.executable, calls=str(self.calls)))
        compiler.chmod(0o755)
        self.cutlass = folder / "environment" / "include"
        self.write("environment/include/cutlass/version.h", "// 4.2.0\n")
        self.write("csrc/params.h", "// params\n")
        self.write("csrc/device/ptx.cuh", "#include <cutlass/version.h>\n")
        self.write("csrc/sm90/attn_dist/kernel.cuh", '#include "device/ptx.cuh"\n')
        self.write("csrc/sm90/attn_dist/launch.cu", '#include "kernel.cuh"\n')
        self.write("csrc/host/library.cu", '#include "../params.h"\n// HTREE_CUDA_PARAMS_HASH\n')
        self.write("csrc/bindings.cpp", '#include "params.h"\n')

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def compilation(self, features=build.EVERYTHING):
        compiler = str(self.kept / "compiler")
        tools = build.Toolchain(
            nvcc=compiler, nvcc_version="13.0", nvcc_source="toolkit", cuda_lib_dirs=(), cxx=compiler,
            cxx_version="g++ 12", cutlass_include=str(self.cutlass), cutlass_version="4.2.0",
            ninja=build.find_ninja(os.environ),
        )  # fmt: skip
        return compiling.Compilation(self.folder, tools, features, self.kept / "objects")

    def build(self, features=build.EVERYTHING):
        """Builds all there is; returns the sources that were compiled."""
        self.calls.write_text("")
        compilation = self.compilation(features)
        kernels = compilation.kernels()
        library = compilation.library(kernels)
        module = compilation.module(compiling.Python.here(), library)
        compilation.run([*kernels, library, *module], self.folder / "build", quiet=True)
        return sorted(line for line in self.calls.read_text().splitlines() if line != "link")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    pytest.importorskip("pybind11")
    monkeypatch.setattr(compiling, "LAUNCHERS", (("csrc/together/", "csrc/with/"),))
    return Tree(tmp_path / "a b$c'd", tmp_path / "kept")


EVERY = ["csrc/bindings.cpp", "csrc/host/library.cu", "csrc/sm90/attn_dist/launch.cu"]


def test_a_second_build_compiles_nothing(tree, tmp_path):
    """In the same folder, and in a copy whose CUTLASS lies elsewhere: an isolated build of pip."""
    assert tree.build() == EVERY
    assert tree.build() == []
    assert Tree(tmp_path / "other", tree.kept).build() == []


@pytest.mark.parametrize(
    ("file", "again"),
    [
        ("csrc/params.h", ["csrc/bindings.cpp", "csrc/host/library.cu"]),
        ("csrc/sm90/attn_dist/kernel.cuh", ["csrc/sm90/attn_dist/launch.cu"]),
        ("csrc/device/ptx.cuh", ["csrc/sm90/attn_dist/launch.cu"]),
        ("environment/include/cutlass/version.h", ["csrc/sm90/attn_dist/launch.cu"]),
        ("csrc/host/unused.h", []),
    ],
)
def test_an_edit_compiles_what_reaches_it(tree, file, again):
    tree.build()
    before = (tree.folder / file).read_text() if (tree.folder / file).exists() else ""
    tree.write(file, before + "// changed, and longer\n")
    assert tree.build() == again
    tree.write(file, before)
    os.utime(tree.folder / file, ns=(1, 1))
    assert tree.build() == []  # what it was compiled from before is still there


def test_instantiations_of_a_folder_are_compiled_together(tree):
    """Each of a group is part of the key; files elsewhere and those of another folder are on their own."""
    folder = "csrc/sm90/htree_fwd/instantiations"
    for name in "abc":
        tree.write(f"{folder}/{name}.cu", '#include "../launch.cuh"\n')
        tree.write(f"csrc/sm90/attn_dist/instantiations/{name}.cu", "// another family\n")
    tree.write("csrc/sm90/htree_fwd/launch.cuh", "// loops\n")
    of_family = [f"csrc/sm90/attn_dist/instantiations/{name}.cu" for name in "abc"]
    apart = [EVERY[1], EVERY[2]]
    units = compiling.units(compiling.kernel_sources(tree.folder))
    assert units == [[apart[0]], of_family, [apart[1]], [f"{folder}/a.cu", f"{folder}/b.cu"], [f"{folder}/c.cu"]]
    # The compiler here names the first source of its command.
    assert tree.build() == sorted([*EVERY, of_family[-1], f"{folder}/b.cu", f"{folder}/c.cu"])
    jobs = [job for job in tree.compilation().kernels() if "htree_fwd" in job.name]
    assert next(job.command[-5:-2] for job in jobs) == (f"{folder}/b.cu", "-include", f"{folder}/a.cu")
    tree.write(f"{folder}/a.cu", "// changed\n")
    assert tree.build() == [f"{folder}/b.cu"]
    tree.write("csrc/sm90/htree_fwd/launch.cuh", "// other loops\n")
    assert tree.build() == [f"{folder}/b.cu", f"{folder}/c.cu"]


def test_launchers_of_a_group_are_compiled_together(tree):
    tree.write("csrc/together/a/launch.cu", "// one\n")
    tree.write("csrc/together/b.cu", "// another\n")
    tree.write("csrc/with/launch.cu", "// a third\n")
    units = compiling.units(compiling.kernel_sources(tree.folder))
    assert [unit for unit in units if len(unit) > 1] == [
        ["csrc/together/a/launch.cu", "csrc/together/b.cu", "csrc/with/launch.cu"]
    ]
    assert tree.build() == sorted([*EVERY, "csrc/with/launch.cu"])
    tree.write("csrc/together/b.cu", "// another word\n")
    assert tree.build() == ["csrc/with/launch.cu"]


def test_every_source_is_of_one_unit():
    sources = compiling.kernel_sources(ROOT)
    assert sorted(source for unit in compiling.units(sources) for source in unit) == sources


def test_flags_and_versions_are_part_of_the_key(tree):
    plain = tree.compilation().kernel("csrc/host/library.cu")
    assert "-lineinfo" not in plain.command and "--compress-mode=size" in plain.command
    for features in (build.Features(profile=True), build.Features(debug=True)):
        other = tree.compilation(features).kernel("csrc/host/library.cu")
        assert other.output != plain.output
    assert "-lineinfo" in tree.compilation(build.Features(profile=True)).kernel("csrc/host/library.cu").command
    assert not any(macro.startswith("-DHTREE_CUDA_MIXED") for macro in plain.command)
    # Of a macro of the build only the sources know that name it.
    mixed = build.Features(mixed_dims=True)
    assert tree.compilation(mixed).kernel("csrc/host/library.cu").output == plain.output
    tree.write("csrc/sm90/htree_fwd/launch.cu", "#if HTREE_CUDA_MIXED_DIMS\n#endif\n")
    jobs = [tree.compilation(f).kernel("csrc/sm90/htree_fwd/launch.cu") for f in (build.EVERYTHING, mixed)]
    assert [f"-DHTREE_CUDA_MIXED_DIMS={i}" in job.command for i, job in enumerate(jobs)] == [True, True]
    assert jobs[0].output != jobs[1].output


def test_a_family_is_left_out(tree):
    tree.write("csrc/sm90/htree_fwd/launch.cu", "// forward\n")
    tree.write("csrc/tree/pool/launch.cu", "// pool\n")
    dsa, decode = build.Features(families=("dsa",)), build.Features(families=("decode",))
    assert compiling.kernel_sources(tree.folder, dsa) == EVERY[1:]
    assert compiling.kernel_sources(tree.folder, decode) == ["csrc/host/library.cu", "csrc/tree/pool/launch.cu"]
    assert len(compiling.kernel_sources(tree.folder)) == 4


def test_features_of_the_environment():
    assert build.features({}) == build.EVERYTHING and build.EVERYTHING.families == tuple(build.FAMILIES)
    environ = {"HTREE_CUDA_FAMILIES": " dsa, htree", "HTREE_CUDA_MIXED_DIMS": "1", "HTREE_CUDA_PROFILE": "0"}
    assert build.features(environ) == build.Features(families=("htree", "dsa"), mixed_dims=True)
    with pytest.raises(build.BuildError, match="HTREE_CUDA_FAMILIES must be of htree, decode, dsa, got trees"):
        build.features({"HTREE_CUDA_FAMILIES": "dsa,trees"})
    for name in ("HTREE_CUDA_MIXED_DIMS", "HTREE_CUDA_PROFILE"):
        with pytest.raises(build.BuildError, match=f"{name} must be 0 or 1, got 'yes'"):
            build.features({name: "yes"})


def test_the_longest_compilation_begins_first(tree, monkeypatch):
    monkeypatch.setattr(store, "expected_seconds", lambda: {EVERY[1]: 1.0, EVERY[2]: 9.0})
    tree.build()
    text = (tree.folder / "build" / "build.ninja").read_text()
    assert text.index(f"name = {EVERY[2]}") < text.index(f"name = {EVERY[1]}")
    # The library waits for the binding too, or ninja would compile it last: nothing but the module is built upon it.
    (line,) = (line for line in text.splitlines() if line.startswith("build compiled: phony || "))
    assert line.count(".o") == len(EVERY)
    assert [line.endswith(" compiled") for line in text.splitlines() if ": job || " in line] == [True, True]


def test_what_fails_leaves_nothing(tree):
    tree.write("csrc/host/bad.cu", "// no C++\n")
    with pytest.raises(build.BuildError, match="compiling the kernels failed"):
        tree.build()
    assert not list((tree.kept / "objects").rglob("*bad*.o"))
    (tree.folder / "csrc/host/bad.cu").unlink()
    tree.build()
    assert tree.build() == []


def test_the_log_is_of_every_object(tree):
    tree.build()
    jobs = [tree.compilation().kernel(source) for source in EVERY[1:]]
    log = tree.folder / "another" / "nvcc.log"  # of a build that had nothing to compile
    compiling.write_log(log, jobs)
    text = log.read_text()
    assert all(f"==== {source}\nquiet\nseconds: " in text for source in EVERY[1:])


def test_an_object_without_its_log_is_made_again(tree):
    """Pruning goes by the time of each file, and another build may prune."""
    tree.build()
    compilation = tree.compilation()
    job = compilation.kernel(EVERY[1])
    os.utime(job.log, (1, 1))
    assert tree.build() == [] and job.log.stat().st_mtime > 1
    job.log.unlink()
    assert tree.build() == [EVERY[1]] and job.log.exists()
    assert tree.build() == []


def test_places(tmp_path, monkeypatch):
    """The environment decides where objects are kept; where nothing can be written, they lie with the build."""
    assert store.folder({"HTREE_CUDA_BUILD_DIR": str(tmp_path)}) == tmp_path
    assert store.folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "htree_cuda"
    assert store.folder({}).parts[-2:] == (".cache", "htree_cuda")
    assert store.usable(tmp_path / "new", tmp_path / "other") == tmp_path / "new"
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert store.usable(blocked / "below", tmp_path / "other") == tmp_path / "other"


def test_prune_keeps_what_was_used_last(tmp_path):
    paths = [store.place(tmp_path, "x.o", store.key([str(i)])) for i in range(4)]
    for age, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
        log = path.with_name("x.o.log")
        log.write_bytes(bytes(10))
        os.utime(log, (1, 1))
    assert store.prune(tmp_path, 250) == 220
    assert [path.exists() for path in paths] == [True, True, False, False]
    assert [path.with_name("x.o.log").exists() for path in paths] == [True, True, False, False]


def test_a_product_that_is_there_is_not_replaced(tmp_path):
    """A library that a process has mapped stays where it is; another one takes its place as a fresh file."""
    built, target = tmp_path / "built", tmp_path / "package" / "lib"
    built.write_text("one")
    compiling.place(built, target)
    first = target.stat().st_ino
    compiling.place(built, target)
    assert target.stat().st_ino == first
    built.write_text("two")
    compiling.place(built, target)
    assert target.read_text() == "two"


def test_every_launcher_has_a_stand_in():
    """A launcher of params.h that absent_families.cu forgets leaves a library without its family that does not load."""
    function = re.compile(r"^HTREE_CUDA_API [\w:]+ (\w+)\((?!\))", re.MULTILINE)
    launchers = function.findall((ROOT / "csrc" / "params.h").read_text())
    absent = (ROOT / "csrc" / "host" / "absent_families.cu").read_text()
    assert len(launchers) >= 7 and [name for name in launchers if f" {name}(" not in absent] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_an_absent_family_says_so(tmp_path):
    """The launchers that stand in for a family that a build leaves out, compiled as C++."""
    source = ROOT / "csrc" / "host" / "absent_families.cu"
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include <cstdio>\n#include <stdexcept>\n#include "params.h"\nint main() {\n'
        "  try { htree_cuda::attn_dist({}, nullptr); }\n"
        "  catch (std::runtime_error const& error) { std::puts(error.what()); }\n}\n"
    )
    families = ["-DHTREE_CUDA_FAMILY_HTREE=0", "-DHTREE_CUDA_FAMILY_DECODE=0", "-DHTREE_CUDA_FAMILY_DSA=0"]
    command = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", *families, "-x", "c++"]
    subprocess.run([*command, str(source), str(main), "-o", str(tmp_path / "main")], check=True)
    said = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True).stdout
    assert said.startswith("attn_dist: this build of htree_cuda has no kernels of the family dsa; build it with")
