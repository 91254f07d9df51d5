"""Which module is split over a tensor group, and how: the result of detection, of a plan, or of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

__all__ = ["COLUMN", "ROW", "VOCAB", "Layout", "Runs", "Split", "even_runs"]

COLUMN, ROW, VOCAB = "column", "row", "vocab"

Runs = tuple[tuple[int, int], ...]
"""Runs of features: (first, how many), in rising order."""


@dataclass(frozen=True)
class Split:
    """How one module is split.

    Args:
        style: ``column`` splits output features, ``row`` input features (its outputs are summed over the group),
            ``vocab`` the rows of an embedding.
        runs: For each rank of the tensor group the features or rows that it holds.
        parts: Sizes of the parts that are split each for itself, like (c, c, c) of a fused q, k, v; one part otherwise.
        gathered: Whether outputs are put together again, because something needs them whole.
        partners: Of a row layer: the column layers that feed it.
        summed: Of a row layer: names of parameters that every rank has whole but uses for its own part only, such as a
            norm inside of each head. Their gradients are summed over the group.
    """

    style: str
    runs: tuple[Runs, ...]
    parts: tuple[int, ...]
    gathered: bool = False
    partners: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

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

    @property
    def summed(self) -> list[str]:
        """Names of parameters whose gradients are summed over the group."""
        return list(dict.fromkeys(name for _, split in self.of_style(ROW) for name in split.summed))

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


def even_runs(parts: Sequence[int], size: int) -> tuple[Runs, ...] | None:
    """Each part cut into equal pieces, one a rank; None if a part can't be."""
    if any(part % size for part in parts):
        return None
    runs: list[Runs] = []
    for rank in range(size):
        start, own = 0, []
        for part in parts:
            piece = part // size
            own.append((start + rank * piece, piece))
            start += part
        runs.append(join_runs(own))
    return tuple(runs)


def join_runs(runs: Sequence[tuple[int, int]]) -> Runs:
    """Neighbours become one."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length:
            joined.append((start, length))
    return tuple(joined)
