"""The disturbances of a running training: each waits for its moment, strikes, and says what it did."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.disks import fill, lock_folder, remount, unlock_folder
from tests.chaos.rounds import Round
from tests.chaos.running import Run, unfinished

__all__ = ["Strike", "strike"]


@dataclass
class Strike:
    """What was done.

    Args:
        done: Whether the run still lived when it was to be struck.
        inside: Whether a save was surely under way.
        whole: Checkpoints that had their final name just before.
        statuses: Exit statuses of the launcher that are as documented, in the terms of subprocess.
        causes: One of these must be in the error of a run that ended with status 1.
        undo: Frees what is full or locked; run when the training has ended, if not before.
    """

    done: bool = False
    inside: bool = False
    whole: set[str] = field(default_factory=set)
    statuses: tuple[int, ...] = (0,)
    causes: tuple[str, ...] = ()
    undo: Callable[[], object] = lambda: None


def strike(run: Run, plan: Round, disk: Path | None) -> Strike:
    """Wait for the moment that the plan names and strike.

    Args:
        run: It has just been started.
        plan: The round.
        disk: The small disk of the round.

    Returns:
        What was done; ``done`` is False if the run ended before.
    """
    if plan.kind == "small disk":  # the disk itself strikes, when it is full
        return Strike(True, inside=True, statuses=(1,), causes=("No space left on device",))
    # Where all is lost together, or the disk changes under all, the ranks stand still for the moment of the strike.
    everyone = plan.kind in ("kill all", "disk filled, freed", "read-only")
    if plan.inside:
        inside = run.stop_inside_save(plan.nth, plan.moment, everyone)
        here = inside
    else:
        here, inside = run.wait_for_steps(plan.nth * plan.every), False
        time.sleep(0.2 * plan.moment)
    if not here or not run.ranks():
        return Strike()
    if not plan.inside and everyone:
        run.freeze([*run.ranks().values()])
    made = Strike(True, inside or unfinished(run.checkpoints) is not None, run.whole())
    ranks = run.ranks()
    if plan.victim % plan.nproc not in ranks:  # it is just ending
        run.send([*ranks.values()], signal.SIGCONT)
        return Strike()
    try:
        _do(run, plan, disk, made, ranks)
    finally:
        run.send([*ranks.values()], signal.SIGCONT)
    if plan.kind in ("disk filled, freed", "read-only"):
        with suppress(TimeoutError):
            _wait(run, plan.hold_s)
        made.undo()
    return made


def _do(run: Run, plan: Round, disk: Path | None, made: Strike, ranks: dict[int, int]) -> None:
    victim, launcher = ranks[plan.victim % plan.nproc], run.process.pid
    targets = {"rank": [victim], "launcher": [launcher], "all": [launcher, *ranks.values()]}[plan.target]
    if plan.kind in ("kill a rank", "damaged file", "damaged manifest", "left-over folders"):
        made.statuses = (0,) if plan.restart else (137,)
        run.send([victim], signal.SIGKILL)
    elif plan.kind == "kill the launcher":
        made.statuses = (-9,)
        run.send([launcher], signal.SIGKILL)
    elif plan.kind == "kill all":
        made.statuses = (-9,)
        run.send([launcher, *ranks.values()], signal.SIGKILL)
    elif plan.kind == "TERM":
        made.statuses = (143,)
        run.send(targets, signal.SIGTERM)
    elif plan.kind == "STOP, CONT":
        run.send(targets, signal.SIGSTOP)
        time.sleep(plan.hold_s)
        run.send(targets, signal.SIGCONT)
    elif plan.kind == "disk filled, freed":
        assert disk is not None
        made.statuses, made.causes = (0, 1), ("No space left on device",)
        filler = fill(disk)
        made.undo = lambda: filler.unlink(missing_ok=True)
    else:
        _lock(run, plan, disk, made)


def _lock(run: Run, plan: Round, disk: Path | None, made: Strike) -> None:
    """Make the disk, the folder of checkpoints or the unfinished one read-only."""
    made.statuses, made.causes = (0, 1), ("Read-only file system", "Operation not permitted")
    current = unfinished(run.checkpoints)
    if disk is not None and current is None and remount(disk, "ro", 1.0):
        made.undo = lambda: remount(disk, "rw")
        return
    folder = run.checkpoints if run.checkpoints.is_dir() else run.run_dir  # before the first save
    made.done = lock_folder(current if plan.lock == "unfinished" and current is not None else folder)
    made.undo = lambda: unlock_folder(run.run_dir)


def _wait(run: Run, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not run.ended and time.monotonic() < until:
        time.sleep(0.01)
