"""The far end on a node of a Ray cluster: an actor that runs :mod:`distkit.launch.remote` there and carries its lines."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading
from typing import IO

__all__ = ["NodeEnd"]

_QUIET_S = 1.0
"""An answer without lines comes after so long, so that a call never hangs for good."""
_ROOM = 10000
"""Lines that wait for the driver; what prints more waits, too."""


class NodeEnd:
    """A process on this node and the lines from and to it; its methods are called by the driver, several at a time.

    When the driver is gone, Ray ends the actor; the process's standard input ends with it, and so do the processes that
    it looks after.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[bool, str] | None] = queue.Queue(_ROOM)
        self._process: subprocess.Popen[str] | None = None
        self._open = 2

    def free_port(self) -> int:
        """A port of this node at which nobody listens now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def start(self) -> str:
        """Start the process. The interpreter of this node."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distkit.launch.remote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for source, is_error in ((self._process.stdout, False), (self._process.stderr, True)):
            threading.Thread(target=self._collect, args=(source, is_error), daemon=True).start()
        return sys.executable

    def write(self, line: str) -> None:
        """A line for it."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close(self) -> None:
        """No more lines for it."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def read(self) -> tuple[list[tuple[bool, str]], int | None]:
        """What it has printed since the last call.

        Returns:
            Lines, each with whether it is of standard error; and the exit status, once there are no more.
        """
        assert self._process is not None
        found: list[tuple[bool, str]] = []
        with contextlib.suppress(queue.Empty):
            while self._open and len(found) < _ROOM:
                line = self._lines.get(timeout=0 if found else _QUIET_S)
                if line is None:
                    self._open -= 1
                else:
                    found.append(line)
        return found, None if self._open else self._process.wait()

    def _collect(self, source: IO[str], is_error: bool) -> None:
        for line in source:
            self._lines.put((is_error, line))
        self._lines.put(None)
