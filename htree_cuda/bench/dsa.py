"""`bench dsa`: one decoder step of DeepSeek Sparse Attention, from the indexer to its loss, forward and backward: each
piece and the whole, time and memory, beside the same by PyTorch operations and beside peers that import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import (
    UnsupportedError,
    attn_dist,
    indexer_logits,
    indexer_loss,
    indexer_topk,
    sparse_attention,
    topk_indices,
)
from .inputs import DTYPES
from .peers import cudnn_attn_dist, flash_mla_attention
from .protocol import measure, measure_once

PIECES = (
    "topk_indices", "indexer_topk", "sparse_attention", "attn_dist", "indexer_loss", "sparse_attention backward",
    "indexer_logits backward", "step",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The tensors of one layer's step and its calls. The queries are the last of the sequence."""

    q: Tensor  # [s_q, h_q, d_qk]
    kv: Tensor  # [s_kv, 1, d_qk]
    q_i: Tensor  # [s_q, h_i, d_i]
    k_i: Tensor  # [s_kv, 1, d_i]
    weights: Tensor  # [s_q, h_i]
    dout: Tensor  # [s_q, h_q, d_v]
    topk: int

    @classmethod
    def drawn(cls, args: argparse.Namespace, h_q: int, s_kv: int) -> Step:
        dtype, device, s_q = DTYPES[args.dtype], args.device, args.queries
        g = torch.Generator(device=device).manual_seed(args.seed)

        def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=g, device=device, dtype=of)

        acc = torch.float64 if dtype == torch.float64 else torch.float32
        inputs = [
            draw(s_q, h_q, args.dim), draw(s_kv, 1, args.dim), draw(s_q, args.index_heads, args.index_dim),
            draw(s_kv, 1, args.index_dim), draw(s_q, args.index_heads, of=acc),
        ]  # fmt: skip
        return cls(*(x.requires_grad_() for x in inputs), draw(s_q, h_q, args.value_dim), args.topk)

    def calls(self, backend: str) -> dict[str, Callable[[], object]]:
        """A call for each of PIECES, on the lists that the indexer selects. What makes another's inputs and has no
        kernel runs as PyTorch operations; a piece without a kernel raises UnsupportedError."""
        s_kv = len(self.kv)
        rule = {"q_start": s_kv - len(self.q), "backend": backend}
        attend = {"d_v": self.dout.shape[2], **rule}
        loss_of = {"s_kv": s_kv, "q_start": rule["q_start"]}
        attention, indexer = (self.q, self.kv), (self.q_i, self.k_i, self.weights)

        def select() -> tuple[Tensor, Tensor]:
            return indexer_topk(*indexer, self.topk, return_logits=True, **rule)

        with torch.no_grad():
            indices = _either(lambda b: indexer_topk(*indexer, self.topk, **{**rule, "backend": b}), backend)
            dense = _either(lambda b: indexer_logits(*indexer, **{**rule, "backend": b}), backend)
            lse = _either(lambda b: sparse_attention(*attention, indices, **{**attend, "backend": b})[1], backend)
            target = _either(lambda b: attn_dist(*attention, indices, lse, **{**rule, "backend": b}), backend)
        # The graphs stay, so that a backward is a call of its own: they hold inputs and results.
        results: dict[str, Tensor] = {}

        def attention_backward() -> None:
            if "out" not in results:
                results["out"] = sparse_attention(*attention, indices, **attend)[0]
            torch.autograd.grad(results["out"], attention, self.dout, retain_graph=True)

        def indexer_backward() -> None:
            if "logits" not in results:
                results["logits"] = select()[1]
                results["dlogits"] = torch.randn_like(results["logits"])
            torch.autograd.grad(results["logits"], indexer, results["dlogits"], retain_graph=True)

        def step() -> None:
            found, logits = select()
            out, found_lse = sparse_attention(*attention, found, **attend)
            loss = indexer_loss(logits, attn_dist(*attention, found, found_lse, **rule), found, **loss_of)
            torch.autograd.grad((out, loss), (*attention, *indexer), (self.dout, torch.ones_like(loss)))

        def loss() -> None:
            logits = torch.zeros(target.shape[1:], device=target.device, dtype=target.dtype, requires_grad=True)
            torch.autograd.grad(indexer_loss(logits, target, indices, **loss_of), logits)

        forward = torch.no_grad()
        calls = (
            forward(lambda: topk_indices(dense, self.topk, backend=backend)),
            forward(select),
            forward(lambda: sparse_attention(*attention, indices, **attend)),
            forward(lambda: attn_dist(*attention, indices, lse, **rule)),
            loss, attention_backward, indexer_backward, step,
        )  # fmt: skip
        return dict(zip(PIECES, calls, strict=True))

    def peers(self) -> dict[str, tuple[str, Callable[[], object]]]:
        """{piece: (peer, its call)} of what is installed, on lists and logits of the same kind."""
        with torch.no_grad():
            dense = torch.randn(len(self.q), len(self.kv), device=self.q.device)
        found: dict[str, tuple[str, Callable[[], object]]] = {
            "topk_indices": ("torch.topk", lambda: dense.topk(_slots(dense, self.topk), dim=1, sorted=False))
        }
        q, kv = self.q.detach(), self.kv.detach()
        if q.is_cuda and q.dtype == torch.bfloat16:
            indices = _peer_lists(dense, self.topk)
            lse = torch.zeros(q.shape[:2], device=q.device)
            attend = flash_mla_attention(q, kv, indices) if self.dout.shape[2] == 512 else None
            share = cudnn_attn_dist(q, kv, indices, lse)
            found |= {"sparse_attention": ("FlashMLA", attend)} if attend is not None else {}
            found |= {"attn_dist": ("cuDNN frontend", share)} if share is not None else {}
        return found


