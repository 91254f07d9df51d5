"""Seeds of samples and workers.

Each sample of a map-style data set is fetched under random states that follow from (seed, epoch, place in the epoch's
sequence), so that random augmentation is the same for any number of ranks and workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info

from distkit.data.order import Request
from distkit.data.rng import random_states_differ, seed_everywhere, snapshot
from distkit.seeds import mix_seed

__all__ = ["SeededDataset", "StandIn", "WorkerInit", "own_dataset", "tell_epoch"]


class StandIn:
    """Stands in front of the script's own data set inside a DataLoader.

    DataLoader subclasses that look at their data set find its attributes here.
    """

    _dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith(
            "__"
        ):  # not there yet while unpickling; and pickle must not see its own
            raise AttributeError(name)
        return getattr(self._dataset, name)


class SeededDataset(StandIn, Dataset[Any]):
    """Stands before a map-style data set inside the DataLoader, and fetches what a :class:`Request` asks for.

    Args:
        dataset: The script's own.
        seed: The run's.
        rank: Data-parallel rank, for the seeds of workers.
        seed_samples: Whether to seed before each sample; otherwise random states run on, from a seed per worker.
    """

    def __init__(self, dataset: Any, *, seed: int, rank: int, seed_samples: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._rank = rank
        self._seed_samples = seed_samples
        self._epoch: int | None = None
        self._by_batch = _reads_batches(dataset)
        self._random_batches = False

    def __getitem__(self, request: Any) -> Any:
        """The one item asked for (``batch_size=None``); anything but a request goes to the data set as it is."""
        if not isinstance(request, Request):
            return self._dataset[request]
        self._enter(request.epoch)
        return self._one(request.keys[0], mix_seed(self._seed, request.epoch) + request.positions[0])

    def __getitems__(self, request: Request) -> Any:
        """The samples asked for, as a list, or as the data set's own ``__getitems__`` gives them."""
        self._enter(request.epoch)
        base = mix_seed(self._seed, request.epoch)
        if self._by_batch and not self._random_batches:
            samples = self._whole_batch(request, base)
            if not self._random_batches:
                return samples
        return [self._one(key, base + at) for key, at in zip(request.keys, request.positions, strict=True)]

    def _one(self, key: Any, number: int) -> Any:
        if self._seed_samples:
            seed_everywhere(mix_seed(number))
        return self._dataset.__getitems__([key])[0] if self._by_batch else self._dataset[key]

    def _whole_batch(self, request: Request, base: int) -> Any:
        """Fetch through the data set's own ``__getitems__``, which is fast, unless it draws random numbers.

        Numbers drawn for a whole batch depend on how batches are cut. Once some were seen, samples are fetched one by
        one from then on, where they come as a list.
        """
        if not self._seed_samples:
            return self._dataset.__getitems__(list(request.keys))
        seed_everywhere(mix_seed(base + request.positions[0]))
        before = snapshot()
        samples = self._dataset.__getitems__(list(request.keys))
        self._random_batches = isinstance(samples, list) and random_states_differ(before, snapshot())
        return samples

    def _enter(self, epoch: int) -> None:
        """In a worker that outlives the epoch: the data set is a copy that no set_epoch of the main process reaches."""
        if epoch == self._epoch:
            return
        info = get_worker_info()
        if info is not None and self._epoch is not None:
            tell_epoch(epoch, self._dataset)
            seed_everywhere(mix_seed(self._seed, epoch, self._rank, info.id))
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)


class WorkerInit:
    """Runs first in each worker: seeds it, shows it the script's own data set, then calls the script's worker_init_fn.

    Args:
        function: The script's own, or None.
        seed: The run's.
        epoch: The epoch that the worker starts in.
        rank: Data-parallel rank.
    """

    def __init__(self, function: Callable[[int], Any] | None, *, seed: int, epoch: int, rank: int) -> None:
        self._function = function
        self._numbers = seed, epoch, rank

    def __call__(self, worker: int) -> None:
        seed = mix_seed(*self._numbers, worker)
        seed_everywhere(seed)
        info = get_worker_info()
        if info is not None:
            # WorkerInfo refuses to be changed (in torch 2.13 it's a frozen dataclass), but
            # scripts read `seed` and `dataset` from it, and must find this rank's seed and their own object.
            object.__setattr__(info, "seed", seed)
            object.__setattr__(info, "dataset", own_dataset(info.dataset))
        if self._function is not None:
            self._function(worker)


def own_dataset(dataset: Any) -> Any:
    """The script's data set behind one of distkit's."""
    return dataset._dataset if isinstance(dataset, StandIn) else dataset


def tell_epoch(epoch: int, *listeners: Any) -> None:
    """Call ``set_epoch`` of those that have it, each object once."""
    for listener in {id(item): item for item in listeners}.values():
        function = getattr(listener, "set_epoch", None)
        if callable(function):
            function(epoch)


def _reads_batches(dataset: Any) -> bool:
    """Whether a data set has a ``__getitems__`` that does more than loop; torch's Subset only passes the call on."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))
