"""Iterable data sets: one stream, split over data-parallel ranks and workers so that nothing is read twice.

A data set that splits itself is left to do so. A data set that doesn't is read as a whole by everyone, and each keeps
its share: element i goes to rank i mod R, and blocks of ``micro x R`` elements go to workers in turn. So G micro steps
use up exactly the first ``G x micro x R`` elements of the stream, for any number of ranks and workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _worker

from distkit.data.rng import seed_everywhere
from distkit.data.seeding import StandIn, tell_epoch
from distkit.errors import DataError
from distkit.seeds import mix_seed

__all__ = ["OWN", "OWN_STRIDE", "STRIDE", "VIRTUAL", "Collated", "CountingCollate", "Element", "ShardedIterable"]

STRIDE = "stride"
"""Everyone reads the whole stream and keeps a share."""
VIRTUAL = "virtual"
"""The data set splits itself over workers; it is shown all ranks' workers as one row of them."""
OWN = "own"
"""The data set yields the share of this rank and worker."""
OWN_STRIDE = "own-stride"
"""The data set yields the share of this rank, on each of its workers the same."""


class Element(NamedTuple):
    """One element of a stream on its way to the collate function.

    Args:
        value: What the data set yielded.
        mode: How the stream is split.
        padding: This rank has no element of its own in the whole stream.
    """

    value: Any
    mode: str
    padding: bool = False


class Collated(NamedTuple):
    """A batch, and what its elements said.

    Args:
        batch: What the script's collate function made.
        samples: How many elements; None if each is a batch.
        mode: As in :class:`Element`.
        padding: As in :class:`Element`.
    """

    batch: Any
    samples: int | None
    mode: str
    padding: bool


class CountingCollate:
    """Counts the elements of a batch, then calls the script's collate function.

    Args:
        collate: The script's own.
        whole: Whether an element is a batch (``batch_size=None``).
    """

    def __init__(self, collate: Callable[[Any], Any], *, whole: bool) -> None:
        self._collate = collate
        self._whole = whole

    def __call__(self, elements: Any) -> Collated:
        if self._whole:
            return Collated(self._collate(elements.value), None, elements.mode, elements.padding)
        first: Element = elements[0]
        batch = self._collate([element.value for element in elements])
        return Collated(batch, len(elements), first.mode, first.padding)


class _VirtualWorker:
    """What ``get_worker_info()`` shows to a data set: one worker among those of all ranks. Notes whether it's used.

    Only the number of workers tells that a data set splits itself; the id alone is also used for seeds and names.
    """

    def __init__(self, number: int, count: int, real: Any, dataset: Any) -> None:
        self.id = number
        self.seed = torch.initial_seed() if real is None else real.seed
        self.dataset = dataset
        self.asked = False
        self._count = count
        self._real = real

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self._count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._real, name)


class _Watched:
    """Iterates a data set under a virtual worker.

    Args:
        dataset: The script's own.
        worker: What the data set sees.
    """

    def __init__(self, dataset: Any, worker: _VirtualWorker) -> None:
        self.worker = worker
        self.whole = False
        """Everyone keeps a share of the whole stream now, so it must not begin to split itself."""
        self.iterator: Iterator[Any] | None = None
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # The global is what torch.utils.data.get_worker_info() returns (torch 2.13, data/_utils/worker.py); there
        # is no public way to say "you are worker 5 of 8" to a data set, in the main process least of all.
        before = _worker._worker_info
        _worker._worker_info = self.worker  # type: ignore[assignment]
        try:
            if self.iterator is None:
                self.iterator = iter(self._dataset)
            value = next(self.iterator)
        finally:
            _worker._worker_info = before
        if self.whole and self.worker.asked:
            raise DataError(
                f"{type(self._dataset).__name__} asked for the number of workers only after its first element, when it "
                "was being split already",
                hint="call torch.utils.data.get_worker_info() at the start of __iter__, or --set data.iterable=own",
            )
        return value


