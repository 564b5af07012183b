"""The loan of one pass of a call: which rows travel between this rank and another one, and back."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .balance import Loan
from .exchange import Travel, trade
from .placement import Placement


class Lending:
    """A rank's side of the loan of a forward or of a backward, whose tensors have `local` rows a sequence here; every
    rank makes the same calls, and none where nothing is lent."""

    def __init__(self, place: Placement, group: dist.ProcessGroup, loan: Loan | None, local: int):
        self.place, self.group = place, group
        self.any = loan is not None
        self.lent = loan if loan and loan.lender == place.rank else None
        self.borrowed = loan if loan and loan.borrower == place.rank else None
        self.other = self.lent.borrower if self.lent else self.borrowed.lender if self.borrowed else None
        self.rows = loan.count if loan else 0
        self.end = loan.start + loan.count if loan else 0
        # Rows of this rank's tensors that are not lent: the lent ones are the last.
        self.kept_rows = local - (self.lent.count if self.lent else 0)

    def send(self, tensors: list[Tensor]) -> tuple[list[Tensor], Travel]:
        """Lent rows of tensors [local, ..] travel to who borrowed them; returned are those that this rank borrowed, one
        tensor for each, none on a rank that borrows nothing."""
        sent = [x[self.kept_rows :].contiguous() for x in tensors] if self.lent else []
        found = [x.new_empty(self.borrowed.count, *x.shape[1:]) for x in tensors] if self.borrowed else []
        return found, self.trade(tensors, sent, found)

    def give_back(self, tensors: list[Tensor], found: list[Tensor]) -> Travel:
        """What this rank found for the rows that it borrowed travels to the lender's tensors [local, ..], contiguous
        ones, where these rows are the last."""
        return self.trade(tensors, found, [x[self.kept_rows :] for x in tensors] if self.lent else [])

    def trade(self, like: list[Tensor], sent: list[Tensor], received: list[Tensor]) -> Travel:
        """Contiguous tensors of the dtypes of `like` travel between lender and borrower: for each, a rank has one of
        `sent` or one of `received`, or neither."""
        if not like:
            return Travel(None)
        lists = [
            (x, {self.other: sent[i]} if sent else {}, {self.other: received[i]} if received else {})
            for i, x in enumerate(like)
        ]
        return Travel(trade(self.place, self.group, lists), sent, received)
