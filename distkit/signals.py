"""Signals become requests that the Trainer answers at the next step boundary, agreed by all ranks.

SIGINT (Ctrl-C), SIGTERM and SIGUSR1 ask for a checkpoint and an orderly end; a second SIGINT ends the process at once.
Handlers that were there before are called too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

__all__ = ["EXIT_STATUS", "SignalWatch"]

WATCHED = ("SIGTERM", "SIGUSR1", "SIGINT")
DEBOUNCE_S = 0.5
"""A terminal and a launcher may both deliver one Ctrl-C."""

EXIT_STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}
"""Exit status of a run that was ended by a signal, after its checkpoint: 128 + the signal's number."""


class SignalWatch:
    """Notes the first signal that asks for the end; only in the main thread can it be installed."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that asked for the end."""
        self._last = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the handlers; does nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in WATCHED:
            number = getattr(signal, name, None)
            if number is not None and number not in self._before:
                self._before[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give the handlers back."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if name == "SIGINT" and self.received == "SIGINT" and now - self._last > DEBOUNCE_S:
            os._exit(EXIT_STATUS["SIGINT"])
        self._last = now
        self.received = self.received or name
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
