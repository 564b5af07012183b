"""examples/train_bytes.py: its attentions, its data, and a run that was interrupted and resumed: the same bits."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from htree_cuda import definition

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_bytes as example
from train_bytes import PRESETS, Run, Stage, Task

CPU = torch.device("cpu")
TINY = dataclasses.replace(
    PRESETS["cpu"], d_model=16, n_layers=1, n_heads=2, head_dim=8, top_k=2, n_keys=2, n_values=2,
    text=Task((Stage(40, 2, 6),), lr=1e-2, eval_every=2, eval_batches=1),
    recall=Task((Stage(24, 2, 3), Stage(48, 2, 3)), lr=1e-2, eval_every=2, eval_batches=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return example.Text()


def tiny_run(task: str, arm: str, text, seed: int = 0) -> Run:
    return Run(TINY, task, arm, seed, text if task == "text" else example.Recall(TINY), CPU, "auto")


@pytest.mark.parametrize("task", example.TASKS)
@pytest.mark.parametrize("arm", example.ARMS)
def test_an_interrupted_run_ends_with_the_same_bits(task, arm, text, tmp_path):
    whole = tiny_run(task, arm, text)
    whole.train(tmp_path / "whole.pt")
    for stop_at in (1, 4, None):  # between evaluations, on one, to the end
        part = tiny_run(task, arm, text)
        part.resume(tmp_path / "part.pt")
        part.train(tmp_path / "part.pt", stop_at)
    assert part.step == whole.step == 6 and part.log == whole.log and len(whole.log) == 3
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "part.pt"))
    for name in ("model", "optimizer"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    start = dict(tiny_run(task, arm, text).model.named_parameters())
    assert not any(torch.equal(x, expected["model"][name]) for name, x in start.items()), "every parameter learns"


def test_a_failing_step_leaves_a_checkpoint(text, tmp_path, monkeypatch):
    run = tiny_run("text", "dense", text)
    original = run.train_step
    monkeypatch.setattr(
        run, "train_step", lambda: original() if run.step < 3 else (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path / "run.pt")
    again = tiny_run("text", "dense", text)
    again.resume(tmp_path / "run.pt")
    assert again.step == 3


def test_a_checkpoint_of_other_settings_is_refused(text, tmp_path):
    tiny_run("text", "dense", text).save(tmp_path / "run.pt")
    with pytest.raises(SystemExit, match="belongs to other settings"):
        tiny_run("text", "dense", text, seed=1).resume(tmp_path / "run.pt")


@pytest.mark.parametrize("task", example.TASKS)
def test_arms_differ_in_nothing_but_the_attention(task, text):
    runs = [tiny_run(task, arm, text) for arm in example.ARMS]
    states = [run.model.state_dict() for run in runs]
    for state in states[1:]:
        assert list(state) == list(states[0]) and all(torch.equal(x, states[0][name]) for name, x in state.items())
    batches = [run.batch("train", run.task.stages[0], run.seed, 5) for run in runs]
    assert all(torch.equal(x, y) for batch in batches[1:] for x, y in zip(batch, batches[0], strict=True))
    outputs = [run.model(batches[0][0]) for run in runs]
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("T, width", [(1, 3), (20, 3), (21, 7), (7, 7), (23, 1)])
def test_window_attention_is_a_banded_softmax(T, width):
    q, k, v = torch.randn(3, 2, 4, T, 6, dtype=torch.float64)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    scores = (q @ k.transpose(2, 3) * 6**-0.5).masked_fill((j > i) | (j <= i - width), -torch.inf)
    torch.testing.assert_close(example.window_attention(q, k, v, width), scores.softmax(3) @ v)


def test_rope_is_the_definitions():
    x = torch.randn(2, 30, 3, 8)
    expected = definition.rope(x.double().transpose(1, 2), torch.arange(30), 100.0).transpose(1, 2)
    torch.testing.assert_close(example.rope(x, 100.0).double(), expected, rtol=0, atol=1e-6)


def test_dense_equals_htree_where_there_is_one_layer(text):
    """T <= max_top_nodes: htree is dense causal attention with RoPE on token positions."""
    tokens = torch.randint(0, 256, (2, 8))
    dense, htree = (tiny_run("text", arm, text).model(tokens) for arm in ("dense", "htree"))
    torch.testing.assert_close(dense, htree, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_keep_their_promises(preset):
    for name in example.TASKS:
        tree = preset.tree(getattr(preset, name).stages[-1].T)
        if preset.name == "gpu":
            assert tree["T"] >= 32768 and tree["share_last"] <= 0.3
        assert tree["layers"] >= 3
    T = preset.recall.stages[-1].T
    assert preset.n_layers * (preset.window(T) - 1) < example.Recall(preset).distance(T), "the window must not reach"


def test_recall_batches_hold_what_they_ask_for():
    preset = PRESETS["cpu"]
    data, stage = example.Recall(preset), Stage(64, 16, 1)
    tokens, targets = data.batch("train", stage, 0, 0)
    n, values = preset.n_keys, preset.n_values
    asked = tokens[:, -n:] - n * values
    assert torch.equal(asked.sort(1).values, torch.arange(n).expand(16, n)), "every key once"
    for row, keys, wanted in zip(tokens, asked, targets[:, -n:] - n * values - n):
        pairs = {int(x) // values: int(x) % values for x in row[:16] if x < n * values}
        assert len(pairs) == n and [pairs[int(key)] for key in keys] == wanted.tolist()
        assert (row[16:-n] >= n * values + n + values).all(), "nothing but filler between"
    assert (targets[:, :-n] == example.IGNORE).all()


def test_batches_are_apart(text):
    stage = Stage(64, 2, 1)
    for data in (text, example.Recall(PRESETS["cpu"])):
        first = data.batch("train", stage, 0, 0)[0]
        assert torch.equal(first, data.batch("train", stage, 0, 0)[0])
        for other in (("train", stage, 0, 1), ("train", stage, 1, 0), ("validation", stage, 0, 0)):
            assert not torch.equal(first, data.batch(*other)[0])


def test_the_command_writes_log_and_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    arguments = ["--out", str(tmp_path), "--seeds", "0,1", "--throughput", "40"]
    assert example.main(arguments) == 0
    report = json.loads((tmp_path / "train_cpu.json").read_text())
    assert [(r["arm"], r["seed"]) for r in report["tasks"]["recall"]["runs"]] == [
        (a, s) for s in (0, 1) for a in example.ARMS
    ]
    assert [t["arm"] for t in report["throughput"]] == list(example.ARMS)
    assert (tmp_path / "train_cpu.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert f"{100 * report['tasks']['text']['tree']['share_last']:.1f}% of T" in shown
    assert example.main(arguments) == 0, "finished runs are not repeated"
    assert "step" not in capsys.readouterr().out
    again = json.loads((tmp_path / "train_cpu.json").read_text())
    assert again["tasks"] == report["tasks"]


def test_calls_for_some_runs_share_a_log(monkeypatch, tmp_path):
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    log = "train_cpu.json"
    example.main(["--out", str(whole), "--seeds", "0,1"])
    example.main(["--out", str(parts), "--task", "recall", "--arms", "window,htree", "--seeds", "0,1"])
    example.main(["--out", str(parts), "--task", "text", "--seeds", "1", "--throughput", "24"])
    example.main(["--out", str(parts), "--arms", "dense,htree,window", "--seeds", "0,1"])

    def results(folder) -> dict:
        tasks = json.loads((folder / log).read_text())["tasks"]
        return {
            name: (task["window"], [(run["arm"], run["seed"], run["log"]) for run in task["runs"]])
            for name, task in tasks.items()
        }

    assert results(parts) == results(whole)
    assert len(json.loads((parts / log).read_text())["throughput"]) == len(example.ARMS)
    monkeypatch.setitem(PRESETS, "cpu", dataclasses.replace(TINY, n_values=4))
    for checkpoint in parts.glob("*.pt"):
        checkpoint.unlink()
    example.main(["--out", str(parts), "--task", "recall", "--arms", "htree"])
    report = json.loads((parts / log).read_text())
    assert list(report["tasks"]) == ["recall"] and len(report["tasks"]["recall"]["runs"]) == 1, "another preset's log"


def test_steps_are_timed_without_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    assert example.main(["--out", str(tmp_path), "--time-steps", "24,40"]) == 0
    report = json.loads((tmp_path / "train_steps_cpu.json").read_text())
    assert [(t["T"], t["arm"]) for t in report["throughput"]] == [
        (T, arm) for T in (24, 40) for arm in ("dense", "htree")
    ]
    assert all(t["step_ms"] > 0 for t in report["throughput"])
    assert list(tmp_path.iterdir()) == [tmp_path / "train_steps_cpu.json"], "nothing was trained"
    assert "T 40: a step of htree takes" in capsys.readouterr().out
