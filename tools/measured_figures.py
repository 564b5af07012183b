"""Figures from benchmarks/results, and the timelines of docs/kernels: phases as measured, schedules as designed.

python -m tools.measured_figures    draw docs/figures/speedup.png and timeline_*.png
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from htree_cuda.bench import context_parallel as bench_context_parallel

from .update_docs import budgets, context_parallel
from .update_docs.common import RESULTS, ROOT, length, phases

FIGURES = ROOT / "docs" / "figures"
COLORS = ["#8da0cb", "#a6bddb", "#e08e45", "#f2c49b", "#4c9f70", "#a8d5ba", "#b07aa1", "#d8bfd8", "#999999", "#cccccc"]
MEMORY, PRODUCTS, VECTOR, WAIT = "#8da0cb", "#e08e45", "#4c9f70", "#dddddd"

# A role's steps in a schedule: (begin, end, label, color), in units of a tile.
Steps = list[tuple[float, float, str, str]]


def stacked(path: str, name: str, field: str, inputs: str, skip: tuple[str, ...], title: str) -> None:
    """One bar a length, its phases side by side in the order of the call, as shares of the call's time."""
    report = json.loads((RESULTS / f"{path}.json").read_text())
    figures = [f for f in report["figures"] if f["inputs"] == inputs and f.get(field) and f["T"] >= 16384]
    bars = [{n: ms for n, ms in phases(f[field]).items() if n not in skip} for f in figures]
    names = list(dict.fromkeys(n for times in bars for n in times))
    fig, ax = plt.subplots(figsize=(9, 0.55 * len(figures) + 1.3), layout="constrained")
    for row, times in enumerate(bars):
        total, left = sum(times.values()), 0.0
        for n, color in zip(names, COLORS):
            share = times.get(n, 0.0) / total
            ax.barh(row, share, left=left, color=color, edgecolor="white", height=0.7, label=n if row == 0 else None)
            if share > 0.06:
                ax.text(left + share / 2, row, f"{times[n]:.2f}", ha="center", va="center", fontsize=7)
            left += share
    ax.set(yticks=range(len(figures)), xlim=(0, 1), xlabel="share of the call; numbers are ms")
    ax.set_yticklabels([f"{length(f['T'])}: {f['ms']:.1f} ms" for f in figures])
    ax.invert_yaxis()
    f = figures[0]
    ax.set_title(
        f"{title}: H {f['H']}, H_kv {f['H_kv']}, K = {f['K']}, top_k {f['top_k']}, {inputs} ({report['gpu']}, "
        f"{report['date'][:10]})",
        fontsize=8.5,
    )
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.32 if len(figures) < 4 else -0.2))
    fig.savefig(FIGURES / f"{name}.png", dpi=130)
    plt.close(fig)


def helpers() -> None:
    """What the memory-bound kernels take of a call of the forward, by length."""
    report = json.loads((RESULTS / "forward_gpu.json").read_text())
    figures = [f for f in report["figures"] if f["inputs"] == "local" and f.get("phases_ms")]
    times = {f["T"]: phases(f["phases_ms"]) for f in figures}
    names = [n for n in ("pool", "pack", "select", "union") if any(n in found for found in times.values())]
    fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
    for n, color in zip(names, (MEMORY, VECTOR, PRODUCTS, "#b07aa1")):
        at = [f for f in figures if times[f["T"]].get(n)]
        ax.plot([f["T"] for f in at], [100 * times[f["T"]][n] / f["ms"] for f in at], "o-", color=color, label=n)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="% of the call")
    ax.set_xticks([f["T"] for f in figures], [length(f["T"]) for f in figures])
    ax.minorticks_off()
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    ax.set_title(f"Memory-bound kernels in a forward call ({report['gpu']}, {report['date'][:10]})", fontsize=9)
    fig.savefig(FIGURES / "timeline_tree.png", dpi=130)
    plt.close(fig)


def schedule(name: str, title: str, roles: dict[str, Steps], end: float) -> None:
    """A row a role, a box a step."""
    fig, ax = plt.subplots(figsize=(10, 0.62 * len(roles) + 0.9), layout="constrained")
    for row, steps in enumerate(roles.values()):
        for begin, stop, text, color in steps:
            ax.barh(row, stop - begin, left=begin, color=color, edgecolor="white", height=0.75)
            ax.text((begin + stop) / 2, row, text, ha="center", va="center", fontsize=6.5)
    ax.set(yticks=range(len(roles)), xlim=(0, end), xticks=[])
    ax.set_yticklabels(list(roles), fontsize=8)
    ax.invert_yaxis()
    ax.set_title(title, fontsize=9)
    ax.set_xlabel("time (schematic): blue copies, orange products, green exponentials and sums", fontsize=8)
    ax.spines[["top", "right", "left"]].set_visible(False)
    fig.savefig(FIGURES / f"{name}.png", dpi=130)
    plt.close(fig)


