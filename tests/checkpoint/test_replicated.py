"""Who writes what where every rank holds everything."""

from __future__ import annotations

import random

from distkit.checkpoint.replicated import own_share


def test_each_item_once_and_bytes_about_equal() -> None:
    rng = random.Random(1)
    items = [((f"group{i % 2}", f"w{i}"), rng.choice([0, 4, 4096, rng.randint(1, 10**6)])) for i in range(200)]
    sizes = dict(items)
    for ranks in (1, 2, 4, 7):
        shares = [own_share(items, rank, ranks) for rank in range(ranks)]
        assert sorted(key for share in shares for key in share) == sorted(sizes)
        loads = [sum(sizes[key] for key in share) for share in shares]
        assert max(loads) <= sum(loads) / ranks + max(sizes.values())


def test_more_ranks_than_items() -> None:
    shares = [own_share([("a", 0), ("b", 0)], rank, 4) for rank in range(4)]
    assert sorted(map(len, shares)) == [0, 0, 1, 1]
