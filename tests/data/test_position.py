"""C1 to C4: a position is one global offset; going on from it replays what wasn't seen, at any number of ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from distkit.data import PreparedLoader
from distkit.errors import DataError
from tests.data.support import Augmented, Numbers, SizedStream, Stream, everyone, prepare, read
from tests.data.test_iterable import Sharded, Shuffled
from tests.data.test_samplers import SIZES, Buckets, OwnNumbers


class Stateful(IterableDataset[Any]):
    """Saves its own position, counts what it reads, and draws random numbers."""

    def __init__(self, count: int) -> None:
        self.count, self.next, self.reads = count, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.count:
            self.reads += 1
            self.next += 1
            yield self.next - 1, random.random()
        self.next = 0


LOADERS: dict[str, Any] = {
    "shuffled": lambda w: DataLoader(Augmented(23), 2, shuffle=True, num_workers=w),
    "drop_last": lambda w: DataLoader(Augmented(23), 2, shuffle=True, num_workers=w, drop_last=True),
    "weighted": lambda w: DataLoader(Numbers(23), 2, sampler=WeightedRandomSampler([1.0] * 23, 30), num_workers=w),
    "own sampler": lambda w: DataLoader(Numbers(23), 2, sampler=OwnNumbers(), num_workers=w),
    "batch sampler": lambda w: DataLoader(Augmented(23), batch_sampler=Buckets(SIZES), num_workers=w),
    "whole batches": lambda w: DataLoader(Augmented(7), None, shuffle=True, num_workers=w),
    "stream": lambda w: DataLoader(Shuffled(23), 2, num_workers=w),
    "sharded stream": lambda w: DataLoader(Sharded(24), 2, num_workers=w),
    "stateful stream": lambda w: DataLoader(Stateful(23), 2, num_workers=w),
}


def stepwise(loaders: list[PreparedLoader]) -> tuple[list[Any], list[dict[str, Any]]]:
    """What all ranks together read in each micro step, and the position after it."""
    seen: list[Any] = []
    states = [loaders[0].state_dict()]
    for batches in zip_longest(*loaders):  # they can't ask each other here, so those of streams end on their own
        step = []
        for batch, loader in zip(batches, loaders, strict=True):
            assert loader.info is not None
            if batch is not None and not loader.info.padding:
                step.append(_plain(batch))
        seen.append(step)
        states.append(json.loads(json.dumps(loaders[0].state_dict())))
    return seen, states


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def flat(steps: list[Any]) -> list[Any]:
    """All samples of some micro steps, in no order."""
    found: list[Any] = []
    for batch in (batch for step in steps for batch in step):
        found += zip(*batch, strict=True) if isinstance(batch[0], list) else [batch] if len(batch) == 4 else batch
    return sorted(found)


@pytest.mark.parametrize(("name", "per"), [*((name, "device") for name in LOADERS), ("batch sampler", "global")])
def test_resume_at_each_position(name: str, per: str) -> None:
    settings: dict[str, Any] = {"batch": {"per": per, "accumulate": 2 if per == "global" else 1}}
    loaders = everyone(lambda: LOADERS[name](0), 2, **settings)
    for loader in loaders:
        loader.set_epoch(3)
    steps, states = stepwise(loaders)
    assert len(steps) >= 3 and states[-1]["done"] and not states[-2]["done"]
    for at, state in enumerate(states):
        resumed = everyone(lambda: LOADERS[name](0), 2, **settings)
        for loader in resumed:
            loader.load_state_dict(state)
            loader.set_epoch(3)
        rest, later = stepwise(resumed)
        if "part" in state:  # the rest of a batch is cut anew, evenly
            assert flat(rest) == flat(steps[at:])
        else:
            assert rest == steps[at:]
            assert later[-1] == states[-1]
        assert resumed[0].epoch == 3 and resumed[0].epoch_is_done


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "sharded stream"])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (1, 2)])
def test_resume_at_another_number_of_ranks(name: str, ranks: int, workers: int) -> None:
    steps, states = stepwise(everyone(lambda: LOADERS[name](0), 2))
    for at in (1, len(steps) // 2, len(steps) - 1, len(steps)):
        resumed = everyone(lambda: LOADERS[name](workers), ranks)
        for loader in resumed:
            loader.load_state_dict(states[at])
        rest = flat(stepwise(resumed)[0])
        if name == "drop_last":
            assert len(rest) >= len(flat(steps[at:])) - 2 * ranks
        else:
            assert rest == flat(steps[at:])


def test_augmentation_goes_on_as_it_would_have() -> None:
    def draw(batches: Any) -> list[Any]:
        return [_plain(batch) for batch in batches]

    whole = draw(prepare(LOADERS["shuffled"](0)))
    resumed = prepare(LOADERS["shuffled"](2))
    resumed.load_state_dict({**resumed.state_dict(), "samples": 8})
    assert draw(resumed) == whole[4:]


def test_windows_begin_at_the_position() -> None:
    loader = prepare(DataLoader(Numbers(12), 2), batch={"accumulate": 2})
    loader.load_state_dict({**loader.state_dict(), "samples": 6})
    assert [(info.starts_window, info.ends_window) for _, info in read(loader)] == [
        (True, False), (False, True), (True, True),
    ]  # fmt: skip


def test_the_epoch_after_a_resumed_one_is_whole() -> None:
    for make in (LOADERS["shuffled"], LOADERS["stream"], LOADERS["stateful stream"]):
        loader, plain = prepare(make(0)), prepare(make(0))
        loader.load_state_dict({**loader.state_dict(), "samples": 8})
        read(loader)
        read(plain)
        assert read(loader) == read(plain)


def test_a_done_epoch_has_nothing_left() -> None:
    first = prepare(LOADERS["shuffled"](0))
    read(first)
    loader = prepare(LOADERS["shuffled"](0))
    loader.load_state_dict(first.state_dict())
    loader.set_epoch(0)
    assert loader.epoch_is_done and read(loader) == []
    loader.set_epoch(1)
    assert len(read(loader)) == 12


@pytest.mark.parametrize("batches", [2, 99])
def test_an_epoch_that_is_set_again_starts_again(batches: int) -> None:
    loader = prepare(LOADERS["shuffled"](0))
    for _ in zip(range(batches), loader, strict=False):
        pass
    loader.set_epoch(0)
    assert loader.state_dict()["samples"] == 0
    assert read(loader) == read(prepare(LOADERS["shuffled"](0)))


def test_a_stateful_stream_is_not_read_again() -> None:
    loader = prepare(LOADERS["stateful stream"](0))
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    data = Stateful(23)
    resumed = prepare(DataLoader(data, 2))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert len(read(resumed)) == 7
    assert data.reads == 13


def test_a_state_that_is_no_json_is_counted_to() -> None:
    class Opaque(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "object": object()}

    loader = prepare(DataLoader(Opaque(23), 2))
    next(iter(loader))
    assert json.dumps(loader.state_dict())
    assert loader.state_dict()["samples"] == 2 and "dataset" not in loader.state_dict()


def test_data_of_another_length_is_refused() -> None:
    for make in (lambda n: DataLoader(Numbers(n), 2), lambda n: DataLoader(SizedStream(n), 2)):
        loader = prepare(make(20))
        next(iter(loader))
        with pytest.raises(DataError, match=r"20 samples.* has 21 now"):
            prepare(make(21)).load_state_dict(loader.state_dict())


def test_another_kind_of_loader_or_seed_is_refused() -> None:
    loader = prepare(DataLoader(Numbers(20), 2))
    next(iter(loader))
    with pytest.raises(DataError, match="counts samples.*counts batches"):
        prepare(DataLoader(Numbers(20), batch_sampler=Buckets([10, 10]))).load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="seed=1") as caught:
        prepare(DataLoader(Numbers(20), 2), seed=2).load_state_dict(loader.state_dict())
    assert caught.value.hint == "--set seed=1"
    prepare(DataLoader(Numbers(21), 2), seed=2).load_state_dict(prepare(DataLoader(Numbers(20), 2)).state_dict())


# -- stopping early -----------------------------------------------------------------------------------------------------


class Stopper:
    """Stops after so many windows, and notes what it's told."""

    def __init__(self, windows: int) -> None:
        self.windows = windows
        self.heard: list[Any] = []

    def epoch_started(self, loader: PreparedLoader) -> None:
        self.heard.append("started")

    def batch_ready(self, loader: PreparedLoader, info: Any) -> None:
        assert loader.info is info
        self.heard.append(info.samples)
        self.windows -= info.ends_window

    def epoch_ended(self, loader: PreparedLoader, exhausted: bool) -> None:
        self.heard.append(("ended", exhausted))

    def should_stop(self, loader: PreparedLoader) -> bool:
        return self.windows <= 0


