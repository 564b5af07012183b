"""Writes the measured tables of README.md and docs/ from benchmarks/results/*.json; never typed by hand.

python tools/update_docs.py            rewrite what lies between `<!-- generated: NAME -->` and its end mark
python tools/update_docs.py --check    exit 1 and name the files that are out of date
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from gpu_test import gpu_test_files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)


def load(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _cpu(report: dict) -> str:
    threads = f"{report['threads']} thread{'s' * (report['threads'] > 1)}"
    return f"{report['cpu']}, {threads}, torch {report['torch']}, {report['date']}"


def _gpu(report: dict) -> str:
    return f"one {report['gpu']}, driver {report['driver']}, torch {report['torch']}, {report['date']}"


def forward_cpu() -> str:
    report, whole = load("forward_cpu"), load("forward_cpu_whole")
    figures = report["figures"]
    rows = [
        [
            f"{f['T']:,}",
            str(f["layers"]),
            f"{f['candidates_per_query']:,.0f}",
            f"{f['us_per_query']:.0f}",
            f"{1e3 * f['dense']['ms'] / f['T_q']:.0f}",
            f"{f['peak_rss_bytes'] / 1e9:.2f}",
        ]
        for f in figures
    ]
    f = figures[0]
    shape = f"{f['dtype']}, H {f['H']}, H_kv {f['H_kv']}, K = V = {f['K']}, top_k {f['top_k']}"
    header = ["T", "layers", "candidates per query", "µs per query", "dense SDPA, µs per query", "peak memory, GB"]
    last = whole["figures"][0]
    return (
        f"Torch backend on a CPU, the last {f['T_q']:,} queries of T tokens, {shape} ({_cpu(report)}):\n\n"
        + markdown(header, rows)
        + f"\nAll {last['T']:,} queries of a {last['T']:,}-token sequence take {last['ms'] / 1e3:.1f} s, at most "
        f"{last['peak_rss_bytes'] / 1e9:.2f} GB of process memory; dense SDPA {last['dense']['ms'] / 1e3:.1f} s.\n"
    )


def tree_pool() -> str:
    report = load("tree_pool")
    if report is None:
        return "Not measured yet: `python tools/gpu_bench.py --only tree_pool` on a Hopper machine."
    copy = report["copy"]
    rows = [
        [
            f"{t['T']:,}",
            str(t["H_kv"]),
            f"{t['K']}, {t['V']}",
            str(t["r"]),
            str(t["layers"] - 1),
            f"{t['bytes'] / 1e9:.3f}",
            f"{1e3 * t['median_ms']:.1f}",
            f"{1e3 * t['p90_ms']:.1f}",
            f"{t['tb_per_s']:.2f}",
            f"{100 * t['of_copy']:.0f}%",
        ]
        for t in report["timings"]
    ]
    header = ["T", "H_kv", "K, V", "r", "layers", "GB", "median, µs", "p90, µs", "TB/s", "of the copy"]
    return (
        f"bfloat16, B 1, one {report['gpu']} (driver {report['driver']}, CUDA {report['cuda']}, SM clock "
        f"{copy['sm_mhz']} MHz), {report['date'][:10]}; a device copy of {copy['bytes'] / 1e9:.1f} GB (read and "
        f"written) in the same run: {copy['tb_per_s']:.2f} TB/s.\n\n" + markdown(header, rows)
    )


NOT_MEASURED = "Not measured yet: `make gpu-bench` on a Hopper machine."


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
    """In turns with FlashMLA; a sentence until that was measured."""
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
        f"In turns with FlashMLA{f' ({about})' if about else ''}, s_q {f['s_q']:,}, topk {f['topk']:,}, d_qk "
        f"{f['d_qk']}, {f['dtype']}, {_gpu(report)}, medians back to back and with a pause as long before each call; "
        f"outputs differ by at most {max(f['flash_mla']['difference'] for f in figures):.1%} of the largest entry:\n\n"
        + markdown(["h_q", "s_kv", *columns, *(f"{name}, with pauses" for name in columns)], rows)
    )


def forward_gpu(phases: bool = True) -> str:
    report = load("forward_gpu")
    if report is None:
        return NOT_MEASURED
    rows = [
        [
            f"{f['T']:,}",
            f["inputs"],
            f"{f['ms']:.2f}",
            f"{f['p90_ms']:.2f}",
            f"{min(f['ms_by_seed'].values()):.2f} .. {max(f['ms_by_seed'].values()):.2f}",
            f"{f['dense']['ms']:.2f}" + (" (once)" if f["dense"]["calls"] == 1 else "") if "dense" in f else "",
            f"{f['speedup_over_dense']:.2f}" if "dense" in f else "",
            f"{f['tflops']:.0f}",
            f"{f['ms'] / f['floor_ms']:.1f}" if "floor_ms" in f else "",
            f"{f['peak_bytes'] / 1e6:,.0f}",
        ]
        for f in report["figures"]
    ]
    f = report["figures"][0]
    shape = f"B {f['B']}, H {f['H']}, H_kv {f['H_kv']}, K = V = {f['K']}, {f['dtype']}, top_k {f['top_k']}"
    where = ", ".join(f"{kind}: {at or 'none'}" for kind, at in report["crossover"].items())
    seeds = f"{len(f['ms_by_seed'])} seeds, ms"
    header = [
        "T",
        "inputs",
        "median, ms",
        "p90, ms",
        seeds,
        "dense (SDPA), ms",
        "dense / this",
        "TFLOP/s",
        "this / floor of its FLOPs at 600 TFLOP/s",
        "peak beyond inputs, MB",
    ]
    text = f"{shape} ({_gpu(report)}); faster than dense from T = ({where}):\n\n" + markdown(header, rows)
    profiled = [f for f in report["figures"] if "phases_ms" in f and phases]
    names = list(dict.fromkeys(name for f in profiled for name in f["phases_ms"]))
    if names:
        phase_rows = [
            [f"{f['T']:,}", f["inputs"], *(f"{f['phases_ms'].get(name, 0.0):.2f}" for name in names)] for f in profiled
        ]
        text += (
            "\n\nBy phase, ms, from the end of one kernel to the end of the next in a profiled call:\n\n"
            + markdown(["T", "inputs", *names], phase_rows)
        )
    return text


SHAPES = {
    "H 16, H_kv 1, K = V = 128": "forward_gpu",
    "H 64, H_kv 4": "forward_gpu_h64_kv4",
    "H 8, H_kv 1": "forward_gpu_g8",
    "H 32, H_kv 8": "forward_gpu_g4",
    "K = V = 64": "forward_gpu_d64",
}


def forward_shapes() -> str:
    """Median milliseconds of other heads and dimensions, iid / local; and the last queries of two million tokens."""
    reports = {name: load(file) for name, file in SHAPES.items()}
    long = load("forward_gpu_2m")
    if long is None or None in reports.values():
        return NOT_MEASURED
    lengths = [16384, 65536, 131072, 262144]
    times = {name: {(f["T"], f["inputs"]): f["ms"] for f in report["figures"]} for name, report in reports.items()}
    rows = [
        [name, *(" / ".join(f"{found[T, kind]:.2f}" for kind in ("iid", "local")) for T in lengths)]
        for name, found in times.items()
    ]
    last = " / ".join(f"{f['ms']:.0f}" for f in long["figures"])
    f = long["figures"][0]
    return (
        f"Median, ms, iid / local ({_gpu(long)}):\n\n"
        + markdown(["", *(f"{T // 1024}K" for T in lengths)], rows)
        + f"\n\nThe last {f['T_q']:,} queries of {f['T']:,} tokens: {last} ms, "
        + f"{f['peak_bytes'] / 1e6:,.0f} MB beyond inputs."
        + one_query()
    )


def one_query() -> str:
    report = load("forward_gpu_one")
    if report is None:
        return ""
    times = "; ".join(
        f"T = {f['T']:,}, {f['inputs']}: {f['ms']:.2f} ms"
        + (f" (dense {f['dense']['ms']:.2f})" if "dense" in f else "")
        for f in report["figures"]
    )
    return f"\n\nOne query ({_gpu(report)}): {times}."


def backward_gpu() -> str:
    report = load("backward_gpu")
    if report is None:
        return NOT_MEASURED
    kernels = [name for name in report["figures"][0]["kernels_ms"] if name != "all"]
    rows = [
        [
            f"{f['T']:,}", f["inputs"], f"{f['ms']:.1f}", f"{f['p90_ms']:.1f}",
            *(f"{f['kernels_ms'][name]:.1f}" for name in kernels),
            f"{f['dense']['ms']:.1f}" if "dense" in f else "",
            f"{f['peak_bytes'] / 1e6:,.0f}", f"{f['gradient_bytes'] / 1e6:,.0f}",
        ]
        for f in report["figures"]
    ]  # fmt: skip
    header = ["T", "inputs", "median, ms", "p90, ms", *kernels, "dense (SDPA), ms", "peak, MB", "of it gradients"]
    return f"{_gpu(report)}:\n\n" + markdown(header, rows)


def first_run() -> str:
    report = load("first_run")
    if report is None:
        return "Not timed yet: `python tools/first_run.py`."
    rows = [[f"`make {name}`", f"{r['first_s']:.0f} s", f"{r['again_s']:.0f} s"] for name, r in report.items()]
    r = next(iter(report.values()))
    return (
        f"Fresh clones on a machine without a GPU ({r['cores']} cores, Python {r['python']}, nvcc and g++ present, so "
        f"`make test` compiles the kernels; {r['date']}):\n\n"
        + markdown(["", "from nothing, installation included", "again"], rows)
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
        f"({_cpu(report)}):\n\n" + markdown([f"{settings['top_k']} keys chosen", "recall", "attention on them"], rows)
    )


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def training_table(report: dict) -> str:
    """One row an arm; mean (least .. greatest) over the seeds, and tokens per second where they were measured."""
    tasks = report["tasks"]
    finals = {
        name: {arm: [run["final"] for run in task["runs"] if run["arm"] == arm] for arm in ("dense", "htree", "window")}
        for name, task in tasks.items()
    }
    speed = {(found["T"], found["arm"]): found["tokens_per_s"] for found in report.get("throughput", [])}
    lengths = sorted({T for T, _ in speed})
    dense = statistics.fmean(final["loss"] for final in finals["text"]["dense"])
    rows = []
    for arm in ("dense", "htree", "window"):
        losses = [final["loss"] for final in finals["text"][arm]]
        rows.append([
            arm,
            _spread(losses, ".3f"),
            f"{100 * (statistics.fmean(losses) / dense - 1):+.1f}%",
            _spread([final["accuracy"] for final in finals["recall"][arm]], ".1%"),
            *(f"{speed[T, arm]:,}" for T in lengths),
        ])  # fmt: skip
    text, recall = tasks["text"], tasks["recall"]
    header = [
        "arm", "text: held-out loss, nats per byte", "to dense", f"recall (chance {recall['data']['chance']:.1%})",
        *(f"tokens/s, T {T:,}" for T in lengths),
    ]  # fmt: skip
    seeds = {run["seed"] for task in tasks.values() for run in task["runs"]}
    return (
        f"{len(seeds)} seeds, mean (least .. greatest). Text at T = {text['tree']['T']:,}, recall at T = "
        f"{recall['tree']['T']:,}, {text['tree']['layers']} and {recall['tree']['layers']} layers; a query visits "
        f"{text['tree']['candidates_mean']:.0f} and {recall['tree']['candidates_mean']:.0f} candidates on average, the "
        f"width of the window; the last one {text['tree']['share_last']:.1%} and {recall['tree']['share_last']:.1%} "
        "of T.\n\n" + markdown(header, rows)
    )


def _study(report: dict) -> str:
    return f"CPU preset ({report['cores']} CPU cores, {_cpu(report)})"


def _protocol(preset: dict) -> str:
    stages = ", ".join(f"{s['T']:,} x {s['batch']} ({s['steps']})" for s in preset["recall"]["stages"])
    text = preset["text"]["stages"][0]
    return (
        f"d_model {preset['d_model']}, {preset['n_layers']} blocks, {preset['n_heads']} query heads on "
        f"{preset['n_kv_heads']} KV head{'s' if preset['n_kv_heads'] > 1 else ''} of {preset['head_dim']}, "
        f"compression_rate {preset['compression_rate']}, top_k {preset['top_k']}. Text: {text['steps']:,} steps of "
        f"{text['batch']} x {text['T']:,} bytes. Recall: {preset['n_keys']} keys, {preset['n_values']} values, kinds "
        f"of filler: {preset['n_filler']}; stages T x batch (steps): {stages}."
    )


def training() -> str:
    report = load("train_cpu")
    return f"{_study(report)}: {_protocol(report['preset'])}\n\n" + training_table(report)


def training_short() -> str:
    report = load("train_cpu")
    return f"{_study(report)}, " + training_table(report)


def training_gpu() -> str:
    """The log of the GPU preset; an arm may lack seeds."""
    report = load("train_gpu")
    if report is None:
        return NOT_MEASURED
    preset = report["preset"]
    speed = {(found["T"], found["arm"]): found["tokens_per_s"] for found in report["throughput"]}
    lengths = sorted({T for T, _ in speed})
    tree = report["tasks"]["text"]["tree"]
    parts = [
        f"{_gpu(report)}; {preset['n_heads']} query heads on {preset['n_kv_heads']} KV heads of {preset['head_dim']}, "
        f"{preset['n_layers']} blocks; {tree['layers']} layers, {tree['candidates_mean']:.0f} candidates a query on "
        f"average, the last query visits {tree['share_last']:.1%} of T.\n"
    ]
    for name, what in (("text", "loss"), ("recall", "accuracy")):
        task = report["tasks"][name]
        stages = ", ".join(f"{s['T']:,} x {s['batch']} ({s['steps']:,})" for s in preset[name]["stages"])
        header = ["arm", "held-out loss, by seed" if name == "text" else "accuracy, by seed", "mean", "seconds a run"]
        header += [f"tokens/s, T {T:,}" for T in lengths if name == "text"]
        rows = []
        for arm in ("dense", "htree", "window"):
            runs = [run for run in task["runs"] if run["arm"] == arm]
            finals = [run["final"][what] for run in runs]
            show = "{:.3f}".format if name == "text" else "{:.1%}".format
            seconds = statistics.fmean(run["seconds"] for run in runs)
            rows.append([arm, ", ".join(map(show, finals)), show(statistics.fmean(finals)), f"{seconds:.0f}"])
            if name == "text":
                rows[-1] += [f"{speed[T, arm]:,}" for T in lengths]
        chance = f", chance {task['data']['chance']:.1%}" if name == "recall" else ""
        parts.append(f"{name.capitalize()}{chance}: T x batch (steps) {stages}.\n\n" + markdown(header, rows))
    return "\n".join(parts)


def measured() -> str:
    """The README's short version of every result."""
    parts = []
    report = load("tree_pool")
    if report is not None:
        best = report["timings"][0]
        parts.append(
            f"**Tree pooling** ({report['gpu']}, {report['date'][:10]}): T = {best['T']:,}, H_kv {best['H_kv']}, "
            f"K = V = {best['K']}, bf16: {best['median_ms']:.2f} ms, {best['tb_per_s']:.2f} TB/s, "
            f"{100 * best['of_copy']:.0f}% of a device copy ([docs/tree_pool.md](docs/tree_pool.md)).\n"
        )
    report = load("attn_dist")
    if report is not None:
        parts.append("**attn_dist** ([docs/attn_dist.md](docs/attn_dist.md)): " + sparse_table(report))
    if load("sparse_attention_gpu") is not None:
        title = "**sparse_attention** ([docs/sparse_attention_kernel.md](docs/sparse_attention_kernel.md))"
        parts.append(f"{title}: {sparse_attention_peer()}")
    if load("forward_gpu") is not None:
        parts.append("**forward**: " + forward_gpu(phases=False))
    parts.append("**forward**: " + forward_cpu())
    report = load("gpu_tests")
    if report is not None:
        outcomes = [o for job in report["jobs"].values() for o in job.get("tests", {}).values()]
        files = [name for name in report["jobs"] if name.startswith("tests/")]
        sanitizers = sum("sanitizer" in name or "check " in name for name in report["jobs"])
        skipped = sorted({o.removeprefix("skipped: ") for o in outcomes if o.startswith("skipped")})
        ran = sum(not o.startswith("skipped") for o in outcomes)
        passed = f"{outcomes.count('passed')} of {ran} passed, and {sanitizers} runs of compute-sanitizer"
        if skipped:
            passed += f"; {len(outcomes) - ran} skipped ({'; '.join(skipped)})"
        missing = [file for file in gpu_test_files() if file not in report["jobs"]]
        if missing:
            passed += f". Not run with these sources: {', '.join(missing)}"
        parts.append(
            f"**GPU tests** of {', '.join(files)} ({report['gpu']}, driver {report['driver']}, "
            f"torch {report['torch']}, {report['date'][:10]}): {passed}. "
            f"The CPU tests ran with torch {load('forward_cpu')['torch']}.\n"
        )
    return "\n".join(parts)


