"""Blocks about the kernels over index lists: attn_dist and sparse attention, and the indexer's training."""

from __future__ import annotations

import statistics

from .common import NOT_MEASURED, load, markdown, on_cpu, on_gpu


def attn_dist() -> str:
    report = load("attn_dist")
    if report is None:
        return NOT_MEASURED
    return sparse_table(report)


def sparse_attention() -> str:
    report = load("sparse_attention")
    if report is None:
        return NOT_MEASURED
    return sparse_table(report)


def sparse_table(report: dict) -> str:
    """Timings of a kernel over index lists."""
    rows = [
        [
            str(t["h_q"]),
            f"{t['s_kv']:,}",
            f"{t['median_ms']:.3f}",
            f"{t['p90_ms']:.3f}",
            f"{t['tflops']:.0f}",
            f"{t['gathered_tb_per_s']:.2f}",
            *([f"{t['spaced']['median_ms']:.3f}"] if "spaced" in t else []),
        ]
        for t in report["timings"]
    ]
    first = report["timings"][0]
    spaced = ["with pauses, ms"] if "spaced" in first else []
    pace = "back to back and with a pause as long after each call" if spaced else "back to back"
    of = f"{report['of'].capitalize()}: " if "of" in report else ""
    return (
        f"{of}s_q {first['s_q']:,}, topk {first['topk']:,}, d_qk {first['d_qk']}, {first['dtype']}, "
        f"one {report['gpu']} (driver {report['driver']}), {report['date'][:10]}, {pace}:\n\n"
        + markdown(["h_q", "s_kv", "median, ms", "p90, ms", "TFLOP/s", "gathered TB/s", *spaced], rows)
    )


def sparse_attention_peer() -> str:
    """Interleaved with FlashMLA; a sentence until that was measured."""
    report = load("sparse_attention_gpu")
    figures = [f for f in report["figures"] if "flash_mla" in f] if report is not None else []
    if not figures:
        return (
            "Beside FlashMLA: not measured yet, `python tools/gpu_bench.py --only sparse_attention_gpu` on a Hopper "
            "machine that has its package."
        )
    paces = [[(f, f["flash_mla"]), (f["spaced"], f["flash_mla"]["spaced"])] for f in figures]
    rows = [
        [
            str(f["h_q"]),
            f"{f['s_kv']:,}",
            *(
                cell
                for this, peer in pace
                for cell in (f"{this['ms']:.3f}", f"{peer['ms']:.3f}", f"{this['speedup_over_flash_mla']:.3f}")
            ),
        ]
        for f, pace in zip(figures, paces)
    ]
    f = figures[0]
    peer = f["flash_mla"]
    about = peer.get("note") or " ".join(filter(None, (peer.get("distribution"), peer["version"])))
    columns = ["this, ms", "FlashMLA, ms", "FlashMLA / this"]
    return (
        f"Interleaved with FlashMLA{f' ({about})' if about else ''}, s_q {f['s_q']:,}, topk {f['topk']:,}, d_qk "
        f"{f['d_qk']}, {f['dtype']}, {on_gpu(report)}, medians back to back and with a pause as long before each call; "
        f"outputs differ by at most {max(f['flash_mla']['difference'] for f in figures):.1%} of the largest entry:\n\n"
        + markdown(["h_q", "s_kv", *columns, *(f"{name}, with pauses" for name in columns)], rows)
    )


def sparse_attention_bwd() -> str:
    report = load("sparse_attention_bwd")
    if report is None:
        return NOT_MEASURED
    figures = report["figures"]
    rows = [
        [
            str(f["h_q"]),
            f"{f['s_kv']:,}",
            f"{f['ms']:.2f}",
            f"{f['tflops']:.0f}",
            f"{f['deterministic']['ms']:.2f}",
            f"{f['deterministic']['of_atomic']:.2f}",
        ]
        for f in figures
    ]
    first = figures[0]
    return (
        f"s_q {first['s_q']:,}, topk {first['topk']:,}, d_qk {first['d_qk']}, {first['dtype']}, ascending lists, "
        f"{on_gpu(report)}, medians:\n\n"
        + markdown(["h_q", "s_kv", "atomic, ms", "TFLOP/s", "deterministic, ms", "of the atomic time"], rows)
    )


def indexer_distillation() -> str:
    report = load("indexer_distillation")
    settings, trained = report["settings"], report["trained"]
    chosen = {
        "drawn at random": report["baselines"]["random"],
        "the most recent": report["baselines"]["most recent"],
        "by the untrained indexer": report["untrained"],
        "by the trained indexer": trained,
        "those with the most attention": report["best"],
    }
    rows = [[name, f"{row['recall']:.1%}", f"{row['mass']:.1%}"] for name, row in chosen.items()]
    contexts = report["contexts"]
    return (
        f"{settings['steps']} steps on {contexts['training']} contexts of {contexts['length']:,} words, measured on "
        f"{contexts['held out']} others; {report['seconds']:.0f} s on {report['cores']} CPU cores "
        f"({on_cpu(report)}):\n\n" + markdown([f"{settings['top_k']} keys chosen", "recall", "attention on them"], rows)
    )


def _spread(values: list[float], form: str) -> str:
    mean = statistics.fmean(values)
    return f"{mean:{form}}" + (f" ({min(values):{form}} .. {max(values):{form}})" if len(values) > 1 else "")


def train_dsa() -> str:
    """Both presets of examples/train_dsa.py, as far as they were run."""
    parts = []
    for name in ("gpu", "cpu"):
        report = load(f"train_dsa_{name}")
        if report is None:
            continue
        preset, runs = report["preset"], report["runs"]

        def over(key: str, form: str = ".1%", runs: list[dict] = runs) -> str:
            return _spread([run[key] for run in runs], form)

        steps, attention = preset["steps"], preset["attention"]
        seeds = f"{len(runs)} seeds, mean (least .. greatest)" if len(runs) > 1 else "one seed"
        rows = [
            ["held-out loss, sparse attention", over("sparse_loss", ".4f")],
            ["held-out loss, dense attention at equal steps", over("control_loss", ".4f")],
            ["excess of the sparse loss, at the end", over("excess", "+.2%")],
            ["largest excess after the change of attention", over("largest_excess", "+.2%")],
            [
                "KL of the indexer, before and after the warm-up",
                f"{over('kl_before', '.3f')}, {over('kl_after', '.3f')}",
            ],
            ["attention on the selected keys, before the warm-up", over("mass_before")],
            ["after the warm-up", over("mass_warm")],
            ["at the end", over("mass")],
            ["on the most recent keys", over("mass_recent")],
            ["on those with the most attention", over("mass_best")],
            ["of those with the most attention, selected", over("recall")],
        ]
        machine = on_gpu(report) if "gpu" in report else on_cpu(report)
        parts.append(
            f"{preset['n_layers']} blocks of width {preset['d_model']}, {attention['n_heads']} heads, "
            f"T = {preset['T']:,}, index_topk {attention['index_topk']}; {steps['dense']}, {steps['warmup']} and "
            f"{steps['sparse']} steps of "
            f"{preset['batch']} sequences; {seeds}; {machine}:\n\n" + markdown(["", ""], rows)
        )
    return "\n".join(parts) if parts else NOT_MEASURED


BLOCKS = {
    "attn_dist": attn_dist,
    "sparse_attention": sparse_attention,
    "sparse_attention_peer": sparse_attention_peer,
    "sparse_attention_bwd": sparse_attention_bwd,
    "indexer_distillation": indexer_distillation,
    "train_dsa": train_dsa,
}
