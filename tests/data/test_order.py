"""D1, D6, L4, L5: how map-style data is cut. Ranks partition the set, keep in step, and read what one process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from distkit.data.order import share
from tests.data.support import Numbers, everyone, prepare, read, samples, windows

SIZES = [1, 2, 3, 7, 8, 23, 24, 25]


def make(count: int, **arguments: Any) -> Any:
    return lambda: DataLoader(Numbers(count), **{"batch_size": 2, "shuffle": True, **arguments})


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_partition_the_set(count: int, ranks: int, accumulate: int) -> None:
    for shuffle in (True, False):
        loaders = everyone(make(count, shuffle=shuffle), ranks, batch={"accumulate": accumulate})
        found = windows(loaders)
        assert sorted(x for window in found for x in window) == list(range(count))
        assert len(loaders[0]) == len(read(loaders[0]))
        assert loaders[0].steps_per_epoch == len(found)


@pytest.mark.parametrize("count", SIZES)
def test_every_cut_reads_the_same_samples_in_each_optimizer_step(count: int) -> None:
    reference = windows(everyone(make(count, batch_size=12), 1))
    for ranks, accumulate in ((1, 2), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1), (6, 2), (12, 1)):
        batch = {"size": 12 // ranks // accumulate, "accumulate": accumulate}
        assert windows(everyone(make(count), ranks, batch=batch)) == reference
        batch = {"size": 12, "per": "global", "accumulate": accumulate}
        assert windows(everyone(make(count), ranks, batch=batch)) == reference


def test_one_process_reads_what_a_plain_loader_reads() -> None:
    plain = [batch.tolist() for batch in make(23, batch_size=4, shuffle=False)()]
    assert [batch for batch, _ in read(prepare(make(23, batch_size=4, shuffle=False)()))] == plain


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_drop_last_drops_the_same_on_all_ranks(count: int, ranks: int) -> None:
    loaders = everyone(make(count, drop_last=True), ranks, batch={"accumulate": 2})
    found = windows(loaders)
    assert sum(map(len, found)) == count - count % (2 * ranks)
    assert all(info.samples == 2 for loader in loaders for _, info in read(loader))
    assert len(loaders[0]) == count // (2 * ranks)


@pytest.mark.parametrize("count", SIZES)
def test_drop_last_with_a_global_batch_drops_what_one_process_drops(count: int) -> None:
    reference = windows(everyone(make(count, batch_size=8, drop_last=True), 1))
    for ranks, accumulate in ((1, 4), (2, 2), (4, 2), (4, 1)):
        batch = {"per": "global", "accumulate": accumulate}
        loaders = everyone(make(count, batch_size=8, drop_last=True), ranks, batch=batch)
        assert windows(loaders) == reference
        assert loaders[0].steps_per_epoch == len(reference)


def test_the_plan_wins_over_the_batch_size_of_the_loader() -> None:
    loader = prepare(make(9, batch_size=2, shuffle=False)(), batch={"size": 4})
    assert [batch for batch, _ in read(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert loader.batch_size == 2


def test_an_explicit_batch_sampler_of_torch_is_cut_like_a_batch_size() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Numbers(23), batch_sampler=BatchSampler(RandomSampler(Numbers(23)), 12, False))

    assert windows(everyone(build, 1)) == windows(everyone(make(23, batch_size=12), 1))
    assert windows(everyone(build, 3, batch={"per": "global", "accumulate": 2})) == windows(everyone(build, 1))


def test_two_epochs_differ_and_are_the_same_again_in_another_process() -> None:
    a, b = prepare(make(50)()), prepare(make(50)())
    first, second = samples(a), samples(a)  # set_epoch was never called
    assert first != second and sorted(first) == sorted(second)
    b.set_epoch(1)
    assert samples(b) == second
    b.set_epoch(0)
    assert samples(b) == first
    assert samples(prepare(make(50)(), seed=2)) != first


def test_another_epoch_is_told_to_sampler_and_data_set() -> None:
    class Told(SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = Numbers(4)
    sampler = Told(data)
    loader = prepare(DataLoader(data, sampler=sampler))
    read(loader)
    read(loader)
    loader.set_epoch(5)
    read(loader)
    assert data.epochs == sampler.epochs == [0, 1, 5]
    assert loader.notes == ["set_epoch of Numbers and Told is called at each epoch"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_data_set_that_makes_its_own_batches(ranks: int) -> None:
    class Batches(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.full((index + 1,), index)

    loaders = everyone(lambda: DataLoader(Batches(7), batch_size=None, shuffle=True), ranks, batch={"accumulate": 2})
    epochs = [read(loader) for loader in loaders]
    assert len({len(epoch) for epoch in epochs}) == 1
    found = [batch[0] for epoch in epochs for batch, info in epoch if not info.padding]
    assert sorted(found) == list(range(7))
    for batch, info in (pair for epoch in epochs for pair in epoch):
        assert info.samples == (0 if info.padding else len(batch))
        assert info.window_samples is None
    assert [info.ends_window for _, info in epochs[0]] == [
        (i + 1) % 2 == 0 or i + 1 == len(epochs[0]) for i in range(len(epochs[0]))
    ]


def test_share_deals_evenly() -> None:
    for count in range(12):
        for ranks in range(1, 6):
            parts = [share(count, ranks, rank) for rank in range(ranks)]
            assert [start for start, _ in parts] == [sum(n for _, n in parts[:r]) for r in range(ranks)]
            lengths = [n for _, n in parts]
            assert sum(lengths) == count and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths)[::-1]


def test_a_huge_set_costs_no_list() -> None:
    class Huge(Numbers):
        pass

    loader = prepare(DataLoader(Huge(10**12), batch_size=2))
    loader.load_state_dict({**loader.state_dict(), "samples": 10**12 - 3})
    assert samples(loader) == [10**12 - 3, 10**12 - 2, 10**12 - 1]
