"""Plots of figures."""

from __future__ import annotations

from pathlib import Path


def check_name(path: Path) -> None:
    """Raises ValueError where --plot could not be drawn: matplotlib is missing, or cannot write what the name asks
    for. A name without a suffix asks for a PNG."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot {path}: {error.name} is not installed (pip install 'htree_cuda[demo]')") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if _format(path) not in known:
        raise ValueError(f"--plot must end in {', '.join('.' + name for name in known)}, got {path}")


def _format(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def save(fig, path: Path) -> None:
    """Writes the file of --plot, whose folder is made. Raises ValueError where it cannot be written."""
    import matplotlib.pyplot as plt

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=130, format=_format(path))
    # The writer of .pgf raises RuntimeError where LaTeX is missing.
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"--plot {path}: cannot be written ({reason})") from None
    finally:
        plt.close(fig)


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
    save(fig, path)
