"""The attention calls of the demo, and what they reveal: leaves, attention mass per token, time, memory.

`Search` attends with the tree and densely. Dense attention is the same function with one layer (`T <= max_top_nodes`),
which by definition is ordinary causal softmax attention with RoPE over all tokens.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import htree_cuda

from .embedding import ROPE_BASE, Embedding, Question
from .progress import progress

LEAST_TOP_K, MOST_TOP_K = 32, 512
POSITIONS = 1 << 15  # dense scores are formed for so many tokens at a time


def default_top_k(T: int, rate: int) -> int:
    """The power of two in 32 .. 512 that keeps three layers (T <= top_k * rate^3) as long as it can."""
    top_k = LEAST_TOP_K
    while top_k < MOST_TOP_K and top_k * rate**3 < T:
        top_k *= 2
    return top_k


@dataclass(frozen=True)
class LayerView:
    """One layer of one query's descent. nodes: [n] candidates, ascending; expanded: [n] bool; probability: [G, n]
    float64, each head's softmax weight of a candidate (0 where expanded)."""

    layer: int
    nodes: np.ndarray
    expanded: np.ndarray
    probability: np.ndarray


def pool_layers(x: Tensor, rate: int, layers: int) -> list[Tensor]:
    """[T, D] -> the keys of every layer, bottom first: means of the children that exist, stored in the dtype of x."""
    found = [x]
    for _ in range(layers - 1):
        below = found[-1]
        full = len(below) // rate
        means = below[: full * rate].float().reshape(full, rate, -1).mean(1)
        if full * rate < len(below):
            means = torch.cat([means, below[full * rate :].float().mean(0, keepdim=True)])
        found.append(means.to(x.dtype))
    return found


