"""examples/train_dsa.py: its stages, its measures, and `bench dsa` at a small size."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from htree_cuda.bench import cli
from htree_cuda.bench import dsa as bench_dsa

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_dsa as example
from train_dsa import PRESETS, Run, summary

CPU = torch.device("cpu")
TINY = dataclasses.replace(
    PRESETS["cpu"], d_model=16, n_layers=2, T=40, batch=2, eval_every=3, eval_batches=2,
    steps={"dense": 6, "warmup": 12, "sparse": 4},
    attention={
        "n_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
        "v_head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 6,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return example.Text()


@pytest.fixture(scope="module")
def trained(text):
    run = Run(TINY, 0, text, CPU, "auto")
    return run, run.run()


def test_stages_and_log(trained):
    _, result = trained
    steps = {name: [e["step"] for e in result["log"] if e["stage"] == name] for name in example.STAGES}
    assert steps == {
        "dense": [3, 6], "warmup": [6, 9, 12, 15, 18], "sparse": [18, 21, 22], "control": [18, 21, 22],
    }  # fmt: skip
    first = {name: next(e for e in result["log"] if e["stage"] == name) for name in example.STAGES}
    assert first["warmup"]["loss"] == first["control"]["loss"], "the control goes on where the dense stage ended"
    assert result["kl_after"] < result["kl_before"]
    assert set(result["seconds"]) == set(example.STAGES)


def test_the_warm_up_leaves_the_decoder_alone_and_the_control_the_indexer(text):
    run = Run(TINY, 0, text, CPU, "auto")
    run.train("dense")
    moved = {}
    for stage in ("warmup", "sparse"):
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.train(stage)
        moved[stage] = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    names = {name for name, _ in run.model.named_parameters()}
    assert moved == {"warmup": {name for name in names if ".indexer." in name}, "sparse": names}


def test_with_every_key_both_arms_learn_the_same(text):
    preset = dataclasses.replace(TINY, attention={**TINY.attention, "index_topk": 20})
    preset = dataclasses.replace(preset, T=20, eval_batches=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            example, "measure_layer", lambda *_: {"indexer": [1.0, 1.0], "recent": [1.0, 1.0], "best": [1.0, 1.0]}
        )
        log = Run(preset, 0, text, CPU, "auto").run()["log"]
    sparse, control = ([e["loss"] for e in log if e["stage"] == name] for name in ("sparse", "control"))
    torch.testing.assert_close(torch.tensor(sparse), torch.tensor(control), rtol=1e-5, atol=0)


def test_it_repeats(trained, text):
    again = Run(TINY, 0, text, CPU, "auto").run()
    assert again["log"] == trained[1]["log"]


def test_measures(trained):
    run, _ = trained
    layer, x = run.model.blocks[0].attention, torch.randn(1, 40, 16)
    found = example.measure_layer(layer, x, 6)
    assert found["best"][1] == 1 and all(found["best"][0] >= mass for mass, _ in found.values())
    q, kv, _ = layer.project(x)
    attention = example.attention_to_every_key(layer, q[0, 30:33], kv[0, :, 0], 30)
    torch.testing.assert_close(attention.sum(1), torch.ones(3))
    assert (attention[0, 31:] == 0).all() and (attention[0, :31] > 0).all()
    target = torch.tensor([[0.5, 0.3, 0.2, 0.0]])
    wanted, selected = (torch.tensor([[1, 1, 0, 0]]).bool(), torch.tensor([[1, 0, 1, 0]]).bool())
    assert example.selected_share(target, wanted, selected) == pytest.approx((0.7, 0.5))


def test_the_summary_compares_at_equal_steps():
    mass = {
        "mass": {"indexer": 0.5, "recent": 0.3, "best": 0.9},
        "recall": {"indexer": 0.4, "recent": 0.2, "best": 1.0},
    }
    log = [{"stage": "warmup", "step": 1, "loss": 3.0, "kl": 1.0, **mass}]
    log += [{"stage": "sparse", "step": s, "loss": x, "kl": 0.1, **mass} for s, x in ((1, 4.0), (2, 2.2), (3, 2.02))]
    log += [{"stage": "control", "step": s, "loss": 2.0} for s in (1, 2, 3)]
    found = summary(log)
    assert found["excess"] == pytest.approx(0.01) and found["largest_excess"] == pytest.approx(0.1)


def test_the_program_writes_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    assert example.main(["--seeds", "3", "--steps", "2,3,2", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "train_dsa_cpu.json").read_text())
    assert [run["seed"] for run in report["runs"]] == [3] and report["preset"]["steps"]["warmup"] == 3
    assert (tmp_path / "train_dsa_cpu.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "sparse loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.main(["--steps", "2,3"])


def test_seeds_side_by_side_are_processes_whose_logs_are_joined(tmp_path, monkeypatch):
    """The processes run here, one after the other: only what they are told and what becomes of it is tested."""
    monkeypatch.setitem(PRESETS, "cpu", TINY)

    class Process:
        def __init__(self, command: list[str]):
            self.status = example.main(command[2:])

        def wait(self) -> int:
            return self.status

    monkeypatch.setattr(example.subprocess, "Popen", Process)
    assert example.main(["--seeds", "3,4", "--steps", "2,3,2", "--out", str(tmp_path), "--side-by-side"]) == 0
    report = json.loads((tmp_path / "train_dsa_cpu.json").read_text())
    alone = [json.loads((tmp_path / f"seed_{seed}" / "train_dsa_cpu.json").read_text()) for seed in (3, 4)]
    assert report["runs"] == [run for log in alone for run in log["runs"]]
    assert [run["seed"] for run in report["runs"]] == [3, 4]
    monkeypatch.setattr(Process, "wait", lambda self: 1)
    with pytest.raises(SystemExit):
        example.main(["--seeds", "3,4", "--steps", "2,3,2", "--out", str(tmp_path), "--side-by-side"])


def test_bench_dsa(tmp_path, capsys):
    shape = "--queries 8 --heads-list 4 --topk 16 --lengths 64 --dim 24 --value-dim 16 --index-heads 2 --index-dim 8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("htree_cuda.bench.protocol.TIMED_S", 0.0)
        assert cli.main(["dsa", *shape.split(), "--out", str(tmp_path / "dsa.json")]) == 0
    figures = json.loads((tmp_path / "dsa.json").read_text())["figures"]
    assert [f["piece"] for f in figures] == list(bench_dsa.PIECES)
    assert all(f["ms"] > 0 and f["h_q"] == 4 and f["h_i"] == 2 for f in figures)
    assert "step" in capsys.readouterr().out
