"""Tensor parallelism whose split layers are megatron-core's; also takes models that are made of its layers."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distkit.errors import ConfigError
from distkit.forward import around_forward
from distkit.strategies.tensor_parallel.apply import Forwards
from distkit.strategies.tensor_parallel.layout import Layout
from distkit.strategies.tensor_parallel.megatron import Megatron, before_devices
from distkit.strategies.tensor_parallel.mixin import TensorParallelMixin

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["MegatronMixin"]


class MegatronMixin(TensorParallelMixin):
    """See this module."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.megatron: Megatron | None = None

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`."""
        before_devices(self.config)
        world = super().connect(environment)
        self.megatron = Megatron(world, self.config)
        return world

    def notes(self) -> list[str]:
        """See :class:`Strategy`."""
        return [f"megatron-core {version('megatron-core')} computes the layers that are split", *super().notes()]

    def _forwards(self, layout: Layout) -> Forwards:
        from distkit.strategies.tensor_parallel.megatron_layers import megatron_forwards

        assert self.megatron is not None
        return megatron_forwards(layout, self.megatron.settings)

    def _split(self, model: nn.Module, group: str) -> None:
        """Models of megatron-core's layers are split already; and there is nothing to split over one rank."""
        from distkit.strategies.tensor_parallel.megatron_models import is_megatron_model

        if is_megatron_model(model):
            self._take_over(model, group)
        elif self.group.size > 1:
            super()._split(model, group)

    def _take_over(self, model: nn.Module, group: str) -> None:
        from distkit.strategies.tensor_parallel.megatron_models import check_megatron_model, places_of

        assert self.world is not None
        if self.config.memory.activation_checkpointing != "none":
            raise ConfigError(
                f"memory.activation_checkpointing was set to {self.config.memory.activation_checkpointing!r}, and "
                f"{type(model).__name__} draws from generators of megatron-core's that it would not set back",
                hint='--set memory.activation_checkpointing=none   and recompute_granularity="full" in the model\'s configuration',
            )
        if self.config.parallel.sequence:
            raise ConfigError(
                f"parallel.sequence was set, and {type(model).__name__} is made of megatron-core's layers, between which nothing "
                "is known of its tokens",
                hint="--set parallel.sequence=false",
            )
        check_megatron_model(model, self.group.size)
        places = places_of(model, self.group.size)
        parts = {id(model.get_parameter(name)) for name in places}
        for tensor in [*model.parameters(), *model.buffers()]:
            axis = "data" if id(tensor) in parts else "world"
            tensor.data.copy_(self.world.broadcast(tensor.data.to(self.world.device), axis=axis))
        around_forward(model, partial(_in_its_own_dtype, self.world.device.type))
        self.placement.add(group, places)
        self._layouts.append((model, Layout(self.group.size), places))
        total = sum(p.numel() for p in model.parameters())
        share = sum(p.numel() for p in model.parameters() if id(p) in parts) / max(total, 1)
        self._report.append(
            f"tensor parallel {self.group.size}: {type(model).__name__} is made of megatron-core's layers, {share:.0%} of this "
            "rank's parameters are parts"
        )

    def rng_states(self) -> dict[str, torch.Tensor]:
        """See :class:`Strategy`."""
        return {} if self.megatron is None else self.megatron.rng_states()

    def restore_rng_states(self, states: dict[str, torch.Tensor]) -> None:
        """See :class:`Strategy`."""
        if self.megatron is not None:
            self.megatron.restore_rng_states(states)

    def close(self) -> None:
        """See :class:`Strategy`."""
        if self.megatron is not None:
            self.megatron.close()
            self.megatron = None
        super().close()  # type: ignore[safe-super]


def _in_its_own_dtype(device: str, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """megatron-core's models compute in the dtype of their parameters, which DeepSpeed casts; autocast would cast beside it."""
    with torch.autocast(device, enabled=False):
        return forward(*args, **kwargs)
