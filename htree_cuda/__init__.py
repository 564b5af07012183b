"""htree_cuda: hierarchical-tree sparse causal attention and attn_dist for NVIDIA Hopper.

`forward`    hierarchical-tree sparse causal attention (differentiable).
`HTreeAttention`  the same as a module: projections, grouped KV heads, a KV cache.
`attn_dist`  head-summed attention distribution over a sparse index list.
"""

from ._version import __version__
from .checks import UnsupportedError
from .interface import attn_dist, forward
from .module import HTreeAttention

__all__ = ["HTreeAttention", "UnsupportedError", "__version__", "attn_dist", "forward"]
