"""What the Hopper kernels do of what is valid; an UnsupportedError names the way out for the rest."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from ..params import TreeParams
from .common import UnsupportedError

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# The kernel family that an op needs; the other ops have no kernel, or are in every build.
FAMILIES = {
    "forward": {"htree"}, "backward": {"htree"}, "append": {"decode"}, "forward_cached": {"decode"},
    "attn_dist": {"dsa"}, "dense_indexer_loss": {"dsa"}, "dense_indexer_loss_backward": {"dsa"}, "dense_lse": {"dsa"},
    "sparse_attention": {"dsa"}, "sparse_attention_backward": {"dsa"},
    "indexer_logits": {"dsa"}, "indexer_logits_backward": {"dsa"}, "indexer_topk": {"dsa"}, "topk_indices": {"dsa"},
}  # fmt: skip


def _way_out(op: str, reason: str) -> NoReturn:
    raise UnsupportedError(f'{op}: {reason}; pass backend="torch" to run it with PyTorch operations')


def kernel_device(op: str, x: Tensor) -> None:
    """x is not on the CPU and backend is "auto": kernels or an error, never something else."""
    from .. import kernels

    if x.device.type != "cuda":
        _way_out(op, f"no kernels exist for device type {x.device.type!r}")
    if not kernels.built():
        _way_out(op, f"this installation has no Hopper kernels ({kernels.why_not_built()})")
    if needed := FAMILIES.get(op, set()) - set(kernels.families()):
        _way_out(
            op,
            f"this installation has the kernel families {', '.join(kernels.families())} and not {', '.join(needed)} "
            "(HTREE_CUDA_FAMILIES at build time)",
        )
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


def _heads(
    op: str, K: int, V: int, G: int, names: tuple[str, str] = ("K (dimension 3 of q)", "V (dimension 3 of v)"),
    ratio: str = "H / H_kv",
) -> None:  # fmt: skip
    """Head dimensions and group, by the names that the caller knows: each begins with a word that may stand alone."""
    from .. import kernels

    for name, dim in zip(names, (K, V), strict=True):
        if dim not in KERNEL_HEAD_DIMS:
            _way_out(op, f"the kernels need {name} to be 64 or 128, got {dim}")
    if K != V and not kernels.mixed_dims():
        k, v = (name.split()[0] for name in names)
        _way_out(
            op,
            f"the kernels of this installation need {k} = {v}, got {k} {K} and {v} {V} (those for {k} != {v} are "
            "built with HTREE_CUDA_MIXED_DIMS=1)",
        )
    if G > KERNEL_MAX_G:
        _way_out(op, f"the kernels need at most {KERNEL_MAX_G} query heads for each KV head ({ratio}), got {G}")


def module_heads(x: Tensor, head_dim: int, v_head_dim: int, G: int) -> None:
    """What the kernels support of the sizes of `HTreeAttention`, in its words. What torch.compile traces, and a device
    or an installation without kernels, the op judges."""
    if x.device.type == "cuda" and not torch.compiler.is_compiling():
        from .. import kernels

        if kernels.built():
            _heads("HTreeAttention", head_dim, v_head_dim, G, ("head_dim", "v_head_dim"), "n_heads / n_kv_heads")


def forward(q: Tensor, k: Tensor, v: Tensor, params: TreeParams, op: str = "forward") -> None:
    """What the htree kernels, forward and backward, support of a valid call."""
    _kernel_dtype(op, "q", q)
    _contiguous_rows(op, q=q, k=k, v=v)
    _heads(op, q.shape[3], v.shape[3], q.shape[2] // k.shape[2])
    if params.compression_rate != KERNEL_COMPRESSION_RATE:
        _way_out(op, f"the kernels need compression_rate {KERNEL_COMPRESSION_RATE}, got {params.compression_rate}")
    low, high = KERNEL_TOP_K
    if not low <= params.top_k <= high:
        _way_out(op, f"the kernels need top_k_per_layer in {low} .. {high}, got {params.top_k}")
    _kernel_scale(op, "scale", params.scale)
    most = params.top_k * KERNEL_COMPRESSION_RATE
    if params.max_top_nodes != most:
        _way_out(op, f"the kernels need max_top_nodes = top_k * compression_rate ({most}), got {params.max_top_nodes}")


def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: Tensor, params: TreeParams) -> None:
    """What the htree backward kernels support of a valid call: what the forward's do, with results as it wrote them."""
    op = "backward"
    forward(q, k, v, params, op)
    contiguous_results(op, out, lse, selection)


