"""The error a bf16/fp16 kernel may make, fixed before any kernel exists, and the rules of a kernel's selection.

A baseline is the definition with the roundings a careful kernel cannot avoid: inputs and stored tree in the dtype,
rotated queries and keys rounded to it, QK in float32, P rounded to the dtype, PV in float32, the output rounded once
(backward: P and dS rounded to the dtype before their products, which are float32; attn_dist: rounded inputs, everything
else float32; sparse_attention: as the forward, without a tree and a rotation; forward_cached: the forward's, of each
sequence on its own). A kernel may be off by at most twice what the baseline is off, in the maximum and in the RMS
relative to the row; both are measured against the definition in float64.

The forward's oracle sees the rounded inputs, since the selection is a function of exactly those numbers; so does
sparse_attention's, the stricter choice, since its baseline rounds P and the output as well. The only rounding of
attn_dist's baseline is that of its inputs, so its oracle sees the inputs before they are rounded; how far a kernel's
float32 arithmetic may stray on the rounded inputs is bounded apart, by `attn_dist_arithmetic_bound`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from htree_cuda import definition
from htree_cuda import indexer_logits as torch_indexer_logits

FACTOR = 2.0


def _rotation(options: dict) -> dict:
    """Those of the options that `definition.rope` takes."""
    return {name: options[name] for name in ("rope_inv_freq", "rope_dim", "rope_interleaved") if name in options}


@dataclass
class Baseline:
    out: Tensor  # [B, T_q, H, V] in the dtype
    lse: Tensor  # [B, T_q, H] float32
    score_error: Tensor  # [B, T_q, H_kv] float64, largest |score - definition's score| of the query's descent


def forward(q: Tensor, k: Tensor, v: Tensor, selection: Tensor, **options) -> Baseline:
    """The baseline for bf16/fp16 q, k, v, descending by the given selection; options as `definition.forward`."""
    q_start = options.get("q_start")
    r = options.get("compression_rate", 16)
    top_k = options.get("top_k_per_layer", 512)
    max_top_nodes = top_k * r if options.get("max_top_nodes") is None else options["max_top_nodes"]
    base, rotation = options.get("rope_base", 10000.0), _rotation(options)
    B, T_q, H, K = q.shape
    T, H_kv, V = k.shape[1], k.shape[2], v.shape[3]
    G, dtype = H // H_kv, q.dtype
    scale = K**-0.5 if options.get("scale") is None else options["scale"]
    q_start = T - T_q if q_start is None else q_start
    tree_k = definition.build_tree(k, r, max_top_nodes)
    tree_v = definition.build_tree(v, r, max_top_nodes)
    out, lse = torch.empty(B, T_q, H, V, dtype=dtype), torch.empty(B, T_q, H)
    score_error = torch.zeros(B, T_q, H_kv, dtype=torch.float64)
    for b in range(B):
        for i in range(T_q):
            for h_kv in range(H_kv):
                heads = slice(h_kv * G, (h_kv + 1) * G)
                scores, values, parents = [], [], None
                for layer in reversed(range(len(tree_k))):
                    c = definition.candidate_list(parents, (q_start + i) // r**layer, r, q.device)
                    n = c.shape[0]
                    last, places = torch.tensor([n - 1]), torch.arange(n)
                    q_row, k_row = q[b, i, heads].float(), tree_k[layer][b, c, h_kv].float()
                    q_rot = definition.rope(q_row[:, None], last, base, **rotation)[:, 0]
                    k_rot = definition.rope(k_row, places, base, **rotation)
                    s = (q_rot.to(dtype).float() @ k_rot.to(dtype).float().T) * scale
                    exact_q = definition.rope(q_row.double()[:, None], last, base, **rotation)[:, 0]
                    exact = exact_q @ definition.rope(k_row.double(), places, base, **rotation).T * scale
                    considered = slice(0, n - 1) if layer > 0 else slice(0, n)
                    error = (s - exact)[:, considered].abs()
                    if error.numel():
                        score_error[b, i, h_kv] = torch.maximum(score_error[b, i, h_kv], error.max())
                    leaves = torch.ones(n, dtype=torch.bool)
                    if layer > 0:
                        row = selection[layer - 1, b, i, h_kv]
                        parents = row[row >= 0].to(torch.int64)
                        leaves = ~torch.isin(c, parents)
                    scores.append(s[:, leaves])
                    values.append(tree_v[layer][b, c[leaves], h_kv].float())
                s, values = torch.cat(scores, 1), torch.cat(values)
                row_max = s.amax(1, keepdim=True)
                p = torch.exp(s - row_max)
                row_sum = p.sum(1, keepdim=True)
                sink = options.get("attn_sink")
                denominator = row_sum if sink is None else row_sum + torch.exp(sink[heads, None] - row_max)
                out[b, i, heads] = ((p.to(dtype).float() @ values) / denominator).to(dtype)
                lse[b, i, heads] = (row_max + row_sum.log())[:, 0]
    return Baseline(out, lse, score_error)


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """The baseline of (dq, dk, dv) in the dtype. out (in the dtype), lse (float32) and selection are a forward's, dlse
    is float32; options as `definition.backward`."""
    r = options.get("compression_rate", 16)
    top_k = options.get("top_k_per_layer", 512)
    max_top_nodes = top_k * r if options.get("max_top_nodes") is None else options["max_top_nodes"]
    base, rotation = options.get("rope_base", 10000.0), _rotation(options)
    B, T_q, H, K = q.shape
    T, H_kv = k.shape[1], k.shape[2]
    G, dtype = H // H_kv, q.dtype
    scale = K**-0.5 if options.get("scale") is None else options["scale"]
    q_start = T - T_q if options.get("q_start") is None else options["q_start"]
    tree_k, tree_v = (definition.build_tree(x, r, max_top_nodes) for x in (k, v))
    dq = torch.zeros(q.shape)
    dtree_k, dtree_v = ([torch.zeros(x.shape) for x in tree] for tree in (tree_k, tree_v))
    for b in range(B):
        for i in range(T_q):
            for h_kv in range(H_kv):
                heads = slice(h_kv * G, (h_kv + 1) * G)
                do, parents = dout[b, i, heads].float(), None
                delta, of_lse = (do * out[b, i, heads].float()).sum(1)[:, None], dlse[b, i, heads, None]
                below = lse[b, i, heads, None]
                sink = options.get("attn_sink")
                denominator = below if sink is None else torch.logaddexp(below, sink[heads, None])
                for layer in reversed(range(len(tree_k))):
                    c = definition.candidate_list(parents, (q_start + i) // r**layer, r, q.device)
                    last, leaves = torch.tensor([c.shape[0] - 1]), torch.arange(c.shape[0])
                    if layer > 0:
                        row = selection[layer - 1, b, i, h_kv]
                        parents = row[row >= 0].to(torch.int64)
                        leaves = leaves[~torch.isin(c, parents)]
                    node = c[leaves]
                    q_rot = (
                        definition.rope(q[b, i, heads].float()[:, None], last, base, **rotation)[:, 0].to(dtype).float()
                    )
                    k_rot = (
                        definition.rope(tree_k[layer][b, node, h_kv].float(), leaves, base, **rotation)
                        .to(dtype)
                        .float()
                    )
                    score = q_rot @ k_rot.T * scale
                    P = torch.exp(score - denominator)
                    dS = P * (do @ tree_v[layer][b, node, h_kv].float().T - delta) + torch.exp(score - below) * of_lse
                    P, dS = P.to(dtype).float(), dS.to(dtype).float()
                    dq_rot = (dS @ k_rot)[:, None]
                    dq[b, i, heads] += scale * definition.rope(dq_rot, last, base, inverse=True, **rotation)[:, 0]
                    dtree_k[layer][b, node, h_kv] += scale * definition.rope(
                        dS.T @ q_rot, leaves, base, inverse=True, **rotation
                    )
                    dtree_v[layer][b, node, h_kv] += P.T @ do
    for dtree in (dtree_k, dtree_v):
        for above, below in zip(reversed(dtree[1:]), reversed(dtree[:-1])):
            count = torch.full((above.shape[1],), r)
            count[-1] = below.shape[1] - (above.shape[1] - 1) * r
            below += (above / count[:, None, None]).repeat_interleave(r, 1)[:, : below.shape[1]]
    return dq.to(dtype), dtree_k[0].to(dtype), dtree_v[0].to(dtype)


def attn_dist(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, **options) -> Tensor:
    """attn_dist of the (already rounded) inputs with float32 arithmetic."""
    return definition.attn_dist(q, k, indices, lse, compute_dtype=torch.float32, **options)


def indexer_logits(q: Tensor, k: Tensor, weights: Tensor, **options) -> Tensor:
    """indexer_logits of the (already rounded) inputs with float32 arithmetic, TF32 off."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch_indexer_logits(q.float(), k.float(), weights, backend="torch", **options)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


