"""Tensors that have shapes and no data (torch's fake tensors), and numbers for programs that read them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distkit.errors import PlanError

__all__ = ["fake_mode", "numbers_without_data", "open_mode", "private", "value_of"]


def private(module: str, name: str) -> Any:
    """A name that torch doesn't promise.

    Raises:
        PlanError: This version doesn't have it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"a plan runs the model on tensors without data, for which torch {torch.__version__} lacks {module}.{name}",
            hint="pip install 'torch>=2.6'   or distkit plan --params 7B ...   which runs nothing",
        ) from error


def fake_mode() -> Any:
    """What makes tensors without data while it is open."""
    return private("torch._subclasses.fake_tensor", "FakeTensorMode")(allow_non_fake_inputs=True)


def open_mode() -> Any:
    """The one that is open; None where tensors have data."""
    return private("torch._guards", "active_fake_mode")()


@contextmanager
def numbers_without_data() -> Iterator[None]:
    """While it is open, whoever asks for the number in a tensor without data gets one: 1.0, 0 or False; and all are finite."""
    base = private("torch.utils._python_dispatch", "TorchDispatchMode")
    functions = private("torch.overrides", "TorchFunctionMode")
    fake = private("torch._subclasses.fake_tensor", "FakeTensor")

    class Numbers(base):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], fake):
                return value_of(func, args)
            return func(*args, **(kwargs or {}))

    class Finite(functions):  # type: ignore[misc, valid-type]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.isfinite, torch.Tensor.isfinite) and isinstance(args[0], fake):
                with _real():
                    return torch.ones(args[0].shape, dtype=torch.bool)
            return func(*args, **(kwargs or {}))

    with Finite(), Numbers():
        yield


def _real() -> Any:
    """No mode sees what is done while it is open."""
    return private("torch._C", "_DisableTorchDispatch")()


def value_of(func: Any, args: tuple[Any, ...]) -> Any:
    """What a fake number is when a program asks: nobody is out of range, and every count is 0. A real one is what it is."""
    if not isinstance(args[0], private("torch._subclasses.fake_tensor", "FakeTensor")):
        with _real():
            return func(*args)
    unknown = private("torch._subclasses.fake_tensor", "DataDependentOutputException")
    try:
        return func(*args)
    except unknown:
        dtype = args[0].dtype
        return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0
