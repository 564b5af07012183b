"""Blocks about the training study."""

from __future__ import annotations

import statistics

from .common import NOT_MEASURED, load, markdown, on_cpu, on_gpu


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def training_table(report: dict) -> str:
    """One row an arm; mean (least .. greatest) over the seeds, and tokens per second where they were measured."""
    tasks = report["tasks"]
    finals = {
        name: {arm: [run["final"] for run in task["runs"] if run["arm"] == arm] for arm in ("dense", "htree", "window")}
        for name, task in tasks.items()
    }
    speed = {(found["T"], found["arm"]): found["tokens_per_s"] for found in report.get("throughput", [])}
    lengths = sorted({T for T, _ in speed})
    dense = statistics.fmean(final["loss"] for final in finals["text"]["dense"])
    rows = []
    for arm in ("dense", "htree", "window"):
        losses = [final["loss"] for final in finals["text"][arm]]
        rows.append([
            arm,
            _spread(losses, ".3f"),
            f"{100 * (statistics.fmean(losses) / dense - 1):+.1f}%",
            _spread([final["accuracy"] for final in finals["recall"][arm]], ".1%"),
            *(f"{speed[T, arm]:,}" for T in lengths),
        ])  # fmt: skip
    text, recall = tasks["text"], tasks["recall"]
    header = [
        "arm", "text: held-out loss, nats per byte", "to dense", f"recall (chance {recall['data']['chance']:.1%})",
        *(f"tokens/s, T {T:,}" for T in lengths),
    ]  # fmt: skip
    seeds = {run["seed"] for task in tasks.values() for run in task["runs"]}
    return (
        f"{len(seeds)} seeds, mean (least .. greatest). Text at T = {text['tree']['T']:,}, recall at T = "
        f"{recall['tree']['T']:,}, {text['tree']['layers']} and {recall['tree']['layers']} layers; a query visits "
        f"{text['tree']['candidates_mean']:.0f} and {recall['tree']['candidates_mean']:.0f} candidates on average, the "
        f"width of the window; the last one {text['tree']['share_last']:.1%} and {recall['tree']['share_last']:.1%} "
        "of T.\n\n" + markdown(header, rows)
    )


def _study(report: dict) -> str:
    return f"CPU preset ({report['cores']} CPU cores, {on_cpu(report)})"


def _protocol(preset: dict) -> str:
    stages = ", ".join(f"{s['T']:,} x {s['batch']} ({s['steps']})" for s in preset["recall"]["stages"])
    text = preset["text"]["stages"][0]
    return (
        f"d_model {preset['d_model']}, {preset['n_layers']} blocks, {preset['n_heads']} query heads on "
        f"{preset['n_kv_heads']} KV head{'s' if preset['n_kv_heads'] > 1 else ''} of {preset['head_dim']}, "
        f"compression_rate {preset['compression_rate']}, top_k {preset['top_k']}. Text: {text['steps']:,} steps of "
        f"{text['batch']} x {text['T']:,} bytes. Recall: {preset['n_keys']} keys, {preset['n_values']} values, kinds "
        f"of filler: {preset['n_filler']}; stages T x batch (steps): {stages}."
    )


def training() -> str:
    report = load("train_cpu")
    return f"{_study(report)}: {_protocol(report['preset'])}\n\n" + training_table(report)


def training_packed() -> str:
    """The text as packed documents, a row an arm; a run may lack seeds."""
    report = load("train_cpu_packed")
    if report is None:
        return "Not measured yet: `python examples/train_bytes.py --packed`."
    runs = report["tasks"]["text"]["runs"]
    stage = report["preset"]["text"]["stages"][0]
    dense = statistics.fmean(run["final"]["loss"] for run in runs if run["arm"] == "dense")
    rows = []
    for arm in ("dense", "htree", "window"):
        finals = [run["final"] for run in runs if run["arm"] == arm]
        losses = [final["loss"] for final in finals]
        rows.append([
            arm,
            ", ".join(f"{loss:.3f}" for loss in losses),
            f"{statistics.fmean(losses):.3f}",
            f"{100 * (statistics.fmean(losses) / dense - 1):+.1f}%",
            f"{statistics.fmean(final['accuracy'] for final in finals):.1%}",
        ])  # fmt: skip
    header = ["arm", "held-out loss, by seed", "mean", "to dense", "next byte right"]
    return (
        f"{_study(report)}: {stage['steps']:,} steps of documents packed to {stage['batch']} x {stage['T']:,} bytes."
        "\n\n" + markdown(header, rows)
    )


def training_short() -> str:
    report = load("train_cpu")
    return f"{_study(report)}, " + training_table(report)


