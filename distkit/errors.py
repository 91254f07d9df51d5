"""Every error that distkit raises on purpose.

Each message says what was set, what was found and, in a last line that starts with ``Hint:``, what to type.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistkitError",
    "LaunchError",
    "OutOfStepError",
    "PlanError",
    "StrategyUnavailable",
    "UsageError",
]


class DistkitError(Exception):
    """Base of all errors of distkit.

    Args:
        message: What was set and what was found.
        hint: The line to type or the change to make; shown after ``Hint:``.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nHint: {hint}")


class ConfigError(DistkitError):
    """A setting is unknown, has a wrong type, or contradicts another setting."""


class UsageError(DistkitError):
    """A verb of the Trainer was called in a way that can't work."""


class StrategyUnavailable(DistkitError):
    """The strategy exists, but its engine is not installed or this machine can't run it."""


class LaunchError(DistkitError):
    """Processes can't be started, or ended in failure."""


class CheckpointError(DistkitError):
    """A checkpoint can't be written, is damaged, or doesn't fit the model."""


class DataError(DistkitError):
    """The data can't be sharded or its position can't be restored."""


class OutOfStepError(DistkitError):
    """Ranks called different verbs at the same moment, or hold different models."""


class PlanError(DistkitError):
    """What is to be planned makes no sense: a model, hardware or a batch that can't be."""
