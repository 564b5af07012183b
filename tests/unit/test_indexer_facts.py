"""Facts of the indexer and of its selector that need no second implementation, and deliberately wrong variants of both,
each of which a fact must refuse."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import htree_cuda

from .test_indexer import by_numpy, hostile_rows, inputs

INF = math.inf
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
Logits = Callable[..., Tensor]
Select = Callable[[Tensor, int], Tensor]


def of_windows(s_q: int, start: int, end: int) -> dict[str, Tensor]:
    return {name: torch.full((s_q,), x, dtype=torch.int32) for name, x in (("k_start", start), ("k_end", end))}


# ------------------------------------------------------------------------------------------ facts of the logits


def one_head_of_positive_numbers_is_a_product(logits: Logits) -> None:
    q, k, _ = inputs(h_i=1, s_kv=41)
    q, k = q.abs(), k.abs()
    torch.testing.assert_close(logits(q, k, torch.ones(5, 1).double()), q[:, 0] @ k[:, 0].T, **CLOSE)


def opposite_heads_give_the_absolute_value(logits: Logits) -> None:
    q, k, _ = inputs(h_i=1)
    both = torch.cat((q, -q), 1)
    torch.testing.assert_close(logits(both, k, torch.ones(5, 2).double()), (q[:, 0] @ k[:, 0].T).abs(), **CLOSE)


def it_is_linear_in_the_weights(logits: Logits) -> None:
    q, k, weights = inputs()
    other = torch.randn_like(weights)
    sums = 2 * logits(q, k, weights) - 3 * logits(q, k, other)
    torch.testing.assert_close(logits(q, k, 2 * weights - 3 * other), sums, **CLOSE)


def heads_add(logits: Logits) -> None:
    q, k, weights = inputs(h_i=4)
    alone = sum(logits(q[:, h : h + 1], k, weights[:, h : h + 1]) for h in range(4))
    torch.testing.assert_close(logits(q, k, weights), alone, **CLOSE)


def permuted_keys_permute_the_columns(logits: Logits) -> None:
    q, k, weights = inputs(s_kv=300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(q, k[order], weights), logits(q, k, weights)[:, order], **CLOSE)


def a_wider_window_changes_no_logit(logits: Logits) -> None:
    q, k, weights = inputs(s_kv=70)
    narrow, wide = (logits(q, k, weights, **of_windows(5, *bounds)) for bounds in ((20, 41), (3, 66)))
    torch.testing.assert_close(narrow[:, 20:41], wide[:, 20:41], **CLOSE)
    assert (narrow[:, :20] == -INF).all() and (narrow[:, 41:] == -INF).all() and (wide[:, 3:66] > -INF).all()
    assert (wide[:, :3] == -INF).all() and (wide[:, 66:] == -INF).all()


def a_key_alone_gives_its_column(logits: Logits) -> None:
    q, k, weights = inputs(s_kv=70)
    full = logits(q, k, weights)
    for j in (0, 63, 64, 69):
        torch.testing.assert_close(logits(q, k[j : j + 1], weights)[:, 0], full[:, j], **CLOSE)


def powers_of_two_of_a_key_are_those_of_its_logits(logits: Logits) -> None:
    q, k, weights = inputs()
    factor = 2.0 ** torch.randint(-9, 9, (40,), generator=torch.Generator().manual_seed(2)).double()
    assert torch.equal(logits(q, k * factor[:, None, None], weights), logits(q, k, weights) * factor)


def scales_of_keys_are_those_of_their_logits(logits: Logits) -> None:
    q, k, weights = (x.float() for x in inputs())
    q, k = (x.to(torch.float8_e4m3fn) for x in (q, k))
    scale = torch.rand(40, 1, generator=torch.Generator().manual_seed(3)) + 0.5
    assert torch.equal(logits(q, k, weights, k_scale=scale), logits(q, k, weights) * scale[:, 0])


LOGITS_FACTS = [
    one_head_of_positive_numbers_is_a_product, opposite_heads_give_the_absolute_value, it_is_linear_in_the_weights,
    heads_add, permuted_keys_permute_the_columns, a_wider_window_changes_no_logit, a_key_alone_gives_its_column,
    powers_of_two_of_a_key_are_those_of_its_logits, scales_of_keys_are_those_of_their_logits,
]  # fmt: skip


@pytest.mark.parametrize("fact", LOGITS_FACTS, ids=lambda fact: fact.__name__)
def test_facts_of_the_logits(fact):
    fact(htree_cuda.indexer_logits)


# --------------------------------------------------------------------------------- wrong variants of the logits

right = htree_cuda.indexer_logits


def without_the_last_head(q, k, weights, **options):
    heads = max(1, q.shape[1] - 1)
    return right(q[:, :heads], k, weights[:, :heads], **options)


def weight_inside_the_relu(q, k, weights, k_scale=None, **options):
    """relu(weight z): a negative weight keeps the products that it should have lost."""
    weighted = q.to(weights.dtype) * weights[:, :, None]
    out = right(weighted, k.to(weights.dtype), torch.ones_like(weights), **options)
    return out if k_scale is None else out * k_scale[:, 0]


def scale_of_the_neighbour(q, k, weights, k_scale=None, **options):
    return right(q, k, weights, k_scale=None if k_scale is None else k_scale.roll(1, 0), **options)


def inclusive_end(q, k, weights, k_end=None, **options):
    return right(q, k, weights, k_end=None if k_end is None else k_end + 1, **options)


def stale_last_tile(q, k, weights, **options):
    """The last tile of 64 keys shows what the tile before it left."""
    out = right(q, k, weights, **options)
    last = out.shape[1] // 64 * 64
    if 0 < last < out.shape[1]:
        out[:, last:] = out[:, last - 64 : out.shape[1] - 64]
    return out


def padded_head_of_weight_1(q, k, weights, **options):
    """Heads are padded to a multiple of four by the first head, whose weight there is 1 instead of 0."""
    missing = -q.shape[1] % 4
    if missing:
        q = torch.cat((q, q[:, :1].expand(-1, missing, -1)), 1)
        weights = torch.cat((weights, torch.ones_like(weights[:, :1]).expand(-1, missing)), 1)
    return right(q, k, weights, **options)


WRONG_LOGITS = [
    without_the_last_head, weight_inside_the_relu, scale_of_the_neighbour, inclusive_end, stale_last_tile,
    padded_head_of_weight_1,
]  # fmt: skip


def refused(facts, call) -> list[str]:
    """Names of the facts that do not hold of a call."""
    found = []
    for fact in facts:
        try:
            fact(call)
        except AssertionError:
            found.append(fact.__name__)
    return found


@pytest.mark.parametrize("wrong", WRONG_LOGITS, ids=lambda wrong: wrong.__name__)
def test_wrong_logits_are_refused(wrong):
    assert refused(LOGITS_FACTS, wrong)


# --------------------------------------------------------------------------------------- facts of the selector


def it_is_a_stable_sort(select: Select) -> None:
    _, logits = hostile_rows(n=97)
    for topk in (1, 7, 96, 97, 98):
        assert torch.equal(select(logits, topk).long(), by_numpy(logits, topk, [(0, 97)] * len(logits)))


def values_that_differ_in_the_last_bits_are_told_apart(select: Select) -> None:
    """Upper 22 bits equal: four neighbouring floats, in an order that no shorter key gives."""
    bits = torch.tensor([0, 3, 1, 2, 3, 0, 2, 1, 3], dtype=torch.int32)
    logits = (bits + 0x3F800000).view(torch.float32)[None]
    assert select(logits, 3).tolist() == [[1, 4, 8]]
    assert select(-logits, 2).tolist() == [[0, 5]]


def ties_go_to_the_smaller_row(select: Select) -> None:
    assert select(torch.zeros(1, 50), 4).tolist() == [[0, 1, 2, 3]]
    few = torch.zeros(1, 9000)
    few[0, [8000, 8999]] = 1.0
    assert select(few, 5).tolist() == [[0, 1, 2, 8000, 8999]]


def zeros_of_both_signs_are_equal(select: Select) -> None:
    assert select(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2).tolist() == [[0, 1]]


def nan_of_both_signs_is_largest(select: Select) -> None:
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    logits = torch.cat((torch.tensor([INF, 5.0]), nan))[None]
    assert select(logits, 2).tolist() == [[2, 3]] and select(logits, 3).tolist() == [[0, 2, 3]]


def minus_infinity_is_never_selected(select: Select) -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, -3.0e38]])
    assert select(logits, 3).tolist() == [[1, 3, -1]]


def any_number_of_equal_logits_is_right(select: Select) -> None:
    """More ties than a buffer of 4096 holds, the winners behind them."""
    logits = torch.zeros(1, 20000)
    logits[0, 15000:] = 1.0
    assert torch.equal(select(logits, 4990)[0].long(), torch.arange(15000, 19990))


SELECT_FACTS = [
    it_is_a_stable_sort, values_that_differ_in_the_last_bits_are_told_apart, ties_go_to_the_smaller_row,
    zeros_of_both_signs_are_equal, nan_of_both_signs_is_largest, minus_infinity_is_never_selected,
    any_number_of_equal_logits_is_right,
]  # fmt: skip


def select_of(logits: Tensor, topk: int) -> Tensor:
    return htree_cuda.topk_indices(logits, topk)[:, 0]


@pytest.mark.parametrize("fact", SELECT_FACTS, ids=lambda fact: fact.__name__)
def test_facts_of_the_selector(fact):
    fact(select_of)


# ------------------------------------------------------------------------------- wrong variants of the selector


def by_key(
    logits: Tensor, topk: int, key: Callable[[Tensor], Tensor] | None = None, larger_row: bool = False
) -> Tensor:
    """A stable sort by an integer key, ascending rows, -1 where there is no candidate: right with the defaults."""
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().masked_fill(logits.isnan(), 2**31 - 1)
    if key is not None:
        keys = key(logits, keys)
    keys = keys.masked_fill(logits == -INF, -(2**40))
    n = logits.shape[1]
    order = keys.flip(1).sort(dim=1, descending=True, stable=True).indices
    order = n - 1 - order if larger_row else keys.sort(dim=1, descending=True, stable=True).indices
    rows = order[:, :topk].masked_fill(keys.gather(1, order[:, :topk]) == -(2**40), n).sort(1).values
    out = torch.full((len(logits), topk), -1, dtype=torch.int64)
    out[:, : rows.shape[1]] = rows.masked_fill(rows == n, -1)
    return out


def raw_bits(logits: Tensor, keys: Tensor) -> Tensor:
    bits = logits.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().masked_fill(logits.isnan(), 2**31 - 1)


def sign_of_nan(logits: Tensor, keys: Tensor) -> Tensor:
    return torch.where(logits.isnan() & logits.signbit(), -(2**31), keys)


def above_the_threshold_alone(logits: Tensor, topk: int) -> Tensor:
    """`>` where `>=` belongs: of the rows that equal the last one selected, none is handed out."""
    out = by_key(logits, topk)
    chosen = logits.gather(1, out.clamp(min=0)).masked_fill(out < 0, INF)
    least = chosen.amin(1, keepdim=True)
    out = out.masked_fill(chosen == least, logits.shape[1]).sort(1).values
    return out.masked_fill(out == logits.shape[1], -1)


def with_a_buffer_of_4096(logits: Tensor, topk: int) -> Tensor:
    """The rows from the last one selected upwards go to a buffer, and what does not fit is lost."""
    rows = by_key(logits, topk)
    return torch.where(torch.arange(topk) < 4096, rows, -1)


WRONG_SELECT = {
    "a tie goes to the larger row": functools.partial(by_key, larger_row=True),
    "above the threshold alone": above_the_threshold_alone,
    "one pass short: 24 bits": functools.partial(by_key, key=lambda logits, keys: keys >> 8),
    "-0 below +0": functools.partial(by_key, key=raw_bits),
    "a NaN with a sign is smallest": functools.partial(by_key, key=sign_of_nan),
    "a buffer that overflows": with_a_buffer_of_4096,
    "a row selects minus infinity": lambda logits, topk: by_key(logits.clamp(min=-3.3e38), topk),
}


def test_the_frame_of_the_wrong_selectors_is_right():
    assert refused(SELECT_FACTS, by_key) == []


@pytest.mark.parametrize("wrong", WRONG_SELECT)
def test_wrong_selectors_are_refused(wrong):
    assert refused(SELECT_FACTS, WRONG_SELECT[wrong])
