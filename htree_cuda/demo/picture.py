"""The PNG: the descent through the layers and the attention mass over the document."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import numpy as np

from .report import best_passage, group_mass, overlap, place_name, ranking, snippet
from .search import Answer, Search
from .text import DemoError, Document

UNSEEN, CANDIDATE, EXPANDED = "#eeeeee", "#9ecae1", "#d95f0e"
TREE, DENSE = "#d95f0e", "#3b6fb6"
BINS = 600


def _descent(axes, answer: Answer, search: Search, low: int, high: int) -> None:
    """One row per layer over tokens [low, high): expanded (by any KV head), attended as a leaf, or never seen."""
    sizes = search.layer_sizes
    layers = len(sizes)
    least = (high - low) / 1400  # about a pixel: thinner bars would vanish
    for depth in range(layers):
        layer = layers - 1 - depth
        width = search.rate**layer
        seen: dict[int, bool] = {}
        for views in answer.views:
            view = views[depth]
            for node, expanded in zip(view.nodes.tolist(), view.expanded.tolist(), strict=True):
                seen[node] = seen.get(node, False) or expanded
        y = layer - 0.36
        bars = {CANDIDATE: [], EXPANDED: []}
        for node, expanded in sorted(seen.items()):
            first, last = max(node * width, low), min((node + 1) * width, high)
            if first < last:
                bars[EXPANDED if expanded else CANDIDATE].append((first, max(last - first, least)))
        axes.broken_barh([(low, high - low)], (y, 0.72), facecolors=UNSEEN)
        for colour, spans in bars.items():
            edge = {"edgecolors": "white", "linewidth": 0.3} if width > 6 * least else {"linewidth": 0}
            axes.broken_barh(spans, (y, 0.72), facecolors=colour, **edge)
    names = [
        "tokens" if layer == 0 else f"layer {layer}: {search.rate**layer:,} tokens\nper node" for layer in range(layers)
    ]
    axes.set_yticks(range(layers), names)
    axes.set_ylim(-0.5, layers - 0.5)
    axes.set_xlim(low, high)


def _mass(axes, answer: Answer, low: int, high: int) -> np.ndarray:
    """Attention per bin: the tree's upwards, dense attention's downwards. Returns the tree's."""
    bins = min(BINS, high - low)
    edges = np.linspace(low, high, bins + 1).astype(np.int64)
    tree, dense = (np.add.reduceat(mass[:high], edges[:-1]) for mass in (answer.tree, answer.dense))
    axes.bar(edges[:-1], tree, np.diff(edges), align="edge", color=TREE, label="htree attention")
    axes.bar(edges[:-1], -dense, np.diff(edges), align="edge", color=DENSE, label="dense attention (downwards)")
    top = max(float(tree.max()), float(dense.max()), 1e-9)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(low, high)
    axes.set_ylim(-1.15 * top, 1.75 * top)
    power = 10.0 ** math.floor(math.log10(top))
    step = max(x * power for x in (1, 2, 5) if x * power <= top * 1.001)
    axes.set_yticks([-step, 0, step], [f"{step:.2g}", "0", f"{step:.2g}"])
    return tree


