"""Which engine trains which models: one engine an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from distkit.errors import UsageError
from distkit.strategies.zero_partitions import numel_of

if TYPE_CHECKING:
    from distkit.strategies.zero_engine import Engine
    from distkit.strategies.zero_optimizer import PartitionOptimizer
    from distkit.strategies.zero_partitions import Layout

__all__ = ["Unit", "assign_models", "refuse_empty_parameters", "stepped_parameters"]


@dataclass(eq=False)
class Unit:
    """One engine and what it trains.

    Args:
        models: The scripts' own modules.
        own: The script's optimizer.
        group_names: Parameter names of each of its groups, as they were given.
        stepped: The parameters that it steps.
        engine: DeepSpeed's engine.
        layout: Where the engine keeps this rank's partitions.
    """

    models: list[nn.Module]
    own: Optimizer
    group_names: list[list[str]]
    stepped: list[nn.Parameter]
    engine: Engine
    layout: Layout
    hooks: list[Any] = field(default_factory=list)
    """Handles of the hooks that note which parameters get a gradient."""

    @property
    def partitioned(self) -> PartitionOptimizer:
        """The optimizer that DeepSpeed calls."""
        found: PartitionOptimizer = self.engine.basic_optimizer
        return found

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer."""
        return self.engine.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of its models, each once."""
        seen: set[int] = set()
        for model in self.models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def stepped_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """What an optimizer steps, in its own order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def assign_models(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], strategy: str) -> list[list[int]]:
    """For each optimizer the indices of the models that it trains.

    Args:
        models: Those of one ``prepare`` call.
        optimizers: Those of the same call.
        strategy: For messages.

    Raises:
        UsageError: An engine of DeepSpeed can't be laid over them that way.
    """
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        steps = {id(p) for p in stepped_parameters(optimizer)}
        if not steps:
            raise UsageError(
                f"{type(optimizer).__name__} has no parameter that wants a gradient, and DeepSpeed makes no engine of it",
                hint="leave the optimizer out of trainer.prepare(), or unfreeze what it is to train",
            )
        for number, model in enumerate(models):
            inside = steps & {id(p) for p in model.parameters()}
            steps -= inside
            if not inside:
                continue
            if owner.setdefault(number, index) != index:
                raise UsageError(
                    f"two optimizers step parameters of one {type(model).__name__}, and strategy {strategy!r} makes one "
                    "engine of a model and its optimizer",
                    hint="one optimizer with two parameter groups, or --strategy ddp",
                )
        if steps:
            raise UsageError(
                f"{len(steps)} parameters of {type(optimizer).__name__} belong to no model of the same prepare() call, and "
                f"strategy {strategy!r} makes one engine of a model and its optimizer",
                hint="model, optimizer = trainer.prepare(model, optimizer)",
            )
    return [[n for n in range(len(models)) if owner.get(n) == index] for index in range(len(optimizers))]


def refuse_empty_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], strategy: str, *, cut: bool
) -> None:
    """No rank has a piece of a parameter without elements, so it would have no optimizer state and be in no checkpoint.

    Args:
        models: Those of one ``prepare`` call.
        optimizers: Those of the same call.
        strategy: For messages.
        cut: Whether frozen parameters are cut too (stage 3).

    Raises:
        UsageError: Naming the parameters.
    """
    stepped = {id(p) for optimizer in optimizers for p in stepped_parameters(optimizer)}
    names = [
        name
        for model in models
        for name, p in model.named_parameters()
        if numel_of([p]) == 0 and (cut or id(p) in stepped)
    ]
    if names:
        raise UsageError(
            f"strategy {strategy!r} cuts parameters over the ranks, and {len(names)} have no elements: "
            f"{', '.join(names[:5])}",
            hint="make them buffers, or --strategy fsdp",
        )
