"""Who writes what where every rank holds everything."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import TypeVar

__all__ = ["own_share"]

Key = TypeVar("Key", bound=Hashable)


def own_share(items: Sequence[tuple[Key, int]], rank: int, size: int) -> set[Key]:
    """This rank's part of a split of items over ranks: each item on exactly one rank, bytes about equal.

    Largest first onto the least loaded rank (Graham 1969, LPT): no rank gets more than 4/3 of the best possible.

    Args:
        items: Keys and their sizes in bytes, the same in the same order on all ranks.
        rank: This rank.
        size: Number of ranks.
    """
    loads = [(0, r) for r in range(size)]
    mine: set[Key] = set()
    for key, nbytes in sorted(items, key=lambda item: -item[1]):  # stable: equal sizes keep the given order
        load, chosen = heappop(loads)
        heappush(loads, (load + max(nbytes, 1), chosen))  # empty tensors count too, or rank 0 would get them all
        if chosen == rank:
            mine.add(key)
    return mine
