"""The accumulation window: the one place where losses are weighted and divided.

For micro batches m and data-parallel ranks r with weights w and mean losses l, one optimizer step follows the gradient of

    L = sum(w[m, r] * l[m, r]) / W        with W = sum(w[m, r])

over all m and r of the window, so it doesn't matter how the same samples are cut into ranks and micro batches. The
weight is the number of samples, unless the user gives another (tokens).

Where W is known before backward (the loader knows it for datasets with a length), each loss is multiplied by w / W and
nothing is left to do. Elsewhere each loss is multiplied by w / reference, and the gradients by reference / W in the
end; W is then one all-reduce of two numbers a step. The reference is a power of two, so dividing by it rounds nothing;
it only keeps products in the range of fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distkit.errors import UsageError

__all__ = ["StepOutput", "Window", "WindowResult"]

Weight = float | torch.Tensor


@dataclass
class StepOutput:
    """What a ``loss_fn`` may return instead of a bare loss.

    Args:
        loss: Scalar, the mean over the micro batch.
        weight: What the mean was taken over (samples, tokens); None is the number of samples.
        metrics: Scalars that are means over the same, to be logged with the loss.
    """

    loss: torch.Tensor
    weight: Weight | None = None
    metrics: Mapping[str, torch.Tensor | float] = field(default_factory=dict)


@dataclass
class WindowResult:
    """A closed window.

    Args:
        factor: What the gradients must still be multiplied by, the same on all ranks.
        loss: This rank's weighted sum of losses, a scalar on the device.
        weight: This rank's sum of weights.
        metrics: This rank's weighted sums.
    """

    factor: torch.Tensor | float
    loss: torch.Tensor
    weight: Weight
    metrics: dict[str, torch.Tensor]


class Window:
    """The window of one optimizer.

    Args:
        ranks: Data-parallel ranks.
        averages: Whether the engine divides the summed gradients by the number of ranks (DDP does).
        all_reduce: Sums a tensor over the data-parallel ranks.
    """

    def __init__(self, *, ranks: int, averages: bool, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._spread = ranks if averages else 1
        self._ranks = ranks
        self._all_reduce = all_reduce
        self._reference: float | None = None
        self.micro_batches = 0
        self._total: float | None = None
        self._loss: torch.Tensor | float = 0.0
        self._weight: Weight = 0.0
        self._metrics: dict[str, Any] = {}

    @property
    def open(self) -> bool:
        """Whether it holds a micro batch."""
        return self.micro_batches > 0

    def add(
        self,
        loss: torch.Tensor,
        weight: Weight,
        *,
        total: float | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Take one micro batch in.

        Args:
            loss: Scalar with a graph, the mean over the micro batch.
            weight: Its weight; 0 for a batch that only keeps ranks in step.
            total: W, where it is known on all ranks before backward.
            metrics: Means over the same micro batch, to be averaged with the same weights.

        Returns:
            The scalar to run backward on.

        Raises:
            UsageError: The loss is no scalar with a gradient, or micro batches with and without ``total`` are mixed.
        """
        _check_loss(loss)
        if self.open and (total is None) != (self._total is None):
            raise UsageError(
                "micro batches with and without weight= meet in one accumulation window",
                hint="give weight= for every micro batch, or for none",
            )
        self.micro_batches += 1
        self._total = total
        detached = loss.detach()
        wide = detached if detached.device.type == "mps" else detached.double()
        self._loss = self._loss + wide * weight
        self._weight = self._weight + weight
        for name, value in (metrics or {}).items():
            self._metrics[name] = self._metrics.get(name, 0.0) + torch.as_tensor(value).detach() * weight
        divisor = total if total is not None else self._agreed_reference(weight)
        return loss * (weight * self._spread / divisor if divisor else 0.0)

    def close(self) -> WindowResult:
        """End the window; the next micro batch opens a new one."""
        factor: torch.Tensor | float = 1.0
        if self._total is None and self._reference is not None:
            total = self._sum_weights()
            # A window without any weight (all tokens masked) has no gradient: 0, not 0 / 0.
            factor = torch.where(total > 0, self._reference / total, torch.zeros_like(total)).to(torch.float32)
        result = WindowResult(factor, torch.as_tensor(self._loss), self._weight, self._metrics)
        self._reset()
        return result

    def _sum_weights(self) -> torch.Tensor:
        device = self._loss.device if isinstance(self._loss, torch.Tensor) else None
        dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
        return self._all_reduce(torch.as_tensor(self._weight, dtype=dtype, device=device))

    def _agreed_reference(self, weight: Weight) -> float:
        """A power of two near the mean weight of the first micro batches ever, the same on all ranks (waits once)."""
        if self._reference is None:
            device = weight.device if isinstance(weight, torch.Tensor) else self._loss.device  # type: ignore[union-attr]
            mean = float(self._all_reduce(torch.as_tensor(weight, dtype=torch.float32, device=device))) / self._ranks
            self._reference = 2.0 ** round(math.log2(mean)) if mean > 0 and math.isfinite(mean) else 1.0
        return self._reference

    def _reset(self) -> None:
        self.micro_batches = 0
        self._total = None
        self._loss, self._weight, self._metrics = 0.0, 0.0, {}


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"the loss is a {type(loss).__name__}, and not a tensor", hint="trainer.step(loss)   without .item()"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"the loss has the shape {tuple(loss.shape)}, but must be the mean over the micro batch, a scalar",
            hint="trainer.step(loss.mean())",
        )
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient: it was detached, computed under no_grad, or no parameter is trained",
            hint="compute the loss from the prepared model's output, outside of torch.no_grad()",
        )
