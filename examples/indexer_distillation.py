"""Trains a lightning indexer against real attention on real text: sparse_attention -> attn_dist -> indexer_loss.

python examples/indexer_distillation.py            one CPU core, under three minutes
python examples/indexer_distillation.py --help

Text.    The language reference inside every CPython, content words only, cut into contexts; every fifth is held out.
Teacher. Multi-query attention with fixed features of the demo's embedding. A key row is [vector of the word | mean
         vector of its last 8 words], and its first half is the value. Four query heads ask for words like this one, for
         words like the last 4, for places like the last 8 words, for places like the last 32. Each head's scores have a
         standard deviation of 2 nats.
Indexer. That of DeepSeek-V3.2: score(t, i) = sum over heads j of weight_j(t) * ReLU(<q_j(t), k(i)>), with 8 heads of 32
         numbers and one normalised key of 32, linear in the teacher's query features and key rows.
Step.    256 neighbouring queries of one context. A query's list: the indexer's own top keys, and as many keys drawn at
         random, so that it also hears about keys that it would not have chosen. The teacher attends to that list alone;
         the loss compares the indexer's softmax over the list with the teacher's attention summed over heads.
Measure. Recall on held-out contexts: the share of the top_k keys with the most attention (all visible keys listed) that
         are among the indexer's top_k, over queries with at least 4 top_k visible keys; beside it the same for the
         untrained indexer, for keys drawn at random and for the most recent keys. Mass: the attention that the chosen
         keys have.

Writes every number as JSON and the curves as PNG.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import htree_cuda
from htree_cuda.bench.protocol import identity
from htree_cuda.demo.embedding import DIM, Embedding
from htree_cuda.demo.progress import progress
from htree_cuda.demo.text import DemoError, Document, python_topics

SHARPNESS = 2.0
QUERY_WORDS = (1, 4, 8, 32)  # the last so many words that a head's query is the mean of
KEY_WORDS = 8
HEAD_PARTS = (0, 0, 1, 1)  # the half of the key row that a head asks
HELD_OUT = 5  # every fifth context
CHUNK = 256  # queries in a step
INDEXER_HEADS, INDEXER_DIM = 8, 32


@dataclass(frozen=True)
class Context:
    """One context's teacher: q [T, 4, 2 DIM], kv [T, 1, 2 DIM], and the query features [T, 4 DIM] of the indexer."""

    q: Tensor
    kv: Tensor
    features: Tensor


def mean_of_last(x: Tensor, count: int) -> Tensor:
    """[T, D] -> [T, D]: row t is the mean of rows t - count + 1 .. t that exist."""
    sums = nn.functional.pad(x.to(torch.float64).cumsum(0), (0, 0, 1, 0))
    t = torch.arange(1, len(x) + 1)
    first = (t - count).clamp(min=0)
    return ((sums[t] - sums[first]) / (t - first)[:, None]).to(x.dtype)


