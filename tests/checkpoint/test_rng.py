"""Random number generators go on where they were."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from distkit.checkpoint import CheckpointReader, collect_rng, restore_rng
from tests.checkpoint.states import manager, save

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def draw(device: str) -> list[float]:
    drawn = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*drawn, *torch.rand(2).tolist(), *torch.rand(2, device=device).tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd"])
def test_all_generators_go_on_through_a_file(tmp_path: Path, device: str, odd: bool) -> None:
    random.seed(1)
    np.random.seed(1)
    if odd:  # half of a pair of normal numbers is kept inside of the generators
        random.gauss(0, 1)
        np.random.randn()
    path = save(manager(tmp_path), rng=collect_rng(device))
    expected = draw(device)
    assert draw(device) != expected
    restore_rng(CheckpointReader(path).rng(0), device)
    assert draw(device) == expected
    assert CheckpointReader(path).rng(1) == {}


def test_what_is_missing_stays_as_it_is() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    restore_rng({}, "cpu")
    assert torch.equal(torch.rand(2), expected)
