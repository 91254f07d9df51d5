"""Counters and schedulers among the other keys of a saved dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distkit.checkpoint.foreign.origin import Origin, Pieces, as_int

__all__ = ["LIGHTNING_VERSION", "lightning_leftovers", "pick_counters", "plain", "take_schedulers"]

STEP_KEYS = ("global_step", "global_steps", "step", "steps", "iteration", "iter")
EPOCH_KEYS = ("epoch", "current_epoch")
SCHEDULER_KEYS = ("lr_schedulers", "lr_scheduler", "schedulers", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict")  # fmt: skip
SCALER_KEYS = ("scaler", "grad_scaler", "scaler_state_dict")

LIGHTNING_VERSION = "pytorch-lightning_version"
LIGHTNING_KEYS = {
    LIGHTNING_VERSION: None,
    "loops": "the loops' progress",
    "callbacks": "callbacks",
    "hyper_parameters": "hyper_parameters",
    "hparams_name": None,
    "datamodule_hyper_parameters": "datamodule_hyper_parameters",
}
"""What is left of Lightning's keys, in words; None is not worth a word."""


def lightning_leftovers(data: dict[str, Any]) -> list[str]:
    """Take what Lightning writes for itself out of the dict; what of it is worth a word."""
    found = [words for key, words in LIGHTNING_KEYS.items() if words and data.get(key)]
    for key in LIGHTNING_KEYS:
        data.pop(key, None)
    return found


def take_schedulers(rest: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of schedulers, taken out of the dict."""
    for key in SCHEDULER_KEYS:
        value = rest.get(key)
        states = value if isinstance(value, list) else [value]
        if states and all(isinstance(state, dict) and state for state in states):
            del rest[key]
            return [plain(state) for state in states]
        if key in rest and not value:
            del rest[key]
    return []


def pick_counters(origin: Origin, rest: Mapping[str, Any]) -> None:
    """Enter step, epoch and loss scale; what remains is named among what was left."""
    rest = dict(rest)
    origin.step = _take(rest, STEP_KEYS, origin.step)
    origin.epoch = _take(rest, EPOCH_KEYS, origin.epoch)
    for key in SCALER_KEYS:
        if isinstance(rest.get(key), dict):
            state = plain(rest.pop(key))
            origin.scaler = state if "scale" in state else None
    origin.left += [f"{key!r}" for key, value in rest.items() if value is not None and value != {} and value != []]


def plain(value: Any) -> Any:
    """The same with whole tensors in the place of :class:`Pieces`."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Pieces):
        return value.whole().clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _take(rest: dict[str, Any], keys: tuple[str, ...], known: int | None) -> int | None:
    for key in keys:
        number = as_int(rest.get(key))
        if number is not None:
            del rest[key]
            known = number if known is None else known
    return known
