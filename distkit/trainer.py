"""The Trainer: says what happens when. What an engine does differently is in its strategy, and nowhere here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from distkit.callbacks import Callback
from distkit.config import load_config
from distkit.config.launchline import LaunchSettings
from distkit.data import BatchInfo
from distkit.errors import CheckpointError, UsageError
from distkit.evaluation import LossFunction, MetricFunction, measure
from distkit.heartbeat import Heartbeat
from distkit.held import Held
from distkit.logs import RunLog, choose_run_dir, create_run_folder
from distkit.measuring import Measure
from distkit.pace import PaceSetter
from distkit.precision import Precision
from distkit.preparing import Preparer
from distkit.progress import Progress
from distkit.requeue import requeue, requeue_note
from distkit.resuming import WORTH_TELLING_S, Checkpoints
from distkit.seeds import mix_seed, seed_everything
from distkit.signals import EXIT_STATUS, SignalWatch
from distkit.starting import plan_lines, scale_rates, start_lines
from distkit.stepping import OptimizerRun, Stepper
from distkit.strategies.modules import group_name
from distkit.strategies.registry import apply_defaults, make_strategy, settle_strategy
from distkit.window import StepOutput, Weight
from distkit.world import World, detect_environment

__all__ = ["Trainer"]


class Trainer:
    """One training run under the strategy that the config names.

    Settings come from, in rising precedence: the library's defaults, the arguments here, the config file, and the
    options of ``distkit-run``.

    Args:
        config: A mapping of settings (nested or dotted keys), or the path of a YAML file.
        callbacks: Told of steps, evaluations and so on; see :class:`distkit.Callback`.
        **settings: Single settings, such as ``strategy="ddp"`` or ``batch={"accumulate": 4}``.

    Raises:
        ConfigError: A setting is wrong; nothing was started yet.
        StrategyUnavailable: The strategy's engine isn't installed.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        **settings: Any,
    ) -> None:
        launch = LaunchSettings.from_env()
        self._loaded = load_config(script=config, arguments=settings, file=launch.config, overrides=launch.overrides)
        self.config = self._loaded.config
        self._launched = launch.launcher is not None
        environment = detect_environment()
        settle_strategy(self._loaded, environment.size)
        apply_defaults(self._loaded, environment.local_size)
        self.strategy = make_strategy(self.config, launch.preview)
        self.world: World = self.strategy.connect(environment)
        self.precision = Precision(self.config.precision, self.world.device)
        seed_everything(self.config.seed)
        self.run_dir: Path = choose_run_dir(self._loaded, self.world)
        create_run_folder(self.run_dir, self._loaded, self.world)
        self._heartbeat = Heartbeat(self.run_dir, self.world.rank, self)
        self._log = RunLog(self.config, self.run_dir, is_main=self.world.is_main)
        self._stepper = Stepper(self.strategy, self.world, self.config)
        self._progress = Progress()
        self._held = Held()
        self._callbacks = list(callbacks)
        if launch.preview.get("what") == "measure":
            self._callbacks.append(Measure(Path(launch.preview["folder"])))
        self._checkpoints = Checkpoints(
            self.strategy,
            self.world,
            self.config,
            self.run_dir,
            self._held,
            self._stepper,
            self._progress,
            self._callbacks,
        )
        self._pace = PaceSetter(self)
        self.world.control.listener = self._beat
        self._preparer = Preparer(
            self.strategy, self.world, self.config, self.precision, self._held, self._stepper, self._pace
        )
        self._signals = SignalWatch()
        self._signals.install()
        self._stop_asked: str | None = None
        self._started = self._closed = self._evaluating = self._step_begun = False
        self._handed_out: BatchInfo | None = None

    # -- preparing --------------------------------------------------------------------------------------------------

    def init_model(self) -> AbstractContextManager[None]:
        """Build a model inside of this when it is too large for one device."""
        return self.strategy.init_model()

    def prepare(self, *objects: Any) -> Any:
        """Make modules, optimizers, schedulers and DataLoaders work under the strategy.

        Give a model and its optimizer in one call. The first DataLoader is the training data, to which ``batch.*``
        applies; further ones keep their own batch size.

        Returns:
            The prepared objects in the same order; the object itself if there is one.

        Raises:
            UsageError: An object that can't be prepared, or an optimizer without its model.
            OutOfStepError: The model isn't the same on all ranks.
        """
        result = self._preparer.prepare(objects)
        return result[0] if len(result) == 1 else result

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside a prepared one."""
        return self.strategy.unwrap(model)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs from where the run stands (0, or where a checkpoint was taken) up to ``count``.

        Calls set_epoch on samplers and data sets. Ends early when the run is to stop.
        """
        self._progress.planned_epochs = count
        self._start()
        for epoch in range(self._progress.epoch, count):
            if self._agree_to_stop():
                return
            self._progress.epoch = epoch
            for loader in self._held.loaders:
                loader.set_epoch(epoch)
            self._each("on_epoch_start", epoch)
            yield epoch
            self._finish_open_step()
            if self._stepper.flush():
                self._finish_step()
            if self._left_early():
                return
            for run in self._stepper.runs:
                run.rates.epoch_ended()
            self._progress.epoch = epoch + 1
            self._each("on_epoch_end", epoch)

    def step(
        self,
        loss: torch.Tensor | StepOutput,
        *,
        weight: Weight | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> bool:
        """Take in one micro batch's loss; at the window's end clip, step, schedule, log and save.

        Args:
            loss: Scalar, the mean over the micro batch; or a :class:`StepOutput`.
            weight: What the mean was taken over, such as the number of tokens (a number, or a scalar tensor on the
                device); None is the number of samples. 0 leaves the micro batch out.
            metrics: Means over the same, logged with the loss.

        Returns:
            Whether the optimizer's window ended with it.
        """
        output = loss if isinstance(loss, StepOutput) else StepOutput(loss, weight, metrics or {})
        run = self._backward(output.loss, output.weight if weight is None else weight, None, output.metrics)
        if not self._stepper.step(run):
            return False
        self._finish_step()
        return True

    def backward(self, loss: torch.Tensor, *, optimizer: Optimizer | None = None, weight: Weight | None = None) -> None:
        """The first half of :meth:`step`, for scripts with several losses or optimizers.

        Args:
            loss: Scalar, the mean over the micro batch.
            optimizer: The prepared optimizer that this loss is for.
            weight: As in :meth:`step`.
        """
        self._backward(loss, weight, optimizer, None)

    def optimizer_step(self, optimizer: Optimizer | None = None) -> bool:
        """The second half of :meth:`step`. Call it for every micro batch; it steps when the window ends.

        Returns:
            Whether the window ended.
        """
        return self._stepper.step(self._stepper.run_of(optimizer))

    def _backward(
        self, loss: torch.Tensor, weight: Weight | None, optimizer: Optimizer | None, metrics: Mapping[str, Any] | None
    ) -> OptimizerRun:
        self._start()
        stepper = self._stepper
        if not stepper.in_window and (stepper.between_steps or stepper.run_of(optimizer).done):
            self._finish_open_step()
            if not self._step_begun:  # batches come from a loader of the script's own
                self._begin_step()
        return stepper.backward(loss, weight, optimizer, metrics)

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Any],
        *,
        loss_fn: LossFunction,
        epochs: int,
        scheduler: Any | None = None,
        eval_loader: Iterable[Any] | None = None,
        metric_fn: MetricFunction | None = None,
    ) -> dict[str, float]:
        """The whole loop: train, and evaluate after each epoch.

        Args:
            model: As for one device.
            optimizer: Over the model's parameters.
            loader: A DataLoader with the training data.
            loss_fn: ``loss_fn(model, batch)`` returns a loss or a :class:`StepOutput`.
            epochs: How many.
            scheduler: Learning rate scheduler of the optimizer.
            eval_loader: A DataLoader with the evaluation data.
            metric_fn: ``metric_fn(model, batch)`` returns a mean over the batch, or a mapping of such.

        Returns:
            The last evaluation; empty without ``eval_loader``.
        """
        given = [x for x in (model, optimizer, loader, scheduler, eval_loader) if x is not None]
        done = dict(zip(map(id, given), self._preparer.missing(given), strict=True))
        model, loader = done[id(model)], done[id(loader)]
        metrics: dict[str, float] = {}
        for _ in self.epochs(epochs):
            for batch in loader:
                output = loss_fn(model, batch)
                self.step(output)
            if eval_loader is not None:
                metrics = self.evaluate(model, done[id(eval_loader)], loss_fn=loss_fn, metric_fn=metric_fn)
        if eval_loader is not None and not metrics:  # the run was over already when it was resumed
            metrics = self.evaluate(model, done[id(eval_loader)], loss_fn=loss_fn, metric_fn=metric_fn)
        return metrics

    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        loss_fn: LossFunction | None = None,
        metric_fn: MetricFunction | None = None,
        name: str = "eval",
    ) -> dict[str, float]:
        """Evaluate exactly: each sample counts once, for any number of ranks. Called by all ranks.

        Args:
            model: A prepared model.
            loader: A DataLoader, prepared or not.
            loss_fn: As in :meth:`fit`; its mean comes back as ``loss``.
            metric_fn: As in :meth:`fit`.
            name: Put before the names in the log, as ``eval/loss``.

        Returns:
            Means over all samples, the same on all ranks, and ``samples``.
        """
        self._start()
        self._finish_open_step()
        prepared = self._preparer.missing([loader])[0]
        self.world.control.together("evaluate")
        self._evaluating = True
        try:
            metrics = measure(model, prepared, self.world, loss_fn, metric_fn, self._between_evaluated)
        finally:
            self._evaluating = False
        self.world.control.finish()
        self._progress.begin_timing()
        self._progress.metrics = metrics
        if "loss" in metrics:
            for run in self._stepper.runs:
                run.rates.measured(metrics["loss"])
        self.log({f"{name}/{key}": value for key, value in metrics.items()})
        self._each("on_evaluate", metrics)
        if self.config.checkpoint.keep_best is not None:
            self.save(wait=False)
        return metrics

    def _between_evaluated(self) -> None:
        """Between two evaluated batches: the last exchange's answer, and the next question (a signal?)."""
        if self.world.control.finish()[2]:
            self._end_by_signal()
        self.world.control.begin("evaluate", False, False, self._signals.received is not None)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Once, before the first batch: agree, resume, and say what is going to happen."""
        if self._started:
            return
        self._started = True
        self.world.control.together("start")
        loader = self._held.loaders[0] if self._held.loaders else None
        scaling = scale_rates(self.config, self.strategy, self._stepper, loader)
        self._checkpoints.scaling = scaling
        resumed = self._checkpoints.resume()
        # From here on data-parallel ranks draw different numbers (dropout), and tensor-parallel ranks the same.
        torch.manual_seed(mix_seed(self.config.seed, self.world.data.rank))
        total = self._progress.total_steps(loader, self.config.max_steps)
        self._log.start(total, self._progress.step)
        notes = [*self._loaded.notes]
        note = requeue_note() if self.config.checkpoint.requeue else None
        notes += [note] if note is not None else []
        if not self._launched:  # distkit-run has said it
            notes.append(f"run folder {self.run_dir}")
        for line in start_lines(self.config, self.strategy, self.world, loader, scaling, self._stepper, notes):
            self._log.say(line)
        if resumed is not None:
            self._log.say(resumed)
        for line in plan_lines(self.config, self._stepper, loader, self._progress.step, total):
            self._log.say(line)
        self._stepper.measure_norm = self._logs_at(self._progress.step + 1)
        self._progress.begin_timing()
        self._each("on_start")

    def _begin_step(self) -> None:
        """Tell the other ranks that a step begins: before its forward, in which engines may already wait for them."""
        self._step_begun = True
        due = self._checkpoints.due_by_time()
        signalled = self._signals.received is not None
        self.world.control.begin("step", self._stop_asked is not None, due, signalled, self._checkpoints.failed)

    def _finish_step(self) -> None:
        progress = self._progress
        progress.step += 1
        self._log.advance(progress.step)
        self._stepper.next_step()
        self._step_begun = False
        stop, save, signalled, save_failed = self.world.control.finish()
        limit = self.config.max_steps
        progress.stopping = progress.stopping or stop or (limit is not None and progress.step >= limit)
        self._checkpoints.note_position()
        self._each("on_step_end", progress.step)
        if self._logs_at(progress.step) or progress.stopping:
            self._log_point()
        self._stepper.measure_norm = self._logs_at(progress.step + 1)
        if signalled:
            self._end_by_signal()
        failure = self._checkpoints.settle() if save_failed else None
        if failure is not None:
            raise failure
        if save or self._checkpoints.due_by_step(progress.step):
            self.save(wait=False)
            progress.begin_timing()

    def _finish_open_step(self) -> None:
        """Finish a step that was taken by the two halves, now that no other optimizer will step in it."""
        if not self._stepper.between_steps and not self._stepper.in_window:
            self._finish_step()

    def _agree_to_stop(self) -> bool:
        """Between epochs what a rank asked for is heard at once."""
        asked = self._stop_asked is not None
        self._progress.stopping = self.world.control.together("epoch", asked)[0] or self._progress.stopping
        return self.should_stop

    def _left_early(self) -> bool:
        return self.should_stop and not self._pace.epoch_is_done

    def _logs_at(self, step: int) -> bool:
        return step % self.config.log.every_steps == 0 or step == self.config.max_steps

    def _log_point(self) -> None:
        values = self._progress.log_point(self._stepper, self.world)
        for callback in self._callbacks:
            callback.on_log(self, values)
        self._log.point(self._progress.step, values)

    def _end_by_signal(self) -> None:
        """All ranks agreed: checkpoint, leave in order, exit with 128 + the signal's number."""
        name = self._signals.received or "SIGTERM"
        self.print(f"{name} at step {self._progress.step}: saving and ending (exit status {EXIT_STATUS[name]})")
        self._stepper.abandon()
        again = self.config.checkpoint.requeue and name != "SIGINT"
        self.close()
        if again and self.is_main:
            sys.stdout.write(requeue() + "\n")  # the log is closed
        sys.exit(EXIT_STATUS[name])

    # -- stopping ---------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end: ``max_steps`` is reached, or a rank asked. The same on all ranks."""
        limit = self.config.max_steps
        return self._progress.stopping or (limit is not None and self._progress.step >= limit)

    def request_stop(self, reason: str = "asked by the script") -> None:
        """Ask for the end of training; may be called on some ranks only.

        All ranks stop at the end of the step that begins next, or where the epoch ends.
        """
        self._stop_asked = reason
        self.print(f"stop requested: {reason}")

    # -- state ------------------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the last finished step. Called by all ranks.

        Args:
            wait: Return when it is on the disk. False returns as soon as the state is copied and writes in the
                background, as the periodic ones do, if ``checkpoint.background`` is on; a failure is raised at the end
                of the next step.

        Returns:
            Its folder.

        Raises:
            OutOfStepError: Some ranks didn't call it.
            CheckpointError: It can't be written; training state and older checkpoints are as before.
        """
        self._start()
        self._finish_open_step()
        path = self._checkpoints.save(wait=wait)
        self._each("on_save", path)
        return path

    def load(self, path: str | Path | None = None) -> bool:
        """Go on from a checkpoint: models, optimizers, schedulers, position, RNG. Called by all ranks.

        Args:
            path: Its folder; None is the newest of this run.

        Returns:
            Whether there was one.
        """
        self._start()
        self.world.control.together("load")
        line = self._checkpoints.load(path)
        if line is not None:
            self._log.rewind(self._progress.step)
            self._log.say(line)
        return line is not None

    def model_state_dict(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The whole model in its own names, on the CPU of rank 0; empty elsewhere. Called by all ranks.

        Args:
            model: A prepared model; None is the first.
        """
        self.world.control.together("export")
        return self.strategy.model_state_dict(self._one_model(model))

    def export(self, path: str | Path, model: nn.Module | None = None) -> Path:
        """Write the model's weights as one safetensors file, which needs no distkit to read. Called by all ranks.

        Tied weights are stored once; ``safetensors.torch.load_model`` and transformers tie them again.
        """
        from distkit.checkpoint.agreement import on_main
        from distkit.checkpoint.export import write_weights

        model = self._one_model(model)
        index = next(i for i, m in enumerate(self._held.models) if m is model)
        state = self.model_state_dict(model)
        path = Path(path)
        on_main(self.world, lambda: write_weights(path, state, self._held.aliases[group_name("model", index)]))
        return path

    def _one_model(self, model: nn.Module | None) -> nn.Module:
        if model is None and self._held.models:
            return self._held.models[0]
        for known in self._held.models:
            if model is known or model is self.strategy.unwrap(known):
                return known
        raise UsageError("the model was not prepared", hint="model, optimizer = trainer.prepare(model, optimizer)")

    # -- logging and small verbs ------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Log scalars at the present step, to all that ``log.to`` names; rank 0's values are taken."""
        self._log.log(values, self._progress.step)

    def print(self, *values: Any, sep: str = " ") -> None:
        """Print once, from rank 0."""
        self._log.say(sep.join(map(str, values)))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of all data-parallel ranks, in the data's order; rows of padding batches are left out.

        Args:
            tensor: One row a sample of the present batch; or a scalar, which is treated as one row.
        """
        rows = self.strategy.whole_output(tensor).detach()
        rows = rows.reshape(1) if rows.dim() == 0 else rows
        if self._handed_out is not None and self._handed_out.padding:
            rows = rows[:0]
        return torch.cat(self.world.all_gather(rows, axis="data"))

    def mean(self, value: torch.Tensor | float, weight: float = 1.0) -> float:
        """The weighted mean of a scalar over data-parallel ranks, the same on all; waits for the device."""
        scaled = torch.as_tensor(value, dtype=torch.float32, device=self.world.device).detach() * weight
        pair = torch.stack([scaled, torch.as_tensor(weight, dtype=torch.float32, device=self.world.device)])
        total, weights = self.world.all_reduce(pair, axis="data").tolist()
        return float(total / weights) if weights else float("nan")

    def main_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block first (download, tokenise), then the others; no time limit applies."""
        return self.world.main_first()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def global_step(self) -> int:
        """Steps done: windows of the first optimizer."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch that is running, counted from 0."""
        return self._progress.epoch

    def _beat(self, phase: str) -> None:
        """Something else begins, for the launcher's eyes."""
        self._heartbeat.beat(phase, self._progress.step)

    def _each(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(self, *arguments)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save what isn't saved yet, end the logs, leave the other ranks. Called by all; more than once is fine."""
        if self._closed:
            return
        self._finish_open_step()
        if self._stepper.flush():
            self._finish_step()
        if self._started:
            self.world.control.together("close")
        failure = self._await_background_save()
        if self._started:
            if self.config.checkpoint.at_end and self._checkpoints.unsaved:
                if failure is not None:
                    self.print(f"{failure.message}; trying again")
                self.save()
                failure = None
            self._each("on_end")
        self._closed = True
        self._log.close()
        self._heartbeat.close()
        self._signals.remove()
        self.strategy.close()
        if failure is not None:
            raise failure

    def _await_background_save(self) -> CheckpointError | None:
        failure = self._checkpoints.settle(WORTH_TELLING_S)
        step = self._checkpoints.under_way
        if step is not None:
            self.print(f"writing the checkpoint of step {step} to its end")
            failure = self._checkpoints.settle()
        return failure

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            self.close()
        else:  # other ranks may be anywhere: no collective now
            failure = self._checkpoints.settle(self.config.timeouts.grace_s)
            if failure is not None:
                self.print(failure.message)
            self._log.close()
            self._signals.remove()
        return False
