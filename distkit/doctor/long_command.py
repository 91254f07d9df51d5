"""A command that takes minutes: its output in a log file, a line that shows it is alive, and what made it fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["FailingLine", "failing_line", "run_logged"]

_PLAIN_EVERY_S = 30.0
"""Where there is no terminal, a progress line is printed so often."""

_PERCENT = re.compile(r"^\[\s*(\d+)%\]\s*(.*)")

_CAUSES = (
    re.compile(r"fatal error: Killed|Killed signal terminated program"),
    re.compile(
        r"(?<![\w-])(?:fatal )?error: (?!subprocess-exited-with-error|metadata-generation-failed|command )", re.I
    ),
    re.compile(r"CMake Error"),
    re.compile(r"undefined reference to|cannot find -l"),
    re.compile(r"^\s*(?:\w+\.)*\w*Error: "),
    re.compile(r"No matching distribution found|Could not find a version"),
)
"""What the first cause looks like, most telling first: compiler, CMake, linker, Python, pip."""


@dataclass(frozen=True)
class FailingLine:
    """The line of a log that says why a command failed.

    Args:
        number: Counted from 1.
        text: The line.
    """

    number: int
    text: str


def failing_line(log: Path) -> FailingLine | None:
    """The first line of a build log that is a cause and no consequence; the last line with words if none looks like one.

    CMake says in one line where it failed and in the next why; both are given.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for cause in _CAUSES:
        for index, line in enumerate(lines):
            if cause.search(line):
                more = next((text.strip() for text in lines[index + 1 : index + 4] if text.strip()), "")
                text = line.strip() + (f" {more}" if line.lstrip().startswith("CMake Error") and more else "")
                return FailingLine(index + 1, text)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].strip():
            return FailingLine(index + 1, lines[index].strip())
    return None


def run_logged(
    what: str,
    command: Sequence[str],
    *,
    log: Path,
    environ: Mapping[str, str] | None = None,
    screen: IO[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run a command with its output appended to a log.

    On a terminal one line is rewritten, with the time so far and the last line of output; elsewhere a line is printed
    now and then.

    Args:
        what: A few words for the progress line.
        command: The program and its arguments; no shell reads them.
        log: The file; the command itself is noted there first.
        environ: Variables; None is this process's.
        screen: Where progress goes; None is stderr.
        clock: Seconds.

    Returns:
        The exit status.
    """
    progress = _Progress(what, screen or sys.stderr, clock)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            list(command),
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        with progress:
            try:
                for line in process.stdout:
                    file.write(line)
                    progress.note(line)
                status = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
    progress.end(status)
    return status


class _Progress:
    """The line that shows a command is alive; a thread draws it, since the command may be silent for long."""

    def __init__(self, what: str, screen: IO[str], clock: Callable[[], float]) -> None:
        self._what, self._screen, self._clock = what, screen, clock
        self._begin = clock()
        self._last, self._percent = "", ""
        self._terminal = screen.isatty()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._draw_on, name="distkit-progress", daemon=True)

    def __enter__(self) -> _Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def note(self, line: str) -> None:
        """The command wrote a line."""
        text = line.strip()
        if not text:
            return
        found = _PERCENT.match(text)
        if found is not None:
            self._percent, text = f"{found.group(1)} %  ", found.group(2)
        elif self._percent:  # compilers' own long command lines and warnings
            return
        self._last = text

    def end(self, status: int) -> None:
        """The final line."""
        result = "done" if status == 0 else f"failed (exit status {status})"
        begin = "\r\x1b[K" if self._terminal else ""
        self._screen.write(f"{begin}{self._what}: {result} after {self._elapsed()}\n")
        self._screen.flush()

    def _draw_on(self) -> None:
        pause = 0.5 if self._terminal else _PLAIN_EVERY_S
        while not self._done.wait(pause):
            text = f"{self._what}  {self._elapsed()}  {self._percent}{self._last}"
            if self._terminal:
                width = os.get_terminal_size(self._screen.fileno()).columns or 80
                self._screen.write(f"\r\x1b[K{text[: max(20, width - 1)]}")
            else:
                self._screen.write(text[:160] + "\n")
            self._screen.flush()

    def _elapsed(self) -> str:
        seconds = int(self._clock() - self._begin)
        return f"{seconds // 60}:{seconds % 60:02d}"
