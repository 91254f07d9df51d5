"""The values of a log point: which names are the Trainer's own, and how others become plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distkit.errors import UsageError

__all__ = ["OWN_NAMES", "plain_values", "users_values"]

OWN_NAMES = (
    "time",
    "step",
    "epoch",
    "samples",
    "loss",
    "lr",
    "lrs",
    "grad_norm",
    "step_time_s",
    "samples_per_s",
    "skipped_steps",
    "non_finite",
)
"""Keys of ``metrics.jsonl`` whose meaning is fixed."""

_USERS_PREFIX = "user/"


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and lists of them as JSON knows them.

    Args:
        values: Also scalars of torch and numpy; reading one from a device waits for it.

    Raises:
        UsageError: A value is something else; names it.
    """
    return {str(name): _plain(str(name), value) for name, value in values.items()}


def users_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user logs: plain, and under ``user/`` where the name is the Trainer's own.

    So a script that logs a "loss" of its own neither loses it nor changes the reported loss.
    """
    plain = plain_values(values)
    return {f"{_USERS_PREFIX}{name}" if name in OWN_NAMES else name: value for name, value in plain.items()}


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)  # numpy's float64 is a float of its own class
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    if hasattr(value, "item"):
        try:
            return _plain(name, value.item())
        except (RuntimeError, ValueError) as error:
            shape = tuple(getattr(value, "shape", ()))
            raise UsageError(
                f"{name!r} was logged with the shape {shape}, but a log takes scalars",
                hint=f'trainer.log({{"{name}": value.mean()}})',
            ) from error
    raise UsageError(
        f"{name!r} was logged as a {type(value).__name__}, but a log takes numbers",
        hint=f'trainer.log({{"{name}": float(value)}})',
    )
