"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_the_decoder_block_runs_and_learns():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 20
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == (1, 4096, 256)
    block = next(value for value in names.values() if isinstance(value, type) and value.__name__ == "Block")
    torch.manual_seed(0)
    model = block(64)
    x = torch.randn(1, 256, 64)
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    changed = x.clone()
    changed[:, 200:] = 0.0
    assert torch.equal(model(changed)[:, :200], model(x)[:, :200])


def test_prose_is_short():
    text = re.sub(r"```.*?```|<!-- generated.*?<!-- end generated -->|<!--.*?-->", "", README, flags=re.DOTALL)
    prose = re.sub(r"(?m)^(\||    ).*$", "", text)
    assert len(prose.split()) <= 900