class ShardedIterable(StandIn, IterableDataset[Element]):
    """Stands before an iterable data set inside the DataLoader, and yields this rank's and worker's share of it.

    Args:
        dataset: The script's own.
        rank: Data-parallel rank.
        ranks: Data-parallel ranks.
        block: Elements of one micro batch on one rank.
        seed: The run's.
        own: The data set yields the share of this rank and worker already.
        pad: A rank without any element repeats one of another's, marked as padding.
        shared: Whether workers outlive an epoch, and must be told of the next through shared memory.
        seed_elements: Whether to seed before each element of a stream that everyone reads as a whole.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int,
        ranks: int,
        block: int,
        seed: int,
        own: bool,
        pad: bool,
        shared: bool,
        seed_elements: bool,
    ) -> None:
        self._dataset = dataset
        self._rank, self._ranks, self._block = rank, ranks, block
        self._seed = seed
        self._pad, self._seed_elements = pad, seed_elements
        # datasets.split_dataset_by_node(data, rank, world_size) leaves its mark in this attribute of the data set.
        own = own or getattr(dataset, "_distributed", None) is not None
        self.split_mode: str | None = OWN if own else None
        """How the stream is split, once known."""
        self._place = torch.zeros(2, dtype=torch.int64)  # epoch, elements to leave out
        if shared:
            self._place.share_memory_()
        self.elements_drawn = 0
        """Elements of the whole stream that were read in this process in this epoch, other ranks' shares included."""
        self._resumed_at = 0

    def begin(self, epoch: int, start: int, drawn: int = 0) -> None:
        """Say what comes next.

        Args:
            epoch: The epoch.
            start: How many elements of the whole stream were used up before.
            drawn: How many the data set has yielded before, where it was put back to a state of its own.
        """
        self._place.copy_(torch.tensor([epoch, start]))
        self._resumed_at = drawn

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Element]:
        epoch, start = self._place.tolist()
        self.elements_drawn, self._resumed_at = self._resumed_at, 0
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            tell_epoch(epoch, self._dataset)  # a worker that outlives the epoch has a copy of its own
        if self.split_mode is None and self._ranks * count == 1:
            self.split_mode = STRIDE
        if self.split_mode is None:
            stream = self._probe(epoch, number, count, info)
        else:
            stream = self._stream(epoch, number, count, info)
        if self.split_mode == STRIDE:
            stream = self._seeded(stream, epoch) if self._seed_elements else stream
            yield from self._stride(stream, start, number, count)
        elif self.split_mode == OWN_STRIDE:
            mine = (value for at, value in enumerate(stream) if at // self._block % count == number)
            yield from (Element(value, OWN_STRIDE) for value in mine)
        else:
            yield from (Element(value, str(self.split_mode)) for value in stream)

    def _stride(self, stream: Iterator[Any], start: int, number: int, count: int) -> Iterator[Element]:
        """This rank's and worker's share of a stream that everyone reads as a whole."""
        ranks, step = self._ranks, self._block * self._ranks
        empty, value = True, None
        for value in stream:
            at = self.elements_drawn - start
            self.elements_drawn += 1
            if at >= 0 and at % ranks == self._rank and at // step % count == number:
                empty = False
                yield Element(value, STRIDE)
        if empty and self._pad and number == 0 and self.elements_drawn > start:
            yield Element(value, STRIDE, padding=True)

    def _seeded(self, stream: Iterator[Any], epoch: int) -> Iterator[Any]:
        """The whole stream, each element drawn under a seed of its own, as it must be to go on from a saved state."""
        base = mix_seed(self._seed, epoch)
        while True:
            seed_everywhere(mix_seed(base + self.elements_drawn))
            try:
                value = next(stream)
            except StopIteration:
                return
            yield value

    def _stream(self, epoch: int, number: int, count: int, info: Any) -> Iterator[Any]:
        """The data set's elements in a known mode.

        What several read alike must be the same for all of them, so it's read under a seed that they share; a share of
        its own under a seed for each worker.
        """
        sharers = {STRIDE: [], OWN_STRIDE: [self._rank]}
        seed_everywhere(mix_seed(self._seed, epoch, *sharers.get(str(self.split_mode), [self._rank, number])))
        if self.split_mode == VIRTUAL or (self.split_mode == STRIDE and self._ranks * count > 1):
            stream = _Watched(self._dataset, self._virtual(number, count, info))
            stream.whole = self.split_mode == STRIDE and not self._has_few_shards(count)
            return stream
        return iter(self._dataset)

    def _has_few_shards(self, count: int) -> bool:
        """Whether the data set says that it can't be split so often (datasets.IterableDataset has one shard a file)."""
        shards = getattr(self._dataset, "num_shards", None) or getattr(self._dataset, "n_shards", None)
        return isinstance(shards, int) and shards < self._ranks * count

    def _probe(self, epoch: int, number: int, count: int, info: Any) -> Iterator[Any]:
        """Find out by the first element how the data set is split, set ``split_mode``, and read it so."""
        base = mix_seed(self._seed, epoch)
        seed_everywhere(mix_seed(base + self.elements_drawn) if self._seed_elements else base)
        stream = _Watched(self._dataset, self._virtual(number, count, info))
        with _questions_about_rank() as questions:
            first = list(islice(stream, 1))
        few = self._has_few_shards(count)
        if not questions and (few or not stream.worker.asked):
            self.split_mode = STRIDE
            stream.whole = not few
            return chain(first, stream)
        if not questions:
            self.split_mode = VIRTUAL
        else:
            self.split_mode = OWN if stream.worker.asked or count == 1 else OWN_STRIDE
        again = self._stream(epoch, number, count, info)
        # An object that is its own iterator can't start again: go on with it, from the element that was read.
        return chain(first, again) if stream.iterator is self._dataset else again

    def _virtual(self, number: int, count: int, info: Any) -> _VirtualWorker:
        if self._has_few_shards(count):
            return _VirtualWorker(0, 1, info, self._dataset)
        return _VirtualWorker(self._rank * count + number, self._ranks * count, info, self._dataset)


@contextmanager
def _questions_about_rank() -> Iterator[list[str]]:
    """Notes whether torch.distributed is asked for rank or world size, by this thread, while it is open.

    Both go through ``_get_default_group`` of distributed_c10d (torch 2.13), however the script imported them.
    """
    questions: list[str] = []
    if not (dist.is_available() and dist.is_initialized()):
        yield questions
        return
    module = dist.distributed_c10d
    original, thread = module._get_default_group, threading.get_ident()

    def noting() -> Any:
        if threading.get_ident() == thread:
            questions.append("rank")
        return original()

    module._get_default_group = noting
    try:
        yield questions
    finally:
        module._get_default_group = original
