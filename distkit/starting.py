"""The start of a run: seeds, learning rate scaling, and the lines that say what is going to happen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distkit.config import Config
from distkit.data import batch_size_of
from distkit.errors import ConfigError
from distkit.optim import Scaling, planned_rates, scale_learning_rate
from distkit.stepping import Stepper
from distkit.strategies.base import Strategy
from distkit.world import World

if TYPE_CHECKING:
    from distkit.data import PreparedLoader

__all__ = ["plan_lines", "scale_rates", "start_lines"]


def scale_rates(config: Config, strategy: Strategy, stepper: Stepper, loader: PreparedLoader | None) -> Scaling | None:
    """Scale every optimizer's learning rate by the rule in force.

    Returns:
        What was done; None when the global batch isn't known, since no DataLoader was prepared.

    Raises:
        ConfigError: Scaling was asked for, but the batch isn't known.
    """
    rule = config.optim.lr_scaling
    if rule == "auto":
        rule = strategy.lr_scaling
    batch = loader.plan.global_batch if loader is not None else None
    if loader is None or batch is None:
        if rule != "none":
            raise ConfigError(
                f"optim.lr_scaling is {rule!r}, but no DataLoader with a batch size was prepared, so the global batch is unknown",
                hint="model, optimizer, loader = trainer.prepare(model, optimizer, loader)   or --set optim.lr_scaling=none",
            )
        return None
    reference = config.optim.reference_batch or batch_size_of(loader) or batch
    scaling = Scaling(rule, 1.0, reference, batch)
    for run in stepper.runs:
        schedulers = [run.rates.scheduler] if run.rates.scheduler is not None else []
        scaling = scale_learning_rate(run.optimizer, schedulers, rule=rule, reference=reference, batch=batch)
    return scaling


def start_lines(
    config: Config,
    strategy: Strategy,
    world: World,
    loader: PreparedLoader | None,
    scaling: Scaling | None,
    stepper: Stepper,
    notes: Sequence[str] = (),
) -> Iterator[str]:
    """What runs, on what, with which batch and learning rate: one line each."""
    nodes = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    yield f"{config.strategy}: {processes} on {nodes}, {world.device.type}, {config.precision}, seed {config.seed}"
    yield from notes
    yield from strategy.notes()
    if loader is not None:
        yield from loader.notes
        yield loader.plan.describe()
    if scaling is not None and stepper.runs:
        after = stepper.runs[0].optimizer.param_groups[0]["lr"]
        before = float(after) / scaling.factor
        if scaling.factor != 1.0:
            yield (
                f"learning rate {before:g} -> {float(after):g}: {scaling.rule} scaling, global batch {scaling.batch} "
                f"against the reference batch {scaling.reference}"
            )
        else:
            why = (
                "optim.lr_scaling is none"
                if scaling.rule == "none"
                else f"global batch equals the reference {scaling.batch}"
            )
            yield f"learning rate {before:g}, not scaled ({why})"


def plan_lines(
    config: Config, stepper: Stepper, loader: PreparedLoader | None, done: int, total: int | None
) -> Iterator[str]:
    """The learning rate at the start, middle and end (R4)."""
    if total is None or total <= done:
        return
    every: int | None = 1
    if config.optim.schedule_by == "epoch":
        every = loader.steps_per_epoch if loader is not None else None
    for index, run in enumerate(stepper.runs):
        rates = planned_rates(
            run.optimizer,
            run.rates.scheduler,
            done=run.steps,
            total=run.steps + total - done,
            warmup_steps=config.optim.warmup_steps,
            every=every,
        )
        which = "" if len(stepper.runs) == 1 else f" of optimizer {index}"
        if rates is not None:
            first, middle, last = rates
            yield f"planned learning rate{which}: {first:g} at step {done + 1}, {middle:g} halfway, {last:g} at step {total}"
