"""A round as data: which training, what disturbs it when, and how it goes on. All of it follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from distkit.strategies.registry import strategy_class, strategy_names

__all__ = ["KINDS", "Round", "draw"]

KINDS = (
    "kill a rank",
    "kill the launcher",
    "kill all",
    "TERM",
    "STOP, CONT",
    "small disk",
    "disk filled, freed",
    "read-only",
    "damaged file",
    "damaged manifest",
    "left-over folders",
)

DAMAGES = ("truncate", "flip a bit", "delete", "garbage", "pickle")
TARGETS = {"TERM": ("rank", "launcher", "all"), "STOP, CONT": ("rank", "all")}
DROPOUT = 0.1


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        name: How it was drawn, ``SEED:NUMBER``.
        kind: One of KINDS.
        strategy: Of the run that is disturbed.
        nproc: Its number of processes.
        next_strategy: Of the run that goes on; the same in most rounds.
        next_nproc: Its number of processes.
        every: ``checkpoint.every_steps``.
        keep: ``checkpoint.keep``.
        background: ``checkpoint.background``.
        inside: Whether to strike inside a save, or else at any moment.
        nth: Which save to strike in, counted from 1; or how many saves' steps to wait for.
        moment: Where inside, as a fraction of the time that a save takes.
        target: Who is struck: ``rank``, ``launcher`` or ``all``.
        victim: The rank that is struck.
        restart: Whether the launcher starts the ranks again by itself.
        damage: What happens to a file of the newest checkpoint.
        which: Which file, as a fraction of the list.
        where: Which byte of it, as a fraction of its size.
        hold_s: How long a stop, a full disk or a read-only folder lasts.
        room: Size of a small disk in checkpoints.
        lock: What becomes read-only: the ``disk``, the ``folder`` of checkpoints or the ``unfinished`` one. A disk on
            which a save has files open can't, so inside of one it is the folder.
    """

    name: str
    kind: str
    strategy: str = "ddp"
    nproc: int = 2
    next_strategy: str = "ddp"
    next_nproc: int = 2
    every: int = 2
    keep: int = 2
    background: bool = False
    inside: bool = True
    nth: int = 3
    moment: float = 0.5
    target: str = "rank"
    victim: int = 0
    restart: bool = False
    damage: str = "truncate"
    which: float = 0.0
    where: float = 0.5
    hold_s: float = 0.5
    room: float = 1.5
    lock: str = "folder"

    @property
    def changed(self) -> bool:
        """Whether the run goes on under another strategy or number of processes."""
        return (self.strategy, self.nproc) != (self.next_strategy, self.next_nproc)

    @property
    def dropout(self) -> float:
        """Dropout draws from each rank's generator, so another number of ranks gives another training."""
        return 0.0 if self.changed else DROPOUT


def draw(seed: int, number: int, *, background: bool | None = None, strategies: tuple[str, ...] = ()) -> Round:
    """The round of a seed and a number.

    Kinds take turns, so that any 11 rounds in a row have each of them; everything else is drawn.

    Args:
        seed: Of the whole test.
        number: Of the round, from 0 on.
        background: Leave nothing to chance here, but still draw, so that the rest is the same.
        strategies: Draw from these; empty is all that are registered.
    """
    dice = random.Random(f"{seed}:{number}")
    kind = KINDS[number % len(KINDS)]
    names = strategies or tuple(strategy_names())
    strategy, nproc = _configuration(dice, names)
    other = _configuration(dice, names)
    # A stop that ends in nothing, and ranks that are started again by the launcher, go on as they are.
    changed = dice.random() < 0.3
    restart = dice.random() < 0.4 and kind == "kill a rank"
    changes = changed and not restart and kind != "STOP, CONT"
    drawn = dice.random() < 0.5
    return Round(
        name=f"{seed}:{number}",
        kind=kind,
        strategy=strategy,
        nproc=nproc,
        next_strategy=other[0] if changes else strategy,
        next_nproc=other[1] if changes else nproc,
        every=dice.choice((2, 3)),
        keep=dice.choice((2, 3)),
        background=drawn if background is None else background,
        inside=dice.random() < 0.75,
        nth=dice.choice((3, 4)) if kind.startswith("damaged") else dice.choice((1, 2, 3, 4)),
        moment=dice.random(),
        target=dice.choice(TARGETS.get(kind, ("rank",))),
        victim=dice.randrange(nproc),
        restart=restart,
        damage=dice.choice(DAMAGES),
        which=dice.random(),
        where=dice.random(),
        hold_s=dice.choice((0.05, 0.2, 0.6, 1.5)),
        room=dice.uniform(0.4, 2.9),
        lock=dice.choice(("disk", "folder", "unfinished")),
    )


def _configuration(dice: random.Random, names: tuple[str, ...]) -> tuple[str, int]:
    name = dice.choice(names)
    one = strategy_class(name).capabilities.processes == "one"
    nproc = dice.choices((2, 4), (6, 1))[0]
    return name, 1 if one else nproc