def contiguous_results(op: str, out: Tensor, lse: Tensor, selection: Tensor) -> None:
    for name, x in (("out", out), ("lse", lse), ("selection", selection)):
        if not x.is_contiguous():
            _way_out(op, f"the kernels need {name} contiguous, its strides are {tuple(x.stride())}")


def given_selection(op: str, selection: Tensor | None) -> None:
    if selection is not None and not selection.is_contiguous():
        _way_out(op, f"the kernels need selection contiguous, its strides are {tuple(selection.stride())}")


def _kernel_scale(op: str, name: str, value: float) -> None:
    """The kernels compute in base 2: the scale is multiplied by log2(e), in float32."""
    if abs(value) * math.log2(math.e) > torch.finfo(torch.float32).max:
        _way_out(op, f"the kernels need |{name}| * log2(e) finite in float32, got {value}")


def tree_pool(k: Tensor, v: Tensor) -> None:
    _kernel_dtype("tree_pool", "k", k)
    _contiguous_rows("tree_pool", k=k, v=v)


def no_kernel(op: str) -> NoReturn:
    """An op that has no kernel: its CUDA calls with backend "auto" end here."""
    _way_out(op, "there is no kernel for it")


ATTN_DIST_HEAD_DIMS = (576, 512, 192, 128)
SPARSE_ATTENTION_HEAD_DIMS = (576, 512)
SPARSE_ATTENTION_D_V = 512


def _list_kernel(
    op: str, q: Tensor, rows: dict[str, Tensor], topk_length: Tensor | None, sm_scale: float, topk: int, dims
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
    if topk_length is not None and max(topk_length.stride()) >= 2**32:
        _way_out(op, f"the kernel needs strides of topk_length below 2^32, they are {tuple(topk_length.stride())}")


def attn_dist(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, topk_length: Tensor | None, sm_scale: float) -> None:
    """What the attn_dist kernel supports of a valid call (all tensors batched)."""
    _list_kernel("attn_dist", q, {"q": q, "k": k}, topk_length, sm_scale, indices.shape[3], ATTN_DIST_HEAD_DIMS)


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    sm_scale: float,
    d_v: int,
    op: str = "sparse_attention",
) -> None:
    """What the sparse_attention kernels, forward and backward, support of a valid call (all tensors batched)."""
    _list_kernel(op, q, {"q": q, "kv": kv}, topk_length, sm_scale, indices.shape[3], SPARSE_ATTENTION_HEAD_DIMS)
    if d_v != SPARSE_ATTENTION_D_V:
        _way_out(op, f"the kernel needs d_v to be {SPARSE_ATTENTION_D_V}, got {d_v}")


def dense_indexer_loss(op: str, q: Tensor, k: Tensor, sm_scale: float) -> None:
    """What attn_dist's kernel supports of the attention of a valid call of dense_indexer_loss (tensors batched)."""
    _list_kernel(op, q, {"q": q, "k": k}, None, sm_scale, k.shape[1], ATTN_DIST_HEAD_DIMS)


def dense_lse(q: Tensor, k: Tensor, sm_scale: float) -> None:
    """What sparse_attention's kernel supports of a valid call of dense_lse."""
    _list_kernel("dense_lse", q, {"q": q, "k": k}, None, sm_scale, k.shape[1], SPARSE_ATTENTION_HEAD_DIMS)


def loads_by_tma(x: Tensor) -> bool:
    """Whether TMA can load rows of the last dimension of x [B, s_q, h_q, D], heads past h_q as zeros."""
    apart = [(n, stride) for n, stride in zip(x.shape[:3], x.stride()[:3]) if n > 1]
    return (
        (x.shape[3] == 1 or x.stride(3) == 1)
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for _, stride in apart)
        and (x.shape[2] == 1 or x.stride(2) > 0)
    )