def indexer_logits_backward(q: Tensor, k: Tensor, weights: Tensor, rule: dict, dlogits: Tensor) -> list[Tensor]:
    """(dq, dk in the dtype, dweights float32) of the listed form: g weights (z > 0) rounded to the dtype, its products
    with keys and queries in float32, each gradient rounded once. rule: indices, topk_length, k_end."""
    if q.dim() == 4:
        rows = [
            indexer_logits_backward(
                q[b], k[b], weights[b], {n: x if x is None else x[b] for n, x in rule.items()}, dlogits[b]
            )
            for b in range(q.shape[0])
        ]
        return [torch.stack(x) for x in zip(*rows)]
    index = rule["indices"][:, 0].long()
    valid = (index >= 0) & (index < k.shape[0])
    if rule["topk_length"] is not None:
        valid &= torch.arange(index.shape[1], device=q.device) < rule["topk_length"][:, None]
    if rule["k_end"] is not None:
        valid &= index < rule["k_end"][:, None]
    index = index.where(valid, 0)
    keys = k[:, 0].float()[index].masked_fill(~valid[:, :, None], 0.0)
    g = dlogits.masked_fill(~valid, 0.0)
    z = torch.bmm(q.float(), keys.transpose(1, 2))
    dz = torch.where(z > 0, g[:, None] * weights[:, :, None], 0.0).to(q.dtype).float()
    dk = torch.zeros(k.shape[0], k.shape[2], device=q.device)
    dk.index_add_(0, index.flatten(), torch.bmm(dz.transpose(1, 2), q.float()).flatten(0, 1))
    dweights = torch.bmm(z.relu(), g[:, :, None])[:, :, 0]
    return [torch.bmm(dz, keys).to(q.dtype), dk[:, None].to(k.dtype), dweights]


