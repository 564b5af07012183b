"""Rules of `TreeCache`, its ops and `forward_cached`, and what the Hopper kernels do of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_enabled
from ..layout import TreeLayout, default_layers
from ..params import CachedParams
from . import rotation, support
from .common import (
    FLOAT_DTYPES,
    MAX_INT32,
    backend_name,
    boolean,
    dimensions,
    equal,
    fail,
    float_dtype,
    integer,
    number,
    power_of_two,
    same_device,
    same_dtype,
    size,
    strided,
    tensor,
)
from .tree import even, tree_options

PAGE_MULTIPLE = 256
FEW_QUERIES = 8  # of a cached call: up to here a kernel of its own, beyond it the forward's


def new_cache(
    *,
    batch_size: int,
    max_tokens: int,
    n_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None,
    compression_rate: int,
    dtype: Any,
    num_layers: int | None,
    page_size: int | None,
    num_pages: int | None,
    block_table: Tensor | None,
) -> tuple[TreeLayout, dict[str, int]]:
    """Rules of ``TreeCache``'s arguments; returns the layout and the sizes by name (num_pages 0 without pages)."""
    op = "TreeCache"
    sizes = {"batch_size": batch_size, "max_tokens": max_tokens, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    sizes = {name: integer(op, name, value) for name, value in sizes.items()}
    for name, value in sizes.items():
        size(op, name, value, 0 if name == "batch_size" else 1, MAX_INT32)
    max_tokens, compression_rate = sizes["max_tokens"], integer(op, "compression_rate", compression_rate)
    power_of_two(op, "compression_rate", compression_rate, 2)
    even(op, "head_dim", sizes["head_dim"])
    v_head_dim = integer(op, "v_head_dim", v_head_dim, optional=True)
    sizes["v_head_dim"] = sizes["head_dim"] if v_head_dim is None else v_head_dim
    size(op, "v_head_dim", sizes["v_head_dim"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype must be a torch.dtype, got {dtype!r}")
    if dtype not in FLOAT_DTYPES:
        fail(op, "dtype must be float16, bfloat16, float32 or float64", dtype)
    num_layers = integer(op, "num_layers", num_layers, optional=True)
    if num_layers is None:
        num_layers = default_layers(max_tokens, compression_rate)
    size(op, "num_layers", num_layers, 1, 32)
    page_size = integer(op, "page_size", page_size, optional=True)
    num_pages = integer(op, "num_pages", num_pages, optional=True)
    if page_size is None:
        for name, value in (("num_pages", num_pages), ("block_table", block_table)):
            if value is not None:
                fail(op, f"{name} needs page_size", "page_size None")
        return TreeLayout(compression_rate, max_tokens, num_layers), {**sizes, "num_pages": 0}
    if page_size < PAGE_MULTIPLE or page_size % PAGE_MULTIPLE:
        fail(op, f"page_size must be a positive multiple of {PAGE_MULTIPLE} tokens", page_size)
    layout = TreeLayout(compression_rate, max_tokens, num_layers, page_size)
    if block_table is not None:
        tensor(op, "block_table", block_table)
        dimensions(op, "block_table", block_table, ("B", "max_pages"))
        if block_table.dtype != torch.int32:
            fail(op, "block_table must be int32", block_table.dtype)
        equal(op, "dimension 0 of block_table", block_table.shape[0], "batch_size", sizes["batch_size"])
        if block_table.shape[1] < layout.max_pages:
            rule = f"block_table needs max_tokens / page_size ({layout.max_pages}) columns"
            fail(op, rule, block_table.shape[1])
        if num_pages is None:
            fail(op, "num_pages must be given with a block_table of the caller", None)
    num_pages = max(1, sizes["batch_size"]) * layout.max_pages if num_pages is None else num_pages
    size(op, "num_pages", num_pages, 1, MAX_INT32)
    return layout, {**sizes, "num_pages": num_pages}


def _int32(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype != torch.int32:
            fail(op, f"{name} must be int32", x.dtype)


def _cache_tensors(op: str, first: str, x: Tensor, B: int, cache, layout: TreeLayout) -> None:
    """The tensors of a cache, as an op that is called by its name gets them; x is the call's own tensor `first`."""
    num, H_kv, K, V = cache.k.shape[0], cache.k.shape[1], cache.k.shape[3], cache.v.shape[3]
    rows = layout.page_rows if layout.page_size else layout.sequence_rows
    upper = layout.sequence_rows if layout.page_size else 0
    if not layout.page_size:
        equal(op, "dimension 0 of k of the cache", num, f"B of {first}", B)
    for name, part, shape in (
        ("k", cache.k, (num, H_kv, rows, K)), ("v", cache.v, (num, H_kv, rows, V)),
        ("k_upper", cache.k_upper, (B, H_kv, upper, K)), ("v_upper", cache.v_upper, (B, H_kv, upper, V)),
        ("lengths", cache.lengths, (B,)), ("overflowed", cache.overflowed, (B,)), ("reserved", cache.reserved, (B,)),
    ):  # fmt: skip
        if tuple(part.shape) != shape:
            fail(op, f"{name} of the cache must have the shape {shape}", tuple(part.shape))
        if not part.is_contiguous():
            fail(op, f"{name} of the cache must be contiguous", f"strides {tuple(part.stride())}")
    _int32(op, lengths=cache.lengths, overflowed=cache.overflowed, reserved=cache.reserved)
    _int32(op, block_table=cache.block_table)
    same_dtype(op, first, x, **{"the cache": cache.k})
    same_dtype(op, "k of the cache", cache.k, v=cache.v, k_upper=cache.k_upper, v_upper=cache.v_upper)
    if any(part.device != x.device for part in cache):  # the names of all take longer than the question
        same_device(op, first, x, **{f"{name} of the cache": part for name, part in cache._asdict().items()})


def _seqused(op: str, name: str, seqused: Tensor | None, first: str, x: Tensor) -> None:
    if seqused is None:
        return
    dimensions(op, name, seqused, ("B",))
    _int32(op, **{name: seqused})
    equal(op, f"dimension 0 of {name}", seqused.shape[0], f"B of {first}", x.shape[0])
    same_device(op, first, x, **{name: seqused})


def append(k: Tensor, v: Tensor, seqused: Tensor | None, cache, layout: TreeLayout, backend: str) -> None:
    """Rules of ``htree_cuda::tree_append``."""
    op = "append"
    backend_name(op, backend)
    strided(op, k=k, v=v)
    dimensions(op, "k", k, ("B", "T_new", "H_kv", "K"))
    dimensions(op, "v", v, ("B", "T_new", "H_kv", "V"))
    float_dtype(op, "k", k)
    same_dtype(op, "k", k, v=v)
    same_device(op, "k", k, v=v)
    for i, what in enumerate(("B", "T_new", "H_kv")):
        equal(op, f"dimension {i} of v", v.shape[i], f"{what} of k", k.shape[i])
    size(op, "T_new (dimension 1 of k)", k.shape[1], 0, MAX_INT32)
    equal(op, "B (dimension 0 of k)", k.shape[0], "batch_size of the cache", cache.lengths.shape[0])
    equal(op, "H_kv (dimension 2 of k)", k.shape[2], "n_kv_heads of the cache", cache.k.shape[1])
    equal(op, "K (dimension 3 of k)", k.shape[3], "head_dim of the cache", cache.k.shape[3])
    equal(op, "V (dimension 3 of v)", v.shape[3], "v_head_dim of the cache", cache.v.shape[3])
    _cache_tensors(op, "k", k, k.shape[0], cache, layout)
    _seqused(op, "seqused", seqused, "k", k)


def append_kernel(k: Tensor, v: Tensor) -> None:
    """What the append kernels support of a valid call."""
    op = "append"
    support._kernel_dtype(op, "k", k)
    support._contiguous_rows(op, k=k, v=v)


def forward_cached(
    q: Tensor,
    seqused_q: Tensor | None,
    cache,
    layout: TreeLayout,
    rope_table: Tensor,
    attn_sink: Tensor | None,
    *,
    top_k_per_layer: int,
    max_top_nodes: int | None,
    scale: float | None,
    rope_base: float | None,
    rope_interleaved: bool,
    backend: str,
    rope_inv_freq: Tensor | None = None,
    rope_dim: int | None = None,
) -> CachedParams:
    """Rules of ``htree_cuda::forward_cached``; returns the numbers with every default resolved."""
    op = "forward_cached"
    backend_name(op, backend)
    strided(op, q=q)
    dimensions(op, "q", q, ("B", "T_q", "H", "K"))
    float_dtype(op, "q", q)
    B, T_q, H, K = q.shape
    H_kv = cache.k.shape[1]
    equal(op, "B (dimension 0 of q)", B, "batch_size of the cache", cache.lengths.shape[0])
    size(op, "T_q (dimension 1 of q)", T_q, 0, MAX_INT32)
    equal(op, "K (dimension 3 of q)", K, "head_dim of the cache", cache.k.shape[3])
    if H_kv > H or H % H_kv:
        fail(op, f"H (dimension 2 of q) must be a positive multiple of n_kv_heads of the cache ({H_kv})", H)
    _cache_tensors(op, "q", q, B, cache, layout)
    _seqused(op, "seqused_q", seqused_q, "q", q)
    max_top_nodes, scale = tree_options(
        op, dtype=q.dtype, head_dim=K, compression_rate=layout.compression_rate, top_k_per_layer=top_k_per_layer,
        max_top_nodes=max_top_nodes, scale=scale, rope_base=rope_base,
    )  # fmt: skip
    rope_dim = rotation.rotation(op, K, None, rope_base, rope_inv_freq, rope_dim)
    dimensions(op, "rope_table", rope_table, ("positions", "K/2", "2"))
    same_device(op, "q", q, rope_table=rope_table)
    equal(op, "dimension 1 of rope_table", rope_table.shape[1], "K / 2", K // 2)
    rotation.sink(op, q, attn_sink)
    top_layer(op, layout, max_top_nodes)
    return CachedParams(
        layout.compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, rope_dim, rope_interleaved,
        rope_inv_freq, attn_sink,
    )  # fmt: skip


def top_layer(op: str, layout: TreeLayout, max_top_nodes: int) -> None:
    """A query sees the highest layer whole."""
    top = -(-layout.max_tokens // layout.compression_rate ** (layout.num_layers - 1))
    if top > max_top_nodes:
        fail(
            op, f"max_top_nodes must be at least {top}, the nodes of the highest of the {layout.num_layers} layers "
            f"that the cache stores of {layout.max_tokens} tokens (more num_layers need fewer)", max_top_nodes,
        )  # fmt: skip


def forward_cached_kernel(q: Tensor, cache, params: CachedParams) -> None:
    """What the decoding kernels support of a valid call: what the forward's do, but for some rope_dim."""
    op = "forward_cached"
    support.forward(q, cache.k.transpose(1, 2), cache.v.transpose(1, 2), params, op)
    if params.rope_dim % 16 and not params.rope_interleaved and q.shape[1] <= FEW_QUERIES:
        support._way_out(op, f"the decode kernel needs rope_dim to be a multiple of 16, got {params.rope_dim}")


def module_cache(
    cache: Any, past: Any, return_kv: bool, *, x: Tensor, shape: dict[str, int], compression_rate: int,
    strict_causal: bool,
) -> None:  # fmt: skip
    """Rules of a call of ``HTreeAttention`` with a cache: of its own tokens x, and of the shape of its keys and
    values."""
    op = "HTreeAttention"
    if not hasattr(cache, "layout") or not hasattr(cache, "append"):
        raise TypeError(f"{op}: cache must be a htree_cuda.TreeCache or None, got {type(cache).__name__}")
    if past is not None or return_kv:
        fail(op, "cache takes the place of past and return_kv", "both")
    if not strict_causal:
        fail(op, "cache needs strict_causal=True: only complete nodes are stored", strict_causal)
    equal(op, "compression_rate of the cache", cache.layout.compression_rate, "the module's", compression_rate)
    equal(op, "batch_size of the cache", cache.batch_size, "B of x", x.shape[0])
    for name, value in shape.items():
        equal(op, f"{name} of the cache", getattr(cache, name), "the module's", value)
    same_device(op, "x", x, **{"the cache": cache.lengths})
    if not autocast_enabled(x.device.type) and cache.dtype != x.dtype:
        fail(op, f"the cache must have the dtype of x ({x.dtype})", cache.dtype)


def option_types(op: str, *, return_lse: bool, return_selection: bool, **tree: Any) -> dict[str, Any]:
    """Python types of `forward_cached`'s options that are no tensors; returns the numbers as the op takes them."""
    boolean(op, "return_lse", return_lse)
    boolean(op, "return_selection", return_selection)
    names = ("rope_base", "rope_inv_freq", "rope_dim", "rope_interleaved", "attn_sink", "softcap")
    return {
        "top_k_per_layer": integer(op, "top_k_per_layer", tree["top_k_per_layer"]),
        "max_top_nodes": integer(op, "max_top_nodes", tree["max_top_nodes"], optional=True),
        "scale": number(op, "scale", tree["scale"], optional=True),
        **rotation.option_types(op, **{name: tree[name] for name in names}),
    }


def no_gradient(op: str, *inputs: Tensor | None) -> None:
    """A cached call is no part of a graph of gradients; nothing in silence is cut out of one."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{op}: a cached call has no gradient; run it under torch.no_grad() or torch.inference_mode(), or train "
            "with htree_cuda.forward"
        )


def lengths(op: str, name: str, value: Any, batch_size: int | None, device: torch.device) -> Tensor | int | list[int]:
    """One int, B ints or a tensor [B], which has its values; without a batch_size of any length. Returns the tensor, or
    the ints as Python's: one where one was given, which needs no copy to the device."""
    if isinstance(value, Tensor):
        dimensions(op, name, value, ("B",))
        if value.dtype not in (torch.int32, torch.int64):
            fail(op, f"{name} must be int32 or int64", value.dtype)
        if batch_size is not None:
            equal(op, f"dimension 0 of {name}", value.shape[0], "batch_size of the cache", batch_size)
        if value.is_meta and device.type != "meta":
            fail(op, f"{name} must be on the device of the cache ({device})", value.device)
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return numbers(op, name, value, batch_size)
    value = integer(op, name, value)
    size(op, name, value, 0, MAX_INT32)
    return value


def values(op: str, name: str, x: Tensor, first: int, last: int) -> None:
    """HTREE_CUDA_CHECK=1: reads the numbers, which waits for the device, and checks them."""
    for value in x.tolist():
        if not first <= value <= last:
            fail(op, f"{name} must lie in {first} .. {last}", value)


def seqused_values(op: str, name: str, seqused: Tensor | None, rows: str, x: Tensor) -> None:
    """`values` of the numbers of rows that exist; what else is wrong with the tensors their op says."""
    if seqused is not None and seqused.dtype == torch.int32 and seqused.dim() == 1 and x.dim() > 1:
        for b, value in enumerate(seqused.tolist()):
            if not 0 <= value <= x.shape[1]:
                fail(op, f"{name}[{b}] must lie in 0 .. {rows} ({x.shape[1]})", value)


def numbers(op: str, name: str, value: Any, batch_size: int) -> list[int]:
    """One int or B ints, none of them negative, as B ints."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * batch_size
    values = [integer(op, name, x) for x in values]
    for x in values:
        size(op, name, x, 0, MAX_INT32)
    equal(op, f"the number of {name}", len(values), "batch_size of the cache", batch_size)
    return values


def state(state: Any, settings: dict[str, Any], tensors: dict[str, Tensor], *, counts_pages: bool) -> list[list[int]]:
    """Rules of what ``TreeCache.load_state_dict`` takes, all of them before anything is written: settings and tensors
    of this cache, and the pages of each sequence where the cache counts them, which it returns as Python's ints."""
    op = "load_state_dict"
    if not isinstance(state, Mapping):
        raise TypeError(f"{op}: the state must be a dict of state_dict of a TreeCache, got {type(state).__name__}")
    wanted = ["settings", *tensors, *(["pages"] if counts_pages else [])]
    if missing := [name for name in wanted if name not in state]:
        fail(op, "the state must be what state_dict of a TreeCache gave", f"none of {missing}")
    theirs = state["settings"]
    if not isinstance(theirs, Mapping):
        raise TypeError(f"{op}: settings of the state must be a dict, got {type(theirs).__name__}")
    if theirs != settings:
        differ = {name: (x, theirs.get(name)) for name, x in settings.items() if theirs.get(name) != x}
        fail(op, "settings must be those of this cache", f"(here, there) {differ}")
    for name, mine in tensors.items():
        tensor(op, f"{name} of the state", state[name])
        strided(op, **{f"{name} of the state": state[name]})
        if state[name].shape != mine.shape:
            fail(op, f"{name} of the state must have the shape {tuple(mine.shape)}", tuple(state[name].shape))
        if state[name].dtype != mine.dtype:
            fail(op, f"{name} of the state must be {mine.dtype}", state[name].dtype)
        if state[name].is_meta:
            fail(op, f"{name} of the state must have values", "a meta tensor")
    lengths = state["lengths"].tolist()
    for length in lengths:
        if not 0 <= length <= settings["max_tokens"]:
            fail(op, f"lengths of the state must lie in 0 .. max_tokens ({settings['max_tokens']})", length)
    pages = state.get("pages", [])
    if not counts_pages:
        if pages:
            fail(op, "the cache must count its pages, as the one of the state did", "a block_table of the caller")
        return []
    _listed(op, "pages", pages)
    if len(pages) != settings["batch_size"]:
        rule = f"pages of the state must be those of {settings['batch_size']} sequences"
        fail(op, rule, f"those of {len(pages)} (a cache with a block_table of the caller counts none)")
    most, tokens = tensors["block_table"].shape[1], settings["page_size"]
    for held in pages:
        _listed(op, "pages of a sequence", held)
    pages = [[integer(op, "a page of the state", page) for page in held] for held in pages]
    for row, (held, length) in enumerate(zip(pages, lengths)):
        for page in held:
            size(op, "every page of the state", page, 0, settings["num_pages"] - 1)
        if len(set(held)) != len(held):
            fail(op, "pages of a sequence of the state must differ from each other", held)
        if not -(-length // tokens) <= len(held) <= most:
            rule = f"sequence {row} of the state, of {length} tokens, must have at least {-(-length // tokens)} and at"
            fail(op, f"{rule} most {most} pages of {tokens}", len(held))
    return pages


def _listed(op: str, what: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{op}: {what} of the state must be a list, got {type(value).__name__}")


def row(op: str, value: Any, batch_size: int) -> int:
    """A sequence of the batch, by index."""
    value = integer(op, "row", value)
    if not 0 <= value < batch_size:
        fail(op, f"row must lie in 0 .. batch_size - 1 ({batch_size - 1})", value)
    return value


def rows(op: str, name: str, value: Any, batch_size: int) -> list[int]:
    """Sequences of the batch, by index."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    values = [integer(op, name, x) for x in values]
    for x in values:
        if not 0 <= x < batch_size:
            fail(op, f"{name} must lie in 0 .. batch_size - 1 ({batch_size - 1})", x)
    return values
