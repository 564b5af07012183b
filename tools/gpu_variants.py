"""Times variants of the kernels interleaved: on one GPU, a process for each.

    python tools/gpu_variants.py build NAME [--csrc DIR | --ref COMMIT] [--patch FILE ...] [--leave-out PART ...]
    python tools/gpu_variants.py time NAME... [--op backward] [--lengths 65536,131072] [--inputs local] [--rounds 2]
                                   [--heads 16] [--kv-heads 1]

`build`, where nvcc is, compiles what no build has compiled before and writes build/variants/NAME.so.gz, which may be
carried to another machine. An unchanged csrc/ is a variant as well. --patch applies patches, one after the other.
--leave-out takes parts out of the forward to see what they cost: inputs and control flow stay, results are wrong.
`time`, on a Hopper GPU, prints milliseconds, the SM clock and power, round by round.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "build_backend"))

import htree_cuda_build as build
import htree_cuda_compile as compiling
import htree_cuda_store as store
from content_hash import ROOT
from gpu_common import ensure_built, machine, run

VARIANTS = ROOT / "build" / "variants"
LIMIT_S = 120

FWD = "csrc/sm90/htree_fwd"


def copies_of(layers: str, is_one: str) -> list[tuple[str, str, str]]:
    """Edits after which the producer fills the ring once there, and then gives its stages on as they are."""
    given = f"bool const given_{layers} = {is_one} && ++produced_{layers} > Cfg::kStages;"
    edits = {
        "  char const* const packed =": f"  int produced_{layers} = 0;\n  char const* const packed =",
        "        int const slots = min(count": f"        {given}\n        int const slots = min(count",
        "copies * Cfg::kCopyBytes": f"(given_{layers} ? 0 : 1) * copies * Cfg::kCopyBytes",
        "exists && slot %": f"!given_{layers} && exists && slot %",
    }
    return [(f"{FWD}/producer.cuh", old, new) for old, new in edits.items()]


# Part -> edits: (file, what stands there once, what takes its place).
PARTS = {
    "entry-copies": copies_of("entry", "!Cfg::kIsSelected"),
    "selected-copies": copies_of("selected", "Cfg::kIsSelected"),
    # Fragments of two of eight steps serve all of a block in attend passes, those of one in score passes.
    "selected-reads": [
        (
            f"{FWD}/attend_selected.cuh",
            "    if (i + 1 < kValueSteps) load_values(s, values[(i + 1) % 2], waiting.slot, i + 1);\n"
            "    if (i + 1 < Cfg::kSteps) load_keys(s, keys[(i + 1) % 2], slot, i + 1);\n",
            "    if (i == 0) load_values(s, values[1], waiting.slot, 1);\n"
            "    if (i == 0) load_keys(s, keys[1], slot, 1);\n",
        ),
        (
            f"{FWD}/score_selected.cuh",
            "#pragma unroll\n"
            "  for (int i = 0; i < Cfg::kSteps; ++i) {\n"
            "    uint32_t keys[4];\n"
            "    load_keys(s, keys, slot, i);\n",
            "  uint32_t keys[4];\n"
            "  load_keys(s, keys, slot, 0);\n"
            "#pragma unroll\n"
            "  for (int i = 0; i < Cfg::kSteps; ++i) {\n",
        ),
        (
            f"{FWD}/score_selected.cuh",
            "      load_keys(s, keys, slots[block], i);\n",
            "      load_keys(s, keys, slots[block], 0);\n",
        ),
        (
            f"{FWD}/score_selected.cuh",
            "        load_keys(s, keys, stage + block * Cfg::kSlotBytes, i);\n",
            "        load_keys(s, keys, stage + block * Cfg::kSlotBytes, 0);\n",
        ),
    ],
    # From rank to rank; queries restart as often.
    "selected-rotations": [
        (
            f"{FWD}/rope_inplace.cuh",
            "  rotate_by(s, kk, reinterpret_cast<uint32_t const(&)[4]>(rotated(s)[kk]), s.rope.step[2 * kk]",
            "  if (false) rotate_by(s, kk, reinterpret_cast<uint32_t const(&)[4]>(rotated(s)[kk]), s.rope.step[2 * kk]",
        ),
    ],
}


def leave_out(root: Path, part: str) -> None:
    """Takes a part out of the csrc/ of `root`."""
    for file, old, new in PARTS[part]:
        path = root / file
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"--leave-out {part}: {file} holds {text.count(old)} times, not once:\n{old}")
        path.write_text(text.replace(old, new))


def apply_patch(root: Path, patch: Path) -> None:
    """Applies a patch whose paths begin with csrc/ to the csrc/ of `root`."""
    # Outside of any repository, as git sees it: paths are those of the patch.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    command = ["git", "apply", str(patch.resolve())]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"--patch {patch}: {done.stderr.strip()}")


def build_variant(name: str, csrc: Path | None, ref: str | None, patches: list[Path], parts: list[str]) -> Path:
    """Compiles and links a variant; returns the compressed library."""
    if not re.fullmatch(r"[\w-]+", name):
        raise SystemExit(f"NAME must be letters, digits, _ and -, got {name!r}")
    root = VARIANTS / name
    if csrc is not None and root.resolve() in [csrc.resolve(), *csrc.resolve().parents]:
        raise SystemExit(f"{csrc} is what build/variants/{name} is made from: give it another NAME")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    if ref is not None:
        archive = subprocess.run(["git", "archive", ref, "csrc"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(root)], input=archive, check=True)
    else:
        shutil.copytree(csrc or ROOT / "csrc", root / "csrc")
    for patch in patches:
        apply_patch(root, patch)
    for part in parts:
        leave_out(root, part)

    tools = build.resolve(build.plan({**os.environ, "HTREE_CUDA_KERNELS": "on"}))
    features = build.features()
    compilation = compiling.Compilation(root, tools, features, store.usable(store.folder(), root / "objects"))
    kernels = compilation.kernels()
    library = compilation.library(kernels)
    made = compilation.run([*kernels, library], root)
    print(f"{name}: compiled {len(made)} of {len(kernels)} sources", flush=True)
    packed = VARIANTS / f"{name}.so.gz"
    packed.write_bytes(gzip.compress(library.output.read_bytes(), 6))
    return packed


def time_variants(names: list[str], op: str, options: list[str], rounds: int) -> Iterator[tuple[str, list[dict]]]:
    """Name and figures of `python -m htree_cuda bench`, each variant in a copy of the package, round by round."""
    files = {name: VARIANTS / f"{name}.so.gz" for name in names}
    for path in files.values():
        if not path.exists():
            raise SystemExit(f"{path} does not exist: `build` it where nvcc is")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ignored = shutil.ignore_patterns("libhtree_cuda.so", "__pycache__")
        shutil.copytree(ROOT / "htree_cuda", place / "htree_cuda", ignore=ignored)
        for _ in range(rounds):
            for name in names:
                library = place / "htree_cuda" / "libhtree_cuda.so"
                library.unlink(missing_ok=True)
                library.write_bytes(gzip.decompress(files[name].read_bytes()))
                out = place / "figures.json"
                bench = [sys.executable, "-c", f"import sys; sys.path[0] = {folder!r}; from htree_cuda import bench;"]
                bench[-1] += " sys.exit(bench.main(sys.argv[1:]))"
                status, output = run([*bench, op, *options, "--dense-up-to", "0", "--out", str(out)], LIMIT_S)
                if status != 0:
                    raise SystemExit(f"{name}: exit status {status}\n{output[-3000:]}")
                yield name, json.loads(out.read_text())["figures"]


def print_table(rows: Iterable[tuple[str, list[dict]]], width: int) -> None:
    """A row a variant and round, a column a length and kind of inputs, as they come: a run may be cut off."""
    for number, (name, figures) in enumerate(rows):
        if number == 0:
            heads = [f"{f['T']:,} {f['inputs']}" for f in figures]
            print(" " * width + "".join(f"{head:>30s}" for head in heads), flush=True)
        cells = [
            f"{f['ms']:10.3f} ms {f.get('clock_mhz') or 0:5.0f} MHz {f.get('power_w') or 0:4.0f} W" for f in figures
        ]
        print(f"{name:{width}s}" + "".join(cells), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build")
    one.add_argument("name")
    source = one.add_mutually_exclusive_group()
    source.add_argument("--csrc", type=Path, help="another csrc/")
    source.add_argument("--ref", help="csrc/ of a commit")
    one.add_argument("--patch", nargs="+", default=[], type=Path, metavar="FILE", help="applied in order")
    one.add_argument("--leave-out", nargs="+", default=[], choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    timed = commands.add_parser("time")
    timed.add_argument("names", nargs="+", metavar="NAME")
    timed.add_argument("--op", choices=["forward", "backward"], default="forward")
    timed.add_argument("--lengths", default="65536,131072")
    timed.add_argument("--inputs", default="local")
    timed.add_argument("--rounds", type=int, default=2)
    timed.add_argument("--heads", type=int, default=16)
    timed.add_argument("--kv-heads", type=int, default=1)
    args = parser.parse_args(argv)
    if args.command == "build":
        print(f"wrote {build_variant(args.name, args.csrc, args.ref, args.patch, args.leave_out).relative_to(ROOT)}")
        return 0
    print(json.dumps(machine()), flush=True)
    ensure_built()
    options = ["--lengths", args.lengths, "--inputs", args.inputs]
    options += ["--heads", str(args.heads), "--kv-heads", str(args.kv_heads)]
    print_table(time_variants(args.names, args.op, options, args.rounds), max(map(len, args.names)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
