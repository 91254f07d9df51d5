"""D5: samples and workers have seeds of their own, and training's random numbers aren't used up by data."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, get_worker_info

from distkit.data.order import Request
from distkit.data.seeding import SeededDataset, WorkerInit
from distkit.seeds import mix_seed
from tests.data.support import Augmented, Numbers, Stream, everyone, prepare, read, samples


class WorkerSeeds(Numbers):
    """Sample i is i and the first numbers that its worker draws."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, -1 if info is None else info.id, torch.rand(()), np.random.rand(), random.random()


def draws(ranks: int = 1, workers: int = 0, epoch: int = 0, **settings: Any) -> dict[int, Any]:
    """The random numbers of each sample, by sample."""
    found = {}
    for loader in everyone(lambda: DataLoader(Augmented(23), 4, shuffle=True, num_workers=workers), ranks, **settings):
        loader.set_epoch(epoch)
        found.update({x[0]: x[1:] for x in samples(loader)})
    return found


def test_augmentation_is_the_same_for_any_number_of_ranks_and_workers() -> None:
    reference = draws()
    assert len(set(reference.values())) == 23
    for ranks, workers in ((2, 0), (5, 0), (1, 2), (3, 2)):
        assert draws(ranks, workers) == reference
    assert draws(epoch=1) != reference
    assert draws(seed=2) != reference


def test_it_can_be_left_to_run_on() -> None:
    loader = prepare(DataLoader(Augmented(23), 4), seed_samples=False)
    first, again = samples(loader), samples(prepare(DataLoader(Augmented(23), 4), seed_samples=False))
    assert first == again != samples(loader)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_have_seeds_of_their_own(persistent: bool) -> None:
    loaders = everyone(
        lambda: DataLoader(WorkerSeeds(8), 1, num_workers=2, persistent_workers=persistent), 2, seed_samples=False
    )
    found = [x for loader in loaders for _ in range(2) for x in samples(loader)]
    assert {x[1] for x in found} == {0, 1}
    for column in (2, 3, 4):
        assert len({x[column] for x in found}) == len(found) == 16


class EpochNumbers(WorkerSeeds):
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.epochs[-1])


def test_workers_that_live_on_start_an_epoch_like_fresh_ones() -> None:
    def epochs(persistent: bool) -> list[Any]:
        loader = DataLoader(EpochNumbers(8), 1, num_workers=2, persistent_workers=persistent)
        prepared = prepare(loader, seed_samples=False)
        return [samples(prepared) for _ in range(3)]

    found = epochs(True)
    assert found == epochs(False)
    assert [{x[-1] for x in epoch} for epoch in found] == [{0}, {1}, {2}]  # they heard of set_epoch


def test_worker_init_fn_runs_after_seeding_and_sees_its_own_data_set() -> None:
    loader = prepare(DataLoader(Numbers(4), 1, num_workers=1, worker_init_fn=_double))
    assert samples(loader) == [0, 1, 2, 3]
    seeds = [samples(prepare(DataLoader(Recorder(), 1, num_workers=2, worker_init_fn=_record), r, 2)) for r in (0, 1)]
    assert len({x for rank in seeds for x in rank}) == 4  # info.seed differs by rank and worker
    assert seeds == [
        samples(prepare(DataLoader(Recorder(), 1, num_workers=2, worker_init_fn=_record), r, 2)) for r in (0, 1)
    ]


class Recorder(Numbers):
    seed = -1

    def __init__(self) -> None:
        super().__init__(4)

    def __getitem__(self, index: int) -> int:
        return self.seed


def _double(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and type(info.dataset) is Numbers


def _record(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and type(info.dataset) is Recorder
    assert info.seed == torch.initial_seed()  # what scripts seed other libraries from
    info.dataset.seed = info.seed


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Augmented(9), Stream(9)])
@pytest.mark.parametrize("seed_samples", [True, False])
def test_training_draws_what_it_would_draw_without_data(workers: int, data: Any, seed_samples: bool) -> None:
    def train(loader: Any, batches: int) -> list[Any]:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        batch = iter(loader) if loader is not None else None
        found = []
        for _ in range(batches):
            if batch is not None:
                next(batch)
            found.append((torch.rand(1).item(), torch.randn(1).item(), np.random.randn(), random.gauss(0, 1)))
        return found

    loader = prepare(DataLoader(data, 3, num_workers=workers), seed_samples=seed_samples)
    assert train(loader, 3) == train(None, 3)


def test_collate_functions_that_draw_are_repeatable() -> None:
    def collate(elements: list[int]) -> tuple[list[int], float]:
        return elements, torch.rand(()).item()

    def epoch() -> list[Any]:
        return list(prepare(DataLoader(Numbers(9), 2, shuffle=True, collate_fn=collate)))

    assert epoch() == epoch()


# -- data sets with __getitems__ ----------------------------------------------------------------------------------------


class Batched(Numbers):
    random = False

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.calls: list[int] = []

    def __getitems__(self, keys: list[int]) -> list[Any]:
        self.calls.append(len(keys))
        return [(key, torch.rand(()) if self.random else torch.zeros(())) for key in keys]


class RandomBatched(Batched):
    random = True


def test_whole_batches_are_fetched_at_once_where_nothing_is_drawn() -> None:
    data = Batched(9)
    samples(prepare(DataLoader(data, 4)))
    assert data.calls == [4, 4, 1]


def test_samples_are_fetched_one_by_one_where_numbers_are_drawn() -> None:
    def draw(ranks: int) -> dict[int, Any]:
        loaders = everyone(lambda: DataLoader(RandomBatched(9), 4), ranks)
        return dict(x for loader in loaders for x in samples(loader))

    assert draw(1) == draw(2) == draw(3)


def test_a_subset_of_a_plain_data_set_is_fetched_sample_by_sample() -> None:
    def draw(ranks: int) -> dict[int, Any]:
        loaders = everyone(lambda: DataLoader(Subset(Augmented(20), range(3, 16)), 4), ranks)
        return {x[0]: x[1:] for loader in loaders for x in samples(loader)}

    assert draw(1) == draw(3)
    data = Batched(20)
    samples(prepare(DataLoader(Subset(data, range(9)), 4)))
    assert data.calls == [4, 4, 1]


def test_own_batches_that_are_no_lists_stay_whole() -> None:
    class Stacked(Numbers):
        def __getitems__(self, keys: list[int]) -> Any:
            return torch.tensor(keys) + torch.rand(()).round() * 0

    batches = [batch for batch, _ in read(prepare(DataLoader(Stacked(5), 2, collate_fn=lambda batch: batch)))]
    assert batches == [[0, 1], [2, 3], [4]]


# -- the stand-in -------------------------------------------------------------------------------------------------------


def test_the_stand_in_shows_the_data_set_behind_it() -> None:
    data = SeededDataset(Recorder(), seed=1, rank=0, seed_samples=True)
    assert len(data) == 4 and data.seed == -1 and data[2] == -1
    with pytest.raises(AttributeError):
        data.missing  # noqa: B018
    copy = pickle.loads(pickle.dumps(data))
    assert len(copy) == 4 and copy.count == 4
    assert copy.__getitems__(pickle.loads(pickle.dumps(Request([1, 3], range(2, 4), 0)))) == [-1, -1]
    pickle.dumps(WorkerInit(_record, seed=1, epoch=0, rank=0))


def test_seeds_differ() -> None:
    seeds = {mix_seed(1, epoch, rank, worker) for epoch in range(20) for rank in range(20) for worker in range(20)}
    assert len(seeds) == 8000
