"""Batches to the device: tensors move, wherever they are in a batch, and everything else passes untouched."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserList, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

import torch

__all__ = ["Transfer", "batch_samples", "move_to", "tensors_in"]


def move_to(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move the tensors of a batch.

    Args:
        batch: Tensors in any nesting of mappings, lists, tuples, named tuples and dataclasses (frozen ones too), and
            objects with a ``to(device)`` of their own. Strings, None, numpy arrays and other objects stay as they are.
        device: Where to.
        non_blocking: Copy asynchronously where the source is pinned memory.

    Returns:
        The same structure of the same types. Whatever holds nothing that had to move is the same object as before, and
        an object that is in the batch twice is moved once.
    """
    return _move(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking), device, {})


def _move(
    item: Any, move: Callable[[torch.Tensor], Any], device: torch.device, done: dict[int, tuple[Any, Any]]
) -> Any:
    """``done`` has what was moved, by identity, next to the source itself so that its id isn't used again."""
    if item is None or isinstance(item, str | bytes | int | float):
        return item
    if id(item) in done:
        return done[id(item)][1]
    if isinstance(item, torch.Tensor):
        result = move(item)
    elif _moves_itself(item):
        result = item.to(device)
    else:
        members = _members(item)
        if members is None:
            return item
        result = _rebuilt(item, members, {key: _move(value, move, device, done) for key, value in members.items()})
    done[id(item)] = item, result
    return result


def _members(item: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, index or field; None if it's no container."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, tuple | list | deque | UserList):
        return dict(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {
            field.name: getattr(item, field.name) for field in dataclasses.fields(item) if hasattr(item, field.name)
        }
    return None


def _rebuilt(item: Any, old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    """A container of the same type with new members; the container itself if none of them changed."""
    if all(new[key] is old[key] for key in new):
        return item
    if isinstance(item, tuple):
        return item._make(new.values()) if hasattr(item, "_make") else type(item)(new.values())
    if isinstance(item, Mapping) and not isinstance(item, MutableMapping):
        return type(item)(new)  # type: ignore[call-arg]
    # A shallow copy keeps what a subclass holds besides its members, and a dataclass's fields that aren't in __init__.
    result = copy.copy(item)
    for key, value in new.items():
        if isinstance(item, Mapping | list | deque | UserList):
            result[key] = value
        else:
            object.__setattr__(result, key, value)  # also in a frozen dataclass
    return result


def _moves_itself(item: Any) -> bool:
    """Whether an object has a ``to`` that takes a device, and not a unit or a time zone as some others do."""
    return not isinstance(item, type) and _has_to(type(item))  # type: ignore[arg-type]  # mypy: a type is hashable


@lru_cache(maxsize=256)
def _has_to(kind: Hashable) -> bool:
    to = getattr(kind, "to", None)
    if not callable(to):
        return False
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "device" or p.kind is p.VAR_POSITIONAL for p in parameters)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors that :func:`move_to` sees, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    for member in (_members(batch) or _attributes(batch)).values():
        yield from tensors_in(member)


def _attributes(item: Any) -> dict[str, Any]:
    return dict(getattr(item, "__dict__", {})) if _moves_itself(item) else {}


def batch_samples(batch: Any) -> int:
    """How many samples a batch holds, judged by its look: only for batches that a data set makes itself.

    Args:
        batch: As yielded by the DataLoader.

    Returns:
        The first dimension of the first tensor or array that has one; the length of a list of other things; else 1.
    """
    found = _leading(batch)
    if found is not None:
        return found
    return len(batch) if isinstance(batch, list | tuple) and batch else 1


def _leading(item: Any) -> int | None:
    if isinstance(item, torch.nn.utils.rnn.PackedSequence):
        return int(item.batch_sizes[0])
    shape = getattr(item, "shape", None)
    if isinstance(shape, tuple):
        return int(shape[0]) if shape else None
    members = _members(item) or _attributes(item)
    return next((found for found in map(_leading, members.values()) if found is not None), None)


class Transfer:
    """Moves batches ahead of their use; on CUDA by a stream of its own, while the device computes.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Any) -> tuple[Any, Any]:
        """Begin to move a batch.

        Returns:
            What :meth:`finish` takes: the moved batch and, on CUDA, the event after which it is there.
        """
        if self._stream is None:
            return move_to(batch, self._device), None
        if any(tensor.is_cuda for tensor in tensors_in(batch)):
            # The data set itself computed on the device, in the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = move_to(batch, self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return moved, event

    def finish(self, started: tuple[Any, Any]) -> Any:
        """The batch, to be used in the current stream."""
        moved, event = started
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in tensors_in(moved):
                if tensor.is_cuda:
                    # Its memory came from the side stream's pool; it may be used again only after this stream is done.
                    tensor.record_stream(current)
        return moved
