"""Rules of forward, backward, tree_pool and `HTreeAttention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_enabled
from ..definition import accumulation_dtype, layer_sizes
from ..params import TreeParams
from . import rotation
from .common import (
    FLOAT_DTYPES,
    MAX_INT32,
    backend_name,
    boolean,
    dimensions,
    dtype_of_parameters,
    equal,
    fail,
    float_dtype,
    integer,
    number,
    power_of_two,
    returned,
    same_device,
    same_dtype,
    save_selection,
    scale_number,
    size,
    strided,
    tensor,
)


def _tree_numbers(op: str, compression_rate: int, max_top_nodes: int) -> None:
    power_of_two(op, "compression_rate", compression_rate, 2)
    size(op, "max_top_nodes", max_top_nodes)


def tree_pool(k: Tensor, v: Tensor, *, compression_rate: int, max_top_nodes: int, backend: str) -> list[int]:
    """Rules of ``htree_cuda::tree_pool``; returns the layer sizes, bottom first."""
    op = "tree_pool"
    backend_name(op, backend)
    _key_value(op, k, v)
    _tree_numbers(op, compression_rate, max_top_nodes)
    return layer_sizes(k.shape[1], compression_rate, max_top_nodes)


def _key_value(op: str, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
    """Rules of k and v, and of their dtype and device beside that of q where there is one."""
    strided(op, k=k, v=v)
    dimensions(op, "k", k, ("B", "T", "H_kv", "K"))
    dimensions(op, "v", v, ("B", "T", "H_kv", "V"))
    float_dtype(op, "k", k)
    float_dtype(op, "v", v)
    if q is None:
        same_dtype(op, "k", k, v=v)
        same_device(op, "k", k, v=v)
    else:
        same_dtype(op, "q", q, k=k, v=v)
        same_device(op, "q", q, k=k, v=v)
    size(op, "T (dimension 1 of k)", k.shape[1], 1, MAX_INT32)
    size(op, "H_kv (dimension 2 of k)", k.shape[2])
    size(op, "K (dimension 3 of k)", k.shape[3])
    size(op, "V (dimension 3 of v)", v.shape[3])
    equal(op, "dimension 0 of v", v.shape[0], "B of k", k.shape[0])
    equal(op, "dimension 1 of v", v.shape[1], "T of k", k.shape[1])
    equal(op, "dimension 2 of v", v.shape[2], "H_kv of k", k.shape[2])


def even(op: str, what: str, head_dim: int) -> None:
    if head_dim % 2:
        fail(op, f"{what} must be even: RoPE rotates pairs", head_dim)


def tree_options(
    op: str,
    *,
    dtype: torch.dtype,
    head_dim: int,
    compression_rate: int,
    top_k_per_layer: int,
    max_top_nodes: int | None,
    scale: float | None,
    rope_base: float | None,
) -> tuple[int, float]:
    """Rules of the numbers that belong to no tensor; returns (max_top_nodes, scale) with their defaults resolved."""
    power_of_two(op, "compression_rate", compression_rate, 2)
    power_of_two(op, "top_k_per_layer", top_k_per_layer, 1)
    if max_top_nodes is None:
        max_top_nodes = top_k_per_layer * compression_rate
    elif not top_k_per_layer <= max_top_nodes <= top_k_per_layer * compression_rate:
        low, high = top_k_per_layer, top_k_per_layer * compression_rate
        fail(op, f"max_top_nodes must lie in top_k .. top_k * compression_rate ({low} .. {high})", max_top_nodes)
    if scale is None:
        scale = float(head_dim) ** -0.5
    else:
        scale_number(op, "scale", scale, dtype)
    if rope_base is not None and not (math.isfinite(rope_base) and rope_base > 0):
        fail(op, "rope_base must be finite and greater than 0", rope_base)
    return max_top_nodes, scale


def tree_option_types(op: str, options: dict[str, Any]) -> dict[str, Any]:
    """Python types of `forward`'s options but the return flags; returns those that are no tensors as the ops take them,
    NumPy's numbers as Python's."""
    typed = {
        "compression_rate": integer(op, "compression_rate", options["compression_rate"]),
        "top_k_per_layer": integer(op, "top_k_per_layer", options["top_k_per_layer"]),
        "max_top_nodes": integer(op, "max_top_nodes", options["max_top_nodes"], optional=True),
        "scale": number(op, "scale", options["scale"], optional=True),
    }
    rotation_options = ("rope_base", "rope_inv_freq", "rope_dim", "rope_interleaved", "attn_sink", "softcap")
    if "softcap" in options:
        typed |= rotation.option_types(op, **{name: options[name] for name in rotation_options})
        options = {name: x for name, x in options.items() if name not in rotation_options}
    else:  # a module, which rotates by a base alone
        typed["rope_base"] = number(op, "rope_base", options["rope_base"])
    boolean(op, "strict_causal", options["strict_causal"])
    backend_name(op, options["backend"])
    if options["deterministic"] is not None:
        boolean(op, "deterministic", options["deterministic"])
    save_selection(op, options["save_selection"])
    return options | typed


def attention_module(
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    dropout: float,
    dtype: torch.dtype,
    flags: dict[str, bool],
    options: dict[str, Any],
) -> tuple[dict[str, int], dict[str, Any]]:
    """Rules of ``HTreeAttention``'s arguments; returns its sizes with their defaults resolved, and the options of
    `forward` as `tree_option_types` does."""
    op = "HTreeAttention"
    d_model, n_heads = integer(op, "d_model", d_model), integer(op, "n_heads", n_heads)
    n_kv_heads = n_heads if n_kv_heads is None else integer(op, "n_kv_heads", n_kv_heads)
    for name, value in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        size(op, name, value)
    if n_heads % n_kv_heads:
        fail(op, f"n_heads must be a multiple of n_kv_heads ({n_kv_heads})", n_heads)
    head_dim = integer(op, "head_dim", head_dim, optional=True)
    v_head_dim = integer(op, "v_head_dim", v_head_dim, optional=True)
    if head_dim is None:
        if d_model % n_heads:
            fail(op, f"d_model must be a multiple of n_heads ({n_heads}) where head_dim is not given", d_model)
        head_dim = d_model // n_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    size(op, "head_dim", head_dim)
    size(op, "v_head_dim", v_head_dim)
    even(op, "head_dim", head_dim)
    for name, flag in flags.items():
        boolean(op, name, flag)
    if number(op, "dropout", dropout) != 0:
        fail(op, "dropout must be 0: attention probabilities are never stored, so none can be dropped", dropout)
    if dtype not in FLOAT_DTYPES:
        fail(op, "dtype must be float16, bfloat16, float32 or float64", dtype)
    options = tree_option_types(op, options)
    tree = ("compression_rate", "top_k_per_layer", "max_top_nodes", "scale", "rope_base")
    tree_options(op, dtype=dtype, head_dim=head_dim, **{name: options[name] for name in tree})
    sizes = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return sizes | {"head_dim": head_dim, "v_head_dim": v_head_dim}, options


def attention_module_input(
    x: Tensor, past: tuple[Tensor, Tensor] | None, *, d_model: int, n_kv_heads: int, head_dim: int, v_head_dim: int,
    weight: Tensor, packed: bool = False,
) -> None:  # fmt: skip
    """Rules of what ``HTreeAttention`` is called with; the rest is found by ``htree_cuda::forward``."""
    op = "HTreeAttention"
    tensor(op, "x", x)
    dimensions(op, "x", x, ("total", "d_model") if packed else ("B", "T_q", "d_model"))
    equal(op, f"dimension {1 if packed else 2} of x", x.shape[-1], "d_model", d_model)
    float_dtype(op, "x", x)
    dtype_of_parameters(op, "x", x, weight)
    same_device(op, "the parameters", weight, x=x)
    if past is None:
        return
    if not isinstance(past, (tuple, list)) or len(past) != 2:
        raise TypeError(f"{op}: past must be a pair (k, v) of tensors or None, got {type(past).__name__}")
    for name, part, dim in (("k of past", past[0], head_dim), ("v of past", past[1], v_head_dim)):
        tensor(op, name, part)
        dimensions(op, name, part, ("B", "T", "n_kv_heads", "head_dim" if name[0] == "k" else "v_head_dim"))
        equal(op, f"dimension 0 of {name}", part.shape[0], "B of x", x.shape[0])
        equal(op, f"dimension 2 of {name}", part.shape[2], "n_kv_heads", n_kv_heads)
        equal(op, f"dimension 3 of {name}", part.shape[3], "the head dimension", dim)
        same_device(op, "x", x, **{name: part})
        if autocast_enabled(x.device.type):
            float_dtype(op, name, part)
    equal(op, "dimension 1 of v of past", past[1].shape[1], "T of k of past", past[0].shape[1])


def module_tokens(k: Tensor) -> None:
    """`forward` takes no sequence without keys, here those of past and of x; with a cache, or packed, a call may be
    empty."""
    size("HTreeAttention", "the tokens of past and x together (dimension 1)", k.shape[1], 1, MAX_INT32)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_start: int | None,
    compression_rate: int,
    top_k_per_layer: int,
    max_top_nodes: int | None,
    scale: float | None,
    rope_base: float | None,
    strict_causal: bool,
    backend: str,
    attn_sink: Tensor | None = None,
    rope_inv_freq: Tensor | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
    op: str = "forward",
) -> TreeParams:
    """Rules of ``htree_cuda::forward`` (and its backward); returns the numbers with every default resolved."""
    backend_name(op, backend)
    strided(op, q=q)
    dimensions(op, "q", q, ("B", "T_q", "H", "K"))
    float_dtype(op, "q", q)
    _key_value(op, k, v, q)
    B, T_q, H, K = q.shape
    T, H_kv = k.shape[1], k.shape[2]
    equal(op, "dimension 0 of k", k.shape[0], "B of q", B)
    equal(op, "dimension 3 of k", k.shape[3], "K of q", K)
    even(op, "K (dimension 3 of q)", K)
    if H_kv > H or H % H_kv:
        fail(op, f"H (dimension 2 of q) must be a positive multiple of H_kv ({H_kv})", H)
    if T_q > T:
        fail(op, f"T_q (dimension 1 of q) must be at most T ({T})", T_q)
    if q_start is None:
        q_start = T - T_q
    elif not 0 <= q_start <= T - T_q:
        fail(op, f"q_start must lie in 0 .. T - T_q ({T - T_q})", q_start)
    max_top_nodes, scale = tree_options(
        op, dtype=q.dtype, head_dim=K, compression_rate=compression_rate, top_k_per_layer=top_k_per_layer,
        max_top_nodes=max_top_nodes, scale=scale, rope_base=rope_base,
    )  # fmt: skip
    rope_dim = rotation.rotation(op, K, q.device, rope_base, rope_inv_freq, rope_dim)
    rotation.sink(op, q, attn_sink)
    return TreeParams(
        q_start, compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, strict_causal, rope_dim,
        rope_interleaved, rope_inv_freq, attn_sink,
    )  # fmt: skip


def given_selection(op: str, selection: Tensor, q: Tensor, k: Tensor, params: TreeParams) -> None:
    """Rules of a selection to replay: what `forward` returns of the same shapes. Its content is not looked at."""
    layers = len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))
    shape = (layers - 1, q.shape[0], q.shape[1], k.shape[2], params.top_k)
    strided(op, selection=selection)
    returned(op, q, selection=(selection, shape, torch.int32))


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, params
) -> None:
    """Rules of ``htree_cuda::backward`` beyond the forward's: shapes, dtypes and devices of what forward returned."""
    op = "backward"
    B, T_q, H, _ = q.shape
    layers = len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))
    acc = accumulation_dtype(q.dtype)
    returned(
        op, q,
        dout=(dout, (B, T_q, H, v.shape[3]), q.dtype), out=(out, (B, T_q, H, v.shape[3]), q.dtype),
        dlse=(dlse, (B, T_q, H), acc), lse=(lse, (B, T_q, H), acc),
        selection=(selection, (layers - 1, B, T_q, k.shape[2], params.top_k), torch.int32),
    )  # fmt: skip