def training_gpu() -> str:
    """The log of the GPU preset; an arm may lack seeds."""
    report = load("train_gpu")
    if report is None:
        return NOT_MEASURED
    preset = report["preset"]
    speed = {(found["T"], found["arm"]): found["tokens_per_s"] for found in report["throughput"]}
    lengths = sorted({T for T, _ in speed})
    tree = report["tasks"]["text"]["tree"]
    parts = [
        f"{on_gpu(report)}; {preset['n_heads']} query heads on {preset['n_kv_heads']} KV heads of "
        f"{preset['head_dim']}, {preset['n_layers']} blocks; {tree['layers']} layers, {tree['candidates_mean']:.0f} "
        f"candidates a query on average, the last query visits {tree['share_last']:.1%} of T.\n"
    ]
    for name, what in (("text", "loss"), ("recall", "accuracy")):
        task = report["tasks"][name]
        stages = ", ".join(f"{s['T']:,} x {s['batch']} ({s['steps']:,})" for s in preset[name]["stages"])
        header = ["arm", "held-out loss, by seed" if name == "text" else "accuracy, by seed", "mean", "seconds a run"]
        header += [f"tokens/s, T {T:,}" for T in lengths if name == "text"]
        rows = []
        for arm in ("dense", "htree", "window"):
            runs = [run for run in task["runs"] if run["arm"] == arm]
            finals = [run["final"][what] for run in runs]
            show = "{:.3f}".format if name == "text" else "{:.1%}".format
            seconds = statistics.fmean(run["seconds"] for run in runs)
            rows.append([arm, ", ".join(map(show, finals)), show(statistics.fmean(finals)), f"{seconds:.0f}"])
            if name == "text":
                rows[-1] += [f"{speed[T, arm]:,}" for T in lengths]
        chance = f", chance {task['data']['chance']:.1%}" if name == "recall" else ""
        parts.append(f"{name.capitalize()}{chance}: T x batch (steps) {stages}.\n\n" + markdown(header, rows))
    return "\n".join(parts)


def train_steps() -> str:
    """Step times of htree and dense attention side by side."""
    report = load("train_steps_gpu")
    if report is None:
        return (
            "Steps: not measured yet, `python examples/train_bytes.py --preset gpu --time-steps 32768,131072` on a "
            "Hopper machine."
        )
    steps = {(found["T"], found["arm"]): found["step_ms"] for found in report["throughput"]}
    rows = [
        [
            f"{T:,}",
            f"{steps[T, 'dense']:.1f}",
            f"{steps[T, 'htree']:.1f}",
            f"{steps[T, 'htree'] / steps[T, 'dense']:.2f}",
        ]
        for T in sorted({T for T, _ in steps})
    ]
    preset = report["preset"]
    return (
        f"A training step on one sequence, {preset['n_heads']} query heads on {preset['n_kv_heads']} KV heads of "
        f"{preset['head_dim']}, top_k {preset['top_k']} ({on_gpu(report)}):\n\n"
        + markdown(["T", "dense, ms", "htree, ms", "htree / dense"], rows)
    )


def train_rates() -> str:
    """What trees of larger rates learn beside smaller ones of the same budget, and beside half of the budget."""
    report = load("train_rates_gpu")
    if report is None:
        return "Rates: not measured yet, `python examples/train_rates.py` on a GPU."
    preset = report["preset"]
    shapes = sorted(
        {(run["rate"], run["top_k"]) for runs in report["tasks"].values() for run in runs},
        key=lambda shape: (shape[0] * shape[1], shape[0]),
    )
    common = {  # a study that was cut off lacks some runs of its last seed
        task: set.intersection(*({x["seed"] for x in runs if (x["rate"], x["top_k"]) == shape} for shape in shapes))
        for task, runs in report["tasks"].items()
    }
    rows = []
    for rate, top_k in shapes:
        row = ["dense" if not rate else f"{rate} x {top_k}", f"{rate * top_k:,}" if rate else ""]
        for task, what, form in (("text", "loss", ".3f"), ("recall", "accuracy", ".1%")):
            values = [
                run["final"][what]
                for run in sorted(report["tasks"][task], key=lambda run: run["seed"])
                if (run["rate"], run["top_k"]) == (rate, top_k) and run["seed"] in common[task]
            ]
            row.append(
                f"{statistics.fmean(values):{form}} ({', '.join(f'{x:{form}}' for x in values)})" if values else ""
            )
        rows.append(row)
    chance = next((run["data"]["chance"] for run in report["tasks"]["recall"]), None)
    stages = "; ".join(
        f"{task} " + ", ".join(f"{s['T']:,} x {s['batch']} ({s['steps']})" for s in report["schedule"][task]["stages"])
        for task in ("text", "recall")
        if report["tasks"][task]
    )
    return (
        f"d_model {preset['d_model']}, {preset['n_layers']} blocks, {preset['n_heads']} query heads on "
        f"{preset['n_kv_heads']} of {preset['head_dim']}, PyTorch backend; T x batch (steps): {stages}. Mean, and each "
        f"seed ({on_gpu(report)}; {report['at_once']} runs side by side, {report['wall_s']:.0f} s in all).\n\n"
        + markdown(
            ["rate x top_k", "candidates a layer", "text: held-out loss",
             "recall" + (f" (chance {chance:.1%})" if chance else "")],
            rows,
        )
    )  # fmt: skip


BLOCKS = {
    "train_rates": train_rates,
    "train_steps": train_steps,
    "training": training,
    "training_packed": training_packed,
    "training_short": training_short,
    "training_gpu": training_gpu,
}
