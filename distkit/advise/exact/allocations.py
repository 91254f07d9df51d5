"""What a process allocates and frees, written down, and from that its peak by kind of memory.

What a piece of memory is for shows late: a tensor of the backward becomes a gradient when the backward is over. So events are
written down without a kind, kinds are told when they are known, and :meth:`Allocations.peaks` counts when all is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distkit.advise.memory import KINDS

__all__ = ["Allocations", "Peak"]


@dataclass(frozen=True)
class Peak:
    """The largest sum within a stretch of a step.

    Args:
        where: Name of the stretch.
        kinds: Bytes by kind at that moment.
    """

    where: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.kinds.values())


class Allocations:
    """The events of a process, in order. Pieces of memory are numbered."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int]] = []
        """(piece, change in bytes); for the start of a stretch (-1, its index)."""
        self._stretches: list[str] = []
        self._states: dict[int, str] = {}
        self._buffers: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._begin: int | None = None

    def changed(self, piece: int, size: int) -> None:
        """A piece has so many bytes now; 0 when it is free."""
        before = self._sizes.pop(piece, 0)
        if size:
            self._sizes[piece] = size
        if size != before:
            self._events.append((piece, size - before))

    def is_state(self, pieces: Iterable[int], kind: str) -> None:
        """They are parameters, gradients or optimizer states; what was said first stands."""
        for piece in pieces:
            self._states.setdefault(piece, kind)

    def is_buffer(self, pieces: Iterable[int]) -> None:
        """They are buffers, unless they are state."""
        self._buffers.update(pieces)

    def is_parameter(self, piece: int) -> bool:
        """Whether that was said of it."""
        return self._states.get(piece) == "parameters"

    def begin(self) -> None:
        """The step to be looked at begins; what lies around and is no state is a buffer."""
        self._buffers.update(self._sizes)
        self._begin = len(self._events)

    def enter(self, where: str) -> None:
        """A stretch of the step begins; one name may come several times."""
        self._stretches.append(where)
        self._events.append((-1, len(self._stretches) - 1))

    def kind(self, piece: int) -> str:
        """By what is known now."""
        return self._states.get(piece) or ("buffers" if piece in self._buffers else "activations")

    def peaks(self) -> list[Peak]:
        """Of each stretch since :meth:`begin`, in the order in which they came first."""
        assert self._begin is not None
        now = dict.fromkeys(KINDS, 0)
        total, found, where = 0, dict[str, Peak](), ""
        largest = -1
        for index, (piece, change) in enumerate(self._events):
            if piece < 0:
                where = self._stretches[change]
                largest = found[where].total if where in found else -1
            else:
                now[self.kind(piece)] += change
                total += change
            if index >= self._begin and where and total > largest:
                largest = total
                found[where] = Peak(where, dict(now))
        return list(found.values())
