"""The progress bar on a terminal, and what other code prints meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["StepBar", "terminal"]

_WIDTH = 20
_REDRAW_S = 0.2
"""Between log points the bar is redrawn so often at most."""


def terminal() -> TextIO | None:
    """The screen stream of standard output if it is a terminal that can redraw a line.

    Under distkit-run ``sys.stdout`` writes to the rank's log as well; its ``console`` is the bare screen, and only that
    must see control codes.
    """
    stream = cast(TextIO, getattr(sys.stdout, "console", sys.stdout))
    try:
        return stream if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" else None
    except ValueError:  # closed
        return None


class StepBar:
    """One line at the bottom of the terminal: step, share done, time left, latest values; cut off at the right.

    It is drawn by the training loop itself and not by a thread: forked loader workers and debuggers stay undisturbed.

    Args:
        screen: A terminal.
        total: Steps in all, where known.
        step: Steps done.
    """

    def __init__(self, screen: TextIO, total: int | None, step: int) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=screen, highlight=False)
        self._done, self._rest = "━─" if console.encoding.startswith("utf") else "=-"
        self._total, self._step, self._left, self._values = total, step, "", ""
        self._live = Live(
            console=console,
            get_renderable=self._line,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._redirections = _redirect(console)
        self._drawn_at = 0.0
        self._live.start()
        console.show_cursor(True)  # rich hides it, and a process that is killed never shows it again
        self._draw()

    def advance(self, step: int) -> None:
        """A step was done."""
        self._step = step
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw()

    def point(self, step: int, values: str, left: str) -> None:
        """A log point.

        Args:
            step: Steps done.
            values: Text behind the bar.
            left: The time that is left, as text.
        """
        self._step, self._values, self._left = step, values, left
        self._draw()

    def close(self) -> None:
        """Leave the bar as it is, and give the streams back."""
        for redirection in self._redirections:
            redirection.undo()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._live.refresh()

    def _line(self) -> Text:
        from rich.text import Text

        of_total = "" if self._total is None else f"/{self._total}"
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"step {self._step}{of_total}", "bold")
        if self._total:
            filled = min(_WIDTH, _WIDTH * self._step // self._total)
            line.append(" ").append(self._done * filled, "green").append(self._rest * (_WIDTH - filled), "dim")
        line.append("".join(f"  {part}" for part in (self._left, self._values) if part))
        return line


class _AboveBar:
    """A stream whose whole lines appear above the bar. Everything else is the terminal's own."""

    def __init__(self, console: Console, screen: TextIO) -> None:
        self._console = console
        self._screen = screen
        self._rest = ""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Take any piece of text; what follows the last line end waits for the rest of its line."""
        if os.getpid() != self._process:  # a forked loader worker: the bar and its locks aren't its own
            return self._screen.write(text)
        with self._lock:
            *whole, self._rest = (self._rest + text).split("\n")
            if whole:
                self._print(whole)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Write an unfinished line."""
        with self._lock:
            if self._rest and os.getpid() == self._process:
                self.write("\n")

    def _print(self, lines: list[str]) -> None:
        from rich.text import Text

        with self._console:
            for line in lines:  # from_ansi keeps what follows the last \r: of another progress bar its last state
                self._console.print(Text.from_ansi(line.rstrip("\r")), soft_wrap=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)


class _Redirection:
    """One place that held a screen stream and now holds an :class:`_AboveBar`."""

    def __init__(self, owner: Any, name: str, console: Console) -> None:
        self._owner, self._name = owner, name
        self._before = getattr(owner, name)
        self._stream = _AboveBar(console, self._before)
        setattr(owner, name, self._stream)

    def undo(self) -> None:
        """Put the stream back, unless someone has replaced it since."""
        self._stream.finish()
        if getattr(self._owner, self._name) is self._stream:
            setattr(self._owner, self._name, self._before)


def _redirect(console: Console) -> list[_Redirection]:
    """Standard output and error go above the bar, so far as they go to a terminal."""
    places = [
        (getattr(sys, name), "console") if hasattr(getattr(sys, name), "console") else (sys, name)
        for name in ("stdout", "stderr")
    ]
    return [_Redirection(owner, name, console) for owner, name in places if getattr(owner, name).isatty()]
