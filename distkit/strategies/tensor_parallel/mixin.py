"""Tensor parallelism around any strategy that trains over the data-parallel ranks.

Layers are split before the strategy sees the model, so it wraps a smaller one; what it says of its state is put in its
place in the whole. A strategy's own part is to use the ranks of ``world.data`` and no others, and to give the norm over a
tensor group (:meth:`distkit.strategies.base.Strategy.clip_grad_norm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from distkit.errors import ConfigError, DistkitError, UsageError
from distkit.state import OptimizerLayout, ReadShard, Shard, clean_name
from distkit.strategies.base import Strategy
from distkit.strategies.modules import group_name, is_split, named_buffers
from distkit.strategies.tensor_parallel.apply import FORWARDS, Forwards, PlacedParameter, apply_layout
from distkit.strategies.tensor_parallel.detect import detect, random_twin
from distkit.strategies.tensor_parallel.example import find_run
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.layout import Layout
from distkit.strategies.tensor_parallel.report import describe, layout_from_json, layout_to_json
from distkit.strategies.tensor_parallel.sharded import show_local_parts, whole
from distkit.strategies.tensor_parallel.state import Placement
from distkit.strategies.tensor_parallel.wishes import plan_of, wishes_of

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["TensorParallelMixin", "with_tensor_parallelism"]


def with_tensor_parallelism(strategy: type[Strategy], mixin: type[TensorParallelMixin] | None = None) -> type[Strategy]:
    """The same strategy, over models whose layers are split."""
    return type(f"TensorParallel{strategy.__name__}", (mixin or TensorParallelMixin, strategy), {})


class TensorParallelMixin(Strategy):
    """See this module."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.group = TensorGroup(0, 1, None)
        self.placement = Placement(0)
        self._layouts: list[tuple[nn.Module, Layout, dict[str, PlacedParameter]]] = []
        self._report: list[str] = []

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`."""
        world = super().connect(environment)  # type: ignore[safe-super]
        self.group = TensorGroup(
            world.tensor.rank,
            world.tensor.size,
            world.collectives.tensor_group,
            sequence=self.config.parallel.sequence,
        )
        self.placement = Placement(world.tensor.rank)
        return world

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`; models that nothing trains stay whole."""
        for index, model in enumerate(models, start=len(self.models)):
            if any(p.requires_grad for p in model.parameters()):
                self._split(model, group_name("model", index))
        prepared = super().prepare(models, optimizers, precision)  # type: ignore[safe-super]
        for model, _, places in self._layouts:  # engines may have put other parameters in their place
            own = dict(model.named_parameters(remove_duplicate=False))
            for name, parameter in own.items():
                if clean_name(name) in places:
                    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            for module in self.modules_with_hooked_arguments(model):
                show_local_parts(module)
        return prepared

    def _split(self, model: nn.Module, group: str) -> None:
        assert self.world is not None
        if any(is_split(p) for p in model.parameters()):
            raise UsageError(
                f"{type(model).__name__} is split over a tensor group already: its parameters are marked tensor_model_parallel",
                hint="--strategy megatron-zero2   takes models of megatron-core's layers",
            )
        for tensor in [*model.parameters(), *model.buffers()]:  # rank 0's values, while all ranks have the same shapes
            tensor.data.copy_(self.world.broadcast(tensor.data.to(self.world.device)))
        layout = self._agreed_layout(model)
        self._report += describe(model, layout)
        if self.sees_outputs:
            model.register_forward_hook(_give_out_whole)
        places = apply_layout(model, layout, self.group, self._forwards(layout))
        self.placement.add(group, places)
        self._layouts.append((model, layout, places))

    def _forwards(self, layout: Layout) -> Forwards:
        """What computes split layers."""
        return FORWARDS

    def _agreed_layout(self, model: nn.Module) -> Layout:
        """Rank 0 looks, and what it finds, or why it can't, is the same on all ranks."""
        assert self.world is not None
        found: dict[str, Any] = {}
        if self.world.is_main:
            try:
                found = {"layout": layout_to_json(self._layout_of(model))}
            except DistkitError as error:
                found = {"problem": error.message, "hint": error.hint, "config": isinstance(error, ConfigError)}
        found = self.world.broadcast_object(found)
        if "problem" in found:
            raise (ConfigError if found["config"] else UsageError)(found["problem"], hint=found["hint"])
        return layout_from_json(found["layout"])

    def _layout_of(self, model: nn.Module) -> Layout:
        chosen = self.config.parallel.tensor_layout
        wishes = wishes_of(model, chosen if isinstance(chosen, dict) else {})
        run = find_run(model, random_twin(model), self.example_loader)
        return detect(model, run, self.group.size, wishes, plan_of(model))

    def init_model(self) -> AbstractContextManager[None]:
        """See :class:`Strategy`; layers can be split only where they are whole, if on the host."""
        return nullcontext()

    def model_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """See :class:`Strategy`; one whole tensor at a time, on all ranks of a group."""
        own = self.unwrap(model)
        places = self._places_of(own)
        named: list[tuple[str, nn.Parameter]] = []
        place_by_id: dict[int, PlacedParameter] = {}
        values: dict[int, torch.Tensor] = {}
        for parameter, value in self._parts(model):
            if not named:  # only now: an engine shows other parameters while it gives them out
                named = [(clean_name(n), p) for n, p in own.named_parameters(remove_duplicate=False)]
                place_by_id = {id(p): places[name] for name, p in named if name in places}
            place = place_by_id.get(id(parameter))
            full = value if place is None else self._put_together(value, place)
            if self.is_main:
                values[id(parameter)] = full.detach().cpu().clone()
        if not self.is_main:
            return {}
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in named_buffers(own)}
        return {**{name: values[id(parameter)] for name, parameter in named}, **buffers}

    def _parts(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with what this rank's tensor place holds of it."""
        masters = super().masters(model)
        if masters is not None:
            yield from masters
            return
        with super().full_parameters(model):  # type: ignore[safe-super]
            yield from ((parameter, parameter.data) for parameter in self.unwrap(model).parameters())

    def _places_of(self, own: nn.Module) -> dict[str, PlacedParameter]:
        return next((places for split, _, places in self._layouts if split is own), {})

    def whole_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :class:`Strategy`."""
        return whole(tensor)

    def notes(self) -> list[str]:
        """See :class:`Strategy`."""
        return [*super().notes(), *self._report]

    # -- state ------------------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Shard]:
        """See :class:`Strategy`."""
        return self.placement.whole_shards(super().shards())  # type: ignore[safe-super]

    def optimizer_layouts(self) -> list[OptimizerLayout]:
        """See :class:`Strategy`."""
        return self.placement.whole_layouts(super().optimizer_layouts())  # type: ignore[safe-super]

    def load_shards(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """See :class:`Strategy`."""
        super().load_shards(self.placement.part_reader(read), self.placement.part_layouts(layouts))  # type: ignore[safe-super]

    def global_shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """See :class:`Strategy`."""
        index = next(i for i, own in enumerate(self.models) if own is model)
        return self.placement.whole_shapes(group_name("model", index), super().global_shapes(model))

    def full_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :class:`Strategy`."""
        return self._full_parameters(model)

    @contextmanager
    def _full_parameters(self, model: nn.Module) -> Iterator[None]:
        with super().full_parameters(model):  # type: ignore[safe-super]
            own = self.unwrap(model)
            places = self._places_of(own)
            parts: dict[int, tuple[nn.Parameter, PlacedParameter, torch.Tensor]] = {}
            for name, parameter in own.named_parameters(remove_duplicate=False):
                place = places.get(clean_name(name))
                if place is not None and id(parameter) not in parts:
                    parts[id(parameter)] = (parameter, place, parameter.data)
            for parameter, place, part in parts.values():
                parameter.data = self._put_together(part, place)
            try:
                yield
            finally:
                for parameter, place, part in parts.values():
                    part.copy_(_own_part(parameter.data, place, self.group.rank))
                    parameter.data = part

    def _put_together(self, part: torch.Tensor, place: PlacedParameter) -> torch.Tensor:
        full = part.new_empty(place.shape)
        for runs, values in zip(place.runs, self.group.all_gather(part), strict=True):
            position = 0
            for start, length in runs:
                full.narrow(place.dim, start, length).copy_(values.narrow(place.dim, position, length))
                position += length
        return full


def _give_out_whole(module: nn.Module, inputs: Any, output: Any) -> Any:
    return tree_map(lambda value: whole(value) if isinstance(value, torch.Tensor) else value, output)


def _own_part(whole: torch.Tensor, place: PlacedParameter, rank: int) -> torch.Tensor:
    return torch.cat([whole.narrow(place.dim, start, length) for start, length in place.runs[rank]], place.dim)
