"""Trains a small byte decoder with DeepSeek Sparse Attention through both stages, beside dense attention.

    python examples/train_dsa.py                                 # seed 0, three minutes of one CPU core
    python examples/train_dsa.py --preset gpu --seeds 0,1,2 --side-by-side   # T = 4,096, one Hopper GPU

Each seed, on the bytes of the running Python's own sources and documentation:

    dense     the decoder learns with dense attention: htree_cuda.DSAttention in stage "warmup", without the indexer
    warm-up   the decoder is frozen; every layer's indexer learns from dense attention (dense_indexer_loss)
    sparse    every query attends to the index_topk keys that the indexer selects; the decoder learns from the loss of
              the text alone, the indexer from its own alone
    control   the decoder of the end of the dense stage goes on with dense attention, on the batches of the sparse stage

Measured on held-out text while it learns: the loss of the text of sparse attention and of the control at equal steps;
the KL divergence of the indexer from the attention (dense in the warm-up, of the selected keys in the sparse stage);
and how well the indexer selects, over queries that see at least twice index_topk keys, beside the most recent keys:

    mass      the share of dense attention, summed over the heads, that the selected keys have
    recall    the share of the index_topk keys with the most attention that are selected

Writes every number as JSON and the curves as PNG; docs/guides/dsa.md has the results.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_bytes import Stage, Text, numbers

from htree_cuda import DSAttention
from htree_cuda.bench.protocol import identity
from htree_cuda.bench.tables import table
from htree_cuda.demo.progress import progress

STAGES = ("dense", "warmup", "sparse", "control")
COLORS = {"sparse": "#d95f0e", "control": "#444444", "recent": "#3b6fb6", "best": "#999999"}
CHUNK = 256  # queries whose attention to every key exists at one time


@dataclass(frozen=True)
class Preset:
    """Model, stages and schedule. T tokens a sequence, batch sequences a step."""

    name: str
    d_model: int
    n_layers: int
    attention: dict
    T: int
    batch: int
    steps: dict[str, int]  # of each stage; the control has those of the sparse stage
    lr: float
    sparse_lr: float  # of the decoder in the sparse stage and in the control
    index_lr: float
    eval_every: int
    eval_batches: int
    autocast: bool

    @property
    def topk(self) -> int:
        return self.attention["index_topk"]


LAYOUT = {"rope_base": 10000.0, "rope_interleaved": True, "index_rope_interleaved": False}
PRESETS = {
    "cpu": Preset(
        name="cpu", d_model=64, n_layers=2, T=512, batch=4, lr=4e-3, sparse_lr=1e-3, index_lr=1e-2,
        steps={"dense": 400, "warmup": 120, "sparse": 240}, eval_every=40, eval_batches=8, autocast=False,
        attention={
            "n_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "v_head_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 96,
        },
    ),
    "gpu": Preset(
        name="gpu", d_model=512, n_layers=4, T=4096, batch=4, lr=1e-3, sparse_lr=3e-4, index_lr=2e-3,
        steps={"dense": 400, "warmup": 80, "sparse": 200}, eval_every=40, eval_batches=4, autocast=True,
        attention={
            "n_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
            "v_head_dim": 64, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 512,
        },
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """x -> (x, loss of the indexer)."""

    def __init__(self, d_model: int, attention: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(d_model, eps=1e-6), attention
        self.mlp_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model, bias=False), nn.GELU(), nn.Linear(4 * d_model, d_model, bias=False)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, loss = self.attention(self.attention_norm(x))
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), loss


class Decoder(nn.Module):
    """Pre-norm decoder: tokens [B, T] int64 -> (logits [B, T, 256], mean loss of the indexers or None)."""

    def __init__(self, preset: Preset, backend: str):
        super().__init__()
        self.embedding = nn.Embedding(Text.vocabulary, preset.d_model)
        self.blocks = nn.ModuleList(
            Block(preset.d_model, DSAttention(preset.d_model, backend=backend, **preset.attention, **LAYOUT))
            for _ in range(preset.n_layers)
        )
        self.norm = nn.RMSNorm(preset.d_model, eps=1e-6)
        self.head = nn.Linear(preset.d_model, Text.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        x, losses = self.embedding(tokens), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.head(self.norm(x)), None if losses[0] is None else torch.stack(losses).mean()

    def set(self, attention: str, *, indexer_loss: bool) -> None:
        """attention: "sparse" or "warmup", which is dense; in eval mode a layer computes no loss of its indexer."""
        for block in self.blocks:
            block.attention.stage = attention
            block.attention.train(indexer_loss)

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(parameters of the model, of the indexers)."""
        model, indexers = [], []
        for name, p in self.named_parameters():
            (indexers if ".indexer." in name else model).append(p)
        return model, indexers


