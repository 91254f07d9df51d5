"""The user's own model, built without memory, for the names that a file doesn't tell: ``--model MODULE:FUNCTION``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distkit.errors import CheckpointError
from distkit.state import clean_name
from distkit.strategies.modules import named_buffers, parameter_names

__all__ = ["UserModel", "build_model"]

EXAMPLE = "--model train:build, where train.py has: def build(): return Net()"


@dataclass
class UserModel:
    """What a model and its optimizer say of names.

    Args:
        shapes: Of parameters and persistent buffers, in the model's order; of tied ones the first name.
        trained: Names of parameters that want a gradient.
        parameters: Names of all parameters.
        buffers: Names of persistent buffers.
        ties: Further names of tied parameters and their first names.
        groups: For each parameter group of the optimizer its names; None if no optimizer was returned.
        hyper: Their hyper-parameters.
    """

    shapes: dict[str, tuple[int, ...]]
    trained: list[str]
    parameters: list[str]
    buffers: list[str]
    ties: dict[str, str] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    hyper: list[dict[str, Any]] = field(default_factory=list)


def build_model(where: str) -> UserModel:
    """Call the user's function, so that parameters take no memory where the model allows that.

    Args:
        where: ``MODULE:FUNCTION``; the function takes nothing and returns the model, or model and optimizer.

    Raises:
        CheckpointError: There is no such function, it fails, or it returns something else.
    """
    module_name, _, name = where.partition(":")
    if not module_name or not name:
        raise CheckpointError(f"--model was set to {where!r}, which is no MODULE:FUNCTION", hint=EXAMPLE)
    here = str(Path.cwd())
    if here not in sys.path:  # a console script doesn't look into the current folder
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"--model was set to {where!r}, but: {error}", hint=EXAMPLE) from error
    try:
        with torch.device("meta"):
            made = function()
    except Exception:  # some models compute with values while they are built
        try:
            made = function()
        except Exception as error:
            raise CheckpointError(f"--model {where} failed: {type(error).__name__}: {error}") from error
    model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer | None):
        raise CheckpointError(
            f"--model {where} returned {type(made).__name__}; a model, or a model and its optimizer, is needed",
            hint=EXAMPLE,
        )
    return _described(model, optimizer)


def _described(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> UserModel:
    names: Mapping[int, str] = parameter_names([model])
    parameters = {names[id(p)]: p for p in model.parameters()}
    buffers = dict(named_buffers(model))
    ties = {
        clean_name(name): names[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if clean_name(name) != names[id(p)]
    }
    found = UserModel(
        {name: tuple(tensor.shape) for name, tensor in (*parameters.items(), *buffers.items())},
        [name for name, p in parameters.items() if p.requires_grad],
        list(parameters),
        list(buffers),
        ties,
    )
    if optimizer is not None:
        if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
            raise CheckpointError("the optimizer that --model returned has parameters that are not the model's")
        found.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        found.hyper = [
            {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups
        ]
    return found
