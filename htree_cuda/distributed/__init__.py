"""One sequence over several GPUs: context parallelism on torch.distributed process groups.

`context_parallel_forward`  `htree_cuda.forward` where every rank has a share of the tokens (differentiable).
`shard`                     a rank's tokens of a whole tensor.
`unshard`                   the whole tensor again (differentiable).
`positions`                 which tokens a rank has.
"""

from .api import context_parallel_forward, positions, shard, unshard

__all__ = ["context_parallel_forward", "positions", "shard", "unshard"]
