"""One process, one device: a strategy like the others, so that nothing else asks whether a run is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distkit.strategies.base import Capabilities
from distkit.strategies.modules import compile_in_place, dress
from distkit.strategies.replicated import ReplicatedStrategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distkit.precision import Precision
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["SingleStrategy"]


class SingleStrategy(ReplicatedStrategy):
    """The model on one device, untouched."""

    name = "single"
    capabilities = Capabilities(
        summary="one process on one device",
        processes="one",
        best_for="debugging, and the reference that every other strategy is compared with",
    )

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`; joins no process group."""
        from distkit.world.collectives import Alone
        from distkit.world.device import choose_device
        from distkit.world.world import World

        self.check(self.config, processes=environment.size)
        device = choose_device(self.config.device, environment.local_rank, environment.size)
        self.world = World(environment, device, Alone())
        return self.world

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`."""
        for model in models:
            compile_in_place(dress(model.to(precision.device), self.config, precision), self.config)
        self.keep(models, optimizers, precision)
        return list(models), list(optimizers)

    def close(self) -> None:
        """Nothing to leave."""
