"""What the launcher of the decode kernel says that a step launches: parts and CTAs by the call's size."""

from __future__ import annotations

import pytest
import torch

from htree_cuda import UnsupportedError
from htree_cuda.explain_decode import explain

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]


def told(**call):
    (row,) = explain(**{"T": 32768, "H": 4, "H_kv": 1, "K": 64, **call})["rows"]
    return row["tile"], row["ctas"]


@pytest.mark.sample
def test_parts_follow_from_top_k_and_the_group():
    assert told() == ("1 of 16 parts, 16 warps", 16)
    assert told(top_k_per_layer=128) == ("1 of 8 parts, 8 warps", 8)
    assert told(top_k_per_layer=64) == ("1 of 4 parts, 8 warps", 4)
    assert told(top_k_per_layer=64, H=16) == ("1 of 8 parts, 8 warps", 8)


@pytest.mark.sample
def test_many_queries_take_several_parts_a_cta():
    tiles = [told(H=32, H_kv=8, B=B) for B in (1, 2, 8, 64)]
    assert [tile for tile, _ in tiles] == [f"{parts} of 16 parts, 16 warps" for parts in (2, 4, 8, 8)]
    assert [ctas for _, ctas in tiles] == [64, 64, 128, 1024]
    assert told(H=32, H_kv=8, T_q=8) == told(H=32, H_kv=8, B=8)
    assert told(H=32, H_kv=8, B=8, top_k_per_layer=64) == ("2 of 4 parts, 8 warps", 128)
    assert told(H=32, H_kv=8, sms=264) == ("1 of 16 parts, 16 warps", 128)


@pytest.mark.parametrize(("dtype", "K", "name"), [
    pytest.param(torch.bfloat16, 64, "bf16, 64", marks=pytest.mark.sample), (torch.bfloat16, 128, "bf16, 128"),
    (torch.float16, 64, "fp16, 64"),
])  # fmt: skip
def test_the_kernel_is_named(dtype, K, name):
    assert explain(T=1000, H=4, H_kv=1, dtype=dtype, K=K)["rows"][0]["kernel"] == f"htree_decode_kernel<{name}>"


@pytest.mark.sample
def test_what_the_kernel_does_not_take():
    with pytest.raises(UnsupportedError):
        explain(T=1000, H=4, H_kv=1, K=96)
    with pytest.raises(ValueError, match="T_q of forward_cached must be"):
        explain(T=1000, H=4, H_kv=1, T_q=9)
    with pytest.raises(ValueError, match="H must be a multiple of H_kv, got 5 and 2"):
        explain(T=1000, H=5, H_kv=2)
