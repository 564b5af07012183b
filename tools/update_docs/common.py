"""What the writers of generated blocks share: reading results, tables, and the words for a machine."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "Not measured yet: `make gpu-bench` on a Hopper machine."


# Results of earlier builds name phases and kernels by retired words.
PHASES = {
    "pooling": "pool",
    "packing": "pack",
    "selection": "select",
    "first layer: choice": "entry layer: score",
    "first layer: values": "entry layer: attend",
    "layers below: choice": "selected layers: score",
    "layers below: values": "selected layers: attend",
    "queries": "dq_selected",
    "nodes": "dkdv_selected",
    "first queries": "dq_entry",
    "first nodes": "dkdv_entry",
}


def phases(times: dict[str, float]) -> dict[str, float]:
    """Times by the names that phases and kernels have in the docs."""
    return {PHASES.get(name, name): ms for name, ms in times.items()}


def load(name: str) -> dict | None:
    """The result `benchmarks/results/<name>.json`; None where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def load_all(pattern: str) -> list[dict]:
    """Results whose name matches, the oldest first."""
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{pattern}.json"))]
    return sorted(reports, key=lambda report: report.get("date", ""))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def star(figure: dict) -> str:
    """The mark of a figure that a run of other sources measured: the run that was to measure it again ended before."""
    return "\\*" if "content_hash" in figure else ""


def other_sources(figures: list[dict]) -> str:
    """What marked figures are."""
    if not any(star(figure) for figure in figures):
        return ""
    return "\n\\* Measured with other kernels than the rest; the file of figures has their content hash.\n"


def on_cpu(report: dict) -> str:
    """The machine of a report that was made on a CPU."""
    threads = f"{report['threads']} thread{'s' * (report['threads'] > 1)}"
    return f"{report['cpu']}, {threads}, torch {report['torch']}, {report['date']}"


def on_gpu(report: dict) -> str:
    """The machine of a report that was made on a GPU."""
    return f"one {report['gpu']}, driver {report['driver']}, torch {report['torch']}, {report['date']}"


def briefly(report: dict) -> str:
    """The machine for a newcomer; `on_gpu` names its software too."""
    return f"one {report['gpu']}, {report['date']}"


def length(T: int) -> str:
    """A sequence length as people say it: 65536 is 64K."""
    if T % 2**20 == 0:
        return f"{T // 2**20}M"
    return f"{T // 1024}K" if T % 1024 == 0 else f"{T:,}"
