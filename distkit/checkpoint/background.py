"""A save that is written in a thread while training goes on: at most one at a time, and its failure is never lost."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """The save that is under way.

    Args:
        linger_s: If the process ends without :meth:`wait`, for instance by an exception, it lingers so long for a save
            that is under way.
    """

    def __init__(self, linger_s: float) -> None:
        self.linger_s = linger_s
        self.step: int | None = None
        """Step of the save that is under way or failed; None if there is none."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, step: int, work: Callable[[], Path]) -> None:
        """Run ``work`` in the background; the one before has been waited for."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # reported by the thread that trains
                self._failure = error

        # A daemon, since a write that hangs must not keep a failed process alive; atexit gives it its time.
        self._thread = threading.Thread(target=run, name=f"distkit-save-{step}", daemon=True)
        self.step = step
        atexit.register(self._linger)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is still being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it is over and failed, and nobody was told yet."""
        return self._failure is not None and not self.running

    def wait(self, timeout_s: float | None = None) -> Exception | None:
        """Wait for the save that is under way, if there is one.

        Args:
            timeout_s: How long at most; None is until it ends.

        Returns:
            Why it failed, once; None if it is on the disk, or is still being written.
        """
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        atexit.unregister(self._linger)
        failure, self._failure = self._failure, None
        self._thread = self.step = None
        return failure

    def _linger(self) -> None:
        if self._thread is not None:
            self._thread.join(self.linger_s)
