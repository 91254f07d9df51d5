"""Learning rates: scaling, warm-up, and the plan that is printed against what a run does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from distkit.errors import UsageError
from distkit.optim import LearningRates, planned_rates, scale_learning_rate, warmup_factor


def make() -> SGD:
    return SGD(
        [
            {"params": [torch.zeros(2, requires_grad=True)]},
            {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.01},
        ],
        lr=0.1,
    )


def chain(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 7)], [3])


SCHEDULES: list[Callable[[Optimizer], LRScheduler]] = [
    lambda o: LambdaLR(o, lambda s: 1 / (1 + s)),
    lambda o: ExponentialLR(o, 0.5),
    lambda o: CosineAnnealingLR(o, 10),
    lambda o: OneCycleLR(o, max_lr=0.3, total_steps=11),
    chain,
]


def run(optimizer: Optimizer, scheduler: LRScheduler | None, steps: int, warmup: int = 0) -> list[float]:
    rates = LearningRates(optimizer, scheduler, warmup_steps=warmup)
    used = []
    for step in range(steps):
        rates.before_step(step)
        optimizer.step()
        rates.after_step(True)
        used.append(rates.used[0])
    return used


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_plan_is_what_the_run_does(schedule: Callable[[Optimizer], LRScheduler], warmup: int) -> None:
    optimizer = make()
    scheduler = schedule(optimizer)
    plan = planned_rates(optimizer, scheduler, done=0, total=10, warmup_steps=warmup)
    used = run(optimizer, scheduler, 10, warmup)
    assert plan == pytest.approx([used[0], used[5], used[9]], rel=1e-6)


def test_the_plan_changes_nothing() -> None:
    optimizer = make()
    scheduler = CosineAnnealingLR(optimizer, 10)
    planned_rates(optimizer, scheduler, done=0, total=10, warmup_steps=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0
    assert scheduler.optimizer is optimizer


def test_a_plateau_has_no_plan() -> None:
    optimizer = make()
    assert planned_rates(optimizer, ReduceLROnPlateau(optimizer), done=0, total=10, warmup_steps=0) is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scaling_multiplies_the_whole_schedule(schedule: Callable[[Optimizer], LRScheduler]) -> None:
    plain = make()
    expected = run(plain, schedule(plain), 8)
    scaled = make()
    scheduler = schedule(scaled)
    result = scale_learning_rate(scaled, [scheduler], rule="linear", reference=8, batch=32)
    assert result.factor == 4.0
    assert run(scaled, scheduler, 8) == pytest.approx([4 * lr for lr in expected])


def test_square_root_rule() -> None:
    optimizer = make()
    assert scale_learning_rate(optimizer, [], rule="sqrt", reference=8, batch=32).factor == 2.0
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.2, 0.02])


def test_warmup_rises_to_one() -> None:
    assert [warmup_factor(s, 4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


def test_a_skipped_step_leaves_the_schedule() -> None:
    """R2."""
    optimizer = make()
    scheduler = ExponentialLR(optimizer, 0.5)
    rates = LearningRates(optimizer, scheduler)
    rates.before_step(0)
    rates.after_step(False)
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_script_that_steps_the_scheduler_too_is_told() -> None:
    optimizer = make()
    scheduler = ExponentialLR(optimizer, 0.5)
    rates = LearningRates(optimizer, scheduler)
    rates.before_step(0)
    optimizer.step()
    rates.after_step(True)
    scheduler.step()
    with pytest.raises(UsageError, match=r"remove scheduler\.step\(\)"):
        rates.before_step(1)


def test_by_epoch() -> None:
    optimizer = make()
    rates = LearningRates(optimizer, ExponentialLR(optimizer, 0.5), by_epoch=True)
    for epoch in range(2):
        for step in range(3):
            rates.before_step(3 * epoch + step)
            optimizer.step()
            rates.after_step(True)
            assert rates.used[0] == pytest.approx(0.1 * 0.5**epoch)
        rates.epoch_ended()


def test_by_epoch_a_script_that_steps_the_scheduler_too_is_told() -> None:
    """The usual mistake of a migration: scheduler.step() is still at the epoch's end."""
    optimizer = make()
    scheduler = ExponentialLR(optimizer, 0.5)
    rates = LearningRates(optimizer, scheduler, by_epoch=True)
    rates.before_step(0)
    optimizer.step()
    rates.after_step(True)
    scheduler.step()
    with pytest.raises(UsageError, match=r"remove scheduler\.step\(\)") as error:
        rates.epoch_ended()
    assert "schedule_by=epoch" not in str(error.value)  # it is set already


@pytest.mark.parametrize("done", [0, 3, 5])
def test_the_plan_of_a_schedule_by_epoch(done: int) -> None:
    """Three steps an epoch, twelve in all; also from the middle."""
    optimizer = make()
    scheduler = ExponentialLR(optimizer, 0.5)
    rates = LearningRates(optimizer, scheduler, by_epoch=True)
    used, plan = [], None
    for step in range(12):
        if step == done:
            plan = planned_rates(optimizer, scheduler, done=done, total=12, warmup_steps=0, every=3)
        rates.before_step(step)
        optimizer.step()
        rates.after_step(True)
        used.append(rates.used[0])
        if step % 3 == 2:
            rates.epoch_ended()
    assert plan == pytest.approx([used[done], used[done + (12 - done) // 2], used[11]])
