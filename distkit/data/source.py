"""Where micro batches come from: a copy of the script's DataLoader, steered to fetch this rank's part.

The copy is shallow, so it is of the same class and has all attributes of the script's, but for those that say what is
fetched. The script's own DataLoader is never changed.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from distkit.config.schema import DataConfig
from distkit.data.batch import BatchPlan
from distkit.data.iterable import STRIDE, Collated, CountingCollate, ShardedIterable
from distkit.data.keys import batches_of, is_distributed, length_of, sequence_of
from distkit.data.order import BatchInfo, BatchOrder, MicroStep, Order, Request, SampleOrder
from distkit.data.rng import RandomScope
from distkit.data.seeding import SeededDataset, WorkerInit
from distkit.data.transfer import batch_samples
from distkit.errors import DataError
from distkit.seeds import mix_seed

__all__ = ["Fetched", "IterableSource", "MapSource", "Source"]

AnyRank = Callable[[bool], bool]
_END = object()


@dataclass
class Fetched:
    """A micro batch on the CPU.

    Args:
        batch: As the DataLoader yields it.
        info: What it is; of an iterable data set it isn't known yet whether it's the last.
        place: Where to go on once it was handed out; JSON values, unless an iterable data set's own state isn't.
    """

    batch: Any
    info: BatchInfo
    place: dict[str, Any]


class Source(Protocol):
    """Micro batches of this rank, in order."""

    kind: str
    """What positions count."""

    notes: list[str]
    """What the log should say."""

    def fetch(self, epoch: int, place: dict[str, Any]) -> Iterator[Fetched]:
        """Those of an epoch, from a place on; ``{}`` is its start."""

    def micro_steps(self) -> int | None:
        """Micro batches of this rank in a whole epoch, if that is known."""

    def windows(self) -> int | None:
        """Accumulation windows in a whole epoch, if that is known."""


class _Inner:
    """The copy of the DataLoader.

    Args:
        loader: The script's own.
        seed: The run's.
        rank: Data-parallel rank.
        seeds_itself: Whether the data set in it seeds before each sample.
        replaced: Attributes that differ.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int, *, seeds_itself: bool, **replaced: Any) -> None:
        self.loader = copy.copy(loader)
        self._seeds_itself = seeds_itself
        self._own_init = loader.worker_init_fn
        self._seed, self._rank = seed, rank
        self._replace(**replaced, _iterator=None, _IterableDataset_len_called=None)
        if not getattr(loader, "in_order", True):
            self._replace(in_order=True)

    def open(self, epoch: int) -> tuple[Iterator[Any], AbstractContextManager[Any]]:
        """Start an epoch.

        Returns:
            The iterator, and the random states to call it under: without workers the data set runs in this process, and
            must not use up the random numbers that training draws.
        """
        # A generator of its own, for a DataLoader draws one number for its workers from the global one otherwise.
        generator = torch.Generator().manual_seed(mix_seed(self._seed, epoch, self._rank))
        init = WorkerInit(self._own_init, seed=self._seed, epoch=epoch, rank=self._rank)
        self._replace(generator=generator, worker_init_fn=init)
        if self.loader.num_workers:
            return iter(self.loader), nullcontext()
        scope = RandomScope(None if self._seeds_itself else mix_seed(self._seed, epoch, self._rank, 0))
        with scope:
            return iter(self.loader), scope

    def open_through(self, said: deque[Collated]) -> None:
        """Let the copy's iterators hand on plain batches, and keep what their elements said."""
        # By a weak reference: in a cycle, workers that outlive an epoch would be ended by the garbage collector, which
        # torch waits five seconds for.
        loader, make = weakref.proxy(self.loader), type(self.loader)._get_iterator
        self._replace(_get_iterator=lambda: _Opened(make(loader), said))

    def _replace(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self.loader, name, value)  # DataLoader.__setattr__ refuses some after its __init__


