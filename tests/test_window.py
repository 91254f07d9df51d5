"""The window's arithmetic against the formula written out."""

from __future__ import annotations

import pytest
import torch

from distkit.errors import UsageError
from distkit.window import Window


def alone() -> Window:
    return Window(ranks=1, averages=False, all_reduce=lambda t: t)


def gradient(window: Window, parts: list[tuple[list[float], float]], total: float | None) -> float:
    """Losses are means of x * p over the parts; the gradient by p after the window is closed."""
    p = torch.ones((), requires_grad=True)
    for values, weight in parts:
        window.add((p * torch.tensor(values)).mean(), weight, total=total).backward()
    factor = window.close().factor
    assert p.grad is not None
    return float(p.grad * factor)


PARTS = [([1.0, 2.0, 3.0], 3.0), ([10.0], 1.0), ([4.0, 8.0], 2.0)]
MEAN = (1 + 2 + 3 + 10 + 4 + 8) / 6


@pytest.mark.parametrize("total", [6.0, None])
def test_gradient_is_that_of_the_weighted_mean(total: float | None) -> None:
    assert gradient(alone(), PARTS, total) == pytest.approx(MEAN, rel=1e-6)


@pytest.mark.parametrize("total", [6.0, None])
def test_reported_loss_is_the_weighted_mean(total: float | None) -> None:
    window = alone()
    p = torch.ones((), requires_grad=True)
    for values, weight in PARTS:
        window.add((p * torch.tensor(values)).mean(), weight, total=total, metrics={"m": sum(values) / len(values)})
    result = window.close()
    assert float(result.loss / result.weight) == pytest.approx(MEAN)
    assert float(result.metrics["m"] / result.weight) == pytest.approx(MEAN)


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_ranks_and_micro_batches_are_alike(averages: bool, known: bool) -> None:
    """Three ranks by hand: each its own window, sums where an engine would all-reduce."""
    weights = [3.0, 1.0, 2.0]
    gradients, factors = [], []
    for (values, weight), _ in zip(PARTS, weights, strict=True):
        window = Window(
            ranks=3,
            averages=averages,
            all_reduce=lambda t: torch.full_like(t, 6.0) if t.dtype == torch.float64 else t * 0 + 6.0,
        )
        p = torch.ones((), requires_grad=True)
        window.add((p * torch.tensor(values)).mean(), weight, total=6.0 if known else None).backward()
        assert p.grad is not None
        gradients.append(float(p.grad))
        factors.append(float(window.close().factor))
    engine = sum(gradients) / (3 if averages else 1)
    assert len(set(factors)) == 1
    assert engine * factors[0] == pytest.approx(MEAN, rel=1e-6)


def test_known_totals_leave_nothing_to_scale() -> None:
    window = alone()
    p = torch.ones((), requires_grad=True)
    window.add(p * 2, 1.0, total=1.0)
    assert window.close().factor == 1.0


def test_the_reference_is_a_power_of_two_and_stays() -> None:
    window = alone()
    p = torch.ones((), requires_grad=True)
    for weight in (1000.0, 3.0):
        scaled = window.add(p * 1, weight)
        assert float(scaled.detach()) == weight / 1024
        window.close()


def test_all_masked_gives_a_zero_factor() -> None:
    window = alone()
    p = torch.ones((), requires_grad=True)
    window.add(p * 1, 0.0)
    assert float(window.close().factor) == 0.0


def test_tensor_weights_stay_on_the_device() -> None:
    window = alone()
    p = torch.ones((), requires_grad=True)
    window.add(p * 3, torch.tensor(4.0)).backward()
    result = window.close()
    assert isinstance(result.factor, torch.Tensor)
    assert float(p.grad * result.factor) == pytest.approx(3.0)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (1.5, "not a tensor"),
        (torch.ones(3, requires_grad=True) * 1, r"shape \(3,\)"),
        (torch.ones(()), "no gradient"),
    ],
)
def test_bad_losses_are_refused(loss: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        alone().add(loss, 1.0)  # type: ignore[arg-type]


def test_mixing_known_and_unknown_totals_is_refused() -> None:
    window = alone()
    p = torch.ones((), requires_grad=True)
    window.add(p * 1, 1.0, total=2.0)
    with pytest.raises(UsageError, match="weight="):
        window.add(p * 1, 1.0)
