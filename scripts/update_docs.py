"""Writes the measured tables of README.md and docs/ from benchmarks/results/*.json; never typed by hand.

python scripts/update_docs.py            rewrite what lies between `<!-- generated: NAME -->` and `<!-- end generated -->`
python scripts/update_docs.py --check    exit 1 and name the files that are out of date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)


def load(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _cpu(report: dict) -> str:
    return f"{report['cpu']}, {report['threads']} threads, torch {report['torch']}, {report['date']}"


def _gpu(report: dict) -> str:
    return f"one {report['gpu']}, driver {report['driver']}, torch {report['torch']}, {report['date']}"


def forward_cpu() -> str:
    report, whole = load("forward_cpu"), load("forward_cpu_whole")
    figures = report["figures"]
    rows = [
        [
            f"{f['T']:,}",
            str(f["layers"]),
            f"{f['candidates_per_query']:,.0f}",
            f"{f['us_per_query']:.0f}",
            f"{1e3 * f['dense']['ms'] / f['T_q']:.0f}",
            f"{f['peak_rss_bytes'] / 1e9:.2f}",
        ]
        for f in figures
    ]
    f = figures[0]
    shape = (
        f"{f['dtype']}, H {f['H']}, H_kv {f['H_kv']}, K = V = {f['K']}, r {f['compression_rate']}, top_k {f['top_k']}"
    )
    header = ["T", "layers", "candidates per query", "µs per query", "dense SDPA, µs per query", "peak memory, GB"]
    last = whole["figures"][0]
    return (
        f"Torch backend on a CPU, the last {f['T_q']:,} queries of a context of T tokens, {shape} ({_cpu(report)}):\n\n"
        + markdown(header, rows)
        + f"\nAll {last['T']:,} queries of a {last['T']:,}-token sequence take {last['ms'] / 1e3:.1f} s, at most "
        f"{last['peak_rss_bytes'] / 1e9:.2f} GB of process memory; dense SDPA takes {last['dense']['ms'] / 1e3:.1f} s.\n"
    )


GENERATORS: dict[str, Callable[[], str]] = {"forward_cpu": forward_cpu}


def regenerate(text: str) -> str:
    def block(match: re.Match) -> str:
        name = match[2]
        if name not in GENERATORS:
            raise SystemExit(f"no generator named {name!r}; there are {', '.join(GENERATORS)}")
        return match[1] + "\n" + GENERATORS[name]().strip() + "\n\n" + match[4]

    return BLOCK.sub(block, text)


def main(argv: list[str]) -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]:
        before = path.read_text()
        after = regenerate(before)
        if before != after:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in argv:
                path.write_text(after)
    if "--check" in argv:
        if stale:
            print(f"out of date, run scripts/update_docs.py: {', '.join(stale)}")
        return 1 if stale else 0
    print(f"updated {', '.join(stale)}" if stale else "nothing to update")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
