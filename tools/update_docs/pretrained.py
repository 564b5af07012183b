"""Blocks about a pretrained model with htree under its full-attention layers (examples/pretrained.py)."""

from __future__ import annotations

import statistics

from .common import length, load, markdown, on_cpu, on_gpu

RUN = "`python examples/pretrained.py --install`"


def found() -> list[dict]:
    """What was measured, on a CPU and on a GPU."""
    return [report for name in ("cpu", "gpu") if (report := load(f"pretrained_{name}")) is not None]


def machine(report: dict) -> str:
    return on_gpu(report) if "gpu" in report else on_cpu(report)


def cell(row: dict | None) -> str:
    """The loss of dense attention, and of other arms the difference to it, with the standard error."""
    if row is None:
        return ""
    if row["arm"] == "dense" or row["difference"] is None:
        return f"{row['nll']:.3f}"
    return f"{row['difference']:+.3f} ({row['difference_error']:.3f})"


def nll(report: dict, T: int) -> str:
    rows = [row for row in report["nll"] if row["T"] == T]
    texts, arms = (list(dict.fromkeys(row[name] for row in rows)) for name in ("text", "arm"))
    at = {(row["arm"], row["text"]): row for row in rows}
    lines = []
    for arm in arms:
        overlaps = [at[arm, text]["overlap"] for text in texts if (arm, text) in at and at[arm, text]["overlap"]]
        shared = f"{statistics.fmean(overlaps):.2f}" if overlaps else ""
        lines.append([f"`{arm}`", *(cell(at.get((arm, text))) for text in texts), shared])
    return f"{length(T)} tokens:\n\n" + markdown(["arm", *texts, "neighbours share"], lines)


def pretrained() -> str:
    """A table of losses for every length, and the passkeys."""
    parts = []
    for report in found():
        cpu = sum(unit.get("cpu_seconds", 0) for unit in report["units"].values())
        cost = f"; {cpu:,.0f} CPU seconds for {len(report['units'])} units" if cpu and "gpu" not in report else ""
        parts.append(
            "Mean negative log-likelihood of the last quarter, in nats: of dense attention as it is, of the other arms "
            f"the difference to it with its standard error over blocks of 128 tokens ({machine(report)}{cost})."
        )
        parts += [nll(report, T) for T in sorted({row["T"] for row in report["nll"]})]
        if report["passkey"]:
            rows = [[length(r["T"]), f"`{r['arm']}`", f"{r['right']} of {r['needles']}"] for r in report["passkey"]]
            parts.append("Passkeys found:\n\n" + markdown(["tokens", "arm", "right"], rows))
    return "\n\n".join(parts) if parts else f"Not measured yet: {RUN}."


def pretrained_short() -> str:
    """The README's line: what it costs a model that was trained with dense attention, at the longest length."""
    reports = found()
    if not reports:
        return f"What a pretrained model loses by it without training: not measured yet, {RUN}."
    report = reports[-1]
    rows = [r for r in report["nll"] if r["arm"].startswith("htree:") and r["difference"] is not None]
    if not rows:
        return f"What a pretrained model loses by it without training: not measured yet, {RUN}."
    longest = max(row["T"] for row in rows)
    arms: dict[str, list[dict]] = {}
    for row in rows:
        if row["T"] == longest:
            arms.setdefault(row["arm"], []).append(row)
    costs = []
    for arm, of_texts in arms.items():
        mean = statistics.fmean(row["difference"] for row in of_texts)
        error = sum(row["difference_error"] ** 2 for row in of_texts) ** 0.5 / len(of_texts)
        costs.append(f"{mean:+.2f} ± {error:.2f} nats with {arm.replace('htree:', 'top_k ').replace(':r', ', r ')}")
    texts = len({row["text"] for row in rows if row["T"] == longest})
    return (
        "A pretrained model (Gemma 3 270M, its three full-attention layers by htree, no training) loses, over the last "
        f"{longest // 4:,} of {longest:,} tokens of {texts} text{'s' * (texts > 1)}: {'; '.join(costs)} "
        "([docs/guides/pretrained.md](docs/guides/pretrained.md))."
    )


BLOCKS = {"pretrained": pretrained, "pretrained_short": pretrained_short}
