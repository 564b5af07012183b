"""The one Python benchmark program: `python -m htree_cuda bench COMMAND ...`, COMMAND being forward, backward, budgets,
decode, packed, attn_dist, sparse_attention, dsa, dsa_decode, indexer or, started by torchrun, context_parallel.

Protocol. On a GPU: 0.5 s of warm-up, then back-to-back calls for at least 1 s (at least 5 calls), CUDA events around
each; median and 90th percentile; SM clock and power are read while the calls run. Beyond --dense-up-to dense attention
is called once, cold, by the wall clock. On a CPU: one warm-up call, then calls for at least 1 s (at least 3 calls),
wall clock. Everything a call needs is inside the time: there is no cache between calls. Peers run in the same process
on the same data. Inputs have unit variance and are never zeros.

sparse_attention and its peer are interleaved, three rounds of both, over which median and percentile are taken. Then
again with a pause before each call, as long as the call: back to back the power cap sets the clock, with pauses not.

decode times what is set beside a replayed step on a GPU, eager steps and a step's parts, for 0.3 s after 0.1 s.

budgets has hundreds of rows and a shorter protocol (`protocol.Short`): 0.05 s of warm-up, then calls for at least
0.12 s, and one call where a call takes 0.3 s or more. The JSON holds these numbers. packed has the call that a row is
compared with in the same process: 0.2 s of warm-up and 0.6 s of calls, at least 5; 0.03 and 0.15 s for each length of
a document.

Every figure carries the FLOPs and bytes it counts; the JSON names the sources (content hash), machine and torch. The
tables and plots of the README are made from these files by tools/update_docs.py.
"""

from .cli import main

__all__ = ["main"]
