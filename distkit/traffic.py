"""Bytes that collectives move, counted exactly as they are called, and bytes that this process's sockets carried.

What a rank sends is worked out for a ring, with n ranks and a message of m bytes: 2 (n-1)/n m for an all-reduce, (n-1)/n m
for an all-gather, a reduce-scatter, a broadcast or a reduce (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009). What a backend sends for a call is its own affair; :func:`socket_bytes` says it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Call", "TrafficCounter", "collective_of", "listening", "note", "ring_share", "socket_bytes"]

_ROUNDS = {"all_reduce": 2}
"""How often a ring passes the message around; once for all others."""


@dataclass(frozen=True)
class Call:
    """One collective.

    Args:
        what: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``all_to_all``, ``send``.
        message: Bytes of the whole tensor, as it is on all ranks together (gathered, or before it is scattered).
        ranks: Size of the group.
    """

    what: str
    message: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring."""
        return ring_share(self.what, self.ranks) * self.message


def ring_share(what: str, ranks: int) -> float:
    """What each rank of a ring sends, as a multiple of the message.

    Args:
        what: As in :class:`Call`.
        ranks: Size of the group.
    """
    if what == "send":
        return 1.0
    return _ROUNDS.get(what, 1) * (ranks - 1) / ranks


@dataclass
class TrafficCounter:
    """Collectives of this process while it is open: those of torch.distributed, whoever calls them, and noted ones.

    Args:
        calls: What was counted, with how often.
    """

    calls: Counter[Call] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._open = ExitStack()

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in all, over rings."""
        return sum(call.sent * count for call, count in self.calls.items())

    def add(self, call: Call) -> None:
        """Count one."""
        if call.ranks > 1 and call.message:
            self.calls[call] += 1

    def __enter__(self) -> TrafficCounter:
        self._open.enter_context(listening(self))
        self._open.enter_context(_watch(self))
        return self

    def __exit__(self, *reason: object) -> None:
        self._open.close()


class Listener(Protocol):
    """Is told of collectives that don't go through torch.distributed."""

    def add(self, call: Call) -> None:
        """There is one."""


_listening: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell it of what is noted, while this is open."""
    _listening.append(listener)
    try:
        yield
    finally:
        _listening.remove(listener)


def note(what: str, message: int, ranks: int) -> None:
    """Tell who listens of a collective that doesn't go through torch.distributed.

    Args:
        what: As in :class:`Call`.
        message: Bytes of the whole tensor.
        ranks: Size of the group.
    """
    for counter in _listening:
        counter.add(Call(what, message, ranks))


def _watch(counter: TrafficCounter) -> Any:
    """A mode that sees the operators behind torch.distributed, also those that C++ and backward call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = collective_of(func, args, kwargs or {})
            if found is not None:
                counter.add(found[0])
            return func(*args, **(kwargs or {}))

    return Watch()  # type: ignore[no-untyped-call]


_OPERATORS = {
    "allreduce_": ("all_reduce", "first"),
    "allreduce_coalesced_": ("all_reduce", "first"),
    "all_reduce": ("all_reduce", "first"),
    "all_reduce_": ("all_reduce", "first"),
    "all_reduce_coalesced": ("all_reduce", "first"),
    "all_reduce_coalesced_": ("all_reduce", "first"),
    "broadcast_": ("broadcast", "first"),
    "broadcast": ("broadcast", "first"),
    "reduce_": ("reduce", "first"),
    "allgather_": ("all_gather", "first"),
    "_allgather_base_": ("all_gather", "first"),
    "allgather_coalesced_": ("all_gather", "first"),
    "allgather_into_tensor_coalesced_": ("all_gather", "first"),
    "all_gather_into_tensor": ("all_gather", "times"),
    "all_gather_into_tensor_out": ("all_gather", "times"),
    "all_gather_into_tensor_coalesced": ("all_gather", "times"),
    "gather_": ("all_gather", "times second"),
    "scatter_": ("reduce_scatter", "times"),
    "reduce_scatter_": ("reduce_scatter", "second"),
    "_reduce_scatter_base_": ("reduce_scatter", "second"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "second"),
    "reduce_scatter_tensor": ("reduce_scatter", "first"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "first"),
    "alltoall_": ("all_to_all", "second"),
    "alltoall_base_": ("all_to_all", "second"),
    "all_to_all_single": ("all_to_all", "first"),
    "send": ("send", "first"),
}
"""Operators by name: which collective each is, and which of its arguments has the whole message.

From torch/csrc/distributed/c10d/{Ops,Functional}.cpp; ``times`` stands for a part of the message that each rank has one of.
"""


def collective_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, ProcessGroup] | None:
    """What an operator moves, and over which group.

    Args:
        func: An operator, as dispatch modes of torch are given it.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        None for a wait, a barrier, a receive, and all that is no collective.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    what, where = _OPERATORS.get(func.__name__.partition(".")[0], ("", ""))
    if not what:
        return None
    group = _group_of((*args, *kwargs.values()))
    message = _nbytes(args[1] if where.endswith("second") else args[0])
    return Call(what, message * (group.size() if where.startswith("times") else 1), group.size()), group


def _group_of(values: Sequence[Any]) -> ProcessGroup:
    """The operator's group, which it has as an object or by name."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for value in values:
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    resolve = getattr(distributed_c10d, "_resolve_process_group", None)
    for value in reversed(values):
        if isinstance(value, str) and resolve is not None:
            try:
                found: ProcessGroup = resolve(value)
            except (LookupError, RuntimeError):
                continue
            return found
    whole = dist.group.WORLD
    assert whole is not None
    return whole


def _nbytes(value: Any) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return 0


_BYTES_ACKED = 120
"""Where ``tcpi_bytes_acked`` lies in Linux's struct tcp_info (include/uapi/linux/tcp.h, from 4.1 on)."""


def socket_bytes() -> int | None:
    """Bytes that this process has written to its open TCP connections so far; None where the system doesn't say (not Linux).

    Those that the other end has acknowledged, and those that still wait for it: what TCP sends twice, because a packet was
    lost or late, counts once. Shared memory and InfiniBand go around sockets.
    """
    if not sys.platform.startswith("linux"):
        return None
    total, known = 0, False
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                written = _written(copy)
        except OSError:  # closed meanwhile, or listening
            continue
        if written is not None:
            known = True
            total += written
    return total if known else None


def _written(connection: socket.socket) -> int | None:
    """To it so far; None from a kernel that doesn't say. Read anew if an acknowledgement comes between the two numbers."""
    import fcntl
    import termios

    before = None
    while True:
        answer = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        if len(answer) < _BYTES_ACKED + 8:
            return None
        acknowledged: int = struct.unpack_from("<Q", answer, _BYTES_ACKED)[0]
        if before is not None and before[0] == acknowledged:
            return sum(before)
        waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))  # on a socket: bytes that aren't acknowledged
        before = acknowledged, int.from_bytes(waiting, sys.byteorder)
