"""Content hash of csrc/ and htree_cuda/: which sources a measurement or a test report belongs to.

python tools/content_hash.py          the hash of this checkout
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

from htree_cuda_build import CSRC_SUFFIXES, csrc_hash, tree_hash  # noqa: E402

__all__ = ["content_hash", "csrc_hash"]


def content_hash(root: Path = ROOT) -> str:
    """sha256 over the sources of csrc and htree_cuda; build products do not count."""
    return tree_hash(root, ("csrc", "htree_cuda"), (*CSRC_SUFFIXES, ".py"))


if __name__ == "__main__":
    print(content_hash())
