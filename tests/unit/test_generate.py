"""examples/generate_bytes.py: steps from caches write what the whole model writes, and its report says what was run."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import generate_bytes as example
import train_bytes
from train_bytes import PRESETS, Decoder, Stage, Task

TINY = dataclasses.replace(
    PRESETS["cpu"], d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, top_k=2,
    text=Task((Stage(40, 2, 6),), lr=1e-2, eval_every=2, eval_batches=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return train_bytes.Text()


@pytest.mark.parametrize("arm", example.ARMS)
@torch.no_grad()
def test_steps_write_what_the_whole_model_writes(arm):
    """Greedily, against the model on the whole text so far, over several layers of the tree."""
    torch.manual_seed(0)
    weights = Decoder(TINY, "htree", 256, 5, "auto").double().state_dict()
    model = Decoder(TINY, arm, 256, None, "auto").double()
    model.load_state_dict(weights)
    tokens = torch.randint(0, 256, (50,))
    found = example.generate(model, arm, tokens, 40, temperature=0.0, seed=0)
    for _ in range(40):
        tokens = torch.cat((tokens, model(tokens[None])[0, -1].argmax().view(1)))
    assert found["text"] == bytes(tokens[50:].tolist()).decode("utf-8", "replace")
    assert found["new"] == 40 and found["prompt"] == 50 and found["tokens_per_s"] > 0


def test_noise_follows_the_seed():
    torch.manual_seed(0)
    model = Decoder(TINY, "htree", 256, 5, "auto")
    tokens = torch.randint(0, 256, (30,))
    texts = [example.generate(model, "htree", tokens, 20, 1.0, seed)["text"] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_the_command(monkeypatch, tmp_path, capsys, text):
    """Trains, writes, goes on from its checkpoint without training again, and takes one of train_bytes."""
    monkeypatch.setitem(PRESETS, "cpu", TINY)
    monkeypatch.setattr(example, "Text", lambda: text)
    call = ["--prompts", "64,100", "--new", "8", "--steps", "2", "--out", str(tmp_path)]
    assert example.main(call) == 0
    report = json.loads((tmp_path / "generate_cpu.json").read_text())
    assert report["steps"] == 2 and [(f["arm"], f["prompt"]) for f in report["figures"]] == [
        ("htree", 64), ("dense", 64), ("htree", 100), ("dense", 100),
    ]  # fmt: skip
    assert "bytes/s" in capsys.readouterr().out
    checkpoint = tmp_path / "generate_cpu_text_htree_0.pt"
    before = checkpoint.read_bytes()
    assert example.main([*call, "--checkpoint", str(checkpoint)]) == 0 and example.main(call) == 0
    again = json.loads((tmp_path / "generate_cpu.json").read_text())
    assert [f["text"] for f in again["figures"]] == [f["text"] for f in report["figures"]]
    assert checkpoint.read_bytes() == before
    state = torch.load(checkpoint, weights_only=True)
    state["settings"]["arm"] = "dense"
    torch.save(state, tmp_path / "dense.pt")
    with pytest.raises(SystemExit, match="must be of the text task with htree attention"):
        example.main([*call, "--checkpoint", str(tmp_path / "dense.pt")])
    with pytest.raises(SystemExit):
        example.main(["--new", "1"])
    assert "--new must be at least 2, got 1" in capsys.readouterr().err
