"""Tables of figures, and the length from which htree attention is faster."""

from __future__ import annotations

from collections.abc import Callable


def table(figures: list[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    rows = [list(columns), *([cell(f) for cell in columns.values()] for f in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def crossover(figures: list[dict]) -> int | None:
    """Smallest measured length from which on htree is never slower than dense attention."""
    found = None
    for f in sorted((f for f in figures if "dense" in f), key=lambda f: f["T"]):
        found = (found or f["T"]) if f["speedup_over_dense"] >= 1 else None
    return found