def attn_dist() -> None:
    """One tile of attn_dist: nine panels, three stages."""
    panels = [(i, i + 1, f"panel {i}", PRODUCTS) for i in range(9)]
    steps = ["0, 1", "2", "3", "4, 5", "6", "7", "8, sums"]
    schedule(
        "timeline_attn_dist",
        "attn_dist, 128 heads, d 576: one tile of 64 keys",
        {
            "producer": [(3 * i, 3 * i + 3, f"copy stage {i + 2}, hand over stage {i}", MEMORY) for i in range(3)],
            "consumer: WGMMA": panels,
            "consumer: epilogue of tile i-1": [(i, i + 1, f"steps {s}", VECTOR) for i, s in enumerate(steps)],
            "reducer": [(7, 9, "adds and stores tile i-1", VECTOR)],
        },
        9,
    )


def sparse_attention() -> None:
    """Two tiles of sparse attention, each with its owner."""
    one: Steps = [
        (0, 2, "scores t, own half", PRODUCTS),
        (2, 3, "P V t-1", PRODUCTS),
        (3, 4.6, "scores t, other half", PRODUCTS),
        (4.6, 6.2, "softmax t", VECTOR),
        (6.2, 7.2, "P V t", PRODUCTS),
    ]
    other: Steps = [
        (0, 1.6, "softmax t-1", VECTOR),
        (1.6, 2.6, "P V t-1", PRODUCTS),
        (2.6, 4.6, "scores t+1, own half", PRODUCTS),
        (4.6, 6.4, "waits for P(t)", WAIT),
        (6.4, 7.4, "P V t", PRODUCTS),
        (7.4, 9, "scores t+1, other half", PRODUCTS),
    ]
    copies: Steps = [
        (0, 2, "tile t+1, quarters", MEMORY),
        (3, 5, "half of t-1 is free: t+1", MEMORY),
        (7, 9, "tile t+2, first half", MEMORY),
    ]
    roles = {"producer": copies, "consumer t % 2 = 0": one, "consumer t % 2 = 1": other}
    schedule("timeline_sparse_attention", "Sparse attention: two consumers, alternating tiles", roles, 9)


def decode() -> None:
    """A cluster's descent through one selecting layer to the tokens."""
    products: Steps = [
        (0, 2, "scores L", PRODUCTS),
        (2.4, 3.2, "importance L", VECTOR),
        (5, 6.4, "attend L", PRODUCTS),
        (6.4, 8, "scores of tokens", PRODUCTS),
        (8, 9.2, "attend tokens", PRODUCTS),
        (9.2, 10, "merge", VECTOR),
    ]
    cluster: Steps = [
        (2, 2.4, "sums", WAIT),
        (3.2, 5, "rounds of counting", WAIT),
        (10, 10.4, "parts", WAIT),
    ]
    copies: Steps = [
        (0, 2, "keys L", MEMORY),
        (5, 6.4, "values L", MEMORY),
        (6.4, 8, "keys of tokens", MEMORY),
        (8, 9.2, "values", MEMORY),
    ]
    roles = {"warps of a CTA": products, "messages of the cluster": cluster, "from global memory": copies}
    schedule("timeline_htree_decode", "Decoding: one layer above the tokens, then the tokens", roles, 10.4)


def speedups() -> None:
    """Time of dense attention divided by the forward's, one line a shape; the band lies between kinds of inputs."""
    figures = budgets.figures_of("forward")
    groups = sorted({shape[0] // shape[1] for shape in budgets.shapes(figures)}, reverse=True)
    fig, axes = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 3), sharey=True, layout="constrained")
    for ax, group in zip(axes if len(groups) > 1 else [axes], groups):
        for color, shape in zip(COLORS[::2], [s for s in budgets.shapes(figures) if s[0] // s[1] == group]):
            points: dict[int, list[float]] = {}
            for key, f in figures.items():
                if key[:4] == shape and "dense" in f:
                    points.setdefault(key[5], []).append(f["dense"]["ms"] / f["ms"])
            lengths = sorted(points)
            low, high = [min(points[T]) for T in lengths], [max(points[T]) for T in lengths]
            ax.fill_between(lengths, low, high, color=color, alpha=0.35)
            ax.plot(
                lengths, low, "o-", color=color, markersize=3, label=f"H {shape[0]}, K {shape[2]}, top_k {shape[3]}"
            )
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel="tokens", title=f"group of {group}")
        ticks = sorted({key[5] for key in figures})
        ax.set_xticks(ticks, [length(T) for T in ticks], fontsize=7)
        ax.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=6.5)
    (axes[0] if len(groups) > 1 else axes).set_ylabel("dense / this (above 1: faster)")
    cards = "; ".join(sorted({f["card"] for f in figures.values()}))
    fig.suptitle(f"Forward beside dense attention, from iid to local inputs ({cards})", fontsize=9)
    fig.savefig(FIGURES / "speedup.png", dpi=130)
    plt.close(fig)


def several_gpus() -> None:
    """Speedup of one sequence over several GPUs, where it was measured."""
    figures = [f for _, f in context_parallel.newest() if "speedup" in f]
    if figures:
        bench_context_parallel.plot(figures, FIGURES / "context_parallel.png")


def main() -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    stacked("forward_gpu", "timeline_htree_fwd", "phases_ms", "local", (), "Forward by phase")
    stacked("backward_gpu", "timeline_htree_bwd", "kernels_ms", "local", ("all",), "Backward by kernel")
    helpers()
    speedups()
    attn_dist()
    sparse_attention()
    decode()
    several_gpus()
    print(f"wrote {FIGURES.relative_to(ROOT)}/speedup.png and timeline_*.png")


if __name__ == "__main__":
    main()
