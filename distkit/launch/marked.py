"""Processes of one launch, found by the mark in their environment: what is left of them on a host is ended.

``python -m distkit.launch.marked ID`` ends them on the host where it runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from distkit.launch.worker import LAUNCH_VARIABLE

__all__ = ["is_worker", "marked", "rank_of", "sweep"]

_WORKER = [b"-m", b"distkit.launch.worker"]
"""How a rank's own command line goes on after the interpreter; the launchers' contain it further behind."""


def marked(mark: str, wanted: Callable[[list[bytes]], bool] = lambda words: True) -> list[int]:
    """Living processes on this host that carry the mark (Linux: /proc), without this one and those that it waits in.

    Args:
        mark: The launch's id.
        wanted: Chooses by the command line.
    """
    variable = f"{LAUNCH_VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] and wanted(words) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def is_worker(words: list[bytes]) -> bool:
    """Whether a command line is that of a rank."""
    return (words[1:2] == [b"-u"] and words[2:4] == _WORKER) or words[1:3] == _WORKER


def rank_of(pid: int) -> int | None:
    """The rank of a process of this host, by the variables of its launcher."""
    try:
        variables = dict(
            part.split(b"=", 1) for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in part
        )
    except OSError:
        return None
    names = (b"RANK", b"HOROVOD_RANK", b"OMPI_COMM_WORLD_RANK", b"SLURM_PROCID", b"PMI_RANK")
    return next((int(variables[name]) for name in names if variables.get(name, b"").isdigit()), None)


def sweep(mark: str, seconds: float = 5.0) -> int:
    """End everything on this host that carries the mark; how many processes there were."""
    deadline, ended = time.monotonic() + seconds, set[int]()
    while (left := marked(mark)) and time.monotonic() < deadline:
        ended.update(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return len(ended)


if __name__ == "__main__":
    sweep(sys.argv[1])
