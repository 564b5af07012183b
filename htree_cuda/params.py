"""The numbers that define one call of an op, every default resolved: what `checks` returns and the backends take."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class TreeParams:
    """One call of forward or backward.

    rope_base is None where rope_inv_freq stands in its place, or where nothing is rotated; rope_dim None is K. The
    tensors are small, and belong to the definition of the call as the numbers do."""

    q_start: int
    compression_rate: int
    top_k: int
    max_top_nodes: int
    scale: float
    rope_base: float | None
    strict_causal: bool
    rope_dim: int | None = None
    rope_interleaved: bool = False
    rope_inv_freq: Tensor | None = field(default=None, compare=False)  # [R/2] float32 or float64
    attn_sink: Tensor | None = field(default=None, compare=False)  # [H] in the accumulation dtype


@dataclass(frozen=True)
class CachedParams:
    """One call of forward_cached, which is strictly causal and whose positions follow from the cache's lengths.

    The table of rotations is an argument of its own, made of the same options, which a prefill hands on."""

    compression_rate: int
    top_k: int
    max_top_nodes: int
    scale: float
    rope_base: float | None
    rope_dim: int
    rope_interleaved: bool
    rope_inv_freq: Tensor | None = field(default=None, compare=False)
    attn_sink: Tensor | None = field(default=None, compare=False)


def start_of(q_start: list[int], b: int) -> int:
    """The position of query 0 of batch element b. One number is that of all elements: a list of B numbers would fix B
    where torch.compile or torch.export leaves it open."""
    return q_start[b] if len(q_start) > 1 else q_start[0]


@dataclass(frozen=True)
class ListParams:
    """One call of attn_dist or sparse_attention; q_start: see `start_of`, or None (no causal rule)."""

    batched: bool
    sm_scale: float
    q_start: list[int] | None
    k_stride: int
    lse_base: float


@dataclass(frozen=True)
class IndexerParams:
    """One call of indexer_logits, topk_indices or indexer_topk; q_start: see `start_of`, or None."""

    batched: bool
    q_start: list[int] | None
    k_stride: int


@dataclass(frozen=True)
class VarlenParams:
    """One packed or ragged call; q_start of the tree plays no part. The maxima bound grids, workspace and layers."""

    tree: TreeParams
    packed: bool
    sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
