"""D8: any two of micro batch, accumulation and global batch give the third; a contradiction shows all the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from distkit.config.schema import BatchConfig
from distkit.data import BatchPlan, batch_size_of, resolve_batch
from distkit.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "loader", "ranks", "expected"),
    [
        ({}, 8, 4, (8, 1, 32)),
        ({"accumulate": 2}, 8, 4, (8, 2, 64)),
        ({"size": 5}, 8, 4, (5, 1, 20)),
        ({"micro": 5, "accumulate": 3}, 8, 2, (5, 3, 30)),
        ({"size": 5, "micro": 5}, 8, 1, (5, 1, 5)),
        ({"per": "global"}, 64, 4, (16, 1, 64)),
        ({"per": "global", "accumulate": 2}, 64, 4, (8, 2, 64)),
        ({"per": "global", "micro": 8}, 64, 4, (8, 2, 64)),
        ({"per": "global", "size": 32}, 64, 4, (8, 1, 32)),
        ({"per": "global", "size": 32, "micro": 4, "accumulate": 2}, 64, 4, (4, 2, 32)),
        ({"per": "global", "micro": 4, "accumulate": 3}, 64, 2, (4, 3, 24)),
        ({"per": "global", "micro": 4}, None, 2, (4, 1, 8)),
        ({"accumulate": 2}, None, 4, (None, 2, None)),
        ({"per": "global"}, None, 4, (None, 1, None)),
    ],
)
def test_any_two_give_the_third(settings: dict[str, Any], loader: int | None, ranks: int, expected: Any) -> None:
    plan = resolve_batch(BatchConfig(**settings), loader, ranks)
    assert (plan.micro, plan.accumulate, plan.global_batch) == expected
    assert plan.data_size == ranks


@pytest.mark.parametrize(
    ("settings", "loader", "ranks", "numbers"),
    [
        ({"per": "global", "size": 50, "accumulate": 2}, 8, 4, ["50", "2", "4", "6.25"]),
        ({"per": "global"}, 10, 4, ["the DataLoader's batch_size=10", "2.5"]),
        ({"per": "global", "size": 64, "micro": 7}, 8, 2, ["64", "7", "2"]),
        ({"per": "global", "size": 64, "micro": 8, "accumulate": 2}, 8, 2, ["64", "8", "2", "32"]),
        ({"per": "global", "size": 3}, 8, 4, ["3", "4"]),
        ({"size": 4, "micro": 5}, 8, 4, ["4", "5"]),
    ],
)
def test_a_contradiction_shows_all_the_numbers(
    settings: dict[str, Any], loader: int, ranks: int, numbers: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(BatchConfig(**settings), loader, ranks)
    assert caught.value.hint is not None
    for number in numbers:
        assert number in caught.value.message


@pytest.mark.parametrize("size", [3, 10, 50, 60, 63])
@pytest.mark.parametrize("accumulate", [None, 2, 4])
def test_the_hint_has_values_that_work(size: int, accumulate: int | None) -> None:
    batch = BatchConfig(size=size, per="global", accumulate=accumulate)
    try:
        resolve_batch(batch, None, 6)
    except ConfigError as error:
        assert error.hint is not None
        for text in error.hint.replace(", or ", " or ").split(" or "):
            key, value = text.removeprefix("--set batch.").split("=")
            works = {"size": size, "accumulate": accumulate, key: int(value)}
            assert resolve_batch(BatchConfig(per="global", **works), None, 6).global_batch == works["size"]


def test_one_line_shows_the_product() -> None:
    assert BatchPlan(8, 2, 4, 64).describe() == "micro batch 8 x accumulate 2 x data-parallel 4 = global batch 64"
    assert "accumulate 2 x data-parallel 4" in BatchPlan(None, 2, 4, None).describe()


def test_batch_size_of_a_loader() -> None:
    data = list(range(8))
    assert batch_size_of(DataLoader(data, batch_size=3)) == 3  # type: ignore[arg-type]
    assert batch_size_of(DataLoader(data, batch_size=None)) is None  # type: ignore[arg-type]
    assert batch_size_of(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))) == 4  # type: ignore[arg-type]
    assert batch_size_of(DataLoader(data, batch_sampler=[[0, 1], [2]])) is None  # type: ignore[arg-type]
