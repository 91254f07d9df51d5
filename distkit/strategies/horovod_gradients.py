"""Gradients over Horovod: averaged in buckets while the window's last backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import horovod.torch as hvd
import torch

from distkit.errors import UsageError
from distkit.strategies.horovod_collectives import Operations

__all__ = ["GradientExchange"]


@dataclass
class _Bucket:
    """Parameters whose gradients travel as one tensor.

    Args:
        name: The same on all ranks.
        parameters: Of one dtype and device.
        ready: Places of those whose gradient is complete in the backward that runs now.
        handle: Of the operation under way.
        buffer: What travels.
        present: Which of them had a gradient here when it was sent.
    """

    name: str
    parameters: list[torch.nn.Parameter]
    ready: set[int] = field(default_factory=set)
    handle: int | None = None
    buffer: torch.Tensor | None = None
    present: list[bool] = field(default_factory=list)


class GradientExchange:
    """Averages one optimizer's gradients over all ranks, once a window.

    Horovod's own DistributedOptimizer doesn't fit the window: it wants to know the number of backwards beforehand
    (an epoch's last window may be shorter), counts those that belong to another optimizer's loss, gives parameters
    that nobody used a zero gradient (so they decay), and forgets parameter groups that are added later
    (horovod/torch/optimizer.py). The same operations are started here, by hooks of the same kind.

    Buckets are filled here rather than by Horovod's tensor fusion, whose contents depend on timing: with three or more
    ranks the order of the additions, and so the last bit of a sum, would change from run to run, and a resumed run
    would not replay. The number of copies is the same.

    Averaging twice changes nothing, so a second backward into gradients that were exchanged already is right, too.

    Args:
        operations: How operations are started and awaited.
        size: Number of ranks.
        name: Tells this optimizer from others.
        bucket_bytes: Size of a bucket, of the parameters' own dtype.
        wire: dtype on the wire; None is the gradient's own, or fp32 where that has 16 bits.
        adasum: Combine by Adasum (Maleki et al. 2020, arXiv 2006.02924) instead of averaging.
        names: Names of parameters by identity, for messages.
    """

    def __init__(
        self,
        operations: Operations,
        size: int,
        *,
        name: str,
        bucket_bytes: int,
        wire: torch.dtype | None,
        adasum: bool,
        names: Callable[[], dict[int, str]],
    ) -> None:
        self._operations = operations
        self._size = size
        self._name = name
        self._bucket_bytes = bucket_bytes
        self._wire = wire
        self._adasum = adasum
        self._names = names
        self._parameters: list[torch.nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._places: dict[int, tuple[_Bucket, int]] = {}
        self._hooked: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._armed = False

    @property
    def under_way(self) -> bool:
        """Whether gradients are travelling."""
        return any(bucket.handle is not None for bucket in self._buckets)

    @contextmanager
    def during_backward(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Send each bucket as soon as the backward inside has filled it.

        Args:
            parameters: The optimizer's trained parameters as of now; groups may be added or frozen at any time.
        """
        if self.under_way:
            self.finish(parameters)
        self._arrange(parameters)
        for bucket in self._buckets:
            bucket.ready.clear()
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def finish(self, parameters: Sequence[torch.nn.Parameter], flags: Sequence[bool] = ()) -> list[bool]:
        """Send what hasn't been sent, and wait for all of it. Called by all ranks.

        A gradient that only some ranks have counts as 0 on the others; one that nobody has stays None.

        Args:
            parameters: As above.
            flags: Asked of all ranks on the way.

        Returns:
            Each flag, true where any rank set it.
        """
        self._arrange(parameters)
        for bucket in self._buckets:
            if bucket.handle is None:
                self._send(bucket)
        present = [here for bucket in self._buckets for here in bucket.present]
        anywhere = self._anywhere([*present, *flags])
        start = 0
        for bucket in self._buckets:
            count = len(bucket.parameters)
            self._receive(bucket, anywhere[start : start + count])
            start += count
        return anywhere[start:]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()

    def _anywhere(self, here: Sequence[bool]) -> list[bool]:
        """One small all-reduce beside the gradients, on the host."""
        name = f"{self._name}.present"
        known = torch.tensor(list(map(int, here)) or [0], dtype=torch.int32)
        self._operations.wait(self._operations.reduce(known, name, hvd.Max), name)
        return [bool(x) for x in known.tolist()][: len(here)]

    def _arrange(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Cut the parameters into buckets, last ones first, since their gradients come first."""
        if len(parameters) == len(self._parameters) and all(
            a is b for a, b in zip(parameters, self._parameters, strict=True)
        ):
            return
        self._parameters = list(parameters)
        self._buckets = []
        open_buckets: dict[tuple[torch.dtype, torch.device], tuple[_Bucket, int]] = {}
        for parameter in reversed(self._parameters):
            kind = (parameter.dtype, parameter.device)
            size = parameter.numel() * parameter.element_size()
            bucket, filled = open_buckets.get(kind, (None, 0))
            if bucket is None or filled + size > self._bucket_bytes:
                bucket, filled = _Bucket(f"{self._name}.bucket.{len(self._buckets)}", []), 0
                self._buckets.append(bucket)
            bucket.parameters.append(parameter)
            open_buckets[kind] = (bucket, filled + size)
        self._places = {
            id(parameter): (bucket, place)
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        }
        for parameter in self._parameters:
            if id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        """Called by autograd, also in backwards of other optimizers' losses and before the window's last one."""
        if not self._armed or id(parameter) not in self._places:
            return
        bucket, place = self._places[id(parameter)]
        if place in bucket.ready and bucket.handle is not None:
            raise UsageError(
                f"the gradient of {self._names().get(id(parameter), '?')} grew again in one backward, after it was sent",
                hint="use_reentrant=False   in torch.utils.checkpoint, or --set memory.activation_checkpointing=full",
            )
        bucket.ready.add(place)
        if len(bucket.ready) == len(bucket.parameters):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        first = bucket.parameters[0]
        gradients = [parameter.grad for parameter in bucket.parameters]
        bucket.present = [gradient is not None for gradient in gradients]
        dtype = self._wire_dtype(first.dtype)
        buffer = torch.empty(sum(p.numel() for p in bucket.parameters), dtype=dtype, device=first.device)
        for parameter, gradient, part in zip(bucket.parameters, gradients, self._parts(bucket, buffer), strict=True):
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                raise UsageError(
                    f"the gradient of {self._names().get(id(parameter), '?')} is sparse, and this strategy sends dense ones",
                    hint="nn.Embedding(..., sparse=False)",
                )
            elif self._halves:  # divided before it is rounded, so that the sum can't overflow
                part.copy_(gradient / self._size)
            else:
                part.copy_(gradient)
        op = hvd.Adasum if self._adasum else hvd.Sum if self._halves else hvd.Average
        bucket.buffer = buffer
        bucket.handle = self._operations.reduce(buffer, bucket.name, op)

    def _receive(self, bucket: _Bucket, anywhere: Sequence[bool]) -> None:
        assert bucket.handle is not None and bucket.buffer is not None
        self._operations.wait(bucket.handle, bucket.name)
        parts = self._parts(bucket, bucket.buffer)
        for parameter, part, present in zip(bucket.parameters, parts, anywhere, strict=True):
            if not present:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = part.to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(part)
        bucket.handle = bucket.buffer = None

    def _parts(self, bucket: _Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in bucket.parameters]
        return [part.view(p.shape) for p, part in zip(bucket.parameters, buffer.split(sizes), strict=True)]

    @property
    def _halves(self) -> bool:
        return self._wire is not None and not self._adasum

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self._wire is not None and dtype is torch.float32:
            return self._wire
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
