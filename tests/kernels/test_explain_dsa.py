"""What the launchers of kernels over index lists say that a call launches: by its sizes, and kernels that exist."""

from __future__ import annotations

import pytest
import torch

from htree_cuda import UnsupportedError, kernels
from htree_cuda.explain_dsa import explain

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.emulated, pytest.mark.sample]
FP8 = torch.float8_e4m3fn


def names(call):
    return [row["kernel"] for row in call["rows"]]


@pytest.mark.parametrize(("H", "kinds"), [(64, ["keys"]), (65, ["heads"]), (128, ["heads"]), (160, ["heads", "keys"])])
def test_passes_of_attn_dist(H, kinds):
    call = explain("attn_dist", T=5000, T_q=100, H=H, K=576)
    assert names(call) == [f"attn_dist_kernel<bf16, 576, {kind}>" for kind in kinds]
    assert [row["ctas"] for row in call["rows"]] == [132] * len(kinds)
    one = explain("attn_dist", T=5000, T_q=1, H=64, K=128, top_k=64, dtype=torch.float16)
    assert (names(one), one["rows"][0]["ctas"]) == (["attn_dist_kernel<fp16, 128, keys>"], 1)


def test_the_forward_of_sparse_attention_fills_the_gpu_that_is_told_of():
    for T_q, sms, ctas in ((40, 132, 80), (1000, 132, 132), (1000, 78, 78)):
        call = explain("sparse_attention", T=5000, T_q=T_q, H=128, K=512, sms=sms)
        assert (names(call), call["rows"][0]["ctas"]) == (["sparse_attention_kernel<bf16, 512>"], ctas)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_of_sparse_attention(deterministic):
    call = explain("sparse_attention", T=3000, H=64, K=576, backward=True, deterministic=deterministic)
    found = [name.partition("<")[0] for name in names(call)]
    bounds = ["norms_kernel", "bounds_kernel", "factors_kernel"] if deterministic else []
    assert found[:1] + found[1:-2] + found[-1:] == ["prepare_kernel", *bounds, "finish_kernel"]
    assert found[-2].startswith("sparse_attention_bwd")
    reasons = [explain("sparse_attention", T=T, H=64, K=576, backward=True)["rows"][1]["reason"] for T in (3000, 40000)]
    assert ["exceed" in reason for reason in reasons] == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize(("H", "name"), [(64, "64"), (40, "64, padded"), (32, "32"), (1, "32, padded")])
def test_heads_choose_the_kernel_of_the_dense_indexer(H, name, dtype):
    call = explain("indexer_logits", T=5000, T_q=33, H=H, K=64, dtype=dtype)
    told = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "e4m3"}[dtype]
    assert names(call) == [f"indexer_logits_kernel<{told}, 64, {name}>"]
    tiles = -(-33 // (8 if H > 32 else 16))
    assert call["rows"][0]["ctas"] == tiles * -(-5000 // 256)


def test_keys_of_a_cta_of_the_dense_indexer():
    """As many as 4,096, and no less than 256, so that one round of CTAs has all SMs."""
    for T_q, T, keys in ((4096, 65536, 4096), (8, 65536, 512), (8, 20000, 256), (70, 65536, 4096)):
        row = explain("indexer_logits", T=T, T_q=T_q, H=64, K=128)["rows"][0]
        assert row["ctas"] == -(-T_q // 8) * -(-T // keys) and f" {keys} keys" in row["tile"]


def test_keys_of_few_queries_of_the_dense_indexer_are_split():
    for T_q, B, keys in ((1, 1, 1024), (2, 1, 2048), (4, 1, 4096), (1, 8, 4096), (1, 1000, 4096)):
        call = explain("indexer_logits", B=B, T=131072, T_q=T_q, H=20, K=128)
        assert names(call) == ["indexer_logits_kernel<bf16, 128, 64, few>"]
        assert call["rows"][0]["ctas"] == B * T_q * 131072 // keys
    assert names(explain("indexer_logits", T=131072, T_q=5, H=20, K=128)) == [
        "indexer_logits_kernel<bf16, 128, 32, padded>"
    ]


def test_few_rows_are_divided():
    for rows, n, ctas in ((1, 32768, 8), (16, 32768, 8), (17, 32768, 4), (66, 32768, 2), (67, 32768, 1), (1, 32767, 1)):
        call = explain("topk_indices", T=n, T_q=rows, H=1, K=64, top_k=2048)
        assert names(call) == ["topk_indices_divided" if ctas > 1 else "topk_indices_buffered"]
        assert call["rows"][0]["ctas"] == rows * ctas
    assert names(explain("topk_indices", T=65536, T_q=1, H=1, K=64, top_k=5000)) == ["topk_indices_rescan"]


def test_few_queries_share_a_list():
    shapes = ((1, 1, 128, 16), (8, 1, 128, 8), (1, 2, 64, 16), (66, 1, 64, 2), (67, 1, 64, 1), (1, 4096, 64, 1))
    for B, T_q, H, parts in shapes:  # whatever the number of SMs
        small = explain("sparse_attention", B=B, T=16384, T_q=T_q, H=H, K=576, top_k=2048, sms=78)["rows"][0]
        assert small["ctas"] == (B * T_q * -(-H // 64) * parts if parts > 1 else min(78, B * T_q * -(-H // 64)))
        call = explain("sparse_attention", B=B, T=16384, T_q=T_q, H=H, K=576, top_k=2048)
        assert call["rows"][0]["ctas"] == min(132, B * T_q * -(-H // 64) * parts)
        assert names(call)[1:] == ["join_kernel<bf16>"] * (parts > 1)


def test_the_selector_and_its_chunks():
    for top_k, name in ((2048, "topk_indices_buffered"), (5000, "topk_indices_rescan")):
        call = explain("topk_indices", T=9000, T_q=70, B=2, H=1, K=64, top_k=top_k)
        assert (names(call), call["rows"][0]["ctas"]) == ([name], 140)
    call = explain("indexer_topk", T=65536, H=64, K=128)
    assert [name.partition("<")[0] for name in names(call)] == ["indexer_logits_kernel", "topk_indices_buffered"]
    logits, select = call["rows"]
    assert logits["launches"] == select["launches"] > 1 and select["ctas"] == 65536  # 256 MiB of logits at a time


def test_the_listed_indexer():
    for backward, what in ((False, "forward"), (True, "backward")):
        call = explain("indexer_logits_listed", T=900, T_q=30, H=64, K=128, backward=backward)
        assert (names(call), call["rows"][0]["ctas"]) == ([f"indexer_listed_kernel<bf16, 128, {what}>"], 30)


def test_an_error_ends_the_recording():
    with pytest.raises(UnsupportedError, match="d_i to be 64 or 128, got 96"):
        explain("indexer_logits", T=50, H=64, K=96)
    with pytest.raises(ValueError, match="stopped"):
        kernels.recorded(stopped, sms=132)
    assert len(explain("indexer_logits", T=50, H=64, K=64)["rows"]) == 1


def stopped():
    raise ValueError("stopped")
