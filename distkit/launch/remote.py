"""Runs on each host of a run that was started over ssh: starts its agent, and ends it when the launcher is gone.

``python -m distkit.launch.remote`` reads JSON, a line each, from its standard input: first an :class:`Order`, then signals
to pass on and signs of life. The order has the variables in it, so that no secret stands in a command line. On standard
error, between the lines of the processes, it answers with lines that begin with the launch's :func:`mark_of`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO, Any

from distkit.errors import DistkitError, LaunchError
from distkit.launch.marked import is_worker, marked, sweep
from distkit.launch.processes import end_with_parent
from distkit.launch.worker import LAUNCH_VARIABLE

__all__ = ["ALIVE_EVERY_S", "Order", "main", "mark_of", "tell"]

ALIVE_EVERY_S = 2.0
"""Between two signs of life, in both directions, in seconds."""

_END_NOW_S = 5.0


@dataclass(frozen=True)
class Order:
    """What a host is to run.

    Args:
        directory: The working directory.
        command: Program and arguments.
        environment: Variables that are added to the host's own.
        grace_s: Between asking the processes to end and killing them, in seconds.
        silence_s: The launcher is taken for lost when it was silent for so long, in seconds.
        agent: Whether the command is our agent, which passes signals on; else the ranks get them directly.
    """

    directory: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    grace_s: float
    silence_s: float
    agent: bool = True

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Read it back.

        Raises:
            LaunchError: It is none.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise LaunchError(
                f"distkit.launch.remote was told {text[:80]!r} on its standard input",
                hint="distkit-run --hosts H0,H1 SCRIPT.py   starts it on each host",
            ) from error


def mark_of(launch: str) -> str:
    """How lines for the launcher begin."""
    return f"@distkit {launch} "


def tell(launch: str, **words: Any) -> None:
    """A line for the launcher."""
    with contextlib.suppress(OSError):
        sys.stderr.write(mark_of(launch) + json.dumps(words) + "\n")
        sys.stderr.flush()


def main() -> int:
    """Run the order to its end.

    Returns:
        The command's exit status.
    """
    try:
        order = Order.from_json(sys.stdin.readline())
        return _Remote(order).run()
    except DistkitError as error:
        sys.stderr.write(f"distkit-run: {os.uname().nodename}: {error}\n")
        return 1


class _Remote:
    """One order, while it runs."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._launch = order.environment.get(LAUNCH_VARIABLE, "")
        self._heard = time.monotonic()
        self._asked: float | None = None
        self._grace_s = order.grace_s
        self._lost = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        self._start()
        assert self._child is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle)
        threading.Thread(target=self._listen, args=(sys.stdin,), daemon=True).start()
        spoke = 0.0
        while self._child.poll() is None:
            time.sleep(0.05)
            now = time.monotonic()
            if now - spoke > ALIVE_EVERY_S and not self._lost:
                spoke = now
                tell(self._launch, alive=True)
            if not self._lost and now - self._heard > self._order.silence_s:
                self._lose()
            if self._asked is not None and now > self._asked + self._grace_s:
                self._kill()
        sweep(self._launch)
        status = self._child.returncode
        status = 128 - status if status < 0 else status
        tell(self._launch, ended=status)
        return status

    def _start(self) -> None:
        order = self._order
        # Ray's processes hold SIGINT back, and what they start inherits that (ray 2.60.0, ray/_private/services.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))
        try:
            self._child = subprocess.Popen(
                list(order.command),
                cwd=order.directory,
                env={**os.environ, **order.environment},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise LaunchError(
                f"{order.command[0]!r} can't be started in {order.directory!r}: {error.strerror}",
                hint="the same folder and Python environment must be on every host",
            ) from error

    def _listen(self, source: IO[str]) -> None:
        """The launcher's lines; their end is that of the launcher or of the connection."""
        for line in source:
            self._heard = time.monotonic()
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if "signal" in message:
                    self._pass_on(int(message["signal"]))
                if message.get("end"):
                    self._grace_s = min(self._grace_s, _END_NOW_S)
                    self._end()
        self._lose()

    def _lose(self) -> None:
        """No launcher any more: the processes write a checkpoint if they can, and end."""
        self._lost = True
        self._end()

    def _end(self) -> None:
        if self._asked is None:
            self._asked = time.monotonic()
            self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        ranks = [] if self._order.agent else marked(self._launch, is_worker)
        for pid in ranks or [self._child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self) -> None:
        assert self._child is not None
        sweep(self._launch, seconds=0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._end()


if __name__ == "__main__":
    sys.exit(main())
