"""This rank's share of the state at one moment: referred to where training waits, copied to the host where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from distkit.checkpoint.tensorfile import refuse_special
from distkit.state import Region, Shard

__all__ = ["HostCopies", "Snapshot", "take_snapshot"]


def _at_once() -> None:
    """Nothing is on its way."""


@dataclass
class Snapshot:
    """All that a save needs of the live training.

    Args:
        shards: This rank's share.
        rng: States of this rank's generators.
        arrived: Blocks until the values are there: copies from a device may still be under way.
    """

    shards: list[Shard]
    rng: dict[str, torch.Tensor]
    arrived: Callable[[], None] = _at_once


class HostCopies:
    """Copies of shards in host memory that the next save uses again.

    Fresh memory costs more than the copy itself: the system clears each page, and pinning locks it. So a rank that saves
    in the background keeps one copy of its share for as long as it trains. Of CUDA tensors the copy is pinned, and goes
    in stream order: what the step after changes is read before.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, str, Region], torch.Tensor] = {}

    def take(self, shards: Iterable[Shard]) -> tuple[list[Shard], Callable[[], None]]:
        """Copy shards; those of the save before are overwritten, so it must be over.

        Args:
            shards: One at a time is held besides its copy.

        Returns:
            The same shards over the copies, and what to call before they are read.

        Raises:
            CheckpointError: A tensor has no plain values.
        """
        kept: dict[tuple[str, str, str, Region], torch.Tensor] = {}
        copies: list[Shard] = []
        devices: set[torch.device] = set()
        for shard in shards:
            refuse_special(f"{shard.name}/{shard.kind}", shard.tensor)
            source = shard.tensor.detach()
            key = (shard.group, shard.name, shard.kind, shard.region)
            buffer = self._buffers.pop(key, None)
            if buffer is None or buffer.dtype != source.dtype or buffer.shape != source.shape:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=source.is_cuda)
            if source.is_cuda:
                devices.add(source.device)
            kept[key] = buffer
            copies.append(Shard(shard.group, shard.name, shard.kind, shard.global_shape, shard.region, buffer))
        self._buffers = kept
        return copies, _events(devices)


def _events(devices: set[torch.device]) -> Callable[[], None]:
    if not devices:
        return _at_once
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def arrived() -> None:
        for event in events:
            event.synchronize()

    return arrived


def take_snapshot(
    shards: Iterable[Shard], rng: dict[str, torch.Tensor] | None = None, copies: HostCopies | None = None
) -> Snapshot:
    """Note this rank's share.

    Args:
        shards: This rank's.
        rng: States of its generators, the caller's own tensors.
        copies: Where to copy the values to; None refers to the live ones, so write them before the next step.
    """
    if copies is None:
        return Snapshot(list(shards), dict(rng or {}))
    copied, arrived = copies.take(shards)
    return Snapshot(copied, dict(rng or {}), arrived)
