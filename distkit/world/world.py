"""World: the place of this rank, its device, and the few collective verbs that all parts share."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distkit.errors import UsageError
from distkit.world.collectives import Alone, Collectives
from distkit.world.control import Control
from distkit.world.environment import Environment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axis", "World"]

KEEP_WAITING_S = 2.0
"""How often rank 0 tells waiting ranks that it is alive; far below any collective's time limit."""


@dataclass(frozen=True)
class Axis:
    """This rank's coordinate along one kind of parallelism: ``0 <= rank < size``."""

    rank: int = 0
    size: int = 1


class World:
    """All processes of a run, seen from one of them. A world of one is the same class.

    Args:
        environment: Ranks and sizes.
        device: Where this rank computes.
        collectives: How numbers travel.
        backend: Name of the back end, for people to read.
        data: Coordinate among the ranks that see different batches; None is the whole world.
        tensor: Coordinate among the ranks that share each layer.
        mesh: The DeviceMesh that a strategy works on, if it has one.
    """

    def __init__(
        self,
        environment: Environment,
        device: torch.device,
        collectives: Collectives,
        *,
        backend: str = "none",
        data: Axis | None = None,
        tensor: Axis | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.environment = environment
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self.node_rank, self.nodes = environment.node_rank, environment.nodes
        self.device = device
        self.backend = backend
        self.data = data or Axis(self.rank, self.size)
        self.tensor = tensor or Axis()
        self.mesh = mesh
        self.collectives = collectives
        self.control = Control(collectives, self.rank)

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """A world of one, without any process group."""
        return cls(Environment(), torch.device(device), Alone())

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.size}, node {self.node_rank} of {self.nodes}, "
            f"data {self.data.rank}/{self.data.size}, tensor {self.tensor.rank}/{self.tensor.size}, {self.device})"
        )

    def barrier(self) -> None:
        """All ranks arrive before any goes on."""
        self.collectives.barrier()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", axis: str = "world") -> torch.Tensor:
        """Reduce over ranks.

        Args:
            tensor: Any shape; not changed.
            op: sum, max or min.
            axis: world, data or tensor.

        Returns:
            A new tensor, the same on all ranks of the axis.
        """
        if op not in ("sum", "max", "min"):
            raise UsageError(f"all_reduce was given op={op!r}; valid: sum, max, min", hint='op="sum"')
        result = tensor.detach().clone()
        if self._axis_size(axis) > 1:
            self.collectives.all_reduce(result, op, axis)
        return result

    def broadcast(self, tensor: torch.Tensor, source: int = 0, axis: str = "world") -> torch.Tensor:
        """The values of the axis' rank ``source``, as a new tensor on each of its ranks; shapes and dtypes must agree."""
        result = tensor.detach().clone().contiguous()
        if self._axis_size(axis) > 1:
            self.collectives.broadcast(result, source, axis)
        return result

    def all_gather(self, tensor: torch.Tensor, axis: str = "data") -> list[torch.Tensor]:
        """The tensors of all ranks of an axis, in rank order.

        Args:
            tensor: Ranks may differ in the first dimension only.
            axis: world, data or tensor.
        """
        tensor = tensor.detach()
        if self._axis_size(axis) == 1:
            return [tensor]
        if tensor.dim() == 0:
            return [part[0] for part in self.collectives.all_gather(tensor.reshape(1), axis)]
        rows = torch.tensor([tensor.shape[0]], device=tensor.device, dtype=torch.int64)
        counts = [int(n) for n in torch.cat(self.collectives.all_gather(rows, axis)).tolist()]
        most = max(counts)
        if tensor.shape[0] < most:
            padding = tensor.new_zeros((most - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat([tensor, padding])
        is_bool = tensor.dtype == torch.bool
        parts = self.collectives.all_gather(tensor.to(torch.uint8) if is_bool else tensor, axis)
        return [part[:n].to(torch.bool) if is_bool else part[:n] for part, n in zip(parts, counts, strict=True)]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """JSON-able values of all ranks, in rank order. Sent as JSON: nothing is unpickled."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(part.numpy().tobytes()) for part in self.all_gather(mine, axis="world")]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """A JSON-able value of rank ``source`` on every rank; what the others pass in is not looked at."""
        if self.size == 1:
            return json.loads(json.dumps(value))
        text = json.dumps(value).encode() if self.rank == source else b""
        length = self.broadcast(torch.tensor([len(text)]), source)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return json.loads(self.broadcast(buffer, source).numpy().tobytes())

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; the same answer everywhere."""
        return bool(self.all_reduce(torch.tensor([int(flag)]), "max"))

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank; the same answer everywhere."""
        return bool(self.all_reduce(torch.tensor([int(flag)]), "min"))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, then the others: to download or tokenise once.

        While rank 0 works, a thread of it tells the others every few seconds to wait on. So no time limit of a
        collective applies to the block, and the others still notice at once if rank 0 dies.
        """
        if self.size == 1:
            yield
        elif self.is_main:
            self.control.together("main_first")
            with self._telling_others_to_wait():
                yield
        else:
            while not self.control.together("main_first")[0]:
                pass
            yield

    @contextmanager
    def _telling_others_to_wait(self) -> Iterator[None]:
        done = threading.Event()

        def tell() -> None:
            while not done.wait(KEEP_WAITING_S):
                self.control.together("main_first")
            self.control.together("main_first", True)

        thread = threading.Thread(target=tell, name="distkit-main-first", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def aside(self, limit_s: float) -> World:
        """The same ranks on a channel of their own, for host tensors: for a thread that works beside the training.

        Args:
            limit_s: Time limit of one collective on it.
        """
        return World(self.environment, torch.device("cpu"), self.collectives.aside(limit_s), backend=self.backend)

    def _axis_size(self, axis: str) -> int:
        sizes = {"world": self.size, "data": self.data.size, "tensor": self.tensor.size}
        if axis not in sizes:
            raise UsageError(f"axis was given as {axis!r}; valid: world, data, tensor", hint='axis="data"')
        return sizes[axis]

    def close(self) -> None:
        """Leave the other ranks."""
        self.collectives.close()
