"""`convert` and `revert`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Sequence
from types import MethodType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ... import checks
from .attention import CACHE_NAMES, NAME, Tree, before_attention, before_model, htree_attention, htree_mask, new_layers
from .cache import UNSUPPORTED
from .rotation import rotation

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "glm", "glm4", "gpt_oss")


def convert(
    model: PreTrainedModel,
    *,
    layers: str | Sequence[int] | None = None,
    top_k_per_layer: int | None = None,
    compression_rate: int | None = None,
    backend: str | None = None,
) -> PreTrainedModel:
    """Puts htree attention under the full-attention layers of a model of transformers.

    The model keeps its parameters, projections, norms and names. Only what happens between the projections changes:
    queries and keys are not rotated by token position, and `htree_cuda.forward` attends, with the model's own RoPE base
    or scaled frequencies. While the sequence has at most ``top_k_per_layer * compression_rate`` tokens the model
    computes what it computed before.

    Args:
        model: a model of transformers of type llama, qwen2, qwen3, mistral, gemma3_text, phi3, glm, glm4 or gpt_oss,
            with or without its head.
        layers: "full_attention" (default) or a sequence of indices of full-attention layers. Layers with a sliding
            window stay as they are.
        top_k_per_layer: int, power of two, as in `htree_cuda.forward`; required, unless the configuration of the model
            has a conversion.
        compression_rate: int, power of two >= 2; default 16.
        backend: "auto" (default) or "torch", as in `htree_cuda.forward`.

    Returns:
        The same model, changed in place.

    Raises:
        TypeError: model is no model of transformers.
        ValueError: the model has another type, no full-attention layer, a rope_type whose angles depend on the length,
            a soft-cap, attention dropout or attention that is not causal; or an argument breaks a rule.

    Notes:
        Configuration: the model gets a copy of its own, so that other models made from the same object keep what they
        have. ``model.config.htree_cuda`` holds the options, and `save_pretrained` writes them. Where this module is
        imported, `from_pretrained` and `from_config` convert a model whose configuration has the entry; where it is
        not, transformers refuses the attention implementation "htree_cuda".
        Padding: attention_mask [batch, tokens] says which tokens exist, on the left or on the right; the others take no
        part and get 0. Positions count the tokens that exist, as `generate` counts them.
        Packed sequences: position_ids that begin again, or cu_seq_lens_q, without attention_mask and cache.
        Cache: `generate` makes one whose converted layers hold trees, as long as it may become; a forward with
        use_cache makes one that grows; `new_cache` makes one for loops of one's own.
        Not expressible, and refused at the call: output_attentions, masks other than the causal one, attention dropout,
        gradients through a cache that holds earlier tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from htree_cuda.integrations.transformers import convert
        >>> config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=1)
        >>> model = convert(LlamaForCausalLM(config).eval(), top_k_per_layer=8)
        >>> tokens = model.generate(torch.randint(97, (1, 300)), max_new_tokens=8)

    Source: docs/guides/huggingface.md; tested with transformers 5.24.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"convert: model must be a model of transformers, got {type(model).__name__}")
    decoder = decoder_of(model)
    config = decoder.config
    original, with_head = vars(decoder).get("htree_config", (None, False))
    given = {
        "layers": layers, "top_k_per_layer": top_k_per_layer, "compression_rate": compression_rate, "backend": backend,
    }  # fmt: skip
    stored = getattr(config, NAME, None) or {}
    default = {"layers": "full_attention", "top_k_per_layer": None, "compression_rate": 16, "backend": "auto"}
    options = {name: stored.get(name, default[name]) if x is None else x for name, x in given.items()}
    if options["top_k_per_layer"] is None:
        checks.common.fail("convert", "top_k_per_layer must be given", None)
    options["top_k_per_layer"] = checks.common.integer("convert", "top_k_per_layer", options["top_k_per_layer"])
    options["compression_rate"] = checks.common.integer("convert", "compression_rate", options["compression_rate"])
    checks.common.backend_name("convert", options["backend"])
    _refuse(config)
    wanted, full = _wanted(config, options["layers"])
    trees = {}
    for index in wanted:
        attention = decoder.layers[index].self_attn
        checks.tree.tree_options(
            "convert", dtype=torch.float32, head_dim=attention.head_dim, compression_rate=options["compression_rate"],
            top_k_per_layer=options["top_k_per_layer"], max_top_nodes=None, scale=None, rope_base=1.0,
        )  # fmt: skip
        trees[index] = Tree(
            options["compression_rate"],
            options["top_k_per_layer"],
            options["backend"],
            rotation(config, _layer_type(config, index), attention.head_dim),
        )
    # From here on nothing fails, so a model is converted whole or not at all.
    implementation = config._attn_implementation
    if implementation == NAME:
        implementation = stored.get("attn_implementation", "sdpa")
    _take_away(model)
    if not isinstance(options["layers"], str):
        options["layers"] = wanted
    _share(model, copy.deepcopy(config) if original is None else config)
    decoder.htree_config = config if original is None else original, with_head or model is not decoder
    settings = {**options, "attn_implementation": implementation, "covers_full_attention": wanted == full}
    _write(decoder.config, settings)
    for index, tree in trees.items():
        attention = decoder.layers[index].self_attn
        attention.htree = tree
        attention.register_forward_pre_hook(before_attention, with_kwargs=True)
    signature = inspect.signature(inspect.unwrap(type(decoder).forward))
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    decoder.htree_arguments = tuple(name for name, p in signature.parameters.items() if p.kind in kinds)[1:]
    decoder.register_forward_pre_hook(before_model, with_kwargs=True)
    if model is not decoder and model.can_generate():
        model._prepare_cache_for_generation = MethodType(_prepare_cache_for_generation, model)
    return model


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Takes htree attention from under a model: it computes what it computed before `convert`.

    Args:
        model: of transformers; one that is not converted stays as it is.

    Returns:
        The same model, changed in place.

    Raises:
        TypeError, ValueError: as `convert`.

    Notes:
        A cache that a converted model filled is of no use to it: its keys are not rotated.
        The configuration is again the object that `convert` found, unless somebody changed it or the model's copy.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from htree_cuda.integrations.transformers import convert, revert
        >>> config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=1)
        >>> model = revert(convert(LlamaModel(config), top_k_per_layer=8))

    Source: docs/guides/huggingface.md.
    """
    decoder = decoder_of(model)
    # A model that an older version pickled has no other object.
    unknown = (decoder.config if "htree_arguments" in vars(decoder) else None, False)
    original, with_head = vars(decoder).get("htree_config", unknown)
    _take_away(model)
    if original is not None:
        config = decoder.config
        _erase(config)
        if not hasattr(original, "attn_implementation"):  # its entry came from a file; it is no other converted model's
            _erase(original)
        # What somebody changed since then, in either of the two, stays as it is, and a head keeps its decoder's object.
        same = NAME not in vars(original) and original._attn_implementation == config._attn_implementation
        same = same and _plain(original) == _plain(config) and not (with_head and model is decoder)
        _share(model, original if same else config)
    return model


def new_cache(model: PreTrainedModel, max_tokens: int | None = None) -> DynamicCache:
    """An empty cache for a converted model, for loops of one's own.

    Args:
        model: a converted model.
        max_tokens: int >= 1, tokens of a row, padding included, for which there is room from the start; default None:
            the cache grows by new buffers.

    Returns:
        A DynamicCache of transformers, whose converted layers are `HTreeCacheLayer`.

    Raises:
        TypeError, ValueError: an argument breaks a rule above.

    Notes:
        ``cache.layers[i].tree`` is the `htree_cuda.TreeCache` of converted layer i once it holds tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from htree_cuda.integrations.transformers import convert, new_cache
        >>> config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=1)
        >>> model = convert(LlamaModel(config).eval(), top_k_per_layer=8)
        >>> cache = new_cache(model, max_tokens=4096)
        >>> with torch.no_grad():
        ...     out = model(torch.randint(97, (2, 300)), cache=cache)

    Source: docs/guides/huggingface.md.
    """
    decoder = decoder_of(model)
    if not isinstance(getattr(decoder.config, NAME, None), dict):
        checks.common.fail("new_cache", "model must be converted", "another")
    max_tokens = checks.common.integer("new_cache", "max_tokens", max_tokens, optional=True)
    if max_tokens is not None:
        checks.common.size("new_cache", "max_tokens", max_tokens, 1, checks.common.MAX_INT32)
    return new_layers(decoder, DynamicCache(config=decoder.config), max_tokens)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The stack of layers under a model and its head."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    kind = getattr(model.config, "model_type", None)
    if kind not in MODEL_TYPES:
        hint = (
            " (of gemma3 the text model, in a Gemma3ForCausalLM: docs/guides/huggingface.md)"
            if kind == "gemma3"
            else ""
        )
        rule = f"the type of the model must be one of {', '.join(MODEL_TYPES)}{hint}"
        checks.common.fail("convert", rule, repr(kind))
    return model if hasattr(model, "layers") else model.base_model


def _layer_type(config, index: int) -> str:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return types[index]
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def _wanted(config, layers) -> tuple[list[int], list[int]]:
    """Indices of the layers to convert, and of all full-attention layers."""
    count = config.num_hidden_layers
    full = [index for index in range(count) if _layer_type(config, index) == "full_attention"]
    if not full:
        rule = "the model must have a full-attention layer (one without a window is made by config.sliding_window None)"
        checks.common.fail("convert", rule, f"{count} layers with a sliding window")
    if isinstance(layers, str):
        if layers != "full_attention":
            checks.common.fail("convert", 'layers must be "full_attention" or indices', repr(layers))
        return full, full
    if not isinstance(layers, Iterable):
        raise TypeError(f'convert: layers must be "full_attention" or a sequence of indices, got {layers!r}')
    wanted = sorted({checks.common.integer("convert", "layers", index) for index in layers})
    if not wanted or not set(wanted) <= set(full):
        checks.common.fail("convert", f"layers must be among the full-attention layers {full}", wanted)
    return wanted, full


def _refuse(config) -> None:
    """Raises for what a model has and attention over a tree does not."""
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        rule = "attn_logit_softcapping must be None: scores have no soft-cap; leave the model dense"
        checks.common.fail("convert", rule, cap)
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        rule = "attention must be causal (use_bidirectional_attention False); leave the model dense"
        checks.common.fail("convert", rule, "bidirectional attention")
    if rate := getattr(config, "attention_dropout", 0.0):
        rule = "config.attention_dropout must be 0: probabilities are never stored; make the model with 0"
        checks.common.fail("convert", rule, rate)


def _take_away(model: PreTrainedModel) -> None:
    """Hooks, trees and methods of a converted model, whose configuration stays as it is."""
    decoder = decoder_of(model)
    _remove_hook(decoder, before_model)
    for name in ("htree_arguments", "htree_config"):
        vars(decoder).pop(name, None)
    for layer in decoder.layers:
        _remove_hook(layer.self_attn, before_attention)
        vars(layer.self_attn).pop("htree", None)
    vars(model).pop("_prepare_cache_for_generation", None)


def _write(config, settings: dict) -> None:
    """Makes a configuration that of a converted model."""
    setattr(config, NAME, settings)
    config.attn_implementation = NAME  # in config.json: transformers refuses it where nobody registered it
    config._attn_implementation = NAME


def _erase(config) -> None:
    """The inverse of `_write`."""
    settings = vars(config).pop(NAME, None)
    vars(config).pop("attn_implementation", None)
    if settings is not None and config._attn_implementation == NAME:
        config._attn_implementation = settings["attn_implementation"]


def _plain(config) -> dict:
    """What a configuration says besides its conversion and what `save_pretrained` notes on it."""
    notes = (NAME, "attn_implementation", "architectures", "dtype")
    return {name: x for name, x in config.to_dict().items() if name not in notes}


def _share(model: PreTrainedModel, config) -> None:
    """Gives a configuration to a decoder, to its head where that has the same one, and to their modules."""
    old = [decoder_of(model).config]
    if model.config is not old[0] and _plain(model.config) == _plain(old[0]):
        old.append(model.config)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if any(value is x for x in old):
                vars(module)[name] = config


def _as_it_is(model: PreTrainedModel):
    """The configuration that `save_pretrained` writes.

    It is the model's, unless that says nothing of a conversion under it, because only a part of the model was given to
    `convert`, or speaks of one that `revert` took away from a part. Then it is a copy that says what the layers are.
    """
    config = model.config
    text = getattr(config, "text_config", config)
    decoder = next((module for module in model.modules() if "htree_arguments" in vars(module)), None)
    settings = None if decoder is None else getattr(decoder.config, NAME, None)
    said = getattr(text, NAME, None)
    missing = said is None and settings is not None and text.model_type == decoder.config.model_type
    stale = isinstance(said, dict) and text._attn_implementation == NAME and decoder is None
    if not (missing or stale):
        return config
    config = copy.deepcopy(config)
    text = getattr(config, "text_config", config)
    if missing:
        _write(text, settings)
    else:
        _erase(text)
    return config


def _remove_hook(module: nn.Module, hook) -> None:
    for key, found in list(module._forward_pre_hooks.items()):
        if found is hook:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _prepare_cache_for_generation(
    self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *others
):
    """The method of `GenerationMixin`, with trees for the converted layers. A pickled model finds the class's own under
    this name, and its cache then gets its trees at the first call."""
    kind = generation_config.cache_implementation
    if kind is not None and kind.startswith(UNSUPPORTED):
        rule = "generate: cache_implementation must be left alone for a converted model, whose cache is a tree"
        raise ValueError(f"{rule}, got {kind!r}")
    prepare = type(self)._prepare_cache_for_generation
    result = prepare(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *others)
    cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
    if isinstance(cache, Cache):
        new_layers(decoder_of(self), cache, max_cache_length)
    return result


def register() -> None:
    """Makes the attention implementation known, has models convert themselves where their configuration says so, and
    has them write a configuration that says what they are."""
    AttentionInterface.register(NAME, htree_attention)
    AttentionMaskInterface.register(NAME, htree_mask)
    made, saved = PreTrainedModel.post_init, PreTrainedModel.save_pretrained
    if getattr(made, "htree_cuda", False):
        return

    @functools.wraps(made)
    def post_init(self):
        made(self)
        if isinstance(getattr(self.config, NAME, None), dict) and self.config.model_type in MODEL_TYPES:
            convert(self)

    @functools.wraps(saved)
    def save_pretrained(self, *args, **kwargs):
        config = self.config
        self.config = _as_it_is(self)
        try:
            return saved(self, *args, **kwargs)
        finally:
            self.config = config

    post_init.htree_cuda = True
    PreTrainedModel.post_init, PreTrainedModel.save_pretrained = post_init, save_pretrained
