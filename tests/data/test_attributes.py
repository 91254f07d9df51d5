"""D4: every attribute of the DataLoader survives, and so do subclasses, workers and pinning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from distkit.errors import DataError
from tests.data.support import Numbers, Stream, prepare, read, samples


def collate(elements: list[int]) -> list[int]:
    return [-x for x in elements]


def init(worker: int) -> None:
    pass


def test_every_attribute_is_the_scripts_own() -> None:
    data = Numbers(9)
    generator = torch.Generator()
    own = DataLoader(
        data,
        batch_size=2,
        sampler=SequentialSampler(data),
        num_workers=2,
        collate_fn=collate,
        pin_memory=False,
        drop_last=True,
        timeout=30,
        worker_init_fn=init,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )
    before = dict(vars(own))
    loader = prepare(own, 0, 2)
    for _ in range(2):
        assert samples(loader) == [0, -1, -4, -5]
    assert {name: getattr(loader, name) for name in before} == before
    assert dict(vars(own)) == before  # and nothing of it was changed
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn"):
        assert getattr(loader, name) is getattr(own, name)
    assert loader.multiprocessing_context is own.multiprocessing_context
    with pytest.raises(AttributeError):
        loader.missing  # noqa: B018


@pytest.mark.parametrize("data", [Numbers(9), Stream(9)])
def test_the_copy_inside_keeps_every_attribute_it_can(data: Any) -> None:
    own = DataLoader(data, batch_size=2, num_workers=2, timeout=30, prefetch_factor=3, persistent_workers=True)
    inner = prepare(own, 0, 2)._source._inner.loader
    replaced = {"dataset", "batch_sampler", "generator", "worker_init_fn", "collate_fn", "_get_iterator"}
    for name, value in vars(own).items():
        assert name in replaced or getattr(inner, name) == value, name


def test_workers_live_on() -> None:
    loader = prepare(DataLoader(Numbers(9), 2, num_workers=1, persistent_workers=True, worker_init_fn=init))
    samples(loader)
    workers = loader._source._inner.loader._iterator._workers
    assert samples(loader) == list(range(9))
    assert loader._source._inner.loader._iterator._workers is workers


def test_workers_that_are_spawned() -> None:
    """All that goes to a worker can be pickled; of map-style data sets tests/data/test_seeding.py shows it."""
    loader = prepare(DataLoader(Stream(5), 2, num_workers=1, multiprocessing_context="spawn", worker_init_fn=init))
    assert samples(loader) == list(range(5))


class Doubling(DataLoader[Any]):
    """A subclass that changes batches as they come, and looks at its data set."""

    factor = 2

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * self.factor + self.dataset.count - self.dataset.count  # type: ignore[attr-defined]


@pytest.mark.parametrize("data", [Numbers(5), Stream(5)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_that_changes_batches(data: Any, workers: int) -> None:
    loader = prepare(Doubling(data, 2, num_workers=workers))
    assert samples(loader) == [0, 2, 4, 6, 8]
    assert loader.factor == 2


class Skipping(DataLoader[Any]):
    def __iter__(self) -> Any:
        for index, batch in enumerate(super().__iter__()):
            if index % 2:
                yield batch


class Repeating(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize("kind", [Skipping, Repeating])
@pytest.mark.parametrize("data", [Numbers(9), Stream(9)])
def test_a_subclass_that_changes_their_number_is_refused(kind: Any, data: Any) -> None:
    with pytest.raises(DataError, match=kind.__name__):
        samples(prepare(kind(data, 2)))


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_pinning_is_asked_for_as_before() -> None:
    assert samples(prepare(DataLoader(Numbers(5), 2, pin_memory=True))) == list(range(5))
    assert samples(prepare(DataLoader(Stream(5), 2, pin_memory=True))) == list(range(5))


@pytest.mark.parametrize("data", [Numbers(9), Stream(9)])
def test_batches_come_in_order(data: Any) -> None:
    loader = prepare(DataLoader(data, 2, num_workers=2, in_order=False))
    assert samples(loader) == list(range(9))
    assert any("in_order" in note for note in loader.notes) and loader.in_order is False


@pytest.mark.filterwarnings("ignore")
def test_data_pipes() -> None:
    pipes = pytest.importorskip("torch.utils.data.datapipes.iter")
    found = []
    for rank in range(2):
        pipe = pipes.IterableWrapper(list(range(9))).shuffle()
        found += samples(prepare(DataLoader(pipe, 2), rank, 2))
    assert sorted(found) == list(range(9)) and found != list(range(9))


def test_batches_of_strings_and_none() -> None:
    class Mixed(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": index, "text": str(index), "none": None}

    batches = [
        b for b, _ in read(prepare(DataLoader(Mixed(3), 2, collate_fn=lambda rows: {"rows": rows, "x": torch.ones(2)})))
    ]
    assert batches[0]["rows"] == [{"x": 0, "text": "0", "none": None}, {"x": 1, "text": "1", "none": None}]


def test_a_script_may_iterate_its_own_loader_meanwhile() -> None:
    own = DataLoader(Numbers(6), 2)
    loader = prepare(own, 1, 2)
    plain: Iterator[Any] = iter(own)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, plain, strict=False)] == [([2, 3], [0, 1]), ([5], [2, 3])]
