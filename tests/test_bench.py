"""The benchmark program's own arithmetic: counts, the crossover, the phases of a call."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from htree_cuda import bench
from htree_cuda.reference import definition

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT / "scripts"))

import bench_backward  # noqa: E402


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
    assert bench.visited(T, T - T_q, T, r, top_k, top_k * r) == (candidates, leaves)


def test_crossover_is_where_dense_attention_stays_behind():
    figures = [
        {"T": T, "speedup_over_dense": x, "dense": {}} for T, x in ((8, 1.2), (16, 0.9), (64, 3.0), (32, 1.0), (4, 0.5))
    ]
    assert bench.crossover(figures) == 32
    assert bench.crossover(figures[1:2]) is None


def test_phases_know_every_kernel_of_the_forward():
    """As a profiler names them; a kernel that nobody has sorted would count as other."""
    config = (
        "htree_cuda::layer::Config<__nv_bfloat16, 128, 128, (htree_cuda::layer::Pass){}, (htree_cuda::layer::Walk){}>"
    )
    for walk, where in enumerate(("first layer", "layers below")):
        for number, name in enumerate(("normaliser", "importance", "values")):
            kernel = (
                f"void htree_cuda::layer::htree_layer_kernel<{config.format(number, walk)} >(htree_cuda::layer::Args)"
            )
            assert bench.phase_of(kernel) == f"{where}: {name}"
    folders = ("smxx/tree_pool", "smxx/tree_pack", "smxx/select", "smxx/unite", "sm90/htree_layer")
    found = set()
    for folder in folders:
        for path in (CSRC / folder).rglob("*.cuh"):
            found |= set(re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", path.read_text()))
    assert len(found) >= 6
    template = "<" + config.format(0, 0) + ">"
    assert {name for name in found if bench.phase_of(name + template) == "other"} == set()
    assert bench.phase_of("void at::native::vectorized_elementwise_kernel<4>") == "other"


def test_the_backward_is_timed_on_the_gradients_of_its_inputs(tmp_path, monkeypatch, capsys):
    """Every figure has times of htree and dense attention, and what was timed gives dq, dk and dv."""
    monkeypatch.setattr(bench, "TIMED_S", 0.0)
    calls = []
    original = bench_backward.timed

    def timed(*arguments):
        result, call = original(*arguments)
        calls.append([x.shape for x in call()])
        return result, call

    monkeypatch.setattr(bench_backward, "timed", timed)
    options = [
        "--lengths",
        "40,70",
        "--inputs",
        "local",
        "--heads",
        "2",
        "--dim",
        "4",
        "--top-k",
        "4",
        "--device",
        "cpu",
    ]
    out = tmp_path / "backward.json"
    assert bench_backward.main([*options, "--dtype", "float32", "--dense-up-to", "40", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert [(f["T"], "dense" in f) for f in figures] == [(40, True), (70, False)]
    assert all(f["ms"] > 0 and f["gradient_bytes"] == 4 * f["T"] * 4 * (2 + 1 + 1) for f in figures)
    assert calls == [[(1, T, H, 4) for H in (2, 1, 1)] for T in (40, 40, 70)]
    assert "70" in capsys.readouterr().out