def visible_pairs(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def contexts(length: int, max_tokens: int) -> tuple[list[Context], list[Context]]:
    """(training, held out). Raises DemoError where the text is too short for one of each."""
    document = Document("topics", python_topics(), max_tokens=max_tokens)
    embedding = Embedding(document, torch.device("cpu"), torch.float32)
    words = torch.from_numpy(embedding.word_ids[embedding.word_ids >= 0])
    parts = words[: len(words) // length * length].split(length)
    if len(parts) < HELD_OUT:
        raise DemoError(f"--max-tokens {max_tokens}: {len(words):,} words are no {HELD_OUT} contexts of {length}")
    found = []
    for part in parts:
        x = embedding.word_keys[part]
        features = torch.stack([mean_of_last(x, count) for count in QUERY_WORDS], 1)
        kv = torch.cat([x, mean_of_last(x, KEY_WORDS)], 1)
        q = torch.zeros(length, len(QUERY_WORDS), 2 * DIM)
        for head, half in enumerate(HEAD_PARTS):
            q[:, head, half * DIM : (half + 1) * DIM] = features[:, head]
        found.append(Context(q, kv[:, None], features.flatten(1)))
    train = [context for i, context in enumerate(found) if i % HELD_OUT != HELD_OUT - 1]
    held_out = [context for i, context in enumerate(found) if i % HELD_OUT == HELD_OUT - 1]
    seen = visible_pairs(length)
    scores = torch.stack([torch.einsum("thd,id->hti", x.q, x.kv[:, 0])[:, seen] for x in train[:8]])
    sharpen = SHARPNESS * (2 * DIM) ** 0.5 / scores.transpose(0, 1).flatten(1).std(1)  # sm_scale is (2 DIM) ** -0.5
    for context in found:
        context.q.mul_(sharpen[:, None])
    return train, held_out


class Indexer(nn.Module):
    """scores [T_q, T]: sum over heads j of weight_j(t) * ReLU(<q_j(t), k(i)>)."""

    def __init__(self, query_dim: int, key_dim: int):
        super().__init__()
        self.q = nn.Linear(query_dim, INDEXER_HEADS * INDEXER_DIM, bias=False)
        self.k = nn.Sequential(nn.Linear(key_dim, INDEXER_DIM, bias=False), nn.LayerNorm(INDEXER_DIM))
        self.weight = nn.Linear(query_dim, INDEXER_HEADS)

    def forward(self, features: Tensor, keys: Tensor) -> Tensor:
        q = self.q(features).unflatten(1, (INDEXER_HEADS, INDEXER_DIM))
        products = torch.einsum("thd,id->thi", q, self.k(keys)) * INDEXER_DIM**-0.5
        return torch.einsum("th,thi->ti", self.weight(features), products.relu())


def teacher(context: Context, queries: slice, indices: Tensor) -> Tensor:
    """[queries, topk]: attention over the lists, summed over the heads. The causal rule makes later keys invalid."""
    q, rule = context.q[queries], {"q_start": queries.start}
    _, lse = htree_cuda.sparse_attention(q, context.kv, indices, d_v=DIM, **rule)
    return htree_cuda.normalize_attn_dist(htree_cuda.attn_dist(q, context.kv, indices, lse, **rule))


def key_lists(scores: Tensor, first: int, top_k: int, generator: torch.Generator) -> Tensor:
    """[n, 1, 2 top_k] int32: each query's top_k visible keys by score and as many at random; repeated ones are -1."""
    n, T = scores.shape
    hidden = torch.arange(T) > torch.arange(first, first + n)[:, None]
    own = scores.masked_fill(hidden, -math.inf).topk(top_k, 1).indices
    taken = torch.zeros(n, T, dtype=torch.bool).scatter_(1, own, True)
    others = torch.rand(n, T, generator=generator).masked_fill_(hidden | taken, -1.0).topk(top_k, 1)
    drawn = others.indices.masked_fill(others.values < 0, -1)
    return torch.cat([own, drawn], 1)[:, None].to(torch.int32)


def evaluate(scores: list[Tensor], truth: list[Tensor], top_k: int) -> dict[str, float]:
    """Mean recall and mass over the queries. scores, truth: [T, T] for each context, every key for every query; scores
    choose the keys, truth is the attention."""
    recall, mass, count = 0.0, 0.0, 0
    for chosen_by, target in zip(scores, truth, strict=True):
        T = len(target)
        queries = slice(4 * top_k - 1, T)
        visible = visible_pairs(T)[queries]
        chosen, wanted = (
            torch.zeros_like(visible).scatter_(
                1, x[queries].masked_fill(~visible, -math.inf).topk(top_k, 1).indices, True
            )
            for x in (chosen_by, target)
        )
        recall += float((chosen & wanted).sum()) / top_k
        mass += float(target[queries][chosen].sum())
        count += len(visible)
    return {"recall": recall / count, "mass": mass / count}


def train(arguments: argparse.Namespace) -> dict:
    """The report: baselines, the curve, and the untrained and the trained indexer."""
    started = time.perf_counter()
    top_k = arguments.top_k
    generator = torch.Generator().manual_seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    training, held_out = contexts(arguments.context, arguments.max_tokens)
    T = arguments.context
    every_key = torch.arange(T, dtype=torch.int32).expand(T, 1, T).contiguous()
    truth = [teacher(x, slice(0, T), every_key) for x in progress(held_out, len(held_out), "attention, held out")]
    baselines = {
        "random": evaluate([torch.rand(T, T, generator=generator) for _ in truth], truth, top_k),
        "most recent": evaluate([torch.arange(T, dtype=torch.float32).expand(T, T)] * len(truth), truth, top_k),
    }
    indexer = Indexer(training[0].features.shape[1], 2 * DIM)
    optimiser = torch.optim.Adam(indexer.parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, arguments.lr, total_steps=max(arguments.steps, 1))

    @torch.no_grad()
    def measure(step: int) -> dict:
        scores = [indexer(context.features, context.kv[:, 0]) for context in held_out]
        return {"step": step, **evaluate(scores, truth, top_k)}

    losses, curve = [], [measure(0)]
    chunk = min(CHUNK, T)
    for step in progress(range(1, arguments.steps + 1), arguments.steps, "training"):
        context = training[int(torch.randint(len(training), (), generator=generator))]
        first = int(torch.randint(T - chunk + 1, (), generator=generator))
        queries = slice(first, first + chunk)
        scores = indexer(context.features[queries], context.kv[:, 0])
        indices = key_lists(scores.detach(), first, top_k, generator)
        dist = teacher(context, queries, indices)
        logits = scores.gather(1, indices[:, 0].long().clamp(min=0))
        loss = htree_cuda.indexer_loss(logits, dist, indices, s_kv=T, q_start=first)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(round(float(loss.detach()), 5))
        if step % arguments.every == 0 or step == arguments.steps:
            curve.append(measure(step))
    return {
        **identity("cpu"),
        "settings": {k: v for k, v in vars(arguments).items() if not isinstance(v, Path)},
        "contexts": {"training": len(training), "held out": len(held_out), "length": T},
        "baselines": baselines,
        "untrained": curve[0],
        "trained": curve[-1],
        "best": evaluate(truth, truth, top_k),
        "curve": curve,
        "losses": losses,
        "seconds": round(time.perf_counter() - started, 1),
    }


def draw(report: dict, path: Path) -> None:
    """Recall over the steps beside the baselines, and the loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    top_k = report["settings"]["top_k"]
    steps = [point["step"] for point in report["curve"]]
    left.plot(steps, [point["recall"] for point in report["curve"]], color="#d95f0e", label="indexer")
    for (name, baseline), style in zip(report["baselines"].items(), (":", "--"), strict=True):
        left.axhline(baseline["recall"], color="#3b6fb6", linestyle=style, label=f"{name} keys")
    left.set(xlabel="step", ylim=(0, 1), title=f"recall of the top {top_k} keys, held-out contexts")
    left.legend(fontsize=8.5)
    right.plot(range(1, len(report["losses"]) + 1), report["losses"], color="#d95f0e", linewidth=0.8)
    right.set(xlabel="step", ylim=(0, None), title="indexer loss, nats (training lists)")
    for axes in (left, right):
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Trains, prints the table, writes JSON and PNG; 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800, help="training steps")
    parser.add_argument("--context", type=int, default=1024, help="words in a context")
    parser.add_argument("--top-k", type=int, default=64, help="keys that the indexer chooses for a query")
    parser.add_argument("--lr", type=float, default=1e-2, help="largest learning rate")
    parser.add_argument("--every", type=int, default=20, help="steps between measurements")
    parser.add_argument("--max-tokens", type=int, default=1 << 19, help="the text is cut after so many tokens")
    parser.add_argument("--seed", type=int, default=0)
    for kind in ("json", "png"):
        parser.add_argument(f"--{kind}", type=Path, default=Path("demo_out") / f"indexer_distillation.{kind}")
    arguments = parser.parse_args(argv)
    try:
        if not 1 <= 4 * arguments.top_k <= arguments.context:
            raise DemoError(f"--top-k must lie in 1 .. context / 4 ({arguments.context // 4}), got {arguments.top_k}")
        report = train(arguments)
        for path in (arguments.json, arguments.png):
            path.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        rows = {
            **report["baselines"], "untrained indexer": report["untrained"], "trained indexer": report["trained"],
            "the attention": report["best"],
        }  # fmt: skip
        print(f"{'keys chosen by':<20}{'recall':>8}{'mass':>8}   (top {arguments.top_k}, held-out contexts)")
        for name, row in rows.items():
            print(f"{name:<20}{row['recall']:>8.1%}{row['mass']:>8.1%}")
        try:
            draw(report, arguments.png)
        except ModuleNotFoundError as error:
            raise DemoError(f"no picture: {error.name} is not installed (pip install 'htree_cuda[demo]')") from None
        print(f"\n{report['seconds']:.0f} s. Curves: {arguments.png}; all numbers: {arguments.json}")
    except DemoError as error:
        print(f"indexer_distillation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    torch.set_num_threads(
        1
    )  # the same bits on any number of cores, and no waiting for each other where they are shared
    sys.exit(main())
