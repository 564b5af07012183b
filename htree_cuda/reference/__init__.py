"""The two PyTorch references.

``definition``  one query at a time, float64 capable, to be read beside docs/algorithm.md: the oracle of every test.
``vectorised``  the same functions over chunks of queries with bounded memory: the ``torch`` backend.
"""
