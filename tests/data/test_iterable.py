"""D2, D3: iterable data sets are split over ranks and workers, nothing is read twice, and ranks end together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distkit.errors import DataError
from tests.data.support import SizedStream, Stream, everyone, in_threads, prepare, read, samples


class Sharded(IterableDataset[int]):
    """Splits itself over workers, as the documentation of torch shows it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.count, step))


class Shuffled(IterableDataset[int]):
    """Shuffles by the global generator, and doesn't split itself."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.count))
        random.shuffle(numbers)
        return iter(numbers)


def together(make: Any, ranks: int, **settings: Any) -> list[Any]:
    """All ranks at once, asking each other; each its (batch, info) pairs, or its error."""
    return in_threads(ranks, lambda rank, ask: read(prepare(make(), rank, ranks, any_rank=ask, **settings)))


@pytest.mark.parametrize("kind", [Stream, Sharded, Shuffled])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (3, 2)])
def test_nothing_is_read_twice_or_missed(kind: Any, ranks: int, workers: int) -> None:
    loaders = everyone(lambda: DataLoader(kind(23), batch_size=2, num_workers=workers), ranks)
    assert sorted(x for loader in loaders for x in samples(loader)) == list(range(23))
    if ranks == 1:
        second = samples(loaders[0])  # what the first epoch found out about the data set still holds
        assert sorted(second) == list(range(23))


@pytest.mark.parametrize("kind", [Stream, Shuffled])
def test_every_cut_reads_the_same_in_each_step(kind: Any) -> None:
    def steps(ranks: int, workers: int, micro: int) -> list[list[int]]:
        loaders = everyone(lambda: DataLoader(kind(23), num_workers=workers), ranks, batch={"size": micro})
        epochs = [[batch for batch, _ in read(loader)] for loader in loaders]
        return [sorted(x for batch in step for x in batch) for step in zip(*epochs, strict=True)]

    reference = steps(1, 0, 12)
    for ranks, workers, micro in ((2, 0, 6), (1, 2, 12), (3, 2, 4), (4, 0, 3)):
        assert steps(ranks, workers, micro) == reference


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 7, 11, 12, 13])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("uneven", ["pad", "stop"])
def test_ranks_end_together(count: int, ranks: int, uneven: str) -> None:
    epochs = together(lambda: DataLoader(Stream(count), batch_size=2), ranks, uneven=uneven, batch={"accumulate": 2})
    assert len({len(epoch) for epoch in epochs}) == 1
    found = [x for epoch in epochs for batch, info in epoch for x in batch[: info.samples]]
    if uneven == "pad":
        assert sorted(found) == list(range(count))
    else:
        assert len(set(found)) == len(found) >= count - count % ranks - 2 * ranks
    for epoch in epochs:
        for index, (batch, info) in enumerate(epoch):
            assert len(batch) > 0
            assert info.padding == (info.samples == 0)
            assert info.last == (index + 1 == len(epoch))
            assert info.starts_window == (index % 2 == 0)
            assert info.ends_window == (index % 2 == 1 or info.last)


def test_pad_repeats_the_last_batch_with_no_weight() -> None:
    epochs = together(lambda: DataLoader(Sharded(7), batch_size=1), 2, uneven="pad")
    assert [batch for batch, _ in epochs[0]] == [[0], [2], [4], [6]]
    assert [(batch, info.samples, info.padding) for batch, info in epochs[1]] == [
        ([1], 1, False), ([3], 1, False), ([5], 1, False), ([5], 0, True),
    ]  # fmt: skip


def test_stop_ends_with_the_first_rank_that_ran_out() -> None:
    epochs = together(lambda: DataLoader(Sharded(7), batch_size=1), 2, uneven="stop")
    assert [[batch for batch, _ in epoch] for epoch in epochs] == [[[0], [2], [4]], [[1], [3], [5]]]


def test_fewer_elements_than_ranks() -> None:
    epochs = together(lambda: DataLoader(Stream(2), batch_size=4), 3, uneven="pad")
    assert [[(batch, info.samples) for batch, info in epoch] for epoch in epochs] == [
        [([0], 1)],
        [([1], 1)],
        [([1], 0)],
    ]
    errors = together(lambda: DataLoader(Sharded(1), batch_size=4), 2, uneven="pad")
    assert all(isinstance(error, DataError) and "nothing at all" in error.message for error in errors)


@pytest.mark.parametrize("count", [0, 5, 12, 15])
def test_drop_last(count: int) -> None:
    epochs = together(lambda: DataLoader(Stream(count), batch_size=2, drop_last=True), 3)
    assert [len(epoch) for epoch in epochs] == [count // 6] * 3
    assert all(info.samples == 2 for epoch in epochs for _, info in epoch)


def test_each_element_a_batch() -> None:
    class Batches(Stream):
        def __iter__(self) -> Iterator[Any]:
            return (torch.full((i + 1,), i) for i in range(self.count))

    for workers in (0, 2):
        loaders = everyone(lambda w=workers: DataLoader(Batches(7), batch_size=None, num_workers=w), 2)  # type: ignore[misc]
        epochs = [read(loader) for loader in loaders]
        assert [[batch[0] for batch, _ in epoch] for epoch in epochs] == [[0, 2, 4, 6], [1, 3, 5]]
        assert [info.samples for _, info in epochs[0]] == [1, 3, 5, 7]


def test_a_share_of_its_own_is_left_alone() -> None:
    class Mine(Sharded):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            first, step = (0, 1) if info is None else (info.id, info.num_workers)
            return iter(range(100 * self.rank + first, 100 * self.rank + 6, step))

    for workers in (0, 2):
        for rank in range(2):
            loader = prepare(DataLoader(Mine(rank), batch_size=2, num_workers=workers), rank, 2, iterable="own")
            assert sorted(samples(loader)) == list(range(100 * rank, 100 * rank + 6))


def test_a_data_set_that_can_be_split_into_few_shards_only() -> None:
    class Few(Sharded):
        num_shards = 2

    loaders = everyone(lambda: DataLoader(Few(23), batch_size=2, num_workers=2), 2)
    assert sorted(x for loader in loaders for x in samples(loader)) == list(range(23))


def test_a_data_set_that_is_its_own_iterator() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.numbers = iter(range(9))

        def __iter__(self) -> Iterator[int]:
            get_worker_info().num_workers  # type: ignore[union-attr]  # noqa: B018
            return self  # type: ignore[return-value]

        def __next__(self) -> int:
            return next(self.numbers)

    assert samples(prepare(DataLoader(Once(), batch_size=2), 0, 2)) == list(range(9))


def test_one_that_asks_too_late_is_told() -> None:
    class Late(Stream):
        def __iter__(self) -> Iterator[int]:
            yield 0
            info = get_worker_info()
            assert info is not None
            yield from range(info.id, self.count, info.num_workers)

    with pytest.raises(DataError, match="only after its first element"):
        samples(prepare(DataLoader(Late(9), batch_size=2), 0, 2))


def test_worker_info_is_put_back() -> None:
    loader = prepare(DataLoader(Sharded(9), batch_size=2), 0, 2)
    for _ in loader:
        assert get_worker_info() is None


def test_workers_that_live_on_hear_of_the_next_epoch() -> None:
    class ByEpoch(Stream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(range(100 * self.epoch, 100 * self.epoch + self.count))

    loader = prepare(DataLoader(ByEpoch(5), batch_size=2, num_workers=2, persistent_workers=True))
    for epoch in range(3):
        assert samples(loader) == list(range(100 * epoch, 100 * epoch + 5))


def test_lengths() -> None:
    def length(ranks: int, **arguments: Any) -> int:
        return len(prepare(DataLoader(SizedStream(23), batch_size=2, **arguments), 0, ranks))

    assert (length(1), length(2), length(2, drop_last=True), length(3)) == (12, 6, 5, 4)
    assert prepare(DataLoader(SizedStream(23), batch_size=2), 0, 2, batch={"accumulate": 4}).steps_per_epoch == 2
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Stream(23), batch_size=2)))


def test_the_scripts_own_collate_function_sees_plain_elements() -> None:
    seen: list[Any] = []

    def collate(elements: list[int]) -> list[int]:
        seen.append(elements)
        return elements

    read(prepare(DataLoader(Stream(5), batch_size=2, collate_fn=collate)))
    assert seen == [[0, 1], [2, 3], [4]]
