"""examples/train_rates.py: the study of trees with more children, at its smallest."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_rates", EXAMPLES / "train_rates.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("train_bytes", None)


def test_trees_of_a_budget_read_as_many_candidates(example):
    for preset in example.PRESETS.values():
        budgets = [r * k for r, k in example.trees(preset)]
        assert budgets[:3] == [preset.compression_rate * preset.top_k] * 3 and budgets[3:] == [2 * budgets[0]] * 3
        assert [r // preset.compression_rate for r, _ in example.trees(preset)] == [1, 2, 4] * 2
        for task in example.TASKS:  # a query sees a part of the last stage, with either budget
            assert 4 * budgets[3] <= getattr(preset, task).stages[-1].T
    assert example.trees(example.PRESETS["gpu"]) == [(16, 16), (32, 8), (64, 4), (16, 32), (32, 16), (64, 8)]


def test_short_sequences_ask_fewer_times(example):
    data = example.ShortRecall(example.PRESETS["gpu"])
    for T, asked in ((32, 8), (64, 16), (256, 64), (2048, 64)):
        tokens, targets = data.batch("train", example.Stage(T, 2, 1), 0, 0)
        assert tokens.shape == (2, T) and int((targets >= 0).sum()) == 2 * asked


def test_every_tree_and_dense_attention_has_every_seed(example):
    jobs = example.jobs_of(example.PRESETS["gpu"], ["text", "recall"], [0, 1, 2])
    assert len({job.name for job in jobs}) == len(jobs) == 2 * 3 * 7


def test_a_run_is_logged_once_and_kept(example, tmp_path, monkeypatch):
    stage = example.Stage(64, 1, 2)
    preset = dataclasses.replace(
        example.PRESETS["cpu"], d_model=8, recall=example.Task((stage,), 1e-3, 2, 1), n_keys=2, n_values=2
    )
    monkeypatch.setitem(example.PRESETS, "cpu", preset)
    report = {"tasks": {"recall": []}, "T": {"recall": 64}}
    for rate, top_k in ((0, 0), (4, 2), (8, 1)):
        work = (example.Job("recall", rate, top_k, 0), "cpu", tmp_path, "cpu", 0)
        job, found = example.run(work)
        assert example.run(work) == (job, json.loads(json.dumps(found)))  # the second call trains nothing
        assert (found["arm"], found["rate"]) == ("htree" if rate else "dense", rate) and found["final"]["step"] == 2
        report["tasks"]["recall"].append(found)
    assert example.finals(report, "recall", 4, 2) == [report["tasks"]["recall"][1]["final"]["accuracy"]]
    example.draw(report, [(4, 2), (8, 1)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
