"""Where the output of a rank goes: into its log file, and for some ranks to the screen too."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from distkit.launch.failure import log_path

__all__ = ["LineWriter", "LogStream", "RankOutput", "Tee", "redirect"]

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")


class LogStream(io.TextIOWrapper):
    """A log that never raises: where it can't be written (a full disk) text is missing, but training goes on.

    Args:
        file: A path, which is appended to, or a file descriptor, which stays open.
    """

    def __init__(self, file: Path | int) -> None:
        raw = open(file, "ab", buffering=0, closefd=isinstance(file, Path))  # noqa: SIM115 - closed with the stream
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._missing = False

    def write(self, text: str) -> int:
        """Write it, if that is possible."""
        try:
            super().write("\n(text is missing here: the log couldn't be written)\n" + text if self._missing else text)
            self._missing = False
        except OSError:
            self._missing = True
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        """Write each."""
        for line in lines:
            self.write(line)


class LineWriter:
    """Passes text on in whole lines, so that the lines of several ranks don't mix.

    Args:
        sink: Gets one or several whole lines.
        prefix: Put before each line.
        plain: Leave out what only a terminal understands: colours, and all but the last state of a progress bar that
            redraws its line.
        redraws: Pass a line on each time that a progress bar goes back to its beginning, too.
    """

    def __init__(
        self, sink: Callable[[str], Any], *, prefix: str = "", plain: bool = False, redraws: bool = False
    ) -> None:
        self._sink = sink
        self._prefix = prefix
        self._plain = plain
        self._redraws = redraws
        self._rest = ""
        self._new_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._new_lock)

    def _new_lock(self) -> None:
        """A forked child must not inherit a lock that another thread held."""
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        """Take any piece of text; what follows the last line end waits for the rest of its line."""
        with self._lock:
            *whole, self._rest = (self._rest + text).split("\n")
            drawn = ""
            if self._redraws and "\r" in self._rest:
                drawn, back, self._rest = self._rest.rpartition("\r")
                drawn += back
            if whole or drawn:
                self._sink("".join(f"{self._prefix}{self._clean(line)}\n" for line in whole) + drawn)

    def close(self) -> None:
        """Pass on an unfinished line."""
        with self._lock:
            if self._rest:
                self.write("\n")

    def _clean(self, line: str) -> str:
        if not self._plain:
            return line
        return _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])


class Tee:
    """A text stream to the screen that is also written to the log. Everything else is the screen stream's own.

    Args:
        console: The bare screen stream; a progress display writes to it, because a log has no use for its frames.
        log: Gets the text as well.
        screen: Gets the text in place of ``console``; None writes to ``console`` as it comes.
    """

    def __init__(self, console: TextIO, log: LineWriter, screen: LineWriter | None = None) -> None:
        self.console = console
        self._log = log
        self._screen = screen

    def write(self, text: str) -> int:
        """Write to both."""
        (self._screen or self.console).write(text)
        self._log.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)


class RankOutput:
    """The redirected output of this process. Make it with :func:`redirect`.

    Args:
        file: The open log file.
        screen: The launcher's standard error, for what the log can't take.
        writers: Whose unfinished lines are written at the end.
    """

    def __init__(self, file: LogStream, screen: TextIO, writers: Sequence[LineWriter] = ()) -> None:
        self.file = file
        self.screen = screen
        self._writers = writers

    def log(self, text: str) -> None:
        """Write whole lines to the log alone."""
        self.close()
        self.file.write(text)

    def close(self) -> None:
        """Write what is still waiting for the end of its line."""
        for writer in self._writers:
            writer.close()


def redirect(run_dir: Path, rank: int, *, show: bool, header: str) -> RankOutput:
    """Send this process's output to its log file.

    Rank 0 goes on writing to the screen. For the others file descriptors 1 and 2 lead to the log, so that what C++
    libraries and subprocesses print is there as well.

    Args:
        run_dir: The run's folder.
        rank: This process's rank.
        show: Whether a rank other than 0 shows its lines on the screen too.
        header: First line of this attempt in the log.
    """
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = LogStream(path)
    log.write(f"---- {header} ----\n")
    if rank == 0:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # a reader behind a pipe sees each line when it is written
        screen = sys.stderr
        return RankOutput(log, screen, _tee(sys.stdout, sys.stderr, log.write, whole_lines=show))
    out, err = (os.fdopen(os.dup(fd), "w", encoding="utf-8", errors="replace", buffering=1) for fd in (1, 2))
    for fd in (1, 2):
        os.dup2(log.fileno(), fd)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # the keyboard is rank 0's
    if show:
        return RankOutput(log, err, _tee(out, err, log.write, whole_lines=True, prefix=f"[rank {rank}] "))
    out.close()
    sys.stdout, sys.stderr = LogStream(1), LogStream(2)
    return RankOutput(log, err)


def _tee(
    out: TextIO, err: TextIO, log: Callable[[str], Any], *, whole_lines: bool, prefix: str = ""
) -> list[LineWriter]:
    """Lines stay whole where several ranks write to one screen; a rank alone writes as its text comes."""
    writers = []
    for name, console in (("stdout", out), ("stderr", err)):
        to_log = LineWriter(log, plain=True)
        to_screen = LineWriter(console.write, prefix=prefix, redraws=not prefix) if whole_lines else None
        writers += [to_log, *([to_screen] if to_screen else [])]
        setattr(sys, name, Tee(console, to_log, to_screen))
    return writers
