"""Changing what a module's forward does without changing its names, its attributes or its identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

__all__ = ["around_forward", "map_tensors", "plain_class"]

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``around(forward, args, kwargs)`` calls the forward it is given, once, and returns its result or a changed one."""


def around_forward(module: nn.Module, around: Around) -> None:
    """Run ``around`` in the place of the module's forward.

    The object gets a class of its own, derived from its class, as fully_shard does. So parameter names and attributes
    stay, ``isinstance`` holds, and ``copy.deepcopy`` gives a copy that runs its own parameters (which a patched
    ``module.forward`` would not).
    """
    base = type(module)

    class Wrapped(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return around(super().forward, args, kwargs)

    Wrapped.__name__ = base.__name__
    Wrapped.__qualname__ = base.__qualname__
    Wrapped.__module__ = base.__module__
    Wrapped.__doc__ = base.__doc__
    Wrapped.wrapped_class = base
    module.__class__ = Wrapped


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before :func:`around_forward`: blocks that are wrapped one by one are still alike."""
    found = type(module)
    while "wrapped_class" in vars(found):
        found = vars(found)["wrapped_class"]
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``change`` to every tensor in nested tuples, lists, dicts and dataclasses; keep all types.

    Mappings that know how to copy themselves (transformers' ModelOutput) keep their class.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {item.name: map_tensors(getattr(value, item.name), change) for item in fields(value) if item.init}
        return replace(value, **changed)
    if isinstance(value, Mapping):
        try:
            return type(value)({key: map_tensors(item, change) for key, item in value.items()})  # type: ignore[call-arg]
        except TypeError:
            return value
    return value
