"""Running one rank of many without the others, the devices or the memory: a process group that only pretends, and tensors
without data.

All private names of torch and the engines that this takes are here and in strategies/without_data.py. They were read in torch
2.13.0, DeepSpeed 0.19.8 and Horovod 0.28.1.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distkit.advise.exact.allocations import Allocations
from distkit.strategies.without_data import open_mode, private, value_of
from distkit.traffic import Call, collective_of, listening, note

__all__ = [
    "Watch",
    "fake_horovod",
    "fake_ranks",
    "fake_tensors",
    "watching",
]

DDP_BUCKET = 25 * 2**20
"""Bytes from which on DDP closes a bucket, unless it is told otherwise."""


# -- ranks and tensors that only pretend --------------------------------------------------------------------------------


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """This process is rank 0 of so many, of which the others don't exist: collectives end at once and change nothing.

    Groups that are made meanwhile are like that too, whatever back end they ask for. One rank has no group.
    """
    if size == 1:
        yield
        return
    store = private("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
    make = dist.new_group

    def new_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    try:
        with _replaced((dist, "new_group", new_group)):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_horovod(size: int) -> Iterator[None]:
    """This process is rank 0 of so many to Horovod: operations end at once and change nothing.

    distkit's own strategy is the real one; of Horovod what it calls is replaced, since that is C++ which reads tensors.
    """
    import horovod.torch as hvd

    from distkit.strategies.horovod import HorovodStrategy
    from distkit.strategies.horovod_collectives import HorovodCollectives
    from distkit.strategies.horovod_gradients import GradientExchange

    def started(*args: Any, **kwargs: Any) -> int:
        return 0

    def broadcast(collectives: Any, tensors: Any, source: int = 0) -> None:
        for _, tensor in tensors:
            note("broadcast", tensor.numel() * tensor.element_size(), size)

    with _replaced(
        (hvd, "init", _nothing),
        (hvd, "shutdown", _nothing),
        (hvd, "rank", lambda: 0),
        (hvd, "size", lambda: size),
        (hvd, "mpi_enabled", lambda: False),
        (hvd, "allreduce_async_", started),
        (hvd, "poll", lambda handle: True),
        (hvd, "synchronize", _nothing),
        # What ranks agree on is what this one has.
        (GradientExchange, "_anywhere", lambda exchange, here: list(here)),
        (HorovodCollectives, "broadcast_all", broadcast),
        (HorovodCollectives, "barrier", _nothing),
        (HorovodStrategy, "_share_optimizer", _nothing),
    ):
        yield


@contextmanager
def fake_tensors(mode: Any) -> Iterator[None]:
    """Tensors that are made here have shapes and no data, and engines don't look for it.

    Args:
        mode: From :func:`distkit.strategies.without_data.fake_mode`; it may be opened again and again.
    """
    with _replaced(
        (nn.Module, "_apply", _convert),
        # Compares shapes between ranks, through the memory of tensors.
        (importlib.import_module("torch.nn.parallel.distributed"), "_verify_param_shape_across_processes", _nothing),
        *_ddp(),
        *_deepspeed(),
    ), mode:  # fmt: skip
        yield


@contextmanager
def _replaced(*names: tuple[Any, str, Any]) -> Iterator[None]:
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in names]
    try:
        for owner, name, value in names:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """``Module._apply`` in place: torch's own would swap fake parameters, which it can't once someone refers to them."""
    for part in module.modules() if recurse else [module]:
        for parameter in part._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    applied = function(parameter)
                    if applied is not parameter:
                        parameter.data = applied
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else function(buffer)
    return module


def _ddp() -> list[tuple[Any, str, Any]]:
    """DDP's reducer reduces by a hook in Python, and gets its final buckets at once.

    It would begin with one bucket, and lay them out anew after a backward, for which it reads the order in which gradients
    came out of a tensor (reducer.cpp, rebuild_buckets). That order is the reverse of registration here.
    """
    from distkit.strategies.passthrough import OpenDDP

    by_size = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assign(parameters: list[torch.Tensor], limits: list[int], sparse: list[bool]) -> tuple[Any, Any]:
        order = range(len(parameters) - 1, -1, -1)
        sizes = [dist._DEFAULT_FIRST_BUCKET_BYTES, DDP_BUCKET]  # type: ignore[attr-defined]
        buckets, caps = by_size([parameters[i] for i in order], sizes, [sparse[i] for i in order])
        return [[order[i] for i in bucket] for bucket in buckets][::-1], caps[::-1]  # DDP turns them round

    class FixedReducer:
        def __init__(self, reducer: Any) -> None:
            self._reducer = reducer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reducer, name)

        def _rebuild_buckets(self) -> bool:
            return False

    def average(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        dist.all_reduce(whole, group=group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(whole.div_(group.size()))
        return done

    # DDP looks for the classes themselves, not for their names.
    average.__annotations__.update(
        {"bucket": torch._C._distributed_c10d.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    )

    def settle(model: Any) -> None:
        model.register_comm_hook(model.process_group, average)
        model.reducer = FixedReducer(model.reducer)

    return [(OpenDDP, "settle_buckets", settle), (dist, "_compute_bucket_assignment_by_size", assign)]


def _deepspeed() -> list[tuple[Any, str, Any]]:
    """Stage 3 compares its modules between ranks, and here the others answer nothing."""
    import sys

    name = "assert_ints_same_as_other_ranks"
    found = [
        sys.modules.get(f"deepspeed.runtime.zero.{module}")
        for module in ("utils", "partitioned_param_coordinator", "parameter_offload", "stage3", "partition_parameters")
    ]
    return [(module, name, _nothing) for module in found if hasattr(module, name)]


# -- looking on ---------------------------------------------------------------------------------------------------------


_GATHERING = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
"""fully_shard's operators (``torch.ops.fsdp``), whose arguments are gathered weights and whole gradients."""


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Let it see every operation and every change of a storage's size."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        watch.resized(storage)
        return result

    with (
        _replaced((torch.UntypedStorage, "resize_", resize), *_gathered_by_deepspeed(watch), *_sent_by_horovod(watch)),
        listening(watch),
        watch.mode(),
    ):
        yield


