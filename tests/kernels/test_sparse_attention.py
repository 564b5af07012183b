"""The sparse_attention kernel against the definition, on a Hopper GPU or, the tests marked `emulated`, without one.

The kernel is called as ops.py would call it. The oracle and the baseline are loops over queries in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import htree_cuda
from htree_cuda import kernels

from ..baseline import FACTOR, row_errors

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
D_V = 512
HOSTILE = (-1, -(2**31), 2**31 - 1, 7 * 10**6)
# Float32 sums of up to 576 products, where the baseline's own error may be zero (one slot).
ARITHMETIC = 2e-6
LSE_ARITHMETIC = 3e-6
DEPTH = 16  # products that the tensor cores add at once


@dataclass
class Problem:
    """Inputs on the host; `options` as kernels.sparse_attention takes them, topk_length and attn_sink included."""

    q: Tensor  # [B, s_q, h_q, d]
    kv: Tensor  # [B, s_kv, 1, d]
    indices: Tensor  # [B, s_q, 1, topk]
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        defaults = {"q_start": None, "k_stride": 1, "topk_length": None, "attn_sink": None, "lse_base": 2.0}
        self.options = {"sm_scale": self.q.shape[-1] ** -0.5, **defaults, **self.options}

    def valid(self, b: int, s: int) -> list[int]:
        """Key rows of the slots that count, in the order of the slots."""
        o = self.options
        topk = self.indices.shape[3]
        length = topk if o["topk_length"] is None else min(max(int(o["topk_length"][b, s]), 0), topk)
        limit = self.kv.shape[1]
        if o["q_start"] is not None:
            limit = min(limit, (o["q_start"][b] + s + 1) // o["k_stride"])
        return [i for i in self.indices[b, s, 0, :length].tolist() if 0 <= i < limit]

    def poison(self) -> None:
        """NaN in every key row that no slot of its batch names."""
        for b in range(self.kv.shape[0]):
            rows = [i for s in range(self.q.shape[1]) for i in self.valid(b, s)]
            unselected = torch.ones(self.kv.shape[1], dtype=torch.bool)
            unselected[rows] = False
            self.kv[b, unselected] = math.nan

    def run(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of the kernel, on the host; every element was poisoned before."""
        B, s_q, h_q, _ = self.q.shape
        q, kv, indices = (self._there(x) for x in (self.q, self.kv, self.indices))
        options = {k: self._there(v) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        out = torch.full((B, s_q, h_q, D_V), math.nan, dtype=q.dtype, device=DEVICE)
        lse = torch.full((B, s_q, h_q), math.nan, device=DEVICE)
        size = kernels.sparse_attention_workspace(q, indices)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        kernels.sparse_attention(q, kv, indices, out, lse, workspace, **options)
        return out.cpu(), lse.cpu()

    @staticmethod
    def _there(x: Tensor) -> Tensor:
        """On DEVICE with the same strides and NaN in the gaps, so that a view stays a view."""
        if x.is_contiguous():
            return x.to(DEVICE)
        size = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1
        gap = math.nan if x.is_floating_point() else 3  # a valid row, which nobody names here
        storage = torch.full((size,), gap, dtype=x.dtype, device=DEVICE)
        view = storage.as_strided(x.shape, x.stride())
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
        view[once] = x[once].to(DEVICE)
        return view

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse) in float64, and the baseline of out: P rounded to the dtype, float32 sums, rounded once."""
        B, s_q, h_q, _ = self.q.shape
        sink = self.options["attn_sink"]
        out = torch.zeros(B, s_q, h_q, D_V, dtype=torch.float64)
        baseline = torch.zeros(B, s_q, h_q, D_V, dtype=self.q.dtype)
        lse = torch.full((B, s_q, h_q), -math.inf, dtype=torch.float64)
        for b in range(B):
            for s in range(s_q):
                rows = self.valid(b, s)
                if not rows:
                    continue
                keys = self.kv[b, rows, 0].double()
                scores = self.q[b, s].double() @ keys.T * self.options["sm_scale"]
                natural = torch.logsumexp(scores, dim=1)
                denominator = natural if sink is None else torch.logaddexp(natural, sink.double())
                out[b, s] = torch.exp(scores - denominator[:, None]) @ keys[:, :D_V]
                lse[b, s] = natural / math.log(self.options["lse_base"])
                row_max = scores.amax(1)
                p = torch.exp(scores - row_max[:, None]).to(self.q.dtype).float()
                weight = torch.exp(row_max - denominator).float()
                baseline[b, s] = (p @ keys[:, :D_V].float() * weight[:, None]).to(self.q.dtype)
        return out, lse, baseline

    def check(self) -> tuple[Tensor, Tensor]:
        """Runs the kernel and compares; returns what it gave."""
        exact, exact_lse, baseline = self.exact()
        self.poison()
        out, lse = self.run()
        for kind, mine, allowed in zip(("max", "rms"), row_errors(out, exact), row_errors(baseline, exact)):
            assert mine <= FACTOR * allowed + ARITHMETIC, f"{kind} error {mine:.3e}, baseline {allowed:.3e}"
        empty = exact_lse == -math.inf
        assert torch.equal(lse[empty], exact_lse[empty].float())
        assert not out[empty].any()
        assert ((lse.double() - exact_lse)[~empty].abs() <= self.lse_bound(exact_lse)[~empty]).all()
        return out, lse

    def lse_bound(self, exact_lse: Tensor) -> Tensor:
        """What lse may be off: twice the error of scores that tensor cores add up, and float32's of what follows."""
        off = torch.zeros_like(exact_lse)
        for b in range(self.q.shape[0]):
            for s in range(self.q.shape[1]):
                rows = self.valid(b, s)
                if rows:
                    scores = cut_product(self.q[b, s], self.kv[b, rows, 0]) * self.options["sm_scale"]
                    off[b, s] = torch.logsumexp(scores, 1) / math.log(self.options["lse_base"]) - exact_lse[b, s]
        finite = off.nan_to_num(0.0, 0.0, 0.0).abs()
        return LSE_ARITHMETIC + FACTOR * finite.max() + 2.0**-23 * exact_lse.nan_to_num(0.0, 0.0, 0.0).abs()