def _rotate(x: Tensor, positions: Tensor, rope_base: float) -> Tensor:
    """Rotate-half RoPE (section 2 of the definition): pair m rotates by position * rope_base^(-2m/K)."""
    half = x.shape[-1] // 2
    frequency = rope_base ** (-2 * torch.arange(half, dtype=torch.float64, device=x.device) / x.shape[-1])
    angle = positions.to(torch.float64)[..., None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    lo, hi = x[..., :half].float(), x[..., half:].float()
    return torch.cat([lo * cos - hi * sin, lo * sin + hi * cos], dim=-1)


def leaves(
    q: Tensor, keys: list[Tensor], selection: Tensor, lse: Tensor, *, t: int, rate: int, scale: float, rope_base: float
) -> list[LayerView]:
    """The descent of one query, rebuilt from what `forward` returned (sections 2 and 4 of the definition).

    Args:
        q: [G, K], the query heads of one KV head. keys: [N_l, K] per layer, bottom first.
        selection: [L-1, top_k] expanded nodes of layer 1 .. L-1, padded with -1. lse: [G].
        t: the query's position.

    Returns:
        The layers from the top down. Over all of them the probabilities of a head sum to 1.
    """
    views, parents = [], None
    for layer in reversed(range(len(keys))):
        rightmost = t // rate**layer
        if parents is None:
            nodes = torch.arange(rightmost + 1, device=q.device)
        else:
            nodes = (parents[:, None] * rate + torch.arange(rate, device=q.device)).flatten()
            nodes = nodes[nodes <= rightmost]
        expanded = torch.zeros(len(nodes), dtype=torch.bool, device=q.device)
        if layer > 0:
            parents = selection[layer - 1].to(torch.int64)
            parents = parents[parents >= 0]
            expanded = torch.isin(nodes, parents)
        n = len(nodes)
        rotated_q = _rotate(q, torch.full((1,), n - 1, device=q.device), rope_base)
        rotated_k = _rotate(keys[layer][nodes], torch.arange(n, device=q.device), rope_base)
        probability = (rotated_q @ rotated_k.T * scale - lse[:, None]).to(torch.float64).exp()
        probability.masked_fill_(expanded, 0.0)
        views.append(LayerView(layer, nodes.cpu().numpy(), expanded.cpu().numpy(), probability.cpu().numpy()))
    return views


def spread(views: list[LayerView], T: int, rate: int) -> np.ndarray:
    """[G, T] attention mass per token: a leaf's probability is shared equally by the tokens it covers."""
    steps = np.zeros((views[0].probability.shape[0], T + 1))
    for view in views:
        first = view.nodes * rate**view.layer
        last = np.minimum(first + rate**view.layer, T)
        share = view.probability / (last - first)
        np.add.at(steps, (slice(None), first), share)
        np.subtract.at(steps, (slice(None), last), share)
    return steps.cumsum(1)[:, :T].clip(min=0.0)


@dataclass(frozen=True)
class Answer:
    """One question, both ways. tree, dense: [T] mass per token, the mean over the heads; out, dense_out: [H, V];
    views: per KV head, from the top layer down; visited: candidates per KV head."""

    question: Question
    tree: np.ndarray
    dense: np.ndarray
    out: Tensor
    dense_out: Tensor
    views: list[list[LayerView]]
    mass_error: float

    @property
    def visited(self) -> int:
        return max(sum(len(view.nodes) for view in views) for views in self.views)

    @property
    def output_error(self) -> float:
        """|out - dense| / |dense|, over all heads."""
        out, dense = self.out.to(torch.float64), self.dense_out.to(torch.float64)
        return float((out - dense).norm() / dense.norm()) if bool(dense.any()) else float(out.norm())


@dataclass(frozen=True)
class Cost:
    """Of one call: seconds (median of three), bytes (peak beyond the inputs; None: unknown)."""

    seconds: float
    bytes: int | None


class Search:
    """A document's tree, ready for questions.

    Args:
        embedding: of the document.
        rate, top_k: compression_rate and top_k_per_layer of `htree_cuda.forward`.
    """

    def __init__(self, embedding: Embedding, *, rate: int = 16, top_k: int | None = None):
        self.embedding = embedding
        self.tokens = len(embedding.word_ids)
        self.rate = rate
        self.top_k = default_top_k(self.tokens, rate) if top_k is None else top_k
        self.backend, self.why_torch = "auto", ""

    @property
    def layer_sizes(self) -> list[int]:
        """Nodes per layer, bottom first, the question included."""
        sizes = [self.tokens + 1]
        while sizes[-1] > self.top_k * self.rate:
            sizes.append(-(-sizes[-1] // self.rate))
        return sizes

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, **more):
        """The kernels where they cover the call, else the torch backend, said aloud in the report."""
        call = {"compression_rate": self.rate, "top_k_per_layer": self.top_k, "scale": 1.0, "rope_base": ROPE_BASE}
        try:
            return htree_cuda.forward(q, k, v, **call, **more, backend=self.backend)
        except htree_cuda.UnsupportedError as error:
            self.backend, self.why_torch = "torch", str(error).split("; pass backend=")[0]
            return htree_cuda.forward(q, k, v, **call, **more, backend=self.backend)

    def _dense_forward(self, q: Tensor, k: Tensor, v: Tensor, **more):
        """One layer. The kernels hold no candidate list that long: always the torch backend."""
        everything = 1 << max(0, k.shape[1] - 1).bit_length()
        return htree_cuda.forward(
            q, k, v, compression_rate=self.rate, top_k_per_layer=everything, max_top_nodes=everything,
            scale=1.0, rope_base=ROPE_BASE, backend="torch", **more,
        )  # fmt: skip

    def _inputs(self, questions: list[Question]) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.embedding.keys_and_values(len(questions))
        return torch.stack([question.heads for question in questions])[None], k, v

    def ask(self, questions: list[Question]) -> list[Answer]:
        """All questions in one call each way: they are the last positions of the sequence, in order."""
        q, k, v = self._inputs(questions)
        T, G = k.shape[1], self.embedding.heads_per_kv
        out, lse, selection = self._forward(q, k, v, return_lse=True, return_selection=True)
        dense_out, dense_lse = self._dense_forward(q, k, v, return_lse=True)
        dense = self._dense_mass(q[0], k[0], dense_lse[0])
        heads = range(self.embedding.kv_heads)
        keys = [pool_layers(k[0, :, h], self.rate, selection.shape[0] + 1) for h in heads]
        answers = []
        for i in progress(range(len(questions)), len(questions), "rebuilding descents"):
            t = T - len(questions) + i
            views = [
                leaves(
                    q[0, i, h * G : (h + 1) * G], keys[h], selection[:, 0, i, h], lse[0, i, h * G : (h + 1) * G],
                    t=t, rate=self.rate, scale=1.0, rope_base=ROPE_BASE,
                )
                for h in heads
            ]  # fmt: skip
            mass = np.concatenate([spread(x, t + 1, self.rate) for x in views])
            answers.append(
                Answer(
                    question=questions[i],
                    tree=mass.mean(0)[: self.tokens],
                    dense=dense[i].mean(0)[: self.tokens],
                    out=out[0, i],
                    dense_out=dense_out[0, i],
                    views=views,
                    mass_error=float(max(abs(mass.sum(1) - 1).max(), abs(dense[i].sum(1) - 1).max())),
                )
            )
        return answers

    def _dense_mass(self, q: Tensor, k: Tensor, lse: Tensor) -> np.ndarray:
        """q [T_q,H,K], k [T,H_kv,K], lse [T_q,H] -> [T_q,H,T] probabilities of ordinary causal attention."""
        T_q, T, G = len(q), len(k), self.embedding.heads_per_kv
        t = torch.arange(T - T_q, T, device=q.device)
        rotated_q = _rotate(q, t[:, None], ROPE_BASE).unflatten(1, (-1, G))
        out = np.empty((T_q, q.shape[1], T), dtype=np.float32)
        for first in range(0, T, POSITIONS):
            p = torch.arange(first, min(first + POSITIONS, T), device=q.device)
            rotated_k = _rotate(k[p], p[:, None], ROPE_BASE)
            scores = torch.einsum("qhgd,phd->qhgp", rotated_q, rotated_k).flatten(1, 2) - lse[:, :, None]
            probability = scores.exp().masked_fill_((p > t[:, None])[:, None], 0.0)
            out[:, :, first : first + len(p)] = probability.cpu().numpy()
        return out

    def cost(self, question: Question) -> tuple[Cost, Cost, float]:
        """(tree, dense, seconds of the tree call that building the tree takes). `ask` has warmed both up."""
        q, k, v = self._inputs([question])

        def pool():
            limit = self.top_k * self.rate
            torch.ops.htree_cuda.tree_pool(k, v, compression_rate=self.rate, max_top_nodes=limit, backend=self.backend)

        # Nothing is kept between calls, so the time of the tree includes building it.
        tree = measure(lambda: self._forward(q, k, v), q.device)
        dense = measure(lambda: self._dense_forward(q, k, v), q.device)
        return tree, dense, seconds(pool, q.device)


# ------------------------------------------------------------------------------------------------------- measurement


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable, device: torch.device) -> float:
    """Median of three calls."""
    taken = []
    for _ in range(3):
        _synchronise(device)
        start = time.perf_counter()
        call()
        _synchronise(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(call: Callable, device: torch.device) -> Cost:
    taken = seconds(call, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return Cost(taken, torch.cuda.max_memory_allocated(device) - before)
    return Cost(taken, _peak_cpu_bytes(call))


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's own start and stop lines come from C++, straight to file descriptor 2."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _peak_cpu_bytes(call: Callable) -> int | None:
    """The most that PyTorch's CPU allocator held during `call` beyond what it held before."""
    with (
        _quiet_stderr(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        call()
    try:
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    except AttributeError:  # a torch whose profiler keeps its events elsewhere
        return None
    held = most = 0
    for change in changes:
        held += change
        most = max(most, held)
    return most
