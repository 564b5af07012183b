"""Tables of figures, and the length from which on htree attention is the faster one."""

from __future__ import annotations

from collections.abc import Callable


def table(figures: list[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    rows = [list(columns), *([cell(f) for cell in columns.values()] for f in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def break_even(figures: list[dict]) -> int | None:
    """The break-even length of a shape: the smallest measured T from which on htree attention is at least as fast as
    dense attention at every measured length, with every kind of input. None where dense attention is faster at the end.
    """
    found = None
    lengths = sorted({f["T"] for f in figures if "dense" in f})
    for T in lengths:
        faster = all(f["speedup_over_dense"] >= 1 for f in figures if "dense" in f and f["T"] == T)
        found = (found or T) if faster else None
    return found
