"""torch's wrappers, with the attributes of the module inside in reach.

So a script that reads ``model.config`` or calls ``model.generate`` runs unchanged under every strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["OpenDDP", "OpenDataParallel"]


class OpenDDP(DistributedDataParallel):
    """DistributedDataParallel that passes unknown attributes on to the module inside."""

    def settle_buckets(self) -> None:
        """Bring the gradient buckets into their final layout before the first step; called by all ranks.

        DDP lays its buckets out anew after its first backward, in the order in which gradients came
        (torch/csrc/distributed/c10d/reducer.cpp, `rebuild_buckets`). Where in a bucket a gradient lies decides in which
        order a ring sums the ranks, so a resumed run would round its first step otherwise than the run that was not
        interrupted. Here a backward of zeros goes first: gradients come in reverse order of registration, as they
        nearly do in training, and the layout depends on the model alone.
        """
        inner = self.module
        self._modules["module"] = _Zero(inner)
        self.require_forward_param_sync = False  # the stand-in has no buffers to broadcast
        try:
            self().backward()
        finally:
            self._modules["module"] = inner
            self.require_forward_param_sync = True
        for parameter in inner.parameters():
            parameter.grad = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class OpenDataParallel(nn.DataParallel[Any]):
    """DataParallel that passes unknown attributes on to the module inside."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class _Zero(nn.Module):
    """Gives a zero that depends on every trained parameter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._trained = [p for p in inner.parameters() if p.requires_grad]

    def forward(self) -> torch.Tensor:
        return sum((p.flatten()[:1].sum() * 0 for p in self._trained), torch.zeros((), device=self._trained[0].device))
