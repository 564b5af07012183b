"""`explain`: what it asks the library for, what it prints, and where its predicted times come from."""

from __future__ import annotations

import json
from pathlib import Path

import htree_cuda_build as build
import pytest
import torch

from htree_cuda import UnsupportedError, cost_model, kernels
from htree_cuda import explain as explain_module
from htree_cuda.__main__ import main
from htree_cuda.explain import explain
from tools import fit_costs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SHAPE = {"T": 65536, "H": 32, "H_kv": 8, "top_k_per_layer": 512}


def row(phase, layer, kind, launches=1, ctas=None, queries=(None, None), pairs=None):
    return {
        "phase": phase, "layer": layer, "kind": kind, "kernel": f"{phase}_kernel", "tile": "12 queries",
        "reason": f"why {phase}", "launches": launches, "ctas": ctas, "first_query": queries[0],
        "end_query": queries[1], "pairs": pairs,
    }  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    """A library that launches six kernels, and remembers what it was asked."""
    asked = []

    def explain_forward(q, k, v, params, *, sms):
        asked.append((q, k, v, params, sms))
        return [
            row("pool", None, ""), row("pack", 0, "selected"), row("union", 0, "", launches=3, ctas=50),
            row("score", 1, "entry", queries=(8192, 65536), pairs=2000), row("select", 1, "", ctas=60),
            row("attend", 0, "half-selected", queries=(8192, 65536), pairs=1000),
        ]  # fmt: skip

    monkeypatch.setattr(kernels, "explain_forward", explain_forward)
    gradients = [row("dq", None, "selected", pairs=5), row("index", None, "")]
    monkeypatch.setattr(kernels, "explain_backward", lambda *args, sms: gradients)
    monkeypatch.setattr(kernels, "built", lambda: True)
    monkeypatch.setattr(kernels, "mixed_dims", lambda: False)
    return asked


@pytest.fixture
def rates(monkeypatch):
    ns = {"pool": 2.0, "pack": 3.0, "union": 7.0, "score, entry": 5.0, "attend, selected": 11.0, "select": 13.0,
          "select, pairs": 17.0}  # fmt: skip
    about = {"gpu": "GPU X", "date": "2026-01-02", "files": ["some.json"], "error": 0.25, "ns": ns}
    sets = [{"op": "forward", "G": G, "K": K, "V": K, **about} for G, K in ((16, 64), (4, 128), (8, 128), (16, 128))]
    backward = {"op": "backward", "G": 16, "K": 128, "V": 128, **about, "ns": {"dq, selected": 11.0, "rest": 3.0}}
    monkeypatch.setattr(cost_model, "rates", lambda: [*sets, backward])


def test_a_call_is_explained(library, rates):
    call = explain(**SHAPE)
    q, k, v, params, sms = library[0]
    assert (q.shape, k.shape, v.shape) == ((1, 65536, 32, 128), (1, 65536, 8, 128), (1, 65536, 8, 128))
    assert {x.device.type for x in (q, k, v)} == {"meta"} and q.dtype == torch.bfloat16
    assert (params.top_k, params.max_top_nodes, params.q_start, sms) == (512, 8192, 0, 132)
    assert call["layers"] == [65536, 4096] and call["op"] == "forward"
    expected = [2 * 8 * 65536, 3 * 8 * 65536, 7 * 50, 5 * 2000, 13 * 8 * 65536 + 17 * 2000, 11 * 1000]
    assert [r["ms"] for r in call["rows"]] == pytest.approx([ns / 1e6 for ns in expected])
    assert sum(r["share"] for r in call["rows"]) == pytest.approx(1)
    assert call["model"].pop("ms") == pytest.approx(sum(expected) / 1e6)
    assert call["model"] == {
        "op": "forward", "G": 4, "K": 128, "V": 128, "gpu": "GPU X", "date": "2026-01-02", "files": ["some.json"],
        "error": 0.25,
    }  # fmt: skip


def test_small_kernels_of_the_backward_count_as_one(library, rates):
    """A profile has one time for them: they have no share of their own, and the others are shares of the whole call."""
    call = explain(**SHAPE, backward=True)
    ms = 5 * 11 / 1e6, 3 * 8 * 65536 / 1e6
    assert [r["ms"] for r in call["rows"]] == [pytest.approx(ms[0]), None]
    assert call["model"]["ms"] == pytest.approx(sum(ms))
    assert call["rows"][0]["share"] == pytest.approx(ms[0] / sum(ms)) and call["rows"][1]["share"] is None
    assert "Rows without a share take 100.0% together." in explain_module.render(call)


@pytest.mark.parametrize(
    ("H", "K", "expected", "scale"),
    [(1, 128, (4, 128), 1.0), (5, 128, (8, 128), 1.0), (8, 64, (8, 128), 0.5), (12, 64, (16, 64), 1.0)],
)
def test_rates_of_the_nearest_shape(library, rates, H, K, expected, scale):
    """The smallest measured group that holds the call's; then the nearest K, whose rates are scaled by the bytes."""
    call = explain(T=65536, H=H, H_kv=1, K=K)
    assert (call["model"]["G"], call["model"]["K"]) == expected
    pool, _, union = (r["ms"] for r in call["rows"][:3])
    assert pool == pytest.approx(scale * 2 * 65536 / 1e6)
    assert union == pytest.approx(7 * 50 / 1e6), "lists of nodes have no head dimension"


def test_few_queries_have_no_prediction(library, rates):
    """A call that does not fill a GPU takes a time that is no matter of its work."""
    call = explain(T=65536, T_q=1, H=32, H_kv=8)
    assert call["model"] is None and {r["share"] for r in call["rows"]} == {None}
    assert "no prediction" in explain_module.render(call)


