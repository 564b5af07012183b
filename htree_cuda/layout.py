"""Where the rows of a cached tree lie: sizes and offsets that the cache, the ops and both backends share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SIBLINGS = 16  # rows of a layer are a multiple of this, so that every block of 16 siblings is whole


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def default_layers(max_tokens: int, compression_rate: int) -> int:
    """How many layers, tokens included, can hold a complete node: every one with ``r^l <= max_tokens``."""
    layers = 1
    while compression_rate**layers <= max_tokens:
        layers += 1
    return layers


def layers_for(max_tokens: int, compression_rate: int, max_top_nodes: int) -> int:
    """How many layers a cache needs so that the highest has at most max_top_nodes nodes: the default, or more."""
    layers = default_layers(max_tokens, compression_rate)
    while -(-max_tokens // compression_rate ** (layers - 1)) > max_top_nodes:
        layers += 1
    return layers


@dataclass(frozen=True)
class TreeLayout:
    """The rows of a cached tree of at most ``max_tokens`` tokens in ``num_layers`` layers, the tokens being layer 0.

    Only complete nodes have rows. Without pages (``page_size`` 0) all layers of a sequence follow each other, tokens
    first. With pages, a page holds ``page_size`` tokens and their nodes of the ``paged_layers`` layers whose
    ``r^l`` divides ``page_size``; the layers above follow each other in a buffer of each sequence.
    """

    compression_rate: int
    max_tokens: int
    num_layers: int
    page_size: int = 0

    def tokens_of(self, layer: int) -> int:
        """Tokens that a node of this layer covers."""
        return self.compression_rate**layer

    @cached_property
    def paged_layers(self) -> int:
        """Layers whose nodes lie in pages: 0 without pages."""
        layers = 0
        while self.page_size and layers < self.num_layers and self.page_size % self.tokens_of(layers) == 0:
            layers += 1
        return layers

    @cached_property
    def layer_rows(self) -> tuple[int, ...]:
        """Rows of each layer in the buffer of a sequence; 0 where the layer lies in pages."""
        return tuple(
            0 if layer < self.paged_layers else _round_up(self.max_tokens // self.tokens_of(layer), SIBLINGS)
            for layer in range(self.num_layers)
        )

    @cached_property
    def layer_begin(self) -> tuple[int, ...]:
        """The first row of each layer in the buffer of a sequence."""
        return tuple(sum(self.layer_rows[:layer]) for layer in range(self.num_layers))

    @property
    def sequence_rows(self) -> int:
        """Rows of the buffer of a sequence: M without pages, M_upper with pages."""
        return sum(self.layer_rows)

    def page_layer_rows(self, layer: int) -> int:
        """Nodes of a layer that one page holds."""
        return self.page_size // self.tokens_of(layer)

    @cached_property
    def page_layer_begin(self) -> tuple[int, ...]:
        """The first row in a page of each layer that lies in pages."""
        return tuple(sum(self.page_layer_rows(i) for i in range(layer)) for layer in range(self.paged_layers))

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return sum(self.page_layer_rows(layer) for layer in range(self.paged_layers))

    @property
    def max_pages(self) -> int:
        """Pages that a sequence of ``max_tokens`` tokens takes."""
        return -(-self.max_tokens // self.page_size) if self.page_size else 0