def processors() -> int:
    """SMs, which a persistent grid has a block each for; the emulator has three."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE == "cuda" else 3


def cut_product(q: Tensor, keys: Tensor) -> Tensor:
    """q keys^T in float64, but every sixteen columns the sum is cut off at float32's last bit, towards zero."""
    total = torch.zeros(q.shape[0], keys.shape[0], dtype=torch.float64)
    for i in range(0, q.shape[1], DEPTH):
        exact = total + q[:, i : i + DEPTH].double() @ keys[:, i : i + DEPTH].double().T
        near = exact.float()
        total = torch.where(near.double().abs() > exact.abs(), near.nextafter(torch.zeros(())), near).double()
    return total


def problem(
    h_q: int,
    topk: int,
    *,
    d: int = 576,
    dtype: torch.dtype = torch.bfloat16,
    B: int = 1,
    s_q: int = 3,
    s_kv: int = 150,
    seed: int = 0,
    **options,
) -> Problem:
    """Random q and kv; about a sixth of the slots out of range, duplicates as they come."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, s_q, h_q, d, generator=g).to(dtype)
    kv = torch.randn(B, s_kv, 1, d, generator=g).to(dtype)
    indices = torch.randint(-s_kv // 10, s_kv + s_kv // 10, (B, s_q, 1, topk), generator=g, dtype=torch.int32)
    return Problem(q, kv, indices, options)


def shared_lists(x: Problem) -> bool:
    """Whether several CTAs share a list."""
    q, indices = x.q.to(DEVICE), x.indices.to(DEVICE)
    return kernels.sparse_attention_workspace(q, indices) > 0


@pytest.mark.emulated(sms=13)
@pytest.mark.parametrize(("h_q", "d", "dtype"), [(128, 576, torch.bfloat16), (70, 512, torch.float16)])
@pytest.mark.parametrize("sink", [False, True])
def test_several_ctas_share_the_lists_of_few_queries(h_q, d, dtype, sink):
    """Lists with fewer tiles than parts, parts without a valid slot, scores that grow from part to part, NaN."""
    lengths = torch.tensor([[700, 0, 130]], dtype=torch.int32)
    options = {"attn_sink": torch.linspace(-3, 3, h_q)} if sink else {}
    x = problem(h_q, 700, d=d, dtype=dtype, s_kv=300, seed=31, topk_length=lengths, lse_base=math.e, **options)
    x.indices[0, 0, 0, 64:330] = torch.tensor(HOSTILE * 70, dtype=torch.int32)[:266]
    x.indices[0, 0, 0, 500:] = 299
    x.kv[0, 299] *= 3
    assert shared_lists(x)
    out, lse = x.check()
    for mine, other in zip((out, lse), x.run()):
        assert torch.equal(mine, other)
    x.q[0, 0, 5, 3] = math.nan
    for mine, other in zip((out, lse), x.run()):
        assert mine[0, 0, 5].isnan().logical_not().all() and other[0, 0, 5].isnan().all()
        other[0, 0, 5] = mine[0, 0, 5]
        assert torch.equal(mine, other)


@pytest.mark.emulated(sms=13)
def test_a_query_that_ctas_share_has_the_bits_of_its_shape_alone():
    """Whatever the other queries, batches and unused rows hold."""
    x = problem(64, 600, B=2, s_q=2, s_kv=200, seed=32)
    assert shared_lists(x)
    out, lse = x.check()
    x.q[1], x.indices[1], x.kv[1] = x.q[0].clone(), x.indices[0].clone(), x.kv[0].clone()
    x.q[0, 1], x.indices[0, 1] = math.inf, -1
    again, again_lse = x.run()
    assert torch.equal(again[1], out[0]) and torch.equal(again_lse[1], lse[0])
    assert torch.equal(again[0, 0], out[0, 0]) and torch.equal(again_lse[0, 0], lse[0, 0])


@pytest.mark.emulated
@pytest.mark.parametrize("sink", [math.inf, -math.inf, math.nan])
def test_sanitizer_parts_and_sinks_that_are_not_finite(sink):
    """An infinite sink takes everything, minus infinity nothing, NaN makes NaN of out alone."""
    x = problem(5, 260, s_kv=200, s_q=2, seed=33)
    x.indices[0, 1] = -1
    assert shared_lists(x)
    clean, lse = x.run()
    x.options["attn_sink"] = torch.tensor([0.0, sink, -math.inf, -math.inf, -math.inf])
    out, own_lse = x.run()
    assert torch.equal(own_lse, lse) and torch.equal(out[:, :, 2:], clean[:, :, 2:]) and not out[0, 1].any()
    if sink == -math.inf:
        assert torch.equal(out[:, :, 1], clean[:, :, 1])
    else:
        assert out[0, 0, 1].isnan().all() if math.isnan(sink) else not out[0, 0, 1].any()


@pytest.mark.emulated
def test_whole_lists_of_many_tiles():
    """Too many queries for parts; few of them with more than a tile, odd and even numbers of them."""
    lengths = torch.full((1, 70), 2, dtype=torch.int32)
    lengths[0, [0, 3, 30, 69]] = torch.tensor([700, 449, 300, 640], dtype=torch.int32)
    x = problem(6, 700, s_q=70, s_kv=300, seed=34, topk_length=lengths)
    assert not shared_lists(x)
    x.check()


# (h_q, topk): every h_q of the first list meets a few topk, so that all pairs of edges of groups and tiles occur.
SHAPES = [(h, t) for i, h in enumerate((1, 16, 63, 64, 65, 96, 128, 129)) for t in (1, 63, 64, 65, 200)[i % 2 :: 2]]


@pytest.mark.emulated
@pytest.mark.parametrize(("h_q", "topk"), SHAPES)
def test_heads_and_slots(h_q, topk):
    problem(h_q, topk, seed=h_q + topk).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("topk", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("h_q", [1, 16, 63, 64, 65, 96, 128, 129])
def test_every_shape(h_q, topk, d, dtype):
    problem(h_q, topk, d=d, dtype=dtype, seed=h_q + topk).check()


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("d", "dtype"), [pytest.param(576, torch.bfloat16, marks=pytest.mark.sample), (512, torch.float16)]
)
def test_hostile_indices(d, dtype):
    x = problem(65, 200, d=d, dtype=dtype, s_q=4, seed=1)
    x.indices[0, 0, 0, ::3] = torch.tensor(HOSTILE * 17, dtype=torch.int32)[:67]
    x.indices[0, 1] = -1  # nothing
    x.indices[0, 2] = 5  # one row, 200 times
    x.indices[0, 3, 0, :130] = 2**31 - 1  # two tiles without a valid slot, then some
    out, lse = x.check()
    row = x.kv[0, 5, 0, :D_V].double()
    assert ((out[0, 2].double() - row).abs() <= row.abs() * torch.finfo(dtype).eps).all()
    assert (lse[0, 1] == -math.inf).all() and not out[0, 1].any()


@pytest.mark.emulated
def test_lengths_and_causal_rule():
    lengths = torch.tensor([[0, 1, 64, 65, 200, 500, -3], [63, 0, 0, 128, 129, 100, 7]], dtype=torch.int32)
    x = problem(70, 200, B=2, s_q=7, seed=2, q_start=[0, 120], k_stride=2, topk_length=lengths, lse_base=math.e)
    x.check()
    assert not x.valid(0, 0)


@pytest.mark.emulated
def test_sinks():
    sink = torch.tensor([0.0, 3.0, -5.0, 60.0, -200.0, math.inf, -math.inf, 9.0])
    without = problem(8, 100, seed=3)
    without_out, without_lse = without.run()
    out, lse = problem(8, 100, seed=3, attn_sink=sink).check()
    assert torch.equal(lse, without_lse)
    assert torch.equal(out[:, :, 6], without_out[:, :, 6]) and torch.equal(out[:, :, 4], without_out[:, :, 4])
    assert not out[:, :, 5].any()
    poisoned = problem(8, 100, seed=3, attn_sink=torch.where(sink == 9.0, math.nan, sink))
    out, lse = poisoned.run()
    assert out[:, :, 7].isnan().all() and not out[:, :, :7].isnan().any() and torch.equal(lse, without_lse)


@pytest.mark.emulated
def test_rising_and_falling_scores():
    """Offsets that are raised in every tile, in some, and never; scores far beyond what an exponential holds."""
    x = problem(64, 320, s_q=3, s_kv=320, seed=4, sm_scale=1.0)
    x.indices[0, :, 0] = torch.arange(320, dtype=torch.int32)
    x.q[0] = x.q[0].abs()
    ramp = torch.linspace(-1, 1, 320)
    x.kv[0, :, 0] = (ramp[:, None] + 0.01 * torch.randn(320, 576)).to(torch.bfloat16)
    x.indices[0, 1, 0] = torch.arange(319, -1, -1, dtype=torch.int32)
    x.indices[0, 2, 0, ::2] = x.indices[0, 2, 0, ::2].flip(0)
    exact, exact_lse, baseline = x.exact()
    assert exact_lse.abs().max() > 400
    out, lse = x.run()
    for mine, allowed in zip(row_errors(out, exact), row_errors(baseline, exact)):
        assert mine <= FACTOR * allowed + 1e-3  # scores of 500 are known to 2^-15
    assert ((lse - exact_lse).abs() <= x.lse_bound(exact_lse)).all()


@pytest.mark.emulated
def test_negative_and_zero_scale():
    problem(16, 130, seed=5, sm_scale=-0.04).check()
    problem(16, 130, seed=5, sm_scale=0.0).check()


@pytest.mark.emulated
def test_strided_views():
    B, s_q, h_q, d, s_kv = 2, 3, 65, 576, 90
    g = torch.Generator().manual_seed(6)
    q = torch.empty(B, 2 * s_q, h_q + 5, d + 8, dtype=torch.bfloat16)[:, ::2, 2:-3, 8:]
    kv = torch.empty(B, s_kv, 2, d + 16, dtype=torch.bfloat16)[:, :, 1:, :d]
    q.copy_(torch.randn(B, s_q, h_q, d, generator=g))
    kv.copy_(torch.randn(B, s_kv, 1, d, generator=g))
    indices = torch.randint(-9, s_kv + 9, (B, s_q, 1, 70), generator=g, dtype=torch.int32)
    expanded = Problem(q[:1, :1].expand(B, s_q, h_q, d), kv[:1].expand(B, s_kv, 1, d), indices)
    contiguous = Problem(expanded.q.contiguous(), expanded.kv.contiguous(), indices)
    for mine, other in zip(expanded.run(), contiguous.run()):
        assert torch.equal(mine, other)
    Problem(q, kv, indices).check()


def strided_lists(x: Problem) -> list[Problem]:
    """x whose list, lengths and sinks are transposed views, and x with those of its first query for all."""
    o = x.options
    transposed = {
        "topk_length": o["topk_length"].T.contiguous().T,
        "attn_sink": torch.stack([o["attn_sink"], o["attn_sink"] + 9], 1)[:, 0],
    }
    wide = torch.stack([x.indices, x.indices * 0 + 3], -1)[..., 0].permute(3, 2, 1, 0)
    views = Problem(x.q, x.kv, wide.permute(3, 2, 1, 0), {**o, **transposed})
    one = {
        "topk_length": o["topk_length"][:1, 1:2].expand_as(o["topk_length"]),
        "attn_sink": o["attn_sink"][:1].expand(70),
    }
    expanded = Problem(x.q, x.kv.clone(), x.indices[:1, :1].expand_as(x.indices), {**o, **one})
    return [views, expanded]


@pytest.mark.emulated
def test_strides_of_lists_lengths_and_sinks():
    lengths = torch.tensor([[200, 130, 3], [64, 199, 0]], dtype=torch.int32)
    x = problem(70, 200, B=2, seed=19, topk_length=lengths, attn_sink=torch.linspace(-3, 3, 70), q_start=[90, 120])
    for y in strided_lists(x):
        assert not y.indices.is_contiguous() and not y.options["attn_sink"].is_contiguous()
        options = {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in y.options.items()}
        for mine, other in zip(y.check(), Problem(y.q, y.kv, y.indices.contiguous(), options).run()):
            assert torch.equal(mine, other)


@pytest.mark.emulated
def test_nothing_to_attend_to():
    x = problem(66, 5, s_kv=10)
    x.kv = x.kv[:, :0]
    out, lse = x.run()
    assert not out.any() and (lse == -math.inf).all()
    x = problem(66, 5)
    x.indices = x.indices[..., :0]
    out, lse = x.run()
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.emulated
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_rows(value):
    """In a query: its head's row is NaN. In a selected key row: every head of the queries that select it."""
    x = problem(5, 90, s_q=3, seed=7)
    x.indices[0, :, 0, 0] = torch.tensor([3, 4, 5], dtype=torch.int32)
    x.indices[0, 1, 0][x.indices[0, 1, 0] == 3] = 4
    x.indices[0, 2, 0][x.indices[0, 2, 0] == 3] = 4
    clean_out, clean_lse = x.run()
    x.q[0, 2, 3, 570] = value
    x.kv[0, 3, 0, 11] = value
    out, lse = x.run()
    reached = torch.zeros(1, 3, 5, dtype=torch.bool)
    reached[0, 0] = reached[0, 2, 3] = True
    assert out[reached].isnan().all() and lse[reached].isnan().all()
    assert torch.equal(out[~reached], clean_out[~reached]) and torch.equal(lse[~reached], clean_lse[~reached])


