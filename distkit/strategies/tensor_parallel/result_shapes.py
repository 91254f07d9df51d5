"""The shape of what a function gives, found by running it on meta tensors, and remembered.

A model calls the same functions with the same shapes in every step, and on meta tensors some of them take torch as long
as a small layer: layer_norm and attention are written in Python there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["result_on_meta"]

_KEPT = 4096
"""Results that are remembered; where shapes change all the time, it begins again."""

_remembered: dict[Hashable, Any] = {}


def result_on_meta(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a function would give, as meta tensors; not to be written into.

    Args:
        func: A function of torch whose result's shape depends on shapes, types and plain values only.
        args: Its arguments, tensors of any kind among them.
        kwargs: Its keyword arguments.

    Raises:
        RuntimeError: And whatever else the function raises, for values asked of meta tensors too.
    """
    with torch._C.DisableTorchFunctionSubclass():
        try:
            key = (func, _described(args), _described(kwargs))
        except _UnknownError:
            return _run(func, args, kwargs)
        if key not in _remembered:
            result = _run(func, args, kwargs)
            if len(_remembered) >= _KEPT:
                _remembered.clear()
            _remembered[key] = result
        return _remembered[key]


class _UnknownError(Exception):
    """An argument of a kind that may not be the same when it looks the same."""


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    meta_args, meta_kwargs = tree_map(_meta, (args, kwargs))
    return func(*meta_args, **meta_kwargs)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _described(value: Any) -> Hashable:
    """What of an argument decides on the result's shape. The kind is part of it: True, 1 and 1.0 are equal."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.dtype
    if isinstance(value, tuple | list):
        return kind, *map(_described, value)
    if isinstance(value, dict):
        return kind, *((name, _described(inner)) for name, inner in value.items())
    if isinstance(value, slice):
        return kind, _described(value.start), _described(value.stop), _described(value.step)
    if value is None or value is ... or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return kind, value
    raise _UnknownError
