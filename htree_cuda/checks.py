"""Every rule an argument must keep, once. The real and the fake implementation of an op call the same function here.

A message names the op, the argument, the rule and the value: ``attn_dist: indices must be int32, got torch.int64``.
TypeError: not a tensor / not a number. ValueError: dtype, shape, range, device. UnsupportedError: correct, but outside
what the Hopper kernels do; it names the way out (``backend="torch"``). All are raised before any launch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from .reference.definition import accumulation_dtype, layer_sizes
from .reference.vectorised import TreeParams

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
BACKENDS = ("auto", "torch")
REDUCTIONS = ("mean", "sum", "none")
# What a caller says, and what the op is told.
SAVE_SELECTION = {True: "always", False: "never", "auto": "auto"}
MAX_INT32 = 2**31 - 1
MAX_POWER = 2**30  # of compression_rate and top_k: far beyond use, and no product of sizes overflows
MAX_FLOAT64 = int(sys.float_info.max)


class UnsupportedError(RuntimeError):
    """The call is valid, but the Hopper kernels do not cover it; ``backend="torch"`` does."""


def _fail(op: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"{op}: {rule}, got {value}")


# ------------------------------------------------------------------------------------------------ Python-level types


def tensor(op: str, name: str, value: Any) -> None:
    """A plain tensor: neither nested nor inside a torch.func transform, and without a forward-mode tangent."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise ValueError(f"{op}: {name} must be a dense (strided) tensor, got a nested one")
    if torch.compiler.is_compiling():
        return
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(value) or functorch.is_gradtrackingtensor(value):
        raise RuntimeError(
            f"{op}: {name} is inside a torch.func transform (vmap, grad, jvp), which is not supported: "
            "the batch dimension takes the place of vmap, torch.autograd gives gradients"
        )
    if torch.autograd.forward_ad.unpack_dual(value).tangent is not None:
        raise RuntimeError(f"{op}: {name} carries a forward-mode tangent; only reverse-mode gradients are supported")


