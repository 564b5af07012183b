"""quantize_fp8 and hadamard_transform: the facts that define them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import htree_cuda

FP8 = torch.float8_e4m3fn


def all_bf16():
    """Every finite bf16 value of positive sign, and zero."""
    return torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def as_double(y):
    return y.float().double()


def by_exact_arithmetic(x, scale):
    """The e4m3 value next to x / scale (in float32), ties to the even mantissa, by a table of all values."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float().double()
    ratio = (x.float() / scale).clamp(-448, 448).double()
    place = torch.searchsorted(table, ratio.abs().contiguous()).clamp(1, len(table) - 1)
    low, high = table[place - 1], table[place]
    below, above = ratio.abs() - low, high - ratio.abs()
    up = (above < below) | ((above == below) & (place % 2 == 0))
    return torch.where(up, high, low) * ratio.sign()


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_every_bf16_value_as_a_block_of_one(scale_format):
    x = all_bf16()[:, None]
    y, scale = htree_cuda.quantize_fp8(x, block_size=1, scale_format=scale_format)
    amax = x.float().clamp(min=1e-4)
    exact = amax / 448
    if scale_format == "float32":
        assert torch.equal(scale, exact)
    else:
        mantissa, exponent = torch.frexp(exact)  # mantissa in [0.5, 1)
        assert torch.equal(
            scale, torch.ldexp(torch.ones(exact.shape), torch.where(mantissa == 0.5, exponent - 1, exponent))
        )
        large = amax[:, 0] > 1e-4
        assert (as_double(y)[large] > 224 - 1e-9).all() and (as_double(y) <= 448).all()
    assert torch.equal(as_double(y), by_exact_arithmetic(x, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("block_size", [None, 1, 5, 128, 1000])
def test_blocks_and_a_short_last_one(dtype, block_size):
    x = torch.randn(3, 2, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    y, scale = htree_cuda.quantize_fp8(x, block_size=block_size)
    size = min(block_size or 13, 13)
    blocks = -(-13 // size)
    assert y.shape == x.shape and y.dtype == FP8 and scale.dtype == torch.float32
    assert scale.shape == ((3, 2) if block_size is None else (3, 2, blocks))
    wide = scale.reshape(3, 2, blocks).repeat_interleave(size, -1)[..., :13]
    for block in range(blocks):
        part = x[..., block * size : (block + 1) * size].float().abs().amax(-1)
        assert torch.equal(scale.reshape(3, 2, blocks)[..., block], part / 448)
    assert torch.equal(as_double(y), by_exact_arithmetic(x, wide))
    ratio, error = (x.double() / wide).abs(), (as_double(y) * wide - x.double()).abs()
    assert (error <= torch.where(ratio >= 2.0**-6, x.double().abs() * 2.0**-4, wide * 2.0**-10) * (1 + 1e-6)).all()


def test_amax_at_a_power_of_two_and_one_ulp_beside_it():
    top = 448 * 2.0 ** torch.arange(-20, 20)
    x = torch.stack([torch.nextafter(top, torch.zeros(())), top, torch.nextafter(top, torch.tensor(math.inf))], 1)
    _, scale = htree_cuda.quantize_fp8(x.reshape(-1, 1), block_size=None, scale_format="ue8m0")
    exact = (x / 448).reshape(-1)
    assert (scale >= exact).all() and (scale < 2 * exact).all()
    assert torch.equal(scale.reshape(-1, 3)[:, 1], top / 448)
    assert torch.equal(scale.log2().round().exp2(), scale)


def test_ue8m0_facts():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(50, 256, generator=g)
    y, scale = htree_cuda.quantize_fp8(x, scale_format="ue8m0")
    for n in (-3, 7):
        y2, scale2 = htree_cuda.quantize_fp8(x * 2.0**n, scale_format="ue8m0")
        assert torch.equal(y2.view(torch.uint8), y.view(torch.uint8)) and torch.equal(scale2, scale * 2.0**n)
    back = y.float().view(50, 2, 128) * scale[:, :, None]
    y3, scale3 = htree_cuda.quantize_fp8(back.view(50, 256), scale_format="ue8m0")
    kept = (y.float().view(50, 2, 128).abs().amax(-1) > 224) & (back.abs().amax(-1) >= 1e-4)
    assert kept.any() and torch.equal(scale3[kept], scale[kept])
    assert torch.equal(y3.float().view(50, 2, 128)[kept], y.float().view(50, 2, 128)[kept])


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_a_value_that_is_not_finite_shows_in_its_block_alone(bad, scale_format):
    x = torch.randn(4, 256)
    clean, clean_scale = htree_cuda.quantize_fp8(x, scale_format=scale_format)
    x[2, 130] = bad
    y, scale = htree_cuda.quantize_fp8(x, scale_format=scale_format)
    assert scale[2, 1].isnan() and (y.view(torch.uint8)[2, 128:] == 0x7F).all()
    scale[2, 1], clean_scale[2, 1] = 0, 0
    assert torch.equal(scale, clean_scale)
    y, clean = y.view(torch.uint8), clean.view(torch.uint8)
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]]) and torch.equal(y[2, :128], clean[2, :128])


def test_a_float64_beyond_the_range_of_float32_counts_as_infinite():
    y, scale = htree_cuda.quantize_fp8(torch.tensor([[1e39, 1.0], [1e38, 1.0]], dtype=torch.float64), block_size=None)
    assert scale[0].isnan() and as_double(y)[0].isnan().all()
    assert torch.equal(scale[1], torch.tensor(1e38) / 448) and as_double(y)[1].tolist() == [448, 0]


def test_zeros_and_empty_tensors():
    y, scale = htree_cuda.quantize_fp8(torch.zeros(2, 128))
    assert (y.float() == 0).all() and torch.equal(scale, torch.full((2, 1), 1e-4) / 448)
    assert (htree_cuda.quantize_fp8(torch.zeros(2, 128), scale_format="ue8m0")[1] == 2.0**-22).all()
    y, scale = htree_cuda.quantize_fp8(torch.zeros(0, 3, 130))
    assert y.shape == (0, 3, 130) and scale.shape == (0, 3, 2)
    assert htree_cuda.hadamard_transform(torch.zeros(0, 8)).shape == (0, 8)


def test_scales_of_128_feed_a_blockwise_product():
    """What DeepGEMM's and cuBLASLt's 1x128 products compute: scaled sums over blocks of 128."""
    a, b = torch.randn(6, 256), torch.randn(5, 256)
    (ya, sa), (yb, sb) = htree_cuda.quantize_fp8(a), htree_cuda.quantize_fp8(b)
    parts = [ya.float()[:, i : i + 128] @ yb.float()[:, i : i + 128].T for i in (0, 128)]
    product = sum(sa[:, i, None] * sb[None, :, i] * part for i, part in enumerate(parts))
    assert ((product - a @ b.T).norm() / (a @ b.T).norm()) < 0.06


@pytest.mark.parametrize("D", [1, 2, 8, 128, 1024])
def test_hadamard_is_orthogonal_symmetric_and_its_own_inverse(D):
    x, y = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hx, hy = htree_cuda.hadamard_transform(x), htree_cuda.hadamard_transform(y)
    torch.testing.assert_close(htree_cuda.hadamard_transform(hx), x)
    torch.testing.assert_close((hx * hy).sum(-1), (x * y).sum(-1))
    H = htree_cuda.hadamard_transform(torch.eye(D, dtype=torch.float64), scale=1.0)
    assert torch.equal(H, H.T) and (H.abs() == 1).all() and (H[0] == 1).all()
    if D > 1:
        quarter = H[: D // 2, : D // 2]
        assert torch.equal(H, torch.cat((torch.cat((quarter, quarter), 1), torch.cat((quarter, -quarter), 1))))


def test_hadamard_gradient_and_rounding():
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(htree_cuda.hadamard_transform, x)
    low = torch.randn(4, 128).bfloat16()
    exact = htree_cuda.hadamard_transform(low.double())
    assert torch.equal(htree_cuda.hadamard_transform(low), exact.float().bfloat16())
    q, k, weights = torch.randn(3, 2, 16).double(), torch.randn(9, 1, 16).double(), torch.randn(3, 2).double()
    rotated = htree_cuda.indexer_logits(*(htree_cuda.hadamard_transform(x) for x in (q, k)), weights)
    torch.testing.assert_close(rotated, htree_cuda.indexer_logits(q, k, weights), rtol=0, atol=1e-12)


def test_hadamard_of_large_numbers():
    assert torch.equal(htree_cuda.hadamard_transform(torch.full((4,), 1e38)), torch.tensor([2e38, 0.0, 0.0, 0.0]))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    for scale in (None, 0.3, -7.0, 2.0**-100, 1.0):
        found = htree_cuda.hadamard_transform(x, scale=scale)
        after = htree_cuda.hadamard_transform(x, scale=1.0) * (512**-0.5 if scale is None else scale)
        assert torch.equal(found, after), "the bits of a scale that comes after the sums"
    assert not htree_cuda.hadamard_transform(x, scale=0.0).any()


@pytest.mark.parametrize(
    ("match", "error", "call"),
    [
        ("quantize_fp8: x must be float16", ValueError, lambda f: f.quantize_fp8(torch.zeros(3).int())),
        ("quantize_fp8: D (the last dimension of x) must be at least 1, got 0", ValueError,
         lambda f: f.quantize_fp8(torch.zeros(3, 0))),
        ("quantize_fp8: block_size must be at least 1, got 0", ValueError,
         lambda f: f.quantize_fp8(torch.zeros(3), block_size=0)),
        ("quantize_fp8: block_size must be an int or None, got 1.5", TypeError,
         lambda f: f.quantize_fp8(torch.zeros(3), block_size=1.5)),
        ("quantize_fp8: scale_format must be one of 'float32', 'ue8m0', got 'e8m0'", ValueError,
         lambda f: f.quantize_fp8(torch.zeros(3), scale_format="e8m0")),
        ("hadamard_transform: D (the last dimension of x) must be a power of two, 1 .. 32768, got 12", ValueError,
         lambda f: f.hadamard_transform(torch.zeros(12))),
        ("hadamard_transform: scale must be finite, got nan", ValueError,
         lambda f: f.hadamard_transform(torch.zeros(4), scale=math.nan)),
        ("hadamard_transform: x must be a torch.Tensor, got list", TypeError, lambda f: f.hadamard_transform([1.0])),
    ],
)  # fmt: skip
def test_errors(match, error, call):
    with pytest.raises(error, match=re.escape(match)):
        call(htree_cuda)


def test_hadamard_is_infinite_where_a_result_is():
    assert htree_cuda.hadamard_transform(torch.full((16,), 3e38)).tolist() == [math.inf] + [0.0] * 15
    assert htree_cuda.hadamard_transform(torch.tensor([1e10, 1e10]), scale=1e38).tolist() == [math.inf, 0.0]
    assert htree_cuda.hadamard_transform(torch.ones(1), scale=2**70) == 2.0**70
    many = htree_cuda.hadamard_transform(torch.full((32768,), 1e308, dtype=torch.float64))
    assert many[0] == math.inf and not many[1:].any()


def test_hadamard_compiles_for_any_scale():
    x = torch.randn(3, 8)
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, scale: htree_cuda.hadamard_transform(x, scale=scale), fullgraph=True, backend="aot_eager",
            dynamic=dynamic,
        )  # fmt: skip
        for scale in (0.5, 0.7, 3.0):
            torch.testing.assert_close(compiled(x, scale), htree_cuda.hadamard_transform(x, scale=scale))


def test_a_scale_format_is_a_string():
    with pytest.raises(ValueError, match="quantize_fp8: scale_format must be one of"):
        htree_cuda.quantize_fp8(torch.ones(3, 2), scale_format=np.array(["float32", "a"]))


def test_a_short_last_block_compiles_to_the_same_bits():
    """Inductor of torch 2.13 gave other numbers where blocks of a padded row were cut to its length."""
    for D, block_size in ((300, 128), (17, 16)):
        torch._dynamo.reset()
        x = torch.randn(2, D)
        y, scale = torch.compile(htree_cuda.quantize_fp8)(x, block_size=block_size)
        expected, of_block = htree_cuda.quantize_fp8(x, block_size=block_size)
        assert torch.equal(y.float(), expected.float()) and torch.equal(scale, of_block)
