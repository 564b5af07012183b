"""Which tokens of a sequence a rank has, and in which stages they are exchanged."""

from __future__ import annotations

from dataclasses import dataclass


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
        within = self.ranks - 1 - self.rank if self.reversed(stage) else self.rank
        return stage * self.ranks + within
