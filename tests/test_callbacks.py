"""EarlyStopping; the hooks' moments are tested with the Trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from distkit.callbacks import Callback, EarlyStopping
from distkit.errors import ConfigError, UsageError


class Asked:
    """Stands in for a Trainer that is asked to stop."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def request_stop(self, reason: str) -> None:
        self.reason = reason


def evaluations_until_stop(callback: EarlyStopping, *values: float) -> int | None:
    trainer: Any = Asked()
    for index, value in enumerate(values, start=1):
        callback.on_evaluate(trainer, {"accuracy": 1.0, callback.metric: value})
        if trainer.reason is not None:
            return index
    return None


@pytest.mark.parametrize(
    ("settings", "values", "stops"),
    [
        ({"patience": 2}, (3.0, 2.0, 2.5, 2.4), 4),
        ({"patience": 2}, (3.0, 2.0, 2.5, 1.9, 2.0), None),
        ({"patience": 1}, (3.0, 3.0), 2),
        ({"patience": 1, "min_delta": 0.5}, (3.0, 2.4, 2.0), 3),
        ({"patience": 2, "mode": "max"}, (0.5, 0.6, 0.6, 0.5), 4),
        ({"patience": 2}, (math.nan, math.nan), 2),
        ({"patience": 2}, (math.nan, 2.0, math.nan, 1.0, math.nan), None),
        ({"patience": 1}, (math.inf, 5.0, 6.0), 3),
    ],
)
def test_when_it_stops(settings: dict[str, Any], values: tuple[float, ...], stops: int | None) -> None:
    assert evaluations_until_stop(EarlyStopping("loss", **settings), *values) == stops


def test_the_reason_has_the_numbers() -> None:
    trainer: Any = Asked()
    callback = EarlyStopping("loss", patience=2)
    for value in (1.5, 2.0, 1.75):
        callback.on_evaluate(trainer, {"loss": value})
    assert trainer.reason == "loss was best at 1.5, 2 evaluations ago, and is 1.75 now"


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"'acuracy', but the evaluation has: accuracy, loss\nHint: EarlyStopping\('accuracy'\)"
    ):
        EarlyStopping("acuracy").on_evaluate(Asked(), {"loss": 1.0, "accuracy": 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"mode": "best"}, {"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}])
def test_values_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="EarlyStopping was given"):
        EarlyStopping("loss", **settings)


def test_it_ends_a_run(tmp_path: Any) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import distkit

    with distkit.Trainer(run_dir=str(tmp_path), callbacks=[EarlyStopping("loss", patience=1)]) as trainer:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)

        def loss_fn(model: Any, batch: Any) -> torch.Tensor:
            return model(batch[0]).square().mean()

        trainer.fit(model, optimizer, loader, loss_fn=loss_fn, epochs=50, eval_loader=loader)
        assert trainer.should_stop
        assert trainer.global_step < 10


def test_hooks_do_nothing_by_themselves() -> None:
    callback, trainer = Callback(), None
    for hook, *arguments in (
        ("on_start",), ("on_epoch_start", 0), ("on_step_end", 1), ("on_log", {}), ("on_evaluate", {}),
        ("on_save", "x"), ("on_epoch_end", 0), ("on_end",),
    ):  # fmt: skip
        assert getattr(callback, str(hook))(trainer, *arguments) is None
