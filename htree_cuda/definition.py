"""htree attention and its backward, attention over an index list, attn_dist and the indexer loss, written straight from
their definition: one query at a time.

This file is the oracle of every test and is meant to be read, not to be fast. The tree is stored in the dtype of the
inputs, as the definition demands; everything after it runs in ``compute_dtype`` (float64 unless told otherwise).
The forward is made of differentiable torch operations, so that autograd through it (the selection is a constant) is a
second, independent derivation of the backward formula below.

Names: ``T`` tokens, ``layer`` 0 is the tokens, ``r`` children per node, ``n`` candidates, ``p`` the position of a
candidate in its list (also its RoPE position), ``rightmost`` the node of a layer that contains the query's position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerTrace:
    """What one query saw at one layer (``Trace.layers`` holds them top-down)."""

    layer: int
    candidates: Tensor  # [n] int64, node indices, ascending
    scores: Tensor  # [G, n]
    leaves: Tensor  # [n] bool, candidates that take part in the softmax at this layer
    log_importance: Tensor | None  # [n], None at the bottom; the rightmost candidate holds +inf
    margin: float  # log importance of the weakest selected minus the strongest other; inf if nothing was left out


@dataclass
class Trace:
    """The descent of one query: ``(b, t, h_kv)`` and its layers, top-down."""

    b: int
    t: int
    h_kv: int
    layers: list[LayerTrace] = field(default_factory=list)


@dataclass
class Result:
    out: Tensor  # [B, T_q, H, V]
    lse: Tensor  # [B, T_q, H]
    selection: Tensor  # [L-1, B, T_q, H_kv, top_k] int32, entry l-1 = layer l, ascending, padded with -1
    traces: list[Trace]  # empty unless asked for


def layer_sizes(T: int, compression_rate: int, max_top_nodes: int) -> list[int]:
    """Nodes of each layer, bottom (the tokens) first: ``N_{l+1} = ceil(N_l / r)`` until at most ``max_top_nodes``."""
    sizes = [T]
    while sizes[-1] > max_top_nodes:
        sizes.append((sizes[-1] + compression_rate - 1) // compression_rate)
    return sizes


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def build_tree(x: Tensor, compression_rate: int, max_top_nodes: int) -> list[Tensor]:
    """Mean pooling. x: [B, T, H_kv, D] -> one tensor [B, N_l, H_kv, D] per layer, bottom first, in x's dtype.

    Children are added in ascending order in the accumulation dtype, the sum is divided by the number of children that
    exist and rounded to x's dtype; the next layer pools what was stored.
    """
    layers = [x]
    for size in layer_sizes(x.shape[1], compression_rate, max_top_nodes)[1:]:
        below = layers[-1]
        nodes = []
        for i in range(size):
            children = below[:, i * compression_rate : (i + 1) * compression_rate]
            total = children[:, 0].to(accumulation_dtype(x.dtype))
            for c in range(1, children.shape[1]):
                total = total + children[:, c]
            nodes.append((total / children.shape[1]).to(x.dtype))
        layers.append(torch.stack(nodes, dim=1))
    return layers


def rope(
    x: Tensor,
    positions: Tensor,
    rope_base: float | None,
    inverse: bool = False,
    *,
    rope_inv_freq: Tensor | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
) -> Tensor:
    """RoPE of x [..., n, K] at positions [n]. The first R = rope_dim elements (default K) are pairs m = (x[m],
    x[m + R/2]), with rope_interleaved (x[2m], x[2m + 1]), and pair m rotates by p * base^(-2m/R), or by
    p * rope_inv_freq[m]. The elements behind R stay, and all do where there is neither a base nor a table."""
    R = x.shape[-1] if rope_dim is None else rope_dim
    if rope_inv_freq is None:
        if rope_base is None:
            return x
        m = torch.arange(R // 2, dtype=torch.float64, device=x.device)
        rope_inv_freq = rope_base ** (-2.0 * m / R)
    angle = positions.to(torch.float64)[:, None] * rope_inv_freq.to(torch.float64)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if inverse:
        sin = -sin
    lo, hi = (x[..., 0:R:2], x[..., 1:R:2]) if rope_interleaved else (x[..., : R // 2], x[..., R // 2 : R])
    pair = (lo * cos - hi * sin, lo * sin + hi * cos)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if rope_interleaved else torch.cat(pair, dim=-1)
    return torch.cat([rotated, x[..., R:]], dim=-1)


def infinite_to_nan(x: Tensor) -> Tensor:
    """What an infinite input reached is NaN, whatever its sign and weight."""
    return torch.where(x.isinf(), math.nan, x)


def denominator(lse: Tensor, sink: Tensor | None) -> Tensor:
    """Log of what out is divided by: an attention sink joins it, as a score that has no value."""
    return lse if sink is None else torch.logaddexp(lse, sink)


def candidate_list(parents: Tensor | None, rightmost: int, compression_rate: int, device: torch.device) -> Tensor:
    """Candidates of a layer: every node up to the rightmost at the top, else the children of the selected parents."""
    if parents is None:
        return torch.arange(rightmost + 1, device=device)
    children = (parents[:, None] * compression_rate + torch.arange(compression_rate, device=device)).flatten()
    return children[children <= rightmost]


def log_importance(scores: Tensor, strict_causal: bool) -> Tensor:
    """scores: [G, n] -> [n], the log of sum_g exp(s[g, p] - lse_g); +inf for the rightmost and for NaN."""
    n = scores.shape[1]
    if n == 1:
        return scores.new_full((1,), math.inf)
    denominator = torch.logsumexp(scores[:, : n - 1] if strict_causal else scores, dim=1, keepdim=True)
    log_imp = torch.logsumexp(scores - denominator, dim=0)
    log_imp = torch.where(log_imp.isnan(), math.inf, log_imp)
    log_imp[n - 1] = math.inf
    return log_imp


def select(log_imp: Tensor, top_k: int) -> Tensor:
    """Positions, ascending, of the min(top_k, n) candidates of highest importance; a tie goes to the lower position."""
    n = log_imp.shape[0]
    others = torch.sort(log_imp[: n - 1], descending=True, stable=True).indices[: min(top_k, n) - 1]
    rightmost = torch.tensor([n - 1], device=log_imp.device)
    return torch.sort(torch.cat([others, rightmost])).values


def _margin(log_imp: Tensor, selected: Tensor) -> float:
    chosen = torch.zeros_like(log_imp, dtype=torch.bool)
    chosen[selected] = True
    if bool(chosen.all()):
        return math.inf
    return float((log_imp[chosen].min() - log_imp[~chosen].max()).nan_to_num(nan=0.0))  # inf - inf: a tie


def descend(
    q: Tensor,
    tree_k: list[Tensor],
    t: int,
    *,
    compression_rate: int,
    top_k: int,
    scale: float,
    rope_base: float | None,
    strict_causal: bool,
    selection: list[Tensor] | None = None,
    **rotation,
) -> list[tuple[LayerTrace, Tensor]]:
    """Top-down descent of one query. q: [G, K]; tree_k[l]: [N_l, K], both in the compute dtype.

    Returns, top-down, each layer's trace and its selected nodes (ascending; empty at the bottom). ``selection[l-1]``,
    where given, replaces the selection of layer l: the oracle then answers for somebody else's selection.
    ``rotation``: the options of `rope`.
    """
    steps = []
    parents = None
    for layer in reversed(range(len(tree_k))):
        rightmost = t // compression_rate**layer
        candidates = candidate_list(parents, rightmost, compression_rate, q.device)
        n = candidates.shape[0]
        q_rot = rope(q[:, None], torch.tensor([n - 1], device=q.device), rope_base, **rotation)[:, 0]
        k_rot = rope(tree_k[layer][candidates], torch.arange(n, device=q.device), rope_base, **rotation)
        # Not a matrix product, in which equal keys may get scores that differ: ties go to the lower position.
        scores = scale * (q_rot[:, None] * k_rot).sum(-1)
        leaves = torch.ones(n, dtype=torch.bool, device=q.device)
        log_imp, margin, parents = None, math.inf, candidates[:0]
        if layer > 0:
            log_imp = log_importance(scores.detach(), strict_causal)
            if selection is None:
                parents = candidates[select(log_imp, top_k)]
            else:
                parents = selection[layer - 1][selection[layer - 1] >= 0].to(torch.int64)
            leaves = ~torch.isin(candidates, parents)
            margin = _margin(log_imp, torch.nonzero(~leaves)[:, 0])
        steps.append((LayerTrace(layer, candidates, scores, leaves, log_imp, margin), parents))
    return steps


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_start: int | None = None,
    compression_rate: int = 16,
    top_k_per_layer: int = 512,
    max_top_nodes: int | None = None,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    strict_causal: bool = True,
    selection: Tensor | None = None,
    attn_sink: Tensor | None = None,
    traces: bool = False,
    compute_dtype: torch.dtype = torch.float64,
    **rotation,
) -> Result:
    """htree attention. q: [B, T_q, H, K], k: [B, T, H_kv, K], v: [B, T, H_kv, V]; results in ``compute_dtype``.

    ``selection`` (in the form of ``Result.selection``) replaces the descent's own; ``traces=True`` keeps every query's
    candidates, scores, importance and margins. ``attn_sink`` [H] joins the denominator of out alone;
    ``rotation``: the options of `rope`.
    """
    B, T_q, H, K = q.shape
    T, H_kv, V = k.shape[1], k.shape[2], v.shape[3]
    G = H // H_kv
    max_top_nodes = top_k_per_layer * compression_rate if max_top_nodes is None else max_top_nodes
    q_start = T - T_q if q_start is None else q_start
    scale = K**-0.5 if scale is None else scale
    tree_k = [x.to(compute_dtype) for x in build_tree(k, compression_rate, max_top_nodes)]
    tree_v = [x.to(compute_dtype) for x in build_tree(v, compression_rate, max_top_nodes)]
    L = len(tree_k)
    q = q.to(compute_dtype)

    out_rows, lse_rows, kept = [], [], []
    chosen = torch.full((L - 1, B, T_q, H_kv, top_k_per_layer), -1, dtype=torch.int32, device=q.device)
    for b in range(B):
        for i in range(T_q):
            for h_kv in range(H_kv):
                steps = descend(
                    q[b, i, h_kv * G : (h_kv + 1) * G],
                    [x[b, :, h_kv] for x in tree_k],
                    q_start + i,
                    compression_rate=compression_rate,
                    top_k=top_k_per_layer,
                    scale=scale,
                    rope_base=rope_base,
                    strict_causal=strict_causal,
                    selection=None if selection is None else [selection[j, b, i, h_kv] for j in range(L - 1)],
                    **rotation,
                )
                s = torch.cat([step.scores[:, step.leaves] for step, _ in steps], dim=1)
                values = torch.cat([tree_v[step.layer][b, step.candidates[step.leaves], h_kv] for step, _ in steps])
                lse = infinite_to_nan(torch.logsumexp(s, dim=1))
                lse_rows.append(lse)
                sink = None if attn_sink is None else attn_sink[h_kv * G : (h_kv + 1) * G].to(compute_dtype)
                out_rows.append(torch.exp(s - denominator(lse, sink)[:, None]) @ values)
                for step, parents in steps:
                    if step.layer > 0:
                        chosen[step.layer - 1, b, i, h_kv, : parents.shape[0]] = parents.to(torch.int32)
                if traces:
                    kept.append(Trace(b, q_start + i, h_kv, [step for step, _ in steps]))
    if not out_rows:
        return Result(q.new_zeros(B, T_q, H, V), q.new_zeros(B, T_q, H), chosen, kept)
    out = torch.stack(out_rows).reshape(B, T_q, H, V)
    lse = torch.stack(lse_rows).reshape(B, T_q, H)
    return Result(infinite_to_nan(out), lse, chosen, kept)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Tensor,
    *,
    q_start: int | None = None,
    compression_rate: int = 16,
    top_k_per_layer: int = 512,
    max_top_nodes: int | None = None,
    scale: float | None = None,
    rope_base: float | None = 10000.0,
    attn_sink: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    **rotation,
) -> tuple[Tensor, ...]:
    """Gradients (dq, dk, dv), with attn_sink (dq, dk, dv, dsink), in ``compute_dtype`` by the backward formula, the
    selection being a constant."""
    B, T_q, H, K = q.shape
    T, H_kv = k.shape[1], k.shape[2]
    G = H // H_kv
    r = compression_rate
    max_top_nodes = top_k_per_layer * r if max_top_nodes is None else max_top_nodes
    q_start = T - T_q if q_start is None else q_start
    scale = K**-0.5 if scale is None else scale
    tree_k = [x.to(compute_dtype) for x in build_tree(k, r, max_top_nodes)]
    tree_v = [x.to(compute_dtype) for x in build_tree(v, r, max_top_nodes)]
    q, dout = q.to(compute_dtype), dout.to(compute_dtype)
    dq = torch.zeros_like(q)
    dtree_k = [torch.zeros_like(x) for x in tree_k]
    dtree_v = [torch.zeros_like(x) for x in tree_v]
    dsink = None if attn_sink is None else q.new_zeros(H)

    for b in range(B):
        for i in range(T_q):
            for h_kv in range(H_kv):
                heads = slice(h_kv * G, (h_kv + 1) * G)
                q_row, do = q[b, i, heads], dout[b, i, heads]
                steps = descend(
                    q_row,
                    [x[b, :, h_kv] for x in tree_k],
                    q_start + i,
                    compression_rate=r,
                    top_k=top_k_per_layer,
                    scale=scale,
                    rope_base=rope_base,
                    strict_causal=True,
                    selection=[selection[j, b, i, h_kv] for j in range(len(tree_k) - 1)],
                    **rotation,
                )
                s = torch.cat([step.scores[:, step.leaves] for step, _ in steps], dim=1)
                values = torch.cat([tree_v[step.layer][b, step.candidates[step.leaves], h_kv] for step, _ in steps])
                lse = infinite_to_nan(torch.logsumexp(s, dim=1))
                sink = None if attn_sink is None else attn_sink[heads].to(compute_dtype)
                P = torch.exp(s - denominator(lse, sink)[:, None])
                delta = (do * (P @ values)).sum(1, keepdim=True)
                dS = P * (do @ values.T - delta)
                if dlse is not None:
                    dS = dS + torch.exp(s - lse[:, None]) * dlse[b, i, heads, None].to(compute_dtype)
                if dsink is not None:
                    dsink[heads] -= delta[:, 0] * torch.sigmoid(sink - lse)
                first = 0
                for step, _ in steps:
                    n = step.candidates.shape[0]
                    position = torch.nonzero(step.leaves)[:, 0]
                    node = step.candidates[position]
                    columns = slice(first, first + node.shape[0])
                    first += node.shape[0]
                    last = torch.tensor([n - 1], device=q.device)
                    k_rot = rope(tree_k[step.layer][b, node, h_kv], position, rope_base, **rotation)
                    q_rot = rope(q_row[:, None], last, rope_base, **rotation)[:, 0]
                    dq_row = rope((dS[:, columns] @ k_rot)[:, None], last, rope_base, True, **rotation)[:, 0]
                    dq[b, i, heads] += scale * dq_row
                    dk_rot = scale * (dS[:, columns].T @ q_rot)
                    dtree_k[step.layer][b, node, h_kv] += rope(dk_rot, position, rope_base, True, **rotation)
                    dtree_v[step.layer][b, node, h_kv] += P[:, columns].T @ do

    for dtree in (dtree_k, dtree_v):
        for layer in reversed(range(1, len(dtree))):
            for node in range(dtree[layer].shape[1]):
                children = slice(node * r, min((node + 1) * r, dtree[layer - 1].shape[1]))
                dtree[layer - 1][:, children] += dtree[layer][:, node : node + 1] / (children.stop - children.start)
    return (dq, dtree_k[0], dtree_v[0]) if dsink is None else (dq, dtree_k[0], dtree_v[0], dsink)


def valid_slots(
    indices: Tensor, s: int, *, s_kv: int, q_start: int | None, k_stride: int, topk_length: Tensor | None
) -> list[tuple[int, int]]:
    """(slot, key row) of query ``s`` for every slot that counts, ascending. indices: [s_q, 1, topk]."""
    visible = s_kv if q_start is None else (q_start + s + 1) // k_stride
    length = indices.shape[2] if topk_length is None else int(topk_length[s])
    rows = enumerate(indices[s, 0].tolist()[: max(length, 0)])
    return [(j, i) for j, i in rows if 0 <= i < min(s_kv, visible)]


def batch_starts(q_start: int | list[int] | None, B: int) -> list[int | None]:
    """One start for each batch element."""
    return list(q_start) if isinstance(q_start, (list, tuple)) else [q_start] * B


def attn_dist(
    q: Tensor,
    k: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    q_start: int | list[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    lse_base: float = 2.0,
    compute_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Head-summed attention distribution: [ceil(h_q / 64), s_q, topk] in ``compute_dtype`` (batched: a leading B).

    q: [s_q, h_q, d_qk], k: [s_kv, 1, d_qk], indices: [s_q, 1, topk], lse: [s_q, h_q] in base ``lse_base``.
    """
    if q.dim() == 4:
        B = q.shape[0]
        rows = [
            attn_dist(
                q[b], k[b], indices[b], lse[b], sm_scale=sm_scale, q_start=start, k_stride=k_stride,
                topk_length=None if topk_length is None else topk_length[b], lse_base=lse_base,
                compute_dtype=compute_dtype,
            )
            for b, start in enumerate(batch_starts(q_start, B))
        ]  # fmt: skip
        groups = (q.shape[2] + 63) // 64
        return torch.stack(rows) if rows else q.new_zeros(0, groups, q.shape[1], indices.shape[3], dtype=compute_dtype)
    s_q, h_q, d_qk = q.shape
    s_kv, topk = k.shape[0], indices.shape[2]
    sm_scale = d_qk**-0.5 if sm_scale is None else sm_scale
    out = torch.zeros((h_q + 63) // 64, s_q, topk, dtype=compute_dtype, device=q.device)
    for s in range(s_q):
        lse2 = lse[s].to(compute_dtype) * math.log2(lse_base)
        silent = lse[s].isinf()
        rule = {"s_kv": s_kv, "q_start": q_start, "k_stride": k_stride, "topk_length": topk_length}
        for j, i in valid_slots(indices, s, **rule):
            score2 = q[s].to(compute_dtype) @ k[i, 0].to(compute_dtype) * (sm_scale * math.log2(math.e))
            p = torch.where(silent, 0.0, torch.exp2(score2 - lse2))
            for group in range(out.shape[0]):
                out[group, s, j] = p[group * 64 : (group + 1) * 64].sum()
    return out


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    d_v: int = 512,
    sm_scale: float | None = None,
    q_start: int | list[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    lse_base: float = 2.0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention over an index list: out [s_q, h_q, d_v], lse [s_q, h_q] in ``compute_dtype`` (batched: a leading B).

    q: [s_q, h_q, d_qk], kv: [s_kv, 1, d_qk] with the values in its first d_v columns, indices: [s_q, 1, topk],
    attn_sink: [h_q]. Differentiable with respect to q, kv and attn_sink.
    """
    if q.dim() == 4:
        B = q.shape[0]
        rows = [
            sparse_attention(
                q[b], kv[b], indices[b], d_v=d_v, sm_scale=sm_scale, q_start=start, k_stride=k_stride,
                topk_length=None if topk_length is None else topk_length[b], attn_sink=attn_sink, lse_base=lse_base,
                compute_dtype=compute_dtype,
            )
            for b, start in enumerate(batch_starts(q_start, B))
        ]  # fmt: skip
        if not rows:
            out = q.new_zeros(*q.shape[:-1], d_v, dtype=compute_dtype)
            return out, out.sum(-1)
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])
    s_q, h_q, d_qk = q.shape
    sm_scale = d_qk**-0.5 if sm_scale is None else sm_scale
    rule = {"s_kv": kv.shape[0], "q_start": q_start, "k_stride": k_stride, "topk_length": topk_length}
    out_rows, lse_rows = [], []
    for s in range(s_q):
        rows = [i for _, i in valid_slots(indices, s, **rule)]
        if not rows:
            out_rows.append(q.new_zeros(h_q, d_v, dtype=compute_dtype))
            lse_rows.append(q.new_full((h_q,), -math.inf, dtype=compute_dtype))
            continue
        keys = kv[rows, 0].to(compute_dtype)
        scores = infinite_to_nan(q[s].to(compute_dtype) @ keys.T * sm_scale)
        lse = torch.logsumexp(scores, dim=1)
        sink = None if attn_sink is None else attn_sink.to(compute_dtype)
        out_rows.append(torch.exp(scores - denominator(lse, sink)[:, None]) @ keys[:, :d_v])
        lse_rows.append(lse / math.log(lse_base))
    if not out_rows:
        out = q.new_zeros(0, h_q, d_v, dtype=compute_dtype)
        return out, out.sum(-1)
    return torch.stack(out_rows), torch.stack(lse_rows)


def indexer_loss(
    logits: Tensor,
    attn_dist: Tensor,
    indices: Tensor,
    *,
    s_kv: int,
    q_start: int | list[int] | None = None,
    k_stride: int = 1,
    topk_length: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """KL divergence of every query [s_q], and whether it has a valid slot [s_q] (batched: a leading B).

    logits, attn_dist: [s_q, topk], indices: [s_q, 1, topk]. Differentiable with respect to logits.
    """
    if logits.dim() == 3:
        rows = [
            indexer_loss(
                logits[b], attn_dist[b], indices[b], s_kv=s_kv, q_start=start, k_stride=k_stride,
                topk_length=None if topk_length is None else topk_length[b], compute_dtype=compute_dtype,
            )
            for b, start in enumerate(batch_starts(q_start, logits.shape[0]))
        ]  # fmt: skip
        losses = torch.stack([loss for loss, _ in rows]) if rows else logits.sum(-1, dtype=compute_dtype)
        return losses, torch.tensor([counts.tolist() for _, counts in rows], dtype=torch.bool)
    rule = {"s_kv": s_kv, "q_start": q_start, "k_stride": k_stride, "topk_length": topk_length}
    losses, counts = [], []
    for s in range(logits.shape[0]):
        slots = [j for j, _ in valid_slots(indices, s, **rule)]
        loss = logits.new_zeros((), dtype=compute_dtype)
        target = attn_dist[s, slots].to(compute_dtype)
        log_p = torch.log_softmax(logits[s, slots].to(compute_dtype), dim=0)
        for t, log_prob in zip(target / target.sum(), log_p):
            if t != 0 and target.sum() != 0:
                loss = loss + t * (t.log() - log_prob)
        losses.append(loss)
        counts.append(bool(slots))
    losses = torch.stack(losses) if losses else logits.sum(-1, dtype=compute_dtype)
    return losses, torch.tensor(counts, dtype=torch.bool)
