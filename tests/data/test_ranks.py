"""D2, D3 and D6 over real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool

CASES = "tests.data.cases:"


def run(pool: Pool, kind: str, count: int, ranks: int = 2, **settings: Any) -> list[Any]:
    epochs = pool.run(CASES + "epoch", ranks, timeout=60, kind=kind, count=count, **settings)
    assert len({len(epoch) for epoch in epochs}) == 1, "ranks have unequal numbers of batches"
    return epochs


def real(epochs: list[Any]) -> list[Any]:
    return sorted(x for epoch in epochs for batch, count in epoch for x in batch[:count])


@pytest.mark.parametrize("kind", ["stream", "shuffled", "sharded", "by rank and worker", "by rank"])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_are_read_once_by_all_ranks_together(pool: Pool, kind: str, workers: int) -> None:
    assert real(run(pool, kind, 23, workers=workers)) == list(range(23))


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_a_map_style_set_is_read_once(pool: Pool, count: int) -> None:
    assert real(run(pool, "numbers", count, ranks=4)) == list(range(count))


def test_unequal_streams_end_together(pool: Pool) -> None:
    padded = run(pool, "unequal", 5, uneven="pad")
    assert padded[0] == [[[0, 1], 2], [[2, 3], 2], [[4, 5], 2], [[6, 7], 2], [[8, 9], 2]]
    assert padded[1] == [[[0, 1], 2], [[2, 3], 2], [[4], 1], [[4], 0], [[4], 0]]
    stopped = run(pool, "unequal", 5, uneven="stop")
    assert [len(epoch) for epoch in stopped] == [3, 3]


def test_a_rank_that_never_had_a_batch_is_an_error_on_all(pool: Pool) -> None:
    messages = pool.run(CASES + "epoch", 2, timeout=60, kind="sharded", count=1)
    assert all("nothing at all" in message for message in messages)


def test_ranks_with_different_data_are_told(pool: Pool) -> None:
    messages = pool.run(CASES + "lengths_differ", 2, timeout=60)
    assert "rank 0 has 20 samples" in messages[0] and "rank 1 has 21 samples" in messages[1]


def test_augmentation_is_the_same_at_one_and_three_processes(pool: Pool) -> None:
    assert real(run(pool, "augmented", 10, ranks=1)) == real(run(pool, "augmented", 10, ranks=3, workers=1))
