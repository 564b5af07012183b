"""The benchmark program's own arithmetic: counts, the break-even, the phases of a call."""

from __future__ import annotations

import json
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from htree_cuda import attn_dist, definition, forward_cached, sparse_attention
from htree_cuda.bench import attn_dist as bench_attn_dist
from htree_cuda.bench import (
    backward,
    budgets,
    cli,
    forward,
    inputs,
    packed,
    peers,
    phases,
    plots,
    protocol,
    tables,
    trained,
)
from htree_cuda.bench import context_parallel as bench_context_parallel
from htree_cuda.bench import decode as bench_decode
from htree_cuda.bench import dsa as bench_dsa
from htree_cuda.bench import sparse_attention as bench_sparse_attention

CSRC = Path(__file__).resolve().parents[2] / "csrc"


@pytest.mark.parametrize(("T", "T_q", "r", "top_k"), [(1, 1, 2, 1), (50, 50, 2, 2), (300, 70, 4, 2), (257, 257, 16, 1)])
def test_visited_counts_candidates_and_leaves(T, T_q, r, top_k):
    """Against the candidate lists of the definition itself."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 1, 2, generator=g, dtype=torch.float64) for n in (T_q, T))
    selection = definition.forward(q, k, k, compression_rate=r, top_k_per_layer=top_k).selection
    layers = selection.shape[0] + 1
    candidates = leaves = 0
    for i in range(T_q):
        parents = None
        for layer in reversed(range(layers)):
            c = definition.candidate_list(parents, (T - T_q + i) // r**layer, r, q.device)
            candidates += len(c)
            leaves += len(c)
            if layer > 0:
                row = selection[layer - 1, 0, i, 0]
                parents = row[row >= 0].to(torch.int64)
                leaves -= len(parents)
    assert inputs.visited(T, T - T_q, T, r, top_k, top_k * r) == (candidates, leaves)


def test_break_even_is_where_dense_attention_stays_behind():
    figures = [
        {"T": T, "speedup_over_dense": x, "dense": {}} for T, x in ((8, 1.2), (16, 0.9), (64, 3.0), (32, 1.0), (4, 0.5))
    ]
    assert tables.break_even(figures) == 32
    assert tables.break_even(figures[1:2]) is None
    local = [{"T": T, "speedup_over_dense": x, "dense": {}, "inputs": "local"} for T, x in ((32, 0.8), (64, 1.5))]
    assert tables.break_even(figures + local) == 64, "one number a shape: every kind of input counts"
    assert tables.break_even([{"T": 128}]) is None, "dense attention was not measured"


def test_every_option_has_help(capsys):
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out.split("options:")[1]
        options = re.findall(r"^  (?:-h, )?--[\w-]+.*?(?=^  -|\Z)", text, re.MULTILINE | re.DOTALL)
        assert len(options) >= 10
        for option in options:
            lines = option.splitlines()
            words = re.sub(r"^  (-h, )?--[\w-]+( \{[^}]*\}| [A-Z_]+)?", "", lines[0]) + " ".join(lines[1:])
            assert len(words.replace("(default:", "").split()) >= 2, option


def test_phases_know_every_kernel_of_the_forward():
    """As a profiler names them; a kernel that nobody has sorted would count as other."""
    config = (
        "htree_cuda::sm90::htree_fwd::Traits<__nv_bfloat16, 128, 128, (htree_cuda::sm90::htree_fwd::Pass){}, "
        "(htree_cuda::sm90::htree_fwd::LayerKind){}>"
    )
    for number, name in enumerate(("score", "attend")):
        configs = ", ".join(config.format(number, kind) for kind in (1, 2, 0))
        kernel = f"void htree_cuda::sm90::htree_fwd::htree_fwd_kernel<{configs} >(htree_cuda::sm90::htree_fwd::Args)"
        assert phases.phase_of(kernel) == name
        assert phases.phase_of(kernel.replace(config.format(number, 2), "void")) == name
    told = re.search(r"char const\* phase; +// ([\w, ]+)", (CSRC / "params.h").read_text())[1].split(", ")
    assert set(phases.PHASES) <= set(told), "the names that explain has"
    bounds = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+"
    # What tree/append has is no part of a forward.
    folders = ("tree/build_union", "tree/pack", "tree/pool", "tree/select", "sm90/htree_fwd")
    found = set()
    for folder in folders:
        for path in (CSRC / folder).rglob("*.cuh"):
            found |= set(re.findall(rf"__global__ void (?:{bounds})?(\w+)\(", path.read_text()))
    assert len(found) >= 6
    template = "<" + config.format(0, 0) + ">"
    assert {name for name in found if phases.phase_of(name + template) == "other"} == set()
    assert phases.phase_of("void at::native::vectorized_elementwise_kernel<4>") == "other"


def test_profiles_count_what_a_kernel_adds_to_the_call():
    """Launches overlap: `b` begins before `a` ends, and waits for it."""
    first = [("a", 0.0, 4.0), ("b", 3.0, 9.0), ("a", 8.5, 10.0)]
    second = [(name, start + 10.0, end + 10.0) for name, start, end in first]
    rows = phases.increments([*second, *first], calls=2)
    assert rows == [("a", 4.0, 4.0), ("b", 5.0, 6.0), ("a", 1.0, 1.5)]
    assert sum(step for _, step, _ in rows) == 10.0  # the call
    for events, calls in ((first, 2), (first, 1), ([], 2)):
        with pytest.raises(ValueError, match="equal calls"):
            phases.increments(events, calls)


def test_the_backward_is_timed_on_the_gradients_of_its_inputs(tmp_path, monkeypatch, capsys):
    """Every figure has times of htree and dense attention, and what was timed gives dq, dk and dv."""
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    shapes = []
    original = backward.measure

    def measure(call, device):
        shapes.append([x.shape for x in call()])
        return original(call, device)

    monkeypatch.setattr(backward, "measure", measure)
    options = [
        "--lengths",
        "40,70",
        "--inputs",
        "local",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--dim",
        "4",
        "--top-k",
        "4",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    options += ["--dense-up-to", "40", "--out", str(tmp_path / "b.json")]
    assert cli.main(["backward", *options]) == 0
    figures = json.loads((tmp_path / "b.json").read_text())["figures"]
    assert [(f["T"], "dense" in f) for f in figures] == [(40, True), (70, False)]
    assert all(f["ms"] > 0 and f["gradient_bytes"] == 4 * f["T"] * 4 * (2 + 1 + 1) for f in figures)
    assert shapes == [[(1, T, H, 4) for H in (2, 1, 1)] for T in (40, 40, 70)]
    assert "70" in capsys.readouterr().out


def test_a_long_dense_peer_is_called_once(tmp_path, monkeypatch):
    """Beyond --dense-up-to and up to --dense-once. One point runs in a process of its own, as all do on a CPU; such a
    process takes seconds to start."""
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    in_child = forward._in_child
    here = lambda function, args, T, kind: (in_child if T == 40 else lambda f, *x: f(*x))(function, args, T, kind)  # noqa: E731
    monkeypatch.setattr(forward, "_in_child", here)
    options = ["--lengths", "40,70,100", "--heads", "2", "--kv-heads", "1", "--dim", "4", "--top-k", "4"]
    options += ["--device", "cpu", "--dtype", "float32", "--dense-up-to", "40", "--dense-once", "70"]
    options += ["--out", str(tmp_path / "f.json")]
    assert cli.main(["forward", *options]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    calls = [f["dense"]["calls"] if "dense" in f else 0 for f in figures]
    assert calls[0] >= protocol.LEAST_CALLS_CPU and calls[1:] == [1, 0]
    assert all(f["gathered_bytes"] == 4 * 4 * f["T"] * f["candidates_per_query"] * 2 for f in figures[:1])


class Peer:
    """What cuDNN frontend documents: heads added, and each row divided by its sum."""

    scale_error = 1.0

    @classmethod
    def sparse_attn_score_recompute_wrapper(cls, q, k, lse, indices, scale, *, qhead_per_kv_head):
        assert qhead_per_kv_head == q.shape[2] and indices.dtype == torch.int32
        scores = torch.einsum("bshd,bstd->bsht", q, k[0][indices.long()]) * scale * cls.scale_error
        target = torch.exp(scores - lse[..., None]).sum(2)
        return {"target": target / target.sum(-1, keepdim=True)}


def test_the_cudnn_peer_is_given_what_it_documents(monkeypatch):
    q, k, indices, lse = inputs.dist_inputs(5, 3, 40, 16, 8, torch.float32, "cpu", 0)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert peers.cudnn_attn_dist(q, k, indices, lse) is None, "not installed"
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(DSA=Peer))
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    ours = attn_dist(q, k, indices, lse)
    figures = bench_attn_dist._cudnn_figures(ours, peers.cudnn_attn_dist(q, k, indices, lse), "cpu")
    assert figures["cudnn_frontend"]["ms"] > 0 and figures["cudnn_frontend"]["relative_error"] < 1e-5
    monkeypatch.setattr(Peer, "scale_error", 3.0)
    wrong = bench_attn_dist._cudnn_figures(ours, peers.cudnn_attn_dist(q, k, indices, lse), "cpu")
    assert "differs" in wrong["cudnn_frontend_error"] and "cudnn_frontend" not in wrong
    monkeypatch.setattr(Peer, "scale_error", None)
    refused = bench_attn_dist._cudnn_figures(ours, peers.cudnn_attn_dist(q, k, indices, lse), "cpu")
    assert refused["cudnn_frontend_error"].startswith("TypeError")


class FlashMLA:
    """What FlashMLA documents: out, largest logits and lse; values are the first 512 columns."""

    scale_error = 1.0

    @classmethod
    def flash_mla_sparse_fwd(cls, q, kv, indices, sm_scale):
        assert indices.dtype == torch.int32 and sm_scale == q.shape[2] ** -0.5
        gathered = kv[indices[:, 0].long(), 0].float()
        scores = torch.einsum("shd,std->sht", q.float(), gathered) * sm_scale * cls.scale_error
        out = torch.einsum("sht,std->shd", scores.softmax(2), gathered[..., :512])
        return out.to(q.dtype), scores.amax(2), scores.logsumexp(2)


def test_gradients_of_sparse_attention_are_measured_in_both_ways(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    options = ["--backward", "--lengths", "40", "--queries", "3", "--heads-list", "65,2", "--topk", "16", "--dim", "8"]
    options += ["--value-dim", "4", "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path / "s.json")]
    assert cli.main(["sparse_attention", *options]) == 0
    figures = json.loads((tmp_path / "s.json").read_text())["figures"]
    assert [f["h_q"] for f in figures] == [65, 2]
    for f in figures:
        assert f["op"] == "sparse_attention_backward" and f["flops"] == 2 * 3 * 16 * f["h_q"] * (3 * 8 + 2 * 4)
        assert f["ms"] > 0 and f["deterministic"]["of_atomic"] == round(f["deterministic"]["ms"] / f["ms"], 4)
    assert "of atomic" in capsys.readouterr().out


def test_sparse_attention_is_measured_without_a_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMLA)
    options = ["--lengths", "40,50", "--queries", "3", "--heads-list", "65,2", "--topk", "16", "--dim", "8"]
    options += ["--value-dim", "4", "--device", "cpu", "--dtype", "float32", "--out", str(tmp_path / "s.json")]
    assert cli.main(["sparse_attention", *options]) == 0
    figures = json.loads((tmp_path / "s.json").read_text())["figures"]
    assert [(f["h_q"], f["s_kv"]) for f in figures] == [(65, 40), (65, 50), (2, 40), (2, 50)]
    for f in figures:
        assert f["flops"] == 2 * 3 * 16 * f["h_q"] * (8 + 4)
        assert f["gathered_bytes"] == 3 * 16 * 8 * 4 * (2 if f["h_q"] == 65 else 1)
        assert f["calls"] >= protocol.ROUNDS * protocol.LEAST_CALLS_CPU and f["spaced"]["ms"] > 0
        assert "flash_mla" not in f, "the peer is a kernel"
    header, *rows = capsys.readouterr().out.splitlines()
    assert "FlashMLA ms" in header and rows[0].split()[-1] == "-"


def test_the_flash_mla_peer_is_given_what_it_documents(monkeypatch):
    shape = (2, 64, 200, 128, 576)
    q, kv, indices = inputs.list_inputs(*shape, torch.bfloat16, "cpu", 0)
    assert all(len(set(row.tolist())) == 128 for row in indices[:, 0]) and 0 <= indices.min() <= indices.max() < 200

    def ours():
        return sparse_attention(q, kv, indices)[0]

    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert peers.flash_mla_attention(q, kv, indices) is None, "not installed"
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMLA)
    for lacking in ((q.float(), kv.float(), indices), (q[:, :63], kv, indices), (q, kv, indices[..., :127])):
        assert peers.flash_mla_attention(*lacking) is None
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    peer = peers.flash_mla_attention(q, kv, indices)
    figures = bench_sparse_attention._figures(ours, peer, "cpu")
    found = figures["flash_mla"]
    assert found["version"] is None and "note" not in found and found["difference"] < 0.01
    for mine, other in ((figures, found), (figures["spaced"], found["spaced"])):
        assert mine["speedup_over_flash_mla"] == pytest.approx(other["ms"] / mine["ms"], abs=1e-4)
    monkeypatch.setattr(FlashMLA, "__version__", "1.2", raising=False)
    monkeypatch.setattr(FlashMLA, "__note__", "built here", raising=False)
    assert peers.flash_mla_identity() == {"version": "1.2", "note": "built here"}
    distributions = {"flash_mla": ["sgl-flash-mla"]}
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: distributions)
    assert peers.flash_mla_identity()["distribution"] == "sgl-flash-mla"
    for wrong in (3.0, math.nan):
        monkeypatch.setattr(FlashMLA, "scale_error", wrong)
        with pytest.raises(RuntimeError, match="FlashMLA differs from sparse_attention by"):
            bench_sparse_attention._figures(ours, peer, "cpu")

    def keeps_hopper_apart(q, kv, indices, sm_scale, use_legacy=False, return_log2_lse=None):
        asked.append((use_legacy, return_log2_lse))
        return kv, None, None

    asked = []
    monkeypatch.setattr(FlashMLA, "flash_mla_sparse_fwd", staticmethod(keeps_hopper_apart))
    peers.flash_mla_attention(q, kv, indices)()
    assert asked == [(True, True)]


def test_calls_are_interleaved_and_their_times_are_pooled(monkeypatch):
    """First all rounds back to back, then all with pauses as long as each call's median."""
    seen = []

    def sample(call, device, pause_ms):
        seen.append((call, pause_ms))
        return [len(seen)] * 3, {"power_w": len(seen) if len(seen) > 1 else None}

    monkeypatch.setattr(protocol, "sample", sample)
    results = protocol.measure_interleaved({"a": "A", "b": "B"}, "cuda")
    assert seen == [("A", 0.0), ("B", 0.0)] * 3 + [("A", 3), ("B", 4)] * 3
    assert [results[name]["ms"] for name in "ab"] == [3, 4]
    assert results["a"]["calls"] == 9 and results["a"]["p90_ms"] == 5 and results["a"]["power_w"] == 3
    assert [results[name]["spaced"]["ms"] for name in "ab"] == [9, 10]


