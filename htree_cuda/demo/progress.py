"""A progress bar on stderr: tqdm where it is installed, a plain counter otherwise, nothing where stderr is a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator


def progress(items: Iterable, total: int, what: str) -> Iterator:
    """Yields `items`; shows how far it is once the work has lasted half a second."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield from _plain(items, total, what)
    else:
        yield from tqdm(items, total=total, desc=what, leave=False, delay=0.5, dynamic_ncols=True)


def _plain(items: Iterable, total: int, what: str) -> Iterator:
    shown = start = time.monotonic()
    written = False
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - start > 0.5 and now - shown > 0.2:
            print(f"\r{what}: {done}/{total}", end="", file=sys.stderr, flush=True)
            shown, written = now, True
        yield item
    if written:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
