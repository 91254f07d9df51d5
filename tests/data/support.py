"""Data sets, and ranks simulated in one process: each is a PreparedLoader of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distkit.config.schema import BatchConfig, DataConfig
from distkit.data import PreparedLoader, batch_size_of, resolve_batch


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Augmented(Numbers):
    """Sample i is i and random numbers of all three libraries."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), np.random.rand(), random.random()


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


def prepare(
    loader: DataLoader[Any],
    rank: int = 0,
    ranks: int = 1,
    *,
    seed: int = 1,
    any_rank: Callable[[bool], bool] | None = None,
    listener: Any = None,
    batch: dict[str, Any] | None = None,
    **data: Any,
) -> PreparedLoader:
    plan = resolve_batch(BatchConfig(**(batch or {})), batch_size_of(loader), ranks)
    return PreparedLoader(
        loader,
        plan=plan,
        rank=rank,
        size=ranks,
        device=torch.device("cpu"),
        seed=seed,
        config=DataConfig(**data),
        any_rank=any_rank,
        listener=listener,
    )


def everyone(make: Callable[[], DataLoader[Any]], ranks: int, **settings: Any) -> list[PreparedLoader]:
    """One prepared loader a rank, which don't talk to each other."""
    return [prepare(make(), rank, ranks, **settings) for rank in range(ranks)]


def read(loader: PreparedLoader) -> list[tuple[Any, Any]]:
    """The (batch, info) pairs of an epoch; batches of numbers as lists."""
    return [(_plain(batch), loader.info) for batch in loader]


def samples(loader: PreparedLoader) -> list[Any]:
    """The samples of an epoch in order, without padding."""
    return [x for batch, info in read(loader) for x in batch[: info.samples]]


def windows(loaders: list[PreparedLoader]) -> list[list[Any]]:
    """What all ranks read in each accumulation window, sorted. Checks on the way that ranks keep in step."""
    epochs = [read(loader) for loader in loaders]
    assert len({len(epoch) for epoch in epochs}) == 1, "ranks have unequal numbers of batches"
    found: list[list[Any]] = []
    for step in zip(*epochs, strict=True):
        infos = [info for _, info in step]
        for field in ("ends_window", "starts_window", "last", "window_samples", "position"):
            assert len({getattr(info, field) for info in infos}) == 1, f"ranks differ in {field}"
        if infos[0].starts_window:
            found.append([])
        for batch, info in step:
            assert len(batch) == max(info.samples, 1)
            assert info.padding == (info.samples == 0)
            found[-1] += batch[: info.samples]
        if infos[0].ends_window and infos[0].window_samples is not None:
            assert len(found[-1]) == infos[0].window_samples
    if epochs[0]:
        assert epochs[0][-1][1].last and epochs[0][-1][1].ends_window
        assert sum(info.last for _, info in epochs[0]) == 1
    return [sorted(window) for window in found]


def in_threads(ranks: int, work: Callable[[int, Callable[[bool], bool]], Any]) -> list[Any]:
    """Run ``work(rank, any_rank)`` for all ranks at once, who can ask each other; errors come back as results."""
    barrier = threading.Barrier(ranks, timeout=20)
    flags = [False] * ranks

    def run(rank: int) -> Any:
        def any_rank(flag: bool) -> bool:
            flags[rank] = flag
            barrier.wait()
            answer = any(flags)
            barrier.wait()
            return answer

        try:
            return work(rank, any_rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as executor:
        return list(executor.map(run, range(ranks)))


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, list) and batch and isinstance(batch[0], torch.Tensor):
        return list(zip(*(column.tolist() for column in batch), strict=True))
    return batch
