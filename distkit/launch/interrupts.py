"""Signals to the launcher: forwarded once to each worker, and an end for those that don't follow."""

from __future__ import annotations

import signal
import time
from types import FrameType

from distkit.launch.processes import Workers

__all__ = ["Interrupts"]

_SAME_KEYSTROKE_S = 0.3
"""A wrapper often forwards the Ctrl-C that the terminal has already delivered; that is no second one."""


class Interrupts:
    """The launcher's signal handlers; they run in its main thread while another one looks after the workers.

    SIGINT (Ctrl-C) and SIGTERM are forwarded and start the grace time; a second SIGINT kills at once. SIGHUP, a lost
    terminal, counts as SIGTERM. SIGUSR1, a batch system's warning, is forwarded; when a worker ends on it, the grace time
    of the others starts.

    Args:
        workers: Who gets the signals.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._times: dict[int, float] = {}
        self.grace_s = 30.0
        self.first: signal.Signals | None = None
        """The signal that ended the run, if one did."""
        self.killed = False
        """Whether the workers were killed, by a second Ctrl-C or at the end of the grace time."""

    def install(self) -> None:
        """Take over the signals; those that the parent told us to ignore (nohup, ``&`` in a script) stay ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        # An inherited "ignore" would have the kernel reap the workers, and their exit statuses would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def enforce(self) -> None:
        """Kill the workers once the grace time is over; to be called now and then, and after the last one ended."""
        now = time.monotonic()
        if self.first is None and self._workers.ending:
            self.first = signal.SIGUSR1
            self._times[self.first] = now
        if self.first is not None and not self.killed and now > self._times[self.first] + self.grace_s:
            self._kill()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        asked = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        now = time.monotonic()
        first = self._times.get(asked)
        if first is not None and now - first <= _SAME_KEYSTROKE_S:
            return
        if asked == signal.SIGUSR1:
            self._times[asked] = now
            self._workers.send(asked)
        elif first is None:
            self._times[asked] = now
            self.first = self.first or asked
            self._workers.ending = True
            self._workers.send(asked)
        elif asked == signal.SIGINT:
            self._kill()

    def _kill(self) -> None:
        self.killed = True
        self._workers.kill()
