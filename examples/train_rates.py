"""Does a tree of 32 or 64 children a node learn what one of 16 learns? Small decoders, the same but for the tree.

    python examples/train_rates.py                       # two budgets, three rates, both tasks, three seeds; one GPU
    python examples/train_rates.py --preset cpu --jobs 2 --seeds 0     # the same at a smaller scale, on CPU cores

A budget is the number of candidates that a query sees in a layer, top_k * compression_rate. Trees of one budget read
the same number of keys; a larger rate reads them from fewer, longer runs of tokens. The trees of half the budget show
what halving top_k costs. Dense attention is the reference.

Model, tasks, data and protocol are those of `examples/train_bytes.py`. htree attention runs on the PyTorch backend, for
every tree alike. Runs are processes side by side, each saved at its evaluations: an interrupted study goes on where it
was. docs/training_study.md has the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_bytes import Preset, Recall, Run, Stage, Task, Text, numbers

from htree_cuda.bench.protocol import identity
from htree_cuda.torch_backend import chunks

TREES = ((1, 1), (2, 1 / 2), (4, 1 / 4), (1, 2), (2, 1), (4, 1 / 2))  # (compression_rate, top_k) over the preset's
TASKS = {"text": "loss", "recall": "accuracy"}
COLORS = {0: "#4c9f70", 1: "#7a5195"}

PRESETS = {
    "gpu": Preset(
        name="rates_gpu", d_model=64, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=16, qk_norm=True, rope_base=1e6,
        compression_rate=16, top_k=16,
        text=Task((Stage(4096, 1, 180),), lr=4e-3, eval_every=90, eval_batches=16),
        recall=Task(
            (
                Stage(32, 64, 90), Stage(64, 32, 15), Stage(128, 16, 15), Stage(256, 8, 15), Stage(512, 8, 25),
                Stage(1024, 4, 25), Stage(2048, 2, 40), Stage(4096, 1, 125),
            ),
            lr=4e-3, eval_every=70, eval_batches=16,
        ),
        n_keys=8, n_values=8, n_filler=1, n_rounds=8, autocast=False,
    ),
    "cpu": Preset(
        name="rates_cpu", d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, qk_norm=True, rope_base=1e6,
        compression_rate=4, top_k=8,
        text=Task((Stage(256, 2, 40),), lr=4e-3, eval_every=20, eval_batches=4),
        recall=Task((Stage(32, 16, 20), Stage(256, 4, 20)), lr=4e-3, eval_every=20, eval_batches=4),
        n_keys=4, n_values=4, n_filler=1, n_rounds=1, autocast=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: a task, an arm ("dense", or "htree" with a tree) and a seed."""

    task: str
    rate: int  # 0: dense attention
    top_k: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}_{f'{self.rate}x{self.top_k}' if self.rate else 'dense'}_{self.seed}"


def trees(preset: Preset) -> list[tuple[int, int]]:
    """(compression_rate, top_k): three rates of the preset's budget, and the same three of twice that budget."""
    return [(int(r * preset.compression_rate), int(k * preset.top_k)) for r, k in TREES]


def jobs_of(preset: Preset, tasks: list[str], seeds: list[int]) -> list[Job]:
    """The last task first, seed by seed, the larger budget first: a study that is cut off has whole seeds."""
    shapes = sorted([(0, 0), *trees(preset)], key=lambda tree: -tree[0] * tree[1])
    return [Job(task, *shape, seed) for task in reversed(tasks) for seed in seeds for shape in shapes]


