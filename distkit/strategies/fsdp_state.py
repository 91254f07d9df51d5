"""State under fully_shard as shards in the model's own names: each rank gives and takes its own region of every DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from distkit.checkpoint.replicated import own_share
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, ReadShard, Region, Shard, clean_name
from distkit.strategies.fsdp_engine import local
from distkit.strategies.modules import group_name, named_buffers, parameter_names

if TYPE_CHECKING:
    from distkit.world import World

__all__ = ["FsdpState", "like_parameter", "region_of", "whole_of", "whole_on_main"]

Item = tuple[str, str, str, torch.Tensor]
"""Group, name, kind and value."""


def region_of(tensor: torch.Tensor) -> Region:
    """Which box of the whole tensor this rank holds; an empty one where there are more ranks than rows."""
    if not isinstance(tensor, DTensor):
        return Region.whole(tensor.shape)
    return _part(tensor.shape, tensor.device_mesh, tensor.placements, _place(tensor))[0]


def _place(tensor: DTensor) -> tuple[int, ...]:
    return tuple(tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim)


@lru_cache(maxsize=4096)  # a model repeats few shapes; equal meshes of two runs in one process may differ in the place
def _part(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], place: tuple[int, ...]
) -> tuple[Region, tuple[int, int]]:
    """This rank's box of a DTensor; and among the ranks that hold the same box: which this one is, and how many."""
    sizes, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    mine, count = 0, 1
    for at, size, placement in zip(place, mesh.shape, placements, strict=True):
        if isinstance(placement, Replicate):
            mine, count = mine * size + at, count * size
    return Region(tuple(int(n) for n in offset), tuple(int(n) for n in sizes)), (mine, count)


