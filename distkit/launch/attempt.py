"""One attempt of a run that other programs start: the signals to it, the end of it, and the report."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from distkit.errors import LaunchError
from distkit.launch.failure import ErrorRecord, Failure, first_failure, log_path, record_path
from distkit.launch.report import failure_report

__all__ = ["Attempt", "catch_signals", "ended_by_signal"]

_SAME_KEYSTROKE_S = 0.3


def catch_signals(handle: Callable[[int], None]) -> None:
    """Take over the signals that mean something to a run; those that the parent told us to ignore stay ignored."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def ended_by_signal(failures: Sequence[Failure]) -> signal.Signals | None:
    """The signal on which all ranks that are known to have ended did so in order.

    Slurm sends its warnings to the ranks themselves, and no launcher hears of them.
    """
    codes = {failure.code for failure in failures}
    signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    return next((number for number in signals if codes == {128 + number}), None)


class Attempt(ABC):
    """From the start of the processes to their end.

    Args:
        run_dir: The run's folder.
        processes: Number of ranks.
        grace_s: Between asking ranks to end and killing them, in seconds.
    """

    def __init__(self, run_dir: Path, processes: int, grace_s: float) -> None:
        self._run_dir, self._processes, self._grace_s = run_dir, processes, grace_s
        self.id = uuid.uuid4().hex
        """The mark by which its processes are known on every host."""
        self._logs = run_dir / "logs"
        self._times: dict[signal.Signals, float] = {}
        self._signal: signal.Signals | None = None
        self._first: signal.Signals | None = None
        self._kill_asked = self._killed = False
        self._leave_asked: float | None = None

    def prepare(self) -> None:
        """Make the run's folder, and forget the errors of an earlier attempt.

        Raises:
            LaunchError: It can't be made.
        """
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            for rank in range(self._processes):
                record_path(self._run_dir, rank).unlink(missing_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the run's folder {str(self._run_dir)!r} can't be made: {error.strerror}", hint="--run-dir DIR"
            ) from error

    @abstractmethod
    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Until it ends. Its exit status.

        Args:
            meanwhile: Called many times a second.
        """

    @abstractmethod
    def failures(self) -> list[Failure]:
        """What is known of ranks that failed; one a rank."""

    def recorded(self) -> list[Failure]:
        """The failures of which the ranks themselves left a record in the run's folder."""
        found = []
        for rank in range(self._processes):
            record = ErrorRecord.read(self._run_dir, rank)
            if record is not None:
                log = str(log_path(self._run_dir, rank))
                found.append(Failure(rank, record.host, record.exit_code, record.time, log, record))
        return found

    @abstractmethod
    def sweep(self) -> None:
        """End everything that this attempt started and that still lives."""

    @abstractmethod
    def _send(self, number: signal.Signals) -> None:
        """A signal to the ranks."""

    def overdue(self) -> bool:
        """Whether the grace time after a signal is over."""
        asked = self._leave_asked if self._first is None else self._times[self._first]
        return asked is not None and time.monotonic() > asked + self._grace_s

    def conclude(self, status: int) -> int:
        """Say how the run ended; the exit status."""
        failures = self.failures()
        self._first = ended_by_signal(failures) or self._first  # it came first: a batch system asks us after the ranks
        asked = [failure for failure in failures if failure.exit_status != 128 + (self._first or 0)]
        if self._first is not None and (self._killed or not asked):
            return self._say_stopped()
        if status == 0 and not failures:
            return 0
        if not failures:
            code = 128 - status if status < 0 else status
            how = f"the launcher ended with exit status {code}"
            if self._signal is not None:
                code, how = 128 + self._signal, f"a rank was killed by {self._signal.name}"
            sys.stderr.write(
                f"distkit-run: {how}; what the launcher said is above, the ranks' logs are in {self._logs}\n"
            )
            return code
        return self.report(failures).exit_status

    def report(self, failures: Sequence[Failure], next_step: str = "") -> Failure:
        """Say what failed first, and what next; the first failure."""
        root = first_failure(failures)
        others = sorted((f for f in failures if f.rank != root.rank), key=lambda f: (f.likely_time, f.rank))
        sys.stderr.write(failure_report(root, others, processes=self._processes, next_step=next_step))
        sys.stderr.flush()
        return root

    def leave(self) -> None:
        """Ask the ranks to write a checkpoint and to end, without a signal from outside."""
        self._leave_asked = self._leave_asked or time.monotonic()
        self._send(signal.SIGUSR1)

    def handle(self, number: int) -> None:
        """A signal came: forward it once, begin the grace time; the second Ctrl-C ends all now."""
        asked = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        now = time.monotonic()
        before = self._times.get(asked)
        if before is not None and now - before <= _SAME_KEYSTROKE_S:
            return
        if before is None:
            self._times[asked] = now
            if asked != signal.SIGUSR1:
                self._first = self._first or asked
            self._send(asked)
        elif asked == signal.SIGINT:
            self._kill_asked = True

    def _say_stopped(self) -> int:
        assert self._first is not None
        how = "Ctrl-C (SIGINT)" if self._first == signal.SIGINT else self._first.name
        killed = "; the processes were killed" if self._killed else ""
        sys.stderr.write(f"distkit-run: stopped by {how}{killed}\n")
        return 128 + self._first
