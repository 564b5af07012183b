"""Words that the project retired, and what it says instead: docs/architecture.md has the glossary.

Called by tools/check_house_rules.py. A name counts by its parts: `kFirstLayers` and `first_layers` both hold "first
layers".
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".py", ".md"}
FOLDERS = (
    "csrc", "htree_cuda", "docs", "benchmarks/cpp", "benchmarks/README.md", "tests", "tools", "examples", "README.md",
    "CHANGELOG.md", "CONTRIBUTING.md",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Retired:
    """One idea: how it is no longer called, and how it is."""

    pattern: str  # of lower-case words, names split into theirs
    say: str
    only: tuple[str, ...] = ("",)  # folders where the word has no other meaning


RETIRED = (
    Retired(r"(un)?turn(s|ed|ing)?", "rotate, rotation, RoPE, cos/sin; interleaved for timings"),
    Retired(r"anew", "re-rotate, restart"),
    Retired(r"first layers?", "entry layer"),
    Retired(
        r"walk(s|ed|ing)?", "sweep, selected layer; descent, step through, visit", only=("csrc", "docs", "htree_cuda")
    ),
    Retired(r"choices?|choose|chosen", "score pass, selection", only=("csrc",)),
    Retired(r"normali[sz]ers?", "score pass, lse, softmax denominator; row scale for a power of two"),
    Retired(r"values pass", "attend pass"),
    Retired(r"(name )?takers?", "query mask, write_query_masks"),
    Retired(r"mine", "own, query mask", only=("csrc",)),
    Retired(r"closed|dead|beyond", "expanded, masked, causal mask, past", only=("csrc",)),
    Retired(r"(nothing|nodes?|children|keys?|tokens?|positions?) beyond", "after, past", only=("docs", "htree_cuda")),
    Retired(r"spoil(s|ed|t|ing)?", "has non-finite V, propagate NaN"),
    Retired(
        r"refers?( to)?|raises?|asks?|asked|settles?d?|considers?(ed)?|weigh(s|ed)?",
        "max, rescale, overflow, recompute; needs, reads, multiplies",
        only=("csrc",),
    ),
    Retired(r"raised", "updated (a maximum)", only=("csrc", "docs")),
    Retired(r"unite[sd]?|uniting", "union of a query tile's blocks, build_union"),
    Retired(r"children as rows", "swap A/B"),
    Retired(r"k (least|most)|(least|most) k", "Min, Max", only=("csrc",)),
    Retired(r"to the bit", "bitwise identical"),
    Retired(r"clocks", "cycles", only=("csrc",)),
    Retired(r"multiprocessors?", "SM"),
    Retired(r"beginning", "prologue, start", only=("csrc", "docs", "benchmarks")),
    Retired(r"(queries|nodes) kernels?", "dq_selected, dkdv_selected", only=("docs",)),  # csrc has pack_queries_kernel
)

# What is no use of a retired word: other meanings, and names that others gave.
OTHER_MEANINGS = re.compile(
    r"\bturn(s|ed|ing)? (on|off|out)\b"
    r"|\braise registers\b"  # setmaxnreg.inc
    r"|\bos\.walk\b"
    r"|\bat (least|most)\b"
)
# Files that hold retired words because these are their subject: names in results of earlier builds among them.
EXEMPT = ("tools/retired_words.py", "tests/unit/test_retired_words.py", "tools/update_docs/common.py")
# The glossary names what it retires, in the rows of its table.
GLOSSARY = "docs/architecture.md"

NAME_PARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_|-")
COMPILED = [(re.compile(rf"\b(?:{rule.pattern})\b"), rule) for rule in RETIRED]


def plain(line: str) -> str:
    """A line in lower case, its names split into words."""
    return " ".join(NAME_PARTS.sub(" ", line).lower().split())


def in_line(path: str, line: str) -> list[str]:
    """What is wrong with a line of a file, in words."""
    if path == GLOSSARY and line.lstrip().startswith("|"):
        return []
    text = OTHER_MEANINGS.sub(" ", plain(line))
    return [
        f'"{found[0]}" is retired: say {rule.say}'
        for pattern, rule in COMPILED
        if path.startswith(rule.only) and (found := pattern.search(text))
    ]


def files(root: Path) -> list[Path]:
    """The files whose words count."""
    found: list[Path] = []
    for name in FOLDERS:
        place = root / name
        found += [place] if place.is_file() else [path for path in place.rglob("*") if path.suffix in SUFFIXES]
    return sorted(found)


def check(root: Path) -> list[str]:
    """Violations, each `path:line: rule`."""
    problems = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name in EXEMPT:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            problems += [f"{name}:{number}: {problem}" for problem in in_line(name, line)]
    return problems


if __name__ == "__main__":
    print("\n".join(check(Path(__file__).resolve().parent.parent)))
