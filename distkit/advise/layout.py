"""How a run is laid out over the devices: strategy, tensor groups, offload and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from distkit.advise.engines import ENGINES, Engine
from distkit.advise.hardware import Hardware
from distkit.advise.models import ModelShape

__all__ = ["RECOMPUTE", "Layout", "layout_of_run", "layouts"]

RECOMPUTE = ("none", "selective", "full")
"""Ways of activation checkpointing, from the one that costs least time to the one that needs least memory."""

_RECOMPUTATION = {"selective": "selective recomputation", "full": "recomputation"}


@dataclass(frozen=True)
class Layout:
    """One candidate.

    Args:
        strategy: As in the settings.
        tensor: Ranks of a tensor group, which lies inside of a node.
        data: Data-parallel ranks.
        shard_ranks: How many of them split what is split.
        shards: What: parameters, gradients, optimizer.
        offload: ``none``, ``optimizer`` or ``params``.
        recompute: Activation checkpointing: ``none``, ``selective`` or ``full``.
        published: Whether it is counted as in the papers, and not as the engine does it.
    """

    strategy: str
    tensor: int
    data: int
    shard_ranks: int
    shards: frozenset[str]
    offload: str = "none"
    recompute: str = "none"
    published: bool = False

    @property
    def engine(self) -> Engine:
        """Who keeps the states, and how."""
        if self.published and "zero" in self.strategy:
            return ENGINES["published"]
        return ENGINES["deepspeed"] if "zero" in self.strategy else ENGINES.get(self.strategy, ENGINES["torch"])

    @property
    def also(self) -> str | None:
        """A strategy with the same bytes and collectives: split layers may be computed by megatron-core."""
        return f"megatron-{self.strategy}" if self.tensor > 1 and self.strategy.startswith("zero") else None

    def describe(self) -> str:
        """``zero3, tensor 4, offload optimizer, recomputation``."""
        words = [self.strategy, *([f"tensor {self.tensor}"] if self.tensor > 1 else [])]
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += [_RECOMPUTATION[self.recompute]] if self.recompute != "none" else []
        return ", ".join(words)


def layouts(
    model: ModelShape, hardware: Hardware, framework: str = "torch", *, published: bool = False
) -> Iterator[Layout]:
    """All that could be tried on this hardware, from the simplest on.

    A tensor group never leaves a node, and its size divides the heads and the devices of a node. megatron-zero1 to 3 aren't
    listed: bytes and collectives are those of zero1 to 3 with the same tensor groups (:attr:`Layout.also`).

    Args:
        model: The model.
        hardware: Devices and nodes.
        framework: What the code is written for: ``horovod`` adds that strategy.
        published: As in :class:`Layout`.
    """
    from distkit.strategies.registry import strategy_class

    for tensor in range(1, hardware.each + 1):
        if hardware.each % tensor or model.heads % tensor or model.kv_heads % tensor or model.feed_forward % tensor:
            continue
        data = hardware.devices // tensor
        for name in ("single", "dp", "ddp", "horovod", "zero1", "zero2", "fsdp", "hsdp", "zero3"):
            if name == "horovod" and framework != "horovod":
                continue
            capabilities = strategy_class(name).capabilities
            ranks = hardware.each // tensor if name == "hsdp" else data
            if (name == "single") != (hardware.devices == 1) or (tensor > 1 and not capabilities.tensor_parallel):
                continue
            if name == "hsdp" and (hardware.nodes == 1 or ranks == 1):
                continue
            if name == "dp" and (hardware.nodes > 1 or hardware.devices == 1):
                continue
            plain = Layout(name, tensor, data, ranks, capabilities.shards, published=published)
            for offload in ("none", "optimizer", "params"):
                if offload in capabilities.offload:
                    for recompute in RECOMPUTE:
                        yield replace(plain, offload=offload, recompute=recompute)


def layout_of_run(strategy: str, processes: int, *, tensor: int, replicas: int, offload: str, recompute: str) -> Layout:
    """How a run with these settings is laid out.

    Args:
        strategy: Its name.
        processes: In all.
        tensor: Ranks of a tensor group.
        replicas: Replica groups, of hsdp.
        offload: ``memory.offload``.
        recompute: ``memory.activation_checkpointing``.
    """
    from distkit.strategies.registry import strategy_class

    data = processes // tensor
    shards = strategy_class(strategy).capabilities.shards
    return Layout(strategy, tensor, data, data // replicas, shards, offload, recompute)
