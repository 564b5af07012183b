"""The warm-up loss of an indexer, its gradient, and the lse of dense attention, in PyTorch operations: tiles of queries
by keys, so that nothing of size s_q x s_kv exists. What is computed is `definition_dense_loss.py`.

The backward keeps inputs and two numbers a query, and computes scores and logits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from ..params import IndexerParams, start_of
from .chunks import budget
from .indexer import visible_rows

# Bytes of temporaries that one tile may hold, and keys of a tile. On a CPU a tile that fits the caches wins.
MAX_TILE_BYTES = 128 << 20
KEYS_CPU, KEYS_GPU = 1024, 8192
HEADS = 8  # of which products exist at one time


@dataclass(frozen=True)
class Window:
    """Which keys each of the queries [B, s_q] sees; the causal rule lets whole tiles be skipped."""

    B: int
    s_q: int
    device: torch.device
    params: IndexerParams
    k_start: Tensor | None = None
    k_end: Tensor | None = None

    def visible(self, b: int, rows: slice, cols: slice) -> Tensor:
        """[queries, keys] bool."""
        keys = torch.arange(cols.start, cols.stop, device=self.device)
        marks = visible_rows(keys, rows.start, b, rows, self.params, self.k_start, self.k_end)
        shape = (rows.stop - rows.start, cols.stop - cols.start)
        return torch.ones(shape, dtype=torch.bool, device=self.device) if marks is None else marks.expand(shape)

    def tiles(self, s_kv: int, numbers_per_query: int, item: int) -> Iterator[tuple[int, slice, list[slice]]]:
        """(batch element, queries, key tiles that some of them may see). Sizes follow from shapes alone and hold no
        number of heads, so that ranks with other heads of the same queries meet in the same tiles."""
        keys = max(1, min(s_kv, KEYS_CPU if self.device.type == "cpu" else KEYS_GPU))
        bytes_per_query = item * (keys * (2 * HEADS + 8) + numbers_per_query)
        step = max(1, min(MAX_TILE_BYTES, budget(self.device)) // bytes_per_query)
        starts, k_stride = self.params.q_start, self.params.k_stride
        for b in range(self.B):
            for first in range(0, self.s_q, step):
                rows = slice(first, min(first + step, self.s_q))
                end = s_kv if starts is None else min(s_kv, (start_of(starts, b) + rows.stop) // k_stride)
                yield b, rows, [slice(j, min(j + keys, end)) for j in range(0, end, keys)]


def _products(q: Tensor, k: Tensor, acc: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """q [n, h, d], k [m, d] -> (heads, their products [n, heads, m] in acc), HEADS at a time."""
    keys = k.to(acc).T
    for first in range(0, q.shape[1], HEADS):
        heads = slice(first, min(first + HEADS, q.shape[1]))
        yield heads, (q[:, heads].flatten(0, 1).to(acc) @ keys).view(q.shape[0], -1, k.shape[0])


def _indexer(q: Tensor, k: Tensor, weights: Tensor, acc: torch.dtype) -> Tensor:
    """[n, m]: sum over heads of weights [n, h] * relu(<q [n, h], k [m]>)."""
    logits = torch.zeros(q.shape[0], k.shape[0], dtype=acc, device=q.device)
    for heads, z in _products(q, k, acc):
        logits += torch.bmm(weights[:, None, heads].to(acc), z.relu_())[:, 0]
    return logits


def attention(q: Tensor, k: Tensor, lse: Tensor, sm_scale: float, lse_base: float, acc: torch.dtype) -> Tensor:
    """[n, m]: sum over heads of exp(score - lse), lse [n, h]; a head whose lse is infinite adds nothing."""
    total = torch.zeros(q.shape[0], k.shape[0], dtype=acc, device=q.device)
    lse2 = lse.to(acc) * math.log2(lse_base)
    silent = lse.isinf()
    for heads, score in _products(q, k, acc):
        p = score.mul_(sm_scale * math.log2(math.e)).sub_(lse2[:, heads, None]).exp2_()
        total += p.masked_fill_(silent[:, heads, None], 0.0).sum(1)
    return total


@dataclass(frozen=True)
class Problem:
    """The tensors of one call, with a batch dimension, and its numbers."""

    q_i: Tensor  # [B, s_q, h_i, d_i]
    k_i: Tensor  # [B, s_kv, 1, d_i]
    weights: Tensor  # [B, s_q, h_i]
    q: Tensor  # [B, s_q, h_q, d_qk]
    k: Tensor  # [B, s_kv, 1, d_qk]
    lse: Tensor  # [B, s_q, h_q]
    window: Window
    sm_scale: float
    lse_base: float
    group: torch.distributed.ProcessGroup | None
    attend: Callable[..., Tensor] = attention  # what makes a tile of the attention

    @property
    def acc(self) -> torch.dtype:
        return torch.promote_types(accumulation_dtype(self.q_i.dtype), accumulation_dtype(self.q.dtype))

    def tiles(self) -> Iterator[tuple[int, slice, list[slice]]]:
        numbers = HEADS * max(self.q_i.shape[3], self.q.shape[3]) + 2 * self.q_i.shape[2] * self.q_i.shape[3]
        return self.window.tiles(self.k.shape[1], numbers, torch.finfo(self.acc).bits // 8)

    def tile(self, b: int, rows: slice, cols: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(attention summed over the heads, 0 where not visible; logits, -inf where not visible; visible)."""
        visible = self.window.visible(b, rows, cols)
        lse = self.lse[b, rows]
        a = self.attend(self.q[b, rows], self.k[b, cols, 0], lse, self.sm_scale, self.lse_base, self.acc)
        a.masked_fill_(~visible, 0.0)
        if self.group is not None:
            torch.distributed.all_reduce(a, group=self.group)
        logits = _indexer(self.q_i[b, rows], self.k_i[b, cols, 0], self.weights[b, rows], self.acc)
        return a, logits.masked_fill_(~visible, -math.inf), visible


