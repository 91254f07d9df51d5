"""Exact evaluation: every sample counts once, however the data set is cut into ranks and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distkit.errors import UsageError
from distkit.window import StepOutput
from distkit.world import World

if TYPE_CHECKING:
    from distkit.data import PreparedLoader

__all__ = ["LossFunction", "MetricFunction", "WeightedMeans", "evaluating", "measure"]

LossFunction = Callable[[Any, Any], "torch.Tensor | StepOutput"]
MetricFunction = Callable[[Any, Any], "torch.Tensor | float | Mapping[str, Any] | StepOutput"]


class WeightedMeans:
    """Weighted sums by name on the device, reduced over data-parallel ranks in the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] = {}

    def add(self, name: str, mean: torch.Tensor | float, weight: torch.Tensor | float) -> None:
        """One batch's mean over something, and how much of it there was. A weight of 0 adds nothing, also not NaN."""
        value, amount = self._wide(mean), self._wide(weight)
        product = torch.where(amount == 0, torch.zeros_like(value), value * amount)
        self._sums[name] = self._sums.get(name, torch.zeros_like(product)) + product
        self._weights[name] = self._weights.get(name, torch.zeros_like(amount)) + amount

    def result(self) -> dict[str, float]:
        """The means over all ranks; called by all, one collective."""
        names = sorted(self._sums)
        if not names:
            return {}
        both = torch.stack([*(self._sums[n] for n in names), *(self._weights[n] for n in names)])
        totals = self._world.all_reduce(both, axis="data").tolist()
        half = len(names)
        return {n: totals[i] / totals[half + i] if totals[half + i] else float("nan") for i, n in enumerate(names)}

    def _wide(self, value: torch.Tensor | float) -> torch.Tensor:
        """As a scalar in float64, so that a million batches add up exactly enough; MPS has float32 only."""
        device = self._world.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        tensor = torch.as_tensor(value, device=device).detach().to(dtype)
        if tensor.numel() != 1:
            raise UsageError(
                f"a metric has the shape {tuple(tensor.shape)}, but must be the mean over the batch, a scalar",
                hint="return (prediction == y).float().mean()",
            )
        return tensor.reshape(())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; each submodule's mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def measure(
    model: nn.Module,
    loader: PreparedLoader,
    world: World,
    loss_fn: LossFunction | None,
    metric_fn: MetricFunction | None,
    between: Callable[[], None],
) -> dict[str, float]:
    """Run all batches and average.

    Args:
        model: A prepared model.
        loader: A prepared loader; its padding batches (which keep ranks in step) weigh nothing.
        world: For the sums.
        loss_fn: ``loss_fn(model, batch)``; reported as ``loss``.
        metric_fn: ``metric_fn(model, batch)``: a mean over the batch, reported by the function's name, or a mapping of such.
        between: Called after each batch.

    Returns:
        Means over all samples, and ``samples``, how many there were.
    """
    means = WeightedMeans(world)
    samples = 0
    with evaluating(model):
        for batch in loader:
            info = loader.info
            count = info.samples if info is not None else 0
            samples += count
            if loss_fn is not None:
                _add(means, "loss", loss_fn(model, batch), count)
            if metric_fn is not None:
                _add(means, _name(metric_fn), metric_fn(model, batch), count)
            between()
    total = world.all_reduce(torch.tensor([samples], device=world.device), axis="data")
    return {**means.result(), "samples": int(total)}


def _name(function: MetricFunction) -> str:
    name = getattr(function, "__name__", "metric")
    return "metric" if name == "<lambda>" else name


def _add(means: WeightedMeans, name: str, output: Any, count: int) -> None:
    if isinstance(output, StepOutput):
        weight = float(count) if output.weight is None else output.weight if count else 0.0
        means.add(name, output.loss, weight)
        for key, value in output.metrics.items():
            means.add(key, value, weight)
    elif isinstance(output, Mapping):
        for key, value in output.items():
            means.add(key, value, float(count))
    else:
        means.add(name, output, float(count))
