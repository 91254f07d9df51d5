"""State of the zero strategies as shards in the model's own names, without gathering anything.

Parameters are stored from the fp32 masters, optimizer fields from the state of the runs that hold their elements. So a
checkpoint looks as if one process had written it, and any strategy at any world size loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distkit.checkpoint.codec import decode, encode
from distkit.checkpoint.replicated import own_share
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, ReadShard, Region, Shard, clean_name, flat_regions
from distkit.strategies.modules import group_name, named_buffers, parameter_names
from distkit.strategies.zero_optimizer import Run
from distkit.strategies.zero_partitions import Layout, Partition, Piece

if TYPE_CHECKING:
    from distkit.strategies.zero_units import Unit
    from distkit.world import World

__all__ = ["ZeroState"]


@dataclass(frozen=True)
class _Known:
    """A parameter: where it is stored, and which engine keeps it.

    Args:
        group: Its model's group.
        name: As on disk.
        shape: Of the whole.
        parameter: The model's own.
        layout: Of the engine that the model belongs to; None for a model that nothing trains.
        stepped: Whether an optimizer steps it, so that its values are in masters.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    layout: Layout | None
    stepped: bool

    @property
    def replicated(self) -> bool:
        """Whether every rank has all of it, and there is nothing else."""
        return not self.stepped and (self.layout is None or self.layout.keeps_whole)


