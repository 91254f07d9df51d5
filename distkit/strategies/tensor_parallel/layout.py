"""Which module is split over a tensor group, and how: the result of detection, of a plan, or of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["COLUMN", "REPLICATE", "ROW", "VOCABULARY", "Layout", "Runs", "Split", "join_runs"]

COLUMN, ROW, VOCABULARY, REPLICATE = "column", "row", "vocabulary", "replicate"

Runs = tuple[tuple[int, int], ...]
"""Runs of features: (first, how many), in rising order."""


@dataclass(frozen=True)
class Split:
    """How one module is split.

    Args:
        style: ``column`` splits output features, ``row`` input features (its outputs are summed over the group),
            ``vocabulary`` the rows of an embedding (its outputs are summed too).
        runs: For each rank of the tensor group the features or rows that it holds.
        parts: Sizes of the parts that are split each for itself, like (c, c, c) of a fused q, k, v; one part otherwise.
        partners: Of a row layer: the column layers that feed it. Of a vocabulary: what is tied to it.
        leaves: Of a column layer: its output leaves the model, split, and no row layer takes it.
        source: Who says so: ``found``, the model's own ``plan``, or the ``settings``.
    """

    style: str
    runs: tuple[Runs, ...]
    parts: tuple[int, ...]
    partners: tuple[str, ...] = ()
    leaves: bool = False
    source: str = "found"

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
        work: Multiplications of each layer for the example that was looked at, by module name.
    """

    size: int
    splits: dict[str, Split] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)

    def style_of(self, name: str) -> str:
        """How a module is split; ``replicate`` if it isn't."""
        return self.splits[name].style if name in self.splits else REPLICATE

    def take_out(self, first: str, why: str) -> None:
        """Keep a layer whole, and all that is split with it."""
        gone = [first]
        while gone:
            name = gone.pop()
            split = self.splits.pop(name, None)
            if split is None:
                continue
            self.notes[name] = why if name == first else f"is split with {first} or not at all"
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
