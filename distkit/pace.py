"""Who sets the pace: of the loaders that the script iterates, the one whose batches are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distkit.data import BatchInfo, PreparedLoader

if TYPE_CHECKING:
    from distkit.trainer import Trainer

__all__ = ["PaceSetter"]


class PaceSetter:
    """What prepared loaders tell the Trainer.

    The first prepared loader sets the pace while it is iterated: its windows are the optimizer's, and it ends early when
    the run stops. Batches that are read under ``torch.no_grad()`` or by ``evaluate`` are not trained on.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._running: list[PreparedLoader] = []
        self.epoch_is_done = False
        """Whether the pace-setting loader was read to its end."""

    def epoch_started(self, loader: PreparedLoader) -> None:
        """Batches are about to come."""
        trainer = self._trainer
        trainer._start()
        self._running.append(loader)
        if self._sets_pace(loader):
            self.epoch_is_done = False

    def should_stop(self, loader: PreparedLoader) -> bool:
        """Asked before each window."""
        if not self._sets_pace(loader):
            return False
        self._trainer._finish_open_step()
        self._trainer._beat("data")
        return self._trainer.should_stop

    def batch_ready(self, loader: PreparedLoader, info: BatchInfo) -> None:
        """Just before a batch is handed out."""
        trainer = self._trainer
        trainer._handed_out = info
        if self._sets_pace(loader):
            trainer._held.trained.add(trainer._held.loaders.index(loader))
            trainer._stepper.batch_ready(info)
            trainer._beat("step")
            if info.starts_window:
                trainer._begin_step()
            trainer._checkpoints.restore_rng()

    def epoch_ended(self, loader: PreparedLoader, exhausted: bool) -> None:
        """No more batches: the data ended, the run stops, or the script left the loop."""
        if self._sets_pace(loader):
            self.epoch_is_done = exhausted
            if exhausted:
                self._trainer._finish_open_step()
        if loader in self._running:
            self._running.remove(loader)
        self._trainer._handed_out = None

    def _sets_pace(self, loader: PreparedLoader) -> bool:
        trainer = self._trainer
        if trainer._evaluating or not torch.is_grad_enabled():
            return False
        first = trainer._held.loaders[0]
        return loader is first or first not in self._running
