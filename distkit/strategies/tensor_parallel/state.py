"""Between a rank's part of the parameters and the whole: what checkpoints see, and what they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from distkit.errors import UsageError
from distkit.state import OptimizerLayout, ReadShard, Region, Shard, clean_name
from distkit.strategies.tensor_parallel.apply import PlacedParameter

__all__ = ["Placement"]


class Placement:
    """Where the parts of this rank lie.

    Args:
        rank: This rank in its tensor group.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._places: dict[tuple[str, str], PlacedParameter] = {}
        self._fields: dict[tuple[str, str, str], tuple[int, ...]] = {}

    def add(self, model_group: str, places: dict[str, PlacedParameter]) -> None:
        """Note a model's split parameters; ``model_group`` is ``model``, ``model_1`` ..."""
        prefix = "" if model_group == "model" else f"{model_group}."
        for name, place in places.items():
            self._places[model_group, clean_name(name)] = place
            self._places["optimizer", prefix + clean_name(name)] = place

    def place_of(self, group: str, name: str) -> PlacedParameter | None:
        """Of a parameter, or of the parameter that an optimizer's field belongs to."""
        return self._places.get(("optimizer" if group.startswith("optimizer") else group, clean_name(name)))

    # -- out --------------------------------------------------------------------------------------------------------

    def whole_shards(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        """Shards of the parts become shards of the whole; what every rank has comes from the group's first."""
        for shard in shards:
            place = self.place_of(shard.group, shard.name)
            if place is None or shard.global_shape != self.part_shape(place):
                if place is not None and prod(shard.global_shape) > 1:
                    raise _factored(shard.name, shard.kind)
                if self.rank == 0:
                    yield shard
                continue
            for inner, outer in self._boxes(place):
                common = shard.region.intersect(inner)
                if common is not None:
                    region = _moved(common, inner, outer)
                    tensor = shard.tensor[common.within(shard.region)]
                    yield Shard(shard.group, shard.name, shard.kind, place.shape, region, tensor)

    def whole_layouts(self, layouts: Sequence[OptimizerLayout]) -> list[OptimizerLayout]:
        """The same for what optimizers say of their fields."""
        return [self._with_shapes(layout, whole=True) for layout in layouts]

    def whole_shapes(self, group: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The same for a model's shapes."""
        places = {name: self.place_of(group, name) for name in shapes}
        return {name: place.shape if (place := places[name]) is not None else shape for name, shape in shapes.items()}

    # -- in ---------------------------------------------------------------------------------------------------------

    def part_layouts(self, layouts: Sequence[OptimizerLayout]) -> list[OptimizerLayout]:
        """What a checkpoint says of fields, as this rank's optimizer has them."""
        return [self._with_shapes(layout, whole=False) for layout in layouts]

    def part_reader(self, read: ReadShard) -> ReadShard:
        """Reads boxes of this rank's parts out of a checkpoint of the whole."""

        def read_part(group: str, name: str, kind: str, region: Region) -> torch.Tensor:
            place = self.place_of(group, name)
            if place is None or len(region.shape) != len(place.shape):
                return read(group, name, kind, region)
            result: torch.Tensor | None = None
            for inner, outer in self._boxes(place):
                common = region.intersect(inner)
                if common is None:
                    continue
                values = read(group, name, kind, _moved(common, inner, outer))
                if common == region:
                    return values
                result = values.new_empty(region.shape) if result is None else result
                result[common.within(region)] = values
            return read(group, name, kind, Region(region.offset, region.shape)) if result is None else result

        return read_part

    # -- geometry ---------------------------------------------------------------------------------------------------

    def part_shape(self, place: PlacedParameter) -> tuple[int, ...]:
        """Of this rank's part."""
        own = sum(length for _, length in place.runs[self.rank])
        return tuple(own if dim == place.dim else n for dim, n in enumerate(place.shape))

    def _boxes(self, place: PlacedParameter) -> Iterator[tuple[Region, Region]]:
        """For each run: its box in the part, and in the whole."""
        position = 0
        for start, length in place.runs[self.rank]:
            shape = tuple(length if dim == place.dim else n for dim, n in enumerate(place.shape))
            inner, outer = [0] * len(shape), [0] * len(shape)
            inner[place.dim], outer[place.dim] = position, start
            yield Region(tuple(inner), shape), Region(tuple(outer), shape)
            position += length

    def _with_shapes(self, layout: OptimizerLayout, *, whole: bool) -> OptimizerLayout:
        fields: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, kinds in layout.fields.items():
            place = self.place_of("optimizer", name)
            fields[name] = dict(kinds)
            if place is None:
                continue
            before, after = self.part_shape(place), place.shape
            if not whole:
                before, after = after, before
            for kind, shape in kinds.items():
                if tuple(shape) == before:
                    fields[name][kind] = after
                elif prod(shape) > 1:
                    raise _factored(name, kind)
        return OptimizerLayout(layout.groups, fields, layout.values)


def _moved(box: Region, inner: Region, outer: Region) -> Region:
    offset = tuple(o - i + w for o, i, w in zip(box.offset, inner.offset, outer.offset, strict=True))
    return Region(offset, box.shape)


def _factored(name: str, kind: str) -> UsageError:
    return UsageError(
        f"the optimizer's {kind} of {name} has another shape than the parameter, so it can't be split with it over a tensor group",
        hint="an optimizer with states of the parameters' shapes, such as AdamW, or --set parallel.tensor=1",
    )
