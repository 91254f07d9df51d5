"""From losses to optimizer steps: weights, windows, clipping, learning rates, in the order in which they must come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from distkit.config import Config
from distkit.errors import UsageError
from distkit.optim import LearningRates
from distkit.strategies.base import Strategy
from distkit.window import Weight, Window, WindowResult
from distkit.world import World

if TYPE_CHECKING:
    from distkit.data import BatchInfo

__all__ = ["OptimizerRun", "Stepper"]


@dataclass
class OptimizerRun:
    """One optimizer and what its steps left behind.

    Args:
        optimizer: The prepared optimizer.
        window: Its accumulation window.
        rates: Its learning rates.
        steps: Optimizer steps taken (skipped ones aside).
        skipped: Steps that fp16 overflows skipped.
        ends: Whether the micro batch that was last in ends the window.
        done: Whether it has stepped since the Trainer's last finished step.
        result: Sums of the window that was closed last.
        norm: Gradient norm of that window, where it was measured.
    """

    optimizer: Optimizer
    window: Window
    rates: LearningRates
    steps: int = 0
    skipped: int = 0
    ends: bool = False
    done: bool = False
    result: WindowResult | None = None
    norm: torch.Tensor | None = None


class Stepper:
    """Runs backward and steps for all optimizers of a Trainer.

    Args:
        strategy: The engine.
        world: For sums over data-parallel ranks.
        config: ``optim`` and ``batch`` are used.
    """

    def __init__(self, strategy: Strategy, world: World, config: Config) -> None:
        self.strategy = strategy
        self.world = world
        self.config = config
        self.runs: list[OptimizerRun] = []
        self.accumulate = config.batch.accumulate or 1
        self.info: BatchInfo | None = None
        """Of the batch that was handed out last; None when batches come from a loader that wasn't prepared."""
        self.measure_norm = False
        """Whether the coming step is to measure the gradient norm without clipping too."""
        self.samples = 0
        """Samples that this rank has trained on since they were last summed over ranks."""

    def set_accumulate(self, accumulate: int) -> None:
        """Micro batches in a window, for batches that come from a loader of the script's own."""
        self.accumulate = accumulate
        self.strategy.set_gradient_sync(accumulate == 1)

    def attach(self, optimizer: Optimizer, scheduler: Any | None) -> None:
        """Take a prepared optimizer in."""
        window = Window(
            ranks=self.world.data.size,
            averages=self.strategy.averages_gradients,
            all_reduce=lambda t: self.world.all_reduce(t, axis="data"),
        )
        rates = LearningRates(
            optimizer,
            scheduler,
            warmup_steps=self.config.optim.warmup_steps,
            by_epoch=self.config.optim.schedule_by == "epoch",
        )
        self.runs.append(OptimizerRun(optimizer, window, rates))
        self.strategy.set_gradient_sync(self.accumulate == 1)

    @property
    def in_window(self) -> bool:
        """Whether gradients are being accumulated now."""
        return any(run.window.open for run in self.runs)

    @property
    def between_steps(self) -> bool:
        """Whether no optimizer has stepped since the last finished step."""
        return not any(run.done for run in self.runs)

    def next_step(self) -> None:
        """A step is finished; what comes now belongs to the next."""
        for run in self.runs:
            run.done = False

    def batch_ready(self, info: BatchInfo) -> None:
        """A prepared loader is about to hand out a batch; engines must know before its forward whether to sync."""
        if info.starts_window and self.in_window:
            raise UsageError(
                "an accumulation window was left open: trainer.step() wasn't called for its last batch",
                hint="call trainer.step(loss, weight=0) for a batch that is not to count, instead of skipping it",
            )
        self.info = info
        self.strategy.set_gradient_sync(info.ends_window)

    def backward(
        self,
        loss: torch.Tensor,
        weight: Weight | None,
        optimizer: Optimizer | None,
        metrics: Mapping[str, Any] | None = None,
    ) -> OptimizerRun:
        """Accumulate one micro batch's gradient.

        Args:
            loss: Scalar, the mean over the micro batch.
            weight: What the mean was taken over; None is the number of samples.
            optimizer: Whose window it belongs to; may be left out when there is one.
            metrics: Means over the same.
        """
        run = self.run_of(optimizer)
        if not run.window.open:
            self.strategy.zero_grad(run.optimizer)  # what other optimizers' losses left here (a GAN's generator loss)
        weight, total = self._weigh(weight)
        self.strategy.backward(run.window.add(loss, weight, total=total, metrics=metrics), optimizer=run.optimizer)
        info = self.info
        if info is not None:
            run.ends = info.ends_window
            self.samples += info.samples if run is self.runs[0] else 0
        else:
            run.ends = run.window.micro_batches >= self.accumulate
            coming = 1 if run.ends else run.window.micro_batches + 1
            self.strategy.set_gradient_sync(coming == self.accumulate)
        return run

    def step(self, run: OptimizerRun) -> bool:
        """Close the window if its last micro batch is in, and step.

        Returns:
            Whether the window ended (the step itself may have been skipped by an fp16 overflow).
        """
        if not run.window.open:
            raise UsageError(
                "trainer.optimizer_step() was called, but no loss came in since the last step",
                hint="trainer.backward(loss, optimizer=optimizer)   first",
            )
        if not run.ends:
            return False
        self._finish(run)
        return True

    def abandon(self) -> None:
        """Forget open windows: the run ends here, at its last finished step."""
        for run in self.runs:
            if run.window.open:
                run.window.close()
                self.strategy.zero_grad(run.optimizer)

    def flush(self) -> bool:
        """Step windows that end early because the data of an unprepared loader ended. Whether there were any."""
        open_runs = [run for run in self.runs if run.window.open]
        for run in open_runs:
            self.strategy.sync_accumulated(run.optimizer)
            self._finish(run)
        return bool(open_runs)

    def run_of(self, optimizer: Optimizer | None) -> OptimizerRun:
        """The run of an optimizer; of the only one, if None.

        Raises:
            UsageError: It wasn't prepared, or there are several and none was named.
        """
        if not self.runs:
            raise UsageError(
                "there is no prepared optimizer", hint="model, optimizer = trainer.prepare(model, optimizer)"
            )
        if optimizer is None:
            if len(self.runs) > 1:
                raise UsageError(
                    f"{len(self.runs)} optimizers were prepared, so it must be said which one this loss is for",
                    hint="trainer.backward(loss, optimizer=opt); trainer.optimizer_step(opt)",
                )
            return self.runs[0]
        for run in self.runs:
            if run.optimizer is optimizer:
                return run
        raise UsageError(
            f"this {type(optimizer).__name__} was not prepared",
            hint="use the optimizer that trainer.prepare() returned",
        )

    def _finish(self, run: OptimizerRun) -> None:
        optimizer, clip = run.optimizer, self.config.optim.clip_norm
        run.result = run.window.close()
        self.strategy.unscale(optimizer)
        self.strategy.scale_gradients(optimizer, run.result.factor)
        if run.steps == 0 and self.config.optim.unused_parameters == "error":
            self._refuse_unused(run)
        measure = clip is not None or self.measure_norm
        run.norm = self.strategy.clip_grad_norm(optimizer, clip or float("inf")) if measure else None
        run.rates.before_step(run.steps)
        stepped = self.strategy.optimizer_step(optimizer)
        run.rates.after_step(stepped)
        run.steps += stepped
        run.skipped += not stepped
        self.strategy.zero_grad(optimizer)
        run.ends, run.done = False, True

    def _weigh(self, weight: Weight | None) -> tuple[Weight, float | None]:
        """The micro batch's weight, and the window's total where all ranks know it already."""
        info = self.info
        if info is None:
            return (1.0 if weight is None else weight), None
        known = weight is None and info.window_samples is not None
        total = float(info.window_samples) if known and info.window_samples is not None else None
        if info.padding:
            return 0.0, total
        return (float(info.samples) if weight is None else weight), total

    def _refuse_unused(self, run: OptimizerRun) -> None:
        names = self.strategy.without_gradient(run.optimizer)
        if names:
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            raise UsageError(
                f"{len(names)} parameters took no part in the first step's loss: {shown}",
                hint="--set optim.unused_parameters=allow   if that is meant, or parameter.requires_grad_(False)",
            )
