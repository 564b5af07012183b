"""`explain --op`: what it refuses before the library is asked, and what it prints."""

from __future__ import annotations

import json

import pytest

from htree_cuda import kernels
from htree_cuda.__main__ import main
from htree_cuda.explain_dsa import explain

ROW = {
    "phase": "attend", "layer": None, "kind": "", "kernel": "some_kernel<bf16>", "tile": "64 heads",
    "reason": "of reasons", "launches": 2,
    "ctas": 1320, "first_query": None, "end_query": None, "pairs": None,
}  # fmt: skip
COMMAND = ["explain", "--op", "sparse_attention", "--T", "4096", "--H", "64"]


@pytest.fixture
def library(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "built", lambda: True)
    monkeypatch.setattr(kernels, "recorded", lambda call, *, sms: asked.append(sms) or [ROW])
    return asked


def test_refusals(library, capsys):
    sizes = {"T": 64, "H": 8, "K": 576}
    with pytest.raises(ValueError, match=r"explain: op must be of attn_dist, .*, got 'flash'"):
        explain("flash", **sizes)
    with pytest.raises(ValueError, match=r"explain: backward needs op to be of sparse_attention, .*, got 'attn_dist'"):
        explain("attn_dist", **sizes, backward=True)
    with pytest.raises(ValueError, match="explain: T_q must be at most T, got 65 and 64"):
        explain("sparse_attention", **sizes, T_q=65)
    with pytest.raises(ValueError, match="explain: H must"):
        explain("sparse_attention", T=64, H=-1, K=576)
    assert not library
    assert main(["explain", "--T", "64", "--H", "8"]) == 2
    assert capsys.readouterr().err == "htree_cuda explain: --H-kv is missing: the KV heads of forward\n"


def test_what_is_printed(library, capsys):
    assert main([*COMMAND, "--sms", "78"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sparse_attention: B 1, T 4,096, T_q 4,096, H 64, K 576, top_k 2,048, bfloat16; 78 SMs\n")
    assert "attend  some_kernel<bf16>  64 heads              2  1,320" in text
    assert text.endswith("why\n  some_kernel<bf16>: of reasons\n") and library == [78]
    assert main([*COMMAND, "--backward", "--deterministic", "--json", "--sms", "78"]) == 0
    call = json.loads(capsys.readouterr().out)
    assert call["backward"] and call["deterministic"] and call["rows"] == [ROW]
