"""The code that a guide shows runs, in the order of the page, on a CPU and with smaller numbers."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import htree_cuda

DECODING = Path(__file__).resolve().parents[2] / "docs" / "guides" / "decoding.md"
SMALLER = {
    "4096": "256",
    "131072": "2000",
    "4000": "400",
    "9000": "600",
    "1024": "100",
    "512": "40",
    "128": "16",
    "64": "2",
    "32": "16",
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@torch.no_grad()
def test_decoding():
    def tokens(T, B=2):
        return tuple(torch.randn(B, T, 8, 16) for _ in range(2))

    variables = {"torch": torch, "htree_cuda": htree_cuda, "B": 2, "max_tokens": 2000}
    ran = 0
    for block in blocks(DECODING):
        block = re.sub(r"\b\d+\b", lambda match: SMALLER.get(match[0], match[0]), block)
        block = block.replace('"cuda"', '"cpu"').replace("torch.bfloat16", "torch.float32")
        if "CUDAGraph" in block:
            continue
        (k, v), (k_next, v_next), (k_guessed, v_guessed) = tokens(400), tokens(1), tokens(4)
        variables |= {
            "k": k, "v": v, "k_next": k_next, "v_next": v_next, "k_guessed": k_guessed, "v_guessed": v_guessed,
            "q": torch.randn(2, 3, 32, 16), "q_next": torch.randn(2, 1, 32, 16), "q_guessed": torch.randn(2, 4, 32, 16),
            "x": torch.randn(1, 300, 256), "x_next": torch.randn(1, 1, 256),
            "accepted": torch.tensor([402, 401], dtype=torch.int32),
        }  # fmt: skip
        if "seqused" in block or "accepted" in block:
            variables["cache"] = htree_cuda.TreeCache(2, 2000, 8, 16, dtype=torch.float32)
            variables["cache"].append(k, v)
        if "attach" in block:
            variables["k"], variables["v"] = tokens(600)
        exec(compile(block, DECODING.name, "exec"), variables)
        variables["cache"].check()
        ran += 1
    assert ran == len(blocks(DECODING)) - 1 == 6
    assert variables["cache"].lengths.tolist()[1] == 512


def test_dsa():
    """Every block of the page, one after the other, with a small layer."""
    page = DECODING.with_name("dsa.md")
    q, kv = torch.randn(8, 4, 576), torch.randn(40, 1, 576)
    variables = {
        "torch": torch, "htree_cuda": htree_cuda, "x": torch.randn(2, 20, 64), "x_next": torch.randn(2, 1, 64),
        "q": q, "kv": kv, "indices": torch.randint(0, 40, (8, 1, 16), dtype=torch.int32), "start": 32,
        "sm_scale": 192**-0.5, "logits": torch.randn(8, 16, requires_grad=True),
    }  # fmt: skip
    small = {"512": "64", "16": "4", "256": "24", "2048": "8"}
    for block in blocks(page):
        block = re.sub(r"\b(512|16|256|2048)\b", lambda match: small[match[0]], block)
        if "DSAttention(" in block:
            block = block.replace("index_topk", "kv_lora_rank=32, index_topk")
        exec(compile(block, page.name, "exec"), variables)
        if "attention" in variables and "layers" not in variables:
            layer = variables["attention"]
            variables |= {"model": layer, "layers": [layer], "indexer_losses": [variables["loss"]]}
            variables["text_loss"] = variables["out"].square().mean()
    assert len(blocks(page)) == 5 and variables["attention"].stage == "sparse"
    variables["loss"].backward()
    assert variables["logits"].grad.abs().sum() > 0
