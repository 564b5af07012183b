"""Checks a log of nvcc -Xptxas -v: no register spills, none of ptxas' advisories that cost
performance, no warning of nvcc's front end.

python tools/check_build_log.py [build/kernels/nvcc.log]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# C7508: setmaxnreg is ignored. C7510 .. C7520: WGMMAs are serialised.
ADVISORIES = {7508, *range(7510, 7521)}


def check(text: str) -> list[str]:
    """The problems of a log, one line each; empty where there are none."""
    problems = []
    function = "?"
    seen = 0
    for line in text.splitlines():
        match = re.search(r"Compiling entry function '([^']+)'|Function properties for (\S+)", line)
        if match:
            function = match[1] or match[2]
            seen += match[1] is not None
        match = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if match and (int(match[1]) or int(match[2])):
            problems.append(f"{function} spills {match[1]} bytes of stores, {match[2]} bytes of loads")
        match = re.search(r"\(C(7\d\d\d)\)", line)
        if match and int(match[1]) in ADVISORIES:
            problems.append(f"ptxas advisory: {line.strip()}")
        if re.search(r"\): warning #\d+-D: ", line):
            problems.append(line.strip())
    if not seen:
        problems.append("the log names no kernel: was it written by nvcc -Xptxas -v?")
    return problems


def main(argv: list[str]) -> int:
    """Prints the problems; returns the exit status."""
    path = Path(argv[0]) if argv else ROOT / "build" / "kernels" / "nvcc.log"
    try:
        text = path.read_text()
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
        return 1
    problems = check(text)
    for problem in problems:
        print(f"{path.name}: {problem}", file=sys.stderr)
    if not problems:
        kernels = text.count("Compiling entry function")
        print(f"{path.name}: {kernels} kernels, no spills, no advisories, no warnings")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
