"""The PyTorch backend: every op in plain PyTorch operations, on any device, over chunks of queries with bounded memory.

``tree``    htree attention, its backward and tree pooling.
``varlen``  packed and ragged sequences, batch by batch.
``lists``   attention over an index list, its backward, and attn_dist.
``chunks``  what both share: how large a chunk may be, and the temporaries that chunks use again.

Any floating dtype; bf16 and fp16 inputs are accumulated in float32. What is computed is `definition.py`.
"""
