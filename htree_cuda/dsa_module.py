"""`DSAttention`: multi-head latent attention in absorbed form with a lightning indexer, for both stages of training."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import checks
from .api import attn_dist, indexer_loss, sparse_attention
from .definition import accumulation_dtype
from .dense_loss import dense_indexer_loss
from .dsa import indexer_topk
from .module import _HeadNorm, place_of, weight_of
from .torch_backend.rotation import pairs

NORM_EPS = 1e-6


def rope(
    x: Tensor,
    positions: Tensor,
    *,
    dims: int,
    first: bool,
    interleaved: bool,
    base: float | None = None,
    freqs: Tensor | None = None,
) -> Tensor:
    """RoPE of x [..., T, heads, D] at positions [T], in the dtype of x. The caller names every part of the layout.

    dims: how many of the D elements are rotated; first: whether they are the first or the last; interleaved: whether
    pairs are (2m, 2m + 1) or (m, m + dims / 2) of them. The angle of pair m is the position times ``freqs[m]``, or
    times ``base ** (-2 m / dims)``. Angles are float64; cos and sin are rounded once, to the accumulation dtype.
    """
    checks.dsa_module.rope(x, positions, dims=dims, first=first, interleaved=interleaved, base=base, freqs=freqs)
    if freqs is None:
        freqs = base ** (-2.0 * torch.arange(dims // 2, dtype=torch.float64, device=x.device) / dims)
    acc = accumulation_dtype(x.dtype)
    angle = positions.to(torch.float64)[:, None, None] * freqs.to(x.device, torch.float64)
    cos, sin = angle.cos().to(acc), angle.sin().to(acc)
    rest = x.shape[-1] - dims
    part, other = x.split((dims, rest) if first else (rest, dims), dim=-1)[:: 1 if first else -1]
    a, b = pairs(part.to(acc), dims, interleaved)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    rotated = (torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)).to(x.dtype)
    return torch.cat((rotated, other) if first else (other, rotated), -1)


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    exists = x.device.type in ("cpu", "cuda") or torch.amp.is_autocast_available(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if exists else contextlib.nullcontext()


class Indexer(nn.Module):
    """The lightning indexer: small queries, one small key a token, and a weight for each head. Its inputs are detached
    here, so that no gradient of its loss reaches the model."""

    def __init__(self, d_model: int, q_lora_rank: int, n_heads: int, head_dim: int, place: dict):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, head_dim
        self.wq_b = nn.Linear(q_lora_rank, n_heads * head_dim, bias=False, **place)
        self.wk = nn.Linear(d_model, head_dim, bias=False, **place)
        self.k_norm = nn.LayerNorm(head_dim, eps=NORM_EPS, **place)
        # In the accumulation dtype, which rounds no weight of a head; the factor of all weights is folded in.
        dtype = accumulation_dtype(self.wk.weight.dtype)
        self.weights_proj = nn.Linear(d_model, n_heads, bias=False, device=place["device"], dtype=dtype)
        self.scale = n_heads**-0.5 * head_dim**-0.5

    def forward(
        self, x: Tensor, q_latent: Tensor, keys_alone: bool = False
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """x [B, T, d_model], q_latent [B, T, q_lora_rank] -> queries [B, T, n_heads, head_dim] and keys [B, T, 1,
        head_dim], not rotated yet, and weights [B, T, n_heads] in the accumulation dtype. keys_alone: None in place of
        queries and weights."""
        x, q_latent = x.detach(), q_latent.detach()
        k = self.wk(x)
        k = self.k_norm(k).to(k.dtype)
        if keys_alone:
            return None, k[:, :, None], None
        q = self.wq_b(q_latent).unflatten(2, (self.n_heads, self.head_dim))
        with _without_autocast(x):
            acc = accumulation_dtype(x.dtype)
            weights = F.linear(x.to(acc), weight_of(self.weights_proj).to(acc)) * self.scale
        return q, k[:, :, None], weights

    def reset_parameters(self) -> None:
        """Draws every parameter again."""
        for child in self.children():
            child.reset_parameters()


class DSAttention(nn.Module):
    """Causal self-attention of a decoder block by DeepSeek Sparse Attention: MLA over the keys that an indexer selects.

    Queries and keys come from latents (multi-head latent attention, in absorbed form: all heads share one key row of
    ``kv_lora_rank + qk_rope_head_dim`` numbers, whose first kv_lora_rank are the value). The lightning indexer scores
    every visible key, the ``index_topk`` best are attended to, and the indexer learns from that attention by a loss of
    its own, whose gradient reaches nothing else.

    Args:
        d_model: int >= 1, width of the input and the output.
        n_heads: int >= 1, heads of the attention.
        q_lora_rank: int >= 1, numbers of the latent of a token's queries.
        kv_lora_rank: int >= 1, numbers of the latent of a token's keys and values; default 512.
        qk_nope_head_dim: int >= 1, of a head's queries and keys without RoPE; default 128.
        qk_rope_head_dim: int >= 2, even, with RoPE; default 64.
        v_head_dim: int >= 1, of a head's values; default 128.
        index_n_heads: int >= 1, heads of the indexer; default 64.
        index_head_dim: int >= qk_rope_head_dim, of the indexer's queries and keys; their first qk_rope_head_dim are
            rotated; default 128.
        index_topk: int >= 1, keys that a query attends to; default 2048.
        rope_base: finite float > 0, or None where rope_inv_freq is given. No default: it belongs to the weights.
        rope_inv_freq: [qk_rope_head_dim / 2] float32 or float64, finite: pair m of position p is rotated by
            ``p * rope_inv_freq[m]`` (YaRN). It takes the place of rope_base, which is then None or 10000. The indexer
            uses the same frequencies. It is no entry of the state dict. Default None.
        rope_interleaved: bool, whether the attention's pairs are (2m, 2m + 1) (True, DeepSeek) or the halves. No
            default: weights trained one way work with no other, and no shape tells.
        index_rope_interleaved: bool, the same for the indexer: False for DeepSeek-V3.2, True for GLM-5. No default.
        sm_scale: finite float, score scale; default ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, to be multiplied
            by YaRN's factor where the model has it. It is not that of the absorbed width.
        stage: "sparse" (default), or "warmup": dense attention, and the indexer learns from all visible keys. It may be
            set between calls.
        backend: "auto" or "torch", as in `htree_cuda.forward`. Dense attention in stage "warmup" is PyTorch's
            scaled_dot_product_attention with either.
        device, dtype: of the parameters.

    Shape of the call ``module(x, past=None, return_kv=False)``:
        x: [B, T_q, d_model]; all sequences of a batch have one length.
        past: (latents [B, T_past, kv_lora_rank + qk_rope_head_dim], indexer keys [B, T_past, index_head_dim]) of the
            tokens before x, as an earlier call returned them; default None: there are none.
        return_kv: bool; also return the cache.

    Returns:
        (out, loss), or (out, loss, (latents, indexer keys)) of the T_past + T_q tokens so far.
        out: [B, T_q, d_model].
        loss: float32 scalar (float64 where the parameters are), the indexer's, averaged over the queries; None in eval
        mode, where it is not computed.

    Raises:
        TypeError, ValueError: an argument breaks a rule above.
        UnsupportedError: CUDA tensors the kernels do not cover, with backend "auto"; the message names the way out.

    Notes:
        State dict: the names of DeepSeek's model: ``wq_a, q_norm, wq_b, wkv_a, kv_norm, wkv_b, wo, indexer.wq_b,
        indexer.wk, indexer.k_norm, indexer.weights_proj`` (``.weight`` each, ``indexer.k_norm.bias`` too), and its
        shapes: a head of wq_b is [nope, rope], a head of wkv_b [key without RoPE, value], wkv_a is [latent, rope].
        Gradients: ``out`` has one for every parameter but the indexer's, ``loss`` for the indexer's alone: its inputs
        are detached, the selection and the target are constants. Add the losses of all layers to the model's own.
        The warm-up freezes the model: ``model.requires_grad_(False)``, then ``layer.indexer.requires_grad_(True)``.
        With ``index_topk`` >= the number of keys both stages compute the same.
        indexer.weights_proj is made with float32 parameters, float64 in a float64 module, which a cast such as
        ``module.bfloat16()`` rounds like all others; it multiplies in no less than float32.
        Memory: the list and its target, 4 to 12 bytes a query and slot, beside what the three functions need.
        Determinism: as `htree_cuda.sparse_attention` and `htree_cuda.indexer_topk`. Autocast: as nn.Linear; the
        indexer's weights stay float32.
        Cache: keys are cached with RoPE at their position, so ``latents[:, :n]`` and ``keys[:, :n]`` cut a past.

    Example:
        >>> attention = htree_cuda.DSAttention(
        ...     256, 4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        ...     index_n_heads=4, index_head_dim=32, index_topk=64, rope_base=10000.0, rope_interleaved=True,
        ...     index_rope_interleaved=False)
        >>> out, loss = attention(torch.randn(1, 500, 256))
        >>> (out.square().mean() + loss).backward()
        >>> out, _, past = attention.eval()(torch.randn(1, 500, 256), return_kv=True)  # prefill, then one token:
        >>> out, _, past = attention(torch.randn(1, 1, 256), past=past, return_kv=True)

    Source: DeepSeek-V3.2 (DeepSeek Sparse Attention), DeepSeek-V2 (multi-head latent attention), docs/guides/dsa.md.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        q_lora_rank: int,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        index_n_heads: int = 64,
        index_head_dim: int = 128,
        index_topk: int = 2048,
        rope_base: float | None,
        rope_inv_freq: Tensor | None = None,
        rope_interleaved: bool,
        index_rope_interleaved: bool,
        sm_scale: float | None = None,
        stage: str = "sparse",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes, self.rope_base, self.sm_scale = checks.dsa_module.module(
            {
                "d_model": d_model, "n_heads": n_heads, "q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank,
                "qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim, "v_head_dim": v_head_dim,
                "index_n_heads": index_n_heads, "index_head_dim": index_head_dim, "index_topk": index_topk,
            },
            rope_base=rope_base, rope_inv_freq=rope_inv_freq, sm_scale=sm_scale, stage=stage, backend=backend,
            flags={"rope_interleaved": rope_interleaved, "index_rope_interleaved": index_rope_interleaved},
            dtype=torch.get_default_dtype() if dtype is None else dtype,
        )  # fmt: skip
        for name, value in sizes.items():
            setattr(self, name, value)
        # Not a buffer: a buffer would be cast with the module, and bfloat16 frequencies are others.
        self.rope_inv_freq = None if rope_inv_freq is None else rope_inv_freq.detach().to(torch.float64)
        self._moved_table: tuple[Tensor | None, Tensor | None] = (None, None)  # copied to a device, its copy
        self.rope_interleaved, self.index_rope_interleaved = rope_interleaved, index_rope_interleaved
        self.backend = backend
        self.stage = stage
        place = {"device": device, "dtype": dtype}
        heads, latent = self.n_heads, self.kv_lora_rank
        self.wq_a = nn.Linear(self.d_model, self.q_lora_rank, bias=False, **place)
        self.q_norm = _HeadNorm(self.q_lora_rank, eps=NORM_EPS, **place)
        self.wq_b = nn.Linear(
            self.q_lora_rank, heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), bias=False, **place
        )
        self.wkv_a = nn.Linear(self.d_model, latent + self.qk_rope_head_dim, bias=False, **place)
        self.kv_norm = _HeadNorm(latent, eps=NORM_EPS, **place)
        self.wkv_b = nn.Linear(latent, heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False, **place)
        self.wo = nn.Linear(heads * self.v_head_dim, self.d_model, bias=False, **place)
        self.indexer = Indexer(self.d_model, self.q_lora_rank, self.index_n_heads, self.index_head_dim, place)

    @property
    def stage(self) -> str:
        """ "sparse" or "warmup"."""
        return self._stage

    @stage.setter
    def stage(self, value: str) -> None:
        self._stage = checks.dsa_module.stage(value)

    def reset_parameters(self) -> None:
        """Draws every parameter again, in the order of the state dict, as PyTorch's own layers do."""
        for child in self.children():
            child.reset_parameters()

    def _rope(self, x: Tensor, start: int, *, first: bool, interleaved: bool) -> Tensor:
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        return rope(
            x, positions, dims=self.qk_rope_head_dim, first=first, interleaved=interleaved, base=self.rope_base,
            freqs=self._frequencies(x.device),
        )  # fmt: skip

    def _frequencies(self, device: torch.device) -> Tensor | None:
        """The table on the device of the call. Its copy is kept beside it, since one on meta holds no numbers."""
        table = self.rope_inv_freq
        if table is None or table.device == device:
            return table
        source, copy = self._moved_table
        if source is not table or copy.device != device:
            copy = table.to(device)
            self._moved_table = (table, copy)
        return copy

    def _key_and_value_weights(self) -> tuple[Tensor, Tensor]:
        """wkv_b as [n_heads, qk_nope_head_dim, kv_lora_rank] and [n_heads, v_head_dim, kv_lora_rank]."""
        weight = weight_of(self.wkv_b).unflatten(0, (self.n_heads, self.qk_nope_head_dim + self.v_head_dim))
        return weight.split((self.qk_nope_head_dim, self.v_head_dim), dim=1)

    def project(
        self, x: Tensor, start: int = 0, keys_alone: bool = False
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor, Tensor | None]]:
        """x [B, T, d_model] at positions from start on -> (queries [B, T, n_heads, nope + rope], key rows [B, T, 1,
        kv_lora_rank + rope], (queries, keys and weights of the indexer)), all rotated. keys_alone: None in
        place of the queries and weights of the indexer."""
        q_latent = self.q_norm(self.wq_a(x))
        head = (self.n_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        q = self._rope(self.wq_b(q_latent).unflatten(2, head), start, first=False, interleaved=self.rope_interleaved)
        latent, k_rope = self.wkv_a(x).split((self.kv_lora_rank, self.qk_rope_head_dim), dim=2)
        kv = torch.cat((self.kv_norm(latent), k_rope), dim=2)[:, :, None]
        kv = self._rope(kv, start, first=False, interleaved=self.rope_interleaved)
        q_i, k_i, weights = self.indexer(x, q_latent, keys_alone)
        q_i, k_i = (
            y if y is None else self._rope(y, start, first=True, interleaved=self.index_rope_interleaved)
            for y in (q_i, k_i)
        )
        return q, kv, (q_i, k_i, weights)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [B, T, n_heads, nope + rope] -> [B, T, n_heads, kv_lora_rank + rope], which meet the key rows."""
        q_nope, q_rope = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=3)
        absorbed = torch.einsum("bthn,hnc->bthc", q_nope, self._key_and_value_weights()[0])
        return torch.cat((absorbed, q_rope.to(absorbed.dtype)), dim=3)

    def _sparse(self, q: Tensor, kv: Tensor, indexer: tuple[Tensor, ...], start: int) -> tuple[Tensor, Tensor | None]:
        """(values of each head [B, T_q, n_heads, v_head_dim], loss)."""
        rule = {"q_start": start, "backend": self.backend}
        topk = max(1, min(self.index_topk, kv.shape[1]))
        if self.training:
            indices, logits = indexer_topk(*indexer, topk, return_logits=True, **rule)
        else:
            indices, logits = indexer_topk(*indexer, topk, **rule), None
        q = self.absorb(q)
        kv = kv.to(q.dtype)
        out, lse = sparse_attention(q, kv, indices, d_v=self.kv_lora_rank, sm_scale=self.sm_scale, **rule)
        out = torch.einsum("bthc,hvc->bthv", out, self._key_and_value_weights()[1])
        if logits is None:
            return out, None
        target = attn_dist(q, kv, indices, lse, sm_scale=self.sm_scale, **rule)
        return out, indexer_loss(logits, target, indices, s_kv=kv.shape[1], q_start=start)

    def _dense(self, q: Tensor, kv: Tensor, indexer: tuple[Tensor, ...], start: int) -> tuple[Tensor, Tensor | None]:
        """As `_sparse`, with attention to all keys, whose heads have keys and values of their own: fewer products than
        in absorbed form. The indexer's target needs that form, and no gradient."""
        # A softmax weight of 0 times a NaN is NaN, so that a masked row would show: it is zeroed, and the queries that
        # see it get its NaN afterwards.
        finite = kv[:, :, 0].isfinite().all(2)
        rows = torch.where(finite[:, :, None], kv[:, :, 0], 0.0)
        latent, k_rope = rows.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=2)
        head = (self.n_heads, self.qk_nope_head_dim + self.v_head_dim)
        k, v = self.wkv_b(latent).unflatten(2, head).split((self.qk_nope_head_dim, self.v_head_dim), dim=3)
        k = torch.cat((k, k_rope[:, :, None].to(k.dtype).expand(-1, -1, self.n_heads, -1)), dim=3)
        heads = [x.to(k.dtype).transpose(1, 2) for x in (q, k, v)]
        T_q, T = q.shape[1], kv.shape[1]
        mask = None
        if start:
            mask = torch.arange(T, device=q.device) <= torch.arange(start, start + T_q, device=q.device)[:, None]
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, scale=self.sm_scale)
        sees_nan = (~finite).cumsum(1)[:, start:] > 0
        out = out.transpose(1, 2).masked_fill(sees_nan[:, :, None, None], torch.nan)
        if not self.training:
            return out, None
        with torch.no_grad():
            absorbed = self.absorb(q)
            keys = kv.to(absorbed.dtype)
            numbers = {"sm_scale": self.sm_scale, "backend": self.backend}
            lse = torch.ops.htree_cuda.dense_lse(absorbed, keys, q_start=[start], **numbers)
        natural = {"lse_base": torch.e, "q_start": start}
        return out, dense_indexer_loss(*indexer, absorbed, keys, lse, **natural, **numbers)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None, return_kv: bool = False
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
        """See the class."""
        widths = (self.kv_lora_rank + self.qk_rope_head_dim, self.index_head_dim)
        checks.dsa_module.module_input(x, past, return_kv, place_of(self.wq_a), widths)
        start = 0 if past is None else past[0].shape[1]
        # Dense attention without a loss needs the indexer's keys alone, for the tokens that come after.
        q, kv, (q_i, k_i, weights) = self.project(x, start, self.stage == "warmup" and not self.training)
        if past is not None:
            kv, k_i = (torch.cat((old[:, :, None].to(new), new), 1) for old, new in zip(past, (kv, k_i), strict=True))
        attend = self._sparse if self.stage == "sparse" else self._dense
        out, loss = attend(q, kv, (q_i, k_i, weights), start)
        out = self.wo(out.flatten(2))
        return (out, loss, (kv[:, :, 0], k_i[:, :, 0])) if return_kv else (out, loss)

    def extra_repr(self) -> str:
        names = (
            "d_model", "n_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "index_n_heads", "index_head_dim", "index_topk", "rope_base", "rope_interleaved", "index_rope_interleaved",
            "sm_scale", "stage", "backend",
        )  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
