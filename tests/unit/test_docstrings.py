"""What a public name's docstring has to hold, and that its example runs."""

from __future__ import annotations

import doctest
import inspect
import math
import re

import pytest
import torch

import htree_cuda

FUNCTIONS = [name for name in htree_cuda.__all__ if callable(getattr(htree_cuda, name)) and name != "UnsupportedError"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_docstring_is_a_contract(name):
    text = inspect.getdoc(getattr(htree_cuda, name))
    sections = ["Args", "Raises", "Notes", "Example", "Source"]
    if inspect.isfunction(getattr(htree_cuda, name)):
        sections.insert(1, "Returns")
    found = re.findall(r"^(Args|Returns|Raises|Notes|Example|Source):", text, re.MULTILINE)
    assert [section for section in found if section in sections] == sections
    assert text.splitlines()[0].endswith("."), "one line of meaning"
    arguments = inspect.signature(getattr(htree_cuda, name)).parameters
    described = text[text.index("Args:") : text.index("Raises:")]
    assert [argument for argument in arguments if not re.search(rf"\b{argument}\b", described)] == []


def test_the_module_names_everything():
    assert all(f"`{name}`" in htree_cuda.__doc__ for name in FUNCTIONS)


@pytest.mark.parametrize(
    "names",
    [
        ["forward"],
        ["HTreeAttention"],
        ["TreeCache"],
        ["forward_cached"],
        ["sparse_attention"],
        ["attn_dist", "normalize_attn_dist", "indexer_loss"],
        ["indexer_logits"],
        ["topk_indices"],
        ["indexer_topk"],
        ["quantize_fp8"],
        ["hadamard_transform"],
        ["dense_indexer_loss"],
        ["DSAttention"],
    ],
    ids=lambda names: names[0],
)
def test_examples_run(names):
    """The examples of the indexer loss go on from each other."""
    torch.manual_seed(0)
    variables = {"htree_cuda": htree_cuda, "torch": torch, "math": math}
    for name in names:
        if name == "normalize_attn_dist":
            variables["dist"] = variables["dist"].expand(2, -1, -1)
        source = doctest.script_from_examples(inspect.getdoc(getattr(htree_cuda, name)))
        assert "htree_cuda." in source
        exec(compile(source, name, "exec"), variables)
