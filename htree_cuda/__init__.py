"""htree_cuda: hierarchical-tree sparse causal attention, and sparse attention with its indexer loss, for NVIDIA Hopper.

`forward`              hierarchical-tree sparse causal attention (differentiable).
`forward_varlen`       the same of packed sequences of different lengths.
`TreeCache`            keys and values of growing sequences with their tree: a KV cache for decoding.
`forward_cached`       attention of the last tokens of the sequences in a `TreeCache`.
`HTreeAttention`       the same as a module: projections, grouped KV heads, a KV cache.
`sparse_attention`     multi-query attention over an index list (differentiable).
`attn_dist`            head-summed attention distribution over an index list.
`normalize_attn_dist`  that distribution over all heads and ranks, normalised.
`indexer_loss`         KL divergence of an indexer from it (differentiable).
`indexer_logits`       scores of the lightning indexer (differentiable).
`topk_indices`         the best key rows of each query, exactly: an index list.
`indexer_topk`         both, without the matrix of all logits.
`DSAttention`          DeepSeek Sparse Attention as a module: MLA, the indexer, both stages of training.
`quantize_fp8`         float8_e4m3fn values and their scales.
`hadamard_transform`   spreads outliers before quantisation (differentiable).
`dense_indexer_loss`   KL divergence of an indexer from dense attention over all keys (differentiable).
`distributed`          one sequence over several GPUs (context parallelism).
"""

from . import distributed
from ._version import __version__
from .api import attn_dist, forward, indexer_loss, normalize_attn_dist, sparse_attention
from .cache import TreeCache, forward_cached
from .checks import UnsupportedError
from .dense_loss import dense_indexer_loss
from .dsa import hadamard_transform, indexer_logits, indexer_topk, quantize_fp8, topk_indices
from .dsa_module import DSAttention
from .module import HTreeAttention
from .varlen import forward_varlen

__all__ = [
    "DSAttention",
    "HTreeAttention",
    "TreeCache",
    "UnsupportedError",
    "__version__",
    "attn_dist",
    "dense_indexer_loss",
    "distributed",
    "forward",
    "forward_cached",
    "forward_varlen",
    "hadamard_transform",
    "indexer_logits",
    "indexer_loss",
    "indexer_topk",
    "normalize_attn_dist",
    "quantize_fp8",
    "sparse_attention",
    "topk_indices",
]
