"""`HTreeAttention`: the projections around `forward`, as a module for a decoder block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import checks
from .api import forward
from .autocast import autocast_enabled
from .cache import TreeCache, forward_cached
from .layout import layers_for
from .varlen import forward_varlen

# The options of `forward` that decide what a query attends to: weights belong to them.
TREE_NUMBERS = ("compression_rate", "top_k_per_layer", "max_top_nodes", "scale", "rope_base", "strict_causal")


def _casts(value: float) -> set[float]:
    """What a number may be after casts of its tensor, one after another: float16 and then bfloat16 round twice."""
    found, new = {value}, {value}
    while new:
        exact = [torch.tensor(x, dtype=torch.float64, device="cpu") for x in new]
        new = {x.to(dtype).item() for x in exact for dtype in checks.common.FLOAT_DTYPES} - found
        found |= new
    return found


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a projection. `torch.ao.quantization.quantize_dynamic` puts layers in their place that keep theirs
    packed: of one of them the numbers that stand for it, in float32."""
    weight = layer.weight
    return weight if isinstance(weight, Tensor) else weight().dequantize()


def place_of(layer: nn.Module) -> Tensor:
    """A tensor with the dtype and device of what a projection takes and gives: its weight, where it is none packed."""
    if isinstance(layer.weight, Tensor):
        return layer.weight
    return torch.empty(0, layer.in_features, device="cpu", dtype=torch.float32)


