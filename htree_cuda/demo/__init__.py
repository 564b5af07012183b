"""`python -m htree_cuda demo`: search a long real document by htree attention.

text.py       documents, their tokens and passages
embedding.py  tokens -> keys and values, a question -> query heads
search.py     the attention calls, the leaves behind them, attention mass per token
report.py     the tables
picture.py    the PNG
cli.py        the command
"""

from .cli import main

__all__ = ["main"]