class _Steered(Sampler[Any]):
    """Sampler or batch sampler of the copy: requests this rank's micro batches, and remembers what was requested."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._begin = (0, 0, 0)
        self.requested: deque[MicroStep] = deque()

    def begin(self, epoch: int, start: int, part: int) -> None:
        self._begin = (epoch, start, part)
        self.requested.clear()

    def __iter__(self) -> Iterator[Request]:
        for step in self._order.steps(*self._begin):
            self.requested.append(step)
            yield step.request

    def __len__(self) -> int:
        count = self._order.micro_steps()
        if count is None:
            raise TypeError("the sampler has no length")
        return count


class MapSource:
    """Micro batches of a data set with ``__getitem__``.

    Args:
        loader: The script's own.
        plan: How samples are cut.
        rank: Data-parallel rank.
        seed: The run's.
        config: ``seed_samples`` is used.

    Raises:
        DataError: A sampler splits the data over ranks already.
    """

    def __init__(self, loader: DataLoader[Any], *, plan: BatchPlan, rank: int, seed: int, config: DataConfig) -> None:
        self.notes: list[str] = []
        self.order = self._order_of(loader, plan, rank, seed)
        self.kind = self.order.unit
        self._steered = _Steered(self.order)
        replaced: dict[str, Any] = {"sampler" if loader.batch_sampler is None else "batch_sampler": self._steered}
        if loader.batch_size is not None:
            replaced["batch_size"] = plan.micro
        dataset = SeededDataset(loader.dataset, seed=seed, rank=rank, seed_samples=config.seed_samples)
        self._inner = _Inner(loader, seed, rank, seeds_itself=config.seed_samples, dataset=dataset, **replaced)

    def fetch(self, epoch: int, place: dict[str, Any]) -> Iterator[Fetched]:
        requested = self._steered.requested
        self._steered.begin(epoch, place.get(self.kind, 0), place.get("part", 0))
        batches, scope = self._inner.open(epoch)
        while True:
            with scope:
                batch = next(batches, _END)
            if batch is _END:
                break
            if not requested:
                raise _out_of_step(self._inner.loader)
            step = requested.popleft()
            info = step.info
            if info.window_samples is None and not info.padding:
                info = replace(info, samples=batch_samples(batch))
            after = {self.kind: info.position, **({"part": step.part} if step.part else {})}
            yield Fetched(batch, info, after)
        if requested:
            raise _out_of_step(self._inner.loader)

    def micro_steps(self) -> int | None:
        return self.order.micro_steps()

    def windows(self) -> int | None:
        return self.order.windows()

    def _order_of(self, loader: DataLoader[Any], plan: BatchPlan, rank: int, seed: int) -> Order:
        batches: Any = loader.batch_sampler
        if batches is None:
            sampler = self._checked(loader.sampler, plan)
            return SampleOrder(
                sequence_of(sampler, seed, plan.data_size), plan, rank, micro=1, drop_last=False, whole=True
            )
        if type(batches) is BatchSampler:
            sampler = self._checked(batches.sampler, plan)
            sequence = sequence_of(sampler, seed, plan.data_size)
            micro = batches.batch_size if plan.micro is None else plan.micro
            return SampleOrder(sequence, plan, rank, micro=micro, drop_last=batches.drop_last)
        for item in (batches, getattr(batches, "sampler", None)):
            _refuse_divided(item, plan.data_size)
        self.notes.append(
            f"batches are those of the script's own {type(batches).__name__}; batch.size doesn't change them"
        )
        return BatchOrder(batches_of(batches, seed), plan, rank)

    def _checked(self, sampler: Any, plan: BatchPlan) -> Any:
        if is_distributed(sampler):
            self.notes.append(
                f"the script's {type(sampler).__name__} is replaced: distkit splits the data itself, in the same order "
                f"(shuffle={sampler.shuffle}, seed={sampler.seed}, drop_last={sampler.drop_last})"
            )
        else:
            _refuse_divided(sampler, plan.data_size)
        return sampler


class _Opened:
    """An iterator of the copy that hands on plain batches, and keeps what their elements said.

    It sits below a subclass's own ``__iter__``, which so sees what it would see without distkit.
    """

    def __init__(self, iterator: Any, said: deque[Collated]) -> None:
        self._iterator = iterator
        self._said = said

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        collated = next(self._iterator)
        self._said.append(collated._replace(batch=None))
        return collated.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class IterableSource:
    """Micro batches of an iterable data set, of which ranks may have unequal numbers.

    Args:
        loader: The script's own.
        plan: How samples are cut.
        rank: Data-parallel rank.
        seed: The run's.
        config: ``iterable``, ``uneven`` and ``seed_samples`` are used.
        any_rank: Whether any rank says yes; None where there is nobody to ask.
    """

    kind = "stream"

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        plan: BatchPlan,
        rank: int,
        seed: int,
        config: DataConfig,
        any_rank: AnyRank | None,
    ) -> None:
        self.notes: list[str] = []
        whole = loader.batch_sampler is None
        self._plan, self._rank, self._any_rank = plan, rank, any_rank
        self._micro = 1 if whole else plan.micro or int(loader.batch_size or 1)
        self._own = config.iterable == "own"
        self._dataset: Any = loader.dataset
        self._drop_last = loader.drop_last
        # With drop_last, a micro step that isn't full on all ranks is left out on all: that is how `stop` ends.
        self._pads = config.uneven == "pad" and not loader.drop_last
        stateful = all(callable(getattr(self._dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._has_state = stateful and loader.num_workers == 0
        self._shard = ShardedIterable(
            self._dataset,
            rank=rank,
            ranks=plan.data_size,
            block=self._micro,
            seed=seed,
            own=self._own,
            pad=self._pads,
            shared=loader.num_workers > 0 and loader.persistent_workers,
            seed_elements=stateful and config.seed_samples,
        )
        replaced: dict[str, Any] = (
            {}
            if whole
            else {
                "batch_sampler": BatchSampler(loader.sampler, self._micro, loader.drop_last),
                "batch_size": self._micro,
            }
        )
        collate = CountingCollate(loader.collate_fn, whole=whole)
        self._inner = _Inner(
            loader, seed, rank, seeds_itself=False, dataset=self._shard, collate_fn=collate, **replaced
        )
        self._said: deque[Collated] = deque()
        self._inner.open_through(self._said)

    def fetch(self, epoch: int, place: dict[str, Any]) -> Iterator[Fetched]:
        start, skip = place.get("samples", 0), self._skipped(place)
        state = place.get("dataset") if self._has_state else None
        if state is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        self._shard.begin(epoch, start, place.get("drawn", 0) if state is not None else 0)
        self._said.clear()
        batches = self._read(epoch)
        previous: tuple[Any, Collated] | None = None
        for _ in range(skip):
            previous = next(batches, None) or previous
        index = 0
        while True:
            current = next(batches, None)
            if self._all_end(current is not None, first=previous is None):
                return
            padding = current is None or current[1].padding
            current = current or previous
            assert current is not None  # _all_end raises where there is neither
            previous = current
            index += 1
            yield self._fetched(*current, index, padding, start, skip)

    def micro_steps(self) -> int | None:
        count = length_of(self._dataset)
        if count is None:
            return None
        step = self._micro * (1 if self._own else self._plan.data_size)
        return count // step if self._drop_last else -(-count // step)

    def windows(self) -> int | None:
        count = self.micro_steps()
        return None if count is None else -(-count // self._plan.accumulate)

    def _read(self, epoch: int) -> Iterator[tuple[Any, Collated]]:
        """This rank's own batches, each with what its elements said."""
        batches, scope = self._inner.open(epoch)
        while True:
            with scope:
                batch = next(batches, _END)
            if batch is _END:
                break
            if not self._said:
                raise _out_of_step(self._inner.loader)
            said = self._said.popleft()
            self._shard.split_mode = said.mode  # what a worker found out needn't be found out in the next epoch
            yield batch, said
        if self._said:
            raise _out_of_step(self._inner.loader)

    def _all_end(self, has: bool, *, first: bool) -> bool:
        """Whether the epoch is over for all ranks, now that this one has, or hasn't, another batch.

        Raises:
            DataError: On all ranks, if one has to repeat a batch and never had any.
        """
        if self._any_rank is None:
            return not has
        if not self._pads:
            return self._any_rank(not has)
        if not self._any_rank(has):
            return True
        if first and self._any_rank(not has):
            mine = "has some" if has else "has none"
            raise DataError(
                f"data.uneven=pad, but {type(self._dataset).__name__} yields nothing at all on some ranks (rank "
                f"{self._rank} {mine}), so they have no batch to repeat",
                hint="--set data.uneven=stop   or give the data set at least one element for each rank and worker",
            )
        return False

    def _fetched(self, batch: Any, said: Collated, index: int, padding: bool, start: int, skip: int) -> Fetched:
        accumulate = self._plan.accumulate
        own = said.mode != STRIDE
        position = skip + index if own else start + index * self._micro * self._plan.data_size
        place: dict[str, Any] = {"batches": position, "ranks": self._plan.data_size} if own else {"samples": position}
        if self._has_state and not own:
            place |= {"drawn": self._shard.elements_drawn, "dataset": copy.deepcopy(self._dataset.state_dict())}
        samples = batch_samples(batch) if said.samples is None else said.samples
        info = BatchInfo(
            samples=0 if padding else samples,
            padding=padding,
            ends_window=index % accumulate == 0,
            starts_window=(index - 1) % accumulate == 0,
            last=False,
            window_samples=None,
            position=position,
        )
        return Fetched(batch, info, place)

    def _skipped(self, place: dict[str, Any]) -> int:
        """Micro batches to leave out of a stream that the data set splits; about as far if the ranks aren't as many."""
        batches = int(place.get("batches", 0))
        return batches * int(place.get("ranks", self._plan.data_size)) // self._plan.data_size


def _refuse_divided(sampler: Any, ranks: int) -> None:
    """Refuse a sampler that yields one rank's part: it would be split a second time, and most samples never be read."""
    if ranks > 1 and (is_distributed(sampler) or getattr(sampler, "num_replicas", 1) != 1):
        raise DataError(
            f"{type(sampler).__name__} yields only one rank's part of the data (num_replicas={sampler.num_replicas}), and "
            f"distkit splits what it yields over {ranks} data-parallel ranks",
            hint="give the DataLoader a sampler over the whole data set; no set_epoch, rank or num_replicas is needed",
        )


def _out_of_step(loader: DataLoader[Any]) -> DataError:
    return DataError(
        f"{type(loader).__name__} doesn't yield one batch for each batch that it fetches, so it can't be known which "
        "samples a batch holds",
        hint="change batches in collate_fn or in the training loop, and not in the DataLoader's __iter__",
    )
