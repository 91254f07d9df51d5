"""What ``distkit plan --exact train.py`` does in the script's process: the script trains as one rank of many, without values.

Its Trainer sees one process. Behind it the real strategy prepares the model as rank 0 of all ranks, on tensors without data,
and takes two steps with the script's own forward and loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from distkit.advise.exact.allocations import Allocations
from distkit.advise.exact.faking import Watch, fake_tensors, watching
from distkit.advise.exact.observing import Observer
from distkit.advise.exact.run import one_of_many, strategy_over
from distkit.strategies.profiling import layout_without_values, materialize, on_meta
from distkit.strategies.single import SingleStrategy
from distkit.strategies.without_data import fake_mode, numbers_without_data

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.strategies.base import Strategy
    from distkit.strategies.tensor_parallel.layout import Layout
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["ExactPreview"]

_LED = (
    "backward", "clip_grad_norm", "full_parameters", "modules_with_hooked_arguments", "optimizer_step", "scale_gradients",
    "set_gradient_sync", "state_tensors", "sync_accumulated", "unscale", "unwrap", "whole_output", "without_gradient",
    "zero_grad",
)  # fmt: skip
"""Methods that are the real strategy's."""


class ExactPreview(SingleStrategy):
    """One process in front, the real strategy behind.

    Args:
        config: As for the run that is planned.
        nodes: It has so many.
        each: And so many processes on each.
        done: A file for what was seen, as JSON.
    """

    def __init__(self, config: Config, *, nodes: int, each: int, done: Path) -> None:
        super().__init__(config)
        self.done = done
        self._nodes, self._each = nodes, each
        self._mode = fake_mode()
        self._watch = Watch(Allocations())
        self._building, self._running, self._window = ExitStack(), ExitStack(), ExitStack()
        self._in_window = False
        self._observer: Observer | None = None
        self._layouts: dict[int, Layout] = {}
        """By the identity of the model."""

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; the strategy that is to train has its say later."""

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`; from here on parameters have no values."""
        self._building.enter_context(on_meta())
        return super().connect(environment)

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`; the real one does it."""
        self._building.close()
        if not models:
            return list(models), list(optimizers)
        if self.config.parallel.tensor > 1:
            for model in models:
                if any(p.requires_grad for p in model.parameters()):
                    self._layouts[id(model)] = layout_without_values(model, self.config, self.example_loader)
        if self._observer is None:
            self._observer = self._start()
        with ExitStack() as window:
            self._open(window)
            for model in models:
                materialize(model, optimizers, self._mode)
            prepared = self._observer.prepare(models, optimizers, precision)
        for model in prepared[0]:
            model.register_forward_pre_hook(self._forward_begins, prepend=True)
        real = self._observer.strategy
        self.models, self.optimizers = real.models, real.optimizers
        return prepared

    def _start(self) -> Observer:
        """The real strategy, as rank 0 of all."""
        layout_of = None if self.config.parallel.tensor == 1 else lambda model: self._layouts[id(model)]
        environment = self._running.enter_context(one_of_many(self.config.strategy, self._nodes, self._each))
        real = strategy_over(self.config, self._nodes * self._each, layout_of)
        real.example_loader = self.example_loader
        real.connect(environment)
        observer = Observer(real, self._watch, each=self._each)
        for name in _LED:
            setattr(self, name, self._led(real, name))
        self._running.enter_context(numbers_without_data())
        return observer

    def _led(self, real: Strategy, name: str) -> Callable[..., Any]:
        """The real strategy's method, in which no tensor has data."""

        def led(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as window:
                self._open(window)
                result = getattr(real, name)(*args, **kwargs)
            if name == "backward":
                self._close()
            assert self._observer is not None
            if name == "zero_grad" and self._observer.done:
                self._write(self._observer)
            return result

        return led

    # -- where no tensor has data -----------------------------------------------------------------------------------

    def _forward_begins(self, model: nn.Module, args: Any) -> None:
        """From a forward to the end of its backward; not where the script evaluates."""
        if torch.is_grad_enabled() and model.training and not self._in_window:
            assert self._observer is not None
            self._open(self._window)
            self._in_window = True
            self._observer.forward_begins()

    def _open(self, window: ExitStack) -> None:
        if not self._in_window:
            window.enter_context(fake_tensors(self._mode))
            window.enter_context(watching(self._watch))

    def _close(self) -> None:
        self._window.close()
        self._in_window = False

    def _write(self, observer: Observer) -> None:
        self.done.write_text(json.dumps(asdict(observer.seen())), encoding="utf-8")
        raise SystemExit(0)
