"""State of the zero strategies as shards in the model's own names, without gathering anything.

Parameters are stored from the fp32 masters, optimizer fields from the state of the runs that hold their elements. So a
checkpoint looks as if one process had written it, and any strategy at any world size loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distkit.checkpoint.codec import decode, encode
from distkit.checkpoint.replicated import own_share
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, ReadShard, Region, Shard, clean_name, flat_regions
from distkit.strategies.modules import group_name, named_buffers, parameter_names
from distkit.strategies.zero_optimizer import Run
from distkit.strategies.zero_partitions import Layout, Piece

if TYPE_CHECKING:
    from distkit.strategies.zero_units import Unit
    from distkit.world import World

__all__ = ["ZeroState"]


@dataclass(frozen=True)
class _Place:
    """One stretch of a parameter on this rank: its master weights, or its frozen values."""

    start: int
    values: torch.Tensor


@dataclass
class _Known:
    """A parameter and all that is known of it."""

    group: str
    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter
    places: list[_Place] = field(default_factory=list)
    replicated: bool = False
    """Whether no partition holds it: every rank has all of it, and there is nothing else."""
    readable: bool = False
    """Whether the parameter itself is whole on every rank and exact."""
    empty: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """No elements, of the stored dtype."""


class ZeroState:
    """Reads and writes the state of all units.

    Args:
        models: The scripts' own modules, in the order of preparation.
        units: Engines with their models and optimizers, in the order of the optimizers.
        world: For field names that only some ranks know, and for the share of what all ranks hold.
    """

    def __init__(self, models: Sequence[nn.Module], units: Sequence[Unit], world: World) -> None:
        self.models, self.units, self.world = models, units, world

    # -- out --------------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """This rank's share, each element of the state on exactly one rank."""
        known = list(self._parameters())
        for entry in known:
            for place in entry.places:
                yield from _boxes(entry.group, entry.name, "parameter", entry.shape, place.start, place.values)
        yield from self._shared(known)
        for index, unit in enumerate(self.units):
            yield from self._optimizer_shards(group_name("optimizer", index), unit)

    def layouts(self) -> list[OptimizerLayout]:
        """Groups, fields and values by parameter name; a collective, since each rank has state of its pieces only."""
        mine = []
        for unit in self.units:
            names = self._names()
            fields: dict[str, list[str]] = {}
            values: dict[str, dict[str, Any]] = {}
            for run, piece, state in _states(unit):
                name = names[id(piece.parameter)]
                fields[name] = [k if _elementwise(v, run) else f"{k}=" for k, v in state.items() if _is_tensor(v)]
                values[name] = {k: v for k, v in state.items() if not _is_tensor(v)}
            mine.append({"fields": fields, "values": encode(values, {}, "optimizer values")})
        everyone = self.world.all_gather_objects(mine)
        return [self._layout(unit, [rank[index] for rank in everyone]) for index, unit in enumerate(self.units)]

    def _layout(self, unit: Unit, parts: Iterable[Mapping[str, Any]]) -> OptimizerLayout:
        shapes = {self._names()[id(p)]: unit.layout.global_shape(p) for p in unit.parameters()}
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

    def _optimizer_shards(self, group: str, unit: Unit) -> Iterator[Shard]:
        names = self._names()
        for run, piece, state in _states(unit):
            name, shape = names[id(piece.parameter)], piece.shape
            begin = piece.offset - run.offset
            for kind, value in state.items():
                if not _is_tensor(value):
                    continue
                if _elementwise(value, run):
                    stretch = value.detach().view(-1)[begin : begin + piece.length]
                    yield from _boxes(group, name, kind, shape, piece.start, stretch)
                elif value.dim():
                    raise CheckpointError(
                        f"{type(unit.own).__name__} keeps {kind} of the shape {tuple(value.shape)} for {run.length} "
                        "elements, which can't be cut by parameters",
                        hint="--strategy ddp   stores optimizers of any kind",
                    )
                elif piece.start == 0:
                    yield Shard(group, name, kind, (), Region((), ()), value.detach())

    def _shared(self, known: Sequence[_Known]) -> Iterator[Shard]:
        """What every rank holds whole: buffers, and parameters outside of all partitions."""
        tensors = [(e.group, e.name, "parameter", e.parameter.data) for e in known if e.replicated]
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

        One parameter at a time travels, so no rank needs room for more than that besides rank 0's result.
        """
        group = group_name("model", next(i for i, known in enumerate(self.models) if known is model))
        values: dict[int, torch.Tensor] = {}
        for entry in self._parameters():
            if entry.group != group:
                continue
            whole = entry.parameter.data if entry.readable else self._gather(entry)
            if self.world.is_main:
                values[id(entry.parameter)] = whole.detach().cpu().clone()
        if not self.world.is_main:
            return {}
        parameters = {clean_name(n): values[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in named_buffers(model)}
        return {**parameters, **buffers}

    def _gather(self, entry: _Known) -> torch.Tensor:
        mine = torch.cat([place.values for place in entry.places]) if entry.places else entry.empty
        parts = self.world.all_gather(mine.to(self.world.device), axis="data")
        return torch.cat(parts).view(entry.shape)

    # -- in ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """Fill masters, parameters, buffers and optimizer states; reads what this rank needs."""
        for entry in self._parameters():
            if entry.replicated:
                entry.parameter.data.copy_(read(entry.group, entry.name, "parameter", Region.whole(entry.shape)))
            for place in entry.places:
                _fill(read, entry.group, entry.name, "parameter", entry.shape, place.start, place.values)
        for index, model in enumerate(self.models):
            for name, buffer in named_buffers(model):
                buffer.copy_(read(group_name("model", index), name, "buffer", Region.whole(buffer.shape)))
        for index, (unit, layout) in enumerate(zip(self.units, layouts, strict=True)):
            self._load_optimizer(group_name("optimizer", index), unit, layout, read)
            unit.layout.masters_changed()

    def _load_optimizer(self, group: str, unit: Unit, layout: OptimizerLayout, read: ReadShard) -> None:
        """Through the optimizer's own load_state_dict, which knows where each field belongs (a fused step: the device)."""
        names = self._names()
        scalar_kinds = _scalar_kinds(layout, {names[id(p)]: unit.layout.global_shape(p) for p in unit.stepped})

        def scalars(piece: Piece) -> dict[str, Any]:
            name = names[id(piece.parameter)]
            found = {k: read(group, name, k, Region((), ())) for k in layout.fields.get(name, {}) if k in scalar_kinds}
            return {**{k: v.clone() for k, v in found.items()}, **layout.values.get(name, {})}

        def kind_of_state(run: Run, piece: Piece) -> str:
            plain = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in scalars(piece).items()}
            return repr((sorted(layout.fields.get(names[id(piece.parameter)], {})), sorted(plain.items())))

        unit.own.state.clear()
        unit.partitioned.cut(kind_of_state)
        position = {id(p): n for n, p in enumerate(p for g in unit.own.param_groups for p in g["params"])}
        state: dict[int, dict[str, Any]] = {}
        for run in unit.partitioned.runs:
            entry = scalars(run.pieces[0])
            for kind in layout.fields.get(names[id(run.pieces[0].parameter)], {}):
                if kind not in scalar_kinds:
                    entry[kind] = torch.zeros_like(run.parameter.data)
                    self._fill_run(read, group, kind, unit, run, entry[kind])
            if entry:
                state[position[id(run.parameter)]] = entry
        groups = []
        for saved, current in zip(layout.groups, unit.own.param_groups, strict=True):
            groups.append({**saved, "params": [position[id(p)] for p in current["params"]]})
        unit.own.load_state_dict({"state": state, "param_groups": groups})

    def _fill_run(self, read: ReadShard, group: str, kind: str, unit: Unit, run: Run, values: torch.Tensor) -> None:
        names = self._names()
        for piece in run.pieces:
            begin = piece.offset - run.offset
            name, shape = names[id(piece.parameter)], piece.shape
            _fill(read, group, name, kind, shape, piece.start, values[begin : begin + piece.length])

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _names(self) -> dict[int, str]:
        return parameter_names(self.models)

    def _parameters(self) -> Iterator[_Known]:
        """Every parameter of every model, with this rank's stretches of it."""
        places: dict[int, list[_Place]] = {}
        masters: dict[int, torch.Tensor] = {}
        layouts: dict[int, Layout] = {}
        for unit in self.units:
            for partition in unit.layout.partitions:
                for piece in partition.pieces:
                    values = partition.master.detach()[piece.offset : piece.offset + piece.length]
                    places.setdefault(id(piece.parameter), []).append(_Place(piece.start, values))
            layouts.update({id(p): unit.layout for p in unit.parameters()})
            masters.update({id(p): unit.layout.partitions[0].master for p in unit.stepped})
        for index, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                layout, master = layouts.get(id(parameter)), masters.get(id(parameter))
                shape = layout.global_shape(parameter) if layout else tuple(parameter.shape)
                entry = _Known(group_name("model", index), clean_name(name), shape, parameter)
                if layout is not None and master is not None:
                    entry.places = places.get(id(parameter), [])
                    entry.readable = layout.keeps_whole and parameter.dtype == master.dtype
                    entry.empty = master.detach()[:0]
                elif layout is None or layout.keeps_whole:
                    entry.replicated = entry.readable = True
                else:
                    values, start = layout.stretch(parameter)
                    entry.places = [_Place(start, values)]
                yield entry


def _states(unit: Unit) -> Iterator[tuple[Run, Piece, dict[str, Any]]]:
    """The pieces whose parameters have optimizer state, in order."""
    for run in unit.partitioned.runs:
        state = unit.own.state.get(run.parameter)
        if state:
            for piece in run.pieces:
                yield run, piece, state


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _elementwise(value: torch.Tensor, run: Run) -> bool:
    return value.dim() == 1 and value.numel() == run.length


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
