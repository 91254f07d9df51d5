"""The live workers of this host: their exits as they happen, signals to them, and the end of all they started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CAN_WATCH", "Exit", "Workers", "end_with_parent"]

CAN_WATCH = hasattr(os, "waitid")
"""False on macOS before Python 3.13: torchrun's own polling has to do there, with its own grace time of 30 s."""

_LOST = 255


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Args:
        code: Exit status; negative is the number of the signal that killed it.
        time: When, in seconds since the epoch.
        after: The last signal that was sent to it before, or None.
    """

    code: int
    time: float
    after: signal.Signals | None

    @property
    def as_asked(self) -> bool:
        """Whether it ended by the signal that it was sent, or with the exit status that stands for that signal."""
        return self.after is not None and self.code in (-self.after, 128 + self.after)


class Workers:
    """Processes by rank. Used by two threads: the agent's starts them, the main one forwards signals.

    Every worker leads a process group of its own (torchrun starts it in a new session), so a signal typed at the
    terminal reaches only the launcher, and what a worker started can be ended with it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exit] = {}
        self._sent: dict[int, signal.Signals] = {}
        self._pending: list[signal.Signals] = []
        self._killed = False
        self.ending = False
        """Whether the run ends because of a signal: nothing is started again after that."""
        self.started = False
        """Whether any worker was started, or is just being started."""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of this attempt's workers by rank, also of those that have ended."""
        return dict(self._pids)

    def add(self, pids: Mapping[int, int]) -> None:
        """Take over freshly started workers; those of an earlier attempt are forgotten.

        Signals that came while they were starting are sent to them now.

        Args:
            pids: Process ids by global rank.
        """
        with self._lock:
            self._pids = dict(pids)
            self._exits, self._sent = {}, {}
            pending, self._pending = self._pending, []
            if CAN_WATCH:
                for rank, pid in pids.items():
                    name = f"distkit-rank-{rank}"
                    threading.Thread(target=self._watch, args=(rank, pid), name=name, daemon=True).start()
            for number in pending:
                self.send(number)
            if self._killed:
                self.kill()

    def exits(self) -> dict[int, Exit]:
        """The workers that have ended, by rank."""
        with self._lock:
            return dict(self._exits)

    def all_ended(self) -> bool:
        """Whether no worker is left."""
        with self._lock:
            return len(self._exits) == len(self._pids)

    def wait(self, seconds: float) -> bool:
        """Wait for all to end; False when the time ran out."""
        deadline = time.monotonic() + seconds
        while not self.all_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def send(self, number: signal.Signals, *, later: bool = True) -> None:
        """Send a signal once to each worker that lives.

        Only the worker gets it, and not the processes that it started: these are the worker's to end.

        Args:
            number: The signal.
            later: Where none lives, send it to those that start next.
        """
        with self._lock:
            living = self._pids.keys() - self._exits.keys()
            if not living and later:
                self._pending.append(number)
            for rank in living:
                self._sent[rank] = number
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], number)

    def kill(self, *, for_good: bool = True) -> None:
        """End all workers and what they started, now.

        Args:
            for_good: Those too that are just starting.
        """
        with self._lock:
            self._killed = self._killed or for_good
            for rank, pid in self._pids.items():
                if rank not in self._exits:
                    self._sent[rank] = signal.SIGKILL
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def sweep(self) -> None:
        """End what ended workers left running in their process groups (loader workers of a rank that was killed)."""
        with self._lock:
            for rank in self._exits:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pids[rank], signal.SIGKILL)

    def _watch(self, rank: int, pid: int) -> None:
        """Note the moment of the end without reaping the process, which is for torchrun to do."""
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped by something else: nothing is known but that it ended
            found = None
        now = time.time()
        code = _LOST if found is None else found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with self._lock:
            if self._pids.get(rank) == pid:
                self._exits[rank] = Exit(code, now, self._sent.get(rank))


def end_with_parent() -> None:
    """In a program that we start, before it runs: SIGTERM when we die (prctl(2), PR_SET_PDEATHSIG), so that it ends its
    ranks."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
