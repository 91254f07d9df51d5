"""The prepared DataLoader: this rank's micro batches, on the device, from any position on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from distkit.config.schema import BatchConfig, DataConfig
from distkit.data.batch import BatchPlan, batch_size_of, resolve_batch
from distkit.data.keys import length_of
from distkit.data.order import BatchInfo
from distkit.data.seeding import tell_epoch
from distkit.data.source import Fetched, IterableSource, MapSource, Source
from distkit.data.transfer import Transfer
from distkit.errors import DataError

__all__ = ["LoaderListener", "PreparedLoader"]

FINGERPRINT_BITS = 16
"""Each costs one question to all ranks when a loader is prepared."""

NO_PLACE = frozenset({"epoch", "kind", "done", "length", "seed"})
"""Keys of a saved position that don't say where in the epoch it is."""


class LoaderListener(Protocol):
    """Is told what a loader does."""

    def epoch_started(self, loader: PreparedLoader) -> None:
        """An iteration begins; a position may still be loaded now."""

    def batch_ready(self, loader: PreparedLoader, info: BatchInfo) -> None:
        """A batch is about to be handed out."""

    def epoch_ended(self, loader: PreparedLoader, exhausted: bool) -> None:
        """The iteration is over: all batches of the epoch were handed out and the script asked for another
        (``exhausted``), or it was stopped, or the script left its loop."""

    def should_stop(self, loader: PreparedLoader) -> bool:
        """Asked before each accumulation window: True ends the iteration, and the position stays where it is."""


