"""Memory that a rank holds for its share of the training state, counted exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from distkit.strategies.base import Strategy

__all__ = ["StateBytes", "count_bytes", "count_state", "free_on_host", "state_of"]

KINDS = ("parameters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True)
class StateBytes:
    """Bytes of this rank's memory, device and host together, by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def count_state(strategy: Strategy) -> StateBytes:
    """What this rank holds now.

    Real storages are counted, with whatever padding they have, and each one once: where tensors of two kinds share one
    (a flat buffer), the first kind in the order of :class:`StateBytes` has it. Gradients are there between the backward
    and the end of the optimizer's step, optimizer states from the first step on.

    Args:
        strategy: With prepared models.
    """
    return count_bytes(strategy.state_tensors())


def count_bytes(tensors: Mapping[str, Iterable[torch.Tensor]]) -> StateBytes:
    """Bytes of the storages behind tensors.

    Args:
        tensors: By kind; the kinds are the fields of :class:`StateBytes`. Of a DTensor this rank's part counts.
    """
    seen: set[tuple[torch.device, int]] = set()
    found = dict.fromkeys(KINDS, 0)
    for kind in KINDS:
        for tensor in tensors.get(kind, ()):
            storage = _local(tensor).untyped_storage()
            key = (storage.device, storage.data_ptr())
            if storage.device.type != "meta" and storage.nbytes() and key not in seen:
                seen.add(key)
                found[kind] += storage.nbytes()
    return StateBytes(**found)


def state_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, list[torch.Tensor]]:
    """The state of plain modules and optimizers, by kind: what most strategies give as ``state_tensors``."""
    import torch

    parameters = [parameter for model in models for parameter in model.parameters()]
    return {
        "parameters": [parameter.detach() for parameter in parameters],
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": [
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ],
        "buffers": [buffer for model in models for buffer in model.buffers()],
    }


def free_on_host() -> int | None:
    """Bytes of this machine's memory that programs can still get; None where the system doesn't say (not Linux)."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    lines = (line for line in text.splitlines() if line.startswith("MemAvailable:"))
    return next((int(line.split()[1]) * 1024 for line in lines), None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's part on this rank; other tensors as they are."""
    import torch

    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part
