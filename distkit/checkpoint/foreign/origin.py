"""What a foreign checkpoint holds, in terms that all formats share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distkit.errors import CheckpointError
from distkit.state import Region, flat_regions

__all__ = ["Origin", "OriginOptimizer", "Pieces", "Slot", "as_int", "flat_pieces", "whole_number"]

SAME_SHAPE = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "exp_inf",
    "ax",
    "mu",
    "prev",
)
"""Fields of torch's optimizers that have their parameter's shape; factored states and step counters are not here."""


@dataclass(frozen=True)
class Pieces:
    """A tensor as boxes, wherever they lie; nothing is put together before it is written.

    Args:
        shape: Shape of the whole.
        dtype: Its type.
        parts: Boxes and their values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Region, torch.Tensor], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Pieces:
        """A tensor that is whole."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, ((Region.whole(shape), tensor.detach()),))

    def whole(self) -> torch.Tensor:
        """All values, in one tensor."""
        if len(self.parts) == 1 and self.parts[0][0].shape == self.shape:
            return self.parts[0][1]
        out = torch.empty(self.shape, dtype=self.dtype)
        for region, values in self.parts:
            out[region.slices] = values
        return out

    def address(self) -> tuple[int, tuple[int, ...]] | None:
        """What tied tensors have in common: the place of their values; None where that says nothing."""
        if len(self.parts) != 1 or not self.parts[0][1].numel():
            return None
        values = self.parts[0][1]
        return values.data_ptr(), tuple(values.stride())


@dataclass
class Slot:
    """One parameter as an optimizer has it.

    Args:
        name: None where the file only numbers its parameters.
        fields: State that is tensors, like ``exp_avg``.
        values: State that is none.
        master: The fp32 values that the optimizer steps, where the model's own are of fewer bits.
    """

    name: str | None
    fields: dict[str, Pieces] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    master: Pieces | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The parameter's shape; None if its state doesn't say."""
        if self.master is not None:
            return self.master.shape
        return next((self.fields[name].shape for name in SAME_SHAPE if name in self.fields), None)


@dataclass
class OriginOptimizer:
    """An optimizer: hyper-parameters and parameters of each group."""

    groups: list[dict[str, Any]]
    slots: list[list[Slot]]

    def all(self) -> Iterator[Slot]:
        """Every parameter."""
        for group in self.slots:
            yield from group


@dataclass
class Origin:
    """A foreign checkpoint.

    Args:
        kind: Who wrote it, such as ``deepspeed zero2``.
        world_size: On how many processes, as far as its files tell.
        model: Tensors by name.
        ordered: Whether that is the order of the model's state_dict().
        buffers: Names that are known to be buffers; None if the file doesn't say.
        ties: Names of tied tensors and the names under which their values lie, where the file says.
        optimizers: In order.
        step: Optimizer steps taken; None if unknown.
        epoch: None if unknown.
        samples: Samples trained on by all ranks; None if unknown.
        skipped: Steps that overflows skipped.
        schedulers: States of learning rate schedulers.
        scaler: State of a GradScaler.
        left: What of it is not taken, in words.
        notes: What the user should know.
    """

    kind: str
    world_size: int
    model: dict[str, Pieces]
    ordered: bool = True
    buffers: set[str] | None = None
    ties: dict[str, str] = field(default_factory=dict)
    optimizers: list[OriginOptimizer] = field(default_factory=list)
    step: int | None = None
    epoch: int | None = None
    samples: int | None = None
    skipped: int = 0
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def flat_pieces(shape: Sequence[int], start: int, chunks: Sequence[tuple[int, torch.Tensor]], what: str) -> Pieces:
    """A tensor that lies in pieces of a flat buffer.

    Args:
        shape: Its shape.
        start: Where it begins in the buffer, in elements.
        chunks: Parts of the buffer, in order: where each begins, and its elements.
        what: How messages call it.

    Raises:
        CheckpointError: Elements of it are in no chunk.
    """
    shape = tuple(int(n) for n in shape)
    numel = Region.whole(shape).numel
    parts: list[tuple[Region, torch.Tensor]] = []
    found = 0
    for begin, values in chunks:
        first, last = max(start, begin), min(start + numel, begin + values.numel())
        position = first - begin
        for region in flat_regions(shape, first - start, last - first):
            parts.append((region, values[position : position + region.numel].view(region.shape)))
            position += region.numel
        found += max(0, last - first)
    if found != numel:
        raise CheckpointError(f"{what} is not whole: {found:,} of its {numel:,} elements are in the files")
    dtype = chunks[0][1].dtype if chunks else torch.float32
    if not numel:
        parts = [(Region.whole(shape), torch.empty(shape, dtype=dtype))]
    return Pieces(shape, dtype, tuple(parts))


def as_int(value: Any) -> int | None:
    """A counter that may be a number or a tensor of one element; None if it is neither."""
    if isinstance(value, Pieces):
        value = value.whole()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        return None
    return int(value) if float(value).is_integer() else None


def whole_number(data: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a counter."""
    return next((n for n in (as_int(data.get(name)) for name in names) if n is not None), None)
