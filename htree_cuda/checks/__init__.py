"""Every rule an argument must keep, once. The real and the fake implementation of an op call the same function here.

``common``   Python types, and the pieces that every op's rules are made of.
``tree``     rules of forward, backward, tree_pool and `HTreeAttention`.
``rotation`` rules of the options of RoPE and of attention sinks.
``cache``    rules of `TreeCache` and `forward_cached`, and what the kernels do of them.
``varlen``   rules of packed and ragged sequences.
``distributed``  rules of `htree_cuda.distributed`.
``lists``    rules of attn_dist, sparse_attention and the indexer's loss.
``dsa``      rules of the indexer, of its selector and of quantisation, and what the kernels do of them.
``dsa_module`` rules of `DSAttention`.
``dense_loss`` rules of dense_indexer_loss.
``support``  what the Hopper kernels do of what is valid.

A message names the op, the argument, the rule and the value: ``attn_dist: indices must be int32, got torch.int64``.
TypeError: not a tensor / not a number. ValueError: dtype, shape, range, device. UnsupportedError: correct, but outside
what the Hopper kernels do; it names the way out (``backend="torch"``). All are raised before any launch.
"""

from . import cache, common, dense_loss, distributed, dsa, dsa_module, lists, rotation, support, tree, varlen
from .common import UnsupportedError

__all__ = [
    "UnsupportedError",
    "cache",
    "common",
    "dense_loss",
    "distributed",
    "dsa",
    "dsa_module",
    "lists",
    "rotation",
    "support",
    "tree",
    "varlen",
]