GENERATORS: dict[str, Callable[[], str]] = {
    "tree_pool": tree_pool,
    "attn_dist": attn_dist,
    "sparse_attention": sparse_attention,
    "sparse_attention_peer": sparse_attention_peer,
    "forward_cpu": forward_cpu,
    "forward_gpu": forward_gpu,
    "forward_shapes": forward_shapes,
    "backward_gpu": backward_gpu,
    "first_run": first_run,
    "indexer_distillation": indexer_distillation,
    "measured": measured,
    "training": training,
    "training_short": training_short,
    "training_gpu": training_gpu,
}


def regenerate(text: str) -> str:
    def block(match: re.Match) -> str:
        name = match[2]
        if name not in GENERATORS:
            raise SystemExit(f"no generator named {name!r}; there are {', '.join(GENERATORS)}")
        return match[1] + "\n" + GENERATORS[name]().strip() + "\n\n" + match[4]

    return BLOCK.sub(block, text)


def main(argv: list[str]) -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]:
        before = path.read_text()
        after = regenerate(before)
        if before != after:
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in argv:
                path.write_text(after)
    if "--check" in argv:
        if stale:
            print(f"out of date, run tools/update_docs.py: {', '.join(stale)}")
        return 1 if stale else 0
    print(f"updated {', '.join(stale)}" if stale else "nothing to update")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