def _slots(dense: Tensor, topk: int) -> int:
    """A peer takes no slot without a key: where there are fewer keys than topk it gets a list of them all."""
    return min(topk, dense.shape[1])


def _peer_lists(dense: Tensor, topk: int) -> Tensor:
    """[s_q, 1, slots] int32, ascending, of the largest numbers of dense [s_q, s_kv]."""
    return dense.topk(_slots(dense, topk), dim=1).indices.sort(1).values[:, None].to(torch.int32)


def _either(call: Callable[[str], Tensor], backend: str) -> Tensor:
    try:
        return call(backend)
    except UnsupportedError:
        return call("torch")


def _once(call: Callable[[], object], device: str) -> dict:
    """One call after another that warms up, and its memory: PyTorch operations on a long context take seconds."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = measure_once(call, device)
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return found


def _measured(step: Step, backend: str, device: str, timed: Callable) -> dict[str, dict]:
    """{piece: time and memory, or why there is none}."""
    found = {}
    for name, call in step.calls(backend).items():
        print(f"  {backend}: {name} ...", file=sys.stderr, flush=True)
        try:
            found[name] = timed(call, device)
        except UnsupportedError as error:
            found[name] = {"error": str(error)}
    return found


def run(args: argparse.Namespace) -> list[dict]:
    """One figure a piece; the PyTorch operations are called once each, beside kernels alone."""
    figures = []
    for h_q in args.heads_list:
        for s_kv in args.lengths:
            step = Step.drawn(args, h_q, s_kv)
            own = _measured(step, args.backend, args.device, measure)
            beside = {}
            if args.backend != "torch" and args.device == "cuda":
                beside = _measured(step, "torch", args.device, _once)
            peers = step.peers()
            shape = {
                "s_q": args.queries, "h_q": h_q, "s_kv": s_kv, "topk": args.topk, "d_qk": args.dim,
                "d_v": args.value_dim, "h_i": args.index_heads, "d_i": args.index_dim, "dtype": args.dtype,
                "backend": args.backend,
            }  # fmt: skip
            for name in PIECES:
                figure = {"op": args.command, "piece": name, **shape, **own[name]}
                if name in beside:
                    figure["torch_backend"] = beside[name]
                    if "ms" in own[name] and "ms" in beside[name]:
                        figure["speedup_over_torch_backend"] = round(beside[name]["ms"] / own[name]["ms"], 2)
                if name in peers:
                    figure["peer"] = {"name": peers[name][0], **measure(peers[name][1], args.device)}
                figures.append(figure)
            args.keep(figures)
    return figures


def _ms(found: dict) -> str:
    return f"{found['ms']:.3f}" if "ms" in found else "-"


def _gib(found: dict) -> str:
    return f"{found['peak_bytes'] / 2**30:.2f}" if found.get("peak_bytes") is not None else "-"


COLUMNS = {
    "piece": lambda f: f["piece"],
    "h_q": lambda f: str(f["h_q"]),
    "s_kv": lambda f: f"{f['s_kv']:,}",
    "ms": _ms,
    "p90": lambda f: f"{f['p90_ms']:.3f}" if "p90_ms" in f else "-",
    "GiB": _gib,
    "torch ms": lambda f: _ms(f.get("torch_backend", {})),
    "torch GiB": lambda f: _gib(f.get("torch_backend", {})),
    "peer": lambda f: f["peer"]["name"] if "peer" in f else "-",
    "peer ms": lambda f: _ms(f.get("peer", {})),
    "over torch": lambda f: f"{f['speedup_over_torch_backend']:.1f}" if "speedup_over_torch_backend" in f else "-",
}