def integer(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int{' or None' if optional else ''}, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _fail(op, f"{name} must fit in 64 bits", value)


def number(op: str, name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number{' or None' if optional else ''}, got {value!r}")
    if isinstance(value, int) and abs(value) > MAX_FLOAT64:
        _fail(op, f"{name} must be finite in float64", f"an int of {value.bit_length()} bits")


def boolean(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def process_group(op: str, name: str, value: Any) -> None:
    if value is None:
        return
    if not torch.distributed.is_available() or not isinstance(value, torch.distributed.ProcessGroup):
        raise TypeError(f"{op}: {name} must be a torch.distributed.ProcessGroup that this rank is in, got {value!r}")


def backend_name(op: str, value: Any) -> None:
    if not isinstance(value, str) or value not in BACKENDS:
        raise ValueError(f"{op}: backend must be one of {', '.join(map(repr, BACKENDS))}, got {value!r}")


def save_selection(op: str, value: Any) -> None:
    # 1 == True: an int is no answer to this question.
    if not isinstance(value, (bool, str)) or value not in SAVE_SELECTION:
        _fail(op, f"save_selection must be one of {', '.join(map(repr, SAVE_SELECTION))}", repr(value))


def save_mode(op: str, value: str) -> None:
    if value not in SAVE_SELECTION.values():
        _fail(op, f"save_selection must be one of {', '.join(map(repr, SAVE_SELECTION.values()))}", repr(value))


# ----------------------------------------------------------------------------------------------------- shared pieces


def _shape(op: str, name: str, x: Tensor, dims: Sequence[str]) -> None:
    if x.dim() != len(dims):
        _fail(op, f"{name} must have {len(dims)} dimensions [{', '.join(dims)}]", f"shape {tuple(x.shape)}")


def _strided(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.layout != torch.strided:
            _fail(op, f"{name} must be a dense (strided) tensor", x.layout)


def _same_device(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.device != reference.device:
            _fail(op, f"{name} must be on the device of {first} ({reference.device})", x.device)


def _float_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        _fail(op, f"{name} must be float16, bfloat16, float32 or float64", x.dtype)


def _same_dtype(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.dtype != reference.dtype:
            _fail(op, f"{name} must have the dtype of {first} ({reference.dtype})", x.dtype)


def _size(op: str, what: str, value: int, least: int = 1, most: int | None = None) -> None:
    if value < least:
        _fail(op, f"{what} must be at least {least}", value)
    if most is not None and value > most:
        _fail(op, f"{what} must be at most {most}", value)


def _equal(op: str, what: str, value: int, rule: str, expected: int) -> None:
    if value != expected:
        _fail(op, f"{what} must equal {rule} ({expected})", value)


def _power_of_two(op: str, name: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        _fail(op, f"{name} must be a power of two, at least {least}", value)
    if value > MAX_POWER:
        _fail(op, f"{name} must be at most 2^30", value)


def _scale(op: str, name: str, value: float, dtype: torch.dtype) -> None:
    """Finite, and neither infinite nor lost in the accumulation dtype."""
    if not math.isfinite(value):
        _fail(op, f"{name} must be finite", value)
    acc = torch.finfo(accumulation_dtype(dtype))
    if abs(value) > acc.max or 0 < abs(value) < acc.tiny:
        _fail(op, f"{name} must be 0 or of a magnitude from {acc.tiny:.3g} to {acc.max:.3g} for {dtype}", value)


# ------------------------------------------------------------------------------------------------------------ tree


def _tree_numbers(op: str, compression_rate: int, max_top_nodes: int) -> None:
    _power_of_two(op, "compression_rate", compression_rate, 2)
    _size(op, "max_top_nodes", max_top_nodes)


def tree_pool(k: Tensor, v: Tensor, *, compression_rate: int, max_top_nodes: int, backend: str) -> list[int]:
    """Rules of ``htree_cuda::tree_pool``; returns the layer sizes, bottom first."""
    op = "tree_pool"
    backend_name(op, backend)
    _key_value(op, k, v)
    _tree_numbers(op, compression_rate, max_top_nodes)
    return layer_sizes(k.shape[1], compression_rate, max_top_nodes)


def _key_value(op: str, k: Tensor, v: Tensor) -> None:
    _strided(op, k=k, v=v)
    _shape(op, "k", k, ("B", "T", "H_kv", "K"))
    _shape(op, "v", v, ("B", "T", "H_kv", "V"))
    _float_dtype(op, "k", k)
    _same_dtype(op, "k", k, v=v)
    _same_device(op, "k", k, v=v)
    _size(op, "T (dimension 1 of k)", k.shape[1], 1, MAX_INT32)
    _size(op, "H_kv (dimension 2 of k)", k.shape[2])
    _size(op, "K (dimension 3 of k)", k.shape[3])
    _size(op, "V (dimension 3 of v)", v.shape[3])
    _equal(op, "dimension 0 of v", v.shape[0], "B of k", k.shape[0])
    _equal(op, "dimension 1 of v", v.shape[1], "T of k", k.shape[1])
    _equal(op, "dimension 2 of v", v.shape[2], "H_kv of k", k.shape[2])


def _even(op: str, what: str, head_dim: int) -> None:
    if head_dim % 2:
        _fail(op, f"{what} must be even: RoPE turns pairs", head_dim)


def tree_options(
    op: str,
    *,
    dtype: torch.dtype,
    head_dim: int,
    compression_rate: int,
    top_k_per_layer: int,
    max_top_nodes: int | None,
    scale: float | None,
    rope_base: float,
) -> tuple[int, float]:
    """Rules of the numbers that belong to no tensor; returns (max_top_nodes, scale) with their defaults resolved."""
    _power_of_two(op, "compression_rate", compression_rate, 2)
    _power_of_two(op, "top_k_per_layer", top_k_per_layer, 1)
    if max_top_nodes is None:
        max_top_nodes = top_k_per_layer * compression_rate
    elif not top_k_per_layer <= max_top_nodes <= top_k_per_layer * compression_rate:
        low, high = top_k_per_layer, top_k_per_layer * compression_rate
        _fail(op, f"max_top_nodes must lie in top_k .. top_k * compression_rate ({low} .. {high})", max_top_nodes)
    if scale is None:
        scale = float(head_dim) ** -0.5
    else:
        _scale(op, "scale", scale, dtype)
    if not (math.isfinite(rope_base) and rope_base > 0):
        _fail(op, "rope_base must be finite and greater than 0", rope_base)
    return max_top_nodes, scale


def tree_option_types(op: str, options: dict[str, Any]) -> None:
    """Python types of `forward`'s options that are no tensors and no return flags."""
    integer(op, "compression_rate", options["compression_rate"])
    integer(op, "top_k_per_layer", options["top_k_per_layer"])
    integer(op, "max_top_nodes", options["max_top_nodes"], optional=True)
    number(op, "scale", options["scale"], optional=True)
    number(op, "rope_base", options["rope_base"])
    boolean(op, "strict_causal", options["strict_causal"])
    backend_name(op, options["backend"])
    if options["deterministic"] is not None:
        boolean(op, "deterministic", options["deterministic"])
    save_selection(op, options["save_selection"])


def attention_module(
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int | None,
    v_head_dim: int | None,
    dropout: float,
    dtype: torch.dtype,
    flags: dict[str, bool],
    options: dict[str, Any],
) -> tuple[int, int]:
    """Rules of ``HTreeAttention``'s arguments; returns (head_dim, v_head_dim) with their defaults resolved."""
    op = "HTreeAttention"
    for name, value in (("d_model", d_model), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
        integer(op, name, value)
        _size(op, name, value)
    if n_heads % n_kv_heads:
        _fail(op, f"n_heads must be a multiple of n_kv_heads ({n_kv_heads})", n_heads)
    integer(op, "head_dim", head_dim, optional=True)
    integer(op, "v_head_dim", v_head_dim, optional=True)
    if head_dim is None:
        if d_model % n_heads:
            _fail(op, f"d_model must be a multiple of n_heads ({n_heads}) where head_dim is not given", d_model)
        head_dim = d_model // n_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    _size(op, "head_dim", head_dim)
    _size(op, "v_head_dim", v_head_dim)
    _even(op, "head_dim", head_dim)
    for name, flag in flags.items():
        boolean(op, name, flag)
    number(op, "dropout", dropout)
    if dropout != 0:
        _fail(op, "dropout must be 0: attention probabilities are never stored, so none can be dropped", dropout)
    if dtype not in FLOAT_DTYPES:
        _fail(op, "dtype must be float16, bfloat16, float32 or float64", dtype)
    tree_option_types(op, options)
    tree = ("compression_rate", "top_k_per_layer", "max_top_nodes", "scale", "rope_base")
    tree_options(op, dtype=dtype, head_dim=head_dim, **{name: options[name] for name in tree})
    return head_dim, v_head_dim


def attention_module_input(
    x: Tensor, past: tuple[Tensor, Tensor] | None, *, d_model: int, n_kv_heads: int, head_dim: int, v_head_dim: int
) -> None:
    """Rules of what ``HTreeAttention`` is called with; the rest is found by ``htree_cuda::forward``."""
    op = "HTreeAttention"
    tensor(op, "x", x)
    _shape(op, "x", x, ("B", "T_q", "d_model"))
    _equal(op, "dimension 2 of x", x.shape[2], "d_model", d_model)
    if past is None:
        return
    if not isinstance(past, (tuple, list)) or len(past) != 2:
        raise TypeError(f"{op}: past must be a pair (k, v) of tensors or None, got {type(past).__name__}")
    for name, part, dim in (("k of past", past[0], head_dim), ("v of past", past[1], v_head_dim)):
        tensor(op, name, part)
        _shape(op, name, part, ("B", "T", "n_kv_heads", "head_dim" if name[0] == "k" else "v_head_dim"))
        _equal(op, f"dimension 0 of {name}", part.shape[0], "B of x", x.shape[0])
        _equal(op, f"dimension 2 of {name}", part.shape[2], "n_kv_heads", n_kv_heads)
        _equal(op, f"dimension 3 of {name}", part.shape[3], "the head dimension", dim)
        _same_device(op, "x", x, **{name: part})
    _equal(op, "dimension 1 of v of past", past[1].shape[1], "T of k of past", past[0].shape[1])


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
    rope_base: float,
    strict_causal: bool,
    backend: str,
    op: str = "forward",
) -> TreeParams:
    """Rules of ``htree_cuda::forward`` (and its backward); returns the numbers with every default resolved."""
    backend_name(op, backend)
    _strided(op, q=q)
    _shape(op, "q", q, ("B", "T_q", "H", "K"))
    _float_dtype(op, "q", q)
    _key_value(op, k, v)
    _same_dtype(op, "q", q, k=k)
    _same_device(op, "q", q, k=k)
    B, T_q, H, K = q.shape
    T, H_kv = k.shape[1], k.shape[2]
    _equal(op, "dimension 0 of k", k.shape[0], "B of q", B)
    _equal(op, "dimension 3 of k", k.shape[3], "K of q", K)
    _even(op, "K (dimension 3 of q)", K)
    if H_kv > H or H % H_kv:
        _fail(op, f"H (dimension 2 of q) must be a positive multiple of H_kv ({H_kv})", H)
    if T_q > T:
        _fail(op, f"T_q (dimension 1 of q) must be at most T ({T})", T_q)
    if q_start is None:
        q_start = T - T_q
    elif not 0 <= q_start <= T - T_q:
        _fail(op, f"q_start must lie in 0 .. T - T_q ({T - T_q})", q_start)
    max_top_nodes, scale = tree_options(
        op, dtype=q.dtype, head_dim=K, compression_rate=compression_rate, top_k_per_layer=top_k_per_layer,
        max_top_nodes=max_top_nodes, scale=scale, rope_base=rope_base,
    )  # fmt: skip
    return TreeParams(q_start, compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, strict_causal)


def backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, params
) -> None:
    """Rules of ``htree_cuda::backward`` beyond the forward's: shapes, dtypes and devices of what forward returned."""
    op = "backward"
    B, T_q, H, _ = q.shape
    layers = len(layer_sizes(k.shape[1], params.compression_rate, params.max_top_nodes))
    acc = accumulation_dtype(q.dtype)
    _returned(
        op, q,
        dout=(dout, (B, T_q, H, v.shape[3]), q.dtype), out=(out, (B, T_q, H, v.shape[3]), q.dtype),
        dlse=(dlse, (B, T_q, H), acc), lse=(lse, (B, T_q, H), acc),
        selection=(selection, (layers - 1, B, T_q, k.shape[2], params.top_k), torch.int32),
    )  # fmt: skip


def _returned(op: str, q: Tensor, **tensors: tuple[Tensor, tuple[int, ...], torch.dtype]) -> None:
    """What a forward op returned, or the gradient of it: the shape and dtype that it had, on the device of q."""
    for name, (x, shape, dtype) in tensors.items():
        if tuple(x.shape) != shape:
            _fail(op, f"{name} must have the shape {shape}", tuple(x.shape))
        if x.dtype != dtype:
            _fail(op, f"{name} must be {dtype}", x.dtype)
    _same_device(op, "q", q, **{name: x for name, (x, _, _) in tensors.items()})


# ------------------------------------------------------------------------------------- attention over an index list


@dataclass(frozen=True)
class SparseParams:
    """One call of attn_dist or sparse_attention, every default resolved; q_start holds B numbers or is None (no causal
    rule)."""

    batched: bool
    sm_scale: float
    q_start: list[int] | None
    k_stride: int
    lse_base: float


def _batched(op: str, name: str, x: Tensor, dims: tuple[str, ...]) -> bool:
    """Whether x has a leading batch dimension; it decides for every other tensor of the call."""
    if x.dim() not in (len(dims), len(dims) + 1):
        plain = ", ".join(dims)
        _fail(op, f"{name} must have the dimensions [{plain}] or [B, {plain}]", f"shape {tuple(x.shape)}")
    return x.dim() == len(dims) + 1


def _batch_sizes(op: str, first: str, reference: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        _equal(op, f"dimension 0 of {name}", x.shape[0], f"B of {first}", reference.shape[0])


def _index_list(
    op: str, first: str, reference: Tensor, s_q: int, batched: bool, indices: Tensor, topk_length: Tensor | None
) -> None:
    """Rules of indices and topk_length for the s_q queries of `reference`, the tensor named `first`."""
    tensors = {"indices": indices} if topk_length is None else {"indices": indices, "topk_length": topk_length}
    batch = ("B",) if batched else ()
    _strided(op, **tensors)
    _shape(op, "indices", indices, (*batch, "s_q", "h_kv", "topk"))
    if topk_length is not None:
        _shape(op, "topk_length", topk_length, (*batch, "s_q"))
    for name, x in tensors.items():
        if x.dtype != torch.int32:
            _fail(op, f"{name} must be int32", x.dtype)
    _same_device(op, first, reference, **tensors)
    if batched:
        _batch_sizes(op, first, reference, **tensors)
    _equal(op, "h_kv of indices", indices.shape[-2], "1 (multi-query attention)", 1)
    _equal(op, "s_q of indices", indices.shape[-3], f"s_q of {first}", s_q)
    if topk_length is not None:
        _equal(op, "s_q of topk_length", topk_length.shape[-1], f"s_q of {first}", s_q)


def _slot_numbers(
    op: str, s_q: int, s_kv: int, B: int | None, q_start: Sequence[int] | None, k_stride: int
) -> list[int] | None:
    """Rules of the numbers that decide which slots are valid; B is None without a batch. Returns the starts."""
    _size(op, "s_kv", s_kv, 0, MAX_INT32)
    _size(op, "s_q", s_q, 0, MAX_INT32)
    _size(op, "k_stride", k_stride)
    if q_start is None:
        return None
    if len(q_start) != (1 if B is None else B):
        rule = "q_start must be one int" if B is None else f"q_start must be one int or a list of B ({B}) ints"
        _fail(op, rule, f"{len(q_start)} of them")
    for start in q_start:
        if not 0 <= start <= MAX_INT32 - s_q:
            _fail(op, f"q_start must lie in 0 .. 2^31 - 1 - s_q ({MAX_INT32 - s_q})", start)
    return list(q_start)


def _accumulated(op: str, name: str, x: Tensor, q: Tensor) -> None:
    wanted = accumulation_dtype(q.dtype)
    if x.dtype != wanted:
        _fail(op, f"{name} must be {str(wanted).removeprefix('torch.')} where q is {q.dtype}", x.dtype)


def _sparse(
    op: str,
    q: Tensor,
    k_name: str,
    k: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    *,
    sm_scale: float | None,
    q_start: Sequence[int] | None,
    k_stride: int,
    lse_base: float,
    backend: str,
) -> SparseParams:
    """What attn_dist and sparse_attention demand alike; `k_name` is what the call names its keys."""
    backend_name(op, backend)
    _strided(op, **{"q": q, k_name: k})
    batched = _batched(op, "q", q, ("s_q", "h_q", "d_qk"))
    _shape(op, k_name, k, (*(("B",) if batched else ()), "s_kv", "h_kv", "d_qk"))
    _float_dtype(op, "q", q)
    _same_dtype(op, "q", q, **{k_name: k})
    _same_device(op, "q", q, **{k_name: k})
    if batched:
        _batch_sizes(op, "q", q, **{k_name: k})
    s_q, h_q, d_qk = q.shape[-3:]
    _size(op, "h_q", h_q)
    _size(op, "d_qk", d_qk)
    _equal(op, f"h_kv of {k_name}", k.shape[-2], "1 (multi-query attention)", 1)
    _equal(op, f"d_qk of {k_name}", k.shape[-1], "d_qk of q", d_qk)
    _index_list(op, "q", q, s_q, batched, indices, topk_length)
    starts = _slot_numbers(op, s_q, k.shape[-3], q.shape[0] if batched else None, q_start, k_stride)
    if sm_scale is None:
        sm_scale = float(d_qk) ** -0.5
    else:
        _scale(op, "sm_scale", sm_scale, q.dtype)
    if lse_base not in (2.0, math.e):
        _fail(op, "lse_base must be 2 or math.e", lse_base)
    return SparseParams(batched, sm_scale, starts, k_stride, lse_base)


def attn_dist(
    q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, topk_length: Tensor | None, **options: Any
) -> SparseParams:
    """Rules of ``htree_cuda::attn_dist``; options as `_sparse` names them."""
    op = "attn_dist"
    params = _sparse(op, q, "k", k, indices, topk_length, **options)
    _strided(op, lse=lse)
    _shape(op, "lse", lse, (*(("B",) if params.batched else ()), "s_q", "h_q"))
    _accumulated(op, "lse", lse, q)
    _same_device(op, "q", q, lse=lse)
    if params.batched:
        _batch_sizes(op, "q", q, lse=lse)
    _equal(op, "s_q of lse", lse.shape[-2], "s_q of q", q.shape[-3])
    _equal(op, "h_q of lse", lse.shape[-1], "h_q of q", q.shape[-2])
    return params


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    *,
    d_v: int,
    op: str = "sparse_attention",
    **options: Any,
) -> SparseParams:
    """Rules of ``htree_cuda::sparse_attention`` (and its backward); options as `_sparse` names them."""
    params = _sparse(op, q, "kv", kv, indices, topk_length, **options)
    if not 1 <= d_v <= q.shape[-1]:
        _fail(op, f"d_v must lie in 1 .. d_qk ({q.shape[-1]})", d_v)
    if attn_sink is not None:
        _strided(op, attn_sink=attn_sink)
        _shape(op, "attn_sink", attn_sink, ("h_q",))
        _accumulated(op, "attn_sink", attn_sink, q)
        _same_device(op, "q", q, attn_sink=attn_sink)
        _equal(op, "h_q of attn_sink", attn_sink.shape[0], "h_q of q", q.shape[-2])
    return params


def sparse_attention_backward(dout: Tensor, dlse: Tensor, q: Tensor, out: Tensor, lse: Tensor, *, d_v: int) -> None:
    """Rules of ``htree_cuda::sparse_attention_backward`` beyond the forward's."""
    rows = tuple(q.shape[:-1])
    acc = accumulation_dtype(q.dtype)
    _returned(
        "sparse_attention_backward", q,
        dout=(dout, (*rows, d_v), q.dtype), out=(out, (*rows, d_v), q.dtype),
        dlse=(dlse, rows, acc), lse=(lse, rows, acc),
    )  # fmt: skip


def normalize_attn_dist(attn_dist: Tensor) -> None:
    """Rules of `htree_cuda.normalize_attn_dist` beyond the Python types."""
    op = "normalize_attn_dist"
    _strided(op, attn_dist=attn_dist)
    _batched(op, "attn_dist", attn_dist, ("G", "s_q", "topk"))
    _distribution_dtype(op, attn_dist)


def _distribution_dtype(op: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        _fail(op, "attn_dist must be float32 or float64", x.dtype)


def indexer_loss(
    logits: Tensor,
    attn_dist: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    *,
    s_kv: int,
    q_start: Sequence[int] | None,
    k_stride: int,
    reduction: str,
) -> list[int] | None:
    """Rules of `htree_cuda.indexer_loss`; returns the starts, one for each batch element."""
    op = "indexer_loss"
    _strided(op, logits=logits, attn_dist=attn_dist)
    batched = _batched(op, "logits", logits, ("s_q", "topk"))
    _float_dtype(op, "logits", logits)
    _distribution_dtype(op, attn_dist)
    _same_device(op, "logits", logits, attn_dist=attn_dist)
    shape = tuple(logits.shape)
    summed = attn_dist.dim() == logits.dim()
    if tuple(attn_dist.shape if summed else (*attn_dist.shape[:-3], *attn_dist.shape[-2:])) != shape:
        with_groups = f"({''.join(f'{n}, ' for n in shape[:-2])}G, {shape[-2]}, {shape[-1]})"
        _fail(op, f"attn_dist must have the shape {shape} of logits, or {with_groups}", tuple(attn_dist.shape))
    _index_list(op, "logits", logits, shape[-2], batched, indices, topk_length)
    _equal(op, "topk of indices", indices.shape[-1], "topk of logits", shape[-1])
    if reduction not in REDUCTIONS:
        _fail(op, f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}", repr(reduction))
    return _slot_numbers(op, shape[-2], s_kv, shape[0] if batched else None, q_start, k_stride)


# --------------------------------------------------------------------------------------- what the kernels support


def _way_out(op: str, reason: str) -> NoReturn:
    raise UnsupportedError(f'{op}: {reason}; pass backend="torch" to run it with PyTorch operations')


def kernel_device(op: str, x: Tensor) -> None:
    """x is not on the CPU and backend is "auto": kernels or an error, never something else."""
    from . import kernels

    if x.device.type != "cuda":
        _way_out(op, f"no kernels exist for device type {x.device.type!r}")
    if not kernels.built():
        _way_out(op, f"this installation has no Hopper kernels ({kernels.why_not_built()})")
    supported, reason = kernels.device_supported(x.device.index)
    if not supported:
        _way_out(op, f"the kernels do not run on {x.device}: {reason}")


def _kernel_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in KERNEL_DTYPES:
        _way_out(op, f"the kernels take float16 or bfloat16, {name} is {x.dtype}")


def _contiguous_rows(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            _way_out(op, f"the kernels need the last dimension of {name} contiguous, its stride is {x.stride(-1)}")


KERNEL_HEAD_DIMS = (64, 128)
KERNEL_MAX_G = 16
KERNEL_TOP_K = (16, 512)
KERNEL_COMPRESSION_RATE = 16


def forward_kernel(q: Tensor, k: Tensor, v: Tensor, params: TreeParams, op: str = "forward") -> None:
    """What the htree kernels, forward and backward, support of a valid call."""
    _kernel_dtype(op, "q", q)
    _contiguous_rows(op, q=q, k=k, v=v)
    for name, dim in (("K (dimension 3 of q)", q.shape[3]), ("V (dimension 3 of v)", v.shape[3])):
        if dim not in KERNEL_HEAD_DIMS:
            _way_out(op, f"the kernels need {name} to be 64 or 128, got {dim}")
    G = q.shape[2] // k.shape[2]
    if G > KERNEL_MAX_G:
        _way_out(op, f"the kernels need at most {KERNEL_MAX_G} query heads for each KV head (H / H_kv), got {G}")
    if params.compression_rate != KERNEL_COMPRESSION_RATE:
        _way_out(op, f"the kernels need compression_rate {KERNEL_COMPRESSION_RATE}, got {params.compression_rate}")
    low, high = KERNEL_TOP_K
    if not low <= params.top_k <= high:
        _way_out(op, f"the kernels need top_k_per_layer in {low} .. {high}, got {params.top_k}")
    _kernel_scale(op, "scale", params.scale)
    most = params.top_k * KERNEL_COMPRESSION_RATE
    if params.max_top_nodes != most:
        _way_out(op, f"the kernels need max_top_nodes = top_k * compression_rate ({most}), got {params.max_top_nodes}")


def backward_kernel(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, params: TreeParams
) -> None:
    """What the htree backward kernels support of a valid call: what the forward's do, with results as it wrote them."""
    op = "backward"
    forward_kernel(q, k, v, params, op)
    for name, x in (("out", out), ("lse", lse), ("selection", selection)):
        if not x.is_contiguous():
            _way_out(op, f"the kernels need {name} contiguous, its strides are {tuple(x.stride())}")


def _kernel_scale(op: str, name: str, value: float) -> None:
    """The kernels compute in base 2: the scale is multiplied by log2(e), in float32."""
    if abs(value) * math.log2(math.e) > torch.finfo(torch.float32).max:
        _way_out(op, f"the kernels need |{name}| * log2(e) finite in float32, got {value}")


def tree_pool_kernel(k: Tensor, v: Tensor) -> None:
    _kernel_dtype("tree_pool", "k", k)
    _contiguous_rows("tree_pool", k=k, v=v)


def no_kernel(op: str) -> NoReturn:
    """An op that has no kernel: its CUDA calls with backend "auto" end here."""
    _way_out(op, "there is no kernel for it")


ATTN_DIST_HEAD_DIMS = (576, 512, 192, 128)
SPARSE_ATTENTION_HEAD_DIMS = (576, 512)
SPARSE_ATTENTION_D_V = 512


def _list_kernel(
    op: str, q: Tensor, rows: dict[str, Tensor], others: dict[str, Tensor | None], sm_scale: float, topk: int, dims
) -> None:
    """What both kernels over index lists support of a valid call (tensors batched); `rows`: q and what is gathered."""
    _kernel_scale(op, "sm_scale", sm_scale)
    for name, size, most in (("h_q", q.shape[2], 2**24), ("topk", topk, 2**30)):
        if size > most:
            _way_out(op, f"the kernel needs {name} to be at most {most}, got {size}")
    _kernel_dtype(op, "q", q)
    if q.shape[3] not in dims:
        _way_out(op, f"the kernel needs d_qk to be one of {', '.join(map(str, dims))}, got {q.shape[3]}")
    _contiguous_rows(op, **rows)
    for name, x in rows.items():
        # TMA (q) and 16-byte asynchronous copies (keys) fault on anything else.
        if x.numel() and x.data_ptr() % 16:
            _way_out(op, f"the kernel needs {name} to begin at a multiple of 16 bytes, it begins at {x.data_ptr()}")
        for dim in range(3):
            if x.shape[dim] > 1 and x.stride(dim) * x.element_size() % 16:
                _way_out(
                    op,
                    f"the kernel needs the strides of {name} to be multiples of 16 bytes, "
                    f"that of dimension {dim - 4} is {x.stride(dim) * x.element_size()} bytes",
                )
    if q.shape[2] > 1 and q.stride(2) == 0:
        _way_out(op, "the kernel needs the heads of q apart: its stride of dimension -2 is 0 (heads expanded from one)")
    for name, x in others.items():
        if x is not None and not x.is_contiguous():
            _way_out(op, f"the kernel needs {name} contiguous, its strides are {tuple(x.stride())}")


def attn_dist_kernel(
    q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, topk_length: Tensor | None, sm_scale: float
) -> None:
    """What the attn_dist kernel supports of a valid call (all tensors batched)."""
    others = {"indices": indices, "lse": lse, "topk_length": topk_length}
    _list_kernel("attn_dist", q, {"q": q, "k": k}, others, sm_scale, indices.shape[3], ATTN_DIST_HEAD_DIMS)


def sparse_attention_kernel(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    sm_scale: float,
    d_v: int,
) -> None:
    """What the sparse_attention kernel supports of a valid call (all tensors batched)."""
    op = "sparse_attention"
    others = {"indices": indices, "topk_length": topk_length, "attn_sink": attn_sink}
    _list_kernel(op, q, {"q": q, "kv": kv}, others, sm_scale, indices.shape[3], SPARSE_ATTENTION_HEAD_DIMS)
    if d_v != SPARSE_ATTENTION_D_V:
        _way_out(op, f"the kernel needs d_v to be {SPARSE_ATTENTION_D_V}, got {d_v}")


def sparse_attention_gradients(**requires_grad: bool) -> NoReturn:
    """A CUDA call that needs gradients: nothing falls back silently."""
    names = ", ".join(name for name, needed in requires_grad.items() if needed)
    why = f"gradients are wanted for {names} (under torch.no_grad() the forward kernel runs)"
    _way_out("sparse_attention", f"there is no backward kernel, and {why}")
