"""Megatron inside a node, DeepSpeed ZeRO across: layers split over the ranks of a node and computed by megatron-core.

Under the names zero1 to zero3 with ``parallel.tensor`` the split layers are computed by torch alone. What of megatron-core
is used, and how it is brought to work on a CPU, is in :mod:`distkit.strategies.tensor_parallel.megatron`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distkit.errors import ConfigError
from distkit.strategies.base import Capabilities, Strategy
from distkit.strategies.zero import Zero1Strategy, Zero2Strategy, Zero3Strategy, ZeroStrategy

if TYPE_CHECKING:
    from distkit.config import Config

__all__ = ["MegatronZero1Strategy", "MegatronZero2Strategy", "MegatronZero3Strategy", "MegatronZeroStrategy"]


class MegatronZeroStrategy(ZeroStrategy):
    """As the ZeRO stage of the same number, over layers that megatron-core computes; ``engine.megatron`` goes to its
    ``ModelParallelConfig``."""

    @classmethod
    def defaults(cls, processes_per_node: int) -> dict[str, Any]:
        """See :class:`Strategy`: a tensor group is a whole node."""
        return {"parallel.tensor": processes_per_node}

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; also refuses tensor groups of one rank, but in a run of one process."""
        size = config.parallel.tensor
        if processes is not None and processes > 1 and (size == 1 or processes % size):
            what = (
                f"parallel.tensor is 1 for {processes} processes"
                if size == 1
                else f"parallel.tensor={size} doesn't divide the {processes}"
            )
            raise ConfigError(
                f"strategy {cls.name!r} splits layers over tensor groups, and {what}",
                hint=f"--set parallel.tensor={_smallest_factor(processes)}   or --strategy zero{cls.stage}",
            )
        super().check(config, processes=processes)

    @classmethod
    def for_run(cls, config: Config) -> type[Strategy]:
        """See :class:`Strategy`: megatron-core in one process too, so that models made of its layers train there."""
        cls.check(config, processes=None)
        from distkit.strategies.tensor_parallel.megatron_mixin import MegatronMixin
        from distkit.strategies.tensor_parallel.mixin import with_tensor_parallelism

        return with_tensor_parallelism(cls, MegatronMixin)


def _smallest_factor(number: int) -> int:
    return next(n for n in range(2, number + 1) if number % n == 0)


def _over_megatron(stage: Capabilities, number: int, best_for: str) -> Capabilities:
    return replace(
        stage,
        summary=f"Megatron's layers split inside a node, DeepSpeed ZeRO {number} across nodes",
        layers="megatron-core",
        precisions=stage.precisions - {"fp16"},
        install="pip install 'distkit[deepspeed,megatron]'",
        best_for=best_for,
    )


class MegatronZero1Strategy(MegatronZeroStrategy, Zero1Strategy):
    """Split layers, and optimizer states split over the nodes."""

    name = "megatron-zero1"
    capabilities = _over_megatron(
        Zero1Strategy.capabilities,
        1,
        "several nodes with a fast link inside of each, when one node's part of a model fits",
    )


class MegatronZero2Strategy(MegatronZeroStrategy, Zero2Strategy):
    """Split layers, and optimizer states and gradients split over the nodes."""

    name = "megatron-zero2"
    capabilities = _over_megatron(Zero2Strategy.capabilities, 2, "the same with gradients out of the way")


class MegatronZero3Strategy(MegatronZeroStrategy, Zero3Strategy):
    """Split layers, and optimizer states, gradients and parameters split over the nodes."""

    name = "megatron-zero3"
    capabilities = _over_megatron(
        Zero3Strategy.capabilities,
        3,
        "the largest models on several nodes, when a node's part of a model fits no device",
    )
