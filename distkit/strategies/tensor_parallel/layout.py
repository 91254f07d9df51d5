"""Which module is split over a tensor group, and how: the result of detection, of a plan, or of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

__all__ = ["COLUMN", "ROW", "Layout", "Runs", "Split", "join_runs"]

COLUMN, ROW = "column", "row"

Runs = tuple[tuple[int, int], ...]
"""Runs of features: (first, how many), in rising order."""


@dataclass(frozen=True)
class Split:
    """How one module is split.

    Args:
        style: ``column`` splits output features, ``row`` input features (its outputs are summed over the group).
        runs: For each rank of the tensor group the features or rows that it holds.
        parts: Sizes of the parts that are split each for itself, like (c, c, c) of a fused q, k, v; one part otherwise.
        partners: Of a row layer: the column layers that feed it.
    """

    style: str
    runs: tuple[Runs, ...]
    parts: tuple[int, ...]
    partners: tuple[str, ...] = ()

    def local_size(self, rank: int) -> int:
        """Features that a rank holds."""
        return sum(length for _, length in self.runs[rank])


@dataclass
class Layout:
    """All that is split in a model.

    Args:
        size: Ranks of a tensor group.
        splits: By module name; modules that aren't in it are the same on all ranks.
        notes: Why other modules stay whole, by module name.
    """

    size: int
    splits: dict[str, Split] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def keep_whole(self, pattern: str) -> None:
        """Take modules out whose name matches (``*`` stands for anything), and with each what would not work without it."""
        for row, split in list(self.of_style(ROW)):
            if any(fnmatchcase(name, pattern) for name in (row, *split.partners)):
                self.take_out(row, "the settings say so")

    def take_out(self, row: str, why: str) -> None:
        """Keep a row layer whole, and all that is split with it."""
        gone = [row]
        while gone:
            name = gone.pop()
            split = self.splits.pop(name, None)
            if split is None:
                continue
            self.notes[name] = why if name == row else f"is split with {row} or not at all"
            gone += split.partners
            gone += [other for other, held in self.splits.items() if name in held.partners]

    def of_style(self, style: str) -> Iterator[tuple[str, Split]]:
        """Names and splits of one style."""
        yield from ((name, split) for name, split in self.splits.items() if split.style == style)


def join_runs(runs: Sequence[tuple[int, int]]) -> Runs:
    """Neighbours become one."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length:
            joined.append((start, length))
    return tuple(joined)
