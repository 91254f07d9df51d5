"""What the data tests run in real worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distkit.errors import DataError
from distkit.world import World
from tests.data.support import Augmented, Numbers, Stream, prepare, read
from tests.data.test_iterable import Sharded, Shuffled
from tests.world.cases import connect


class RankAware(IterableDataset[int]):
    """Splits itself over ranks and, if asked to, over workers: the usual recipe for DistributedDataParallel."""

    def __init__(self, count: int, workers: bool) -> None:
        self.count, self.workers = count, workers

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if self.workers else None
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        first, step = dist.get_rank() * count + number, dist.get_world_size() * count
        return iter(range(first, self.count, step))


class Unequal(Sharded):
    """Rank 0 has twice as many elements as the others."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None and info.num_workers > 0
        return iter(range(self.count * (2 if info.id == 0 else 1)))


DATA: dict[str, Any] = {
    "stream": Stream,
    "shuffled": Shuffled,
    "sharded": Sharded,
    "unequal": Unequal,
    "by rank": lambda count: RankAware(count, False),
    "by rank and worker": lambda count: RankAware(count, True),
    "numbers": Numbers,
    "augmented": Augmented,
}


def prepared(world: World, kind: str, count: int, workers: int, **settings: Any) -> Any:
    loader = DataLoader(DATA[kind](count), 2, num_workers=workers)
    ask = world.any if world.size > 1 else None
    return prepare(loader, world.data.rank, world.data.size, any_rank=ask, **settings)


def epoch(kind: str, count: int, workers: int = 0, **settings: Any) -> Any:
    """An epoch's batches as [batch, samples]; or the message of a DataError."""
    world = connect()
    try:
        started = time.monotonic()
        loader = prepared(world, kind, count, workers, **settings)
        found = [[batch, info.samples] for batch, info in read(loader)]
        assert time.monotonic() - started < 30
        return found
    except DataError as error:
        return error.message
    finally:
        world.close()


def lengths_differ() -> str:
    world = connect()
    try:
        prepared(world, "numbers", 20 + world.rank, 0)
    except DataError as error:
        return error.message
    finally:
        world.close()
    return "no error"
