"""Collective operations behind one small interface: over torch.distributed, or for a process that is alone.

A public verb of :class:`distkit.World` checks and converts once; the method here only moves the numbers. Another
engine (Horovod) brings its own implementation in its own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Alone", "Collectives", "Pending", "TorchCollectives"]


class Pending(ABC):
    """Rows that are on their way: ``wait()`` gives one row a rank."""

    @abstractmethod
    def wait(self) -> list[list[int]]:
        """Block until every rank's row is there."""


class Collectives(ABC):
    """What World needs. ``axis`` is ``world``, ``data`` or ``tensor``; tensors lie on the device unless said."""

    data_group: ProcessGroup | None = None
    """torch's process group of the data-parallel ranks; None is the whole world, or there is none of torch."""
    tensor_group: ProcessGroup | None = None
    """The same for the ranks that share each layer; None where there is one rank in each."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str, axis: str) -> None:
        """In place; ``op`` is sum, max or min."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int, axis: str) -> None:
        """In place, from the axis' rank ``source`` to all of it."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """Tensors of equal shape, in rank order."""

    @abstractmethod
    def gather_rows(self, row: list[int]) -> Pending:
        """Start gathering one short row of integers a rank over the world, on the host; doesn't block."""

    @abstractmethod
    def barrier(self) -> None:
        """All arrive before any goes on."""

    @abstractmethod
    def aside(self, limit_s: float) -> Collectives:
        """A channel of its own for host tensors of the whole world, so that another thread may use it meanwhile.

        Called by all ranks. ``limit_s`` is the time limit of one operation. The new one is not to be closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave."""


class Alone(Collectives):
    """A world of one: nothing to send."""

    def all_reduce(self, tensor: torch.Tensor, op: str, axis: str) -> None:
        """Already reduced."""

    def broadcast(self, tensor: torch.Tensor, source: int, axis: str) -> None:
        """Already there."""

    def all_gather(self, tensor: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """The one tensor."""
        return [tensor]

    def gather_rows(self, row: list[int]) -> Pending:
        """The one row."""
        return _Ready([list(row)])

    def barrier(self) -> None:
        """All are here."""

    def aside(self, limit_s: float) -> Alone:
        """Alone there too."""
        return self

    def close(self) -> None:
        """Nothing to leave."""


class _Ready(Pending):
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def wait(self) -> list[list[int]]:
        return self.rows


class _Gathering(Pending):
    def __init__(self, work: Any, rows: list[torch.Tensor]) -> None:
        self.work, self.rows = work, rows

    def wait(self) -> list[list[int]]:
        self.work.wait()
        return [[int(x) for x in row.tolist()] for row in self.rows]


class TorchCollectives(Collectives):
    """Over torch.distributed.

    Args:
        data: Process group of the data-parallel ranks; None is the whole world.
        tensor: Process group of the tensor-parallel ranks; None where there is one rank in each.
        control: Group for short host-side rows, always on gloo, so that flags never wait for the device.
        owns_world: Whether ``close`` may destroy the default process group (not when the script made it).
    """

    def __init__(
        self,
        *,
        data: ProcessGroup | None,
        tensor: ProcessGroup | None,
        control: ProcessGroup | None,
        owns_world: bool,
    ) -> None:
        self.groups = {"world": None, "data": data, "tensor": tensor}
        self.data_group, self.tensor_group = data, tensor
        self.control = control
        self.owns_world = owns_world

    def all_reduce(self, tensor: torch.Tensor, op: str, axis: str) -> None:
        """See :class:`Collectives`."""
        from torch.distributed import ReduceOp, all_reduce

        ops = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
        all_reduce(tensor, op=ops[op], group=self._group(axis, tensor))

    def broadcast(self, tensor: torch.Tensor, source: int, axis: str) -> None:
        """See :class:`Collectives`."""
        from torch.distributed import broadcast

        broadcast(tensor, group=self._group(axis, tensor), group_src=source)

    def all_gather(self, tensor: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """See :class:`Collectives`."""
        from torch.distributed import all_gather, get_world_size

        group = self._group(axis, tensor)
        parts = [torch.empty_like(tensor) for _ in range(get_world_size(group))]
        all_gather(parts, tensor.contiguous(), group=group)
        return parts

    def gather_rows(self, row: list[int]) -> Pending:
        """See :class:`Collectives`."""
        from torch.distributed import all_gather, get_world_size

        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(get_world_size(self.control))]
        return _Gathering(all_gather(rows, mine, group=self.control, async_op=True), rows)

    def barrier(self) -> None:
        """On the control group: a device barrier would make the host wait for kernels that don't matter here."""
        from torch.distributed import barrier

        barrier(group=self.control)

    def aside(self, limit_s: float) -> TorchCollectives:
        """See :class:`Collectives`; another gloo group."""
        from torch.distributed import new_group

        group = new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        return TorchCollectives(data=group, tensor=None, control=group, owns_world=False)

    def close(self) -> None:
        """Leave the process group if this library joined it."""
        from torch.distributed import destroy_process_group, is_initialized

        if self.owns_world and is_initialized():
            destroy_process_group()

    def _group(self, axis: str, tensor: torch.Tensor) -> ProcessGroup | None:
        """Host tensors of the whole world travel on the control group, since NCCL takes device tensors only."""
        if axis == "world" and tensor.device.type == "cpu":
            return self.control
        return self.groups[axis]
