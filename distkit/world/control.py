"""The control exchange: do all ranks do the same thing now, and did one of them ask for something?

Every verb that all ranks must call (a step, a save, an evaluation ...) begins with one row of integers gathered from
all ranks on the host: which verb, how many verbs before, which flags. A rank that skipped a verb is noticed as soon as
it begins its next one, and named, instead of hanging in a collective until a timeout.

A step's exchange starts when its window starts and is read when its window ends, so it costs no waiting; what was
asked for before a window (a signal, :meth:`distkit.Trainer.request_stop`) takes effect at that window's end on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from distkit.errors import OutOfStepError
from distkit.world.collectives import Collectives, Pending

__all__ = ["VERBS", "Control"]

VERBS = ("step", "save", "load", "evaluate", "start", "prepare", "close", "gather", "main_first", "export", "epoch")
"""Verbs that all ranks call together; a row carries the index."""


class Control:
    """Exchanges rows over the world.

    Args:
        collectives: How rows travel.
        rank: This rank.
    """

    def __init__(self, collectives: Collectives, rank: int) -> None:
        self._collectives = collectives
        self._rank = rank
        self._count = 0
        self._pending: tuple[str, Pending] | None = None
        self._carried = (False,) * MAX_FLAGS
        self.listener: Callable[[str], None] = lambda verb: None
        """Told of each verb as it begins."""

    def begin(self, verb: str, *flags: bool) -> None:
        """Announce a verb without waiting; :meth:`finish` reads the answers.

        A verb that is still under way is finished first, and its flags are kept for the next ``finish``.
        """
        self.listener(verb)
        if self._pending is not None:
            self._carried = self._collect()
        row = [VERBS.index(verb), self._count, *(int(flag) for flag in flags)]
        row += [0] * (2 + MAX_FLAGS - len(row))
        self._count += 1
        self._pending = (verb, self._collectives.gather_rows(row))

    def finish(self) -> tuple[bool, ...]:
        """Wait for all ranks' rows.

        Returns:
            Each flag, true where any rank set it.

        Raises:
            OutOfStepError: Ranks are at different verbs; names them.
        """
        flags = self._collect()
        self._carried = (False,) * MAX_FLAGS
        return flags

    def _collect(self) -> tuple[bool, ...]:
        if self._pending is None:
            return self._carried
        verb, pending = self._pending
        self._pending = None
        rows = pending.wait()
        if any(row[0] != VERBS.index(verb) for row in rows):
            raise _out_of_step(verb, rows)
        return tuple(any(row[2 + i] for row in rows) or self._carried[i] for i in range(MAX_FLAGS))

    def together(self, verb: str, *flags: bool) -> tuple[bool, ...]:
        """Announce a verb and wait for all ranks; flags of a step that was under way stay for its own ``finish``."""
        self.begin(verb, *flags)
        carried, self._carried = self._carried, (False,) * MAX_FLAGS
        answers = self._collect()
        self._carried = carried
        return answers


MAX_FLAGS = 4


def _out_of_step(verb: str, rows: list[list[int]]) -> OutOfStepError:
    by_verb: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        by_verb.setdefault(VERBS[row[0]], []).append(rank)
    here = by_verb.get(verb, [])
    elsewhere = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} went on to trainer.{name}()"
        for name, ranks in by_verb.items()
        if name != verb
    )
    missing = [rank for rank in range(len(rows)) if rank not in here]
    return OutOfStepError(
        f"trainer.{verb}() must be called by all ranks, but only rank{'s' if len(here) > 1 else ''} "
        f"{', '.join(map(str, here))} called it; missing: {', '.join(map(str, missing))} ({elsewhere})",
        hint=f"call trainer.{verb}() on every rank; it is not to stand under `if trainer.is_main:` or `if rank == 0:`",
    )