def test_what_the_kernels_lack_is_refused(library):
    with pytest.raises(UnsupportedError, match=r"explain: .*need K = V, got K 128 and V 64 .*HTREE_CUDA_MIXED_DIMS=1"):
        explain(**SHAPE, V=64)
    with pytest.raises(UnsupportedError, match=r"explain: .*top_k_per_layer in 16 .. 512, got 1024"):
        explain(**{**SHAPE, "top_k_per_layer": 1024})
    with pytest.raises(ValueError, match=r"explain: H .* must be a positive multiple of H_kv \(5\), got 32"):
        explain(**{**SHAPE, "H_kv": 5})
    with pytest.raises(ValueError, match=r"explain: T_q must be at least 1, got -1"):
        explain(**SHAPE, T_q=-1)
    assert library == []


COMMAND = ["explain", "--T", "65536", "--H", "32", "--H-kv", "8", "--top-k", "512"]


def test_the_command_prints_kernels_in_their_order(library, rates, capsys):
    assert main(COMMAND) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    table = lines[lines.index("") + 1 : lines.index("why") - 1]
    assert [line.split()[0] for line in table] == ["phase", "pool", "pack", "union", "score", "select", "attend"]
    assert "8,192 .. 65,535" in table[4] and "score_kernel" in table[4] and "12 queries" in table[4]
    assert sum(float(line.split()[-1].rstrip("%")) for line in table[1:]) == pytest.approx(100, abs=0.5)
    assert "  union_kernel: why union" in lines and "groups of 4 heads" in lines[0] and "4,096" in lines[1]
    assert "GPU X" in lines[-1] and "some.json" in lines[-1] and "2026-01-02" in lines[-1] and "25%" in lines[-1]
    assert main([*COMMAND, "--backward", "--json", "--sms", "78"]) == 0
    call = json.loads(capsys.readouterr().out)
    assert (call["op"], call["sms"], call["rows"][0]["phase"]) == ("backward", 78, "dq")


def test_what_is_wrong_is_one_line(library, monkeypatch, capsys):
    assert main([*COMMAND[:-1], "100"]) == 2
    error = capsys.readouterr().err
    assert error == "htree_cuda explain: top_k_per_layer must be a power of two, at least 1, got 100\n"
    for more, message in (
        (["--K", "0"], "--K must be at least 1, got 0"),
        (["--sms", "0"], "--sms must be at least 1, got 0"),
        (["--sms", "99999999999"], "--sms must be at most 2147483647, got 99999999999"),
        (["--B", "999999999999"], "--B must be at most 2147483647, got 999999999999"),
        (["--B", "2147483647", "--T", "262144"], "B * max(T, T_q) * max(H, H_kv) * max(K, V) must be below 2^42, got "),
        (["--T-q", "-3"], "--T-q must be at least 1, got -3"),
        (["--deterministic"], "--deterministic is of sparse_attention, not of forward"),
        (["--op", "forward_cached", "--V", "64"], "--V is of forward, not of forward_cached"),
        (["--op", "forward_cached", "--backward"], "--backward is of forward, sparse_attention, indexer_logits_listed"),
        (["--op", "topk_indices"], "--H-kv is of forward, forward_cached, not of topk_indices"),
    ):
        assert main([*COMMAND, *more]) == 2
        assert capsys.readouterr().err.startswith(f"htree_cuda explain: {message}")
    monkeypatch.setattr(kernels, "built", lambda: False)
    monkeypatch.setattr(kernels, "why_not_built", lambda: "built without kernels")
    assert main(COMMAND) == 2
    error = capsys.readouterr().err
    assert "built without kernels" in error and "HTREE_CUDA_KERNELS=on pip install ." in error
    assert error.count("\n") == 1


# ---- rates ---------------------------------------------------------------------------------------------------------


def test_rates_name_measurements_that_are_committed():
    sets = cost_model.rates.__wrapped__()
    assert {one["op"] for one in sets} == {"forward", "backward"} and {one["G"] for one in sets} >= {4, 8, 16}
    matter = ("attend, selected", "dq, selected", "dkdv, selected")
    for one in sets:
        assert set(matter) & set(one["ns"])
        reports = [json.loads((RESULTS / name).read_text()) for name in one["files"]]
        assert {report["gpu"] for report in reports} == {one["gpu"]}
        assert max(report["date"][:10] for report in reports) == one["date"]
        shapes = {(f["H"] // f["H_kv"], f["K"], f["V"]) for report in reports for f in report["figures"]}
        assert (one["G"], one["K"], one["V"]) in shapes
        assert 0 < one["error"] < 0.5, "a model that is off by more says nothing"
        assert all(ns >= 0 for ns in one["ns"].values()) and min(one["ns"].get(name, 1) for name in matter) > 0


def test_rates_are_what_the_measurements_give():
    if not kernels.built():
        pytest.skip(f"counts come from the library, and there is none: {kernels.why_not_built()}")
    if kernels.build_info()["csrc_hash"] != build.csrc_hash(ROOT):
        pytest.skip("counts come from the library, and that is one of other sources")
    assert cost_model.RATES.read_text() == fit_costs.fitted()


def test_least_squares_of_relative_errors():
    assert fit_costs.least_squares([[1.0, 10.0], [2.0, 40.0], [5.0, 5.0]], [12.0, 44.0, 15.0]) == pytest.approx([2, 1])
    assert fit_costs.least_squares([[1.0], [1.0]], [1.0, 2.0]) == pytest.approx([1.2]), "not 1.5: errors are relative"
    rates = fit_costs.least_squares([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0])
    assert min(rates) == 0, "no work takes less than no time"
