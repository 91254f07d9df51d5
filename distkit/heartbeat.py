"""A file of each rank that says what it is doing, for the launcher and for people who ask why nothing moves.

``RUN_DIR/heartbeat/rank-003.json``: rank, host, pid, phase, step, and two times in seconds since the epoch: ``time``, when
the phase or step changed last, and ``written``. A process that is stopped or gone doesn't write; one that waits does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path

__all__ = ["Heartbeat", "heartbeat_path"]

_EVERY_S = 1.0
_AT_LEAST_EVERY_S = 10.0


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    """The file of a rank."""
    return run_dir / "heartbeat" / f"rank-{rank:03d}.json"


class Heartbeat:
    """Notes phase and step at once, and has a thread write them, so that a step never waits for a disk.

    Args:
        run_dir: The run's folder.
        rank: This rank.
        owner: When it is gone, the writing ends.
    """

    def __init__(self, run_dir: Path, rank: int, owner: object) -> None:
        self._state = _State(heartbeat_path(run_dir, rank), rank)
        self._thread = threading.Thread(target=self._state.write_on, name="distkit-heartbeat", daemon=True)
        weakref.finalize(owner, self._state.ended.set)
        self._thread.start()

    def beat(self, phase: str, step: int) -> None:
        """Something else begins.

        Args:
            phase: A verb of the Trainer (step, save, evaluate ...), or ``data`` while it waits for a batch.
            step: Steps done so far.
        """
        self._state.now = (phase, step, time.time())

    def close(self) -> None:
        """Say that this rank is done."""
        phase, step, _ = self._state.now
        self._state.now = ("closed", step, time.time())
        self._state.ended.set()
        self._thread.join(5.0)


class _State:
    """What the thread needs, without the Trainer."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank, self._host = path, rank, socket.gethostname()
        self.now = ("start", 0, time.time())
        self.ended = threading.Event()

    def write_on(self) -> None:
        written: tuple[str, int, float] | None = None
        when = 0.0
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            last = self.ended.is_set()
            if self.now != written or time.monotonic() - when > _AT_LEAST_EVERY_S:
                written, when = self.now, time.monotonic()
                self._write(*written)
            if last:
                return
            self.ended.wait(_EVERY_S)

    def _write(self, phase: str, step: int, changed: float) -> None:
        """In one step, so that no one reads half of it. A full disk is the business of what has to be written."""
        found = {"rank": self._rank, "host": self._host, "pid": os.getpid(), "phase": phase, "step": step}
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            unfinished.write_text(json.dumps({**found, "time": changed, "written": time.time()}), encoding="utf-8")
            unfinished.replace(self._path)
