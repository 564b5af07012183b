"""Trains small byte-level decoders with three attentions and compares what they learn.

    python examples/train_bytes.py                                # both tasks, seed 0, minutes on 2 CPU cores
    python examples/train_bytes.py --preset gpu --seeds 0,1,2     # T = 32,768, one Hopper GPU
    python examples/train_bytes.py --preset gpu --time-steps 32768,131072     # trains nothing: how long a step takes
    torchrun --nproc-per-node 2 examples/train_bytes.py --preset gpu --context-parallel     # T = 262,144, two of them
    python examples/train_bytes.py --packed                       # documents packed to T, each with a tree of its own

Arms, equal in everything but the attention (parameters, their initial values, data and its order, steps):

    dense   causal attention over everything, RoPE on token positions (PyTorch's SDPA)
    htree   htree_cuda.HTreeAttention
    window  causal attention over the last W tokens, W the mean number of candidates of an htree query: the same number
            of scores, spent on the nearest tokens

Tasks:

    text    the next byte of the CPython standard library's sources and documentation, found in the running Python
    recall  pairs of a key and a value lie in the first quarter of a sequence of filler, each in one token; queries at
            the end name a key and ask for its value. Lengths grow from stage to stage. Every pair is farther from every
            query than the window arm can see through all its layers.

A run is a pure function of preset, task, arm and seed: batches are drawn from (seed, step), so an interrupted run that
goes on from its checkpoint ends with the same bits on a CPU. docs/training_study.md has the protocol and the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from htree_cuda import HTreeAttention, distributed
from htree_cuda.bench.inputs import visited
from htree_cuda.bench.protocol import identity
from htree_cuda.definition import layer_sizes
from htree_cuda.demo.progress import progress
from htree_cuda.demo.text import python_sources, python_topics

ARMS = ("dense", "htree", "window")
TASKS = ("text", "recall")
COLORS = {"dense": "#444444", "htree": "#4c9f70", "window": "#e08e45"}
IGNORE = -100  # targets that carry no loss, as F.cross_entropy has it


# ------------------------------------------------------------------------------------------------------------ presets


@dataclass(frozen=True)
class Stage:
    """steps optimizer steps on batch sequences of T tokens."""

    T: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Task:
    """What one task trains and how it is judged: eval_batches batches of the last stage, every eval_every steps."""

    stages: tuple[Stage, ...]
    lr: float
    eval_every: int
    eval_batches: int

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]


@dataclass(frozen=True)
class Preset:
    """Model, tree and tasks. All arms share it."""

    name: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: bool
    rope_base: float
    compression_rate: int
    top_k: int
    text: Task
    recall: Task
    n_keys: int
    n_values: int
    n_filler: int
    n_rounds: int
    autocast: bool

    @property
    def recall_vocabulary(self) -> int:
        return self.n_keys * self.n_values + self.n_keys + self.n_values + self.n_filler

    def tree(self, T: int) -> dict:
        """What a query of a sequence of T tokens visits: layers, mean candidates, the share of the tokens it sees."""
        r, most = self.compression_rate, self.top_k * self.compression_rate
        candidates, _ = visited(T, 0, T, r, self.top_k, most)
        last, _ = visited(T, T - 1, T, r, self.top_k, most)
        return {
            "T": T, "layers": len(layer_sizes(T, r, most)), "candidates_mean": candidates / T,
            "candidates_last": last, "share_mean": candidates / (T * (T + 1) / 2), "share_last": last / T,
        }  # fmt: skip

    def window(self, T: int) -> int:
        """Width of the window arm: the mean number of candidates of an htree query."""
        return math.ceil(self.tree(T)["candidates_mean"])


PRESETS = {
    "cpu": Preset(
        name="cpu", d_model=64, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=16, qk_norm=True, rope_base=1e6,
        compression_rate=4, top_k=16,
        text=Task((Stage(1024, 2, 200),), lr=4e-3, eval_every=40, eval_batches=16),
        recall=Task(
            (Stage(32, 64, 100), Stage(64, 32, 40), Stage(128, 16, 40), Stage(256, 8, 40), Stage(512, 8, 120)),
            lr=4e-3, eval_every=20, eval_batches=8,
        ),
        n_keys=8, n_values=8, n_filler=1, n_rounds=1, autocast=False,
    ),
    "gpu": Preset(
        name="gpu", d_model=512, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=64, qk_norm=True,
        rope_base=1e6, compression_rate=16, top_k=64,
        text=Task((Stage(32768, 1, 1200),), lr=1e-3, eval_every=100, eval_batches=16),
        recall=Task(
            (
                Stage(512, 64, 150), Stage(2048, 16, 150), Stage(4096, 8, 200), Stage(8192, 4, 300),
                Stage(16384, 2, 400), Stage(20480, 1, 200), Stage(24576, 1, 250), Stage(28672, 1, 250),
                Stage(32768, 1, 2000),
            ),
            lr=1.5e-4, eval_every=100, eval_batches=16,
        ),
        n_keys=8, n_values=8, n_filler=1, n_rounds=8, autocast=True,
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- model


def rope(x: Tensor, base: float) -> Tensor:
    """Rotate-half RoPE of x [B, T, H, K] on token positions, computed in float32, angles in float64."""
    T, K = x.shape[1], x.shape[3]
    inv_freq = base ** (-2.0 * torch.arange(K // 2, dtype=torch.float64, device=x.device) / K)
    angle = torch.arange(T, dtype=torch.float64, device=x.device)[:, None, None] * inv_freq
    cos, sin = angle.cos().float(), angle.sin().float()
    lo, hi = x.float().chunk(2, dim=3)
    return torch.cat((lo * cos - hi * sin, lo * sin + hi * cos), dim=3).to(x.dtype)


def window_attention(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    """Causal attention of q, k, v [B, H, T, D] over the last `width` tokens, itself included: blocks of width queries
    against their own and the previous block, so that memory and work grow with T * width."""
    B, _, T, _ = q.shape
    blocks = -(-T // width)
    q, k, v = (F.pad(x, (0, 0, 0, blocks * width - T)).unflatten(2, (blocks, width)).transpose(1, 2) for x in (q, k, v))
    k, v = (torch.cat((F.pad(x, (0, 0) * 3 + (1, 0))[:, :-1], x), dim=3) for x in (k, v))
    i, j = torch.arange(width, device=q.device)[:, None], torch.arange(2 * width, device=q.device)
    inside = (j > i) & (j <= i + width)
    first = inside & (j >= width)  # the block before the first does not exist
    mask = torch.stack([first] + [inside] * (blocks - 1)).repeat(B, 1, 1)[:, None]
    out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), attn_mask=mask)
    return out.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


class DenseAttention(HTreeAttention):
    """The same parameters with dense causal attention (window None) or a sliding window in htree's place."""

    def __init__(self, *args, window: int | None, **options):
        super().__init__(*args, **options)
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.n_heads // self.n_kv_heads
        base = self.options["rope_base"]
        k, v = (x.repeat_interleave(group, dim=2) for x in (rope(k, base), v))
        q, k, v = (x.transpose(1, 2) for x in (rope(q, base), k, v))
        if self.window is None or self.window >= q.shape[2]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = window_attention(q, k, v, self.window)
        return out.transpose(1, 2)

    def attend_varlen(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Document by document, with token positions of its own each."""
        bounds = cu_seqlens.tolist()
        parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]
        return torch.cat([self.attend(q[None, part], k[None, part], v[None, part])[0] for part in parts])


class Block(nn.Module):
    def __init__(self, d_model: int, attention: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(d_model, eps=1e-6), attention
        self.mlp_norm = nn.RMSNorm(d_model, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model, bias=False), nn.GELU(), nn.Linear(4 * d_model, d_model, bias=False)
        )

    def forward(self, x: Tensor, **lengths) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **lengths)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Pre-norm decoder: tokens [B, T] int64 -> logits [B, T, vocabulary]; of documents packed to [total], with where
    each begins, [total, vocabulary]."""

    def __init__(self, preset: Preset, arm: str, vocabulary: int, window: int, backend: str, **of_htree):
        super().__init__()
        shape = (preset.d_model, preset.n_heads, preset.n_kv_heads)
        options = {
            "head_dim": preset.head_dim, "qk_norm": preset.qk_norm, "rope_base": preset.rope_base,
            "compression_rate": preset.compression_rate, "top_k_per_layer": preset.top_k, "backend": backend,
        }  # fmt: skip

        def attention() -> HTreeAttention:
            if arm == "htree":
                return HTreeAttention(*shape, **options, **of_htree)
            return DenseAttention(*shape, window=window if arm == "window" else None, **options)

        self.embedding = nn.Embedding(vocabulary, preset.d_model)
        self.blocks = nn.Sequential(*(Block(preset.d_model, attention()) for _ in range(preset.n_layers)))
        self.norm = nn.RMSNorm(preset.d_model, eps=1e-6)
        self.head = nn.Linear(preset.d_model, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        lengths = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": len(tokens)}
        for block in self.blocks:
            x = block(x, **lengths)
        return self.head(self.norm(x))


# --------------------------------------------------------------------------------------------------------------- data


def generator(*numbers: int) -> torch.Generator:
    """Seeded by all the numbers, so that no two purposes share a stream."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class Text:
    """Bytes of the running Python's documentation and library, every 20th file held out for validation."""

    vocabulary = 256

    def __init__(self):
        pieces = [topic.text.encode() for topic in (*python_topics(), *python_sources())]
        held_out = b"\n".join(pieces[::20])
        rest = b"\n".join(piece for i, piece in enumerate(pieces) if i % 20)
        self.parts = {
            name: torch.frombuffer(bytearray(part), dtype=torch.uint8)
            for name, part in (("train", rest), ("validation", held_out))
        }
        self.about = {
            "bytes_train": len(rest), "bytes_validation": len(held_out),
            "sha256": hashlib.sha256(rest + held_out).hexdigest()[:16],
        }  # fmt: skip

    def batch(self, part: str, stage: Stage, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """tokens and targets [batch, T] uint8, as they lie in the text: a step's time has no other work of the host."""
        data = self.parts[part]
        first = torch.randint(
            0, len(data) - stage.T, (stage.batch, 1), generator=generator(seed, step, part == "train")
        )
        rows = torch.stack([data[i : i + stage.T + 1] for (i,) in first.tolist()])
        return rows[:, :-1], rows[:, 1:]


class PackedText(Text):
    """Pieces of the same files as documents, of lengths drawn log-uniform from 32 to T bytes and packed to T: none sees
    another, and the byte after a document's end is nobody's target."""

    def __init__(self):
        super().__init__()
        pieces = [topic.text.encode() for topic in (*python_topics(), *python_sources())]
        kept = {"train": [x for i, x in enumerate(pieces) if i % 20], "validation": pieces[::20]}
        self.documents = {
            name: [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in part if x] for name, part in kept.items()
        }
        self.about = {**self.about, "documents_train": len(self.documents["train"])}

    def batch(self, part: str, stage: Stage, seed: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """tokens and targets [batch * T], and [N + 1] where each document begins."""
        documents, g = self.documents[part], generator(seed, step, part == "train")
        tokens, targets, bounds = [], [], [0]
        for _ in range(stage.batch):
            left = stage.T
            while left > 0:
                document = documents[torch.randint(0, len(documents), (1,), generator=g).item()]
                drawn = round(32 * (stage.T / 32) ** torch.rand(1, generator=g, dtype=torch.float64).item())
                count = min(left, drawn, len(document))
                first = torch.randint(0, len(document) - count + 1, (1,), generator=g).item()
                tokens.append(document[first : first + count].long())
                following = document[first + 1 : first + count + 1].long()
                targets.append(F.pad(following, (0, count - len(following)), value=IGNORE))
                bounds.append(bounds[-1] + count)
                left -= count
        return torch.cat(tokens), torch.cat(targets), torch.tensor(bounds, dtype=torch.int32)


class Recall:
    """Token ids: pairs (key * n_values + value), then queries (one a key), then values (targets only), then filler.
    A sequence ends with n_rounds rounds of queries, each asking for every key once, in random order."""

    def __init__(self, preset: Preset):
        self.preset = preset
        self.vocabulary = preset.recall_vocabulary
        self.about = {"chance": 1 / preset.n_values}

    def distance(self, T: int) -> int:
        """The least number of tokens between a pair and its query."""
        return T - T // 4 - self.preset.n_rounds * self.preset.n_keys

    def batch(self, part: str, stage: Stage, seed: int, step: int) -> tuple[Tensor, Tensor]:
        p, g = self.preset, generator(seed, step, part == "train")
        B, T = stage.batch, stage.T
        queries, values = p.n_keys * p.n_values, p.n_keys * p.n_values + p.n_keys
        filler = values + p.n_values
        tokens = torch.randint(filler, filler + p.n_filler, (B, T), generator=g)
        targets = torch.full((B, T), IGNORE)
        room = T // 4 // p.n_keys
        place = torch.randint(0, room, (B, p.n_keys), generator=g) + room * torch.rand(
            B, p.n_keys, generator=g
        ).argsort(1)
        value = torch.randint(0, p.n_values, (B, p.n_keys), generator=g)
        tokens.scatter_(1, place, torch.arange(p.n_keys) * p.n_values + value)
        asked = torch.rand(B, p.n_rounds, p.n_keys, generator=g).argsort(2).flatten(1)
        tokens[:, -asked.shape[1] :] = queries + asked
        targets[:, -asked.shape[1] :] = values + value.gather(1, asked)
        return tokens, targets


# ----------------------------------------------------------------------------------------------------------- training


def learning_rate(task: Task, step: int) -> float:
    """Warm-up over the first 5% of the steps, then constant, so that no stage of a curriculum is favoured; over the
    last eighth linearly down to a tenth."""
    warm_up, decay = max(1, task.steps // 20), max(1, task.steps // 8)
    left = (task.steps - step) / decay
    return task.lr * min(1.0, (step + 1) / warm_up, 0.1 + 0.9 * left)


def loss_of(
    model: nn.Module, tokens: Tensor, targets: Tensor, autocast: bool, *lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """(mean loss over the targets, share of them that the most likely token hits)."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        logits = model(tokens, *lengths)
    kept = targets != IGNORE
    logits, targets = logits[kept].float(), targets[kept]
    return F.cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()


def _wide(x: Tensor) -> Tensor:
    """Bytes as the integers that an embedding and a loss take; other numbers as they are."""
    return x.long() if x.dtype == torch.uint8 else x


class Run:
    """One (task, arm, seed): model, optimizer, step and log; saved and resumed as a whole."""

    def __init__(
        self, preset: Preset, task_name: str, arm: str, seed: int, data, device: torch.device, backend: str, **of_htree
    ):
        self.preset, self.arm, self.seed, self.data, self.device = preset, arm, seed, data, device
        self.task: Task = getattr(preset, task_name)
        model = {name: value for name, value in dataclasses.asdict(preset).items() if name not in TASKS}
        self.settings = {
            "preset": model, "task": task_name, "schedule": dataclasses.asdict(self.task), "arm": arm, "seed": seed,
            "data": data.about,
        }  # fmt: skip
        T = self.task.stages[-1].T
        torch.manual_seed(seed)
        self.model = Decoder(preset, arm, data.vocabulary, preset.window(T), backend, **of_htree).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.task.lr, betas=(0.9, 0.95))
        self.step = 0
        self.seconds = 0.0
        self.log: list[dict] = []
        self.pending: list[float] = []

    @property
    def name(self) -> str:
        packed = "_packed" if isinstance(self.data, PackedText) else ""
        return f"{self.preset.name}_{self.settings['task']}{packed}_{self.arm}_{self.seed}"

    def state(self) -> dict:
        return {
            "settings": self.settings, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "seconds": self.seconds, "log": self.log, "pending": self.pending,
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Whole or not at all: a kill while writing leaves the previous checkpoint."""
        torch.save(self.state(), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def resume(self, path: Path) -> None:
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["settings"] != self.settings:
            raise SystemExit(f"{path} belongs to other settings or another Python's text: remove it or choose --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.log, self.pending = state["log"], state["pending"]

    def batch(self, part: str, stage: Stage, seed: int, step: int) -> tuple[Tensor, ...]:
        """tokens, targets and, of packed documents, where each begins."""
        return tuple(_wide(x.to(self.device)) for x in self.data.batch(part, stage, seed, step))

    def loss(self, tokens: Tensor, targets: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor]:
        return loss_of(self.model, tokens, targets, self.preset.autocast, *lengths)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """(loss, accuracy) on the same held-out batches for every arm and seed, at the last stage's length."""
        batches = [self.batch("validation", self.task.stages[-1], -1, i) for i in range(self.task.eval_batches)]
        pairs = [self.loss(*batch) for batch in batches]
        return tuple(statistics.fmean(x.item() for x in column) for column in zip(*pairs))

    def train_step(self) -> float:
        stage = self.task.stage_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.task, self.step)
        loss, _ = self.loss(*self.batch("train", stage, self.seed, self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.share_gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def share_gradients(self) -> None:
        """Nothing to do where one process has the whole batch."""

    def train(self, path: Path, stop_at: int | None = None) -> None:
        """To the last step, or to stop_at; a checkpoint at every evaluation and when interrupted."""
        end = self.task.steps if stop_at is None else stop_at
        try:
            for _ in progress(range(self.step, end), end - self.step, self.name):
                started = time.perf_counter()
                self.pending.append(self.train_step())
                self.seconds += time.perf_counter() - started
                if self.step % self.task.eval_every == 0 or self.step == self.task.steps:
                    loss, accuracy = self.evaluate()
                    T = self.task.stage_at(self.step - 1).T
                    train_loss = statistics.fmean(self.pending)
                    self.log.append({
                        "step": self.step, "T": T, "train_loss": train_loss, "loss": loss, "accuracy": accuracy,
                    })  # fmt: skip
                    self.pending = []
                    self.save(path)
                    print(
                        f"{self.name}: step {self.step}/{self.task.steps}, T {T}, training {train_loss:.4f}, "
                        f"held out {loss:.4f}, accuracy {100 * accuracy:.1f}%, {self.seconds:.0f} s",
                        flush=True,
                    )
        finally:
            self.save(path)

    def result(self) -> dict:
        tokens = sum(stage.T * stage.batch * stage.steps for stage in self.task.stages)
        return {
            "arm": self.arm, "seed": self.seed, "final": self.log[-1], "log": self.log,
            "seconds": round(self.seconds, 1), "tokens_per_s": round(tokens / self.seconds),
        }  # fmt: skip


class SharedRun(Run):
    """A run in which every rank of a process group has a share of each sequence's tokens. Parameters are alike on all
    ranks and stay so: each rank's gradient of its own tokens' mean loss is averaged over the group."""

    def __init__(self, *args, group: dist.ProcessGroup):
        super().__init__(*args, context_parallel_group=group)
        self.group = group

    def batch(self, part: str, stage: Stage, seed: int, step: int) -> tuple[Tensor, Tensor]:
        whole = self.data.batch(part, stage, seed, step)
        return tuple(_wide(distributed.shard(x, 1, self.group).to(self.device)) for x in whole)

    def mean(self, x: float) -> float:
        """Over the ranks, which have as many tokens each."""
        total = torch.tensor(x, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.item() / dist.get_world_size(self.group)

    def share_gradients(self) -> None:
        for p in self.model.parameters():
            dist.all_reduce(p.grad, group=self.group)
            p.grad /= dist.get_world_size(self.group)

    def evaluate(self) -> tuple[float, float]:
        return tuple(self.mean(x) for x in super().evaluate())

    def train_step(self) -> float:
        return self.mean(super().train_step())


def train_together(preset: Preset, args: argparse.Namespace) -> None:
    """The text task with one sequence of --length tokens a step over the ranks that torchrun started; JSON beside the
    checkpoints of the first rank."""
    if "RANK" not in os.environ:
        sys.exit("--context-parallel shares sequences between ranks: start it by torchrun --nproc-per-node N")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if preset.name == "gpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = Task((Stage(args.length, 1, args.steps),), preset.text.lr, max(1, args.steps // 4), 2)
    preset = dataclasses.replace(preset, text=task)
    run = SharedRun(preset, "text", "htree", args.seeds[0], Text(), device, args.backend, group=dist.group.WORLD)
    run.train(args.out / f"{run.name}_rank{rank}.pt")
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    result = {
        **identity(device.type), "T": args.length, "ranks": ranks, "tree": preset.tree(args.length),
        "peak_bytes": int(run.mean(peak)), **run.result(),
    }  # fmt: skip
    if rank == 0:
        log = args.out / "train_context_parallel.json"
        log.write_text(json.dumps(result, indent=1) + "\n")
        print(f"T {args.length:,} on {ranks} ranks: {result['tokens_per_s']:,} tokens/s, {peak / 1e9:.1f} GB; {log}")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- report


def throughput(
    preset: Preset, lengths: list[int], device: torch.device, backend: str, arms: tuple[str, ...] = ARMS
) -> list[dict]:
    """A training step of each arm on one sequence of text: tokens per second, of the median of 5 steps after 2."""
    text, found = Text(), []
    for T in lengths:
        for arm in arms:
            stages = Task((Stage(T, 1, 7),), preset.text.lr, 8, 1)
            run = Run(dataclasses.replace(preset, text=stages), "text", arm, 0, text, device, backend)
            seconds = []
            for _ in range(7):
                started = time.perf_counter()
                run.train_step()  # returns a number, so the device is done
                seconds.append(time.perf_counter() - started)
            step = statistics.median(seconds[2:])
            found.append({"T": T, "arm": arm, "tokens_per_s": round(T / step), "step_ms": round(1e3 * step, 2)})
            speed = found[-1]["tokens_per_s"]
            print(f"throughput: T {T}, {arm}: {speed:,} tokens/s, {1e3 * step:.1f} ms", flush=True)
    return found


def time_steps(preset: Preset, args: argparse.Namespace, device: torch.device) -> None:
    """Steps with dense attention and with htree at each length of --time-steps, side by side; JSON in --out."""
    log = args.out / f"train_steps_{preset.name}.json"
    report = {**identity(device.type), "preset": dataclasses.asdict(preset), "throughput": []}
    for T in args.time_steps:
        found = throughput(preset, [T], device, args.backend, ("dense", "htree"))
        report["throughput"] += found
        dense, htree = (x["step_ms"] for x in found)
        print(f"T {T:,}: a step of htree takes {htree / dense:.2f} of dense attention's", flush=True)
        log.write_text(json.dumps(report, indent=1) + "\n")


def draw(report: dict, path: Path) -> None:
    """Held-out loss of the text and accuracy of the recall over the steps: mean of the seeds, band over their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in TASKS if name in report["tasks"]]
    fig, axes = plt.subplots(1, len(names), figsize=(4.8 * len(names), 3.4), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], names):
        task = report["tasks"][name]
        what = "loss" if name == "text" else "accuracy"
        for arm in ARMS:
            logs = [run["log"] for run in task["runs"] if run["arm"] == arm]
            if not logs:
                continue
            columns = [[entry[what] for entry in row] for row in zip(*logs)]
            steps = [entry["step"] for entry in logs[0]]
            ax.plot(steps, [statistics.fmean(c) for c in columns], color=COLORS[arm], label=arm)
            ax.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=COLORS[arm], alpha=0.2)
        if name == "text":
            ax.set(title=f"text, T = {task['tree']['T']:,}", ylabel="held-out loss, nats per byte")
        else:
            ax.axhline(task["data"]["chance"], color="crimson", linestyle=":", linewidth=1, label="chance")
            ax.set(title=f"recall at T = {task['tree']['T']:,}", ylabel="accuracy", ylim=(0, 1.02))
        ax.set_xlabel("step")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def logged(log: Path, report: dict) -> dict:
    """What an earlier call logged, if it ran the same sources on the same machine with the same preset: tasks, arms and
    seeds may be run one call after the other."""
    if not log.exists():
        return {}
    earlier, now = json.loads(log.read_text()), json.loads(json.dumps(report))
    same = set(now) - {"date", "tasks"}
    return earlier if all(earlier.get(name) == now[name] for name in same) else {}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def choices(allowed: tuple[str, ...]):
    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        if not set(wanted) <= set(allowed):
            raise argparse.ArgumentTypeError(f"must be among {', '.join(allowed)}, got {text!r}")
        return wanted

    return parse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--task", type=choices(TASKS), default=list(TASKS), metavar="text,recall")
    parser.add_argument("--arms", type=choices(ARMS), default=list(ARMS), metavar="dense,htree,window")
    parser.add_argument("--seeds", type=numbers, default=[0], metavar="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("demo_out") / "train", help="checkpoints, JSON log and PNG")
    parser.add_argument("--device", help="default: cuda for the gpu preset, else cpu")
    parser.add_argument("--backend", choices=("auto", "torch"), default="auto", help="of the htree arm")
    parser.add_argument("--throughput", type=numbers, metavar="T,T", help="also tokens per second at these lengths")
    parser.add_argument("--time-steps", type=numbers, metavar="T,T", help="only time steps of these lengths, two arms")
    parser.add_argument("--context-parallel", action="store_true", help="long sequences over the ranks of torchrun")
    parser.add_argument("--length", type=int, default=262144, help="with --context-parallel: T")
    parser.add_argument("--steps", type=int, default=40, help="with --context-parallel: optimizer steps")
    parser.add_argument("--packed", action="store_true", help="the text as packed documents; the recall has none")
    args = parser.parse_args(argv)
    if args.packed:
        args.task = ["text"]
    preset = PRESETS[args.preset]
    if args.context_parallel:
        args.out.mkdir(parents=True, exist_ok=True)
        train_together(preset, args)
        return 0
    device = torch.device(args.device or ("cuda" if args.preset == "gpu" else "cpu"))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.time_steps:
        time_steps(preset, args, device)
        return 0
    log = args.out / f"train_{preset.name}{'_packed' if args.packed else ''}.json"
    report = {**identity(device.type), "preset": dataclasses.asdict(preset), "tasks": {}}
    kept = logged(log, report)
    report |= {name: kept[name] for name in ("tasks", "throughput") if name in kept}
    for name in args.task:
        data = Recall(preset) if name == "recall" else PackedText() if args.packed else Text()
        tree = preset.tree(getattr(preset, name).stages[-1].T)
        about = {"data": data.about, "tree": tree, "window": preset.window(tree["T"])}
        runs = report["tasks"].get(name, {}).get("runs", [])
        report["tasks"][name] = {**about, "runs": runs}
        print(
            f"{name}: T {tree['T']:,}, {tree['layers']} layers, {tree['candidates_mean']:.1f} candidates a query on "
            f"average: {100 * tree['share_mean']:.1f}% of the tokens before it; the last query visits "
            f"{tree['candidates_last']}, {100 * tree['share_last']:.1f}% of T; window {preset.window(tree['T'])}",
            flush=True,
        )
        for seed in args.seeds:
            for arm in args.arms:
                run = Run(preset, name, arm, seed, data, device, args.backend)
                path = args.out / f"{run.name}.pt"
                run.resume(path)
                run.train(path)
                runs[:] = [old for old in runs if (old["arm"], old["seed"]) != (arm, seed)] + [run.result()]
                runs.sort(key=lambda run: (run["seed"], ARMS.index(run["arm"])))
                log.write_text(json.dumps(report, indent=1) + "\n")
    if args.throughput:
        report["throughput"] = throughput(preset, args.throughput, device, args.backend)
        log.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, log.with_suffix(".png"))
    print(f"wrote {log} and {log.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
