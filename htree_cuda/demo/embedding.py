"""Tokens become keys and values, a question becomes query heads: a fixed feature embedding, no training, no download.

Words.   Lower case, plain suffixes cut (`stem`), function words and punctuation dropped. A word's weight is its idf,
         log((blocks + 1) / blocks that hold it), over blocks of BLOCK tokens of this document.
Vectors. Every word starts as a hashed random sign vector (blake2b: the same on every machine). STEPS rounds of subspace
         iteration then move those random directions towards the DIM principal directions of the document's own weighted
         bag of words (latent semantic analysis): what 96 numbers can keep of 2,000 words, they keep, and words that
         share company come to lie near each other.
Keys.    A token's key is the smoothed sum of the weighted vectors of the words around it (two box filters, so a
         triangle of 4 w + 1 tokens), w = 8 for KV head 0 and 32 for KV head 1: a sentence, a paragraph. A word counts
         once within REPEAT tokens: otherwise a passage that only repeats one word of the question beats one that holds
         them all. Keys are linear in the words, so the mean-pooled key of a node still holds each word in proportion
         to how often it occurs below: that is what the descent follows.
RoPE.    The content lies in the slow pairs, from pair FIRST_PAIR on; the fast pairs are 0. With ROPE_BASE = 1e30 pair
         16 of 64 rotates by 3e-8 rad per position, so a million positions cost nothing. Dense attention alone needs it:
         in the tree a position is a place in a list of at most top_k * r candidates.
Query.   The sum of the question's weighted word vectors, scaled so that the scores over the document have a standard
         deviation of SHARPNESS nats. Two heads per KV head: as it is, and with the directions that every passage shares
         played down (times covariance^-1/2).
Values.  A token's value is a hashed vector of its word (another one per KV head) times its idf, so that the output can
         be read back as words: those whose vectors stand out of it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .progress import progress
from .text import DemoError, Document, tokenize

K = V = 128
FIRST_PAIR = 16
DIM = K - 2 * FIRST_PAIR
ROPE_BASE = 1e30
WINDOWS = (8, 32)  # half widths of the box filters, one KV head each
REPEAT = 48
BLOCK = 128  # idf
LSA_BLOCK = 64
STEPS = 8
SPARE = 32  # directions iterated beyond DIM: the last ones converge slowly
SHARPNESS = 2.0
FLOOR = 1e-4  # least eigenvalue of the covariance kept, relative to the largest
CHUNK = 1 << 15  # tokens embedded at a time

FUNCTION_WORDS = frozenset(
    """
    a about all also am an and another any are as at be been being both but by can could did do does doing
    done each else for from get gets got had has have having here how i if in into is it its just like
    many may me might mine more most must my no nor not of on one ones only onto or other our own same
    shall should so some such than that the then there these this those to too us use used using very want
    was way we were what when where which who whom whose why will with without would you your
    """.split()  # noqa: SIM905  (a list of words reads better as words)
)

_SUFFIXES = (
    ("ations", "at"), ("ation", "at"), ("ings", ""), ("ing", ""), ("ies", "y"), ("ied", "y"), ("edly", ""), ("ed", ""),
    ("ers", "er"), ("es", "e"), ("s", ""), ("ly", ""),
)  # fmt: skip
_VOWEL = re.compile("[aeiouy]")


def stem(word: str) -> str:
    """A word without its plainest English suffix: `formatting`, `formatted`, `formats` -> `format`."""
    word = word.lower()
    if len(word) <= 3 or not word.isalpha():
        return word
    for suffix, replacement in _SUFFIXES:
        rest = word[: len(word) - len(suffix)]
        if word.endswith(suffix) and len(rest) >= 3 and _VOWEL.search(rest):
            if suffix == "s" and word.endswith(("ss", "us", "is")):
                continue
            word = rest + replacement
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return word


def content_word(token: str) -> str | None:
    """The stem of a token that means something; None for punctuation and function words."""
    if not token[0].isalnum() or token.lower() in FUNCTION_WORDS:
        return None
    return stem(token)


def _signs(word: str) -> np.ndarray:
    """512 hashed random bits of a word."""
    return np.unpackbits(np.frombuffer(hashlib.blake2b(word.encode(), digest_size=64).digest(), dtype=np.uint8))


@dataclass(frozen=True)
class Question:
    """A question as the embedding sees it. heads: [H, K]; known: the stems it shares with
    the document, unknown: its other content words as they were asked."""

    text: str
    heads: Tensor
    known: list[str]
    unknown: list[str]


class Embedding:
    """The features of one document.

    Args:
        document: at least one content word.
        device, dtype: where and as what keys, values and queries are made.
    """

    kv_heads = len(WINDOWS)
    heads_per_kv = 2

    def __init__(self, document: Document, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        stems: dict[str, str | None] = {}
        self.vocabulary: dict[str, int] = {}
        spelled: dict[str, dict[str, int]] = {}
        ids = np.full(len(document), -1, dtype=np.int64)
        for i, token in enumerate(document.words):
            word = stems[token] if token in stems else stems.setdefault(token, content_word(token))
            if word is not None:
                ids[i] = self.vocabulary.setdefault(word, len(self.vocabulary))
                spellings = spelled.setdefault(word, {})
                spellings[token] = spellings.get(token, 0) + 1
        if not self.vocabulary:
            raise DemoError("the text holds function words only: nothing to search for")
        self.spelling = [max(x, key=x.__getitem__) for x in spelled.values()]
        self.count = np.bincount(ids[ids >= 0], minlength=len(self.vocabulary))
        self.word_ids = ids
        idf = torch.from_numpy(self._block_idf(ids)).to(device, torch.float32)
        bits = torch.from_numpy(np.stack([_signs(word) for word in self.vocabulary])).to(device)
        signs = bits.to(torch.float32) * 2 - 1
        self.word_keys = self._directions(ids, idf, signs[:, : DIM + SPARE]) * idf[:, None]  # [words, DIM]
        # [words, H_kv, V], unit vectors: more dimensions than one head has make the read-back sharper.
        self._word_values = signs[:, -V * self.kv_heads :].unflatten(1, (self.kv_heads, V)) / V**0.5
        self._idf = idf
        counted = self._without_repeats(ids)
        self.windows = [self._features(counted, width) for width in WINDOWS]  # [T, DIM] each
        self._covariances = [self._covariance(x) for x in self.windows]

    def _block_idf(self, ids: np.ndarray) -> np.ndarray:
        place = np.flatnonzero(ids >= 0)
        pairs = np.unique(ids[place] * (len(ids) // BLOCK + 1) + place // BLOCK)
        held_by = np.bincount(pairs // (len(ids) // BLOCK + 1), minlength=len(self.vocabulary))
        return np.log((len(ids) // BLOCK + 2) / held_by)

    def _directions(self, ids: np.ndarray, idf: Tensor, start: Tensor) -> Tensor:
        """[words, DIM] orthonormal columns: the leading directions of the document's weighted bag of words."""
        words = len(self.vocabulary)
        if words <= DIM:
            return torch.eye(words, DIM, device=self.device)
        place = np.flatnonzero(ids >= 0)
        index = torch.from_numpy(np.stack([place // LSA_BLOCK, ids[place]])).to(self.device)
        blocks = len(ids) // LSA_BLOCK + 1
        ones = torch.ones(index.shape[1], device=self.device)
        counts = torch.sparse_coo_tensor(index, ones, (blocks, words), check_invariants=False).coalesce()
        row, word = counts.indices()
        weight = counts.values().log1p() * idf[word]
        length = torch.zeros(blocks, device=self.device).index_add_(0, row, weight * weight).sqrt_()
        weight = weight / length[row]
        by_block = torch.sparse_coo_tensor(counts.indices(), weight, (blocks, words), check_invariants=False).coalesce()
        by_word = by_block.t().coalesce()
        # The shift (1% of the mean eigenvalue) keeps directions that no block of a short text speaks for at their hash.
        shift = 0.01 * blocks / words
        basis = torch.linalg.qr(start)[0]
        for _ in progress(range(STEPS), STEPS, "learning directions"):
            basis = torch.linalg.qr(torch.sparse.mm(by_word, torch.sparse.mm(by_block, basis)) + shift * basis)[0]
        projected = torch.sparse.mm(by_block, basis)
        axes = torch.linalg.eigh(projected.T @ projected)[1].flip(1)[:, :DIM]
        return basis @ axes

    @staticmethod
    def _without_repeats(ids: np.ndarray) -> np.ndarray:
        """ids with -1 where the word already counted within the last REPEAT tokens."""
        counted = ids.copy()
        last: dict[int, int] = {}
        for i, word in enumerate(ids.tolist()):
            if word < 0:
                continue
            if i - last.get(word, -REPEAT - 1) <= REPEAT:
                counted[i] = -1
            else:
                last[word] = i
        return counted

    def _features(self, counted: np.ndarray, width: int) -> Tensor:
        """[T, DIM] float32: the sum of the word vectors around each token, smoothed by a triangle of 4 width + 1."""
        T = len(counted)
        table = torch.cat([self.word_keys, self.word_keys.new_zeros(1, DIM)])  # row -1: no word
        indices = torch.from_numpy(counted).to(self.device)
        out = torch.empty(T, DIM, device=self.device)
        reach = 2 * width
        for first in progress(range(0, T, CHUNK), -(-T // CHUNK), f"keys, window {width}"):
            last = min(first + CHUNK, T)
            low, high = max(first - reach, 0), min(last + reach, T)
            x = table[indices[low:high]]
            x = torch.nn.functional.pad(x, (0, 0, reach - (first - low), reach - (high - last)))
            # The triangle is a box filtered by a box: two running sums, in float64 as they run over a whole chunk.
            for _ in range(2):
                sums = torch.nn.functional.pad(x.to(torch.float64).cumsum(0), (0, 0, 1, 0))
                x = (sums[2 * width + 1 :] - sums[: -(2 * width + 1)]).to(torch.float32)
            out[first:last] = x / (2 * width + 1)
        return out

    @staticmethod
    def _covariance(x: Tensor) -> Tensor:
        """[DIM, DIM] float64."""
        total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
        mean = x.mean(0, dtype=torch.float64)
        for part in x.split(CHUNK):
            centred = part.to(torch.float64) - mean
            total += centred.T @ centred
        return total / len(x)

    def keys_and_values(self, extra: int) -> tuple[Tensor, Tensor]:
        """k [1, T + extra, H_kv, K], v [1, T + extra, H_kv, V]; the last `extra` positions, the questions', are 0."""
        T = len(self.word_ids)
        k = torch.zeros(1, T + extra, self.kv_heads, K, dtype=self.dtype, device=self.device)
        v = torch.zeros(1, T + extra, self.kv_heads, V, dtype=self.dtype, device=self.device)
        table = self._word_values * self._idf[:, None, None]
        table = torch.cat([table, torch.zeros_like(table[:1])]).to(self.dtype)  # row -1: no word
        v[0, :T] = table[torch.from_numpy(self.word_ids).to(self.device)]
        for head, x in enumerate(self.windows):
            k[0, :T, head] = self._place(x).to(self.dtype)
        return k, v

    @staticmethod
    def _place(x: Tensor) -> Tensor:
        """[..., DIM] -> [..., K]: into the slow pairs of both rotate-half halves."""
        half = DIM // 2
        zero = x.new_zeros(*x.shape[:-1], FIRST_PAIR)
        return torch.cat([zero, x[..., :half], zero, x[..., half:]], dim=-1)

    def question(self, text: str) -> Question:
        """Raises DemoError where no content word of the question occurs in the document."""
        words: dict[str, str] = {}  # stem -> as asked
        for token in tokenize(text):
            if (word := content_word(token)) is not None:
                words.setdefault(word, token)
        known = [word for word in words if word in self.vocabulary]
        unknown = [token for word, token in words.items() if word not in self.vocabulary]
        if not words:
            raise DemoError(f"--query {text!r}: the question holds no word to look for")
        if not known:
            raise DemoError(f"--query {text!r}: none of its words occurs in the document ({', '.join(unknown)})")
        vector = self.word_keys[[self.vocabulary[word] for word in known]].sum(0).to(torch.float64)
        heads = []
        for covariance in self._covariances:
            values, axes = torch.linalg.eigh(covariance)
            # Tokens that are all alike (a text of one word) have no covariance, and every token the same score.
            values = values.clamp(min=max(float(values[-1]) * FLOOR, 1e-12))
            for power in (0.0, -0.5):
                head = (axes * values**power) @ (axes.T @ vector)
                deviation = float((head @ covariance @ head).clamp(min=0).sqrt())
                heads.append(head * (SHARPNESS / deviation if deviation > 1e-6 else 0.0))
        return Question(text, self._place(torch.stack(heads)).to(self.dtype), known, unknown)

    def read_back(self, out: Tensor, count: int = 6) -> list[str]:
        """The words an output [H, V] holds most of; only those that stand out of the noise of hashing by 4 sigma."""
        per_kv = out.to(torch.float32).unflatten(0, (self.kv_heads, self.heads_per_kv)).mean(1)
        share = torch.einsum("whd,hd->w", self._word_values, per_kv)
        noise = float(per_kv.norm()) / V**0.5
        best = share.topk(min(count, len(share)))
        return [
            self.spelling[i] for x, i in zip(best.values.tolist(), best.indices.tolist(), strict=True) if x > 4 * noise
        ]
