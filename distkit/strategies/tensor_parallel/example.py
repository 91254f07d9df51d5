"""An example of what the script will give to a model, to find out what in it can be split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from distkit.errors import UsageError

__all__ = ["find_run"]

SAMPLES = 2

Run = Callable[[nn.Module], Any]


def find_run(model: nn.Module, twin: nn.Module, loader: DataLoader[Any] | None) -> Run:
    """How to call a model like the script does.

    In this order: its ``example_input_array`` (a tensor, or a tuple or dict of arguments), the first samples of the
    DataLoader that was prepared with it, and transformers' ``dummy_inputs``. Of a batch that is a mapping, what the forward
    takes by name is passed, else as few leading items as work, as of a tuple.

    Args:
        model: The user's.
        twin: A copy on the CPU to try on.
        loader: The script's.

    Raises:
        UsageError: Nothing works; says what was tried.
    """
    tried: list[str] = []
    for what, args, kwargs in _candidates(model, loader):

        def run(candidate: nn.Module, args: tuple[Any, ...] = args, kwargs: dict[str, Any] = kwargs) -> Any:
            return candidate(*args, **kwargs)

        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                run(twin)
        except Exception as error:  # a forward may raise anything when it is given what it doesn't take
            tried.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        return run
    raise UsageError(
        f"to split {type(model).__name__} over a tensor group its forward has to be seen, and there is no example to call it "
        "with" + "".join(f"\n  {line}" for line in tried),
        hint="prepare model and DataLoader in one call, or set model.example_input_array to a batch of inputs",
    )


def _candidates(
    model: nn.Module, loader: DataLoader[Any] | None
) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    given = getattr(model, "example_input_array", None)
    if given is not None:
        yield "example_input_array", *_as_arguments(given)
    if loader is not None and not isinstance(loader.dataset, IterableDataset):
        batch = _first_samples(loader)
        if isinstance(batch, Mapping):
            names = inspect.signature(model.forward).parameters
            yield "a batch by name", (), {key: value for key, value in batch.items() if key in names}
            batch = list(batch.values())
        if isinstance(batch, tuple | list):
            for count in range(1, len(batch) + 1):
                yield f"the first {count} of a batch", tuple(batch[:count]), {}
        yield "a batch", (batch,), {}
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping):
        yield "dummy_inputs", (), dict(dummy)


def _as_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = tree_map(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, given)
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def _first_samples(loader: DataLoader[Any]) -> Any:
    """Without the script's sampler and generators, which stay as they are."""
    dataset: Any = loader.dataset
    with torch.random.fork_rng(devices=[]):
        return loader.collate_fn([dataset[index] for index in range(min(SAMPLES, len(dataset)))])
