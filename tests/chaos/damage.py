"""What happens to checkpoints between two runs: damage, and what dead processes left behind."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path

from distkit.checkpoint.format import MANIFEST
from distkit.checkpoint.store import this_host
from tests.chaos.rounds import Round

__all__ = ["Payload", "damage", "leave_folders"]


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.witness,)


def damage(checkpoint: Path, plan: Round, witness: Path) -> Path:
    """Damage one file of a checkpoint.

    Args:
        checkpoint: Its folder.
        plan: Says how, which file and where in it.
        witness: The file that a pickle payload would make.

    Returns:
        The file.
    """
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST)
    name = MANIFEST if plan.kind == "damaged manifest" else names[int(plan.which * len(names))]
    path = checkpoint / name
    whole = path.read_bytes()
    at = int(plan.where * len(whole))
    if plan.damage == "delete":
        path.unlink()
    elif plan.damage == "truncate":
        os.truncate(path, at)
    elif plan.damage == "flip a bit":
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ (1 << int(plan.where * 8))]))
    elif plan.damage == "garbage":
        path.write_bytes(os.urandom(len(whole)))
    else:  # of the file's own size where it fits, so that the size alone doesn't give it away
        path.write_bytes(pickle.dumps(Payload(witness)).ljust(len(whole), b"\0"))
    return path


def leave_folders(folder: Path, dead: int) -> tuple[list[Path], Path]:
    """Put half-written folders where a run that was killed might have left them.

    The newest checkpoint is moved aside, as if a run had died while it was being replaced.

    Args:
        folder: Of the checkpoints; holds at least one.
        dead: Id of a process that has ended.

    Returns:
        Folders that the next run must remove or put back, and one of another host that it must leave alone.
    """
    checkpoints = sorted(folder.glob("step-*"))
    now = time.time_ns()
    unfinished = folder / f".tmp-step-00000007-{this_host()}-{dead}-{now}"
    unfinished.mkdir()
    (unfinished / "model-00000.safetensors").write_bytes(os.urandom(1000))
    foreign = folder / f".tmp-step-00000007-another.1-{dead}-{now}"
    foreign.mkdir()
    doomed = folder / f".del-{checkpoints[0].name}-{now}"
    shutil.copytree(checkpoints[0], doomed)
    (doomed / MANIFEST).unlink()
    aside = folder / f".old-{checkpoints[-1].name}-{now}"
    checkpoints[-1].rename(aside)
    return [unfinished, doomed, aside], foreign
