"""What `distkit plan --layout` does in the script's process: show what would be split, and end before anything is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from distkit.errors import DistkitError
from distkit.strategies.single import SingleStrategy
from distkit.strategies.tensor_parallel.detect import detect, random_twin
from distkit.strategies.tensor_parallel.example import find_run
from distkit.strategies.tensor_parallel.report import families, layout_to_json, summary
from distkit.strategies.tensor_parallel.wishes import plan_of, wishes_of

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.precision import Precision

__all__ = ["LayoutPreview", "show_errors_short"]


class LayoutPreview(SingleStrategy):
    """One process, up to the first ``prepare`` with a model that is trained.

    Args:
        config: ``parallel.tensor`` and ``parallel.tensor_layout`` are used.
        as_json: Print JSON, for programs.
        done: A file to make when the layouts were shown.
    """

    def __init__(self, config: Config, *, as_json: bool, done: Path) -> None:
        super().__init__(config)
        self.as_json, self.done = as_json, done

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; the strategy that is to train has had its say."""

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """Print the layouts of the models, and end the process with status 0."""
        trained = [model for model in models if any(p.requires_grad for p in model.parameters())]
        if not trained:
            return super().prepare(models, optimizers, precision)
        for model in trained:
            self._show(model)
        sys.stdout.flush()
        self.done.touch()
        raise SystemExit(0)

    def _show(self, model: nn.Module) -> None:
        chosen, size = self.config.parallel.tensor_layout, self.config.parallel.tensor
        wishes = wishes_of(model, chosen if isinstance(chosen, dict) else {})
        layout = detect(model, find_run(model, random_twin(model), self.example_loader), size, wishes, plan_of(model))
        if self.as_json:
            sys.stdout.write(json.dumps({"model": type(model).__name__, **layout_to_json(layout)}) + "\n")
            return
        from distkit.commandline import print_table

        sys.stdout.write(summary(model, layout) + "\n")
        rows = [(f.name, str(f.layers), f.style, f"{f.parameters:,}", f.why) for f in families(model, layout)]
        print_table(("layer", "count", "split", "parameters", "why"), rows)


def show_errors_short() -> None:
    """From here on this process, which is there for the preview only, says errors of ours as the commands do."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, DistkitError):
            sys.stderr.write(f"distkit: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
