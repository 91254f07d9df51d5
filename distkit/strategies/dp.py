"""nn.DataParallel: one process, one thread a GPU. For a quick try; DDP is faster on the same GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distkit.strategies.base import Capabilities
from distkit.strategies.modules import compile_in_place, dress
from distkit.strategies.single import SingleStrategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distkit.precision import Precision

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(SingleStrategy):
    """Splits each batch over the GPUs that this one process sees, and gathers the outputs on the first.

    The loss is computed on the gathered outputs, so its weights are those of the whole batch. Without two GPUs
    nn.DataParallel does nothing, and the run is one on a single device; a line says so.
    """

    name = "dp"
    capabilities = Capabilities(
        summary="torch.nn.DataParallel: one process, one thread a GPU",
        processes="one",
        best_for="a quick try on one machine; move on to ddp",
    )

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`."""
        import torch

        from distkit.strategies.passthrough import OpenDataParallel

        prepared: list[nn.Module] = []
        for model in models:
            compile_in_place(dress(model.to(precision.device), self.config, precision), self.config)
            if precision.device.type == "cuda" and torch.cuda.device_count() > 1:
                prepared.append(OpenDataParallel(model))
            else:
                prepared.append(model)
        self.keep(models, optimizers, precision)
        return prepared, list(optimizers)

    def notes(self) -> list[str]:
        """What nn.DataParallel does on this machine."""
        import torch

        count = torch.cuda.device_count() if self.config.device in ("auto", "cuda") else 0
        if count > 1:
            return [f"dp: nn.DataParallel splits each batch over {count} GPUs in one process; ddp is faster"]
        return [f"dp: nn.DataParallel finds {count} GPUs here, so the model runs unsplit on one device, as with single"]

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :class:`Strategy`."""
        from torch.nn import DataParallel

        return model.module if isinstance(model, DataParallel) else model
