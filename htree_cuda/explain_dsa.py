"""`python -m htree_cuda explain --op ...`: the kernels of the operations over index lists, told by their own launchers.

The launchers of the library run as they do for a call, up to their last step, and write down what they would launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, kernels
from .params import IndexerParams

BACKWARDS = ("sparse_attention", "indexer_logits_listed")
OPS = ("attn_dist", "sparse_attention", "indexer_logits", "indexer_logits_listed", "indexer_topk", "topk_indices")
INDEXER = OPS[2:5]
VALUE_DIM = 512


def _present(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of one element's memory, where a null pointer would mean that there is none."""
    return torch.empty(1, dtype=dtype).expand(shape)


def _lists(op: str, sizes: dict, dtype: torch.dtype, backward: bool, deterministic: bool) -> None:
    """A call of `attn_dist` or `sparse_attention` on meta tensors."""
    B, T, T_q, H, K, top_k = (sizes[name] for name in ("B", "T", "T_q", "H", "K", "top_k"))

    def of(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, kv, indices = of(B, T_q, H, K), of(B, T, 1, K), of(B, T_q, 1, top_k, dtype=torch.int32)
    lse = of(B, T_q, H, dtype=torch.float32)
    options = {"sm_scale": K**-0.5, "q_start": None, "k_stride": 1, "topk_length": None, "lse_base": 2.0}
    if op == "attn_dist":
        out = of(B, -(-H // 64), T_q, top_k, dtype=torch.float32)
        checks.support.attn_dist(q, kv, indices, lse, None, options["sm_scale"])
        kernels.attn_dist(q, kv, indices, lse, out, **options)
        return
    out = of(B, T_q, H, VALUE_DIM)
    options["attn_sink"] = None
    checks.support.sparse_attention(q, kv, indices, None, None, options["sm_scale"], VALUE_DIM)
    if not backward:
        workspace = _present(kernels.sparse_attention_workspace(q, indices), dtype=torch.uint8)
        kernels.sparse_attention(q, kv, indices, out, lse, workspace, **options)
        return
    size = kernels.sparse_attention_backward_workspace(q, kv, None, deterministic)
    results = (q, kv, indices, out, lse, of(*q.shape), of(*kv.shape), of(0, dtype=torch.float32))
    workspace = _present(size, dtype=torch.uint8)
    kernels.sparse_attention_backward(out, lse, *results, workspace, **options, deterministic=deterministic)


def _indexer(op: str, sizes: dict, dtype: torch.dtype, backward: bool) -> None:
    """A call of one of the indexer's operations on meta tensors."""
    B, T, T_q, H, K, top_k = (sizes[name] for name in ("B", "T", "T_q", "H", "K", "top_k"))

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    params = IndexerParams(True, [T - T_q] * B, 1)
    indices, values = of(B, T_q, 1, top_k, dtype=torch.int32), of(B, T_q, top_k)
    if op == "topk_indices":
        kernels.topk_indices(of(B, T_q, T), None, None, indices, values, params=params)
        return
    q, k, weights = of(B, T_q, H, K, dtype=dtype), of(B, T, 1, K, dtype=dtype), of(B, T_q, H)
    listed = op == "indexer_logits_listed"
    checks.dsa.indexer_kernel(op, q, k, indices if listed else None)
    window = (None, None)
    if listed:
        shapes = ((q.shape, dtype), (k.shape, torch.float32), (weights.shape, torch.float32))
        grads = [_present(*shape, dtype=own) if backward else None for shape, own in shapes]
        results = {"dlogits": values, "grads": grads} if backward else {"out": values}
        kernels.indexer_logits_listed(q, k, weights, indices, None, *window, params=params, **results)
        return
    scales = (of(B, T_q, H), of(B, T, 1)) if dtype == torch.float8_e4m3fn else (None, None)
    call = (q, k, weights, *scales, *window)
    if op == "indexer_logits":
        kernels.indexer_logits(*call, of(B, T_q, T), params=params)
        return
    size = kernels.indexer_topk_workspace(*call, top_k, params=params)
    kernels.indexer_topk(*call, indices, values, _present(size, dtype=torch.uint8), params=params)


def explain(
    op: str,
    *,
    T: int,
    H: int,
    K: int,
    top_k: int = 2048,
    T_q: int | None = None,
    B: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    deterministic: bool = False,
    sms: int = 132,
) -> dict:
    """The kernels of one call of an operation over index lists, in the order of their first launches.

    Args:
        op: "attn_dist", "sparse_attention", "indexer_logits", "indexer_logits_listed" (with a list), "indexer_topk" or
            "topk_indices".
        T: int, key rows.
        H, K: int, query heads and their dimension.
        top_k: int, slots of a list; default 2048.
        T_q: int, queries, the last positions; default T.
        B: int, sequences; default 1.
        dtype: float16, bfloat16, or for the dense indexer float8_e4m3fn; default bfloat16.
        backward: bool; the kernels of the backward of "sparse_attention" or "indexer_logits_listed"; default False.
        deterministic: bool, of the backward; default False.
        sms: int, SMs of the GPU; default 132, H100 and H200 SXM.

    Returns:
        A dict of the call's numbers and ``rows``: phase, kernel, tile, reason, launches and ctas of each kernel; the
        other keys of `htree_cuda.explain` are None.

    Raises:
        ValueError, UnsupportedError: sizes that the kernels do not take.
        RuntimeError: the installation has no kernels.

    Notes:
        Deterministic; launches nothing. The launchers of the library tell what they would launch.

    Example:
        >>> from htree_cuda.explain_dsa import explain
        >>> rows = explain("indexer_topk", T=65536, H=64, K=128)["rows"]  # where the kernels are built

    Source: csrc/host/recording.h.
    """
    if op not in OPS:
        raise ValueError(f"explain: op must be of {', '.join(OPS)}, got {op!r}")
    if backward and op not in BACKWARDS:
        raise ValueError(f"explain: backward needs op to be of {', '.join(BACKWARDS)}, got {op!r}")
    sizes = {"B": B, "T": T, "T_q": T if T_q is None else T_q, "H": H, "K": K, "top_k": top_k, "sms": sms}
    for name, value in sizes.items():
        checks.common.size("explain", name, checks.common.integer("explain", name, value))
    if sizes["T_q"] > T:
        raise ValueError(f"explain: T_q must be at most T, got {sizes['T_q']} and {T}")
    if op in ("attn_dist", "sparse_attention"):
        call = lambda: _lists(op, sizes, dtype, backward, deterministic)  # noqa: E731
    else:
        call = lambda: _indexer(op, sizes, dtype, backward)  # noqa: E731
    rows = kernels.recorded(call, sms=sms)
    name = str(dtype).removeprefix("torch.")
    return {"op": op, "backward": backward, "deterministic": deterministic, **sizes, "dtype": name, "rows": rows}


COLUMNS = ("phase", "kernel", "tile of a CTA", "launches", "CTAs")


def render(call: dict) -> str:
    """The report for people."""
    shape = ", ".join(f"{name} {call[name]:,}" for name in ("B", "T", "T_q", "H", "H_kv", "K", "top_k") if name in call)
    what = f"{call['op']}{', backward' if call['backward'] else ''}{', deterministic' if call['deterministic'] else ''}"
    rows = [list(COLUMNS)]
    for row in call["rows"]:
        ctas = "" if row["ctas"] is None else f"{row['ctas']:,}"
        rows.append([row["phase"], row["kernel"], row["tile"], f"{row['launches']:,}", ctas])
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [f"{what}: {shape}, {call['dtype']}; {call['sms']} SMs", ""]
    for row in rows:
        cells = [cell.rjust(width) if i > 2 else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines += ["", "why", *dict.fromkeys(f"  {row['kernel']}: {row['reason']}" for row in call["rows"])]
    return "\n".join(lines)
