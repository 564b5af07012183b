"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_example_runs_and_shows_what_it_says():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 20
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    dist = names["dist"]
    assert dist.shape == (2, 16, 64)
    assert (dist.sum(-1) - 64).abs().max() < 1e-2


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).resolve().parents[2] / target).exists(), target
