"""The order of an epoch: which rank reads which samples in which micro batch, and where accumulation windows end.

The sequence of samples belongs to the whole run. Each global micro step takes the next ``micro x ranks`` samples of it
and every rank a contiguous slice of those, so R ranks that accumulate A micro batches of M read in each optimizer step
just what one process with batches of R x A x M reads. What is left at the end is dealt out evenly; a rank for which
nothing is left repeats one sample with weight 0, so that all ranks have equally many batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distkit.data.batch import BatchPlan
from distkit.data.keys import KeySequence, KeyStream, tolist

__all__ = ["BatchInfo", "BatchOrder", "MicroStep", "Order", "Request", "SampleOrder", "share"]


@dataclass(frozen=True)
class BatchInfo:
    """What is known of a micro batch besides its contents.

    Args:
        samples: This rank's samples in it; 0 for padding.
        padding: It only keeps ranks in step, and must weigh nothing.
        ends_window: It is the last of its accumulation window.
        starts_window: It is the first.
        last: It is the last of the epoch.
        window_samples: Samples of its window over all ranks and micro batches; None where ranks can't know without
            asking each other (iterable data sets, and data sets that make their own batches).
        position: How much of the epoch has been read once all ranks are done with it; the unit is the loader's.
    """

    samples: int
    padding: bool
    ends_window: bool
    starts_window: bool
    last: bool
    window_samples: int | None
    position: int


@dataclass(frozen=True)
class Request:
    """What is fetched for one micro batch.

    Args:
        keys: The samples' keys in the data set.
        positions: Where each is in the epoch's sequence; seeds are derived from it.
        epoch: Which epoch.
    """

    keys: Sequence[Any]
    positions: Sequence[int]
    epoch: int


@dataclass(frozen=True)
class MicroStep:
    """One rank's part of a global micro step.

    Args:
        request: What it fetches.
        info: What it is.
        part: Samples already read of the batch at ``info.position``, where a batch is cut into several micro steps.
    """

    request: Request
    info: BatchInfo
    part: int = 0


class Order(Protocol):
    """How an epoch is cut."""

    unit: str
    """What positions count: ``samples`` or ``batches``."""

    sequence: KeySequence

    def steps(self, epoch: int, start: int, part: int) -> Iterator[MicroStep]:
        """The micro steps of an epoch from a position on."""

    def micro_steps(self) -> int | None:
        """Micro steps in a whole epoch, if the sampler has a length."""

    def windows(self) -> int | None:
        """Accumulation windows in a whole epoch, if the sampler has a length."""


def share(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """Deal ``count`` samples out as evenly as possible, earlier ranks one more.

    Returns:
        Where this rank's slice starts, and its length.
    """
    each, extra = divmod(count, ranks)
    return rank * each + min(rank, extra), each + (rank < extra)


class SampleOrder:
    """Cuts a sequence of samples.

    Args:
        sequence: The samples' keys.
        plan: ``accumulate`` and ``per`` are used.
        rank: This data-parallel rank.
        micro: Samples in a micro batch.
        drop_last: Leave out what doesn't fill a micro step on all ranks; with ``per: global``, a whole global batch.
        whole: Each key stands for a whole batch that the data set makes, so samples aren't known.
    """

    def __init__(
        self, sequence: KeySequence, plan: BatchPlan, rank: int, *, micro: int, drop_last: bool, whole: bool = False
    ) -> None:
        self.unit = "batches" if whole else "samples"
        self.sequence = sequence
        self._ranks, self._rank, self._whole = plan.data_size, rank, whole
        self._step = micro * plan.data_size
        self._window = self._step * plan.accumulate
        self._drop_unit = (self._window if plan.per == "global" else self._step) if drop_last else 1

    def steps(self, epoch: int, start: int, part: int = 0) -> Iterator[MicroStep]:
        keys = self.sequence.keys(epoch)
        keys.skip(start)
        window = self._take(keys)
        while len(window):
            following = self._take(keys)
            yield from self._cut(epoch, window, start, last=not len(following))
            start += len(window)
            window = following

    def micro_steps(self) -> int | None:
        kept = self._kept()
        return None if kept is None else -(-kept // self._step)

    def windows(self) -> int | None:
        kept = self._kept()
        return None if kept is None else -(-kept // self._window)

    def _kept(self) -> int | None:
        count = self.sequence.length()
        return None if count is None else count - count % self._drop_unit

    def _take(self, keys: KeyStream) -> Any:
        taken = keys.take(self._window)
        return taken[: len(taken) - len(taken) % self._drop_unit]

    def _cut(self, epoch: int, window: Any, offset: int, *, last: bool) -> Iterator[MicroStep]:
        total = len(window)
        for begin in range(0, total, self._step):
            step = window[begin : begin + self._step]
            first, count = share(len(step), self._ranks, self._rank)
            if not count:
                first = 0
            final = begin + self._step >= total
            info = BatchInfo(
                samples=count,
                padding=not count,
                ends_window=final,
                starts_window=begin == 0,
                last=last and final,
                window_samples=None if self._whole else total,
                position=offset + begin + len(step),
            )
            stop = first + max(count, 1)
            positions = range(offset + begin + first, offset + begin + stop)
            yield MicroStep(Request(tolist(step[first:stop]), positions, epoch), info)


class BatchOrder:
    """Deals out the batches of a script's own batch sampler.

    With ``per: device`` each batch is one rank's micro batch, and rank r takes every batch i with i mod R = r. With
    ``per: global`` each is the batch of one optimizer step, and is cut into accumulation x ranks slices.

    Args:
        sequence: The batches, each a list of keys.
        plan: ``accumulate`` and ``per`` are used.
        rank: This data-parallel rank.
    """

    unit = "batches"

    def __init__(self, sequence: KeySequence, plan: BatchPlan, rank: int) -> None:
        self.sequence = sequence
        self._plan, self._ranks, self._rank = plan, plan.data_size, rank
        self._each = 1 if plan.per == "global" else plan.accumulate * plan.data_size

    def steps(self, epoch: int, start: int, part: int = 0) -> Iterator[MicroStep]:
        keys = self.sequence.keys(epoch)
        seen = sum(len(batch) for _ in range(start) for batch in keys.take(1))
        batches = self._take(keys)
        if part and batches:
            seen += part
            batches[0] = batches[0][part:]
        while batches:
            following = self._take(keys)
            cut = self._slice if self._plan.per == "global" else self._deal
            yield from cut(epoch, batches, start, seen, not following, part)
            seen += sum(map(len, batches))
            start += len(batches)
            batches, part = following, 0

    def micro_steps(self) -> int | None:
        count = self.sequence.length()
        if count is None:
            return None
        return count * self._plan.accumulate if self._plan.per == "global" else -(-count // self._ranks)

    def windows(self) -> int | None:
        count = self.sequence.length()
        return None if count is None else -(-count // self._each)

    def _take(self, keys: KeyStream) -> list[list[Any]]:
        return list(keys.take(self._each))

    def _deal(
        self, epoch: int, batches: list[list[Any]], start: int, seen: int, last: bool, part: int
    ) -> Iterator[MicroStep]:
        total = sum(map(len, batches))
        for begin in range(0, len(batches), self._ranks):
            step = batches[begin : begin + self._ranks]
            mine = begin + self._rank if self._rank < len(step) else begin
            padding = self._rank >= len(step)
            batch = batches[mine][:1] if padding else batches[mine]
            first = seen + sum(map(len, batches[:mine]))
            final = begin + self._ranks >= len(batches)
            info = BatchInfo(
                samples=0 if padding else len(batch),
                padding=padding,
                ends_window=final,
                starts_window=begin == 0,
                last=last and final,
                window_samples=total,
                position=start + begin + len(step),
            )
            yield MicroStep(Request(batch, range(first, first + len(batch)), epoch), info)

    def _slice(
        self, epoch: int, batches: list[list[Any]], start: int, seen: int, last: bool, part: int
    ) -> Iterator[MicroStep]:
        batch = batches[0]
        slices = self._plan.accumulate * self._ranks
        steps = -(-min(len(batch), slices) // self._ranks)  # micro steps in which no rank has a sample are left out
        for step in range(steps):
            first, count = share(len(batch), slices, step * self._ranks + self._rank)
            begin = share(len(batch), slices, step * self._ranks)[0]
            done = share(len(batch), slices, (step + 1) * self._ranks)[0] if step + 1 < steps else len(batch)
            final = step + 1 == steps
            if not count:
                first = begin
            info = BatchInfo(
                samples=count,
                padding=not count,
                ends_window=final,
                starts_window=step == 0,
                last=last and final,
                window_samples=len(batch),
                position=start + final,
            )
            stop = first + max(count, 1)
            request = Request(batch[first:stop], range(seen + first, seen + stop), epoch)
            yield MicroStep(request, info, 0 if final else part + done)
