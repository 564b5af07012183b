"""`python -m htree_cuda explain --op forward_cached`: the kernel of a step of decoding, told by its own launcher."""

from __future__ import annotations

import torch

from . import checks, kernels
from .layout import TreeLayout
from .params import CachedParams
from .torch_backend.decode import CacheTensors

RATE = 16  # of the kernels


def _decode(sizes: dict, dtype: torch.dtype) -> None:
    """A call of `forward_cached` on meta tensors."""
    B, T, T_q, H, H_kv, K, top_k = (sizes[name] for name in ("B", "T", "T_q", "H", "H_kv", "K", "top_k"))

    def of(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    num_layers = 1
    while RATE**num_layers <= T:
        num_layers += 1
    layout = TreeLayout(RATE, T, num_layers)
    q, out, lse = of(B, T_q, H, K), of(B, T_q, H, K), of(B, T_q, H, dtype=torch.float32)
    rows = of(B, H_kv, layout.sequence_rows, K)
    lengths, table = of(B, dtype=torch.int32), of(RATE * top_k, K // 2, 2, dtype=torch.float32)
    params = CachedParams(RATE, top_k, RATE * top_k, K**-0.5, 10000.0, K, False)
    cache = CacheTensors(lengths, lengths, rows, rows, rows[:0], rows[:0], lengths, lengths)
    checks.cache.forward_cached_kernel(q, cache, params)
    kernels.tree_decode(q, None, *cache, table, out, lse, None, layout=layout, params=params)


def explain(
    *,
    T: int,
    H: int,
    H_kv: int,
    top_k_per_layer: int = 512,
    T_q: int = 1,
    B: int = 1,
    K: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    sms: int = 132,
) -> dict:
    """The kernel of one call of `htree_cuda.forward_cached`, without the append before it.

    Args:
        T: int, tokens that each sequence has room for.
        H, H_kv: int, query heads and KV heads.
        top_k_per_layer: int, nodes expanded per layer; default 512.
        T_q: int, queries of each sequence, 1 to 8; default 1.
        B: int, sequences; default 1.
        K: int, head dimension of keys and values; default 128.
        dtype: float16 or bfloat16; default bfloat16.
        sms: int, SMs of the GPU; default 132, H100 and H200 SXM.

    Returns:
        A dict of the call's numbers and ``rows``: phase, kernel, tile, reason, launches and ctas; the other keys of
        `htree_cuda.explain` are None. ``tile`` says how many of a query's parts a CTA takes, and its warps.

    Raises:
        ValueError, UnsupportedError: sizes that the kernel does not take.
        RuntimeError: the installation has no kernels.

    Notes:
        Deterministic; launches nothing. How many clusters of CTAs a GPU holds at once, which decides the parts of a
        CTA, is that of an H100 scaled to ``sms``; a launch looks at its device.

    Example:
        >>> from htree_cuda.explain_decode import explain
        >>> rows = explain(T=131072, H=32, H_kv=8)["rows"]  # where the kernels are built

    Source: csrc/sm90/htree_decode/launch.cuh.
    """
    sizes = {"B": B, "T": T, "T_q": T_q, "H": H, "H_kv": H_kv, "K": K, "top_k": top_k_per_layer, "sms": sms}
    for name, value in sizes.items():
        checks.common.size("explain", name, checks.common.integer("explain", name, value))
    if not 1 <= T_q <= 8:
        raise ValueError(f"explain: T_q of forward_cached must be in 1 .. 8, longer calls being forward's, got {T_q}")
    if H_kv < 1 or H % H_kv:
        raise ValueError(f"explain: H must be a multiple of H_kv, got {H} and {H_kv}")
    rows = kernels.recorded(lambda: _decode(sizes, dtype), sms=sms)
    name = str(dtype).removeprefix("torch.")
    call = {"op": "forward_cached", "backward": False, "deterministic": False, **sizes, "dtype": name}
    return {**call, "rows": rows}
