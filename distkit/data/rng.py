"""Random numbers of torch, numpy and random: seeding them, and states kept apart from training's."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.random  # on first use otherwise, which may be inside a data set, where it would come up unseeded
import torch

from distkit.seeds import mix_seed

__all__ = [
    "RandomScope",
    "generators_of",
    "initial_mark",
    "random_states_differ",
    "seed_everywhere",
    "snapshot",
]


def seed_everywhere(seed: int) -> None:
    """Seed torch's CPU generator, numpy and random.

    ``torch.manual_seed`` would seed CUDA too, and so change dropout. numpy is given other bits than torch, because both
    are Mersenne twisters that take 32 of them, and would draw the same numbers.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed((seed >> 31) & 0xFFFFFFFF)


def snapshot() -> list[tuple[Any, Any]]:
    """The states of the global generators."""
    return [(generator, _state(generator)) for generator in _global_generators()]


def random_states_differ(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> bool:
    """Whether random numbers were drawn between two snapshots."""
    return any(not _equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):  # of random, and of numpy, which has an array in it
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def generators_of(owner: Any) -> list[Any]:
    """Generators that an object (a sampler) keeps in its attributes: torch's, numpy's and random's."""
    found = [getattr(owner, "generator", None), *getattr(owner, "__dict__", {}).values()]
    return list({id(item): item for item in found if _is_generator(item)}.values())


def initial_mark(generator: Any) -> int:
    """A number that tells how a generator was seeded, so that a script's own seed still counts."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return zlib.crc32(repr(_state(generator)).encode())


class RandomScope:
    """Random states of its own: each ``with`` block goes on where the last one ended, and leaves no trace outside.

    Args:
        seed: Of the first block; None where whatever runs inside seeds itself, and no block goes on from another (numpy
            takes a tenth of a millisecond to give its state, and another to take it back).
        own: Further generators to seed and to put back.
    """

    def __init__(self, seed: int | None, own: Sequence[Any] = ()) -> None:
        self._seed = seed
        self._own = list(own)
        self._inside: list[tuple[Any, Any]] | None = None
        self._outside: list[tuple[Any, Any]] = []

    def __enter__(self) -> RandomScope:
        self._outside = self._capture()
        if self._seed is None:
            return self
        if self._inside is None:
            seed_everywhere(self._seed)
            for index, generator in enumerate(self._own, start=1):
                _reseed(generator, mix_seed(self._seed, index))
        else:
            _restore(self._inside)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._seed is not None:
            self._inside = self._capture()
        _restore(self._outside)

    def _capture(self) -> list[tuple[Any, Any]]:
        return [(generator, _state(generator)) for generator in (*_global_generators(), *self._own)]


def _global_generators() -> list[Any]:
    """The hidden instances behind ``torch.rand``, ``random.random`` and ``numpy.random.rand``."""
    return [
        torch.default_generator,
        random.getstate.__self__,  # type: ignore[attr-defined]
        np.random.get_state.__self__,  # type: ignore[attr-defined]
    ]


def _is_generator(item: Any) -> bool:
    if isinstance(item, torch.Generator):
        return item.device.type == "cpu"
    if isinstance(item, random.Random):
        return not isinstance(item, random.SystemRandom)  # which has no state
    return isinstance(item, np.random.Generator | np.random.RandomState)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()  # torch.Generator and numpy's RandomState


def _restore(states: list[tuple[Any, Any]]) -> None:
    for generator, state in states:
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed((seed >> 31) & 0xFFFFFFFF)