def like_parameter(values: torch.Tensor, parameter: DTensor) -> DTensor:
    """This rank's part of something of the parameter's shape, laid out like the parameter."""
    return DTensor.from_local(
        values.to(local(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole_on_main(tensor: torch.Tensor, world: World) -> torch.Tensor | None:
    """The whole tensor on the host of rank 0, None elsewhere; called by all, and one tensor's memory on each."""
    found = whole_of(tensor, world)
    return found.detach().cpu().clone() if world.is_main else None


def whole_of(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The whole tensor on every rank that it is split over; called by all."""
    if not isinstance(tensor, DTensor):
        return tensor
    on_device = DTensor.from_local(
        local(tensor).to(world.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return on_device.full_tensor()


class FsdpState:
    """Reads and writes the state of sharded models and their optimizers.

    Args:
        models: As prepared, resharded.
        optimizers: As prepared.
        world: All ranks.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], world: World) -> None:
        self.models, self.optimizers, self.world = models, optimizers, world
        self.names = parameter_names(models)

    # -- out --------------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """This rank's share, each element of the state on exactly one rank."""
        split: dict[tuple[int, int], list[Shard]] = {}
        for holder, shard in self._held():
            split.setdefault(holder, []).append(shard)
        for (mine, holders), shards in split.items():
            sizes = [((s.group, s.name, s.kind), s.tensor.nbytes) for s in shards]
            chosen = own_share(sizes, mine, holders)
            yield from (s for s in shards if (s.group, s.name, s.kind) in chosen)

    @torch.no_grad()
    def _held(self) -> list[tuple[tuple[int, int], Shard]]:
        """All that lies on this rank, with who else has it: training waits for this list at each checkpoint."""
        found = []
        for group, name, kind, tensor in self._items():
            if isinstance(tensor, DTensor):
                region, holder = _part(tensor.shape, tensor.device_mesh, tensor.placements, _place(tensor))
                values = tensor.to_local()
            else:
                region, holder = Region.whole(tensor.shape), (self.world.data.rank, self.world.data.size)
                values = tensor
            found.append((holder, Shard(group, name, kind, tuple(tensor.shape), region, values.detach())))
        return found

    def layouts(self) -> list[OptimizerLayout]:
        """Groups, fields and values by parameter name; the same on all ranks."""
        layouts = []
        for optimizer in self.optimizers:
            groups = [
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "params": [self.names[id(p)] for p in group["params"]],
                }
                for group in optimizer.param_groups
            ]
            fields: dict[str, dict[str, tuple[int, ...]]] = {}
            values: dict[str, dict[str, Any]] = {}
            for parameter, state in optimizer.state.items():
                name = self.names[id(parameter)]
                fields[name] = {
                    k: tuple(_field(optimizer, parameter, k, v).shape)
                    for k, v in state.items()
                    if isinstance(v, torch.Tensor)
                }
                values[name] = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
            layouts.append(OptimizerLayout(groups, fields, values))
        return layouts

    def _items(self) -> Iterator[Item]:
        for index, model in enumerate(self.models):
            group = group_name("model", index)
            for name, tensor in model.named_parameters():
                yield group, clean_name(name), "parameter", tensor
            for name, buffer in named_buffers(model):
                yield group, name, "buffer", buffer
        for index, optimizer in enumerate(self.optimizers):
            group = group_name("optimizer", index)
            for parameter, state in optimizer.state.items():
                for field, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield group, self.names[id(parameter)], field, _field(optimizer, parameter, field, value)

    def gather_model(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The whole state of a model on the host of rank 0, empty elsewhere; one parameter at a time travels."""
        values = {id(p): whole_on_main(p.detach(), self.world) for p in model.parameters()}
        if not self.world.is_main:
            return {}
        found = {clean_name(n): values[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in named_buffers(model)}
        return {**{n: t for n, t in found.items() if t is not None}, **buffers}

    # -- in ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """Fill parameters, buffers and optimizer states; reads this rank's regions only."""
        for index, model in enumerate(self.models):
            group = group_name("model", index)
            for name, parameter in model.named_parameters():
                local(parameter).copy_(read(group, clean_name(name), "parameter", region_of(parameter)))
            for name, buffer in named_buffers(model):
                buffer.copy_(read(group, name, "buffer", Region.whole(buffer.shape)))
        for index, (optimizer, layout) in enumerate(zip(self.optimizers, layouts, strict=True)):
            self._load_optimizer(group_name("optimizer", index), optimizer, layout, read)

    def _load_optimizer(self, group: str, optimizer: Optimizer, layout: OptimizerLayout, read: ReadShard) -> None:
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        for saved, current in zip(layout.groups, optimizer.param_groups, strict=True):
            start = sum(len(g["params"]) for g in groups)
            for place, parameter in enumerate(current["params"], start=start):
                name = self.names[id(parameter)]
                fields = layout.fields.get(name, {})
                found = {kind: _read_field(read, group, name, kind, shape, parameter) for kind, shape in fields.items()}
                found.update(layout.values.get(name, {}))
                if found:
                    state[place] = found
            groups.append({**saved, "params": list(range(start, start + len(current["params"])))})
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _read_field(
    read: ReadShard, group: str, name: str, kind: str, shape: tuple[int, ...], parameter: torch.Tensor
) -> torch.Tensor:
    """A field as the optimizer keeps it: of the parameter's shape it's split like the parameter, else on every rank."""
    if isinstance(parameter, DTensor) and shape == tuple(parameter.shape):
        return like_parameter(read(group, name, kind, region_of(parameter)), parameter)
    if not isinstance(parameter, DTensor) or prod(shape) == 1:
        return read(group, name, kind, Region.whole(shape))
    values = read(group, name, kind, Region.whole(shape)).to(local(parameter).device)
    mesh = parameter.device_mesh
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _field(optimizer: Optimizer, parameter: torch.Tensor, kind: str, value: torch.Tensor) -> torch.Tensor:
    """A field of an optimizer's state, as a DTensor where it is split over ranks."""
    if isinstance(value, DTensor):
        if any(isinstance(placement, Partial) for placement in value.placements):
            value = value.redistribute(
                placements=[Replicate() if isinstance(p, Partial) else p for p in value.placements]
            )
        return value
    if not isinstance(parameter, DTensor) or value.numel() == 1:
        return value
    raise CheckpointError(
        f"{type(optimizer).__name__} keeps {kind} as a plain tensor of the shape {tuple(value.shape)} for a parameter that "
        "is split over the ranks: which part of what it is can't be known",
        hint="--strategy ddp   stores optimizers of any kind",
    )
