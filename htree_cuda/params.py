"""The numbers that define one call of an op, every default resolved: what `checks` returns and the backends take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeParams:
    """One call of forward or backward."""

    q_start: int
    compression_rate: int
    top_k: int
    max_top_nodes: int
    scale: float
    rope_base: float
    strict_causal: bool


@dataclass(frozen=True)
class CachedParams:
    """One call of forward_cached, which is strictly causal and whose positions follow from the cache's lengths.

    The table of rotations is an argument of its own; rope_base is None where it is another than rope_base's, and the
    table then may hold fewer than K / 2 pairs."""

    compression_rate: int
    top_k: int
    max_top_nodes: int
    scale: float
    rope_base: float | None
    rope_interleaved: bool


@dataclass(frozen=True)
class ListParams:
    """One call of attn_dist or sparse_attention; q_start holds B numbers or is None (no causal rule)."""

    batched: bool
    sm_scale: float
    q_start: list[int] | None
    k_stride: int
    lse_base: float


@dataclass(frozen=True)
class IndexerParams:
    """One call of indexer_logits, topk_indices or indexer_topk; q_start holds B numbers or is None."""

    batched: bool
    q_start: list[int] | None
    k_stride: int
