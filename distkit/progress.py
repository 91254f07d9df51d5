"""Where a run stands: counters, the planned length, and the values of a log point."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from distkit.stepping import OptimizerRun, Stepper
from distkit.world import World

if TYPE_CHECKING:
    from distkit.data import PreparedLoader

__all__ = ["Progress"]


@dataclass
class Progress:
    """Counters of a run; the same on all ranks.

    Args:
        step: Windows of the first optimizer that are done.
        epoch: The epoch that is running.
        samples: Samples trained on by all ranks, up to the last time they were summed.
        planned_epochs: How many epochs were asked for, once known.
        stopping: Whether all ranks agreed to stop.
        metrics: The last evaluation.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    planned_epochs: int | None = None
    stopping: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)
    _steps_at: int = 0
    _samples_at: int = 0

    def total_steps(self, loader: PreparedLoader | None, limit: int | None) -> int | None:
        """Optimizer steps of the whole run, where they can be known.

        A run that goes on with another global batch has made its steps with the old one, and makes the rest with this.
        """
        per_epoch = loader.steps_per_epoch if loader is not None else None
        total = self.planned_epochs * per_epoch if self.planned_epochs is not None and per_epoch is not None else None
        batch = loader.plan.global_batch if loader is not None else None
        if total is not None and batch:
            made = self.samples / batch  # steps of this size; the last of an epoch may be smaller
            if abs(made - self.step) > self.epoch + 1:
                total = self.step + max(0, round(total - made))
        if limit is not None:
            return limit if total is None else min(limit, total)
        return total

    def sum_samples(self, stepper: Stepper, world: World) -> int:
        """Add what all ranks trained on since the last time; called by all."""
        new = world.all_reduce(torch.tensor([stepper.samples], device=world.device), axis="data")
        self.samples += int(new)
        stepper.samples = 0
        return self.samples

    def begin_timing(self) -> None:
        """Start the clock of step times afresh: what came before was start-up, evaluation or a checkpoint."""
        self._since, self._steps_at, self._samples_at = time.perf_counter(), self.step, self.samples

    def log_point(self, stepper: Stepper, world: World) -> dict[str, Any]:
        """The values of the step that just ended; called by all ranks, and the only place that waits for the device.

        Returns:
            As in ``metrics.jsonl``: epoch, samples, loss, lr, grad_norm, step_time_s, samples_per_s, skipped_steps and
            the user's own metrics. Of a second optimizer ``loss_1`` and so on.
        """
        values: dict[str, Any] = {"epoch": self.epoch, "samples": self.sum_samples(stepper, world)}
        for index, run in enumerate(stepper.runs):
            suffix = "" if index == 0 else f"_{index}"
            values.update({name + suffix: value for name, value in _reduced(run, world).items()})
        now = time.perf_counter()
        steps = max(1, self.step - self._steps_at)
        seconds = max(now - self._since, 1e-9)
        values["step_time_s"] = seconds / steps
        values["samples_per_s"] = (self.samples - self._samples_at) / seconds
        values["skipped_steps"] = sum(run.skipped for run in stepper.runs)
        self.begin_timing()
        return values


def _reduced(run: OptimizerRun, world: World) -> dict[str, Any]:
    """Loss and metrics of the last window as weighted means over all data-parallel ranks: one collective."""
    result = run.result
    if result is None:
        return {}
    names = sorted(result.metrics)
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    parts = [result.loss, result.weight, *(result.metrics[name] for name in names)]
    sums = torch.stack([torch.as_tensor(x, dtype=dtype, device=world.device).reshape(()) for x in parts])
    loss, weight, *metrics = world.all_reduce(sums, axis="data").tolist()
    values: dict[str, Any] = {"loss": loss / weight if weight else float("nan")}
    rates = run.rates.used
    values["lr"] = rates[0]
    if len(set(rates)) > 1:
        values["lrs"] = rates
    if run.norm is not None:
        values["grad_norm"] = float(run.norm)
    values.update(
        {name: value / weight if weight else float("nan") for name, value in zip(names, metrics, strict=True)}
    )
    return values