# ------------------------------------------------------------------------------------------------------------ measure


def attention_to_every_key(layer: DSAttention, q: Tensor, kv: Tensor, first: int) -> Tensor:
    """[n, T]: dense attention of one sequence's queries q [n, heads, nope + rope] at positions from first on, mean over
    the heads; kv [T, kv_lora_rank + rope]."""
    absorbed = layer.absorb(q[None])[0].float()
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("nhd,td->hnt", absorbed, kv.float()) * layer.sm_scale
    position = torch.arange(first, first + len(q), device=q.device)
    hidden = torch.arange(len(kv), device=q.device) > position[:, None]
    return scores.masked_fill_(hidden, float("-inf")).softmax(2).mean(0)


def selected_share(target: Tensor, wanted: Tensor, selected: Tensor) -> tuple[float, float]:
    """(mass, recall) summed over the queries: target [n, T], wanted and selected [n, T] bool."""
    return float(target[selected].sum()), float((wanted & selected).sum() / wanted.sum() * len(target))


@torch.no_grad()
def measure_layer(layer: DSAttention, x: Tensor, topk: int) -> dict[str, list[float]]:
    """{selection: [mass, recall]} of one layer on x [1, T, d_model], mean over the queries that see 2 topk keys."""
    from htree_cuda import indexer_topk

    T = x.shape[1]
    q, kv, indexer = layer.project(x)
    indices = indexer_topk(*indexer, topk, q_start=0, backend=layer.backend)[0, :, 0].long()
    sums = {name: [0.0, 0.0] for name in ("indexer", "recent", "best")}
    for first in range(2 * topk - 1, T, CHUNK):
        rows = slice(first, min(first + CHUNK, T))
        target = attention_to_every_key(layer, q[0, rows], kv[0, :, 0], first)
        blank = torch.zeros_like(target, dtype=torch.bool)
        wanted = blank.scatter(1, target.topk(topk, 1).indices, True)
        distance = torch.arange(first, rows.stop, device=x.device)[:, None] - torch.arange(T, device=x.device)
        selections = {
            "indexer": blank.scatter(1, indices[rows], True),
            "recent": (distance >= 0) & (distance < topk),
            "best": wanted,
        }
        for name, selected in selections.items():
            for i, share in enumerate(selected_share(target, wanted, selected)):
                sums[name][i] += share
    count = T - (2 * topk - 1)
    return {name: [value / count for value in pair] for name, pair in sums.items()}


