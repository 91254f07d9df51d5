"""Buffers that training changes on each rank apart, made rank 0's where they are read.

Under ddp buffers like BatchNorm's statistics are rank 0's: it sends them round before every forward. Engines that don't do
that get the same values with less traffic: they are sent round in the first forward of an evaluation, which all ranks run
as they run every forward, and before state is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from distkit.strategies.modules import named_buffers

if TYPE_CHECKING:
    from torch import nn

    from distkit.world import World

__all__ = ["BufferWatch"]


class BufferWatch:
    """Knows which models' buffers may differ between ranks.

    Args:
        world: All ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stale: set[int] = set()

    def watch(self, model: nn.Module) -> None:
        """Begin with rank 0's buffers, and note from now on when they change. Called by all ranks.

        Args:
            model: The script's own module, on its device.
        """
        for buffer in model.buffers():
            buffer.data.copy_(self._world.broadcast(buffer.data))
        if not any(True for _ in named_buffers(model)):
            return

        def before_forward(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self._stale.add(id(module))
            elif not module.training:
                self.refresh([module])

        model.register_forward_pre_hook(torch.compiler.disable(before_forward))

    def refresh(self, models: Iterable[nn.Module]) -> None:
        """Rank 0's values everywhere, where they may differ. Called by all ranks."""
        for model in models:
            if id(model) in self._stale:
                self._stale.discard(id(model))
                for _, buffer in named_buffers(model):
                    buffer.data.copy_(self._world.broadcast(buffer.data))

    def restored(self) -> None:
        """Buffers were read from a checkpoint, the same on all ranks."""
        self._stale.clear()