class _HeadNorm(nn.RMSNorm):
    """RMSNorm whose gain takes the dtype of the input, as autocast's other operands do: only then is it one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Sequence:
    """Whose ranks share a sequence, and how. A copy of a module, which copies all that it holds, keeps the group."""

    def __init__(self, group, layout: str):
        self.options = {"group": checks.distributed.group("HTreeAttention", group), "layout": layout}

    def __deepcopy__(self, memo) -> _Sequence:
        return self


class HTreeAttention(nn.Module):
    """Causal self-attention of a decoder block by `htree_cuda.forward`: projections, grouped KV heads, a KV cache.

    Args:
        d_model: int >= 1, width of the input and the output.
        n_heads: int >= 1, query heads.
        n_kv_heads: int >= 1, divides n_heads; default n_heads. The ``n_heads / n_kv_heads`` query heads of a KV head,
            its group, share its keys, its values and the selection of nodes. Larger groups are faster, and the default,
            a group of 1, is the slowest; groups of 8 and 16 are what the kernels are made for.
        head_dim: int >= 2, even, of queries and keys; default ``d_model / n_heads``.
        v_head_dim: int >= 1, of values; default head_dim.
        qk_norm: bool; RMSNorm over head_dim, with a gain shared by the heads, on queries and on keys; default False.
            RoPE comes after.
        bias: bool; biases in the four projections; default False.
        dropout: must be 0. It is named only so that a block with attention dropout fails here and not in silence.
        compression_rate, top_k_per_layer, max_top_nodes, scale, rope_base, strict_causal, backend, deterministic,
            save_selection: as in `htree_cuda.forward`; rope_base is a number here, never None.
        context_parallel_group: torch.distributed process group, or `DeviceMesh` of one dimension, whose ranks share
            each sequence: x then holds this rank's tokens, and attention is
            `htree_cuda.distributed.context_parallel_forward`; default None. Not with past, cache or seqused.
        context_parallel_layout: "zigzag" (default) or "contiguous": which tokens, as in
            `htree_cuda.distributed.positions`.
        device, dtype: of the parameters.

    Shape of the call ``module(x, past=None, return_kv=False, *, cache=None, seqused=None, cu_seqlens=None,
    max_seqlen=None)``:
        x: [B, T_q, d_model], dtype of the parameters; with cu_seqlens [total, d_model], sequences packed.
        cache: a `TreeCache` (`new_cache` makes one) of the tokens before x; those of x are appended. The work of a step
            grows with the number of layers, that is, with the logarithm of the length. No gradient.
        seqused: [B] int32 on the device, 0 .. T_q, how many tokens of each row of x exist, the first ones; default:
            all. The others are padding: no token sees them, and what the module returns for them is that of an
            attention output of 0. Not with past.
        cu_seqlens: [N + 1] int32 on the device, where each of N sequences of x begins and the last one ends, as in
            `htree_cuda.forward_varlen`; with max_seqlen, int, at least the longest sequence.
        past: (k [B, T_past, n_kv_heads, head_dim], v [B, T_past, n_kv_heads, v_head_dim]) of the tokens before x, as an
            earlier call returned them; default None: there are none. A call copies them and pools them again, O(T).
            The layout is [B, T, H, D], sequence before heads, as everywhere in htree_cuda; PyTorch's
            scaled_dot_product_attention has heads first.
        return_kv: bool; also return the keys and values, without a cache.

    Returns:
        out [B, T_q, d_model], or with return_kv (out, (k, v)), k and v of the T_past + T_q tokens so far.

    Raises:
        TypeError, ValueError: an argument breaks a rule above or of `htree_cuda.forward`.
        UnsupportedError: CUDA tensors the kernels do not cover, with backend "auto"; their message names the way out.

    Notes:
        State dict: ``q_proj.weight`` [n_heads * head_dim, d_model], ``k_proj.weight`` [n_kv_heads * head_dim, d_model],
        ``v_proj.weight`` [n_kv_heads * v_head_dim, d_model], ``o_proj.weight`` [d_model, n_heads * v_head_dim], with
        bias a ``.bias`` each, with qk_norm ``q_norm.weight`` and ``k_norm.weight`` [head_dim]. These names are kept.
        ``_extra_state`` [6] float64 holds the numbers of the tree (compression_rate, top_k_per_layer, max_top_nodes,
        scale, rope_base, strict_causal): loading raises ValueError where the module has others, because weights belong
        to the tree that they were trained with. A state dict without the entry loads, and so does one that was cast to
        another floating dtype or holds meta tensors.
        lse: the module returns none. The lse of `htree_cuda.forward` is a natural logarithm; that of
        `htree_cuda.sparse_attention` and `htree_cuda.attn_dist` has the base ``lse_base``, 2 unless told.
        Cache: keys are cached without RoPE, because a key's position depends on who looks at it, so a cache never
        has to be rotated. With ``cache`` a step reads the candidates of its query alone. With ``past`` what a call
        returns is a new tensor, and every call copies the old one and pools the tree again: work that grows with T.
        Nothing in either is tied to a step: ``k[:, :n]`` cuts a past, `TreeCache.truncate` a cache.
        Padding: on the right, named by seqused; or none at all, with cu_seqlens.
        Memory, gradients, autocast: as `htree_cuda.forward`.

    Example:
        >>> attention = htree_cuda.HTreeAttention(256, 8, 2, qk_norm=True, top_k_per_layer=32)
        >>> out = attention(torch.randn(1, 4096, 256))
        >>> out, past = attention(torch.randn(1, 4096, 256), return_kv=True)  # prefill, then one token:
        >>> out, past = attention(torch.randn(1, 1, 256), past=past, return_kv=True)
        >>> cache = attention.new_cache(1, max_tokens=8192)  # decoding at a cost that does not grow:
        >>> with torch.no_grad():
        ...     out = attention(torch.randn(1, 500, 256), cache=cache)
        ...     out = attention(torch.randn(1, 1, 256), cache=cache)

    Source: docs/guides/training.md; grouped queries: Ainslie et al. 2023; query-key norm: Henry et al. 2020.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        compression_rate: int = 16,
        top_k_per_layer: int = 512,
        max_top_nodes: int | None = None,
        scale: float | None = None,
        rope_base: float = 10000.0,
        strict_causal: bool = True,
        backend: str = "auto",
        deterministic: bool | None = None,
        save_selection: bool | str = "auto",
        context_parallel_group=None,
        context_parallel_layout: str = "zigzag",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        options = {
            "compression_rate": compression_rate, "top_k_per_layer": top_k_per_layer, "max_top_nodes": max_top_nodes,
            "scale": scale, "rope_base": rope_base, "strict_causal": strict_causal, "backend": backend,
            "deterministic": deterministic, "save_selection": save_selection,
        }  # fmt: skip
        sizes, self.options = checks.tree.attention_module(
            d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
            dropout=dropout, dtype=torch.get_default_dtype() if dtype is None else dtype,
            flags={"qk_norm": qk_norm, "bias": bias}, options=options,
        )  # fmt: skip
        self.d_model, self.n_heads, self.n_kv_heads = (sizes[name] for name in ("d_model", "n_heads", "n_kv_heads"))
        self.head_dim, self.v_head_dim = sizes["head_dim"], sizes["v_head_dim"]
        checks.distributed.layout("HTreeAttention", context_parallel_layout, "context_parallel_layout")
        self._sequence = None
        if context_parallel_group is not None:
            self._sequence = _Sequence(context_parallel_group, context_parallel_layout)
        place = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(self.d_model, self.n_heads * self.head_dim, bias=bias, **place)
        self.k_proj = nn.Linear(self.d_model, self.n_kv_heads * self.head_dim, bias=bias, **place)
        self.v_proj = nn.Linear(self.d_model, self.n_kv_heads * self.v_head_dim, bias=bias, **place)
        self.o_proj = nn.Linear(self.n_heads * self.v_head_dim, self.d_model, bias=bias, **place)
        self.q_norm = _HeadNorm(self.head_dim, eps=1e-6, **place) if qk_norm else None
        self.k_norm = _HeadNorm(self.head_dim, eps=1e-6, **place) if qk_norm else None

    def reset_parameters(self) -> None:
        """Draws every parameter again, in the order of the state dict, as PyTorch's own layers do."""
        for child in self.children():
            child.reset_parameters()

    def _tree_numbers(self) -> dict[str, float]:
        """What the weights were trained for, every default resolved; names and order are those of the state dict."""
        numbers = {name: self.options[name] for name in TREE_NUMBERS}
        if numbers["max_top_nodes"] is None:
            numbers["max_top_nodes"] = numbers["top_k_per_layer"] * numbers["compression_rate"]
        if numbers["scale"] is None:
            numbers["scale"] = self.head_dim**-0.5
        return {name: float(x) for name, x in numbers.items()}

    def get_extra_state(self) -> Tensor:
        """[6] float64, the numbers of the tree in the order of TREE_NUMBERS: a tensor, which every format holds."""
        return torch.tensor(list(self._tree_numbers().values()), dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ValueError where the weights come from a module with another tree; changes nothing."""
        mine = self._tree_numbers()
        if not isinstance(state, Tensor) or state.numel() != len(mine):
            found = f"{state.numel()} numbers" if isinstance(state, Tensor) else type(state).__name__
            checks.common.fail("HTreeAttention", f"_extra_state must be a tensor of {len(mine)} numbers", found)
        if state.is_meta:  # as the other entries of such a state dict, it has a shape alone
            return
        for (name, value), theirs in zip(mine.items(), state.flatten().tolist(), strict=True):
            # Whoever casts a checkpoint casts this entry too, perhaps more than once.
            if theirs not in _casts(value):
                checks.common.fail(
                    "HTreeAttention",
                    f"{name} of the state dict must be that of the module ({value:.17g}); weights that shall be used "
                    "with another tree are loaded without the entry _extra_state",
                    f"{theirs:.17g}",
                )

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *others) -> None:
        """A state dict without the numbers (projections of another attention, say) loads as it is."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)
        if (name := f"{prefix}_extra_state") in missing_keys:
            missing_keys.remove(name)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T_q, d_model] or [total, d_model] -> q, k, v as `attend` takes them, normalised where the module does
        that."""
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.n_kv_heads, self.v_head_dim))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _check_kernels(self, q: Tensor) -> None:
        """Names the sizes of the module where the kernels do not take them, before an op does by its own names."""
        if self.options["backend"] == "auto":
            checks.support.module_heads(q, self.head_dim, self.v_head_dim, self.n_heads // self.n_kv_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T_q, n_heads, head_dim], the last T_q of k [B, T, n_kv_heads, head_dim] and v [B, T, n_kv_heads,
        v_head_dim] -> [B, T_q, n_heads, v_head_dim]. The one step a subclass replaces to compare attentions."""
        if self._sequence is not None:
            from .distributed import context_parallel_forward

            return context_parallel_forward(q, k, v, **self._sequence.options, **self.options)
        checks.tree.module_tokens(k)
        self._check_kernels(q)
        return forward(q, k, v, **self.options)

    def attend_varlen(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """`attend` for packed sequences: q [total, n_heads, head_dim], k and v likewise."""
        if self._sequence is not None:
            from .distributed import context_parallel_forward

            lengths = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            return context_parallel_forward(q, k, v, **lengths, **self._sequence.options, **self.options)
        self._check_kernels(q)
        return forward_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **self.options)

    def attend_ragged(self, q: Tensor, k: Tensor, v: Tensor, seqused: Tensor) -> Tensor:
        """`attend` where seqused [B] rows of each sequence exist, of queries and of keys."""
        checks.tree.module_tokens(k)
        self._check_kernels(q)
        return forward(q, k, v, seqused_q=seqused, seqused_k=seqused, **self.options)

    @property
    def context_parallel_group(self):
        """The process group whose ranks share a sequence, or None."""
        return None if self._sequence is None else self._sequence.options["group"]

    def new_cache(self, batch_size: int, max_tokens: int, **options) -> TreeCache:
        """An empty `TreeCache` for calls with ``cache``. Shapes, dtype, device and as many layers as max_top_nodes asks
        for are the module's; options are those of `TreeCache`, page_size for example."""
        weight = place_of(self.k_proj)
        max_tokens = checks.common.integer("TreeCache", "max_tokens", max_tokens)
        checks.common.size("TreeCache", "max_tokens", max_tokens)
        most = None
        if "num_layers" not in options and "compression_rate" not in options:  # of another rate: `TreeCache` judges it
            most = int(self._tree_numbers()["max_top_nodes"])
            options["num_layers"] = layers_for(max_tokens, self.options["compression_rate"], most)
        place = {"dtype": weight.dtype, "device": weight.device, "compression_rate": self.options["compression_rate"]}
        shape = (batch_size, max_tokens, self.n_kv_heads, self.head_dim, self.v_head_dim)
        cache = TreeCache(*shape, **{**place, **options})
        cache._max_top_nodes = most
        return cache

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: TreeCache, seqused: Tensor | None) -> Tensor:
        """Appends k, v to the cache and attends from q, of the shapes of `attend`, of which the first seqused exist."""
        # Before the cache is changed.
        checks.cache.no_gradient("HTreeAttention", q, k, v)
        checks.cache.top_layer("HTreeAttention", cache.layout, int(self._tree_numbers()["max_top_nodes"]))
        self._check_kernels(q)
        backend = self.options["backend"]
        cache.append(k, v, seqused=seqused, backend=backend)
        tree = {name: self.options[name] for name in ("top_k_per_layer", "max_top_nodes", "scale", "rope_base")}
        return forward_cached(q, cache, seqused_q=seqused, backend=backend, **tree)

    def forward(
        self,
        x: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        return_kv: bool = False,
        *,
        cache: TreeCache | None = None,
        seqused: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """See the class."""
        checks.tree.attention_module_input(
            x, past, d_model=self.d_model, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim,
            v_head_dim=self.v_head_dim, weight=place_of(self.q_proj), packed=cu_seqlens is not None,
        )  # fmt: skip
        checks.varlen.module_lengths(x, cu_seqlens, max_seqlen, seqused, past, cache, self._sequence is not None)
        checks.common.boolean("HTreeAttention", "return_kv", return_kv)
        if self._sequence is not None:
            checks.distributed.module_call(past=past, cache=cache, seqused=seqused)
        if cache is not None:
            numbers = {name: self.options[name] for name in ("compression_rate", "strict_causal")}
            shape = {name: getattr(self, name) for name in ("n_kv_heads", "head_dim", "v_head_dim")}
            checks.cache.module_cache(cache, past, return_kv, x=x, shape=shape, **numbers)
        q, k, v = self.project(x)
        if cache is not None:
            return self.o_proj(self.attend_cached(q, k, v, cache, seqused).flatten(2))
        if past is not None:
            if not autocast_enabled(x.device.type):
                checks.common.same_dtype("HTreeAttention", "x", k, **{"k of past": past[0], "v of past": past[1]})
            # Under autocast dtypes may differ: the wider one keeps what the past has.
            dtypes = [torch.promote_types(old.dtype, new.dtype) for old, new in zip(past, (k, v))]
            k, v = (torch.cat((old.to(t), new.to(t)), dim=1) for old, new, t in zip(past, (k, v), dtypes))
        if cu_seqlens is not None:
            out = self.attend_varlen(q, k, v, cu_seqlens, max_seqlen)
        elif seqused is not None:
            out = self.attend_ragged(q, k, v, seqused)
        else:
            out = self.attend(q, k, v)
        out = self.o_proj(out.flatten(-2))
        return (out, (k, v)) if return_kv else out

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, "
            f"head_dim={self.head_dim}, v_head_dim={self.v_head_dim}, {options}"
        )
