"""D4: a script's own sampler, batch sampler and generator are kept, and split without reading anything twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distkit.errors import DataError
from tests.data.support import Numbers, everyone, in_threads, prepare, read, samples, windows

DATA = Numbers(23)


class GlobalNumbers(Sampler[int]):
    """Draws from the global generators of all three libraries."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield (int(torch.randint(7, ())) + int(np.random.randint(7)) + random.randrange(7)) % 23

    def __len__(self) -> int:
        return 20


class OwnNumbers(Sampler[int]):
    """Draws from generators of its own, which live on from epoch to epoch."""

    def __init__(self, seed: int = 0) -> None:
        self.a = np.random.default_rng(seed)
        self.b = random.Random(seed)
        self.c = np.random.RandomState(seed)

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield (int(self.a.integers(7)) + self.b.randrange(7) + int(self.c.randint(7))) % 23


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 21),
    "weighted with a generator": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 21, generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(3, 20)),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=40),
    "more than the set": lambda: RandomSampler(DATA, num_samples=57),
    "less than the set": lambda: RandomSampler(DATA, num_samples=5, generator=generator()),
    "global generators": GlobalNumbers,
    "own generators": OwnNumbers,
    "a list": lambda: [5, 3, 3, 8, 1],
}


def make(name: str, **arguments: Any) -> Any:
    return lambda: DataLoader(DATA, sampler=SAMPLERS[name](), **{"batch_size": 4, **arguments})


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_cut_reads_the_same(name: str) -> None:
    reference = windows(everyone(make(name, batch_size=12), 1))
    for ranks, accumulate in ((2, 1), (3, 2), (4, 3)):
        batch = {"size": 12 // ranks // accumulate, "accumulate": accumulate}
        loaders = everyone(make(name), ranks, batch=batch)
        torch.rand(1), random.random(), np.random.rand()  # what else was drawn doesn't count
        assert windows(loaders) == reference


@pytest.mark.parametrize("name", SAMPLERS)
def test_epochs_follow_from_seed_and_number(name: str) -> None:
    a, b = prepare(make(name)()), prepare(make(name)())
    epochs = [samples(a) for _ in range(3)]
    b.set_epoch(2)
    assert samples(b) == epochs[2]
    assert (epochs[0] == epochs[1]) == (name == "a list")


def test_the_script_sees_its_samplers_law() -> None:
    never = WeightedRandomSampler([0.0, 1.0, 0.0, 3.0], 400)
    found = samples(prepare(DataLoader(Numbers(4), sampler=never, batch_size=8)))
    assert set(found) == {1, 3} and 250 < found.count(3) < 350
    found = samples(prepare(make("more than the set")()))
    assert len(found) == 57 and {found.count(i) for i in range(23)} == {2, 3}


def test_a_scripts_seed_counts() -> None:
    def order(seed: int, kind: str) -> list[int]:
        if kind == "shuffle":
            return samples(prepare(DataLoader(DATA, shuffle=True, generator=generator(seed))))
        if kind == "own":
            return samples(prepare(DataLoader(DATA, sampler=OwnNumbers(seed))))
        return samples(prepare(DataLoader(DATA, sampler=SubsetRandomSampler(range(23), generator=generator(seed)))))

    for kind in ("shuffle", "subset", "own"):
        assert order(1, kind) == order(1, kind) != order(2, kind)


def test_generators_are_left_as_they_were() -> None:
    own, loaders = generator(), generator(6)
    sampler = WeightedRandomSampler([1.0] * 23, 23, generator=own)
    prepared = prepare(DataLoader(DATA, sampler=sampler, generator=loaders))
    before = [own.get_state(), loaders.get_state(), torch.get_rng_state(), np.random.get_state()[2], random.getstate()]
    samples(prepared)
    after = [own.get_state(), loaders.get_state(), torch.get_rng_state(), np.random.get_state()[2], random.getstate()]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_an_endless_sampler() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield int(torch.randint(23, ()))

    loaders = everyone(lambda: DataLoader(DATA, sampler=Endless(), batch_size=3), 2)
    with pytest.raises(TypeError):
        len(loaders[0])
    assert loaders[0].steps_per_epoch is None
    firsts = [[b.tolist() for b in islice(loader, 250)] for loader in loaders]
    one = [b.tolist() for b in islice(prepare(DataLoader(DATA, sampler=Endless(), batch_size=6)), 250)]
    assert [a + b for a, b in zip(*firsts, strict=True)] == one


def test_keys_need_not_be_numbers() -> None:
    class Named(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return index

    names = ["a", "b", "c", "d", "e"]
    loaders = everyone(lambda: DataLoader(Named(5), sampler=names, batch_size=2, collate_fn=list), 2)
    assert windows(loaders) == [["a", "b", "c", "d"], ["e"]]


# -- torch's DistributedSampler, and others that split ------------------------------------------------------------------


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, False), (True, True)])
def test_a_distributed_sampler_is_replaced(shuffle: bool, drop_last: bool) -> None:
    def make(rank: int) -> DataLoader[Any]:
        sampler = DistributedSampler(DATA, 2, rank, shuffle=shuffle, seed=7, drop_last=drop_last)
        return DataLoader(DATA, sampler=sampler, batch_size=4)

    loaders = [prepare(make(rank), rank, 2) for rank in range(2)]
    assert "DistributedSampler is replaced" in loaders[0].notes[0] and "seed=7" in loaders[0].notes[0]
    for loader in loaders:
        loader.set_epoch(3)
    found = [x for window in windows(loaders) for x in window]
    whole = DistributedSampler(DATA, 1, 0, shuffle=shuffle, seed=7)
    whole.set_epoch(3)
    assert sorted(found) == sorted(list(whole)[: 22 if drop_last else 23])
    one = prepare(make(0), 0, 1)
    one.set_epoch(3)
    if not drop_last:
        assert samples(one) == list(whole)


