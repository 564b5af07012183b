"""The benchmark program's own arithmetic: counts, the crossover, the phases of a call."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from htree_cuda import attn_dist, bench
from htree_cuda.reference import definition

CSRC = Path(__file__).resolve().parent.parent / "csrc"


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
        for number, name in enumerate(("choice", "values")):
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
    shapes = []
    original = bench.measure

    def measure(call, device):
        shapes.append([x.shape for x in call()])
        return original(call, device)

    monkeypatch.setattr(bench, "measure", measure)
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
    assert bench.main(["backward", *options]) == 0
    figures = json.loads((tmp_path / "b.json").read_text())["figures"]
    assert [(f["T"], "dense" in f) for f in figures] == [(40, True), (70, False)]
    assert all(f["ms"] > 0 and f["gradient_bytes"] == 4 * f["T"] * 4 * (2 + 1 + 1) for f in figures)
    assert shapes == [[(1, T, H, 4) for H in (2, 1, 1)] for T in (40, 40, 70)]
    assert "70" in capsys.readouterr().out


def test_a_long_dense_peer_is_called_once(tmp_path, monkeypatch):
    """Beyond --dense-up-to and up to --dense-once."""
    monkeypatch.setattr(bench, "TIMED_S", 0.0)
    options = ["--lengths", "40,70,100", "--heads", "2", "--kv-heads", "1", "--dim", "4", "--top-k", "4"]
    options += ["--device", "cpu", "--dtype", "float32", "--dense-up-to", "40", "--dense-once", "70"]
    options += ["--out", str(tmp_path / "f.json")]
    assert bench.main(["forward", *options]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    calls = [f["dense"]["calls"] if "dense" in f else 0 for f in figures]
    assert calls[0] >= bench.LEAST_CALLS_CPU and calls[1:] == [1, 0]
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
    q, k, indices, lse = bench.dist_inputs(5, 3, 40, 16, 8, torch.float32, "cpu", 0)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert bench.cudnn_attn_dist(q, k, indices, lse) is None, "not installed"
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(DSA=Peer))
    monkeypatch.setattr(bench, "TIMED_S", 0.0)
    ours = attn_dist(q, k, indices, lse)
    figures = bench._cudnn_figures(ours, bench.cudnn_attn_dist(q, k, indices, lse), "cpu")
    assert figures["cudnn_frontend"]["ms"] > 0 and figures["cudnn_frontend"]["relative_error"] < 1e-5
    monkeypatch.setattr(Peer, "scale_error", 3.0)
    wrong = bench._cudnn_figures(ours, bench.cudnn_attn_dist(q, k, indices, lse), "cpu")
    assert "differs" in wrong["cudnn_frontend_error"] and "cudnn_frontend" not in wrong
    monkeypatch.setattr(Peer, "scale_error", None)
    refused = bench._cudnn_figures(ours, bench.cudnn_attn_dist(q, k, indices, lse), "cpu")
    assert refused["cudnn_frontend_error"].startswith("TypeError")
