"""The examples, small: they run, measure what they say, and repeat."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--context", "128", "--top-k", "8", "--max-tokens", "12000", "--every", "20"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("indexer_distillation", EXAMPLES / "indexer_distillation.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # a dataclass looks its module up
        spec.loader.exec_module(module)
        yield module


def run(example, out: Path) -> dict:
    files = out / "new" / "curve.json", out / "new" / "curve.png"
    assert example.main([*SMALL, "--steps", "50", "--json", str(files[0]), "--png", str(files[1])]) == 0
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return json.loads(files[0].read_text())


@pytest.fixture(scope="module")
def report(example, tmp_path_factory):
    return run(example, tmp_path_factory.mktemp("distillation"))


def test_the_indexer_learns(report):
    assert [point["step"] for point in report["curve"]] == [0, 20, 40, 50] and len(report["losses"]) == 50
    untrained, trained = report["untrained"], report["trained"]
    assert trained["recall"] > untrained["recall"] + 0.1 and trained["mass"] > untrained["mass"] + 0.1
    assert trained["recall"] > report["baselines"]["random"]["recall"] + 0.1


def test_the_measure_is_what_it_says(report):
    """Eight random keys of t + 1 visible ones, t from 31 to 127, find eight wanted ones at a known rate."""
    expected = sum(8 / (t + 1) for t in range(31, 128)) / 97
    assert abs(report["baselines"]["random"]["recall"] - expected) < 0.02
    assert report["best"]["recall"] == 1 and report["best"]["mass"] > max(
        row["mass"] for row in (report["untrained"], report["trained"], *report["baselines"].values())
    )


def test_it_repeats(example, report, tmp_path):
    again = run(example, tmp_path)
    assert again["losses"] == report["losses"] and again["curve"] == report["curve"]


def test_lists_name_visible_keys_once(example):
    scores = torch.randn(16, 40)
    generator = torch.Generator().manual_seed(0)
    for first in (0, 3, 24):
        lists = example.key_lists(scores, first, 10, generator)[:, 0]
        for s in range(16):
            keys = lists[s][(lists[s] >= 0) & (lists[s] <= first + s)].tolist()
            assert len(set(keys)) == len(keys) == min(first + s + 1, 20)
            visible = scores[s, : first + s + 1]
            assert set(visible.topk(min(10, len(visible))).indices.tolist()) <= set(keys)


def test_features_are_causal_means(example):
    x = torch.randn(9, 3)
    for count in (1, 4, 32):
        means = example.mean_of_last(x, count)
        for t in range(9):
            torch.testing.assert_close(means[t], x[max(0, t - count + 1) : t + 1].mean(0))


def test_what_cannot_work_is_one_line(example, capsys):
    for arguments, words in (
        (["--top-k", "300"], "--top-k must lie in 1 .. context / 4 (256), got 300"),
        (["--max-tokens", "500"], "are no 5 contexts of 1024"),
    ):
        assert example.main(arguments) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("convert_llama", ["--top-k", "3"], "--top-k must be a power of two, at least 1, got 3"),
        ("convert_llama", ["--steps", "-1"], "--steps must be at least 1, got -1"),
        ("pretrained", ["--tasks", "foo"], "--tasks: foo: must be of nll, passkey"),
        ("generate_bytes", ["--device", "foo"], "--device must be a device of PyTorch, got foo"),
    ],
)
def test_bad_arguments_are_one_line(name, arguments, message):
    if name == "convert_llama":
        pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    done = subprocess.run(command, text=True, capture_output=True, env=environment)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(message)
