"""Gradients that travel in 16 bits: communication hooks for DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the hook's annotation with the class itself.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

__all__ = ["half_hook"]


def half_hook(
    method: str, group: dist.ProcessGroup | None = None
) -> Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]:
    """A hook that sends each bucket as fp16 or bf16 and gives it back in its own dtype.

    torch's own bf16 hook refuses every back end but NCCL; this one works on gloo too.

    Args:
        method: ``fp16`` or ``bf16``.
        group: The data-parallel ranks; None is the whole world.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[method]

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        small = buffer.to(dtype).div_(dist.get_world_size(group))

        def restore(future: Any) -> torch.Tensor:
            buffer.copy_(future.value()[0])
            return buffer

        work = dist.all_reduce(small, group=group, async_op=True)
        assert work is not None
        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(restore)
        return reduced

    return hook
