"""Models as people have them, under every strategy: one of transformers, and a residual network with BatchNorm."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distkit.strategies.registry import strategy_class
from tests.contract.test_contract import column, every_two
from tests.pool import Pool

CASES = "tests.strategies.fsdp_cases:"


@pytest.fixture(scope="module")
def once(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the strategies are compared with, trained once."""

    @cache
    def run(case: str, strategy: str, processes: int) -> dict[str, Any]:
        folder = str(tmp_path_factory.mktemp("once"))
        model = {"model": "gpt2", "settings": {"optim.clip_norm": 0.5}} if case == "train" else {}
        return pool.run(CASES + case, processes, strategy=strategy, run_dir=folder, **model)[0]

    return run


@every_two
def test_gpt2_of_transformers(pool: Pool, once: Any, tmp_path: Path, strategy: str) -> None:
    """Weights tied by the library, outputs in its own classes; equal to one process."""
    expected = once("train", "single", 1)
    settings = {"optim.clip_norm": 0.5, "batch.accumulate": 3, "optim.lr_scaling": "none"}
    result = pool.run(CASES + "train", 2, strategy=strategy, run_dir=str(tmp_path), model="gpt2", settings=settings)[0]
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)
    assert column(result, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-4)


@every_two
def test_a_resnet(pool: Pool, once: Any, tmp_path: Path, strategy: str) -> None:
    """BatchNorm's statistics are a rank's own, so the comparison is with ddp on as many data-parallel ranks."""
    data_ranks = 2 // strategy_class(strategy).defaults(2).get("parallel.tensor", 1)
    expected = once("conv", "ddp", data_ranks)
    settings = {"optim.lr_scaling": "none"}
    result = pool.run(CASES + "conv", 2, strategy=strategy, run_dir=str(tmp_path), settings=settings)[0]
    assert column(result, "loss") == pytest.approx(column(expected, "loss"), abs=1e-5)
    assert column(result, "loss")[-1] < column(result, "loss")[0] * 0.8
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-4)
