"""Plots of figures."""

from __future__ import annotations

from pathlib import Path


def plot(figures: list[dict], path: Path) -> None:
    """Time over length, one line for each kind of input, and dense attention."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for kind in dict.fromkeys(f["inputs"] for f in figures):
        rows = [f for f in figures if f["inputs"] == kind]
        ax.plot([f["T"] for f in rows], [f["us_per_query"] for f in rows], "o-", label=f"htree, {kind}")
    dense = [f for f in figures if "dense" in f and f["inputs"] == figures[0]["inputs"]]
    if dense:
        per_query = [1e3 * f["dense"]["ms"] / (f["B"] * f["T_q"]) for f in dense]
        ax.plot([f["T"] for f in dense], per_query, "s--", color="gray", label="dense (SDPA)")
    ax.set(xscale="log", yscale="log", xlabel="tokens in the context", ylabel="microseconds per query")
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3)
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    plt.close(fig)
