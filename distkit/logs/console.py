"""What rank 0 says on the screen: lines, and at log points a bar on a terminal or one line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distkit.logs.bar import StepBar, terminal

__all__ = ["Console", "duration", "format_values"]

_LABELS = {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm", "samples_per_s": "samples/s"}
_NOT_SHOWN = {"epoch", "samples", "lrs", "step_time_s", "skipped_steps"}


class Console:
    """The screen of rank 0.

    Args:
        points: Whether log points are shown (``log.to`` has ``console``); what is said is shown in any case.
    """

    def __init__(self, *, points: bool) -> None:
        self._points = points
        self._bar: StepBar | None = None
        self._total: int | None = None
        self._from_step, self._from_time = 0, time.monotonic()

    def start(self, total: int | None, step: int) -> None:
        """Training begins.

        Args:
            total: Steps in all, where known.
            step: Steps done.
        """
        self._total, self._from_step, self._from_time = total, step, time.monotonic()
        screen = terminal() if self._points else None
        if screen is not None and self._bar is None:
            self._bar = StepBar(screen, total, step)

    def say(self, text: str) -> None:
        """One or several lines; above the bar, if there is one."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def advance(self, step: int) -> None:
        """A step was done."""
        if self._bar is not None:
            self._bar.advance(step)

    def point(self, step: int, values: Mapping[str, Any]) -> None:
        """A log point."""
        if not self._points:
            return
        left = self._left(step)
        if self._bar is not None:
            self._bar.point(step, "  ".join(format_values(values)), "" if left is None else f"{duration(left)} left")
            return
        of_total = "" if self._total is None else f"/{self._total}"
        words = [f"step {step}{of_total}", f"epoch {values['epoch']}" if "epoch" in values else ""]
        words += [*format_values(values), "" if left is None else f"eta {duration(left)}"]
        self.say("  ".join(filter(None, words)))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Values that the user logs."""
        if self._points:
            self.say("  ".join([f"step {step}", *(_labelled(name, value) for name, value in values.items())]))

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _left(self, step: int) -> float | None:
        """Seconds that are left if all goes on as since the start, evaluations and checkpoints included."""
        if self._total is None or step <= self._from_step:
            return None
        return (time.monotonic() - self._from_time) / (step - self._from_step) * max(0, self._total - step)


def format_values(values: Mapping[str, Any]) -> Iterator[str]:
    """The values of a log point as words: the known ones first, then the user's."""
    for name, label in _LABELS.items():
        if name in values:
            yield _labelled(label, values[name])
    if values.get("skipped_steps"):
        yield _labelled("skipped", values["skipped_steps"])
    for name, value in values.items():
        if name not in _LABELS and name not in _NOT_SHOWN:
            yield _labelled(name, value)


def duration(seconds: float) -> str:
    """``8s``, ``3m12s``, ``2h05m``, ``3d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 24 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _labelled(label: str, value: Any) -> str:
    if isinstance(value, float):
        digits = {"loss": ".5f", "samples/s": ".1f" if value < 100 else ".0f", "lr": ".4g", "grad_norm": ".4g"}
        return f"{label} {value:{digits.get(label, '.6g')}}"
    return f"{label} {value}"
