"""Callbacks: code of the user's that the Trainer calls at a few fixed moments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.config.nearest import nearest
from distkit.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from distkit.trainer import Trainer

__all__ = ["Callback", "EarlyStopping"]


class Callback:
    """Override what is needed; every hook does nothing by itself.

    Hooks are called on every rank, in the order in which the callbacks were given. What prints or writes belongs under
    ``if trainer.is_main``; what communicates must be called by all ranks. An exception in a hook ends the run.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Once: everything is prepared and resumed, and the first batch comes next."""

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        """Before the first batch of an epoch.

        Args:
            trainer: The trainer.
            epoch: Counted from 0.
        """

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """After an optimizer step. Reading a tensor here waits for the device in every step.

        Args:
            trainer: The trainer.
            step: Steps done, this one included.
        """

    def on_log(self, trainer: Trainer, values: dict[str, Any]) -> None:
        """At a log point, before it is written.

        Args:
            trainer: The trainer.
            values: As in ``metrics.jsonl``, the same on all ranks. What is added on rank 0 is logged too.
        """

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After an evaluation.

        Args:
            trainer: The trainer.
            metrics: Means over all samples of all ranks, the same on all ranks.
        """

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint was asked for; with ``checkpoint.background`` it may still be being written.

        Args:
            trainer: The trainer.
            path: Its folder.
        """

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After the last step of an epoch; not of one that the run's end cut short.

        Args:
            trainer: The trainer.
            epoch: Counted from 0.
        """

    def on_end(self, trainer: Trainer) -> None:
        """Once: the last checkpoint is written, and the logs are still open."""

    def state_dict(self) -> dict[str, Any]:
        """What goes into each checkpoint: numbers, texts, lists, dicts and tensors; the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; called when a run goes on, before ``on_start``.

        Args:
            state: As :meth:`state_dict` gave it.
        """


class EarlyStopping(Callback):
    """Ends training when an evaluated metric no longer gets better.

    The metric is a mean over all samples of all ranks and so the same everywhere: all ranks decide alike.

    Args:
        metric: Its name in what ``trainer.evaluate`` returns, such as ``loss``.
        patience: Evaluations without improvement to wait for before stopping.
        mode: Whether ``min`` or ``max`` is better.
        min_delta: What counts as an improvement; in the metric's own unit.

    Raises:
        ConfigError: A value that makes no sense.
    """

    def __init__(self, metric: str = "loss", *, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"EarlyStopping was given mode={mode!r}; valid: min, max", hint='mode="min"')
        if patience < 1:
            raise ConfigError(
                f"EarlyStopping was given patience={patience}, but its least value is 1", hint="patience=1"
            )
        if not min_delta >= 0:
            raise ConfigError(
                f"EarlyStopping was given min_delta={min_delta}, but it can't be below 0", hint="min_delta=0"
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        """The best value so far."""
        self.waited = 0
        """Evaluations since then."""

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """See :class:`Callback`.

        Raises:
            UsageError: The evaluation has no metric of that name.
        """
        if self.metric not in metrics:
            close = nearest(self.metric, metrics)
            raise UsageError(
                f"EarlyStopping watches {self.metric!r}, but the evaluation has: {', '.join(sorted(metrics)) or 'nothing'}",
                hint=f"EarlyStopping({close or 'loss'!r})",
            )
        value = metrics[self.metric]
        if self._is_better(value):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = "never was a number" if self.best is None else f"was best at {self.best:g}"
            evaluations = "evaluation" if self.waited == 1 else "evaluations"
            trainer.request_stop(f"{self.metric} {best}, {self.waited} {evaluations} ago, and is {value:g} now")

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Callback`."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Callback`."""
        self.best, self.waited = state["best"], state["waited"]

    def _is_better(self, value: float) -> bool:
        """NaN never is."""
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta
