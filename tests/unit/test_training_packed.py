"""examples/train_bytes.py --packed: documents that see nothing of each other, for every arm."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_training import CPU, TINY
from tests.unit.test_training import example as train_bytes


@pytest.fixture(scope="module")
def documents():
    return train_bytes.PackedText()


def test_targets_follow_within_a_document(documents):
    stage = train_bytes.Stage(200, 3, 1)
    tokens, targets, bounds = documents.batch("train", stage, 0, 0)
    assert tokens.shape == targets.shape == (600,) and bounds[0] == 0 and bounds[-1] == 600
    assert {200, 400} <= set(bounds.tolist()) and len(bounds) > 7, "several documents a sequence, cut where it ends"
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        assert torch.equal(targets[begin : end - 1], tokens[begin + 1 : end])
    again = documents.batch("train", stage, 0, 0)
    assert all(map(torch.equal, (tokens, targets, bounds), again))


@pytest.mark.parametrize("arm", train_bytes.ARMS)
def test_no_document_sees_another(arm, documents):
    run = train_bytes.Run(TINY, "text", arm, 0, documents, CPU, "auto")
    tokens, _, bounds = documents.batch("train", train_bytes.Stage(80, 1, 1), 0, 0)
    before = run.model(tokens, bounds)
    begin, end = bounds[1].item(), bounds[2].item()
    tokens[begin:end] = (tokens[begin:end] + 1) % 256
    after = run.model(tokens, bounds)
    outside = torch.ones(80, dtype=torch.bool)
    outside[begin:end] = False
    assert torch.equal(before[outside], after[outside]) and not torch.equal(before[begin:end], after[begin:end])
    alone = run.model(tokens[None, begin:end])[0]
    torch.testing.assert_close(alone, after[begin:end])


def test_a_run_learns(documents, tmp_path):
    run = train_bytes.Run(TINY, "text", "htree", 0, documents, CPU, "auto")
    run.train(tmp_path / "run.pt")
    assert run.step == 6 and len(run.log) == 3 and "packed" in run.name