def _sent_by_horovod(watch: Watch) -> list[tuple[Any, str, Any]]:
    """What Horovod is given to send no operator of torch is."""
    import sys

    module = sys.modules.get("horovod.torch")
    if module is None:
        return []
    original = module.allreduce_async_

    def allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.allocations.is_buffer([watch.piece(tensor)])
        return original(tensor, *args, **kwargs)

    return [(module, "allreduce_async_", allreduce)]


def _gathered_by_deepspeed(watch: Watch) -> list[tuple[Any, str, Any]]:
    """Stage 3 puts gathered weights together in memory that no collective has seen."""
    import sys

    module = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if module is None:
        return []
    original = module.AllGatherCoalescedHandle.wait

    def wait(handle: Any, *args: Any, **kwargs: Any) -> None:
        original(handle, *args, **kwargs)
        watch.allocations.is_buffer(watch.piece(parameter) for parameter in handle.params)

    return [(module.AllGatherCoalescedHandle, "wait", wait)]


class Watch:
    """Notes what is allocated, and which collectives are called; on fake tensors and on real ones.

    Args:
        allocations: Where memory is noted.
    """

    def __init__(self, allocations: Allocations) -> None:
        self.allocations = allocations
        self.calls: list[tuple[Call, list[int]]] = []
        """Each collective, with the ranks of its group."""
        self.quiet_groups: set[str] = set()
        """Groups whose messages are activations, and no buffers: tensor groups."""
        self.stepping = False
        """Whether the optimizer steps; what it needs for that is a buffer."""
        self._pieces: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._count = 0

    def mode(self) -> Any:
        """What sees operations while it is open."""
        base = private("torch.utils._python_dispatch", "TorchDispatchMode")
        dtensor = private("torch.distributed.tensor", "DTensor")
        watch, at_start = self, open_mode()

        class Mode(base):  # type: ignore[misc, valid-type]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(issubclass(kind, dtensor) for kind in types):
                    return NotImplemented  # it comes back with the local tensors
                if at_start is not None and func is torch.ops.aten._local_scalar_dense.default:
                    return value_of(func, args)
                result = func(*args, **(kwargs or {}))
                if open_mode() is at_start:  # else DTensor tries out which shape something would have
                    watch.saw(func, args, kwargs or {}, result)
                return result

        return Mode()

    def add(self, call: Call) -> None:
        """A collective that doesn't go through torch.distributed; over all ranks."""
        if call.message:
            self.calls.append((call, list(range(call.ranks))))

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operation is done."""
        made = [self.piece(tensor) for tensor in _tensors(result)]
        if self.stepping:
            self.allocations.is_buffer(made)
        found = collective_of(func, args, kwargs)
        if found is not None:
            self._saw_collective(*found, args)
        elif func.namespace == "fsdp":
            if func._schema.name.partition("::")[2] in _GATHERING:
                self.allocations.is_buffer(self.piece(t) for t in _tensors((args, dict(kwargs))))
        elif func is torch.ops.aten._to_copy.default and self.allocations.is_parameter(self.piece(args[0])):
            self.allocations.is_buffer(made)  # weights as they are computed with

    def _saw_collective(self, call: Call, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        if not call.message:
            return
        self.calls.append((call, dist.get_process_group_ranks(group)))
        if group.group_name not in self.quiet_groups:
            self.allocations.is_buffer(self.piece(t) for t in _tensors(args))

    def note_state(self, tensors: Mapping[str, list[torch.Tensor]]) -> None:
        """Say what the state is.

        Args:
            tensors: By kind, as a strategy's ``state_tensors`` gives them.
        """
        for kind in ("parameters", "gradients", "optimizer"):
            held = [tensor for tensor in tensors.get(kind, ()) if _local(tensor).untyped_storage().nbytes()]
            self.allocations.is_state(map(self.piece, held), kind)

    def piece(self, tensor: torch.Tensor) -> int:
        """The number of the memory behind a tensor; of a DTensor, behind this rank's part."""
        tensor = _local(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._pieces.get(key)
        if known is not None:
            return known[0]
        self._count += 1
        number = self._count

        def freed(_: Any) -> None:
            self._pieces.pop(key, None)
            self.allocations.changed(number, 0)

        self._pieces[key] = number, weakref.ref(storage, freed)
        if tensor.device.type != "meta":
            self.allocations.changed(number, storage.nbytes())
        return number

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Its size has changed."""
        known = self._pieces.get(storage._cdata)
        if known is not None:
            self.allocations.changed(known[0], storage.nbytes())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without an operation."""
    return getattr(tensor, "_local_tensor", tensor)
