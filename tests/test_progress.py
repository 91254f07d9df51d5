"""How many steps a run has in all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distkit.progress import Progress


def loader(steps: int, batch: int) -> SimpleNamespace:
    return SimpleNamespace(steps_per_epoch=steps, plan=SimpleNamespace(global_batch=batch))


@pytest.mark.parametrize(
    ("step", "samples", "total"),
    [
        (0, 0, 640),
        (110, 880, 110 + 640 - 220),  # made with batches of 8
        (220, 880, 640),  # made with batches of 4
        (221, 880, 640),  # a smaller last batch in an epoch
    ],
)
def test_steps_with_another_batch_before(step: int, samples: int, total: int) -> None:
    progress = Progress(step=step, epoch=13, samples=samples, planned_epochs=40)
    assert progress.total_steps(loader(16, 4), None) == total  # type: ignore[arg-type]
    assert progress.total_steps(loader(16, 4), 200) == 200  # type: ignore[arg-type]
