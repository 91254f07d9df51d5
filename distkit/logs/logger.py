"""RunLog: the one object to which the Trainer tells what happens."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.config.naming import run_name
from distkit.errors import ConfigError
from distkit.logs.console import Console
from distkit.logs.jsonl import MetricsFile
from distkit.logs.trackers import TRACKERS, Tracker, check_trackers, hyper_parameters
from distkit.logs.values import plain_values, users_values
from distkit.masking import mask_values

if TYPE_CHECKING:
    from distkit.config import Config

__all__ = ["RunLog"]


class RunLog:
    """Screen, metrics.jsonl and trackers of a run. On ranks other than 0 every method does nothing.

    Args:
        config: ``log`` is used, and the whole as hyper-parameters.
        run_dir: The run's folder.
        is_main: Whether this is rank 0.

    Raises:
        ConfigError: ``log.to`` names a tracker whose package is not installed; on every rank.
    """

    def __init__(self, config: Config, run_dir: Path, *, is_main: bool) -> None:
        check_trackers(config.log.to)
        self._config = config
        self._run_dir = run_dir
        self._is_main = is_main
        self._console = Console(points="console" in config.log.to)
        self._metrics = MetricsFile(run_dir / "metrics.jsonl")
        self._trackers: list[Tracker] = []
        self._failing: set[str] = set()
        self._process = os.getpid()
        if is_main:
            atexit.register(self.close)  # a script that ends by an exception must leave the terminal in order

    def start(self, total_steps: int | None, step: int = 0) -> None:
        """Training begins or goes on.

        Args:
            total_steps: Optimizer steps in all, where known.
            step: Steps done; lines of metrics.jsonl after it are moved to metrics.lost.jsonl.

        Raises:
            ConfigError: The file can't be written, or a tracker can't be started.
        """
        if not self._is_main:
            return
        self.rewind(step)
        settings = hyper_parameters(mask_values(_flat(self._config)))
        project = run_name(self._config.name, "distkit")
        for name in self._config.log.to:
            if name in TRACKERS:
                self._trackers.append(Tracker(name, self._run_dir, project=project, parameters=settings, step=step))
        self._console.start(total_steps, step)

    def rewind(self, step: int) -> None:
        """The run goes on from an earlier step: what was logged after it is moved to metrics.lost.jsonl.

        Args:
            step: The last step that counts.

        Raises:
            ConfigError: The file can't be read or written.
        """
        if not self._is_main:
            return
        try:
            lost = self._metrics.truncate_after(step)
        except OSError as error:
            raise ConfigError(
                f"{self._metrics.path} can't be written: {error.strerror or error}", hint="--set run_dir=DIR"
            ) from error
        if lost:
            lines = "1 line" if lost == 1 else f"{lost} lines"
            self.say(f"metrics.jsonl: {lines} after step {step} moved to metrics.lost.jsonl")

    def say(self, text: str) -> None:
        """Print lines on rank 0, above the bar if there is one. Whatever ``log.to`` says."""
        if self._is_main:
            self._console.say(text)

    def advance(self, step: int) -> None:
        """A step was done; moves the bar and costs next to nothing.

        Args:
            step: Steps done.
        """
        if self._is_main:
            self._console.advance(step)

    def point(self, step: int, values: Mapping[str, Any]) -> None:
        """A log point.

        Args:
            step: Steps done.
            values: Under the names of metrics.jsonl: epoch, samples, loss, lr (``lrs`` besides when parameter groups
                differ), grad_norm, step_time_s, samples_per_s, skipped_steps, and the user's own.

        Raises:
            UsageError: A value is no number.
        """
        if not self._is_main:
            return
        plain = plain_values(values)
        self._record(step, plain)
        self._console.point(step, plain)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Values of the user's own.

        A name that metrics.jsonl uses itself, such as ``loss``, is put under ``user/``.

        Args:
            values: Numbers by name.
            step: Steps done.

        Raises:
            UsageError: A value is no number.
        """
        if not self._is_main:
            return
        plain = users_values(values)
        self._record(step, plain)
        self._console.log(step, plain)

    def close(self) -> None:
        """End bar, file and trackers; more than once is fine."""
        if not self._is_main or os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self._console.close()
        self._metrics.close()
        for tracker in self._trackers:
            self._attempt(tracker.name, tracker.close)
        self._trackers.clear()

    def _record(self, step: int, values: dict[str, Any]) -> None:
        self._attempt("metrics.jsonl", lambda: self._metrics.write(step, values, time=time.time()))
        for tracker in self._trackers:
            self._attempt(tracker.name, lambda tracker=tracker: tracker.log(step, values))  # type: ignore[misc]

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """A full disk or a server that is down is said once; it doesn't end a run of days."""
        try:
            action()
        except Exception as error:
            if what not in self._failing:
                self.say(f"{what} can't be written: {type(error).__name__}: {error}; training goes on")
            self._failing.add(what)
        else:
            self._failing.discard(what)


def _flat(config: Config) -> dict[str, Any]:
    from distkit.config.load import LoadedConfig

    return LoadedConfig(config).flat()
