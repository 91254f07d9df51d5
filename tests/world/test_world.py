"""World's verbs over real process groups, and alone."""

from __future__ import annotations

import pytest
import torch

from distkit.errors import UsageError
from distkit.world import World
from tests.pool import Pool

CASES = "tests.world.cases:"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_verbs(pool: Pool, n: int) -> None:
    results = pool.run(CASES + "verbs", n)
    for r, found in enumerate(results):
        assert found["sum"] == [n * (n - 1) / 2, n]
        assert (found["max"], found["min"]) == (n - 1, 5)
        assert found["any"] == [True, False]
        assert found["all"] == [True, n == 1]
        assert found["gathered"] == [[10.0 * k + i for i in range(k + 1)] for k in range(n)]
        assert found["scalars"] == [float(k) for k in range(n)]
        assert found["bools"] == [[k == 0] for k in range(n)]
        assert found["empty"] == [[0.0] * k for k in range(n)]
        assert found["objects"] == [{"rank": k, "text": "x" * k, "none": None} for k in range(n)]
        assert found["broadcast"] == [n - 1.0] * 2
        assert found["object"] == {"from": 0}
        assert r < n


def test_a_rank_that_skips_a_verb_is_named(pool: Pool) -> None:
    for message in pool.run(CASES + "mismatch", 3)[:1]:
        assert "only ranks 0, 2 called it; missing: 1" in message
        assert "went on to trainer.evaluate()" in message


def test_flags_of_a_step_are_kept(pool: Pool) -> None:
    step, other, nothing = [False, False, True, False], [True, False, False, False], [False] * 4
    assert pool.run(CASES + "flags", 2) == [[step, other, nothing]] * 2


def test_main_first_may_take_longer_than_a_collective(pool: Pool) -> None:
    """H2: 3 s of work on rank 0 with a time limit of 1.5 s for collectives."""
    first, second = pool.run(CASES + "main_first", 2, step_s=1.5, work_s=3.0)
    assert second[0] >= first[0]


def test_alone() -> None:
    world = World.alone()
    assert world.is_main
    assert world.any(True)
    assert not world.all(False)
    assert world.all_gather_objects([1]) == [[1]]
    assert world.broadcast_object("x") == "x"
    assert torch.equal(world.all_reduce(torch.ones(2)), torch.ones(2))
    with world.main_first():
        pass
    with pytest.raises(UsageError, match="sum, max, min"):
        world.all_reduce(torch.ones(1), "mean")
    with pytest.raises(UsageError, match="world, data, tensor"):
        world.all_reduce(torch.ones(1), axis="pipeline")
