"""`explain --op forward_cached`: what it refuses before the library is called, and what it prints."""

from __future__ import annotations

import pytest

from htree_cuda import kernels
from htree_cuda.__main__ import main
from htree_cuda.explain_decode import explain

ROW = {
    "phase": "decode", "layer": None, "kind": "", "kernel": "some_kernel<bf16, 128>", "tile": "2 of 16 parts",
    "reason": "of reasons", "launches": 1, "ctas": 64, "first_query": None, "end_query": None, "pairs": None,
}  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, "built", lambda: True)
    monkeypatch.setattr(kernels, "recorded", lambda call, *, sms: calls.append(sms) or [ROW])
    return calls


def test_refusals(library, capsys):
    for wrong, message in (
        ({"T_q": 9}, "explain: T_q of forward_cached must be in 1"),
        ({"H": 5}, "explain: H must be a multiple of H_kv, got 5 and 2"),
        ({"T": -1}, "explain: T must"),
        ({"B": 1.5}, "explain: B must"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            explain(**{"T": 64, "H": 4, "H_kv": 2, **wrong})
    assert not library
    assert main(["explain", "--op", "forward_cached", "--T", "64", "--H", "8"]) == 2
    assert capsys.readouterr().err == "htree_cuda explain: --H-kv is missing: the KV heads of forward_cached\n"


def test_what_is_printed(library, capsys):
    command = ["explain", "--op", "forward_cached", "--T", "131072", "--H", "32", "--H-kv", "8", "--sms", "78"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("forward_cached: B 1, T 131,072, T_q 1, H 32, H_kv 8, K 128, top_k 512, bfloat16; 78 SMs\n")
    assert "decode  some_kernel<bf16, 128>  2 of 16 parts         1    64" in text
    assert text.endswith("why\n  some_kernel<bf16, 128>: of reasons\n") and library == [78]