class ZeroState:
    """Reads and writes the state of all units.

    Args:
        models: The scripts' own modules, in the order of preparation.
        units: Engines with their models and optimizers, in the order of the optimizers.
        world: For field names that only some ranks know, and for the share of what all ranks hold.
    """

    def __init__(self, models: Sequence[nn.Module], units: Sequence[Unit], world: World) -> None:
        self.models, self.units, self.world = models, units, world
        self.names = parameter_names(models)
        self.entries = list(self._parameters())
        self.homes: dict[int, list[_Known]] = {}
        """Where a parameter is stored: once for each model that has it."""
        for entry in self.entries:
            self.homes.setdefault(id(entry.parameter), []).append(entry)

    def _parameters(self) -> Iterator[_Known]:
        layouts = {id(p): unit.layout for unit in self.units for p in unit.parameters()}
        stepped = {id(p) for unit in self.units for p in unit.stepped}
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                layout = layouts.get(id(parameter))
                shape = layout.global_shape(parameter) if layout else tuple(parameter.shape)
                group, clean = group_name("model", index), clean_name(name)
                yield _Known(group, clean, shape, parameter, layout, id(parameter) in stepped)

    # -- out --------------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """This rank's share, each element of the state on exactly one rank."""
        yield from self._shared()
        for entry in self.entries:
            if not entry.stepped and not entry.replicated and entry.layout is not None:
                values, start = entry.layout.stretch(entry.parameter)
                yield from _boxes(entry.group, entry.name, "parameter", entry.shape, start, values)
        for index, unit in enumerate(self.units):
            for partition in unit.layout.partitions:
                with unit.layout.resident(partition):
                    yield from self._masters(partition)
                    yield from self._optimizer_shards(group_name("optimizer", index), unit, partition)

    def layouts(self) -> list[OptimizerLayout]:
        """Groups, fields and values by parameter name; a collective, since each rank has state of its pieces only."""
        mine = []
        for unit in self.units:
            fields: dict[str, list[str]] = {}
            values: dict[str, dict[str, Any]] = {}
            for run, piece, state in _states(unit):
                name = self.names[id(piece.parameter)]
                fields[name] = [k if _elementwise(v, run) else f"{k}=" for k, v in state.items() if _is_tensor(v)]
                values[name] = {k: v for k, v in state.items() if not _is_tensor(v)}
            mine.append({"fields": fields, "values": encode(values, {}, "optimizer values")})
        everyone = self.world.all_gather_objects(mine)
        return [self._layout(unit, [rank[index] for rank in everyone]) for index, unit in enumerate(self.units)]

    def _layout(self, unit: Unit, parts: Iterable[Mapping[str, Any]]) -> OptimizerLayout:
        shapes = self._shapes(unit)
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(names)}
            for group, names in zip(unit.own.param_groups, unit.group_names, strict=True)
        ]
        fields: dict[str, dict[str, tuple[int, ...]]] = {}
        values: dict[str, dict[str, Any]] = {}
        for part in parts:
            for name, kinds in part["fields"].items():
                fields[name] = {k.removesuffix("="): () if k.endswith("=") else shapes[name] for k in kinds}
            values.update(decode(part["values"], {}))
        order = [name for names in unit.group_names for name in names if name in fields]
        return OptimizerLayout(groups, {n: fields[n] for n in order}, {n: values.get(n, {}) for n in order})

    def _shapes(self, unit: Unit) -> dict[str, tuple[int, ...]]:
        return {self.names[id(p)]: self.homes[id(p)][0].shape for p in unit.stepped}

    def _masters(self, partition: Partition) -> Iterator[Shard]:
        for piece in partition.pieces:
            values = _lasting(partition, _values(partition, piece))
            for entry in self.homes[id(piece.parameter)]:
                yield from _boxes(entry.group, entry.name, "parameter", entry.shape, piece.start, values)

    def _optimizer_shards(self, group: str, unit: Unit, partition: Partition) -> Iterator[Shard]:
        for run, piece, state in _states(unit, partition):
            name, begin = self.names[id(piece.parameter)], piece.offset - run.offset
            for kind, value in state.items():
                if not _is_tensor(value):
                    continue
                if _elementwise(value, run):
                    stretch = _lasting(partition, value.detach()[begin : begin + piece.length])
                    yield from _boxes(group, name, kind, piece.shape, piece.start, stretch)
                elif value.dim():
                    raise CheckpointError(
                        f"{type(unit.own).__name__} keeps {kind} of the shape {tuple(value.shape)} for {run.length} "
                        "elements, which can't be cut by parameters",
                        hint="--strategy ddp   stores optimizers of any kind",
                    )
                elif piece.start == 0:
                    yield Shard(group, name, kind, (), Region((), ()), value.detach())

    def _shared(self) -> Iterator[Shard]:
        """What every rank holds whole: buffers, and parameters outside of all partitions."""
        tensors = [(e.group, e.name, "parameter", e.parameter.data) for e in self.entries if e.replicated]
        for index, model in enumerate(self.models):
            tensors += [(group_name("model", index), name, "buffer", buffer) for name, buffer in named_buffers(model)]
        sizes = [((g, n, k), t.numel() * t.element_size()) for g, n, k, t in tensors]
        mine = own_share(sizes, self.world.data.rank, self.world.data.size)
        for group, name, kind, tensor in tensors:
            if (group, name, kind) in mine:
                shape = tuple(tensor.shape)
                yield Shard(group, name, kind, shape, Region.whole(shape), tensor.detach())

    def gather_model(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole state of a model on the CPU of rank 0, empty elsewhere; called by all.

        No rank needs room for more than a parameter at a time besides rank 0's result.
        """
        values: dict[int, torch.Tensor] = {}
        for parameter, whole in self.masters(model):
            if self.world.is_main:
                values[id(parameter)] = whole.detach().cpu().clone()
        if not self.world.is_main:
            return {}
        named = {clean_name(n): values[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        return {**named, **{name: buffer.detach().cpu().clone() for name, buffer in named_buffers(model)}}

    def masters(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its exact values, put together from the data-parallel ranks; called by all."""
        places = {
            id(piece.parameter): (unit.layout, partition, piece)
            for unit in self.units
            for partition in unit.layout.partitions
            for piece in partition.pieces
        }
        dtypes = {id(p): unit.layout.partitions[0].master.dtype for unit in self.units for p in unit.stepped}
        for parameter in model.parameters():
            entry = self.homes[id(parameter)][0]
            exact = parameter.dtype == dtypes.get(id(parameter), parameter.dtype)
            if entry.replicated or (exact and entry.layout is not None and entry.layout.keeps_whole):
                whole = parameter.data
            else:
                mine = self._stretch(entry, places.get(id(parameter)), dtypes.get(id(parameter)))
                parts = self.world.all_gather(mine.to(self.world.device), axis="data")
                whole = torch.cat(parts).view(entry.shape)
            yield parameter, whole

    def _stretch(
        self, entry: _Known, place: tuple[Layout, Partition, Piece] | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """This rank's exact values of a parameter that is cut over the ranks, flat."""
        if place is not None:
            layout, partition, piece = place
            with layout.resident(partition):
                return _lasting(partition, _values(partition, piece))
        if entry.stepped or entry.layout is None:  # none of it lies on this rank
            return torch.empty(0, dtype=dtype)
        return entry.layout.stretch(entry.parameter)[0]

    # -- in ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """Fill masters, parameters, buffers and optimizer states; reads what this rank needs."""
        for entry in self.entries:
            if entry.replicated:
                entry.parameter.data.copy_(read(entry.group, entry.name, "parameter", Region.whole(entry.shape)))
            elif not entry.stepped and entry.layout is not None:
                values, start = entry.layout.stretch(entry.parameter)
                _fill(read, entry.group, entry.name, "parameter", entry.shape, start, values)
        for index, model in enumerate(self.models):
            for name, buffer in named_buffers(model):
                buffer.copy_(read(group_name("model", index), name, "buffer", Region.whole(buffer.shape)))
        for index, (unit, layout) in enumerate(zip(self.units, layouts, strict=True)):
            self._load_optimizer(group_name("optimizer", index), unit, layout, read)
            for partition in unit.layout.partitions:
                with unit.layout.resident(partition, write=True):
                    for piece in partition.pieces:
                        entry = self.homes[id(piece.parameter)][0]
                        values = _values(partition, piece)
                        _fill(read, entry.group, entry.name, "parameter", entry.shape, piece.start, values)
                    unit.layout.master_changed(partition)
            unit.layout.masters_changed()

    def _load_optimizer(self, group: str, unit: Unit, layout: OptimizerLayout, read: ReadShard) -> None:
        """Through the optimizer's own load_state_dict, which knows where each field belongs (a fused step: the device)."""
        scalar_kinds = _scalar_kinds(layout, self._shapes(unit))

        def scalars(piece: Piece) -> dict[str, Any]:
            name = self.names[id(piece.parameter)]
            found = {k: read(group, name, k, Region((), ())) for k in layout.fields.get(name, {}) if k in scalar_kinds}
            return {**{k: v.clone() for k, v in found.items()}, **layout.values.get(name, {})}

        def kind_of_state(run: Run, piece: Piece) -> str:
            plain = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in scalars(piece).items()}
            return repr((sorted(layout.fields.get(self.names[id(piece.parameter)], {})), sorted(plain.items())))

        unit.partitioned.forget_state()
        unit.partitioned.cut(kind_of_state)
        position = {id(p): n for n, p in enumerate(p for g in unit.own.param_groups for p in g["params"])}
        state: dict[int, dict[str, Any]] = {}
        for run in unit.partitioned.runs:
            if len({kind_of_state(run, piece) for piece in run.pieces}) > 1:
                raise CheckpointError(
                    "parameters whose optimizer states lie together on NVMe took part in different numbers of steps",
                    hint="--set engine.deepspeed.zero_optimization.offload_optimizer.device=cpu",
                )
            entry = scalars(run.pieces[0])
            for kind in layout.fields.get(self.names[id(run.pieces[0].parameter)], {}):
                if kind not in scalar_kinds:
                    entry[kind] = torch.zeros(run.length, dtype=run.parameter.dtype, device=run.parameter.device)
                    self._fill_run(read, group, kind, run, entry[kind])
            if entry:
                state[position[id(run.parameter)]] = entry
        groups = []
        for saved, current in zip(layout.groups, unit.own.param_groups, strict=True):
            groups.append({**saved, "params": [position[id(p)] for p in current["params"]]})
        unit.own.load_state_dict({"state": state, "param_groups": groups})
        unit.partitioned.show_swapped_state()

    def _fill_run(self, read: ReadShard, group: str, kind: str, run: Run, values: torch.Tensor) -> None:
        for piece in run.pieces:
            begin = piece.offset - run.offset
            stretch = values[begin : begin + piece.length]
            _fill(read, group, self.names[id(piece.parameter)], kind, piece.shape, piece.start, stretch)


def _states(unit: Unit, partition: Partition | None = None) -> Iterator[tuple[Run, Piece, dict[str, Any]]]:
    """The pieces whose parameters have optimizer state, in order; those of one partition, or all."""
    for run in unit.partitioned.runs:
        state = unit.own.state.get(run.parameter)
        if state and partition in (None, run.partition):
            for piece in run.pieces:
                yield run, piece, state


def _values(partition: Partition, piece: Piece) -> torch.Tensor:
    return partition.master.detach()[piece.offset : piece.offset + piece.length]


def _lasting(partition: Partition, values: torch.Tensor) -> torch.Tensor:
    """Values that stay when a partition on NVMe gives its memory back."""
    return values.clone() if partition.swapped else values


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _elementwise(value: torch.Tensor, run: Run) -> bool:
    """Whether a field has one value an element; on NVMe it may be empty now."""
    return value.dim() == 1 and (value.numel() == run.length or run.partition.swapped)


def _scalar_kinds(layout: OptimizerLayout, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Fields that are one number a parameter; for parameters that are scalars themselves, the others tell."""
    return {"step"} | {
        kind
        for name, fields in layout.fields.items()
        for kind, shape in fields.items()
        if shape == () and shapes.get(name, ()) != ()
    }


def _boxes(
    group: str, name: str, kind: str, shape: tuple[int, ...], start: int, values: torch.Tensor
) -> Iterator[Shard]:
    """A stretch of a tensor as shards."""
    done = 0
    for region in flat_regions(shape, start, values.numel()):
        part = values[done : done + region.numel]
        yield Shard(group, name, kind, shape, region, part.view(region.shape))
        done += region.numel


def _fill(
    read: ReadShard, group: str, name: str, kind: str, shape: tuple[int, ...], start: int, values: torch.Tensor
) -> None:
    """Read a stretch of a tensor."""
    done = 0
    for region in flat_regions(shape, start, values.numel()):
        values[done : done + region.numel].copy_(read(group, name, kind, region).reshape(-1))
        done += region.numel