@pytest.mark.parametrize("data", [Numbers(11), Stream(11)])
def test_stopping_keeps_the_position(data: Any) -> None:
    listener = Stopper(2)
    loader = prepare(DataLoader(data, 2), listener=listener, batch={"accumulate": 2})
    assert len(read(loader)) == 4
    assert listener.heard == ["started", 2, 2, 2, 2, ("ended", False)]
    state = loader.state_dict()
    assert state["samples"] == 8 and not state["done"]
    assert read(loader) == [] and loader.state_dict() == state  # still stopped: nothing is lost by asking again


def test_the_listener_hears_of_a_whole_epoch_and_of_a_break() -> None:
    listener = Stopper(100)
    loader = prepare(DataLoader(Numbers(5), 2), listener=listener)
    read(loader)
    for _ in loader:
        break
    assert listener.heard == ["started", 2, 2, 1, ("ended", True), "started", 2, ("ended", False)]


def test_a_position_loaded_when_the_listener_hears_of_the_start_counts() -> None:
    class Resumer(Stopper):
        def epoch_started(self, loader: PreparedLoader) -> None:
            loader.load_state_dict({**loader.state_dict(), "epoch": 2, "samples": 6})

    loader = prepare(DataLoader(Numbers(10), 2), listener=Resumer(100))
    assert [batch for batch, _ in read(loader)] == [[6, 7], [8, 9]] and loader.epoch == 2