def test_a_sampler_that_splits_in_its_own_way_is_refused() -> None:
    class Halves(DistributedSampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(self.rank, 23, 2))

    class Batches:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[list[int]]:
            return ([i] for i in self.sampler)

    for rank in range(2):
        with pytest.raises(DataError, match="only one rank's part"):
            prepare(DataLoader(DATA, sampler=Halves(DATA, 2, rank)), rank, 2)
        with pytest.raises(DataError, match="only one rank's part"):
            batches = Batches(DistributedSampler(DATA, 2, rank))
            prepare(DataLoader(DATA, batch_sampler=batches), rank, 2)


def test_ranks_with_different_data_are_found() -> None:
    def run(make: Any) -> list[Any]:
        return in_threads(2, lambda rank, ask: prepare(make(rank), rank, 2, any_rank=ask))

    for make in (
        lambda rank: DataLoader(Numbers(20 + rank)),
        lambda rank: DataLoader(DATA, sampler=list(range(rank, 23, 2))),
        lambda rank: DataLoader(DATA, shuffle=True, generator=generator(rank)),
    ):
        errors = run(make)
        assert all(isinstance(error, DataError) and "different data" in error.message for error in errors)
    assert not any(isinstance(x, Exception) for x in run(lambda rank: DataLoader(DATA, shuffle=True)))


# -- batch samplers -----------------------------------------------------------------------------------------------------


class Buckets(Sampler[list[int]]):
    """Batches of unequal sizes, shuffled; one is empty."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        batches = []
        for size in self.sizes:
            batches.append(list(range(start, start + size)))
            start += size
        for i in torch.randperm(len(batches)).tolist():
            yield batches[i]

    def __len__(self) -> int:
        return len(self.sizes)


SIZES = [1, 2, 6, 3, 3, 1, 7]


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("per", ["device", "global"])
def test_batch_samplers_are_dealt_out(ranks: int, accumulate: int, per: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=Buckets(SIZES))

    loaders = everyone(make, ranks, batch={"per": per, "accumulate": accumulate})
    found = windows(loaders)
    assert sorted(x for window in found for x in window) == list(range(23))
    assert loaders[0].steps_per_epoch == len(found)
    whole = [sorted(batch) for batch, _ in read(prepare(make()))]
    if per == "global":
        assert found == whole
    else:
        mine = [batch for batch, info in read(everyone(make, ranks)[0]) if not info.padding]
        assert [sorted(batch) for batch in mine] == whole[::ranks]
    assert any("Buckets" in note for note in loaders[0].notes)


def test_empty_batches_are_left_out() -> None:
    loaders = everyone(lambda: DataLoader(DATA, batch_sampler=[[0, 1], [], [2], [3]]), 2)
    assert windows(loaders) == [[0, 1, 2], [3]]


def test_a_batch_sampler_over_a_sampler_with_a_generator() -> None:
    class Pairs(BatchSampler):
        pass

    def make() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=Pairs(RandomSampler(DATA, generator=generator()), 2, False))

    loaders = everyone(make, 2, batch={"per": "device"})
    assert sorted(x for window in windows(loaders) for x in window) == list(range(23))
    a, b = prepare(make()), prepare(make())
    epochs = [samples(a) for _ in range(2)]
    b.set_epoch(1)
    assert samples(b) == epochs[1] != epochs[0]
