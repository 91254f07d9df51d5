"""Which modules become units of fully_shard: what is gathered, computed and freed together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from distkit.config.nearest import nearest
from distkit.errors import ConfigError
from distkit.strategies.blocks import find_blocks
from distkit.strategies.fsdp_settings import FsdpSettings

__all__ = ["Unit", "choose_units"]

Unit = tuple[str, nn.Module]
"""A module's name in the model, and the module."""

NO_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
NEVER_CUT = (nn.MultiheadAttention,)
"""Reads its layers' weights without calling them, so that no hook of theirs would gather anything."""


def choose_units(model: nn.Module, settings: FsdpSettings) -> list[Unit]:
    """The units inside a model, outer ones before inner ones, in the model's order; the model itself is one more.

    Parameters that belong to two units (tied weights) would be gathered twice, so such units are given up, and their
    parameters go to the unit around them.

    Args:
        model: The user's module.
        settings: ``wrap`` or ``min_params``; else the repeated blocks are taken.

    Raises:
        ConfigError: ``wrap`` names a class that the model doesn't have, or one without a forward.
    """
    if settings.wrap is not None:
        units = _by_class(model, settings.wrap)
    elif settings.min_params is not None:
        units = _by_size(model, settings.min_params)
    else:
        units = find_blocks(model)
    units = [(name, module) for name, module in units if any(True for _ in module.parameters())]
    return _without_shared(model, units)


def _by_class(model: nn.Module, names: tuple[str, ...]) -> list[Unit]:
    there = {type(module).__name__: module for _, module in model.named_modules()}
    for name in names:
        if name not in there:
            close = nearest(name, list(there))
            raise ConfigError(
                f"engine.fsdp.wrap names {name!r}, but {type(model).__name__} has no module of that class",
                hint=f"--set engine.fsdp.wrap=[{close}]" if close else f"one of: {', '.join(sorted(there))}",
            )
        if isinstance(there[name], NO_FORWARD):
            raise ConfigError(
                f"engine.fsdp.wrap names {name!r}, which holds modules but is never called itself",
                hint="name the class of the modules inside it",
            )
    return [(name, module) for name, module in model.named_modules() if name and type(module).__name__ in names]


def _by_size(model: nn.Module, least: int) -> list[Unit]:
    """Bottom up: a module with so many parameters that are in no unit yet becomes one."""
    chosen: set[str] = set()
    counted: set[int] = set()

    def visit(module: nn.Module, name: str) -> int:
        left = 0
        if not isinstance(module, NEVER_CUT):
            for child_name, child in module.named_children():
                left += visit(child, f"{name}.{child_name}" if name else child_name)
            own: Iterator[nn.Parameter] = module.parameters(recurse=False)
        else:
            own = module.parameters()
        for parameter in own:
            left += 0 if id(parameter) in counted else parameter.numel()
            counted.add(id(parameter))
        if name and left >= least and not isinstance(module, NO_FORWARD):
            chosen.add(name)
            return 0
        return left

    visit(model, "")
    return [(name, module) for name, module in model.named_modules() if name in chosen]


def _without_shared(model: nn.Module, units: list[Unit]) -> list[Unit]:
    unit_names = {id(module): name for name, module in units}
    owners: dict[int, list[frozenset[str]]] = {}

    def visit(module: nn.Module, around: frozenset[str]) -> None:
        if id(module) in unit_names:
            around |= {unit_names[id(module)]}
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(around)
        for child in module._modules.values():
            if child is not None:
                visit(child, around)

    visit(model, frozenset())
    given_up: set[str] = set()
    for chains in owners.values():
        given_up |= frozenset.union(*chains) - frozenset.intersection(*chains)
    return [(name, module) for name, module in units if name not in given_up]
