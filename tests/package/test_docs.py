"""What the documentation names exists, and it says what is: history lives in lab/."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (
    "csrc",
    "htree_cuda",
    "tests",
    "tools",
    "docs",
    "benchmarks",
    "examples",
    "lab",
    "build_backend",
    "third_party",
)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "third_party" / "README.md",
    ROOT / "tools" / "ptx_emulator" / "README.md",
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./{{}},*-]*)(?::(\w+))?`")
SOURCE = re.compile(r"`(\w+\.(?:cuh|cu|h))`")
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
HISTORY = re.compile(
    r"\b(tried|no longer|used to be|this session|this round|(was|were) still|earlier (kernels|ones|days))\b"
    r"|\bin the place of \d",
    re.IGNORECASE,
)
KERNEL_PAGE_WORDS = 2500


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def alternatives(path: str) -> list[str]:
    """`a/{b,c}/d` is a/b/d and a/c/d."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [[part] if i % 2 == 0 else part.split(",") for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def missing_names(text: str) -> list[str]:
    """Paths, `file:function`s and bare names of kernel sources of the text that are not in the tree."""
    sources = {path.name for folder in ("csrc", "tools", "tests") for path in (ROOT / folder).rglob("*")}
    missing = [name for name in SOURCE.findall(text) if name not in sources]
    for path, function in PATH.findall(text):
        for each in alternatives(path):
            found = list(ROOT.glob(each.rstrip("/")))
            if not found:
                missing.append(each)
            elif function and not re.search(rf"\b{function}\b\s*(\(|=|<)", found[0].read_text()):
                missing.append(f"{each}:{function}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in LINK.findall(text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_and_function_that_is_named_exists(page):
    assert missing_names(page.read_text()) == []


def test_a_wrong_path_or_function_is_found():
    text = "`csrc/params.h` `csrc/no.h` `htree_cuda/ops.py:forward` `htree_cuda/ops.py:backwards` `no.cuh` `ptx.cuh`"
    text += "`csrc/{sm90,no}/`"
    assert missing_names(text) == ["no.cuh", "csrc/no.h", "htree_cuda/ops.py:backwards", "csrc/no/"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_history_lives_in_lab(page):
    for line in page.read_text().splitlines():
        assert not COMMIT.search(line), line
        assert not HISTORY.search(line.replace("was tried", "")), line  # "what was tried" points to lab/


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "kernels").glob("*.md")), ids=name)
def test_a_kernel_page_is_short(page):
    assert len(page.read_text().split()) <= KERNEL_PAGE_WORDS