class Run:
    """One seed: the decoder, its optimizers and the log."""

    def __init__(self, preset: Preset, seed: int, text: Text, device: torch.device, backend: str):
        self.preset, self.seed, self.text, self.device = preset, seed, text, device
        torch.manual_seed(seed)
        self.model = Decoder(preset, backend).to(device)
        model, indexers = self.model.parts()
        self.optimizers = {
            "model": torch.optim.AdamW(model, lr=preset.lr, betas=(0.9, 0.95)),
            "indexer": torch.optim.AdamW(indexers, lr=preset.index_lr, betas=(0.9, 0.95), weight_decay=0.0),
        }
        self.step = 0
        self.log: list[dict] = []
        self.seconds: dict[str, float] = {}

    def batch(self, part: str, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        batch = self.text.batch(part, Stage(self.preset.T, size, 1), seed, step)
        return tuple(x.to(self.device).long() for x in batch)

    def losses(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """(of the text, of the indexers)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.preset.autocast):
            logits, loss = self.model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), loss

    @torch.no_grad()
    def evaluate(self, stage: str) -> dict:
        """On the same held-out sequences for every stage and seed."""
        attention = "sparse" if stage == "sparse" else "warmup"
        batches = [self.batch("validation", -1, i, 1) for i in range(self.preset.eval_batches)]
        self.model.set(attention, indexer_loss=stage in ("warmup", "sparse"))
        pairs = [self.losses(*batch) for batch in batches]
        found = {"loss": statistics.fmean(float(loss) for loss, _ in pairs)}
        if stage == "control":
            return found
        if pairs[0][1] is not None:
            found["kl"] = statistics.fmean(float(kl) for _, kl in pairs)
        layers: list[dict] = []
        self.model.set(attention, indexer_loss=False)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.preset.autocast):
            for tokens, _ in batches[: max(1, self.preset.eval_batches // 4)]:
                x = self.model.embedding(tokens)
                for block in self.model.blocks:
                    layers.append(measure_layer(block.attention, block.attention_norm(x), self.preset.topk))
                    x, _ = block(x)
        for i, what in enumerate(("mass", "recall")):
            found[what] = {name: statistics.fmean(layer[name][i] for layer in layers) for name in layers[0]}
        return found

    def train_step(self, stage: str, step: int, rates: dict[str, float]) -> None:
        text_loss, indexer_loss = self.losses(*self.batch("train", self.seed, step, self.preset.batch))
        wanted = {"dense": text_loss, "control": text_loss, "warmup": indexer_loss}
        loss = text_loss + indexer_loss if stage == "sparse" else wanted[stage]
        for name, rate in rates.items():
            optimizer = self.optimizers[name]
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss.backward()
        for name in rates:
            nn.utils.clip_grad_norm_(self.optimizers[name].param_groups[0]["params"], 1.0)
            self.optimizers[name].step()

    def train(self, stage: str) -> None:
        """All steps of one stage."""
        preset, model = self.preset, self.model
        steps = preset.steps["sparse" if stage == "control" else stage]
        start = sum(preset.steps[name] for name in ("dense", "warmup")) if stage in ("sparse", "control") else self.step
        model.requires_grad_(stage != "warmup")
        for p in model.parts()[1]:
            p.requires_grad_(stage in ("warmup", "sparse"))
        began = time.perf_counter()
        for i in progress(range(steps), steps, f"seed {self.seed}, {stage}"):
            if i == 0 and stage != "dense":
                self.note(stage, start, 0)
            model.set("sparse" if stage == "sparse" else "warmup", indexer_loss=stage in ("warmup", "sparse"))
            ramp = min(1.0, (i + 1) / max(1, steps // 20))
            end = min(1.0, 0.1 + 0.9 * (steps - i) / max(1, steps // 4))  # down to a tenth over the last quarter
            rates = {"dense": {"model": preset.lr * ramp}, "warmup": {"indexer": preset.index_lr * min(ramp, end)}}
            later = {"model": preset.sparse_lr * min(ramp, end)}
            rates |= {"control": later, "sparse": later | {"indexer": preset.index_lr / 4 * min(ramp, end)}}
            self.train_step(stage, start + i, rates[stage])
            if (i + 1) % preset.eval_every == 0 or i + 1 == steps:
                self.note(stage, start, i + 1)
        self.step = start + steps
        self.seconds[stage] = round(time.perf_counter() - began, 1)

    def note(self, stage: str, start: int, i: int) -> None:
        self.log.append({"stage": stage, "step": start + i, **self.evaluate(stage)})
        entry = self.log[-1]
        extra = f", KL {entry['kl']:.4f}" if "kl" in entry else ""
        if "mass" in entry:
            extra += f", mass {entry['mass']['indexer']:.1%}, recall {entry['recall']['indexer']:.1%}"
        print(f"seed {self.seed}, {stage}, step {entry['step']}: held out {entry['loss']:.4f}{extra}", flush=True)

    def run(self, keep: Callable[[dict], None] | None = None) -> dict:
        """The four stages; the control begins where the sparse one did. `keep` gets what there is after each."""
        for stage in STAGES:
            if stage == "sparse":
                kept = copy.deepcopy((self.model.state_dict(), self.optimizers["model"].state_dict()))
            if stage == "control":
                self.model.load_state_dict(kept[0])
                self.optimizers["model"].load_state_dict(kept[1])
            self.train(stage)
            if keep is not None:
                keep({"seed": self.seed, "seconds": self.seconds, "log": self.log})
        return {"seed": self.seed, "seconds": self.seconds, "log": self.log, **summary(self.log)}


# ------------------------------------------------------------------------------------------------------------- report


def summary(log: list[dict]) -> dict:
    """What the two arms and the indexer end with, and the largest distance of the arms at equal steps after the first
    evaluation of the sparse stage, which shows the moment of the change."""
    stages = {name: [entry for entry in log if entry["stage"] == name] for name in STAGES}
    pairs = list(zip(stages["sparse"], stages["control"], strict=True))
    ratios = [sparse["loss"] / control["loss"] - 1 for sparse, control in pairs]
    last = stages["sparse"][-1]
    warm = stages["warmup"]
    return {
        "sparse_loss": last["loss"], "control_loss": stages["control"][-1]["loss"], "excess": ratios[-1],
        "largest_excess": max(ratios[1:]), "kl_before": warm[0]["kl"], "kl_after": warm[-1]["kl"],
        "mass_before": warm[0]["mass"]["indexer"], "mass_warm": warm[-1]["mass"]["indexer"],
        "mass": last["mass"]["indexer"], "mass_recent": last["mass"]["recent"], "mass_best": last["mass"]["best"],
        "recall": last["recall"]["indexer"], "recall_recent": last["recall"]["recent"],
    }  # fmt: skip


COLUMNS = {
    "seed": lambda run: str(run["seed"]),
    "sparse loss": lambda run: f"{run['sparse_loss']:.4f}",
    "dense loss": lambda run: f"{run['control_loss']:.4f}",
    "excess": lambda run: f"{run['excess']:+.2%}",
    "KL of warm-up": lambda run: f"{run['kl_before']:.3f} to {run['kl_after']:.3f}",
    "mass": lambda run: f"{run['mass_before']:.1%}, {run['mass_warm']:.1%}, {run['mass']:.1%}",
    "most recent": lambda run: f"{run['mass_recent']:.1%}",
    "best": lambda run: f"{run['mass_best']:.1%}",
    "recall": lambda run: f"{run['recall']:.1%}",
    "s": lambda run: f"{sum(run['seconds'].values()):.0f}",
}


def draw(report: dict, path: Path) -> None:
    """Loss of the text, KL, and the attention on selected keys over the steps: mean of the seeds, band over them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)

    def curve(axes, stage: str, value, **style) -> None:
        logs = [[e for e in run["log"] if e["stage"] == stage and value(e) is not None] for run in report["runs"]]
        if not logs[0]:
            return
        steps = [entry["step"] for entry in logs[0]]
        columns = [[value(entry) for entry in row] for row in zip(*logs, strict=True)]
        line = axes.plot(steps, [statistics.fmean(column) for column in columns], **style)[0]
        low, high = ([bound(column) for column in columns] for bound in (min, max))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)

    curve(left, "dense", lambda e: e["loss"], color=COLORS["control"])
    curve(left, "control", lambda e: e["loss"], color=COLORS["control"], label="dense attention")
    curve(left, "sparse", lambda e: e["loss"], color=COLORS["sparse"], label="sparse attention")
    curve(middle, "warmup", lambda e: e.get("kl"), color="#4c9f70", label="warm-up: all keys")
    curve(middle, "sparse", lambda e: e.get("kl"), color=COLORS["sparse"], label="sparse stage: selected keys")
    names = {"indexer": "selected by the indexer", "recent": "most recent", "best": "most attended"}
    colors = {"indexer": COLORS["sparse"], "recent": COLORS["recent"], "best": COLORS["best"]}
    for stage in ("warmup", "sparse"):
        for name, label in names.items():
            label = label if stage == "sparse" else None
            curve(right, stage, lambda e, name=name: e["mass"][name], color=colors[name], label=label)
    topk, T = report["preset"]["attention"]["index_topk"], report["preset"]["T"]
    left.set(title="held-out loss, nats per byte")
    middle.set(title="KL of the indexer, nats", ylim=(0, None))
    right.set(title=f"attention on {topk} keys of up to {T:,}", ylim=(0, 1.02))
    steps = report["preset"]["steps"]
    for axes in (left, middle, right):
        axes.set_xlabel("step")
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        for border in (steps["dense"], steps["dense"] + steps["warmup"]):
            axes.axvline(border, color="#cccccc", linewidth=0.8, zorder=0)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def side_by_side(argv: list[str], seeds: list[int], out: Path, preset: str) -> list[dict]:
    """A process for each seed, all at one time on the same device. Their logs stay in folders of their own."""
    folders = [out / f"seed_{seed}" for seed in seeds]
    started = []
    for seed, folder in zip(seeds, folders, strict=True):
        own = ["--seeds", str(seed), "--out", str(folder), "--no-side-by-side"]  # the last of an option counts
        started.append(subprocess.Popen([sys.executable, __file__, *argv, *own]))
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit("a seed failed")
    return [run for folder in folders for run in json.loads((folder / f"train_dsa_{preset}.json").read_text())["runs"]]


