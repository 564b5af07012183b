"""Inputs that several test files draw."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from htree_cuda import kernels
from htree_cuda.params import TreeParams


def examples(thorough: int) -> int:
    """How many problems hypothesis draws: a quarter in `make test`, all in `make test-all` (HTREE_CUDA_THOROUGH=1)."""
    return thorough if os.environ.get("HTREE_CUDA_THOROUGH") == "1" else thorough // 4


@dataclass(frozen=True)
class Config:
    """One htree problem; small enough for the definition."""

    B: int
    T: int
    T_q: int
    q_start: int
    G: int
    H_kv: int
    K: int
    V: int
    compression_rate: int
    top_k: int
    max_top_nodes: int
    strict_causal: bool
    seed: int
    rope_base: float = 100.0
    scale: float | None = None

    @property
    def options(self) -> dict:
        return {
            "q_start": self.q_start,
            "compression_rate": self.compression_rate,
            "top_k_per_layer": self.top_k,
            "max_top_nodes": self.max_top_nodes,
            "rope_base": self.rope_base,
            "scale": self.scale,
        }

    @property
    def params(self) -> TreeParams:
        return TreeParams(
            self.q_start, self.compression_rate, self.top_k, self.max_top_nodes,
            self.K**-0.5 if self.scale is None else self.scale, self.rope_base, self.strict_causal,
        )  # fmt: skip

    def tensors(self, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        shapes = ((self.T_q, self.G * self.H_kv, self.K), (self.T, self.H_kv, self.K), (self.T, self.H_kv, self.V))
        return tuple(torch.randn(self.B, *s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)


@st.composite
def configs(draw) -> Config:
    """T 1..600, mostly small; r 2..16, top_k 1..64, max_top_nodes over its range, G 1..8, H_kv 1..3, B 1..2, odd V."""
    r = draw(st.sampled_from([2, 4, 8, 16]))
    top_k = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
    max_top_nodes = draw(st.one_of(st.just(top_k), st.just(top_k * r), st.integers(top_k, top_k * r)))
    several_layers = st.integers(max_top_nodes + 1, 601) if max_top_nodes <= 600 else st.integers(1, 600)
    T = min(600, draw(st.one_of(st.integers(1, 60), several_layers)))
    T_q = draw(st.integers(1, min(T, 6)))
    return Config(
        B=draw(st.integers(1, 2)),
        T=T,
        T_q=T_q,
        q_start=draw(st.one_of(st.just(T - T_q), st.integers(0, T - T_q))),
        G=draw(st.integers(1, 8)),
        H_kv=draw(st.integers(1, 3)),
        K=2 * draw(st.integers(1, 5)),
        V=draw(st.integers(1, 7)),
        compression_rate=r,
        top_k=top_k,
        max_top_nodes=max_top_nodes,
        strict_causal=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
        rope_base=draw(st.sampled_from([0.5, 2.0, 100.0, 10000.0])),
        scale=draw(st.sampled_from([None, None, 0.0, -0.4, 1.7])),
    )


def skip_what_is_not_built(K: int, V: int) -> None:
    """Skips a test of kernels for K != V in a build without them."""
    if K != V and not kernels.mixed_dims():
        pytest.skip("built without HTREE_CUDA_MIXED_DIMS=1")