def sparse_attention(q: Tensor, kv: Tensor, indices: Tensor, **options) -> tuple[Tensor, Tensor]:
    """(out in the dtype, lse float32) of bf16/fp16 q [s_q, h_q, d_qk], kv [s_kv, 1, d_qk], indices [s_q, 1, topk];
    options as `definition.sparse_attention`."""
    d_v, sink = options.get("d_v", 512), options.get("attn_sink")
    scale = q.shape[-1] ** -0.5 if options.get("sm_scale") is None else options["sm_scale"]
    rule = {name: options.get(name) for name in ("q_start", "topk_length")}
    rule |= {"s_kv": kv.shape[0], "k_stride": options.get("k_stride", 1)}
    out = q.new_zeros(*q.shape[:2], d_v)
    lse = torch.full(q.shape[:2], -math.inf)
    for s in range(q.shape[0]):
        rows = [i for _, i in definition.valid_slots(indices, s, **rule)]
        if not rows:
            continue
        keys = kv[rows, 0].float()
        scores = q[s].float() @ keys.T * scale
        row_max = scores.amax(1, keepdim=True)
        p = torch.exp(scores - row_max)
        row_sum = p.sum(1, keepdim=True)
        denominator = row_sum if sink is None else row_sum + torch.exp(sink[:, None] - row_max)
        out[s] = ((p.to(q.dtype).float() @ keys[:, :d_v]) / denominator).to(q.dtype)
        lse[s] = (row_max + row_sum.log())[:, 0] / math.log(options.get("lse_base", 2.0))
    return out, lse


