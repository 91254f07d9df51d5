"""Putting a layout into a model: parameters keep their identity and their names, and become this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distkit.strategies.tensor_parallel.attention import AttentionForward, place_in_attention, turn_off_fast_paths
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.kinds import Kind, kind_of
from distkit.strategies.tensor_parallel.layers import ColumnForward, RowForward, VocabularyForward
from distkit.strategies.tensor_parallel.layout import COLUMN, ROW, VOCABULARY, Layout, Runs, Split

__all__ = [
    "FORWARDS",
    "Forwards",
    "PlacedParameter",
    "apply_layout",
    "placed_parameters",
    "tied_otherwise",
    "tried_out",
]

Forwards = Mapping[str, Callable[..., Any]]
"""By style, what makes a module's forward: called with its name, itself, its kind, its split and the group."""

FORWARDS: Forwards = {COLUMN: ColumnForward, ROW: RowForward, VOCABULARY: VocabularyForward}


@dataclass(frozen=True)
class PlacedParameter:
    """Where a rank's part of a parameter lies in the whole.

    Args:
        shape: Of the whole.
        dim: The split dimension.
        runs: By rank.
    """

    shape: tuple[int, ...]
    dim: int
    runs: tuple[Runs, ...]


def placed_parameters(model: nn.Module, layout: Layout) -> dict[str, PlacedParameter]:
    """The parameters that a layout splits, by name, under all names of tied ones, while the model is still whole."""
    placed: dict[int, PlacedParameter] = {}
    for name in layout.splits:
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False):
            place = _place(model, name, own, layout)
            if place is not None:
                placed[id(parameter)] = place
    named = model.named_parameters(remove_duplicate=False)
    return {name: placed[id(parameter)] for name, parameter in named if id(parameter) in placed}


def tied_otherwise(model: nn.Module, layout: Layout) -> str | None:
    """A split layer that shares a parameter with another layer, which is not split in the same way; None if there is none."""
    places: dict[int, tuple[str, PlacedParameter | None]] = {}
    for name, module in model.named_modules():
        if kind_of(module) is None:
            continue
        for own, parameter in module.named_parameters(recurse=False):
            place = _place(model, name, own, layout)
            other, known = places.setdefault(id(parameter), (name, place))
            if known != place:
                return name if name in layout.splits else other
    return None


def _place(model: nn.Module, name: str, own: str, layout: Layout) -> PlacedParameter | None:
    split, module = layout.splits.get(name), model.get_submodule(name)
    kind = kind_of(module)
    place = _dim_and_runs(own, kind, split) if split is not None and kind is not None else None
    return None if place is None else PlacedParameter(tuple(module.get_parameter(own).shape), *place)


def _dim_and_runs(own: str, kind: Kind, split: Split) -> tuple[int, tuple[Runs, ...]] | None:
    if kind.name == "attention":
        return place_in_attention(own, kind.outputs, split)
    if own == "weight":
        return (kind.output_dim if split.style == COLUMN else kind.input_dim), split.runs
    return (0, split.runs) if own == "bias" and split.style == COLUMN else None


def apply_layout(
    model: nn.Module, layout: Layout, group: TensorGroup, forwards: Forwards = FORWARDS
) -> dict[str, PlacedParameter]:
    """Split a model in place.

    Args:
        model: Whole, the same on all ranks of the group.
        layout: For it.
        group: The tensor group.
        forwards: What computes the layers of each style.

    Returns:
        The parameters that are split now, by name, under all names of tied ones.
    """
    placed = placed_parameters(model, layout)
    kinds = {name: kind_of(model.get_submodule(name)) for name in layout.splits}
    done: set[int] = set()
    for name, place in placed.items():
        parameter = model.get_parameter(name)
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        parameter.data = part_of(parameter.data, place, group.rank)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks them; DeepSpeed reads it
    for name, split in layout.splits.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.MultiheadAttention):
            module.forward = AttentionForward(name, module, group)  # type: ignore[method-assign]
        else:
            module.forward = forwards[split.style](name, module, kinds[name], split, group)
    turn_off_fast_paths(model, layout.splits)
    return placed


def part_of(tensor: torch.Tensor, place: PlacedParameter, rank: int) -> torch.Tensor:
    """A rank's part of a whole tensor, as memory of its own."""
    pieces = [tensor.narrow(place.dim, start, length) for start, length in place.runs[rank]]
    return torch.cat(pieces, place.dim).contiguous()


@contextmanager
def tried_out(model: nn.Module, layout: Layout, rank: int) -> Iterator[None]:
    """While it is open a model is what one rank of a group would hold, with nobody to talk to."""
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    try:
        apply_layout(model, layout, TensorGroup(rank, layout.size, None))
        yield
    finally:
        for name in layout.splits:
            module = model.get_submodule(name)
            if "forward" in vars(module):
                del module.forward
        for name, value in kept.items():
            model.get_parameter(name).data = value
