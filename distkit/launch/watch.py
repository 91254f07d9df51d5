"""Which ranks are late: read from their heartbeat files, with what they are doing in Python now."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distkit.heartbeat import heartbeat_path
from distkit.launch.failure import ErrorRecord, Failure, log_path

__all__ = ["Beat", "HangWatch", "is_timeout", "late_beats", "late_failures", "python_stack"]

STACK_SIGNAL = signal.SIGUSR2
"""On it a rank writes the Python stacks of its threads into its log (faulthandler, see distkit.launch.worker)."""

_LOOK_EVERY_S = 5.0
_SLACK = 1.25
"""A collective's own time limit comes first; only what has none is noticed here."""

_STACK_WITHIN_S = 2.0
_GIVE_UP_WITHIN_S = 2.0
"""Ranks that wait for the same one reach their time limit within so many seconds."""
_OUR_FRAMES = ("<frozen runpy>", "distkit/launch/worker.py")
_HEARTBEAT = "distkit/heartbeat.py"
_MOST_LINES = 60
_LEGITIMATE = ("main_first", "closed")


@dataclass(frozen=True)
class Beat:
    """One rank's file.

    Args:
        rank: Its rank.
        host: Its host.
        pid: Its process id there.
        phase: What it does.
        step: Steps done.
        time: Since when, in seconds since the epoch.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    time: float

    @classmethod
    def read(cls, run_dir: Path, rank: int) -> Beat | None:
        """None where there is none that can be read."""
        try:
            found = json.loads(heartbeat_path(run_dir, rank).read_text(encoding="utf-8"))
            return cls(*(found[name] for name in ("rank", "host", "pid", "phase", "step", "time")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def words(self, now: float) -> str:
        """``late: at step 41, phase data, for 602 s``."""
        return f"late: at step {self.step}, phase {self.phase}, for {now - self.time:.0f} s"


def late_beats(beats: Iterable[Beat]) -> list[Beat]:
    """Those for which the others wait: behind in steps; or with as many steps, still at what the others have done.

    Returns:
        Empty where all are at the same place.
    """
    found = list(beats)
    if not found:
        return []
    least = min(beat.step for beat in found)
    behind = [beat for beat in found if beat.step == least]
    if len(behind) < len(found):
        return behind
    by_phase: dict[str, list[Beat]] = {}
    for beat in found:
        by_phase.setdefault(beat.phase, []).append(beat)
    if len(by_phase) == 1:
        return []
    # The same number of steps: the others wait in the phase that the late ones haven't reached.
    return min(by_phase.values(), key=lambda group: min(beat.time for beat in group))


def is_timeout(failure: Failure) -> bool:
    """Whether a rank gave up waiting for another."""
    record = failure.record
    return record is not None and re.search(r"[Tt]imed out|[Tt]imeout", record.message) is not None


def python_stack(run_dir: Path, rank: int, pid: int) -> tuple[str, ...]:
    """Have a rank of this host write its Python stacks, and read them from its log."""
    path = log_path(run_dir, rank)
    try:
        before = path.stat().st_size
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return ()
    deadline, text = time.monotonic() + _STACK_WITHIN_S, ""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(before)
            more = file.read().decode("utf-8", errors="replace")
            if more and more == text:  # it has stopped growing
                break
            text = more
    return tuple(_readable(text))


def _readable(text: str) -> list[str]:
    """The threads of a faulthandler's text, the main one first, without our own frames and Python's start."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([line])
        elif line.strip() and threads and not any(part in line for part in _OUR_FRAMES):
            threads[-1].append(line)
    users = [thread for thread in threads if len(thread) > 1 and not any(_HEARTBEAT in line for line in thread)]
    users.sort(key=lambda thread: not thread[0].startswith("Current"))
    return [line for thread in users for line in thread][:_MOST_LINES]


def late_failures(run_dir: Path, processes: int, pids: Mapping[int, int], *, after_timeout: bool) -> list[Failure]:
    """The late ranks as failures, those of this host with their stacks.

    Args:
        run_dir: The run's folder.
        processes: Number of ranks.
        pids: Living ranks of this host.
        after_timeout: Whether ranks gave up waiting; those that didn't are what they waited for.
    """
    beats = [beat for rank in range(processes) if (beat := Beat.read(run_dir, rank)) is not None]
    if after_timeout:
        time.sleep(_GIVE_UP_WITHIN_S)
        late = [beat for beat in beats if ErrorRecord.read(run_dir, beat.rank) is None]
    else:
        late = [beat for beat in late_beats(beats) if beat.phase not in _LEGITIMATE]
    now = time.time()
    found = []
    for beat in late:
        if beat.rank not in pids:
            continue
        stack = python_stack(run_dir, beat.rank, pids[beat.rank])
        log = str(log_path(run_dir, beat.rank))
        found.append(Failure(beat.rank, beat.host, 1, beat.time, log, tail=stack, late=beat.words(now)))
    return found


class HangWatch:
    """Notices that no rank has moved for longer than a collective may take.

    Collectives of torch fail by themselves after ``timeouts.step_s``; Horovod's over Gloo don't, and a script may wait
    for something else.

    Args:
        run_dir: The run's folder.
        processes: Number of ranks.
        step_s: Time limit of a collective, in seconds.
    """

    def __init__(self, run_dir: Path, processes: int, step_s: float) -> None:
        self._run_dir, self._processes, self._limit_s = run_dir, processes, step_s * _SLACK
        self._looked = time.monotonic()
        self._began = time.time()
        self._said = False

    def look(self) -> tuple[list[Beat], bool] | None:
        """Now and then.

        Returns:
            None while something moves, or when it was told already. Else the ranks' beats, and whether some are behind
            others, which wait for them.
        """
        if self._said or time.monotonic() - self._looked < min(_LOOK_EVERY_S, self._limit_s / 4):
            return None
        self._looked = time.monotonic()
        beats = [beat for rank in range(self._processes) if (beat := Beat.read(self._run_dir, rank)) is not None]
        beats = [beat for beat in beats if beat.time >= self._began]
        if len(beats) < self._processes or any(beat.phase in _LEGITIMATE for beat in beats):
            return None
        if time.time() - max(beat.time for beat in beats) < self._limit_s:
            return None
        self._said = True
        return beats, bool(late_beats(beats))
