"""Figures of docs/algorithm.md, drawn from the definition itself; then those of tools/measured_figures.py.

python -m tools.make_figures
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch, Rectangle

from htree_cuda import definition

from . import measured_figures

ROOT = Path(__file__).resolve().parent.parent

FIGURES = ROOT / "docs" / "figures"
LEAF, EXPANDED, UNSEEN, FUTURE = "#4c9f70", "#e08e45", "#e6e6e6", "#ffffff"


def node_box(ax, layer: int, node: int, r: int, T: int, color: str, label: str = "", **style) -> None:
    start, end = node * r**layer, min((node + 1) * r**layer, T)
    options = {"edgecolor": "#555555", "linewidth": 0.6, "facecolor": color, **style}
    ax.add_patch(Rectangle((start, layer), end - start, 0.72, **options))
    if label:
        ax.text((start + end) / 2, layer + 0.36, label, ha="center", va="center", fontsize=7)


def draw_tree() -> None:
    """43 tokens, r = 4: three layers, the last node of each layer incomplete."""
    T, r = 43, 4
    sizes = definition.layer_sizes(T, r, 4)
    fig, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for layer, size in enumerate(sizes):
        for node in range(size):
            complete = (node + 1) * r**layer <= T
            color = "#9fc2e0" if complete else "#d7e6f3"
            node_box(ax, layer, node, r, T, color, str(node), linestyle="-" if complete else "--")
    ax.set(xlim=(-0.5, T + 0.5), ylim=(-0.2, len(sizes)), xlabel="token", yticks=[0.36 + i for i in range(len(sizes))])
    ax.set_yticklabels([f"layer {i}\n{size} nodes" for i, size in enumerate(sizes)])
    ax.set_title("Mean pooling, r = 4: a node is the mean of its existing children (dashed: incomplete)", fontsize=9)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    fig.savefig(FIGURES / "tree.png", dpi=140)
    plt.close(fig)


def draw_descent() -> None:
    """One query's descent: candidates by layer, which were expanded, which became leaves."""
    T, r, top_k, t = 128, 4, 4, 108
    torch.manual_seed(12)
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, T, 1, 8)
    options = {"q_start": t, "compression_rate": r, "top_k_per_layer": top_k}
    trace = definition.forward(q, k, k, traces=True, **options).traces[0]
    sizes = definition.layer_sizes(T, r, top_k * r)
    fig, ax = plt.subplots(figsize=(10, 3.4), layout="constrained")
    for step in trace.layers:
        for node in range(sizes[step.layer]):
            future = node * r**step.layer > t
            node_box(ax, step.layer, node, r, T, FUTURE if future else UNSEEN, linewidth=0.3)
        for p, (node, leaf) in enumerate(zip(step.candidates.tolist(), step.leaves.tolist())):
            label = str(p) if step.layer > 0 else ""  # a token's box is too narrow for its position
            rightmost = p == len(step.candidates) - 1
            style = {"linewidth": 1.8, "edgecolor": "black", "zorder": 3} if rightmost else {}
            node_box(ax, step.layer, node, r, T, LEAF if leaf else EXPANDED, label, **style)
    ax.axvline(t + 0.5, color="crimson", linewidth=1.2, linestyle=":")
    ax.text(t + 1, len(sizes) - 0.1, f"query at t = {t}", color="crimson", fontsize=8, va="top")
    names = [f"layer {i}\n{len(s.candidates)} candidates" for i, s in enumerate(reversed(trace.layers))]
    ax.set(xlim=(-0.5, T + 0.5), ylim=(-0.15, len(sizes)), xlabel="token", yticks=[0.36 + i for i in range(len(sizes))])
    ax.set_yticklabels(names)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    legend = [
        Patch(facecolor=EXPANDED, edgecolor="#555555", label="expanded into its children"),
        Patch(facecolor=LEAF, edgecolor="#555555", label="leaf: takes part in the softmax"),
        Patch(facecolor=UNSEEN, edgecolor="#555555", label="covered by a leaf above"),
        Patch(facecolor="white", edgecolor="black", linewidth=1.8, label="rightmost candidate"),
    ]
    ax.legend(handles=legend, ncols=4, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, 1.17), frameon=False)
    fig.savefig(FIGURES / "descent.png", dpi=140)
    plt.close(fig)


if __name__ == "__main__":
    FIGURES.mkdir(parents=True, exist_ok=True)
    draw_tree()
    draw_descent()
    print(f"wrote {FIGURES.relative_to(ROOT)}/tree.png and descent.png")
    measured_figures.main()