def sparse_attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, kv: Tensor, indices: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dkv in the dtype, dsink float32) of bf16/fp16 inputs as `sparse_attention` has them, dout in their dtype and
    dlse float32: P and sm_scale dscore are rounded to the dtype, everything else is float32 until it is stored."""
    d_v, sink, base = options.get("d_v", 512), options.get("attn_sink"), options.get("lse_base", 2.0)
    scale = q.shape[-1] ** -0.5 if options.get("sm_scale") is None else options["sm_scale"]
    rule = {name: options.get(name) for name in ("q_start", "topk_length")}
    rule |= {"s_kv": kv.shape[0], "k_stride": options.get("k_stride", 1)}
    out, lse = sparse_attention(q, kv, indices, **options)
    dq, dkv, dsink = torch.zeros_like(q), torch.zeros(kv.shape[0], kv.shape[2]), torch.zeros(q.shape[1])
    for s in range(q.shape[0]):
        rows = [i for _, i in definition.valid_slots(indices, s, **rule)]
        if not rows:
            continue
        keys, do = kv[rows, 0].float(), dout[s].float()
        natural = (lse[s] * math.log(base))[:, None]
        softmax = torch.exp(q[s].float() @ keys.T * scale - natural)
        delta = (do * out[s].float()).sum(1, keepdim=True)
        weight = torch.ones_like(natural) if sink is None else torch.sigmoid(natural - sink[:, None])
        if sink is not None:
            dsink -= (delta * torch.sigmoid(sink[:, None] - natural))[:, 0]
        dscore = softmax * (weight * (do @ keys[:, :d_v].T - delta) + dlse[s, :, None] / math.log(base))
        dscore, p = (x.to(q.dtype).float() for x in (dscore * scale, softmax * weight))
        dq[s] = (dscore @ keys).to(q.dtype)
        dkeys = dscore.T @ q[s].float()
        dkeys[:, :d_v] += p.T @ do
        dkv.index_add_(0, torch.tensor(rows), dkeys)
    return dq, dkv[:, None].to(kv.dtype), dsink


def attn_dist_arithmetic_bound(
    q: Tensor, k: Tensor, exact: Tensor, lse: Tensor, sm_scale: float | None = None
) -> Tensor:
    """Largest error of float32 arithmetic on the rounded inputs, per slot of `exact` (unbatched), as an a-priori bound.

    A dot product accumulated in float32 (in any order, the tensor cores' truncating adds included) is off by at most
    d * 2^-22 * |q| |k|; lse - score costs another rounding of either; exp2 makes the sum a relative error.
    """
    d = q.shape[-1]
    sm_scale = d**-0.5 if sm_scale is None else sm_scale
    norms = q.double().norm(dim=-1).max() * k.double().nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).max()
    largest_lse = lse.double().nan_to_num(0.0, 0.0, 0.0).abs().max()
    score_error = (d * 2.0**-22 + 2.0**-22) * norms * sm_scale + 2.0**-22 * largest_lse
    return exact * torch.expm1(score_error) + 2.0**-22 * exact + 1e-30


def row_errors(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """(largest, RMS) error of x relative to the RMS of its row (last dimension) in `exact`; NaN never passes."""
    exact = exact.double()
    row = exact.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    error = (x.double() - exact) / row
    return float(error.abs().max()), float(error.square().mean().sqrt())


def assert_within(name: str, x: Tensor, baseline: Tensor, exact: Tensor, factor: float = FACTOR) -> None:
    """x may be at most `factor` times as far from `exact` as the baseline is, in the maximum and in the RMS."""
    for kind, mine, allowed in zip(("max", "rms"), row_errors(x, exact), row_errors(baseline, exact)):
        assert mine <= factor * allowed, f"{name}: {kind} error {mine:.3e}, baseline {allowed:.3e}"


def assert_lse_within(lse: Tensor, baseline: Tensor, exact: Tensor, factor: float = FACTOR) -> None:
    """lse is a number, not a row: absolute errors."""
    mine, allowed = (lse.double() - exact).abs(), (baseline.double() - exact).abs()
    floor = 2.0**-22 * float(exact.abs().max().clamp(min=1.0))  # one rounding of the float32 result
    assert float(mine.max()) <= factor * float(allowed.max()) + floor, (float(mine.max()), float(allowed.max()))
    rms = float(mine.square().mean().sqrt()), float(allowed.square().mean().sqrt())
    assert rms[0] <= factor * rms[1] + floor, rms


def check_selection(q: Tensor, k: Tensor, selection: Tensor, score_error: Tensor | None, **options) -> float:
    """Rules of a selection, layer by layer, with candidates built from the selection above it.

    Ascending, unique, among the candidates, the rightmost included, of size min(top_k, n), padded with -1, and made of
    the most important candidates up to near-ties: with delta = twice the score error, every selected candidate has
    importance * e^delta >= threshold and every other one importance <= threshold * e^delta. Returns the share of
    selected nodes that are in the exact set.
    """
    top_k = options.get("top_k_per_layer", 512)
    exact = definition.forward(q, k, k[..., :1], selection=selection, traces=True, **options)
    same = total = 0
    for trace in exact.traces:
        i = trace.t - (options["q_start"] if options.get("q_start") is not None else k.shape[1] - q.shape[1])
        for step in trace.layers:
            if step.layer == 0:
                continue
            row = selection[step.layer - 1, trace.b, i, trace.h_kv].to(torch.int64)
            n = step.candidates.shape[0]
            size = min(top_k, n)
            where = f"layer {step.layer} of (b, t, h_kv) = {(trace.b, trace.t, trace.h_kv)}"
            assert (row[size:] == -1).all(), f"{where}: not padded with -1"
            row = row[:size]
            assert (row[1:] > row[:-1]).all(), f"{where}: not ascending and unique"
            position = torch.searchsorted(step.candidates, row)
            assert (position < n).all() and (step.candidates[position.clamp(max=n - 1)] == row).all(), (
                f"{where}: not among the candidates"
            )
            assert row[-1] == step.candidates[-1], f"{where}: without the rightmost"
            ideal = definition.select(step.log_importance, top_k)
            same += int(torch.isin(position, ideal).sum())
            total += size
            if size == n:
                continue
            delta = 0.0 if score_error is None else 2.0 * float(score_error[trace.b, i, trace.h_kv])
            # Below 2^-100 of the largest, candidates may be ordered freely: they all count as equal.
            log_imp = step.log_importance.clone()
            floor = log_imp[: n - 1].max() - 100 * math.log(2.0)
            log_imp = torch.maximum(log_imp, floor)
            threshold = torch.sort(log_imp, descending=True).values[size - 1]
            chosen = torch.zeros(n, dtype=torch.bool)
            chosen[position] = True
            slack = delta + 1e-9
            assert (log_imp[chosen] + slack >= threshold).all(), f"{where}: a selected node is not important enough"
            assert (log_imp[~chosen] <= threshold + slack).all(), f"{where}: an important node was left out"
    return same / max(total, 1)
