"""State as a set of shards in the model's own names: the only view that checkpoints have of any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ReadShard", "Region", "Shard", "bare_name", "clean_name", "flat_regions"]

WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Region:
    """A box inside a tensor: for each dimension where it starts and how long it is.

    A zero-dimensional tensor has one region with no dimensions, of one element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """The region that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(int(n) for n in shape))

    @property
    def numel(self) -> int:
        """How many elements it holds."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index the whole tensor with."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The box that both hold, or None."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(e <= o for o, e in zip(offset, end, strict=True)):
            return None
        return Region(offset, tuple(e - o for o, e in zip(offset, end, strict=True)))

    def within(self, outer: Region) -> tuple[slice, ...]:
        """To index a tensor that holds just ``outer`` with."""
        return tuple(slice(o - p, o - p + n) for o, n, p in zip(self.offset, self.shape, outer.offset, strict=True))


@dataclass(frozen=True)
class Shard:
    """A piece of one tensor of the state, as one rank holds it.

    Args:
        group: Whose state: ``model``, ``model_1`` ... for modules, ``optimizer``, ``optimizer_1`` ... for optimizers,
            in the order in which they were prepared.
        name: The parameter's or buffer's name as the user's own module has it, without any wrapper's prefix.
        kind: ``parameter``, ``buffer``, or for optimizers the name of the state field, like ``exp_avg`` or ``step``.
        global_shape: Shape of the whole tensor.
        region: Which box of it this is.
        tensor: The values, of ``region.shape``.
    """

    group: str
    name: str
    kind: str
    global_shape: tuple[int, ...]
    region: Region
    tensor: torch.Tensor


ReadShard = Callable[[str, str, str, Region], "torch.Tensor"]
"""``read(group, name, kind, region)`` gives the values of a box from a checkpoint, on the CPU."""


@dataclass
class OptimizerLayout:
    """What a checkpoint knows of an optimizer besides its tensors.

    Args:
        groups: One dict a parameter group: ``params`` (names) and the hyper-parameters.
        fields: For each parameter name, the state fields stored as tensors and their whole shapes.
        values: For each parameter name, the state fields that are no tensors.
    """

    groups: list[dict[str, Any]]
    fields: dict[str, dict[str, tuple[int, ...]]]
    values: dict[str, dict[str, Any]]


@lru_cache(maxsize=65536)
def clean_name(name: str) -> str:
    """A parameter's name without the prefixes that wrappers put in (``_orig_mod.``, ``_fsdp_wrapped_module.`` ...)."""
    for prefix in WRAPPER_PREFIXES:
        while name.startswith(prefix):
            name = name[len(prefix) :]
        name = name.replace("." + prefix, ".")
    return name


def bare_name(name: str) -> str:
    """The same without ``module.`` too, which DDP's and DeepSpeed's own checkpoints have before every name.

    Only for reading what others wrote: a user's model may well have a submodule that is called ``module``.
    """
    name = clean_name(name)
    while name.startswith("module."):
        name = clean_name(name[len("module.") :])
    return name


def flat_regions(shape: Sequence[int], start: int, length: int) -> Iterator[Region]:
    """The boxes that cover ``length`` elements of a tensor from flat index ``start`` on, in flat order.

    Args:
        shape: Shape of the whole tensor.
        start: First element, counted in row-major order.
        length: Number of elements.
    """
    shape = tuple(shape)
    if length <= 0:
        return
    if len(shape) == 0:
        yield Region((), ())
        return
    if len(shape) == 1:
        yield Region((start,), (length,))
        return
    row = prod(shape[1:])
    end = start + length
    first, last = -(-start // row), end // row
    if first > last:  # inside one row
        for inner in flat_regions(shape[1:], start % row, length):
            yield Region((start // row, *inner.offset), (1, *inner.shape))
        return
    if start < first * row:
        for inner in flat_regions(shape[1:], start % row, first * row - start):
            yield Region((start // row, *inner.offset), (1, *inner.shape))
    if last > first:
        yield Region((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if end > last * row:
        for inner in flat_regions(shape[1:], 0, end - last * row):
            yield Region((last, *inner.offset), (1, *inner.shape))