@pytest.mark.emulated
def test_rows_do_not_depend_on_each_other():
    """Heads, queries and what follows a query's length may change without changing a bit of another row."""
    lengths = torch.tensor([[100, 100, 100]], dtype=torch.int32)
    x = problem(66, 130, seed=8, topk_length=lengths)
    out, lse = x.run()
    y = problem(66, 130, seed=8, topk_length=lengths)
    y.q[0, 0, 17] *= 30
    y.q[0, 2] *= 5
    y.indices[0, :, 0, 100:] = 3
    other_out, other_lse = y.run()
    same = torch.ones(1, 3, 66, dtype=torch.bool)
    same[0, 2] = same[0, 0, 17] = False
    assert torch.equal(out[same], other_out[same]) and torch.equal(lse[same], other_lse[same])
    assert not torch.equal(out[~same], other_out[~same])


@pytest.mark.emulated
def test_the_same_bits_each_time():
    x = problem(65, 330, s_q=4, seed=9, topk_length=torch.tensor([[330, 64, 0, 129]], dtype=torch.int32))
    first = x.run()
    for _ in range(5):
        for mine, other in zip(x.run(), first):
            assert torch.equal(mine, other)


@pytest.mark.emulated
@pytest.mark.parametrize("h_q", [1, 3, 65, 130])
def test_attn_dist_of_this_lse_sums_to_the_heads(h_q):
    """Rows without a slot sum to nothing; sinks are no part of lse."""
    x = problem(h_q, 200, s_q=4, seed=10, topk_length=torch.tensor([[200, 0, 70, 129]], dtype=torch.int32))
    x.options["attn_sink"] = torch.ones(h_q)
    x.indices[0, 2] = -1
    _, lse = x.run()
    q, kv, indices = x.q.to(DEVICE), x.kv.to(DEVICE), x.indices.to(DEVICE)
    dist = torch.full((1, -(-h_q // 64), 4, 200), math.nan, device=DEVICE)  # of each 64 heads
    rule = {"q_start": None, "k_stride": 1, "topk_length": x.options["topk_length"].to(DEVICE), "lse_base": 2.0}
    kernels.attn_dist(q, kv, indices, lse.to(DEVICE), dist, sm_scale=x.options["sm_scale"], **rule)
    sums = dist.cpu().sum((1, 3))[0] / h_q
    assert (sums - torch.tensor([1.0, 0.0, 0.0, 1.0])).abs().max() < 1e-3


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": 128}, "d_qk must be 576 or 512, got 128"),
        ({"dtype": torch.float32}, "q must be bfloat16 or float16"),
        ({"k_stride": 0, "q_start": [0]}, "k_stride must be at least 1, got 0"),
    ],
)
def test_requests_that_the_launcher_refuses(change, message):
    with pytest.raises(ValueError, match=f"sparse_attention: {message}"):
        problem(4, 8, **change).run()


@pytest.mark.emulated
def test_strides_that_the_launcher_refuses():
    x = problem(4, 8)
    x.q = torch.empty(1, 3, 4, 580, dtype=torch.bfloat16)[..., :576]
    with pytest.raises(ValueError, match="q's head stride must be a multiple of 16 bytes"):
        x.run()


def test_usual_size():
    """128 heads and 2048 distinct slots of a few queries, every CTA at work."""
    x = problem(128, 2048, s_q=8, s_kv=4096, seed=11)
    x.indices[0, :, 0] = torch.stack([torch.randperm(4096)[:2048] for _ in range(8)])
    x.check()


@pytest.mark.parametrize(("h_q", "topk", "d", "dtype"), [(65, 130, 576, torch.bfloat16), (3, 64, 512, torch.float16)])
def test_sanitizer_shapes(h_q, topk, d, dtype):
    """Odd and even counts of tiles, a query without slots, a partial group; every element of the outputs is read."""
    x = problem(h_q, topk, d=d, dtype=dtype, s_q=5, seed=13)
    x.indices[0, 3] = -1
    out, lse = x.run()
    assert out.isfinite().all() and lse.isfinite()[0, [0, 1, 2, 4]].all()


@pytest.mark.emulated
@pytest.mark.sample
def test_sanitizer_several_queries_a_block():
    """A persistent block's next query begins while the output of the one before is on its way: lengths of nothing, of
    one tile and of several, sinks and the causal rule."""
    s_q = 2 * processors() + 5
    lengths = torch.tensor([130, 0, 64, 129, 1, 130, 65], dtype=torch.int32).repeat(s_q)[:s_q]
    x = problem(3, 130, s_q=s_q, s_kv=200, seed=14, topk_length=lengths[None])
    x.options |= {"attn_sink": torch.randn(3, generator=torch.Generator().manual_seed(2)), "q_start": [190]}
    x.indices[0, 5] = -1
    x.check()


@pytest.mark.emulated
@pytest.mark.parametrize("batched", [False, True])
def test_the_public_function_runs_the_kernel(batched):
    """Equal to the kernel's own call, and close to the torch backend; empty lists and no keys at all."""
    x = problem(20, 70, s_q=3, s_kv=90, seed=3)
    sink = torch.randn(20, generator=torch.Generator().manual_seed(1))
    x.options["attn_sink"] = sink
    expected = x.run()
    q, kv, indices = (t.to(DEVICE) for t in (x.q, x.kv, x.indices))
    if not batched:
        q, kv, indices = q[0], kv[0], indices[0]
        expected = tuple(t[0] for t in expected)
    out, lse = htree_cuda.sparse_attention(q, kv, indices, attn_sink=sink.to(DEVICE))
    assert torch.equal(out.cpu(), expected[0]) and torch.equal(lse.cpu(), expected[1])
    theirs, their_lse = htree_cuda.sparse_attention(q, kv, indices, attn_sink=sink.to(DEVICE), backend="torch")
    torch.testing.assert_close(out.float(), theirs.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, their_lse, rtol=1e-5, atol=1e-5)
    for few_kv, few in ((kv, indices[..., :0].contiguous()), (kv[..., :0, :, :], indices), (kv, indices * 0 - 1)):
        out, lse = htree_cuda.sparse_attention(q, few_kv.contiguous(), few)
        assert (out == 0).all() and (lse == -math.inf).all()
    assert htree_cuda.sparse_attention(q[..., :0, :, :], kv, indices[..., :0, :, :])[0].numel() == 0


@pytest.mark.hardware
def test_more_queries_than_a_grid_has_rows():
    """s_q beyond 65535, and tensors of more than 2^31 elements."""
    x = problem(64, 3, s_q=70_000, s_kv=50)
    queries = [0, 1, 65_535, 65_536, 69_999]
    out, lse = x.run()
    few = Problem(x.q[:, queries], x.kv, x.indices[:, queries])
    few_out, few_lse = few.run()
    assert torch.equal(out[:, queries], few_out) and torch.equal(lse[:, queries], few_lse)


@pytest.mark.hardware
def test_capture_and_replay():
    x = problem(128, 300, s_q=40, s_kv=500, seed=12)
    first = x.run()
    q, kv, indices = x.q.to(DEVICE), x.kv.to(DEVICE), x.indices.to(DEVICE)
    out, lse = (torch.empty_like(r, device=DEVICE) for r in first)
    workspace = q.new_empty(kernels.sparse_attention_workspace(q, indices), dtype=torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sparse_attention(q, kv, indices, out, lse, workspace, **x.options)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out.cpu(), first[0]) and torch.equal(lse.cpu(), first[1])


@pytest.mark.hardware
def test_capture_of_the_public_function_and_replay_with_changed_inputs():
    lengths = torch.tensor([[300, 0, 129, 64] * 10], dtype=torch.int32)
    first, second = (problem(70, 300, s_q=40, s_kv=500, seed=seed, topk_length=lengths) for seed in (15, 16))
    second.indices[0, 7] = -1
    sink = torch.linspace(-2.0, 2.0, 70, device=DEVICE)
    options = {"attn_sink": sink, "topk_length": lengths.to(DEVICE), "q_start": 470}
    held = [x.to(DEVICE) for x in (first.q, first.kv, first.indices)]
    htree_cuda.sparse_attention(*held, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = htree_cuda.sparse_attention(*held, **options)
    for inputs in (first, second, first):
        for x, y in zip(held, (inputs.q, inputs.kv, inputs.indices), strict=True):
            x.copy_(y)
        graph.replay()
        for mine, other in zip(captured, htree_cuda.sparse_attention(*held, **options), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.hardware
def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    x = problem(65, 200, s_q=20, s_kv=500, seed=13)
    tensors = [t.to("cuda:0") for t in (x.q, x.kv, x.indices)]
    expected = htree_cuda.sparse_attention(*tensors)
    results = htree_cuda.sparse_attention(*(t.to("cuda:1") for t in tensors))
    assert torch.cuda.current_device() == 0
    for got, wanted in zip(results, expected, strict=True):
        assert got.device == torch.device("cuda:1") and torch.equal(got.cpu(), wanted.cpu())