def test_a_pause_is_spent_before_a_call_is_timed(monkeypatch):
    """On a GPU that is a list of what was enqueued, 1,000 clocks a microsecond; a call takes 2 ms."""
    queue: list[str | int] = []
    probed = ("1500, 500.5\n", None)

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            queue.append("event")
            self.at = sum(2.0 if work == "call" else work / 1e6 for work in queue if work != "event")

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    fakes = {
        "Event": Event, "_sleep": queue.append, "synchronize": lambda: None, "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 5, "max_memory_allocated": lambda: 12,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(protocol, "_this_gpu", lambda: "--id=0")
    monkeypatch.setattr(protocol, "WARM_UP_S", 0.0)
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    monkeypatch.setattr(
        protocol.subprocess, "Popen", lambda *_, **__: types.SimpleNamespace(communicate=lambda timeout: probed)
    )
    for pause_ms, spent_ms in ((3.0, 3.0), (0.01, protocol.LEAST_PAUSE_MS)):
        queue.clear()
        times, about = protocol.sample(lambda: queue.append("call"), "cuda", pause_ms)
        assert times == pytest.approx([2.0] * protocol.LEAST_CALLS_GPU)
        assert about == pytest.approx({"clock_mhz": 1500.0, "power_w": 500.5, "peak_bytes": 7, "pause_ms": spent_ms})
        assert queue[4:8] == [round(spent_ms * 1e6), "event", "call", "event"]
    queue.clear()
    times, about = protocol.sample(lambda: queue.append("call"), "cuda")
    assert queue == ["event", "call", "event"] * protocol.LEAST_CALLS_GPU and "pause_ms" not in about


def test_decode(tmp_path, monkeypatch, capsys):
    """A step's cache ends where it began, dense attention sees the same keys, bytes are those of what is visited."""
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    lengths = []

    def spy(q, cache, **options):
        lengths.append(cache.lengths.tolist())
        return forward_cached(q, cache, **options)

    monkeypatch.setattr(bench_decode, "forward_cached", spy)
    options = ["--device", "cpu", "--dtype", "float32", "--dim", "16", "--batches", "2", "--lengths", "40,600"]
    files = ["--out", str(tmp_path / "decode.json"), "--plot", str(tmp_path / "decode.png")]
    assert cli.main(["decode", *options, "--heads", "4/2,2/1", "--top-k", "4,16", *files]) == 0
    report = json.loads((tmp_path / "decode.json").read_text())
    assert "break_even" not in report and (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
    figures = report["figures"]
    shapes = [(f["T"], f["H"], f["H_kv"], f["top_k"]) for f in figures]
    assert shapes == [(T, *pair, k) for pair in ((4, 2), (2, 1)) for T in (40, 600) for k in (4, 16)]
    assert {tuple(x) for x in lengths} == {(T + i, T + i) for T in (40, 600) for i in range(5)}
    for f in figures:
        counts = [inputs.visited(604, t, t + 1, 16, f["top_k"], 16 * f["top_k"]) for t in range(600, 604)]
        if f["T"] == 600:
            assert f["bytes"] == 2 * f["H_kv"] * 16 * 4 * sum(map(sum, counts)) / 4
        assert f["ms"] == f["step"]["eager"]["ms"] > 0 and f["append"]["eager"]["ms"] > 0
        assert f["speedup"] == pytest.approx(f["dense"]["ms"] / f["ms"], abs=1e-3)
        glances = f["dense"]["glance_ms"]
        assert f["dense"]["backend"] == min(glances, key=glances.get) and f["dense"]["ms"] == f["dense"]["eager"]["ms"]
    assert "of the byte floor" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["decode", "--heads", "3/2"])


def test_a_step_of_decoding_of_dsa(tmp_path, capsys):
    options = ["--device", "cpu", "--dtype", "float32", "--dim", "24", "--value-dim", "16", "--index-dim", "8"]
    sizes = ["--batches", "1,2", "--lengths", "30,50", "--heads-list", "4", "--index-heads", "2", "--topk", "40"]
    out = tmp_path / "dsa_decode.json"
    assert cli.main(["dsa_decode", *options, *sizes, "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert [(f["s_kv"], f["B"]) for f in figures] == [(30, 1), (30, 2), (50, 1), (50, 2)]
    parts = {"indexer_topk", "sparse_attention", "indexer_topk_fp8"}
    for f in figures:
        assert f["ms"] == f["eager"]["ms"] > 0 and set(f["parts"]) == parts
        assert f["speedup_over_dense"] == pytest.approx(f["dense"]["ms"] / f["ms"], abs=1e-3)
    assert "speedup" in capsys.readouterr().out
    assert cli.main(["dsa_decode", *options[:6], "--value-dim", "32"]) == 2
    assert "--value-dim must be at most --dim, 24, got 32" in capsys.readouterr().err


def test_decode_keeps_the_rows_of_a_run_that_is_ended(tmp_path, monkeypatch, capsys):
    """Each row is printed and in the file when it is measured: a run that reaches its time limit loses the last one."""
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)

    def ends(q, cache, top_k_per_layer, **options):
        if top_k_per_layer == 16:
            raise KeyboardInterrupt
        return forward_cached(q, cache, top_k_per_layer=top_k_per_layer, **options)

    monkeypatch.setattr(bench_decode, "forward_cached", ends)
    options = ["--device", "cpu", "--dtype", "float32", "--dim", "16", "--batches", "1", "--lengths", "40"]
    with pytest.raises(KeyboardInterrupt):
        cli.main(["decode", *options, "--heads", "2/1", "--top-k", "4,16", "--out", str(tmp_path / "decode.json")])
    (figure,) = json.loads((tmp_path / "decode.json").read_text())["figures"]
    assert figure["top_k"] == 4 and "top_k 4, step us" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


def test_quick_decode_measures_its_six_shapes():
    args = cli._parser().parse_args(["decode", "--quick"])
    assert [(B, T // 1024, H, H_kv) for B, T, H, H_kv in bench_decode.points(args)] == [
        (1, 32, 32, 8), (1, 128, 32, 8), (1, 1024, 16, 1), (16, 32, 32, 8), (8, 128, 32, 8), (64, 32, 32, 8),
    ]  # fmt: skip


def test_short_protocol_times_the_parts_of_a_call(monkeypatch):
    """A first call never counts: a long one is made once more, a short one is warm before it counts."""
    now, seen = [0.0], []
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: now[0])

    def call(mark):
        now[0] += seconds
        mark()
        now[0] += 2 * seconds
        seen.append(now[0])

    seconds = 0.2
    short = protocol.Short(warm_up_s=1.0, timed_s=2.0, long_s=0.5, least=2)
    assert protocol.laps(call, "cpu", short) == [pytest.approx([200.0, 400.0])] and len(seen) == 2
    seconds = 0.1
    found = protocol.laps(call, "cpu", short)
    assert found == [pytest.approx([100.0, 200.0])] * 7, "the calls of two seconds"
    assert len(seen) == 2 + 1 + 4 + 7, "the two before, the first one, a second of them, and those"


TINY_TRAINING = ((64, 1, 2), (96, 1, 1))


@pytest.fixture
def tiny_decoders(monkeypatch, tmp_path):
    monkeypatch.setattr(trained, "FOLDER", tmp_path / "trained")
    monkeypatch.setattr(trained, "STAGES", TINY_TRAINING)
    monkeypatch.setattr(trained, "_found", {})
    return tmp_path / "trained"


def test_trained_inputs_are_what_decoders_compute(tiny_decoders, monkeypatch):
    """KV heads over blocks, then over the heads of a block, then over seeds; a shorter sequence is a longer one's
    beginning; a kept checkpoint is used again."""
    q, k, v = inputs.tree_inputs("trained", 1, 80, 80, 40, 10, 8, 8, torch.float32, "cpu", 3)
    assert q.shape == (1, 80, 40, 8) and k.shape == v.shape == (1, 80, 10, 8)
    assert sorted(path.name for path in tiny_decoders.iterdir()) == [
        f"trained_g4_d8_text_htree_{seed}.pt" for seed in (3, 4)
    ]
    example = sys.modules["train_bytes"]
    run = trained._decoder(4, 8, 3, torch.device("cpu"))
    assert run.step == 3 and run.model.blocks[0].attention.options["top_k_per_layer"] == trained.TOP_K
    x = run.model.embedding(run.data.parts["validation"][:80].long()[None])
    for i, block in enumerate(run.model.blocks):
        expected = block.attention.project(block.attention_norm(x))
        for head in range(2):
            at = 4 * head + i
            for mine, theirs in zip((k, v), expected[1:]):
                torch.testing.assert_close(mine[:, :, at], theirs[:, :, head])
            torch.testing.assert_close(q[:, :, 4 * at : 4 * at + 4], expected[0][:, :, 4 * head : 4 * head + 4])
        x = block(x)
    monkeypatch.setattr(example.Run, "train", None)  # nothing is trained again
    shorter = inputs.tree_inputs("trained", 1, 50, 20, 40, 10, 8, 8, torch.float32, "cpu", 3)
    assert torch.equal(shorter[0], q[:, 30:50]) and torch.equal(shorter[1], k[:, :50])
    monkeypatch.setattr(trained, "_found", {})
    again = inputs.tree_inputs("trained", 1, 80, 80, 40, 10, 8, 8, torch.float32, "cpu", 3)
    assert all(torch.equal(x, y) for x, y in zip(again, (q, k, v)))
    for wrong in ((2, 80, 80, 40, 10, 8, 8), (1, 80, 80, 40, 10, 8, 4), (1, 10**9, 80, 40, 10, 8, 8)):
        with pytest.raises(ValueError, match="inputs trained"):
            inputs.tree_inputs("trained", *wrong, torch.float32, "cpu", 3)


def test_budgets(tiny_decoders, tmp_path, monkeypatch, capsys):
    """Every row has three ops beside dense attention, which is measured once a number of heads and length; the file is
    whole after every row."""
    written = []
    original = budgets.write_report

    def write(path, *arguments):
        original(path, *arguments)
        written.append(len(json.loads(path.read_text())["figures"]))

    monkeypatch.setattr(budgets, "write_report", write)
    monkeypatch.setattr(budgets, "ALONE_UP_TO", 64)
    options = ["--heads", "8/2,2/2", "--top-k", "2,4", "--lengths", "64,130", "--inputs", "local,trained", "--dim", "8"]
    options += ["--compression-rate", "4"]
    short = ["--warm-up-s", "0", "--timed-s", "0", "--phases-at", "130", "--dense-up-to", "64"]
    assert cli.main(["budgets", *options, *short, "--out", str(tmp_path / "budgets.json")]) == 0
    report = json.loads((tmp_path / "budgets.json").read_text())
    figures = report["figures"]
    assert report["protocol"]["timed_s"] == 0 and "break_even" not in report
    rows = [("local", 64, 8), ("trained", 64, 8), ("local", 64, 2), ("local", 130, 8), ("trained", 130, 8)]
    found = [(f["inputs"], f["T"], f["H"], f["top_k"], f["op"]) for f in figures]
    assert found == [(*row, top_k, op) for row in rows for top_k in (2, 4) for op in budgets.OPS]
    assert written == [*range(3, 33, 3), 30, 30], "and once more for what neighbours share"
    for f in figures:
        assert f["ms"] > 0 and f["calls"] >= 1 and ("dense" in f) == (f["T"] == 64)
        assert ("shared_with_neighbour" in f) == (f["T"] == 130 and f["op"] == "both")
        if "dense" in f:
            assert f["dense"]["inputs"] == "local" and f["speedup_over_dense"] > 0
    assert len({json.dumps(f["dense"]) for f in figures if "dense" in f}) == 2 * 3
    assert "H 8 on 2, top_k 4: always faster than dense" in capsys.readouterr().out
    assert cli.main(["budgets", *options, *short, "--limit-s", "1e-9", "--out", str(tmp_path / "none.json")]) == 0
    assert "left out" in capsys.readouterr().err
    assert cli.main(["budgets", *options, *short, "--forward-only", "--out", str(tmp_path / "forward.json")]) == 0
    figures = json.loads((tmp_path / "forward.json").read_text())["figures"]
    assert [(f["inputs"], f["T"], f["H"], f["top_k"], f["op"]) for f in figures] == [
        (*row, top_k, "forward") for row in rows for top_k in (2, 4)
    ]
    assert all(f["dense"]["ms"] > 0 for f in figures if f["T"] == 64)


def test_what_neighbours_have_in_common():
    """Everything where queries are alike; by sets, on the rows of each quarter."""
    q, k, v = inputs.tree_inputs("iid", 1, 1200, 1200, 4, 2, 8, 8, torch.float32, "cpu", 0)
    options = {"compression_rate": 4, "top_k_per_layer": 4}
    selection = definition.forward(q.double(), k.double(), v.double(), **options).selection[:, 0]
    common = total = 0
    distinct, named = dict.fromkeys(budgets.TOGETHER, 0), dict.fromkeys(budgets.TOGETHER, 0)
    for end in (300, 600, 900, 1200):
        # Layers that the sequence up to this quarter has.
        layers = len(definition.layer_sizes(end, 4, 16)) - 1
        for layer in range(layers):
            for head in range(2):
                sets = [set(x.tolist()) - {-1} for x in selection[layer, end - 300 : end, head]]
                if layer == 0:
                    common += sum(len(a & b) for a, b in zip(sets[1:], sets))
                    total += sum(len(a) for a in sets[1:])
                for n in budgets.TOGETHER:
                    runs = [sets[i : i + n] for i in range(300 % n, 300, n)]
                    distinct[n] += sum(len(set.union(*run)) for run in runs)
                    named[n] += sum(len(x) for run in runs for x in run)
    found = budgets.neighbours((q, k, v), options)
    assert found["shared_with_neighbour"] == pytest.approx(common / total, abs=2e-4)
    assert found["distinct_blocks"] == {
        str(n): pytest.approx(distinct[n] / named[n], abs=2e-4) for n in budgets.TOGETHER
    }
    alike = budgets.neighbours((q[:, :1].expand(-1, 1200, -1, -1), k, v), options)
    assert alike["shared_with_neighbour"] > 0.85 > common / total
    assert alike["distinct_blocks"]["12"] < 0.2 < found["distinct_blocks"]["12"]
    assert budgets.neighbours((q[:, :10], k[:, :10], v[:, :10]), options) == {}


def test_every_row_of_the_design_is_in_the_table(monkeypatch):
    """As on a GPU: three groups, three budgets, 8K to 256K, three kinds; no groups as an extra row."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = cli._parser().parse_args(["budgets"])
    rows = list(budgets.rows(args))
    lengths = [1024 * n for n in (8, 16, 32, 64, 128, 256)]
    expected = {
        (T, H, H_kv, kind) for T in lengths for H, H_kv in ((16, 1), (64, 8), (32, 8)) for kind in inputs.RANDOM
    }
    expected |= {(T, H, 8, "trained") for T in lengths for H in (64, 32)}
    expected |= {(T, 16, 16, kind) for T in lengths[:4] for kind in inputs.RANDOM}
    assert set(rows) == expected and len(rows) == len(expected) and args.top_k == [64, 128, 512]
    assert rows[0][0] == 32768 and rows[-1][0] == max(lengths), "a limit cuts off the longest"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forward", "--batch", "0"], "argument --batch: must be at least 1, got 0"),
        (["forward", "--kv-heads", "-1"], "argument --kv-heads: must be at least 1, got -1"),
        (["forward", "--queries", "-1"], "must be at least 0, got -1"),
        (["indexer", "--types", "foo"], "foo: must be of"),
        (["budgets", "--limit-s", "nan"], "must be at least 0 and finite, got nan"),
        (["forward", "--lengths", "64,x"], "argument --lengths: must be a whole number, got 'x'"),
        (["forward", "--dim", "1.5"], "argument --dim: must be a whole number, got '1.5'"),
        (["decode", "--heads", "a/1"], "argument --heads: must be pairs H/H_kv, H a multiple of H_kv, got 'a/1'"),
        (["decode", "--heads", "0/1"], "argument --heads: must be pairs H/H_kv, H a multiple of H_kv, got '0/1'"),
        (["indexer", "--types", ","], "argument --types: '': must be of float32, bfloat16, float16, float64"),
        (["indexer", "--types", "float32,"], "argument --types: '': must be of float32, bfloat16, float16, float64"),
        (["indexer", "--ops", ""], "argument --ops: '': must be of topk_indices"),
        (["forward", "--inputs", "iid,"], "argument --inputs: '': must be of iid, local, trained, got 'iid,'"),
        (["packed", "--cases", ","], "argument --cases: '': must be of equal, documents, dense, short, got ','"),
        (["context_parallel", "--layouts", "up"], "argument --layouts: up: must be of contiguous, zigzag, got 'up'"),
        *(
            ([command, "--seed", seed], f"argument --seed: must lie in -2^63 .. 2^63 - 1, got {seed}")
            for command in cli.COMMANDS
            for seed in ("99999999999999999999", str(1 << 63), str(-(1 << 63) - 1))
        ),
        (["forward", "--seed", "x"], "argument --seed: must be a whole number, got 'x'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


LISTS = ["--lengths", "80,64", "--queries", "4", "--heads-list", "4", "--dim", "8", "--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attn_dist", *LISTS, "--topk", "65"], "--topk must be at most the smallest of --lengths, 64, got 65"),
        (
            ["sparse_attention", *LISTS, "--topk", "100", "--value-dim", "4"],
            "--topk must be at most the smallest of --lengths, 64, got 100",
        ),
        (["sparse_attention", *LISTS, "--topk", "8"], "--value-dim must be at most --dim, 8, got 512"),
        (["dsa", *LISTS, "--topk", "8"], "--value-dim must be at most --dim, 8, got 512"),
        (["dsa", *LISTS, "--queries", "65"], "--queries must be at most the smallest of --lengths, 64, got 65"),
        (["packed", "--total", "3"], "--total must be at least 4 for equal of --cases, got 3"),
        (
            ["packed", "--total", "1", "--cases", "documents"],
            "--total must be at least 2 for documents of --cases, got 1",
        ),
        (["packed", "--total", "15", "--cases", "dense"], "--total must be at least 16 for dense of --cases, got 15"),
        (["packed", "--total", "15", "--cases", "short"], "--total must be at least 16 for short of --cases, got 15"),
        (
            ["context_parallel", "--no-single", "--plot", "x.png"],
            "--plot x.png: draws the speedup over one rank, which --no-single leaves out",
        ),
        (["forward", "--plot", "."], "--plot must name a file, got the folder ."),
        (
            ["forward", "--plot", f"{__file__}/x.png"],
            f"--plot {__file__}/x.png: cannot be written ({__file__} is no folder)",
        ),
        (["forward", "--out", f"{__file__}/a/x"], f"--out {__file__}/a/x: cannot be written ({__file__} is no folder)"),
        (["forward", "--out", "x" * 300], f"--out {'x' * 300}: cannot be written (File name too long)"),
    ],
)
def test_options_that_disagree_are_one_line(arguments, message, monkeypatch, capsys):
    """Nothing is measured, so nothing else is said."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli.COMMANDS[arguments[0]], "run", None)
    assert cli.main([*arguments, "--device", "cpu"]) == 2
    assert capsys.readouterr() == ("", f"htree_cuda bench {arguments[0]}: {message}\n")


@pytest.mark.parametrize("command", ["forward", "decode", "context_parallel"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_measuring(command, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cli.COMMANDS[command], "run", None)
    assert cli.main([command, "--device", "cpu", "--plot", str(tmp_path / "x.txt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"htree_cuda bench {command}: --plot must end in .") and ".png" in line
    assert line.endswith(f"got {tmp_path / 'x.txt'}")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert cli.main([command, "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert "is not installed (pip install 'htree_cuda[demo]')" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "first"), [("a/x", b"\x89PNG"), ("x.PNG", b"\x89PNG"), ("x.svg", b"<?xml")])
def test_a_plot_is_written_where_it_is_asked_for(name, first, tmp_path, capsys):
    """A name without a suffix is a PNG of that very name."""
    pytest.importorskip("matplotlib")
    plots.check_name(tmp_path / name)
    figure = {"inputs": "iid", "T": 64, "us_per_query": 1.0}
    plots.plot([figure], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(first)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"^--plot .*folder: cannot be written \(Is a directory\)$"):
        plots.plot([figure], tmp_path / "folder")


@pytest.mark.parametrize("command", ["attn_dist", "sparse_attention"])
def test_every_dtype_that_is_offered_is_measured(command, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    own = ["--value-dim", "4"] if command == "sparse_attention" else []
    for dtype in inputs.DTYPES:
        out = ["--dtype", dtype, "--out", str(tmp_path / "x.json")]
        assert cli.main([command, *LISTS, "--topk", "64", *own, *out]) == 0
        figures = json.loads((tmp_path / "x.json").read_text())["figures"]
        assert [(f["s_kv"], f["dtype"]) for f in figures] == [(80, dtype), (64, dtype)]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_lse_of_the_inputs_makes_slots_sum_to_one(dtype, error):
    q, k, index, lse = inputs.dist_inputs(5, 3, 40, 16, 8, dtype, "cpu", 0)
    assert lse.dtype == dtype
    torch.testing.assert_close(
        attn_dist(q, k, index, lse).sum(-1), torch.full((1, 5), 3.0, dtype=dtype), atol=0, rtol=error
    )


@pytest.mark.parametrize("least", packed.LEAST.items())
def test_the_smallest_pack_of_each_case_is_measured(least, monkeypatch):
    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    monkeypatch.setattr(packed, "SECONDS", (0.0, 0.0))
    monkeypatch.setattr(packed, "DOCUMENT_SECONDS", (0.0, 0.0))
    case, total = least
    options = ["--heads", "2/1", "--dim", "4", "--top-k", "2", "--device", "cpu", "--dtype", "float32"]
    assert tuple(packed.LEAST) == packed.CASES
    assert cli.main(["packed", "--cases", case, "--total", str(total), *options]) == 0


@pytest.mark.parametrize("failing", ["write_text", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_report_that_cannot_be_written_leaves_no_draft(failing, error, tmp_path, monkeypatch):
    """What the path held before stays as it was."""
    out = tmp_path / "new" / "x.json"
    cli.write(out, {"figures": []})
    before = out.read_text()
    original = getattr(Path, failing)

    def fails(path, *arguments):
        if failing == "write_text":
            original(path, "half of")
        raise error

    monkeypatch.setattr(Path, failing, fails)
    for write in (lambda: cli.write(out, {}), lambda: protocol.write_report(out, "bench", {}, [])):
        with pytest.raises((ValueError, KeyboardInterrupt)) as raised:
            write()
        if isinstance(error, OSError):
            assert str(raised.value) == f"--out {out}: cannot be written (No space left on device)"
        assert [path.name for path in out.parent.iterdir()] == ["x.json"] and out.read_text() == before


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    """The figures are printed all the same."""

    def fails(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(protocol, "TIMED_S", 0.0)
    monkeypatch.setattr(Path, "write_text", fails)
    out = tmp_path / "x.json"
    assert cli.main(["attn_dist", *LISTS, "--topk", "8", "--dtype", "float32", "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split()[0] == "h_q"
    last = printed.err.splitlines()[-1]
    assert last == f"htree_cuda bench attn_dist: --out {out}: cannot be written (No space left on device)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capsys):
    assert cli.main(["forward", "--device", "cuda", "--lengths", "64"]) == 2
    assert capsys.readouterr().err == "htree_cuda bench forward: --device cuda: PyTorch sees no CUDA device\n"


def test_results_go_to_a_file(tmp_path, capsys):
    assert cli.main(["forward", "--lengths", "64", "--out", str(tmp_path)]) == 2
    assert f"--out must name a file, got the folder {tmp_path}" in capsys.readouterr().err


def test_peers_of_dsa_take_no_slot_without_a_key():
    """--topk may be larger than --lengths, as the defaults on a CPU are."""
    dense = torch.randn(4, 10)
    found = bench_dsa._peer_lists(dense, 16)
    assert found.dtype == torch.int32 and torch.equal(found, torch.arange(10).expand(4, 1, 10).int())
    few = bench_dsa._peer_lists(dense, 3)[:, 0].long()
    assert torch.equal(dense.gather(1, few).sort(1).values, dense.sort(1).values[:, -3:])
    assert (few.diff(dim=1) > 0).all()


def test_a_plot_of_speedups_without_one_says_so(tmp_path):
    """One rank alone ran out of memory in every row."""
    pytest.importorskip("matplotlib")
    row = {"H": 16, "H_kv": 1, "top_k": 64, "T": 2048, "layout": "zigzag", "ranks": 2}
    with pytest.raises(ValueError, match=r"^--plot .*x\.png: no row has a speedup, since one rank alone ran out of"):
        bench_context_parallel.plot([row], tmp_path / "x.png")
    bench_context_parallel.plot([row, {**row, "T": 1024, "speedup": 1.5}], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
