"""The include and layout rules of csrc/, and the words of the project, checked by reading.

python tools/check_house_rules.py [ROOT]
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "build_backend")]

import retired_words  # noqa: E402
from htree_cuda_build import FAMILIES  # noqa: E402

SUFFIXES = {".h", ".hpp", ".cuh", ".cu", ".cpp"}
MAX_INSTANTIATION_FILES = 64
ASM_FILES = {"csrc/device/ptx.cuh", "csrc/device/barriers.cuh"}
BARRIER_FILE = "csrc/device/barriers.cuh"

TORCH_INCLUDE = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|THC?)/')
ASM = re.compile(r"(?<![\w\"])(asm|__asm__|__asm)\b\s*(volatile|__volatile__|goto)?\s*\(")
INCLUDE = re.compile(r'#\s*include\s*"([^"]+)"')
CUTLASS_BARRIER = re.compile(
    r"(cutlass/arch/barrier\.h|\b(ClusterBarrier|ClusterTransactionBarrier|NamedBarrier|ClusterBarrierArray)\b"
    r"|\bcutlass::(Pipeline\w+|OrderedSequenceBarrier|arch::fence_\w+|arch::cpasync_barrier\w*)\b)"
)


def strip_comments(text: str) -> str:
    """Source without comments, strings kept, line numbers kept."""
    pattern = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)

    def replace(match: re.Match) -> str:
        return match[0] if match[0].startswith('"') else "\n" * match[0].count("\n")

    return pattern.sub(replace, text)


def op_folder(path: str) -> str | None:
    """The op that a file belongs to: csrc/sm90/<op> or csrc/tree/<op>; None for what all ops share."""
    parts = path.split("/")
    if len(parts) < 4:
        return None
    return "/".join(parts[:3])


def check(root: Path = ROOT) -> list[str]:
    """Violations, each `path:line: rule`; empty where there are none."""
    problems = []
    files = sorted(path for path in (root / "csrc").rglob("*") if path.suffix in SUFFIXES)
    names = {path.relative_to(root).as_posix() for path in files}
    for path in files:
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if (lines := text.count("\n")) > 700:
            problems.append(f"{name}:1: {lines} lines: split the file near 600")
        for number, line in enumerate(strip_comments(text).splitlines(), 1):
            where = f"{name}:{number}:"
            if TORCH_INCLUDE.search(line):
                problems.append(f"{where} torch stops at Python: no torch, ATen or c10 under csrc")
            if name not in ASM_FILES and ASM.search(line):
                problems.append(f"{where} inline assembly belongs in ptx.cuh or barriers.cuh")
            if name != BARRIER_FILE and CUTLASS_BARRIER.search(line):
                problems.append(f"{where} CUTLASS 4.2's barriers lack the memory clobber: use barriers.cuh")
            include = INCLUDE.search(line)
            if include:
                candidates = (
                    os.path.normpath(f"{path.parent.relative_to(root).as_posix()}/{include[1]}"),
                    os.path.normpath(f"csrc/{include[1]}"),
                )
                target = next((c for c in candidates if c in names), None)
                if target is None:
                    problems.append(f'{where} "{include[1]}" is no file of csrc')
                elif op_folder(target) not in (None, op_folder(name)):
                    problems.append(f"{where} {op_folder(name) or name} includes another op's {target}")
    kernels = {name for name in names if name.endswith(".cu")}
    instantiations = [name for name in kernels if "__global__" in text_of(root, name)]
    if len(instantiations) > MAX_INSTANTIATION_FILES:
        problems.append(f"csrc: {len(instantiations)} kernel instantiation files, at most {MAX_INSTANTIATION_FILES}")
    folders = {folder for family in FAMILIES.values() for folder in family}
    for name in sorted(kernels):
        if name.count("/") > 2 and not any(name.startswith(f"{folder}/") for folder in folders):
            problems.append(f"{name}:1: of no family: build_backend/htree_cuda_build.py names the folders of each")
    problems.extend(retired_words.check(root))
    return problems


def text_of(root: Path, name: str, seen: set[str] | None = None) -> str:
    """A file with the project's own headers pasted in: whether a .cu instantiates a kernel."""
    seen = set() if seen is None else seen
    if name in seen or not (root / name).is_file():
        return ""
    seen.add(name)
    text = strip_comments((root / name).read_text())
    folder = os.path.dirname(name)
    parts = [text]
    for include in INCLUDE.findall(text):
        for candidate in (os.path.normpath(f"{folder}/{include}"), os.path.normpath(f"csrc/{include}")):
            parts.append(text_of(root, candidate, seen))
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    """Prints the violations; returns the exit status."""
    problems = check(Path(argv[0]).resolve() if argv else ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print("the sources follow the house rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
