"""The attention function and the mask function that transformers calls, and the hooks that prepare their arguments."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import htree_cuda

from ... import checks
from ...autocast import autocast_enabled
from .cache import HTreeCacheLayer, htree_layers
from .call import Call, make_call
from .rotation import Rotation

NAME = "htree_cuda"  # of the attention implementation, and of the entry in the configuration
CACHE_NAMES = ("cache", "past_key_values")  # the argument's name, of transformers 5.24 and before
DENSE_WAY_OUT = "; or run this call on the dense model: htree_cuda.integrations.transformers.revert(model)"


@dataclass
class Tree:
    """What a converted attention module knows of its tree."""

    compression_rate: int
    top_k_per_layer: int
    backend: str
    rotation: Rotation

    def options(self, scaling: float, device: torch.device) -> dict:
        """Keyword arguments that `forward`, `forward_varlen` and `forward_cached` share."""
        options = {
            "top_k_per_layer": self.top_k_per_layer, "backend": self.backend,
            "scale": scaling * self.rotation.factor**2,
        }  # fmt: skip
        return {**options, **self.rotation.options(device)}


# ------------------------------------------------------------------------------------------------ attention and masks


def htree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    htree_call: Call | None = None,
    htree_layer: HTreeCacheLayer | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function of transformers: query [B, H, T, D], not rotated -> [B, T, H, D].

    Modules that are not converted (sliding windows, say) get the implementation that the model had.
    """
    tree: Tree | None = getattr(module, "htree", None)
    if tree is None:
        if dropout:
            kwargs["dropout"] = dropout
        return _dense(module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if dropout:
        raise ValueError(
            f"htree attention: attention dropout must be 0, got {dropout}; set model.config.attention_dropout and "
            "attention_dropout of the attention modules to 0" + DENSE_WAY_OUT
        )
    if kwargs.get("softcap") is not None:
        raise ValueError(f"htree attention: scores have no soft-cap, got {kwargs['softcap']}{DENSE_WAY_OUT}")
    call = Call() if htree_call is None else htree_call.on(query.device)
    if htree_call is None and attention_mask is not None:
        raise ValueError(
            "htree attention: a layer that is called without its model takes no attention_mask" + DENSE_WAY_OUT
        )
    options = tree.options(module.head_dim**-0.5 if scaling is None else scaling, query.device)
    if (sink := kwargs.get("s_aux")) is not None:  # one of each head, as GPT-OSS has them
        options["attn_sink"] = sink.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if htree_layer is not None and htree_layer.seen > query.shape[2]:
        # The keys are in the tree.
        checks.cache.no_gradient("htree attention", q)
        out = htree_cuda.forward_cached(
            call.compact(q).to(htree_layer.dtype), htree_layer.tree, seqused_q=call.used, **options
        )
        return call.spread(out).to(query.dtype), None
    options["compression_rate"] = tree.compression_rate
    if call.cu_seqlens is not None:
        B = q.shape[0]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu, longest = call.cu_seqlens, call.max_seqlen
        out = htree_cuda.forward_varlen(q, k, v, cu, cu, longest, longest, **options)
        return out.unflatten(0, (B, -1)), None
    if call.used is None:
        return htree_cuda.forward(q, k, v, **options), None
    q, k, v = (call.compact(x) for x in (q, k, v))
    return call.spread(htree_cuda.forward(q, k, v, seqused_k=call.used, seqused_q=call.used, **options)), None


def _settings(config) -> dict:
    settings = getattr(config, NAME, None)
    if not isinstance(settings, dict):
        raise RuntimeError(
            f"attention implementation {NAME!r}: the model must be converted first, by "
            "htree_cuda.integrations.transformers.convert(model, top_k_per_layer=...)"
        )
    return settings


def _dense(module: nn.Module):
    """The attention function of a module that is not converted."""
    eager = None
    for kind in type(module).__mro__:
        eager = eager or getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(_settings(module.config)["attn_implementation"], eager)


def htree_mask(*args, config=None, **kwargs):
    """The mask function: none for converted layers, which read the call itself; for other layers the model's own.

    A configuration that has its entry from a file alone, not from `convert`, may be that of a dense model.
    """
    settings = _settings(config)
    if "local_size" not in kwargs and settings["covers_full_attention"] and hasattr(config, "attn_implementation"):
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[settings["attn_implementation"]](*args, config=config, **kwargs)


# -------------------------------------------------------------------------------------------------------------- hooks


def before_attention(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before a converted attention module: no rotation (cos 1, sin 0), and its layer of the cache."""
    if module.config._attn_implementation != NAME:
        raise RuntimeError(
            f"htree attention: the attention implementation of a converted model must stay {NAME!r}, got "
            f"{module.config._attn_implementation!r}; call revert(model), set it, and convert again"
        )
    cos, _ = args[1] if len(args) > 1 else kwargs["position_embeddings"]
    dtype = cos.dtype
    if autocast_enabled(cos.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(cos.device.type)  # else queries and keys would become float32
    one = torch.ones((1, 1, cos.shape[-1]), dtype=dtype, device=cos.device)
    identity = (one, torch.zeros_like(one))
    if len(args) > 1:
        args = (args[0], identity, *args[2:])
    else:
        kwargs = {**kwargs, "position_embeddings": identity}
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    if cache is not None:
        layer = cache.layers[module.layer_idx]
        layer.awaited = True
        kwargs = {**kwargs, "htree_layer": layer}
    return args, kwargs


def before_model(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before the decoder: what the call says of its sequences, once for all layers; layers of the cache made."""
    kwargs = {**dict(zip(model.htree_arguments, args)), **kwargs}
    refuse(model, kwargs)
    tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    if tokens is None:
        return (), kwargs  # the model says what is missing
    name = next((name for name in CACHE_NAMES if name in model.htree_arguments), CACHE_NAMES[0])
    cache = next((kwargs[other] for other in CACHE_NAMES if kwargs.get(other) is not None), None)
    learns = model.training and torch.is_grad_enabled()
    if cache is None and kwargs.get("use_cache") is None and (learns or kwargs.get("cu_seq_lens_q") is not None):
        kwargs["use_cache"] = False
    wanted = kwargs.get("use_cache")
    if wanted is None:
        wanted = getattr(model.config, "use_cache", False)
    if cache is None and wanted and not (learns and getattr(model, "gradient_checkpointing", False)):
        cache = kwargs[name] = new_layers(model, DynamicCache(config=model.config))
    elif cache is not None:
        new_layers(model, cache)
    layers = htree_layers_of(model, cache)
    cached = layers[0].seen if layers else None
    call = make_call(
        tuple(tokens.shape[:2]),
        kwargs.get("attention_mask"),
        kwargs.get("position_ids"),
        cached,
        layers[0].valid if layers else None,
        kwargs,
    )
    if call.cu_seqlens is not None:
        refuse_packed(model, kwargs.get("position_ids") is not None)
    for layer in layers:
        layer.call = call
    kwargs["htree_call"] = call
    return (), kwargs


def new_layers(model: nn.Module, cache: Cache, capacity: int | None = None) -> Cache:
    """The cache, with trees for the converted layers of a decoder."""
    wanted = {
        layer.self_attn.layer_idx: {"compression_rate": tree.compression_rate, "backend": tree.backend}
        for layer in model.layers
        if (tree := getattr(layer.self_attn, "htree", None)) is not None
    }
    htree_layers(cache, wanted, capacity, dense=lambda: DynamicCache(config=model.config))
    return cache


def htree_layers_of(model: nn.Module, cache: Cache | None) -> list[HTreeCacheLayer]:
    """The layers of the cache that hold trees."""
    return [] if cache is None else [layer for layer in cache.layers if isinstance(layer, HTreeCacheLayer)]


# Models whose masks of dense layers are made without positions, so that a token sees the documents before its own.
MASKS_WITHOUT_POSITIONS = ("gpt_oss",)


def refuse_packed(model: nn.Module, has_positions: bool) -> None:
    """Raises where layers that are not converted would see the documents before a token's own."""
    dense = [layer.self_attn for layer in model.layers if getattr(layer.self_attn, "htree", None) is None]
    if not dense or "flash" in _settings(model.config)["attn_implementation"]:
        return
    kind = getattr(model.config, "model_type", "")
    if kind in MASKS_WITHOUT_POSITIONS:
        raise ValueError(
            f"htree attention: packed documents need every layer of a {kind} model to be converted, got "
            f"{len(dense)} dense layers, whose masks know of no documents{DENSE_WAY_OUT}"
        )
    if not has_positions:
        raise ValueError(
            "htree attention: cu_seq_lens_q needs position_ids that begin again with each document where layers are "
            f"not converted, got none and {len(dense)} dense layers{DENSE_WAY_OUT}"
        )


def refuse(model: nn.Module, kwargs: dict) -> None:
    """Raises for what a call asks and attention over a tree cannot give."""
    wants_weights = kwargs.get("output_attentions")
    if wants_weights or (wants_weights is None and getattr(model.config, "output_attentions", False)):
        raise ValueError(
            "htree attention: output_attentions must be False: probabilities over all tokens do not exist"
            + DENSE_WAY_OUT
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        found = f"a tensor of {mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            "htree attention: attention_mask must be [batch, tokens], which tokens exist; masks other than the causal "
            f"one are not supported, got {found}{DENSE_WAY_OUT}"
        )
    for name in ("block_sequence_ids", "or_mask_function", "and_mask_function"):
        if kwargs.get(name) is not None:
            raise ValueError(f"htree attention: {name} must be None: every mask is causal{DENSE_WAY_OUT}")
    if kwargs.get("is_causal", getattr(model.config, "is_causal", True)) is False:
        raise ValueError(f"htree attention: is_causal must be True{DENSE_WAY_OUT}")
