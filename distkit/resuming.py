"""When checkpoints are written, what of the Trainer is in them, and how a run goes on from one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distkit.checkpoint import CheckpointManager, CheckpointReader, collect_rng, restore_rng
from distkit.checkpoint.paths import to_path
from distkit.config import Config
from distkit.errors import CheckpointError, DistkitError
from distkit.held import Held
from distkit.optim import Scaling, scale_learning_rate
from distkit.progress import Progress
from distkit.seeds import mix_seed
from distkit.state import OptimizerLayout
from distkit.stepping import Stepper
from distkit.strategies.base import Strategy
from distkit.strategies.modules import group_name
from distkit.world import World

if TYPE_CHECKING:
    from distkit.callbacks import Callback
    from distkit.checkpoint.format import Manifest

__all__ = ["WORTH_TELLING_S", "Checkpoints"]

WORTH_TELLING_S = 1.0
"""A shorter wait for a save in the background needs no explanation."""

log = logging.getLogger(__name__)


class Checkpoints:
    """Checkpoints of one run.

    Args:
        strategy: Gives and takes shards.
        world: All ranks.
        config: ``checkpoint`` is used.
        run_dir: The run's folder.
        held: What was prepared.
        stepper: Optimizers and their counters.
        progress: The run's counters.
        callbacks: The user's; each may have a state of its own.
    """

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        config: Config,
        run_dir: Path,
        held: Held,
        stepper: Stepper,
        progress: Progress,
        callbacks: Sequence[Callback],
    ) -> None:
        self.strategy, self.world, self.config = strategy, world, config
        self.held, self.stepper, self.progress, self.callbacks = held, stepper, progress, callbacks
        chosen = config.checkpoint.dir
        folder = to_path(chosen) if chosen is not None else run_dir / "checkpoints"
        self.manager = CheckpointManager(folder, world, config.checkpoint, config.timeouts)
        self.scaling: Scaling | None = None
        self._saved_step: int | None = None
        self._whole_step: int | None = None
        """The last that is surely on the disk; what was saved since may still be under way."""
        self._told_to_wait = False
        self._saved_at = time.monotonic()
        self._positions: list[Any] = []
        self._rng: dict[str, torch.Tensor] | None = None

    # -- when -------------------------------------------------------------------------------------------------------

    @property
    def unsaved(self) -> bool:
        """Whether steps were taken since the last checkpoint."""
        return self.progress.step > 0 and self._saved_step != self.progress.step

    def due_by_step(self, step: int) -> bool:
        """Whether ``every_steps`` asks for one at this step."""
        every = self.config.checkpoint.every_steps
        return every is not None and step % every == 0 and self.unsaved

    def due_by_time(self) -> bool:
        """Whether ``every_seconds`` asks for one by rank 0's clock, which speaks for all."""
        every = self.config.checkpoint.every_seconds
        return every is not None and self.world.is_main and time.monotonic() - self._saved_at >= every

    def note_position(self) -> None:
        """A step ended here: a checkpoint that is taken later, inside the next window, goes on from here."""
        self._positions = [
            loader.state_dict() if index in self.held.trained else None
            for index, loader in enumerate(self.held.loaders)
        ]

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = True) -> Path:
        """Write the state of the last finished step; called by all ranks.

        The save before is waited for, if it is still being written. If it failed, a save that waits takes its place and
        the failure is a warning; one in the background raises it.

        Args:
            wait: Return when it is on the disk; else as soon as the state is copied, if ``checkpoint.background`` is on.

        Raises:
            CheckpointError: The same on all ranks.
        """
        self.world.control.together("save")
        wait = wait or not self.config.checkpoint.background
        self._finish_one_before(wait)
        progress = self.progress
        progress.sum_samples(self.stepper, self.world)
        path = self.manager.save(
            progress.step,
            shards=self.strategy.shards,
            layouts=self.strategy.optimizer_layouts(),
            trainer_state=self._trainer_state(),
            aliases=self.held.aliases,
            metrics=progress.metrics or None,
            epoch=progress.epoch,
            strategy=self.config.strategy,
            rng={**collect_rng(self.world.device), **self.strategy.rng_states()},
            wait=wait,
        )
        self._saved_step, self._saved_at = progress.step, time.monotonic()
        if wait:
            self._whole_step = progress.step
        return path

    @property
    def failed(self) -> bool:
        """Whether a save in the background failed on this rank, and :meth:`settle` has not been called since."""
        return self.manager.background.failed

    @property
    def under_way(self) -> int | None:
        """Step of the save that is being written in the background; None if there is none."""
        background = self.manager.background
        return background.step if background.running else None

    def settle(self, timeout_s: float | None = None) -> CheckpointError | None:
        """Wait for a save in the background, if one is under way.

        Args:
            timeout_s: How long at most; None is until it ends.

        Returns:
            Why it failed, once.
        """
        step = self.manager.background.step
        failure = self.manager.background.wait(timeout_s)
        if self.manager.background.step is not None:
            return None  # still being written
        if failure is None:
            self._whole_step = self._saved_step
            return None
        self._saved_step = self._whole_step
        text, hint = (failure.message, failure.hint) if isinstance(failure, DistkitError) else (repr(failure), None)
        error = CheckpointError(f"the checkpoint of step {step} was not written: {text}", hint=hint)
        error.__cause__ = failure
        return error

    def _finish_one_before(self, superseding: bool) -> None:
        before, started = self.manager.background.step, time.monotonic()
        failure = self.settle()
        if failure is not None and not superseding:
            raise failure
        if failure is not None:
            self._warn(f"{failure.message}; trying again with step {self.progress.step}")
        waited = time.monotonic() - started
        if waited > WORTH_TELLING_S and not superseding and not self._told_to_wait:
            self._told_to_wait = True
            self._warn(
                f"the checkpoint of step {before} was still being written when that of step {self.progress.step} was due: "
                f"training waited {waited:.1f} s. Save less often, e.g. --set checkpoint.every_steps=..."
            )

    def _warn(self, line: str) -> None:
        if self.world.is_main:
            log.warning("%s", line)

    def _trainer_state(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "step": progress.step,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "metrics": progress.metrics,
            "optimizer_steps": [run.steps for run in self.stepper.runs],
            "skipped_steps": [run.skipped for run in self.stepper.runs],
            "schedulers": [scheduler.state_dict() for scheduler in self.held.schedulers],
            "loaders": self._positions,
            "strategy": self.strategy.state_dict(),
            "callbacks": [[type(callback).__name__, callback.state_dict()] for callback in self.callbacks],
            "global_batch": self.scaling.batch if self.scaling else None,
            "lr_factor": self.scaling.factor if self.scaling else 1.0,
        }

    # -- loading ----------------------------------------------------------------------------------------------------

    def resume(self) -> str | None:
        """Go on from where ``checkpoint.resume`` points to.

        Returns:
            A line that says what was restored; None at a fresh start.
        """
        where = self.config.checkpoint.resume
        self.manager.clean_up()
        if where == "none":
            return None
        return self.load(None if where == "auto" else to_path(where))

    def load(self, path: str | Path | None) -> str | None:
        """Restore models, optimizers, schedulers and the position from a checkpoint; called by all ranks.

        Args:
            path: Its folder; None is the newest complete one of this run.

        Returns:
            A line that says what was restored; None if there is none.
        """
        failure = self.settle()
        if failure is not None:
            self._warn(failure.message)
        found = self.manager.latest() if path is None else to_path(path)
        if found is None:
            return None
        reader = self.manager.open(found)
        layouts = reader.layouts()
        self._check(reader, layouts)
        self.strategy.load_shards(reader.read, layouts)
        state = reader.trainer_state()
        self._restore(state)
        self._rng = reader.rng(self.world.rank)
        manifest = reader.manifest
        self._saved_step = self._whole_step = self.progress.step
        origin = f"{manifest.strategy} on {manifest.world_size} process{'es' if manifest.world_size != 1 else ''}"
        return (
            f"resumed from {found.name}: step {self.progress.step}, epoch {self.progress.epoch}, "
            f"{self.progress.samples} samples seen; written by {origin}{self._now_elsewhere(manifest)}"
        )

    def _now_elsewhere(self, manifest: Manifest) -> str:
        """What is different now; nothing if the run goes on as it was."""
        if (manifest.strategy, manifest.world_size) == (self.config.strategy, self.world.size):
            return ""
        return f", going on as {self.config.strategy} on {self.world.size}"

    def restore_rng(self) -> None:
        """Set the random number generators as they were when the checkpoint was taken; just before the next batch.

        At another number of processes a rank that has no saved state gets a seed of its own.
        """
        if self._rng is None:
            return
        if self._rng:
            restore_rng(self._rng, self.world.device)
            self.strategy.restore_rng_states(self._rng)
        else:
            torch.manual_seed(mix_seed(self.config.seed, self.progress.step, self.world.rank))
        self._rng = None

    def _check(self, reader: CheckpointReader, layouts: Sequence[OptimizerLayout]) -> None:
        """Names and shapes, before anything is touched."""
        for index, model in enumerate(self.held.models):
            group = group_name("model", index)
            own = self.strategy.unwrap(model)
            shapes = self.strategy.global_shapes(own)
            reader.check_model(group, shapes, self.held.aliases[group])
        models = sum(group.startswith("model") for group in reader.groups())
        if models > len(self.held.models):
            raise CheckpointError(
                f"{reader.path} holds {models} models, but {len(self.held.models)} were prepared",
                hint="prepare the same models in the same order as the run that wrote it",
            )
        if len(layouts) != len(self.stepper.runs):
            raise CheckpointError(
                f"{reader.path} holds {len(layouts)} optimizers, but {len(self.stepper.runs)} were prepared",
                hint="prepare the same optimizers in the same order as the run that wrote it",
            )
        for index, (saved, current) in enumerate(zip(layouts, self.strategy.optimizer_layouts(), strict=True)):
            _check_groups(reader.path, index, saved.groups, current.groups)

    def _restore(self, state: dict[str, Any]) -> None:
        progress = self.progress
        progress.step, progress.epoch, progress.samples = state["step"], state["epoch"], state["samples"]
        progress.metrics = state["metrics"]
        for scheduler, saved in zip(self.held.schedulers, state["schedulers"], strict=False):
            scheduler.load_state_dict(saved)
        counters = zip(self.stepper.runs, state["optimizer_steps"], state["skipped_steps"], strict=False)
        for run, steps, skipped in counters:
            run.steps, run.skipped = steps, skipped
            run.rates.restored()
        for index, (loader, saved) in enumerate(zip(self.held.loaders, state["loaders"], strict=False)):
            if saved is not None:
                loader.load_state_dict(saved)
                self.held.trained.add(index)
        self._positions = list(state["loaders"])
        self.strategy.load_state_dict(state["strategy"])
        self._restore_callbacks(state.get("callbacks", []))
        self._rescale(state)

    def _restore_callbacks(self, saved: list[list[Any]]) -> None:
        """Each gets the state of the first saved one of its class that no other took; a new callback starts afresh."""
        left = list(saved)
        for callback in self.callbacks:
            found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
            if found is not None:
                left.remove(found)
                callback.load_state_dict(found[1])

    def _rescale(self, state: dict[str, Any]) -> None:
        """Rates in a checkpoint are scaled for the batch of the run that wrote it."""
        if self.scaling is None or self.scaling.factor == state["lr_factor"]:
            return
        ratio = self.scaling.factor / state["lr_factor"]
        for run in self.stepper.runs:
            schedulers = [run.rates.scheduler] if run.rates.scheduler is not None else []
            scale_learning_rate(run.optimizer, schedulers, rule="linear", reference=1.0, batch=ratio)


def _check_groups(path: Path, index: int, saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    if len(saved) != len(current):
        raise CheckpointError(
            f"optimizer {index} has {len(current)} parameter groups, but {len(saved)} in {path}",
            hint="make the optimizer with the same parameter groups as the run that wrote the checkpoint",
        )
    for number, (a, b) in enumerate(zip(saved, current, strict=True)):
        missing, extra = set(b["params"]) - set(a["params"]), set(a["params"]) - set(b["params"])
        if missing or extra:
            raise CheckpointError(
                f"parameter group {number} of optimizer {index} differs from {path}: "
                f"not in the checkpoint: {_some(missing)}; only in the checkpoint: {_some(extra)}",
                hint="freeze and group the same parameters as the run that wrote the checkpoint",
            )


def _some(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "") if ordered else "none"
