"""Attention over an index list, its backward, and attn_dist in PyTorch operations. What is computed is `definition.py`.

Chunks of queries gather the rows that their lists name. The backward keeps nothing but inputs and outputs, and gathers
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..definition import accumulation_dtype
from ..params import start_of
from .chunks import Scratch, budget


def valid_slots(
    indices: Tensor, *, s_kv: int, position: Tensor | None, k_stride: int, topk_length: Tensor | None
) -> Tensor:
    """Marks [..., s_q, topk] of the slots that count; indices [..., s_q, topk], topk_length [..., s_q].

    position: [..., s_q], the absolute position of each query; None: no causal rule.
    """
    valid = (indices >= 0) & (indices < s_kv)
    if position is not None:
        valid &= indices < ((position + 1) // k_stride)[..., None]
    if topk_length is not None:
        valid &= torch.arange(indices.shape[-1], device=indices.device) < topk_length[..., None]
    return valid


def add_rows(total: Tensor, index: Tensor, rows: Tensor, deterministic: bool) -> None:
    """total[index] += rows, where an index may come back."""
    if deterministic and total.is_cuda:
        # On CUDA index_add_ adds atomically, in any order; index_put_ sorts stably first and adds in that order.
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


class _Lists:
    """What every chunk of one call shares: keys, index lists, the rules of validity and the gathering.

    q [B,s_q,h_q,d_qk], k [B,s_kv,1,d_qk], indices [B,s_q,1,topk], topk_length [B,s_q], q_start: `params.start_of`.
    """

    def __init__(self, q: Tensor, k: Tensor, indices: Tensor, topk_length: Tensor | None, q_start, k_stride: int):
        self.B, self.s_q, self.h_q, self.d_qk = q.shape
        self.s_kv, self.topk = k.shape[1], indices.shape[3]
        self.k, self.indices, self.topk_length = k, indices, topk_length
        self.q_start, self.k_stride = q_start, k_stride
        self.acc = accumulation_dtype(q.dtype)
        self.scratch = Scratch(q.device)

    def chunks(self, rows_per_slot: int, numbers_per_head: int) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor]]:
        """(batch element, queries, key row of each slot, marks of the valid slots [n, topk], keys [n, topk, d_qk]).

        An invalid slot holds key row 0 and a key of zeros. Chunk sizes follow from shapes alone; the temporaries of one
        slot are ``rows_per_slot`` rows of d_qk numbers and ``numbers_per_head`` for each head.
        """
        if self.s_kv == 0 or self.topk == 0:
            return
        device = self.k.device
        item = torch.finfo(self.acc).bits // 8
        numbers = rows_per_slot * self.d_qk + numbers_per_head * self.h_q + 8
        step = max(1, budget(device) // (self.topk * item * numbers))
        for b in range(self.B):
            for first in range(0, self.s_q, step):
                rows = slice(first, min(first + step, self.s_q))
                index = self.indices[b, rows, 0].to(torch.int64)
                position = None
                if self.q_start is not None:
                    position = torch.arange(rows.start, rows.stop, device=device) + start_of(self.q_start, b)
                length = None if self.topk_length is None else self.topk_length[b, rows]
                valid = valid_slots(
                    index, s_kv=self.s_kv, position=position, k_stride=self.k_stride, topk_length=length
                )
                index = torch.where(valid, index, 0)
                keys = self._gather(self.k[b, :, 0], index).masked_fill_(~valid[:, :, None], 0.0)
                yield b, rows, index, valid, keys

    def buffer(self, name: str, n: int) -> Tensor:
        """[n, topk, d_qk] in the accumulation dtype, kept between chunks."""
        return self.scratch.get(name, (n, self.topk, self.d_qk), self.acc)

    def _gather(self, k: Tensor, index: Tensor) -> Tensor:
        rows = self.scratch.get("gathered", (index.numel(), self.d_qk), k.dtype)
        torch.index_select(k, 0, index.flatten(), out=rows)
        rows = rows.view(*index.shape, self.d_qk)
        return rows if k.dtype == self.acc else self.buffer("keys", index.shape[0]).copy_(rows)


def attn_dist(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    sm_scale: float,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    lse_base: float,
) -> Tensor:
    """q [B,s_q,h_q,d], k [B,s_kv,1,d], indices [B,s_q,1,topk], lse [B,s_q,h_q] -> [B, ceil(h_q/64), s_q, topk]."""
    lists = _Lists(q, k, indices, topk_length, q_start, k_stride)
    acc = lists.acc
    groups = (lists.h_q + 63) // 64
    out = torch.zeros(lists.B, groups, lists.s_q, lists.topk, dtype=acc, device=q.device)
    for b, rows, _, valid, keys in lists.chunks(rows_per_slot=2, numbers_per_head=3):
        lse2 = lse[b, rows].to(acc) * math.log2(lse_base)
        score2 = torch.bmm(q[b, rows].to(acc), keys.transpose(1, 2)) * (sm_scale * math.log2(math.e))
        p = score2.sub_(lse2[:, :, None]).exp2_()
        p.masked_fill_(lse[b, rows].isinf()[:, :, None] | ~valid[:, None], 0.0)
        for group in range(groups):
            out[b, group, rows] = p[:, group * 64 : (group + 1) * 64].sum(1)
    return out


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int,
    sm_scale: float,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    lse_base: float,
) -> tuple[Tensor, Tensor]:
    """q [B,s_q,h_q,d_qk], kv [B,s_kv,1,d_qk], indices [B,s_q,1,topk] -> out [B,s_q,h_q,d_v] (their dtype), lse
    [B,s_q,h_q] (accumulation dtype)."""
    lists = _Lists(q, kv, indices, topk_length, q_start, k_stride)
    out = q.new_zeros(*q.shape[:3], d_v)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=lists.acc)
    for b, rows, _, valid, keys in lists.chunks(rows_per_slot=2, numbers_per_head=3):
        scores = _list_scores(q[b, rows].to(lists.acc), keys, valid, sm_scale)
        row_max = scores.amax(2, keepdim=True)
        row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # an empty row: exp(-inf - 0) = 0
        p = scores.sub_(row_max).exp_()
        row_sum = p.sum(2, keepdim=True)
        row_lse = row_max + row_sum.log()
        # An empty row divides by 1, and NaN stays NaN.
        out_rows = torch.bmm(p, keys[:, :, :d_v]) / torch.where(row_sum == 0, 1.0, row_sum)
        if attn_sink is not None:
            out_rows *= torch.sigmoid(row_lse - attn_sink[:, None]).masked_fill(row_lse == -math.inf, 1.0)
        out[b, rows] = out_rows.to(out.dtype)
        lse[b, rows] = row_lse[:, :, 0] / math.log(lse_base)
    return out, lse


def _list_scores(q: Tensor, keys: Tensor, valid: Tensor, sm_scale: float) -> Tensor:
    """q [n,h_q,d_qk], keys [n,topk,d_qk] -> [n,h_q,topk], -inf where invalid, NaN where a score is not finite."""
    scores = torch.bmm(q, keys.transpose(1, 2)).mul_(sm_scale)
    return scores.masked_fill_(scores.isinf(), math.nan).masked_fill_(~valid[:, None], -math.inf)


def sparse_attention_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    sm_scale: float,
    q_start: list[int] | None,
    k_stride: int,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    lse_base: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dkv in the dtype of the inputs, dsink [h_q] (size 0 without a sink). dout, out [B,s_q,h_q,d_v], dlse, lse
    [B,s_q,h_q] as `sparse_attention` returned them."""
    lists = _Lists(q, kv, indices, topk_length, q_start, k_stride)
    acc, d_v = lists.acc, out.shape[3]
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dkv = torch.zeros(lists.B, lists.s_kv, lists.d_qk, dtype=acc, device=q.device)
    dsink = q.new_zeros(0 if attn_sink is None else lists.h_q, dtype=acc)
    for b, rows, index, valid, keys in lists.chunks(rows_per_slot=4, numbers_per_head=6):
        q_rows, do = q[b, rows].to(acc), dout[b, rows].to(acc)
        row_lse = lse[b, rows, :, None] * math.log(lse_base)
        invalid = ~valid[:, None]
        # By their own maximum and sum: a large lse is rounded, and all weights of its row would be off by one factor.
        P = _list_scores(q_rows, keys, valid, sm_scale).softmax(2).masked_fill_(invalid, 0.0)
        delta = (do * out[b, rows].to(acc)).sum(2, keepdim=True)
        weights = P
        if attn_sink is not None:
            weights = P * torch.sigmoid(row_lse - attn_sink[:, None])
            to_sink = torch.sigmoid(attn_sink[:, None] - row_lse) * delta
            dsink -= to_sink.masked_fill_(~valid.any(1)[:, None, None], 0.0).sum((0, 2))
        dS = torch.bmm(do, keys[:, :, :d_v].transpose(1, 2)).sub_(delta).mul_(weights)
        dS.add_(P * (dlse[b, rows, :, None] / math.log(lse_base))).mul_(sm_scale).masked_fill_(invalid, 0.0)
        dq[b, rows] = torch.bmm(dS, keys).to(dq.dtype)
        dkeys = torch.bmm(dS.transpose(1, 2), q_rows, out=lists.buffer("dkeys", valid.shape[0]))
        dkeys[:, :, :d_v].baddbmm_(weights.transpose(1, 2), do)
        dkeys.masked_fill_(~valid[:, :, None], 0.0)
        add_rows(dkv[b], index.flatten(), dkeys.flatten(0, 1), deterministic)
    return dq, dkv[:, :, None].to(kv.dtype), dsink