def forward(problem: Problem) -> tuple[Tensor, ...]:
    """(loss, sum of the attention, largest logit, log of the sum of exp(logit - largest)), each [B, s_q]. The largest
    logit is -inf where the window is empty. It stays apart from the log, which its magnitude would round."""
    acc, device = problem.acc, problem.q.device
    B, s_q = problem.q.shape[:2]
    loss, total, log_sum = (torch.zeros(B, s_q, dtype=acc, device=device) for _ in range(3))
    largest = torch.full((B, s_q), -math.inf, dtype=acc, device=device)
    for b, rows, tiles in problem.tiles():
        n = rows.stop - rows.start
        # One running sum of a (log a - (logit - row_max)): its two parts, added apart, would cancel. Few numbers run on
        # from tile to tile; they are float64, so that many tiles lose nothing.
        row_max = torch.full((n,), -math.inf, dtype=acc, device=device)
        row_sum, mass, entropy = (torch.zeros(n, dtype=torch.float64, device=device) for _ in range(3))
        for cols in tiles:
            a, logits, _ = problem.tile(b, rows, cols)
            new_max = torch.maximum(row_max, logits.amax(1))
            seen = new_max.masked_fill(new_max == -math.inf, 0.0)
            step = torch.where(row_max == -math.inf, 0.0, seen.double() - row_max.double())
            logits -= seen[:, None]
            entropy += step * mass + torch.where(a == 0, 0.0, a * (a.log() - logits)).sum(1)
            row_sum = row_sum * torch.exp(-step) + logits.exp_().sum(1)
            mass += a.sum(1)
            row_max = new_max
        total[b, rows] = mass.to(acc)
        largest[b, rows], log_sum[b, rows] = row_max, row_sum.log().to(acc)
        value = entropy / mass - mass.log() + row_sum.log()
        loss[b, rows] = torch.where(mass == 0, 0.0, value).to(acc)
    return loss, total, largest, log_sum


def _finite(x: Tensor) -> Tensor:
    """x with zeros in place of what is not finite: 0 * NaN would carry a row to those that do not see it."""
    return torch.where(x.isfinite(), x, 0.0)


def backward(
    problem: Problem, dloss: Tensor, total: Tensor, largest: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_i, dk_i, dweights). A query that sees a key that is not finite has NaN in dq_i, one that sees a NaN
    everywhere, through the logits' own; keys are added tile by tile, so that everything is bitwise repeatable."""
    acc = problem.acc
    q_i, k_i, weights = problem.q_i, problem.k_i, problem.weights
    dq = torch.zeros_like(q_i, memory_format=torch.contiguous_format)
    dk = torch.zeros(*k_i.shape[:2], k_i.shape[3], dtype=acc, device=k_i.device)
    dweights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    for b, rows, tiles in problem.tiles():
        rows_q = _finite(q_i[b, rows].to(acc))
        dq_rows = torch.zeros_like(rows_q)
        dweights_rows = torch.zeros(rows_q.shape[:2], dtype=acc, device=q_i.device)
        mass = total[b, rows, None]
        none = mass == 0
        for cols in tiles:
            a, logits, visible = problem.tile(b, rows, cols)
            logits.sub_(largest[b, rows, None]).sub_(log_sum[b, rows, None])
            share = logits.exp_().sub_(a / mass)
            g = torch.where(visible & ~none, share * dloss[b, rows, None], 0.0)
            keys = k_i[b, cols, 0].to(acc)
            # What `_finite` hides from those that do not see it.
            broken = (visible & ~none).to(acc) @ (~keys.isfinite().all(1)).to(acc)
            dq_rows.masked_fill_((broken > 0)[:, None, None], torch.nan)
            keys = _finite(keys)
            for heads, z in _products(q_i[b, rows], k_i[b, cols, 0], acc):
                # A NaN stays, as in PyTorch's own ReLU, but in a row without a target, which has no gradient.
                off = (z <= 0) | (~visible | none)[:, None]
                z.masked_fill_(off, 0.0)
                dweights_rows[:, heads] += torch.bmm(z, g[:, :, None])[:, :, 0]
                dz = torch.mul(g[:, None], weights[b, rows, heads, None].to(acc), out=z).masked_fill_(off, 0.0)
                flat = dz.flatten(0, 1)
                dq_rows[:, heads] += (flat @ keys).view(dz.shape[0], dz.shape[1], -1)
                dk[b, cols] += flat.T @ rows_q[:, heads].flatten(0, 1)
        dq[b, rows] = dq_rows.to(dq.dtype)
        dweights[b, rows] = dweights_rows.to(dweights.dtype)
    return dq, dk[:, :, None].to(k_i.dtype), dweights


def dense_lse(q: Tensor, k: Tensor, window: Window, sm_scale: float) -> Tensor:
    """[B, s_q, h_q], natural: of each head over the window. q [B, s_q, h_q, d], k [B, s_kv, 1, d]."""
    acc = accumulation_dtype(q.dtype)
    lse = torch.full(q.shape[:3], -math.inf, dtype=acc, device=q.device)
    for b, rows, tiles in window.tiles(k.shape[1], HEADS * q.shape[3], torch.finfo(acc).bits // 8):
        for cols in tiles:
            hidden = ~window.visible(b, rows, cols)[:, None]
            for heads, score in _products(q[b, rows], k[b, cols, 0], acc):
                tile = score.mul_(sm_scale).masked_fill_(hidden, -math.inf).logsumexp(2)
                lse[b, rows, heads] = torch.logaddexp(lse[b, rows, heads], tile)
    return lse