class ShortRecall(Recall):
    """Recall whose short sequences have fewer rounds of questions: at most a quarter of the tokens asks."""

    def batch(self, part: str, stage: Stage, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rounds = max(1, min(self.preset.n_rounds, stage.T // (4 * self.preset.n_keys)))
        return Recall(dataclasses.replace(self.preset, n_rounds=rounds)).batch(part, stage, seed, step)


@functools.cache
def data_of(task: str, preset_name: str) -> Text | Recall:
    return Text() if task == "text" else ShortRecall(PRESETS[preset_name])


def run(work: tuple[Job, str, Path, str, int]) -> tuple[Job, dict]:
    """One job in a process of its own, of which there are at_once."""
    job, preset_name, out, device, at_once = work
    done = out / f"{job.name}.json"
    if done.exists():
        return job, json.loads(done.read_text())
    torch.set_num_threads(1)
    if device == "cuda":  # a call holds more than its chunk: a quarter of the process's share
        chunks.CHUNK_BYTES_GPU = torch.cuda.get_device_properties(0).total_memory // (4 * at_once)
    preset = PRESETS[preset_name]
    if job.rate:
        preset = dataclasses.replace(preset, compression_rate=job.rate, top_k=job.top_k)
    data = data_of(job.task, preset_name)
    arm = "htree" if job.rate else "dense"
    training = Run(preset, job.task, arm, job.seed, data, torch.device(device), "torch")
    path = out / f"{job.name}.pt"
    training.resume(path)
    training.train(path)
    T = training.task.stages[-1].T
    found = {**training.result(), "rate": job.rate, "top_k": job.top_k, "data": data.about}
    if job.rate:
        found["tree"] = preset.tree(T)
    done.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n")
    os.replace(done.with_suffix(".part"), done)
    path.unlink()
    if device == "cuda":
        torch.cuda.empty_cache()
    return job, found


def finals(report: dict, task: str, rate: int, top_k: int) -> list[float]:
    """What the runs of one tree (rate 0: of dense attention) ended with, by seed; seeds that others lack are left out,
    as long as there are two that all have."""
    runs = report["tasks"].get(task, [])
    seeds: dict[tuple[int, int], set[int]] = {}
    for x in runs:
        seeds.setdefault((x["rate"], x["top_k"]), set()).add(x["seed"])
    common = set.intersection(*seeds.values()) if seeds else set()
    own = [x for x in runs if (x["rate"], x["top_k"]) == (rate, top_k) and (len(common) < 2 or x["seed"] in common)]
    return [x["final"][TASKS[task]] for x in sorted(own, key=lambda x: x["seed"])]


def show(report: dict, shapes: list[tuple[int, int]]) -> None:
    for task, what in TASKS.items():
        for rate, top_k in [(0, 0), *shapes]:
            values = finals(report, task, rate, top_k)
            if values:
                label = f"rate {rate:3}, top_k {top_k:4}" if rate else "dense"
                each = ", ".join(f"{x:.4f}" for x in values)
                print(f"{task:7} {label:20} {what} {statistics.fmean(values):.4f}   ({each})")


def draw(report: dict, shapes: list[tuple[int, int]], path: Path) -> None:
    """Both tasks over the rate, one line a budget: mean of the seeds, bars over their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in TASKS if report["tasks"].get(name)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.8 * len(names), 3.4), layout="constrained", squeeze=False)
    budgets = sorted({r * k for r, k in shapes})
    for ax, name in zip(axes[0], names):
        for i, budget in enumerate(budgets):
            points = [(r, finals(report, name, r, k)) for r, k in shapes if r * k == budget]
            points = [(r, x) for r, x in points if x]
            if points:
                means = [statistics.fmean(x) for _, x in points]
                reach = [
                    [m - min(x) for (_, x), m in zip(points, means)],
                    [max(x) - m for (_, x), m in zip(points, means)],
                ]
                ax.errorbar(
                    [r for r, _ in points], means, yerr=reach, marker="os"[i], capsize=3, color=COLORS[i],
                    label=f"{budget:,} candidates a layer",
                )  # fmt: skip
        dense = finals(report, name, 0, 0)
        if dense:
            ax.axhline(statistics.fmean(dense), color="#444444", linestyle="--", linewidth=1, label="dense")
        ax.set_xscale("log", base=2)
        rates = sorted({r for r, _ in shapes})
        ax.set_xticks(rates, [str(r) for r in rates])
        ax.set(xlabel="compression_rate", title=f"{name}, T = {report['T'][name]:,}")
        ax.set_ylabel("held-out loss, nats per byte" if name == "text" else "accuracy")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS), help="text, recall")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], metavar="0,1,2")
    parser.add_argument("--jobs", type=int, default=14, help="runs side by side")
    parser.add_argument("--out", type=Path, default=Path("demo_out") / "rates", help="runs, JSON log and PNG")
    args = parser.parse_args(argv)
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"--tasks: {', '.join(sorted(unknown))}: must be of {', '.join(TASKS)}")
    preset, device = PRESETS[args.preset], "cuda" if args.preset == "gpu" else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    runs_at = args.out / f"runs_{args.preset}"
    runs_at.mkdir(exist_ok=True)
    jobs, shapes = jobs_of(preset, args.tasks, args.seeds), trees(preset)
    schedule = {name: dataclasses.asdict(getattr(preset, name)) for name in TASKS}
    report = {
        **identity(device), "preset": dataclasses.asdict(preset), "schedule": schedule, "at_once": args.jobs,
        "T": {name: getattr(preset, name).stages[-1].T for name in TASKS}, "tasks": {name: [] for name in TASKS},
    }  # fmt: skip
    log, begin = args.out / f"train_rates_{args.preset}.json", time.monotonic()
    work = [(job, args.preset, runs_at, device, args.jobs) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(jobs))) as pool:
        for i, (job, found) in enumerate(pool.imap_unordered(run, work, chunksize=1), 1):
            report["tasks"][job.task].append(found)
            report["wall_s"] = round(time.monotonic() - begin, 1)
            log.write_text(json.dumps(report, indent=1) + "\n")
            what = TASKS[job.task]
            print(
                f"[{report['wall_s']:6.1f} s] {i}/{len(jobs)} {job.name}: {what} {found['final'][what]:.4f}", flush=True
            )
    show(report, shapes)
    try:
        draw(report, shapes, log.with_suffix(".png"))
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")
    print(f"wrote {log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
