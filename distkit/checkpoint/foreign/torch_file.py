"""Files of ``torch.save``: home-made dicts, bare state dicts, and Lightning's ``.ckpt``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint.foreign.optimizers import is_optimizer, plain_optimizer
from distkit.checkpoint.foreign.origin import Origin, Pieces
from distkit.checkpoint.foreign.pickles import load_torch
from distkit.checkpoint.foreign.trees import (
    LIGHTNING_VERSION,
    lightning_leftovers,
    pick_counters,
    plain,
    take_schedulers,
)
from distkit.errors import CheckpointError

__all__ = ["read_lightning_file", "read_torch_file", "state_dict_pieces"]

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "model_state", "net", "network", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optim_state_dict", "optimizer_state", "optimizers")


def read_torch_file(path: Path) -> Origin:
    """Read a file that the user's own script saved.

    Raises:
        CheckpointError: It can't be read, or no model's state is in it.
    """
    data = _load(path)
    if LIGHTNING_VERSION in data:
        return _lightning(data, path)
    key = next((k for k in MODEL_KEYS if _is_state_dict(data.get(k))), None)
    if key is None:
        if not _is_state_dict(data):
            raise CheckpointError(
                f"{path} holds no model's state_dict(): its keys are {', '.join(sorted(map(str, data))[:10])}",
                hint='save {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
            )
        return Origin("torch.save (a state dict)", 1, state_dict_pieces(data))
    rest = {k: v for k, v in data.items() if k != key}
    origin = Origin("torch.save", 1, state_dict_pieces(data[key]))
    found = next((k for k in OPTIMIZER_KEYS if k in rest), None)
    if found is not None:
        states = rest.pop(found)
        states = states if isinstance(states, list) else [states]
        origin.optimizers = [_optimizer(state, f"{found!r} in {path}") for state in states]
    origin.schedulers = take_schedulers(rest)
    pick_counters(origin, rest)
    return origin


def read_lightning_file(path: Path) -> Origin:
    """Read a ``.ckpt`` file of Lightning.

    Raises:
        CheckpointError: It can't be read, or is none.
    """
    data = _load(path)
    if LIGHTNING_VERSION not in data:
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning: it has no {LIGHTNING_VERSION!r}", hint="--from torch"
        )
    return _lightning(data, path)


def state_dict_pieces(state: Mapping[Any, Any]) -> dict[str, Pieces]:
    """The tensors of a module's state dict; ``_extra_state`` and the like aren't."""
    return {str(name): Pieces.of(value) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _lightning(data: dict[str, Any], path: Path) -> Origin:
    """Written against Lightning 2.6 (trainer/connectors/checkpoint_connector.py, dump_checkpoint)."""
    if not _is_state_dict(data.get("state_dict")):
        raise CheckpointError(f"{path} holds no state_dict, or one without tensors")
    origin = Origin(f"lightning {data[LIGHTNING_VERSION]}", 1, state_dict_pieces(data["state_dict"]))
    states = data.get("optimizer_states") or []
    origin.optimizers = [_optimizer(state, f"optimizer_states[{i}] in {path}") for i, state in enumerate(states)]
    origin.schedulers = [plain(state) for state in data.get("lr_schedulers") or []]
    origin.left = lightning_leftovers(data)
    known = ("state_dict", "optimizer_states", "lr_schedulers")
    pick_counters(origin, {key: value for key, value in data.items() if key not in known})
    return origin


def _optimizer(state: Any, what: str) -> Any:
    if not is_optimizer(state):
        raise CheckpointError(f"{what} is no optimizer's state_dict()")
    return plain_optimizer(state, what)


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(item, torch.Tensor) for item in value.values())


def _load(path: Path) -> dict[str, Any]:
    data = load_torch(path)
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path} holds a {type(data).__name__}; only dicts with a model's state are read",
            hint='save {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
        )
    return data
