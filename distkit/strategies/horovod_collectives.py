"""All of World's verbs over Horovod: named operations with a time limit, for every dtype that torch has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from distkit.errors import LaunchError
from distkit.traffic import note
from distkit.world.collectives import Collectives, Pending

__all__ = ["HorovodCollectives", "Operations"]

_NATIVE = (torch.float32, torch.float64, torch.int32, torch.int64)
"""What an all-reduce takes as it is. Horovod 0.28.1 has no function for bfloat16, uint8, int8 and bool
(horovod/torch/mpi_ops_v2.cc), and its fp16 minimum and maximum are missing under Gloo."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3


class Operations:
    """Horovod operations by name, which is how ranks find each other's: equal names belong together.

    Every operation gets a name here. Horovod's automatic ones count calls per rank, so ranks that skip one hang.

    Args:
        limit_s: Seconds after which an operation that some rank didn't join is an error. Horovod's own stall
            inspector says nothing under Gloo.
        limit_key: The setting that it comes from.
    """

    def __init__(self, limit_s: float, limit_key: str = "timeouts.step_s") -> None:
        self.limit_s, self.limit_key = limit_s, limit_key

    def reduce(self, tensor: torch.Tensor, name: str, op: int) -> int:
        """Start an all-reduce in place; ``op`` is one of Horovod's. Returns a handle."""
        note("all_reduce", tensor.numel() * tensor.element_size(), hvd.size())
        return int(self._started(lambda: hvd.allreduce_async_(tensor, name=name, op=op), name))

    def broadcast(self, tensor: torch.Tensor, name: str, source: int) -> int:
        """Start a broadcast in place."""
        note("broadcast", tensor.numel() * tensor.element_size(), hvd.size())
        return int(self._started(lambda: hvd.broadcast_async_(tensor, source, name=name), name))

    def gather(self, tensor: torch.Tensor, name: str) -> int:
        """Start gathering along the first dimension."""
        note("all_gather", tensor.numel() * tensor.element_size() * hvd.size(), hvd.size())
        return int(self._started(lambda: hvd.allgather_async(tensor, name=name), name))

    def wait(self, handle: int, name: str) -> Any:
        """The result of an operation.

        Horovod's own wait spins, which takes a core from the ranks that compute; this one sleeps in between.

        Raises:
            LaunchError: A rank is gone, or didn't join within the limit.
        """
        deadline, pause = time.monotonic() + self.limit_s, _FIRST_PAUSE_S
        while not hvd.poll(handle):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not all ranks joined {name!r} within {self.limit_key}={self.limit_s:g}: one of them hangs, or does "
                    "something else",
                    hint=f"--set {self.limit_key}=...   if it may take longer; else look at the other ranks' logs",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._started(lambda: hvd.synchronize(handle), name)

    def _started(self, call: Callable[[], Any], name: str) -> Any:
        try:
            return call()
        except HorovodInternalError as error:
            cause = str(error).strip().splitlines() or ["no reason given"]
            raise LaunchError(
                f"Horovod gave up on {name!r}: {cause[0]}",
                hint="another rank ended before this one; its log says why",
            ) from error


class HorovodCollectives(Collectives):
    """See :class:`Collectives`. Names are reused, so that Horovod's response cache knows them.

    Args:
        operations: How they are started and awaited.
        leave: Called by ``close``, after all ranks have arrived there.
        prefix: Begins every name. Names are all that tells operations apart, so another prefix is another channel.
    """

    def __init__(self, operations: Operations, leave: Callable[[], None], prefix: str = "distkit") -> None:
        self.operations = operations
        self.prefix = prefix
        self._leave = leave
        self._rows = 0

    def all_reduce(self, tensor: torch.Tensor, op: str, axis: str) -> None:
        """See :class:`Collectives`; small dtypes are reduced in a wider one and rounded once."""
        if tensor.numel() == 0:
            return
        if tensor.is_complex():
            parts = torch.view_as_real(tensor).contiguous()
            self.all_reduce(parts, op, axis)
            tensor.copy_(torch.view_as_complex(parts))
            return
        ops = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
        wide = tensor.to(_reducible(tensor.dtype)).contiguous()
        name = f"{self.prefix}.all_reduce.{op}.{_short(wide.dtype)}"
        self.operations.wait(self.operations.reduce(wide.view(-1), name, ops[op]), name)
        if wide.data_ptr() != tensor.data_ptr():
            tensor.copy_(wide)

    def broadcast(self, tensor: torch.Tensor, source: int, axis: str) -> None:
        """See :class:`Collectives`."""
        self.broadcast_all([(f"{self.prefix}.broadcast", tensor)], source)

    def broadcast_all(self, tensors: Sequence[tuple[str, torch.Tensor]], source: int = 0) -> None:
        """Broadcast many tensors at once, in place.

        Args:
            tensors: With a name each, the same on all ranks.
            source: The rank whose values are taken.
        """
        started = []
        for name, tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                started.append((self.operations.broadcast(_as_bytes(whole), name, source), name, tensor, whole))
        for handle, name, tensor, whole in started:
            self.operations.wait(handle, name)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    def all_gather(self, tensor: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """See :class:`Collectives`; travels as bytes, since shapes and dtypes agree."""
        if tensor.numel() == 0:
            return [torch.empty_like(tensor) for _ in range(hvd.size())]
        name = f"{self.prefix}.all_gather"
        row = _as_bytes(tensor.detach().contiguous()).unsqueeze(0)
        rows = self.operations.wait(self.operations.gather(row, name), name)
        return [part.view(tensor.dtype).view(tensor.shape) for part in rows]

    def gather_rows(self, row: list[int]) -> Pending:
        """See :class:`Collectives`."""
        self._rows = (self._rows + 1) % 2  # the next one may start before this one was read
        name = f"{self.prefix}.rows.{self._rows}"
        mine = torch.tensor([row], dtype=torch.int64)
        return _Gathering(self.operations, self.operations.gather(mine, name), name)

    def barrier(self) -> None:
        """On the host, like every short exchange."""
        self.gather_rows([0]).wait()

    def aside(self, limit_s: float) -> HorovodCollectives:
        """See :class:`Collectives`."""
        return HorovodCollectives(Operations(limit_s, "timeouts.save_s"), self._leave, prefix=f"{self.prefix}.aside")

    def close(self) -> None:
        """All ranks arrive first: Horovod ends everyone's operations as soon as one rank leaves."""
        self.barrier()
        self._leave()


class _Gathering(Pending):
    def __init__(self, operations: Operations, handle: int, name: str) -> None:
        self.operations, self.handle, self.name = operations, handle, name

    def wait(self) -> list[list[int]]:
        rows: list[list[int]] = self.operations.wait(self.handle, self.name).tolist()
        return rows


def _reducible(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum, maximum or minimum is taken; whole numbers wrap around the same in a wider one."""
    if dtype in _NATIVE:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as one row of bytes."""
    return tensor.view(-1).view(torch.uint8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
