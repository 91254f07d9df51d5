"""Sequences of sample keys: which sample comes when in an epoch, as a function of (seed, epoch) on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from distkit.data.rng import RandomScope, generators_of, initial_mark
from distkit.seeds import mix_seed

__all__ = ["KeySequence", "KeyStream", "batches_of", "is_distributed", "length_of", "sequence_of", "tolist"]

CHUNK = 1024
"""Keys drawn at a time from a script's own sampler, so that an endless one works too."""


class KeyStream(Protocol):
    """The keys of one epoch, read from front to back."""

    def take(self, count: int) -> Any:
        """The next keys, fewer at the end: a list, a range or a 1-D int64 tensor."""

    def skip(self, count: int) -> None:
        """Leave some out."""


class KeySequence(Protocol):
    """The keys of every epoch."""

    def keys(self, epoch: int) -> KeyStream:
        """Those of one epoch, from its start."""

    def length(self) -> int | None:
        """How many there are in an epoch; None where the sampler doesn't say."""

    def fingerprint(self) -> str:
        """A text that differs between ranks if their sequences do."""


class _Indexed:
    """Keys that are known at once: a range, or a permutation as a tensor, of which no list is ever made."""

    def __init__(self, keys: range | torch.Tensor) -> None:
        self._keys = keys
        self._next = 0

    def take(self, count: int) -> range | torch.Tensor:
        taken = self._keys[self._next : self._next + count]
        self._next += len(taken)
        return taken

    def skip(self, count: int) -> None:
        self._next += count


class _Drawn:
    """Keys drawn from a script's own sampler, under random states that are the same on every rank."""

    def __init__(self, sampler: Iterable[Any], scope: RandomScope, *, batches: bool) -> None:
        self._sampler = sampler
        self._scope = scope
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._buffer: list[Any] = []
        self._ended = False

    def take(self, count: int) -> list[Any]:
        while len(self._buffer) < count and not self._ended:
            self._draw(max(CHUNK, count - len(self._buffer)))
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def skip(self, count: int) -> None:
        while count > 0:
            skipped = len(self.take(min(count, CHUNK)))
            if not skipped:
                return
            count -= skipped

    def _draw(self, count: int) -> None:
        with self._scope:
            if self._iterator is None:
                self._iterator = iter(self._sampler)
                if self._batches:
                    self._iterator = (batch for batch in map(tolist, self._iterator) if batch)
            drawn = list(islice(self._iterator, count))
        self._ended = len(drawn) < count
        self._buffer += drawn


class _Computed:
    """A sequence that is a function of the epoch."""

    def __init__(
        self, compute: Callable[[int], range | torch.Tensor], length: Callable[[], int], marks: Sequence[int] = ()
    ) -> None:
        self._compute = compute
        self._length = length
        self._marks = marks

    def keys(self, epoch: int) -> KeyStream:
        return _Indexed(self._compute(epoch))

    def length(self) -> int | None:
        return self._length()

    def fingerprint(self) -> str:
        return f"{self._length()} {self._marks}"


class _Own:
    """The sequence of a script's own sampler or batch sampler."""

    def __init__(self, sampler: Any, seed: int, *, batches: bool = False) -> None:
        self._sampler = sampler
        self._batches = batches
        inner = getattr(sampler, "sampler", None)
        self._generators = [*generators_of(sampler), *(generators_of(inner) if inner is not None else [])]
        # Taken once: manual_seed() in a later epoch must not make the order depend on when the run was resumed.
        self._seeds = [seed, *(initial_mark(generator) for generator in self._generators)]

    def keys(self, epoch: int) -> KeyStream:
        seed = mix_seed(self._seeds[0], epoch, *self._seeds[1:])
        return _Drawn(self._sampler, RandomScope(seed, self._generators), batches=self._batches)

    def length(self) -> int | None:
        return length_of(self._sampler)

    def fingerprint(self) -> str:
        return f"{self.length()} {self._seeds} {self.keys(0).take(CHUNK)}"


def sequence_of(sampler: Any, seed: int, ranks: int) -> KeySequence:
    """The sequence that a sampler of single keys stands for.

    torch's sequential and shuffling samplers are computed; a DistributedSampler is taken for the shuffle that it splits;
    any other sampler is drawn from, with its generators and the global ones seeded by (seed, epoch).

    Args:
        sampler: Of a DataLoader.
        seed: The run's.
        ranks: Data-parallel ranks, to which a DistributedSampler with ``drop_last`` cuts the set.
    """
    if type(sampler) is SequentialSampler:
        return _Computed(lambda epoch: range(len(sampler)), lambda: len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement:
        marks = [] if sampler.generator is None else [initial_mark(sampler.generator)]
        return _Computed(
            lambda epoch: _permutation(len(sampler.data_source), len(sampler), mix_seed(seed, epoch, *marks)),
            lambda: len(sampler),
            marks,
        )
    if is_distributed(sampler):
        return _Computed(
            lambda epoch: _undivided(sampler, epoch, ranks), lambda: _undivided_length(sampler, ranks), [sampler.seed]
        )
    return _Own(sampler, seed)


def batches_of(batch_sampler: Any, seed: int) -> KeySequence:
    """The sequence of batches that a script's own batch sampler yields, without empty ones."""
    return _Own(batch_sampler, seed, batches=True)


def is_distributed(sampler: Any) -> bool:
    """Whether it's torch's DistributedSampler, and shuffles as that does."""
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def length_of(item: Any) -> int | None:
    """``len(item)``, or None where it has none."""
    if not isinstance(item, Sized):
        return None
    try:
        return len(item)
    except (TypeError, NotImplementedError):
        return None


def tolist(keys: Any) -> list[Any]:
    """Keys as a list of Python objects."""
    return list(keys.tolist()) if isinstance(keys, torch.Tensor) else list(keys)


def _permutation(size: int, count: int, seed: int) -> torch.Tensor:
    """``count`` keys out of ``size``, each as often as any other but for the remainder, as RandomSampler draws them."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randperm(size, generator=generator) for _ in range(-(-count // size))] if size else []
    return torch.cat(whole)[:count] if whole else torch.empty(0, dtype=torch.int64)


def _undivided_length(sampler: DistributedSampler[Any], ranks: int) -> int:
    count = len(sampler.dataset)  # type: ignore[arg-type]
    return count - count % ranks if sampler.drop_last else count


def _undivided(sampler: DistributedSampler[Any], epoch: int, ranks: int) -> range | torch.Tensor:
    """What DistributedSampler shuffles before it splits, without its padding."""
    count = len(sampler.dataset)  # type: ignore[arg-type]
    kept = _undivided_length(sampler, ranks)
    if not sampler.shuffle:
        return range(kept)
    generator = torch.Generator().manual_seed(sampler.seed + epoch)
    return torch.randperm(count, generator=generator)[:kept]