class PreparedLoader:
    """A script's DataLoader, split over data-parallel ranks.

    Iterating yields batches as the script's DataLoader makes them, with their tensors on the device. All attributes of
    the script's DataLoader are readable here.

    Args:
        loader: The script's own; it isn't changed.
        plan: How samples are cut, from :func:`distkit.data.resolve_batch`.
        rank: Data-parallel rank.
        size: Data-parallel ranks.
        device: Where tensors go.
        seed: The run's; order, workers and samples are seeded from it.
        config: The ``data`` settings.
        any_rank: ``any_rank(flag)`` says whether the flag is true on any rank. It's called by all ranks together: when
            the loader is made, and once for each micro batch of an iterable data set. None where there is one rank.
        listener: Is told of batches and epochs.

    Raises:
        DataError: Ranks have different data, or a sampler splits it already.
    """

    info: BatchInfo | None = None
    """Of the batch that was handed out last."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        plan: BatchPlan,
        rank: int,
        size: int,
        device: torch.device,
        seed: int,
        config: DataConfig,
        any_rank: Callable[[bool], bool] | None = None,
        listener: LoaderListener | None = None,
    ) -> None:
        if plan.micro is None and type(loader.batch_sampler) is BatchSampler:
            batch = BatchConfig(per=plan.per, accumulate=plan.accumulate)
            plan = resolve_batch(batch, batch_size_of(loader), size)
        self.plan = plan
        self._loader = loader
        self._seed = seed
        self._listener = listener
        self._transfer = Transfer(device)
        self._source: Source
        if isinstance(loader.dataset, IterableDataset):
            self._source = IterableSource(loader, plan=plan, rank=rank, seed=seed, config=config, any_rank=any_rank)
        else:
            source = MapSource(loader, plan=plan, rank=rank, seed=seed, config=config)
            if any_rank is not None:
                self._compare(source, rank, any_rank)
            self._source = source
        self.notes = [*self._source.notes, *self._own_notes()]
        """Sentences for the log on what was replaced or is done without being asked for."""
        self._epoch = 0
        self._told: int | None = None
        self._place: dict[str, Any] = {}
        self._done = self._begun = False

    # -- as a DataLoader --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The batches of the present epoch from the present position on.

        Without :meth:`set_epoch` in between, the next iteration is the next epoch.
        """
        exhausted = False
        if self._listener is not None:
            self._listener.epoch_started(self)
        try:
            if not self._should_stop():
                self._begin()
                exhausted = self._done or (yield from self._hand_out())
        finally:
            if self._listener is not None:
                self._listener.epoch_ended(self, exhausted)

    def __len__(self) -> int:
        """Micro batches of this rank in a whole epoch.

        Raises:
            TypeError: The data set or the sampler has no length.
        """
        count = self._source.micro_steps()
        if count is None:
            raise TypeError(f"the length of {type(self._loader.dataset).__name__} isn't known")
        return count

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a whole epoch; None where that isn't known beforehand."""
        return self._source.windows()

    def _begin(self) -> None:
        if self._begun:
            self.set_epoch(self._epoch + 1)
        self._begun = True
        self._tell()

    def _hand_out(self) -> Generator[Any, None, bool]:
        """Look one batch ahead, so that it's known of each whether it's the last, and the next is moved meanwhile.

        Returns:
            Whether the epoch ended, and wasn't stopped.
        """
        fetched = self._source.fetch(self._epoch, self._place)
        coming = self._next(fetched)
        while coming is not None:
            current, moving = coming
            if current.info.starts_window and self._should_stop():
                return False
            coming = self._next(fetched)
            last = coming is None
            self.info = replace(current.info, last=True, ends_window=True) if last else current.info
            self._place, self._done = current.place, last
            batch = self._transfer.finish(moving)
            if self._listener is not None:
                self._listener.batch_ready(self, self.info)
            yield batch
        self._done = True
        return True

    def _next(self, fetched: Iterator[Fetched]) -> tuple[Fetched, Any] | None:
        item = next(fetched, None)
        if item is None:
            return None
        return replace(item, batch=None), self._transfer.start(item.batch)

    def _should_stop(self) -> bool:
        return self._listener is not None and self._listener.should_stop(self)

    # -- epoch and position -----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The present epoch, counted from 0."""
        return self._epoch

    @property
    def epoch_is_done(self) -> bool:
        """Whether the last batch of the present epoch was handed out."""
        return self._done

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, and pass it on to the sampler, the batch sampler and the data set.

        A position that was loaded for this epoch, and not gone on from yet, is kept; else it starts at its beginning.
        """
        if self._begun or epoch != self._epoch:
            self._place, self._done, self._begun = {}, False, False
        self._epoch = epoch
        self._tell()

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was handed out last; JSON values only.

        Returns:
            ``epoch``; ``kind`` of position; ``samples`` or ``batches``: how much of the epoch was read by all ranks
            together; ``done``: whether that was all; ``length`` of the data set and ``seed``, to compare.
        """
        place = dict(self._place)
        if "dataset" in place:
            try:
                json.dumps(place["dataset"])
            except (TypeError, ValueError):  # it's then counted to the position instead
                del place["dataset"], place["drawn"]
        unit = "batches" if self._source.kind == "batches" or "batches" in place else "samples"
        return {
            "epoch": self._epoch,
            "kind": self._source.kind,
            unit: 0,
            **place,
            "done": self._done,
            "length": length_of(self._loader.dataset),
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position back, also one that was saved by another number of ranks; the next iteration goes on there.

        Raises:
            DataError: The data set, the sampler's kind or the seed isn't that of the saved run.
        """
        epoch, done = int(state["epoch"]), bool(state["done"])
        place = {key: value for key, value in state.items() if key not in NO_PLACE}
        if not done and any(place.get(unit) for unit in ("samples", "batches")):
            self._check_place(state)
        self._epoch, self._place, self._done, self._begun = epoch, place, done, False

    def _check_place(self, state: dict[str, Any]) -> None:
        length = length_of(self._loader.dataset)
        if state["length"] != length:
            raise DataError(
                f"the checkpoint was taken in the middle of an epoch over {state['length']} samples, and the data set "
                f"has {length} now, so the samples not yet seen can't be told",
                hint="resume with the data set of the saved run, or --set checkpoint.resume=none",
            )
        if state["kind"] != self._source.kind:
            raise DataError(
                f"the checkpoint's position counts {state['kind']}, and this DataLoader's counts {self._source.kind}: it "
                "has another kind of sampler or data set now",
                hint="resume with the DataLoader of the saved run, or --set checkpoint.resume=none",
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the checkpoint was taken in the middle of an epoch with seed={state['seed']}, and seed={self._seed} "
                "would go on in another order",
                hint=f"--set seed={state['seed']}",
            )

    def _tell(self) -> None:
        if self._told != self._epoch:
            self._told = self._epoch
            tell_epoch(self._epoch, *self._listeners())

    def _listeners(self) -> list[Any]:
        batches = self._loader.batch_sampler
        return [self._loader.sampler, batches, getattr(batches, "sampler", None), self._loader.dataset]

    # -- checks -----------------------------------------------------------------------------------------------------

    def _own_notes(self) -> list[str]:
        told = {type(x).__name__ for x in self._listeners() if callable(getattr(x, "set_epoch", None))}
        notes = [f"set_epoch of {' and '.join(sorted(told))} is called at each epoch"] if told else []
        if not getattr(self._loader, "in_order", True):
            notes.append(
                "in_order=False is not followed: batches come in order, so that runs can be repeated and resumed"
            )
        return notes

    def _compare(self, source: MapSource, rank: int, any_rank: Callable[[bool], bool]) -> None:
        """Refuse data or an order that isn't the same on all ranks: samples would be missed without a word."""
        length, sequence = length_of(self._loader.dataset), source.order.sequence
        text = f"{length} {self.plan} {self._seed} {sequence.fingerprint()}"
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        differs = False
        for bit in range(FINGERPRINT_BITS):
            mine = bool(digest >> bit & 1)
            differs |= any_rank(mine) and not mine
        if any_rank(differs):
            raise DataError(
                f"ranks have different data: the length of the data set or the order of its samples isn't the same on all "
                f"(rank {rank} has {length} samples, of which its sampler yields {sequence.length()})",
                hint="build the same data set and sampler on every rank, seeded alike; distkit splits it",
            )
