"""What ``optimizer.state_dict()`` and torch.distributed.checkpoint's forms of it hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from distkit.checkpoint.foreign.origin import OriginOptimizer, Pieces, Slot
from distkit.errors import CheckpointError

__all__ = ["is_optimizer", "plain_optimizer", "split_state"]


def is_optimizer(value: Any) -> bool:
    """Whether this looks like an optimizer's state dict, nested or flattened."""
    if not isinstance(value, Mapping):
        return False
    return "param_groups" in value or any(str(key).startswith("param_groups.") for key in value)


def plain_optimizer(state: Mapping[Any, Any], what: str) -> OriginOptimizer:
    """An optimizer's state dict; its parameters may be numbered or named.

    Args:
        state: ``{"state": {key: {field: value}}, "param_groups": [{"params": [keys], ...}]}``, or the flattened form
            ``{"state.NAME.FIELD": value, "param_groups.NAME.KEY": value}``. Tensors may be :class:`Pieces`.
        what: How messages call it.

    Raises:
        CheckpointError: It is garbled.
    """
    if "param_groups" not in state:
        return _flattened(state, what)
    states, groups = state.get("state", {}), state["param_groups"]
    if isinstance(groups, Mapping):  # a list that torch.distributed.checkpoint took apart
        groups = [groups[key] for key in sorted(groups, key=_number)]
    if not isinstance(states, Mapping) or not isinstance(groups, list | tuple):
        raise CheckpointError(f"{what} is garbled: it has no state and param_groups as an optimizer has them")
    hyper: list[dict[str, Any]] = []
    slots: list[list[Slot]] = []
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise CheckpointError(f"{what} is garbled: a parameter group lists no params")
        keys = list(group["params"])
        names = group.get("param_names")
        if not isinstance(names, list | tuple) or len(names) != len(keys):
            names = [key if isinstance(key, str) else None for key in keys]
        hyper.append({str(k): v for k, v in group.items() if k not in ("params", "param_names")})
        slots.append([slot(name, states.get(key, {}), what) for name, key in zip(names, keys, strict=True)])
    return OriginOptimizer(hyper, slots)


def slot(name: str | None, state: Any, what: str) -> Slot:
    """One parameter's state."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{what} is garbled: the state of a parameter is no dict")
    return Slot(name, *split_state(state))


def split_state(state: Mapping[Any, Any]) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """Fields that are tensors, and the others. The step counter of Adam is a tensor, as torch has it."""
    fields: dict[str, Pieces] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            fields[str(key)] = Pieces.of(value)
        elif isinstance(value, Pieces):
            fields[str(key)] = value
        else:
            values[str(key)] = value
    if isinstance(values.get("step"), int | float) and "exp_avg_sq" in fields:  # of apex, DeepSpeed's Adams, old torch
        fields["step"] = Pieces.of(torch.tensor(float(values.pop("step"))))
    return fields, values


def _flattened(state: Mapping[Any, Any], what: str) -> OriginOptimizer:
    """Names instead of groups: parameters with the same hyper-parameters are one group, in the order of their names."""
    states: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        root, _, rest = str(key).partition(".")
        name, _, leaf = rest.rpartition(".")
        if name and root in ("state", "param_groups"):
            (states if root == "state" else hyper).setdefault(name, {})[leaf] = value
    if not hyper:
        raise CheckpointError(f"{what} is garbled: it has no param_groups")
    groups: list[dict[str, Any]] = []
    slots: list[list[Slot]] = []
    for name, values in hyper.items():
        values = {k: v for k, v in values.items() if k not in ("params", "param_names")}
        if values not in groups:
            groups.append(values)
            slots.append([])
        slots[groups.index(values)].append(slot(name, states.get(name, {}), what))
    return OriginOptimizer(groups, slots)


def _number(key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError):
        return 0
