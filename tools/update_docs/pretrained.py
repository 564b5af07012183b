"""Blocks about a pretrained model with htree under its full-attention layers (examples/pretrained.py)."""

from __future__ import annotations

import statistics

from .common import length, load, markdown, on_cpu, on_gpu

RUN = "`python examples/pretrained.py --install`"
ORDER = ("dense", "linear", "ntk", "yarn", "window", "htree")


def found() -> list[dict]:
    """What was measured, on a CPU and on a GPU."""
    return [report for name in ("cpu", "gpu") if (report := load(f"pretrained_{name}")) is not None]


def machine(report: dict) -> str:
    """With the days of all units: a log grows from run to run."""
    days = sorted({unit.get("date", report["date"]) for unit in report["units"].values()})
    return (on_gpu if "gpu" in report else on_cpu)({**report, "date": " and ".join(days)})


def rank(arm: str) -> tuple:
    """Rivals first, then trees: plain ones by rate and top_k, then those with a window or divided positions."""
    kind, *rest = arm.split(":")
    number = float(rest[0]) if rest else 0.0
    options = [x for x in rest[1:] if x[0] != "r"]
    rate = next((int(x[1:]) for x in rest[1:] if x[0] == "r"), 16)
    return ORDER.index(kind), len(options), "".join(options), rate, number


def cell(row: dict | None) -> str:
    """The loss of the reference, and of other arms the difference to it, with the standard error."""
    if row is None:
        return ""
    if row["arm"] == row["reference"]:
        return f"{row['nll']:.3f}"
    return f"{row['difference']:+.3f} ({row['difference_error']:.3f})"


def over_texts(rows: list[dict]) -> tuple[float, float]:
    """Mean of the texts' differences, and its standard error over the texts (of one text, over its blocks)."""
    values = [row["difference"] for row in rows]
    if len(values) < 2:
        return values[0], rows[0]["difference_error"]
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def nll(report: dict, T: int) -> str:
    rows = [row for row in report["nll"] if row["T"] == T]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    arms = sorted({row["arm"] for row in rows}, key=rank)
    at = {(row["arm"], row["text"]): row for row in rows}
    lines = []
    for arm in arms:
        of_arm = [at[arm, text] for text in texts if (arm, text) in at]
        shared = [(row["overlap"], row["union"]) for row in of_arm if row["overlap"]]
        shares = [f"{statistics.fmean(column):.{2 - i}f}" for i, column in enumerate(zip(*shared))]
        mean = "{:+.3f} ({:.3f})".format(*over_texts(of_arm)) if len(of_arm) > 1 else ""
        if arm == of_arm[0]["reference"]:
            mean = f"{statistics.fmean(row['nll'] for row in of_arm):.3f}"
        if of_arm and 1 < len(of_arm) < len(texts):
            mean += f", {len(of_arm)} texts"
        lines.append([f"`{arm}`", *(cell(at.get((arm, text))) for text in texts), mean, ", ".join(shares)])
    windows = max(row["windows"] for row in rows)
    several = f", {windows} windows of each text" if windows > 1 else ""
    header = ["arm", *texts, "mean of texts", "neighbours share, union of 16"]
    return f"{length(T)} tokens{several}:\n\n" + markdown(header, lines)


def passkeys(report: dict) -> str:
    rows = report["passkey"]
    lengths = sorted({row["T"] for row in rows})
    at = {(row["arm"].split(":")[0] if row["arm"].startswith(("linear", "ntk", "yarn")) else row["arm"], row["T"]): row
          for row in rows}  # fmt: skip
    arms = sorted({arm for arm, _ in at}, key=rank)
    lines = [
        [f"`{arm}`", *(f"{at[arm, T]['right']} of {at[arm, T]['needles']}" if (arm, T) in at else "" for T in lengths)]
        for arm in arms
    ]
    return "Passkeys found (the interpolations divide by T / 32K):\n\n" + markdown(
        ["arm", *(length(T) for T in lengths)], lines
    )


def pretrained() -> str:
    """A table of losses for every length, and the passkeys."""
    parts = []
    for report in found():
        seconds = "cpu_seconds" if "gpu" not in report else "seconds"
        spent = sum(unit.get(seconds, 0) for unit in report["units"].values())
        parts.append(
            "Mean negative log-likelihood of the last quarter, in nats: of the reference as it is, of the other arms "
            "the difference to it with its standard error over blocks of 128 tokens; of the mean of the texts, over "
            "the texts. The reference is dense attention, beyond the trained 32K with linear interpolation "
            f"({machine(report)}; {spent:,.0f} {'CPU seconds' if 'gpu' not in report else 'seconds'} for "
            f"{len(report['units'])} units)."
        )
        parts += [nll(report, T) for T in sorted({row["T"] for row in report["nll"]})]
        if report["passkey"]:
            parts.append(passkeys(report))
    return "\n\n".join(parts) if parts else f"Not measured yet: {RUN}."


def _costs(report: dict, T: int, arms: tuple[str, ...]) -> str:
    said = []
    for arm in arms:
        rows = [row for row in report["nll"] if (row["T"], row["arm"]) == (T, arm)]
        if rows:
            mean, error = over_texts(rows)
            said.append(f"{mean:.2f} ± {error:.2f} with top_k {arm.split(':')[1]}")
    return " and ".join(said)


def pretrained_layer() -> str:
    """What one such layer takes on the PyTorch backend."""
    report = load("pretrained_layer_gpu")
    if report is None:
        return f"A layer's time on a GPU: not measured yet, {RUN}."
    (f,) = report["figures"]
    return (
        f"A layer of {length(f['T'])} queries, {f['H']} heads on {f['H_kv']}, head dimension {f['K']}, {f['dtype']}, "
        f"top_k {f['top_k']}, takes {f['ms'] / 1e3:.2f} s on the PyTorch backend, PyTorch's dense attention "
        f"{f['dense']['ms'] / 1e3:.2f} s ({on_gpu(report)}; `python -m htree_cuda bench forward --device cuda "
        f"--backend torch --dtype bfloat16 --heads 4 --kv-heads 1 --dim 256 --lengths 131072`)."
    )


def pretrained_short() -> str:
    """The README's line: what it costs a model that was trained with dense attention."""
    unknown = f"- what a pretrained model loses by it without training matters to you: not measured yet, {RUN};"
    reports = found()
    if not reports:
        return unknown
    report = reports[-1]
    arms = ("htree:64", "htree:256")
    lengths = sorted({row["T"] for row in report["nll"] if row["arm"] in arms})
    near, far = [T for T in lengths if T <= 32768], [T for T in lengths if T > 32768]
    if not near:
        return unknown
    texts = len({row["text"] for row in report["nll"] if row["T"] == near[0]})
    line = (
        f"- a pretrained model has to stay as good without training: over {texts} texts Gemma 3 270M loses, in "
        f"nats a token, {_costs(report, near[0], arms)} at {length(near[0])} tokens"
    )
    if far:
        T = 131072 if 131072 in far else far[-1]
        plain = [row for row in report["nll"] if row["T"] == T and row["arm"] == "dense"]
        line += (
            f"; at {length(T)}, {T // 32768} times its trained length, {_costs(report, T, arms)} beside linear "
            f"interpolation (dense attention as trained: {over_texts(plain)[0]:.2f})"
        )
    return f"{line} ([docs/guides/pretrained.md](docs/guides/pretrained.md))."


BLOCKS = {"pretrained": pretrained, "pretrained_short": pretrained_short, "pretrained_layer": pretrained_layer}
