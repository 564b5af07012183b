"""`TreeCache`, the keys and values of growing sequences with their tree, and `forward_cached`, attention to it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, ops_cache  # noqa: F401  (importing ops_cache registers its ops)
from .autocast import autocast_enabled
from .definition import layer_sizes
from .layout import TreeLayout, default_layers, layers_for
from .pages import PagePool
from .torch_backend import decode
from .torch_backend.decode import CacheTensors

# Up to here a table of rotations holds top_k * compression_rate positions, as the kernels ask; beyond it as many as a
# cache of this size can need.
WHOLE_TABLE = 16384


def _checks_always() -> bool:
    return not torch.compiler.is_compiling() and checks.common.checks_values()


def _identity(inv_freq: Tensor | None) -> object:
    """What tells one tensor of frequencies from another: on the CPU its numbers. A GPU's are not read, which would wait
    for it: there the tensor itself, which is another one once it was written to."""
    if inv_freq is None:
        return None
    if inv_freq.device.type == "cpu":
        return (inv_freq.dtype, *inv_freq.tolist())
    return id(inv_freq), 0 if inv_freq.is_inference() else inv_freq._version


class TreeCache:
    """Keys and values of a batch of growing sequences, with the complete nodes of their trees.

    A token completes a node of layer ``l`` where ``(t + 1) % compression_rate**l == 0``. What is stored once never
    changes, so a new token adds 1/15 of a node on average, and a step of decoding reads the candidates of its query
    alone. Lengths lie on the device: `append`, `truncate` and `forward_cached` of up to 8 queries never wait for it,
    and a captured CUDA graph of them is right for every later length.

    Args:
        batch_size: int >= 0, sequences.
        max_tokens: int >= 1, tokens that a sequence can have.
        n_kv_heads: int >= 1.
        head_dim: int >= 2, even, of keys.
        v_head_dim: int >= 1, of values; default head_dim.
        compression_rate: int, power of two >= 2, children per node; default 16.
        dtype: of keys and values: float16, bfloat16, float32 or float64.
        device: where everything lies.
        num_layers: int >= 1, layers that are stored, tokens included; default: every layer with
            ``compression_rate**l <= max_tokens``.
        page_size: int, a multiple of 256, tokens of a page; default None: no pages, max_tokens for each sequence.
        num_pages: int >= 1, pages of the pool; default: enough for batch_size sequences of max_tokens.
        block_table: [batch_size, max_pages] int32, the pages of each sequence in order, where the caller keeps the
            table and counts the pages; default None: the cache does.

    Attributes:
        lengths: [batch_size] int32 on the device, tokens of each sequence.
        overflowed: [batch_size] int32 on the device, not 0 where an append found no room. Nothing was written then,
            and out and lse of the sequence are NaN until `truncate` or `reset`.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; the message names the rule and the value.

    Notes:
        Keys are stored without RoPE: a key's position depends on who looks at it.
        Memory: 1/15 above plain K and V (compression_rate 16), and at most 15 rows a layer of rounding; pages in
        `num_pages`.
        Pages: `reserve` takes them from the pool on the host, and `append` writes only where they were reserved. A page
        that several sequences hold is never written. The content of a caller's block_table is trusted, clamped to the
        pool: garbage gives garbage, never a fault.
        HTREE_CUDA_CHECK=1 in the environment has every call of `append` and `forward_cached` wait for the device and
        run `check`.

    Example:
        >>> cache = htree_cuda.TreeCache(1, 4096, n_kv_heads=2, head_dim=64, dtype=torch.float32)
        >>> q = torch.randn(1, 1, 8, 64); k, v = torch.randn(2, 1, 1, 2, 64)
        >>> cache.append(k, v)
        >>> out = htree_cuda.forward_cached(q, cache, top_k_per_layer=32)

    Source: docs/guides/decoding.md; the block table is that of FlashAttention.
    """

    _max_top_nodes: int | None = None  # of the module that chose num_layers by it; `resize` chooses again

    def __init__(
        self,
        batch_size: int,
        max_tokens: int,
        n_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        compression_rate: int = 16,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        num_layers: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        block_table: Tensor | None = None,
    ):
        self.layout, sizes = checks.cache.new_cache(
            batch_size=batch_size, max_tokens=max_tokens, n_kv_heads=n_kv_heads, head_dim=head_dim,
            v_head_dim=v_head_dim, compression_rate=compression_rate, dtype=dtype, num_layers=num_layers,
            page_size=page_size, num_pages=num_pages, block_table=block_table,
        )  # fmt: skip
        self.batch_size, self.n_kv_heads, self.num_pages = (
            sizes[name] for name in ("batch_size", "n_kv_heads", "num_pages")
        )
        self.head_dim, self.v_head_dim = sizes["head_dim"], sizes["v_head_dim"]
        self.dtype = dtype
        self._pool_grows = num_pages is None
        self._owns_table = block_table is None
        device = torch.device(torch.get_default_device() if device is None else device)
        if block_table is not None and block_table.device.type != device.type:
            raise ValueError(
                f"TreeCache: block_table must be on the device of the cache ({device}), got {block_table.device}"
            )
        self.lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=device)
        self.overflowed = torch.zeros_like(self.lengths)
        self._allocate(block_table)
        self._rope_tables: dict[tuple, tuple[Tensor, Tensor | None]] = {}

    def _allocate(self, block_table: Tensor | None) -> None:
        """New buffers of the layout. They begin as zeros, so that no number in them is an accident."""
        layout, place = self.layout, {"dtype": self.dtype, "device": self.lengths.device}
        paged = layout.page_size > 0
        outer, rows = (self.num_pages, layout.page_rows) if paged else (self.batch_size, layout.sequence_rows)
        upper = layout.sequence_rows if paged else 0
        self._k = torch.zeros(outer, self.n_kv_heads, rows, self.head_dim, **place)
        self._v = torch.zeros(outer, self.n_kv_heads, rows, self.v_head_dim, **place)
        self._k_upper = torch.zeros(self.batch_size, self.n_kv_heads, upper, self.head_dim, **place)
        self._v_upper = torch.zeros(self.batch_size, self.n_kv_heads, upper, self.v_head_dim, **place)
        if block_table is None:
            block_table = torch.full((self.batch_size, layout.max_pages), -1, dtype=torch.int32, device=place["device"])
        self.block_table = block_table
        counts = paged and self._owns_table
        self.reserved = torch.full_like(self.lengths, 0 if counts else layout.max_tokens)
        self._shared = torch.zeros_like(self.lengths)  # tokens up to the end of the last page that others hold too
        self._pool = PagePool(self.num_pages, [[]] * self.batch_size) if counts else None

    # ---------------------------------------------------------------------------------------------------- what it is

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.lengths.device

    @property
    def max_tokens(self) -> int:
        """Tokens that a sequence can have."""
        return self.layout.max_tokens

    @property
    def num_layers(self) -> int:
        """Layers that are stored, tokens included."""
        return self.layout.num_layers

    @property
    def compression_rate(self) -> int:
        """Children per node."""
        return self.layout.compression_rate

    @property
    def page_size(self) -> int | None:
        """Tokens of a page; None without pages."""
        return self.layout.page_size or None

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds; 0 without pages and where the caller keeps the table."""
        return len(self._pool.free) if self._pool else 0

    @property
    def k(self) -> Tensor:
        """[batch_size, max_tokens, n_kv_heads, head_dim], the keys as they were given: a view without pages, a copy
        with them. What lies at and past lengths is unspecified."""
        return self._tokens(0)

    @property
    def v(self) -> Tensor:
        """[batch_size, max_tokens, n_kv_heads, v_head_dim], the values, likewise."""
        return self._tokens(1)

    def _tokens(self, which: int) -> Tensor:
        if not self.layout.page_size:
            return (self._k, self._v)[which][:, :, : self.max_tokens].transpose(1, 2)
        rows = [decode.tokens(self._tensors(), self.layout, b, self.max_tokens)[which] for b in range(self.batch_size)]
        dim = (self.head_dim, self.v_head_dim)[which]
        return torch.cat(rows) if rows else self._k.new_empty(0, self.max_tokens, self.n_kv_heads, dim)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the cache, tables of rotations apart."""
        return sum(x.numel() * x.element_size() for x in (*self._tensors(), self._shared))

    def __repr__(self) -> str:
        pages = f", page_size={self.page_size}, num_pages={self.num_pages}" if self.layout.page_size else ""
        return (
            f"TreeCache(batch_size={self.batch_size}, max_tokens={self.max_tokens}, n_kv_heads={self.n_kv_heads}, "
            f"head_dim={self.head_dim}, v_head_dim={self.v_head_dim}, compression_rate={self.compression_rate}, "
            f"dtype={self.dtype}, device='{self.device}', num_layers={self.num_layers}{pages}, nbytes={self.nbytes})"
        )

    def __getstate__(self) -> dict:
        """Without the tables of rotations, which belong to tensors of this process."""
        return {**self.__dict__, "_rope_tables": {}}

    def _tensors(self) -> CacheTensors:
        return CacheTensors(
            self.lengths, self.overflowed, self._k, self._v, self._k_upper, self._v_upper, self.block_table,
            self.reserved,
        )  # fmt: skip

    def _numbers(self) -> dict[str, int]:
        layout = self.layout
        return {
            "compression_rate": layout.compression_rate, "max_tokens": layout.max_tokens,
            "num_layers": layout.num_layers, "page_size": layout.page_size,
        }  # fmt: skip

    def _rope_table(
        self, top_k: int, max_top_nodes: int | None, rope_base: float | None, inv_freq: Tensor | None, rope_dim: int
    ) -> Tensor:
        """cos and sin [positions, K / 2, 2] of every position in a candidate list, made once and kept; under
        `torch.compile` of given frequencies in every call."""
        r = self.compression_rate
        positions = top_k * r
        if positions > WHOLE_TABLE:
            sizes = layer_sizes(self.max_tokens, r, positions if max_top_nodes is None else max_top_nodes)
            lists = (min(top_k, n) * min(r, 2 * self.max_tokens) for n in sizes[1:])
            positions = min(positions, max(sizes[-1], *lists, 1))
        options = {"positions": positions, "rope_dim": rope_dim, "rope_base": rope_base}
        if inv_freq is not None and torch.compiler.is_compiling():  # which cannot tell whether it was written to
            return torch.ops.htree_cuda.rope_table(self._k, inv_freq, **options)
        key = (positions, rope_base, rope_dim, _identity(inv_freq))
        table, _ = self._rope_tables.get(key, (None, None))
        if table is None:
            table = torch.ops.htree_cuda.rope_table(self._k, inv_freq, **options)
            self._rope_tables[key] = table, inv_freq  # which lives as long, so that its id is no other's
        return table

    # ------------------------------------------------------------------------------------------------ append, truncate

    def append(self, k: Tensor, v: Tensor, *, seqused: Tensor | None = None, backend: str = "auto") -> None:
        """Writes tokens behind the lengths, the nodes that they complete, and then the lengths.

        Args:
            k: [batch_size, T_new, n_kv_heads, head_dim], dtype of the cache; not rotated.
            v: [batch_size, T_new, n_kv_heads, v_head_dim], dtype of the cache.
            seqused: [batch_size] int32 on the device, 0 .. T_new, how many of them exist, the first ones; default: all.
            backend: "auto" or "torch", as in `htree_cuda.forward`.

        Raises:
            TypeError, ValueError, UnsupportedError: as `htree_cuda.forward`.

        Notes:
            A sequence whose tokens do not all fit in max_tokens, or in the pages reserved, keeps what it has, and
            overflowed is set. The cache is the same bits however the tokens were cut into calls.
            Gradients: none; k and v are constants.
        """
        for name, x in (("k", k), ("v", v)):
            checks.common.tensor("append", name, x)
        if seqused is not None:
            checks.common.tensor("append", "seqused", seqused)
        checks.common.backend_name("append", backend)
        if autocast_enabled(self.device.type):
            k, v = (x.to(self.dtype) if x.is_floating_point() else x for x in (k, v))
        if _checks_always():
            checks.cache.seqused_values("append", "seqused", seqused, "T_new of k", k)
        t = self._tensors()
        torch.ops.htree_cuda.tree_append(
            k.detach(), v.detach(), seqused, t.lengths, t.overflowed, t.k, t.v, t.k_upper, t.v_upper, t.block_table,
            t.reserved, **self._numbers(), backend=backend,
        )  # fmt: skip
        if _checks_always():
            self.check()

    def truncate(self, lengths: Tensor | int | Sequence[int]) -> None:
        """Forgets the tokens at and past lengths, and that an append found no room.

        Args:
            lengths: [batch_size] int32 or int64 on the device, clamped to 0 .. the lengths that there are; or one int
                for all, or a list of batch_size ints.

        Notes:
            Truncating and appending gives the bits of never having appended. A tensor or one int can be captured in a
            CUDA graph. Pages stay reserved.
        """
        lengths = checks.cache.lengths("truncate", "lengths", lengths, self.batch_size, self.device)
        if isinstance(lengths, Tensor):
            if _checks_always():
                checks.cache.values("truncate", "lengths", lengths, 0, self.max_tokens)
        else:
            if isinstance(lengths, list):
                lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
            else:
                lengths = torch.full_like(self.lengths, lengths)
        torch.ops.htree_cuda.tree_truncate(self.lengths, self.overflowed, self.reserved, self._shared, lengths)

    def check(self) -> None:
        """Waits for the device and raises a RuntimeError that names the sequences that overflowed."""
        failed = [b for b, x in enumerate(self.overflowed.tolist()) if x]
        if failed:
            room = f"max_tokens {self.max_tokens}" + (" or the pages reserved" if self.layout.page_size else "")
            raise RuntimeError(
                f"TreeCache: an append found no room ({room}) in the sequences {failed}; truncate or reset them"
            )

    # ------------------------------------------------------------------------------------- reuse, beam search, growth

    def reset(self, rows: int | Sequence[int] | None = None) -> None:
        """Empties the sequences `rows` (default: all) and gives back their pages. Nothing else changes."""
        rows = range(self.batch_size) if rows is None else checks.cache.rows("reset", "rows", rows, self.batch_size)
        if len(set(rows)) == self.batch_size:
            self.lengths.zero_(), self.overflowed.zero_()
        else:
            for b in rows:
                self.lengths[b].zero_(), self.overflowed[b].zero_()
        if self._pool:
            for b in set(rows):
                self._pool.keep(b, 0)
            self._update_pages()

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Sequence b becomes what sequence indices[b] was, as beam search asks.

        Args:
            indices: [batch_size] int32 or int64 tensor, or batch_size ints; each 0 .. batch_size - 1.

        Notes:
            Without pages all rows are copied on the device; a tensor is clamped, and the call can be captured. With
            pages the call works on the host: full pages are shared, and a sequence that is taken more than once has
            its last page copied. Where the caller keeps the block_table, the caller reorders its rows.
        """
        if isinstance(indices, Tensor):
            checks.cache.lengths("reorder", "indices", indices, self.batch_size, self.device)
            if _checks_always():
                checks.cache.values("reorder", "indices", indices, 0, self.batch_size - 1)
        else:
            indices = checks.cache.rows("reorder", "indices", indices, self.batch_size)
            checks.common.equal("reorder", "the number of indices", len(indices), "batch_size", self.batch_size)
        source = torch.as_tensor(indices, device=self.device).long().clamp(0, max(0, self.batch_size - 1))
        copies = None
        if self._pool:
            copies = self._pool.reorder(source.tolist(), self.lengths.tolist(), self.layout.page_size)
        per_sequence = [self.lengths, self.overflowed]
        per_sequence += [self._k_upper, self._v_upper] if self.layout.page_size else [self._k, self._v]
        for x in per_sequence:
            x.copy_(x.index_select(0, source))
        if copies is not None:
            self._copy_pages(copies)
            self._update_pages()

    def select(self, indices: Tensor | Sequence[int]) -> TreeCache:
        """A cache of its own, of as many sequences as indices: its sequence b is what sequence indices[b] is here.

        Args:
            indices: int32 or int64 tensor, or ints; each 0 .. batch_size - 1 (a tensor is clamped).

        Notes:
            For caches without pages; pages are shared by `attach`. The new cache has buffers of its own, so that a CUDA
            graph of the old one does not serve it.
        """
        if self.layout.page_size:
            checks.common.fail("select", "the cache must have no pages", f"page_size {self.page_size}")
        if isinstance(indices, Tensor):
            checks.cache.lengths("select", "indices", indices, None, self.device)
            if _checks_always():
                checks.cache.values("select", "indices", indices, 0, self.batch_size - 1)
        else:
            indices = checks.cache.rows("select", "indices", indices, self.batch_size)
        source = torch.as_tensor(indices, device=self.device).long().clamp(0, max(0, self.batch_size - 1))
        if source.numel() and not self.batch_size:
            checks.common.fail("select", "indices must be empty: the cache has no sequence", f"{len(source)} of them")
        new = copy.copy(self)
        new.batch_size = source.numel()
        for name in ("lengths", "overflowed", "_k", "_v", "_k_upper", "_v_upper", "block_table", "reserved", "_shared"):
            setattr(new, name, getattr(self, name).index_select(0, source))
        new._rope_tables = dict(self._rope_tables)
        return new

    def clone(self) -> TreeCache:
        """A cache of its own with the same content."""
        new = copy.copy(self)
        for name in ("lengths", "overflowed", "_k", "_v", "_k_upper", "_v_upper", "block_table", "reserved", "_shared"):
            setattr(new, name, getattr(self, name).clone())
        new._pool = self._pool.copy() if self._pool else None
        new._rope_tables = dict(self._rope_tables)
        return new

    def resize(self, max_tokens: int) -> None:
        """Changes the room of every sequence, on the host, by new buffers: graphs that were captured are void.

        The layers become those of a new cache of max_tokens, a num_layers that was given stays. A pool of pages whose
        size was not given grows with it; a pool of a given size stays, and `reserve` says where it is too small.
        """
        max_tokens = checks.common.integer("resize", "max_tokens", max_tokens)
        longest = max(self.lengths.tolist(), default=0)
        checks.common.size("resize", "max_tokens", max_tokens, max(1, longest), checks.common.MAX_INT32)
        old, old_pages = self.layout, self.num_pages
        num_layers = old.num_layers
        if self._max_top_nodes is not None:
            num_layers = layers_for(max_tokens, old.compression_rate, self._max_top_nodes)
        elif num_layers == default_layers(old.max_tokens, old.compression_rate):
            num_layers = default_layers(max_tokens, old.compression_rate)
        layout = TreeLayout(old.compression_rate, max_tokens, num_layers, old.page_size)
        if not self._owns_table and layout.max_pages > self.block_table.shape[1]:
            rule = f"max_tokens needs {layout.max_pages} columns of the caller's block_table"
            checks.common.fail("resize", rule, self.block_table.shape[1])
        if self._pool:
            for b, length in enumerate(self.lengths.tolist()):
                if len(self._pool.of[b]) > layout.max_pages:
                    self._pool.keep(b, -(-length // layout.page_size))
        before = self._tensors()
        table, pool = self.block_table, self._pool
        self.layout = layout
        if old.page_size and self._owns_table and self._pool_grows:
            self.num_pages = max(old_pages, self.batch_size * layout.max_pages)
        self._allocate(None if self._owns_table else table)
        pairs = [(before.k_upper, self._k_upper), (before.v_upper, self._v_upper)]
        if not old.page_size:
            pairs = [(before.k, self._k), (before.v, self._v)]
        for source, target in pairs:
            for layer in range(min(old.num_layers, layout.num_layers)):
                rows = min(old.layer_rows[layer], layout.layer_rows[layer])
                first, begin = old.layer_begin[layer], layout.layer_begin[layer]
                target[:, :, begin : begin + rows] = source[:, :, first : first + rows]
        if old.page_size:
            self._k, self._v = self._grown_pool(before.k), self._grown_pool(before.v)
        if pool:
            self._pool = PagePool(self.num_pages, pool.of)
            self._update_pages()

    def _grown_pool(self, pool: Tensor) -> Tensor:
        """The pool with pages of zeros behind it, up to num_pages; the number of layers in pages is part of it."""
        rows = self.layout.page_rows
        if (self.num_pages, rows) == (pool.shape[0], pool.shape[2]):
            return pool
        new = pool.new_zeros(self.num_pages, pool.shape[1], rows, pool.shape[3])
        new[: pool.shape[0], :, : min(rows, pool.shape[2])] = pool[:, :, : min(rows, pool.shape[2])]
        return new

    # ------------------------------------------------------------------------------------------------------------ pages

    def _counts_pages(self, op: str) -> None:
        if not self.layout.page_size:
            checks.common.fail(op, "the cache must have pages (page_size)", "a cache without")
        if not self._owns_table:
            checks.common.fail(op, "the cache must own its block_table", "a caller's, who counts the pages")

    def pages(self, row: int) -> list[int]:
        """The pages that a sequence holds, in order."""
        self._counts_pages("pages")
        row = checks.cache.row("pages", row, self.batch_size)
        return list(self._pool.of[row])

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Gives sequences the pages that `append` of so many more tokens will write. On the host.

        Args:
            tokens: int >= 0 for all sequences, or a list of batch_size ints; counted from the lengths at the call.

        Raises:
            ValueError: more than max_tokens.
            RuntimeError: the pool has too few free pages; nothing was changed.

        Notes:
            Reads the lengths, so it waits for the device. A page that other sequences hold too is replaced where the
            append would meet it: the one that holds tokens of this sequence by a copy, later ones by empty ones.
            Without pages there is nothing to reserve: max_tokens alone is checked.
        """
        counts = checks.cache.numbers("reserve", "tokens", tokens, self.batch_size)
        lengths = self.lengths.tolist()
        for b, (length, more) in enumerate(zip(lengths, counts)):
            if length + more > self.max_tokens:
                rule = (
                    f"the length of sequence {b} ({length}) and tokens must be at most max_tokens ({self.max_tokens})"
                )
                checks.common.fail("reserve", rule, more)
        if not self.layout.page_size:
            return
        self._counts_pages("reserve")
        self._copy_pages(self._pool.reserve(lengths, counts, self.layout.page_size))
        self._update_pages()

    def attach(self, row: int, pages: Sequence[int], length: int) -> None:
        """Lets an empty sequence begin with pages that other sequences hold: a common prefix is stored once.

        Args:
            row: int, a sequence without tokens and pages (`reset` makes one).
            pages: the pages of the prefix in order, as `pages` of another sequence gives them.
            length: int, tokens of the prefix; it ends in the last of the pages, within the tokens that a sequence has.

        Notes:
            Reads the lengths, so it waits for the device.
            The layers above the pages are built from them, with the bits of appending the tokens. Appending to a
            sequence whose end lies in a page that others hold needs `reserve` first, which copies that page.
        """
        self._counts_pages("attach")
        row = checks.cache.row("attach", row, self.batch_size)
        if not isinstance(pages, Sequence):
            raise TypeError(f"attach: pages must be a sequence of ints, got {type(pages).__name__}")
        pages = [checks.common.integer("attach", "pages", page) for page in pages]
        for page in pages:
            if not 0 <= page < self.num_pages or not self._pool.holders[page]:
                checks.common.fail("attach", "every page must be held by a sequence", page)
        if len(set(pages)) != len(pages):
            checks.common.fail("attach", "pages must differ from each other", pages)
        length = checks.common.integer("attach", "length", length)
        checks.common.size("attach", "length", length, 0)
        size = self.layout.page_size
        if -(-length // size) != len(pages) or length > self.max_tokens:
            rule = f"length must lie in the last of the {len(pages)} pages of {size} tokens and in max_tokens"
            checks.common.fail("attach", rule, length)
        lengths = self.lengths.tolist()
        if self._pool.of[row] or lengths[row]:
            checks.common.fail("attach", "row must be a sequence without tokens and pages", row)
        written = self._pool.written(pages, lengths, size)
        if length > written:
            rule = f"length must be at most {written}, the tokens that sequences have written to the pages"
            checks.common.fail("attach", rule, length)
        self._pool.share(row, pages)
        new = torch.zeros_like(self.lengths, dtype=torch.int64)
        new[row] = length
        self.lengths[row] = length
        self.overflowed[row] = 0
        self._update_pages()
        first = max(1, self.layout.paged_layers)
        decode.complete_nodes(self._tensors(), self.layout, torch.zeros_like(new), new, first)

    def _copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._k[target], self._v[target] = self._k[source], self._v[source]

    def _update_pages(self) -> None:
        """The device's tables, from the pages that the host counts."""
        size, width, pool = self.layout.page_size, self.layout.max_pages, self._pool
        place = {"dtype": torch.int32, "device": self.device}
        table = [pages + [-1] * (width - len(pages)) for pages in pool.of]
        self.block_table.copy_(torch.tensor(table, **place).view(self.batch_size, width))
        self._shared.copy_(torch.tensor([size * pool.shared(b) for b in range(self.batch_size)], **place))
        held = torch.tensor([min(size * len(pages), self.max_tokens) for pages in pool.of], **place)
        self.reserved.copy_(torch.where(self.lengths < self._shared, torch.minimum(self.lengths, held), held))

    # ------------------------------------------------------------------------------------------------------------ state

    def _settings(self) -> dict:
        return {
            **self._numbers(), "batch_size": self.batch_size, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim, "dtype": str(self.dtype), "num_pages": self.num_pages,
        }  # fmt: skip

    def state_dict(self) -> dict:
        """Everything that the cache holds, as torch.save takes it: tensors (not copied), numbers and lists."""
        state = {name.lstrip("_"): getattr(self, name) for name in self._STATE}
        return {"settings": self._settings(), **state, "pages": self._pool.copy().of if self._pool else []}

    _STATE = ("lengths", "overflowed", "_k", "_v", "_k_upper", "_v_upper", "block_table")

    def load_state_dict(self, state: dict) -> None:
        """Takes what `state_dict` of a cache of the same settings gave, from any device."""
        mine = {name.lstrip("_"): getattr(self, name) for name in self._STATE}
        pages = checks.cache.state(state, self._settings(), mine, counts_pages=self._pool is not None)
        for name in self._STATE:
            getattr(self, name).copy_(state[name.lstrip("_")].detach())
        if self._pool:
            self._pool = PagePool(self.num_pages, pages)
            self._update_pages()


def forward_cached(
    q: Tensor,
    cache: TreeCache,
    *,
    seqused_q: Tensor | None = None,
    top_k_per_layer: int = 512,
    max_top_nodes: int | None = None,
    scale: float | None = None,
    rope_base: float | None = checks.rotation.DEFAULT_BASE,
    rope_inv_freq: Tensor | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
    attn_sink: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    return_selection: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Attention of the last tokens of each cached sequence: `forward` without pooling the keys again.

    Append the tokens first: row ``j`` of q is the position ``lengths - seqused_q + j`` of its sequence. Every position
    has the output that `forward` gives it in a call over its whole sequence.

    Args:
        q: [B, T_q, H, K], dtype of the cache; B its batch_size, K its head_dim, H a multiple of its n_kv_heads.
        cache: a TreeCache.
        seqused_q: [B] int32 on the device, 0 .. T_q, how many rows of q exist, the first ones; default: all.
        top_k_per_layer, max_top_nodes, scale: as in `htree_cuda.forward`.
        rope_base: finite float > 0; None: no rotation; default 10000.
        rope_inv_freq: [rope_dim / 2] float32 or float64, finite: pair m of position p is rotated by
            ``p * rope_inv_freq[m]``, in place of ``p * rope_base**(-2 m / rope_dim)``; default: rope_base's. Pass the
            same tensor every time: a table is made and kept for each.
        rope_dim: int, even, 2 .. K, how many elements are rotated, the first ones; default K.
        rope_interleaved: bool; pairs are (2m, 2m + 1) instead of (m, m + rope_dim / 2).
        attn_sink: [H] float32 (float64 for float64), natural: exp(attn_sink) joins the denominator of out, neither lse
            nor the selection; default: none.
        softcap: must be 0, as in `htree_cuda.forward`.
        return_lse: bool; also return lse.
        return_selection: bool; also return the selected nodes.
        backend: "auto" or "torch", as in `htree_cuda.forward`.

    Returns:
        out [B, T_q, H, V] in the dtype of the cache; or a tuple (out[, lse][, selection]).
        lse: [B, T_q, H] float32 (float64 for float64).
        selection: [L-1, B, T_q, H_kv, top_k] int32, L the layers of max_tokens tokens; layers above those that a
        shorter sequence has hold all nodes up to the query's own, then -1.
        Rows past seqused_q and rows without a key (more rows than tokens) give 0, lse -inf and selection -1. A sequence
        that overflowed gives NaN and selection -1.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; also where the cache stores fewer layers than needed,
            ``ceil(max_tokens / r**(num_layers - 1)) <= max_top_nodes``.
        UnsupportedError: backend "auto" and CUDA tensors that the kernels do not cover.
        RuntimeError: q requires a gradient, which a cached call does not have.

    Notes:
        Always strictly causal. Deterministic. Up to 8 rows nothing waits for the device, and the call can be captured
        in a CUDA graph once it has run before with its options (a table of rotations is made then and kept). More rows
        are a prefill: each sequence has the bits of a call of `forward` on its tokens. The kernels take the lengths on
        the device, and a prefill over pages copies the pages of as many sequences as fit 1 GiB, or of one, at a time;
        the PyTorch backend reads the lengths on the host.
        The decode kernel needs a rope_dim that is a multiple of 16, or rope_interleaved.
        Work of a call of up to 8 rows grows with the number of layers alone.

    Example:
        >>> cache = htree_cuda.TreeCache(1, 4096, n_kv_heads=2, head_dim=64, dtype=torch.float32)
        >>> q = torch.randn(1, 100, 8, 64); k, v = torch.randn(2, 1, 100, 2, 64)
        >>> cache.append(k, v)
        >>> out, lse = htree_cuda.forward_cached(q, cache, top_k_per_layer=32, return_lse=True)

    Source: docs/guides/decoding.md.
    """
    op = "forward_cached"
    checks.common.tensor(op, "q", q)
    checks.common.backend_name(op, backend)
    if not isinstance(cache, TreeCache):
        raise TypeError(f"{op}: cache must be a htree_cuda.TreeCache, got {type(cache).__name__}")
    if seqused_q is not None:
        checks.common.tensor(op, "seqused_q", seqused_q)
    tree = checks.cache.option_types(
        op, top_k_per_layer=top_k_per_layer, max_top_nodes=max_top_nodes, scale=scale, rope_base=rope_base,
        rope_inv_freq=rope_inv_freq, rope_dim=rope_dim, rope_interleaved=rope_interleaved, attn_sink=attn_sink,
        softcap=softcap, return_lse=return_lse, return_selection=return_selection,
    )  # fmt: skip
    rope_base = tree["rope_base"]
    checks.tree.tree_options(
        op, dtype=cache.dtype, head_dim=cache.head_dim, compression_rate=cache.compression_rate,
        top_k_per_layer=tree["top_k_per_layer"], max_top_nodes=tree["max_top_nodes"], scale=tree["scale"],
        rope_base=rope_base,
    )  # fmt: skip
    rope_dim = checks.rotation.rotation(op, cache.head_dim, None, rope_base, rope_inv_freq, tree["rope_dim"])
    if rope_inv_freq is not None and rope_inv_freq.is_meta:
        checks.common.fail(op, f"rope_inv_freq must be on the device of the cache ({cache.device}) or the CPU", "meta")
    checks.common.same_device(op, "the cache", cache._k, q=q)
    checks.cache.no_gradient(op, q, attn_sink)
    if _checks_always():
        checks.cache.seqused_values(op, "seqused_q", seqused_q, "T_q of q", q)
    if autocast_enabled(q.device.type) and q.is_floating_point():
        q = q.to(cache.dtype)
    t = cache._tensors()
    table = cache._rope_table(tree["top_k_per_layer"], tree["max_top_nodes"], rope_base, rope_inv_freq, rope_dim)
    out, lse, selection = torch.ops.htree_cuda.forward_cached(
        q, seqused_q, *t, table, attn_sink, rope_inv_freq, **cache._numbers(), **tree, need_selection=return_selection,
        backend=backend,
    )  # fmt: skip
    if _checks_always():
        cache.check()
    extra = ([lse] if return_lse else []) + ([selection] if return_selection else [])
    return (out, *extra) if extra else out
