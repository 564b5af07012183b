"""Writes the measured blocks of README.md, docs/ and benchmarks/ from benchmarks/results/*.json, never typed by hand.

python -m tools.update_docs            rewrite what lies between `<!-- generated: NAME -->` and its end mark
python -m tools.update_docs --check    exit 1 and name the files that are out of date

A block's writer lives in the module of its subject; each module lists its blocks in BLOCKS.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from .common import ROOT

BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
SUBJECTS = "backward budgets context_parallel decode dispatch dsa forward lists packed pretrained reports training tree"
MODULES = [importlib.import_module(f".{name}", __package__) for name in SUBJECTS.split()]
BLOCKS: dict[str, Callable[[], str]] = {name: write for module in MODULES for name, write in module.BLOCKS.items()}


def documents(root: Path = ROOT) -> list[Path]:
    """Files that may hold generated blocks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "benchmarks").glob("*.md"))]


def regenerate(text: str) -> str:
    """The text with every generated block written again."""

    def block(match: re.Match) -> str:
        name = match[2]
        if name not in BLOCKS:
            raise SystemExit(f"no block named {name!r}; there are {', '.join(BLOCKS)}")
        return match[1] + "\n" + BLOCKS[name]().strip() + "\n\n" + match[4]

    return BLOCK.sub(block, text)


def main(argv: list[str]) -> int:
    """Rewrites or checks the documents; returns the exit status."""
    stale = []
    for path in documents():
        before = path.read_text()
        after = regenerate(before)
        if before != after:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in argv:
                path.write_text(after)
    if "--check" in argv:
        if stale:
            print(f"out of date, run python -m tools.update_docs: {', '.join(stale)}")
        return 1 if stale else 0
    print(f"updated {', '.join(stale)}" if stale else "nothing to update")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
