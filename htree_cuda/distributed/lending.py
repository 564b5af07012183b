"""The loans of one call: which rows travel between this rank and others, and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .balance import Loan
from .exchange import trade
from .exchange import wait as wait_for
from .placement import Placement


class Travel:
    """An exchange under way; what it sends and receives lives until it is waited for."""

    def __init__(self, event: torch.cuda.Event | None, *tensors):
        self.event, self.tensors = event, tensors

    def wait(self, x: Tensor) -> None:
        """What follows on the current stream of x's device comes after the exchange."""
        wait_for(x, self.event)
        self.tensors = ()


class Lending:
    """A rank's side of the loans of a call, whose tensors have `local` rows a sequence here; every rank makes the same
    calls."""

    def __init__(self, place: Placement, group: dist.ProcessGroup, loans: tuple[Loan, ...], local: int):
        self.place, self.group = place, group
        self.any = bool(loans)
        self.lent = [loan for loan in loans if loan.lender == place.rank]
        self.borrowed = [loan for loan in loans if loan.borrower == place.rank]
        self.lent_rows = sum(loan.count for loan in self.lent)
        # Position of this rank's first row, if its late part's rows were counted back.
        self.origin = place.part(place.stages - 1) * (local // place.stages) - (local - local // place.stages)

    def _own(self, x: Tensor, loan: Loan) -> Tensor:
        """Of a tensor of this rank's rows, those of a loan that it has made."""
        return x.narrow(0, loan.start - self.origin, loan.count)

    def send(self, tensors: list[Tensor]) -> tuple[list[list[Tensor]], Travel]:
        """Rows of tensors [local, ..] travel to who borrowed them; returned are those that this rank borrowed, for each
        tensor a list in the order of `borrowed`."""
        sent = [{x.borrower: self._own(t, x).contiguous() for x in self.lent} for t in tensors]
        found = [[t.new_empty(x.count, *t.shape[1:]) for x in self.borrowed] for t in tensors]
        received = [{x.lender: rows for x, rows in zip(self.borrowed, some, strict=True)} for some in found]
        return found, self._trade(tensors, sent, received)

    def give_back(self, tensors: list[Tensor], found: list[list[Tensor]]) -> Travel:
        """What this rank found for the rows it borrowed travels to the rows of the lender's tensors [local, ..], which
        are contiguous."""
        sent = [{x.lender: rows for x, rows in zip(self.borrowed, some, strict=True)} for some in found]
        received = [{x.borrower: self._own(t, x) for x in self.lent} for t in tensors]
        return self._trade(tensors, sent, received)

    def _trade(self, tensors: list[Tensor], sent: list[dict], received: list[dict]) -> Travel:
        event = trade(self.place, self.group, list(zip(tensors, sent, received, strict=True)))
        return Travel(event, sent, received)
