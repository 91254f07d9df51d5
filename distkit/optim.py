"""Learning rates: how they follow the batch, rise at the start, and what they will be at the end."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from distkit.errors import UsageError

__all__ = ["LearningRates", "Scaling", "planned_rates", "scale_learning_rate", "warmup_factor"]

LONGEST_PLAN = 200_000
"""Steps that are played through to know a schedule's end; each takes about ten microseconds."""


@dataclass(frozen=True)
class Scaling:
    """How a learning rate was scaled.

    Args:
        rule: none, linear or sqrt.
        factor: What it was multiplied by.
        reference: Global batch for which the script's learning rate was chosen, in samples.
        batch: Global batch of this run, in samples.
    """

    rule: str
    factor: float
    reference: float
    batch: float


def scale_learning_rate(
    optimizer: Optimizer, schedulers: Sequence[Any], *, rule: str, reference: float, batch: float
) -> Scaling:
    """Scale the learning rate by global batch; in place, in the optimizer and in the schedulers' base rates.

    Linear: lr * batch / reference (Goyal et al. 2017, arXiv 1706.02677). sqrt: lr * sqrt(batch / reference), the usual
    choice for Adam (Krizhevsky 2014, arXiv 1404.5997, section 5).

    Args:
        optimizer: Its groups' ``lr`` and ``initial_lr`` are changed.
        schedulers: Those of this optimizer; their ``base_lrs``, and the schedulers inside of them, are changed.
        rule: none, linear or sqrt.
        reference: Samples in the global batch that the learning rate was chosen for.
        batch: Samples in this run's global batch.
    """
    ratio = batch / reference
    factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[rule]
    if factor != 1.0:
        for group in optimizer.param_groups:
            for key in ("lr", "initial_lr", "max_lr", "min_lr"):
                if key in group:
                    group[key] = group[key] * factor
        for scheduler in schedulers:
            _scale_scheduler(scheduler, factor)
    return Scaling(rule, factor, reference, batch)


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for key in ("base_lrs", "_last_lr", "min_lrs"):
        if hasattr(scheduler, key):
            setattr(scheduler, key, [lr * factor for lr in getattr(scheduler, key)])
    if hasattr(scheduler, "eta_min"):
        scheduler.eta_min = scheduler.eta_min * factor
    for inner in getattr(scheduler, "_schedulers", []):
        _scale_scheduler(inner, factor)


def warmup_factor(step: int, warmup_steps: int) -> float:
    """What the planned rate is multiplied by at an optimizer step (0 is the first): 1/n, 2/n ... 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def planned_rates(
    optimizer: Optimizer, scheduler: Any | None, *, done: int, total: int, warmup_steps: int, every: int | None = 1
) -> list[float] | None:
    """The first group's learning rate at the start, middle and end of a run.

    The schedule is played through on a copy.

    Args:
        optimizer: As prepared.
        scheduler: Its scheduler, or None.
        done: Optimizer steps that are done.
        total: Optimizer steps of the whole run.
        warmup_steps: Length of the rise.
        every: Optimizer steps from one step of the scheduler to the next; None: not known.

    Returns:
        Three rates, or None where nobody can know (a plateau scheduler, a very long run).
    """
    steps = total - done
    if steps <= 0 or steps > LONGEST_PLAN or isinstance(scheduler, ReduceLROnPlateau):
        return None
    if scheduler is not None and every is None:
        return None
    stand_in = torch.optim.SGD(
        [{"params": [torch.zeros(1)], **_rates(group)} for group in optimizer.param_groups], lr=float(_rate(optimizer))
    )
    double = None if scheduler is None else copy.deepcopy(scheduler, {id(optimizer): stand_in})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stand-in takes no steps, which schedulers warn about
        return _play(stand_in, double, done, total, warmup_steps, every or 1)


def _play(
    stand_in: Optimizer, scheduler: Any | None, done: int, total: int, warmup_steps: int, every: int
) -> list[float]:
    steps = total - done
    wanted = {done: 0.0, done + steps // 2: 0.0, total - 1: 0.0}
    for step in range(done, total):
        if step in wanted:
            wanted[step] = float(_rate(stand_in)) * warmup_factor(step, warmup_steps)
        if scheduler is not None and (step + 1) % every == 0:
            scheduler.step()
    return [wanted[done], wanted[done + steps // 2], wanted[total - 1]]


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    keep = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "max_momentum", "base_momentum")
    return {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k in keep}


def _rate(optimizer: Optimizer) -> Any:
    return optimizer.param_groups[0]["lr"]


class LearningRates:
    """One optimizer's rates during a run: the scheduler's plan times the warm-up, one step an optimizer step.

    The scheduler sees its own planned rates only, so schedulers that multiply the last rate work too.

    Args:
        optimizer: As prepared.
        scheduler: Its scheduler, or None.
        warmup_steps: Optimizer steps of the rise.
        by_epoch: Whether the scheduler steps once an epoch.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: Any | None, *, warmup_steps: int = 0, by_epoch: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.warmup_steps = warmup_steps
        self.by_epoch = by_epoch
        self._planned: list[Any] = []
        self._used: list[Any] = [group["lr"] for group in optimizer.param_groups]
        self._calls = self._scheduler_calls()

    @property
    def used(self) -> list[float]:
        """Rates of the last step, one a group. Waits for the device where a rate is a tensor there."""
        return [float(lr) for lr in self._used]

    def before_step(self, step: int) -> None:
        """Put the warm-up on top of the plan for this optimizer step (0 is the first)."""
        self._refuse_foreign_steps()
        factor = warmup_factor(step, self.warmup_steps)
        self._planned = [group["lr"] for group in self.optimizer.param_groups]
        if factor != 1.0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        self._used = [group["lr"] for group in self.optimizer.param_groups]

    def after_step(self, stepped: bool) -> None:
        """Back to the plan; the scheduler steps unless the optimizer's step was skipped (R2)."""
        for group, lr in zip(self.optimizer.param_groups, self._planned, strict=True):
            group["lr"] = lr
        if stepped and not self.by_epoch:
            self._advance()

    def epoch_ended(self) -> None:
        """A scheduler by epoch steps here."""
        if self.by_epoch:
            self._refuse_foreign_steps()
            self._advance()

    def measured(self, value: float) -> None:
        """Hand an evaluated loss to a ReduceLROnPlateau."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(value)

    def restored(self) -> None:
        """The scheduler was loaded from a checkpoint."""
        self._calls = self._scheduler_calls()

    def _advance(self) -> None:
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            self._calls = self._scheduler_calls()

    def _scheduler_calls(self) -> int:
        return int(self.scheduler.last_epoch) if isinstance(self.scheduler, LRScheduler) else 0

    def _refuse_foreign_steps(self) -> None:
        if self.scheduler is None or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self._scheduler_calls() != self._calls:
            who = "the Trainer steps it after each epoch" if self.by_epoch else "trainer.step() steps it"
            raise UsageError(
                f"the prepared {type(self.scheduler).__name__} was stepped by the script, and {who} too, so the learning rate "
                "would run ahead",
                hint="remove scheduler.step() from the script"
                + ("" if self.by_epoch else "; --set optim.schedule_by=epoch   steps it once an epoch"),
            )
