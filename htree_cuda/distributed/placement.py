"""Which tokens of a sequence a rank has, and in which stages they are exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """One rank's place in a sequence that `ranks` ranks share.

    A *part* is a run of consecutive tokens. A *stage* is a run of `ranks` neighbouring parts, one of each rank, so
    that one collective serves it; contiguous has one stage, zigzag two. A rank's tokens are its parts of all stages,
    in their order.
    """

    layout: str
    rank: int
    ranks: int

    @property
    def stages(self) -> int:
        return 2 if self.layout == "zigzag" else 1

    @property
    def parts(self) -> int:
        """Of the whole sequence."""
        return self.stages * self.ranks

    def reversed(self, stage: int) -> bool:
        """Whether the ranks' parts of a stage lie in descending order of rank."""
        return stage == 1

    def part(self, stage: int) -> int:
        """Which part of the sequence is this rank's in a stage."""
        return self.part_of(self.rank, stage)

    def part_of(self, rank: int, stage: int) -> int:
        """Which part is another rank's."""
        within = self.ranks - 1 - rank if self.reversed(stage) else rank
        return stage * self.ranks + within

    def seen(self, strict_causal: bool) -> list[int]:
        """So many parts, from the first on, have keys of each rank's queries: those up to its own last part, or all
        where the node that holds a query takes part in its selection."""
        return [self.part_of(x, self.stages - 1) + 1 if strict_causal else self.parts for x in range(self.ranks)]

    def parts_of(self, whole: Tensor, stage: int) -> list[Tensor]:
        """Of a tensor whose rows are the tokens of the sequence, the parts of a stage in the order of ranks."""
        n = whole.shape[0] // self.parts
        found = list(whole.narrow(0, stage * self.ranks * n, self.ranks * n).split(n))
        return found[::-1] if self.reversed(stage) else found

    def own(self, x: Tensor, stage: int) -> Tensor:
        """Of a tensor whose rows are this rank's tokens, those of a stage."""
        n = x.shape[0] // self.stages
        return x.narrow(0, stage * n, n)
