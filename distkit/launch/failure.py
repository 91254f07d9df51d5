"""What is known of a worker that failed: its own record on disk, and which failure came first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "ErrorRecord",
    "Failure",
    "first_failure",
    "last_lines",
    "log_path",
    "record_path",
    "remove_record",
    "signal_name",
]

_NEVER_A_CONSEQUENCE = {
    -int(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
}
"""Exit codes of deaths that a lost connection to another rank doesn't cause (an abort may be one)."""

_NOTICE_S = 1.0
"""A death is noticed this much later at most; an exception writes the time of the failure itself."""


def log_path(run_dir: Path, rank: int) -> Path:
    """The log file of a rank."""
    return run_dir / "logs" / f"rank-{rank:03d}.log"


def record_path(run_dir: Path, rank: int) -> Path:
    """The file in which a failing rank leaves its error."""
    return run_dir / "logs" / f"error-rank-{rank:03d}.json"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class ErrorRecord:
    """The error of a rank, written by the rank itself.

    Args:
        rank: Its rank.
        host: Its host.
        pid: Its process id.
        time: When the exception reached the top, in seconds since the epoch.
        type: Name of the exception's class.
        message: The exception's text.
        traceback: What Python would have printed, without distkit's own frames; empty for SystemExit.
        exit_code: The exit status that follows.
    """

    rank: int
    host: str
    pid: int
    time: float
    type: str
    message: str
    traceback: str
    exit_code: int

    def write(self, run_dir: Path) -> None:
        """Write the file in one step, so that no one reads half of it."""
        path = record_path(run_dir, self.rank)
        unfinished = path.with_suffix(f".{self.pid}")
        unfinished.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def read(cls, run_dir: Path, rank: int) -> ErrorRecord | None:
        """The record of a rank, or None when it left none that can be read."""
        try:
            return cls(**json.loads(record_path(run_dir, rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Failure:
    """The end of a worker that failed.

    Args:
        rank: Its rank.
        host: Its host.
        code: Exit status; negative is the number of the signal that killed it.
        time: When, in seconds since the epoch.
        log: Path of its log file.
        record: Its own record, if it left one.
        tail: The last lines of its log, where the log may be out of reach for who reports.
        lost: What was noticed, if the host itself was lost with all its ranks, of which this is the first.
        late: Where it stood, if it didn't fail but others waited for it in vain.
    """

    rank: int
    host: str
    code: int
    time: float
    log: str
    record: ErrorRecord | None = None
    tail: tuple[str, ...] = ()
    lost: str = ""
    late: str = ""

    @property
    def exit_status(self) -> int:
        """What the launcher's exit status becomes: the rank's own, or 128 + signal as in a shell."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def description(self) -> str:
        """How it ended, in a few words."""
        if self.lost or self.late:
            return self.lost or self.late
        if self.code < 0:
            return f"killed by {signal_name(-self.code)}"
        return f"exit status {self.code}"

    @property
    def likely_time(self) -> float:
        """When the trouble began: a record knows it, a sudden death was noticed a little late."""
        if self.record is not None:
            return self.record.time
        return self.time - _NOTICE_S if self.code in _NEVER_A_CONSEQUENCE or self.code > 0 else self.time

    def to_json(self) -> str:
        """For the agents of other hosts."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Read it back."""
        fields = json.loads(text)
        record, tail = fields.pop("record"), tuple(fields.pop("tail", ()))
        return cls(**fields, tail=tail, record=None if record is None else ErrorRecord(**record))


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The root cause: when one rank dies, the others lose their connection to it and fail a moment later.

    The loss of a host is noticed late, and is never a consequence; nor is being late.
    """
    return min(failures, key=lambda failure: (not (failure.lost or failure.late), failure.likely_time, failure.rank))


def remove_record(run_dir: Path, rank: int) -> None:
    """Forget the error of an earlier attempt."""
    record_path(run_dir, rank).unlink(missing_ok=True)


def last_lines(path: str | os.PathLike[str], count: int = 20, limit: int = 16384) -> list[str]:
    """The last lines of a log, without reading all of it.

    Args:
        path: The file.
        count: Number of lines.
        limit: Read so many bytes from the end at most.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