def _label_peaks(axes, document: Document, answer: Answer, bars: np.ndarray, count: int = 5) -> None:
    """The topics of the passages with the most attention, above their place, pushed apart sideways."""
    masses = group_mass(document, answer.tree)
    T = len(document)
    peaks = []
    for group in ranking(masses).tolist():
        if len(peaks) == count or masses[group] < 0.01:
            break
        for passage in document.group_members[group]:
            mass = answer.tree[passage.first : passage.last]
            if mass.sum() >= 0.01 and len(peaks) < count:
                peaks.append((passage.first + int(mass.argmax()), document.names[passage.topic], float(mass.sum())))
    merged: dict[str, tuple[int, float]] = {}
    for at, name, mass in peaks:
        place, total = merged.get(name, (at, 0.0))
        merged[name] = (place, total + mass)
    labels = sorted((at, name, mass) for name, (at, mass) in merged.items())
    gap, low, high = 0.11 * T, 0.04 * T, 0.95 * T
    places: list[float] = []
    for at, _, _ in labels:
        places.append(max(float(at), low, places[-1] + gap if places else low))
    for i in reversed(range(len(places))):  # pushed back where they ran over the right edge
        places[i] = min(places[i], high if i == len(places) - 1 else places[i + 1] - gap)
    for (at, name, mass), x in zip(labels, places, strict=True):
        tip = (at, bars[min(at * len(bars) // T, len(bars) - 1)])
        axes.annotate(
            f"{textwrap.shorten(name, 24, placeholder='...')}\n{mass:.2f}", tip, (x, 0.97 * axes.get_ylim()[1]),
            fontsize=8.5, ha="center", va="top", parse_math=False,
            arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.6},
        )  # fmt: skip


def _title(axes, text: str) -> None:
    # Text from a document may hold dollar signs: they are no mathematics.
    axes.set_title(text, loc="left", fontsize=10, parse_math=False)


def draw(path: str, document: Document, search: Search, answer: Answer) -> None:
    """Writes the picture. Raises DemoError where matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise DemoError(f"no picture: {error.name} is not installed (pip install 'htree_cuda[demo]')") from None
    T = len(document)
    rows = 0.45 * len(search.layer_sizes) + 0.3
    span = 8 * search.rate**2  # tokens of the second half: single tokens are visible there
    zoom = 2 * span < T
    heights = [rows, 1.9, rows, 1.3] if zoom else [rows, 1.9]
    figure = Figure(figsize=(13, 1.1 * sum(heights) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    descent, mass, *zoomed = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights})
    same = overlap(group_mass(document, answer.tree), group_mass(document, answer.dense))
    question = textwrap.shorten(answer.question.text, 110, placeholder="...")
    figure.suptitle(
        f"“{question}”\n{answer.visited:,} of {T + 1:,} nodes visited per KV head ({answer.visited / (T + 1):.1%}); "
        f"{same:.1%} of the attention on the same passages as dense attention",
        fontsize=11,
        parse_math=False,
    )
    _descent(descent, answer, search, 0, T)
    _title(descent, f"The descent over {document.title}")
    descent.legend(
        handles=[
            Patch(color=EXPANDED, label="expanded"),
            Patch(color=CANDIDATE, label="attended as it is (a leaf)"),
            Patch(color=UNSEEN, label="never looked at"),
        ],
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8.5, frameon=False,
    )  # fmt: skip
    tree = _mass(mass, answer, 0, T)
    _label_peaks(mass, document, answer, tree)
    _title(mass, f"Attention mass per {max(1, round(T / len(tree))):,} tokens, mean over the heads")
    mass.legend(loc="lower left", fontsize=8.5, frameon=False)
    mass.set_xlabel("token of the document", fontsize=9)
    if zoom:
        best = best_passage(document, answer)
        low = min(max(0, (best.first + best.last - span) // 2), T - span)
        for axes in (descent, mass):
            axes.axvspan(low, low + max(span, T // 400), color="black", alpha=0.12, linewidth=0)
        _descent(zoomed[0], answer, search, low, low + span)
        _title(zoomed[0], f"The shaded part, around {place_name(document, best)}")
        _mass(zoomed[1], answer, low, low + span)
        text = " ".join(snippet(document, best, answer.tree, set(), 200))
        _title(zoomed[1], f"where it reads: {textwrap.shorten(text, 150, placeholder=' ...')}")
        zoomed[1].set_xlabel("token of the document", fontsize=9)
    for axes in (descent, mass, *zoomed):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.tick_params(labelsize=8.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    try:
        figure.savefig(Path(path), dpi=110, format=Path(path).suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise DemoError(f"--png {path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
