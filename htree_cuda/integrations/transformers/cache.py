"""`HTreeCacheLayer`: a `TreeCache` as one layer of a cache of transformers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ... import checks
from ...autocast import autocast_enabled
from ...cache import TreeCache
from .call import Call

MORE_TOKENS = 1024  # room behind the first tokens of a cache whose capacity nobody named; it doubles when it is full
UNSUPPORTED = ("offloaded", "quantized", "static", "hybrid", "sliding_window")


class HTreeCacheLayer(CacheLayerMixin):
    """Keys and values of one converted layer, with their tree.

    The length that transformers knows counts padding, and is one for all rows: `get_seq_length`. The tree holds the
    tokens that exist, each row of its own length: ``tree.lengths``.

    Args:
        compression_rate: as in `htree_cuda.forward`.
        backend: "auto" or "torch".
        capacity: int >= 1, tokens of a row, padding included, for which there is room at first; default None: 1,024
            more than the first call has. A full cache grows, by new buffers.
        tables: the tables of rotations, shared by the layers of a cache.

    Raises:
        ValueError: from `crop`, tokens_to_remove is positive; from `update`, a layer that is not converted adds to what
            a converted one has filled.

    Notes:
        `update` appends and returns every key and value, as other layers do: the first time what it was given, later
        views of the tree, in which each row begins with its first token that exists. Converted layers read the tree.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        compression_rate: int = 16,
        backend: str = "auto",
        capacity: int | None = None,
        tables: dict | None = None,
    ):
        super().__init__()
        self.compression_rate, self.backend, self.capacity = compression_rate, backend, capacity
        self.tables = {} if tables is None else tables
        self.tree: TreeCache | None = None
        self.valid: Tensor | None = None  # [B, seen] bool, which tokens exist; None: all
        self.seen = 0
        self.call = Call()  # of the model call that runs
        self.awaited = False  # a converted layer is about to add to it

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen}, tree={self.tree})"

    @property
    def batch_size(self) -> int:
        """Rows, once there are some."""
        return -1 if self.tree is None else self.tree.batch_size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the tree for tensors like these."""
        B, heads, T, head_dim = key_states.shape
        device = key_states.device
        dtype = key_states.dtype
        if autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        self.tree = TreeCache(
            B, self.capacity or T + MORE_TOKENS, heads, head_dim, value_states.shape[-1],
            compression_rate=self.compression_rate, dtype=dtype, device=device,
        )  # fmt: skip
        self.tree._rope_tables = self.tables.setdefault((device, dtype), {})
        self.device, self.dtype = device, dtype
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends [B, H_kv, T, D] (of which the call's mask may say that some do not exist) and returns everything."""
        if self.seen and not self.awaited:
            raise ValueError(
                "htree attention: the cache was filled by a converted model (its keys are not rotated) and a layer "
                "that is not converted adds to it; give the dense model a cache of its own"
            )
        self.awaited = False
        if self.seen:  # the first tokens are attended as they are
            checks.cache.no_gradient("htree attention", key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        T, call = key_states.shape[2], self.call.on(key_states.device)
        if self.seen + T > self.tree.max_tokens:
            self.tree.resize(max(self.seen + T, 2 * self.tree.max_tokens))
        k, v = (call.compact(x.transpose(1, 2)) for x in (key_states, value_states))
        self.tree.append(k.to(self.dtype), v.to(self.dtype), seqused=call.used, backend=self.backend)
        self.seen += T
        self.valid = call.valid
        self._show()
        return (key_states, value_states) if self.seen == T else (self.keys, self.values)

    def _show(self) -> None:
        """The attributes that transformers reads of every layer."""
        self.keys, self.values = (x[:, : self.seen].transpose(1, 2) for x in (self.tree.k, self.tree.v))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys for masks, padding included."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of a row, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Tokens of a row for which there is room without new buffers; -1 where nobody named a capacity."""
        return -1 if self.capacity is None else self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens of every row, padding included."""
        if tokens_to_remove > 0:
            checks.common.fail("crop", "tokens_to_remove must be 0 or negative", tokens_to_remove)
        if tokens_to_remove == 0 or self.tree is None:
            return
        self.seen = max(0, self.seen + tokens_to_remove)
        if self.valid is None:
            self.tree.truncate(self.seen)
        else:
            self.valid = self.valid[:, : self.seen]
            self.tree.truncate(self.valid.sum(1, dtype=torch.int32))
        self._show()

    def reset(self) -> None:
        """Forgets every token; buffers stay."""
        self.seen, self.valid, self.call = 0, None, Call()
        if self.tree is not None:
            self.tree.reset()
            self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was."""
        if self.seen == 0:
            return
        beam_idx = beam_idx.to(self.tree.device)
        if beam_idx.numel() != self.tree.batch_size:
            self.batch_select_indices(beam_idx)
            return
        self.tree.reorder(beam_idx)
        self.valid = None if self.valid is None else self.valid.index_select(0, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other."""
        if self.seen:
            rows = torch.arange(self.tree.batch_size, device=self.tree.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in this order."""
        if self.seen == 0:
            return
        self.tree = self.tree.select(indices)
        self.valid = None if self.valid is None else self.valid[indices]
        self._show()

    def offload(self) -> None:
        """Not possible: a step reads the tree where it lies."""
        checks.common.fail("offload", "a tree cannot be offloaded; leave cache_implementation alone", "offloading")

    def prefetch(self) -> None:
        """Nothing is ever elsewhere."""

    def __getstate__(self) -> dict:
        """Without the tables of rotations, which belong to tensors of this process."""
        return {**self.__dict__, "tables": {}}

    def __deepcopy__(self, memo: dict) -> HTreeCacheLayer:
        new = copy.copy(self)
        memo[id(self)] = new
        if self.tree is not None:
            new.tree = self.tree.clone()
            new._show()
        return new


def htree_layers(cache: Cache, wanted: dict[int, dict], capacity: int | None = None, dense: type | None = None) -> None:
    """Puts an `HTreeCacheLayer` where the cache has an empty layer of a converted one.

    Args:
        cache: of transformers; it is changed.
        wanted: for each converted layer the arguments of `HTreeCacheLayer`.
        capacity: tokens of a row.
        dense: makes the layers of a cache that has none yet.
    """
    if not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(
            f"htree attention: the cache must be a DynamicCache of transformers or None, got {type(cache).__name__}"
        )
    if getattr(cache, "offloading", False):
        raise ValueError("htree attention: a tree cannot be offloaded; make the cache without offloading")
    if getattr(cache, "layer_class_to_replicate", None) is not None:
        cache.layers.extend(dense().layers[len(cache.layers) :])
        cache.layer_class_to_replicate = None
    tables: dict = {}
    for index, options in wanted.items():
        layer = cache.layers[index]
        if isinstance(layer, HTreeCacheLayer):
            mine = layer.compression_rate
            checks.common.equal(
                "htree attention", "compression_rate of the cache", mine, "the model's", options["compression_rate"]
            )
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                "htree attention: the cache was filled by the model before convert (its keys are rotated); fill a new "
                "one: call the model on the tokens again"
            )
        cache.layers[index] = HTreeCacheLayer(**options, capacity=capacity, tables=tables)