def main(argv: list[str] | None = None) -> int:
    """Trains each seed, prints the table, writes JSON and PNG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--seeds", type=numbers, default=[0], metavar="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("demo_out") / "train_dsa", help="JSON log and PNG")
    parser.add_argument("--device", help="default: cuda for the gpu preset, else cpu")
    parser.add_argument("--backend", choices=("auto", "torch"), default="auto")
    parser.add_argument("--steps", type=numbers, metavar="D,W,S", help="of the dense, warm-up and sparse stage")
    parser.add_argument(
        "--side-by-side", action=argparse.BooleanOptionalAction, default=False, help="a process a seed, at one time"
    )
    args = parser.parse_args(argv)
    preset = PRESETS[args.preset]
    if args.steps is not None:
        if len(args.steps) != 3 or min(args.steps) < 1:
            parser.error(f"--steps must be three numbers of at least 1, got {args.steps}")
        preset = dataclasses.replace(preset, steps=dict(zip(("dense", "warmup", "sparse"), args.steps, strict=True)))
    device = torch.device(args.device or ("cuda" if args.preset == "gpu" else "cpu"))
    args.out.mkdir(parents=True, exist_ok=True)
    text = Text()
    report = {
        **identity(device.type), "preset": dataclasses.asdict(preset), "backend": args.backend, "data": text.about,
        "runs": [],
    }  # fmt: skip
    log = args.out / f"train_dsa_{preset.name}.json"
    ended: list[dict] = []

    def keep(*runs: dict) -> None:
        log.write_text(json.dumps(report | {"runs": [*ended, *runs]}, indent=1) + "\n")

    if args.side_by_side:
        ended = side_by_side(sys.argv[1:] if argv is None else argv, args.seeds, args.out, preset.name)
        keep()
    else:
        for seed in args.seeds:
            ended.append(Run(preset, seed, text, device, args.backend).run(keep))
            keep()
    report["runs"] = ended
    print(table(report["runs"], COLUMNS))
    try:
        draw(report, log.with_suffix(".png"))
        print(f"wrote {log} and {log.with_suffix('.png')}")
    except ModuleNotFoundError as error:
        print(f"wrote {log}; no picture: {error.name} is not installed (pip install 'htree_cuda[demo]')")
    return 0


if __name__ == "__main__":
    sys.exit(main())
