"""Checkpoints survive whatever happens to a run: one round of each disturbance. ``python -m tests.chaos`` plays more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.chaos import Outcome, References, play
from tests.chaos.disks import can_mount
from tests.chaos.rounds import KINDS, Round, draw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_mount(), reason="small disks and read-only folders need root"),
]

ONE: dict[str, Any] = {"strategy": "single", "nproc": 1, "next_strategy": "single", "next_nproc": 1}

ROUNDS = [
    Round("rank", "kill a rank", victim=1, restart=True, background=True),
    Round("launcher", "kill the launcher", **ONE, nth=1, moment=0.2),
    Round("all", "kill all", **ONE, every=3, moment=0.8),
    Round("term", "TERM", victim=1, background=True),
    Round("stop", "STOP, CONT", **ONE, background=True),
    Round("small", "small disk", **ONE, room=1.6),
    Round("filled", "disk filled, freed", **ONE, background=True, hold_s=0.6),
    Round("read-only", "read-only", **ONE, lock="folder", hold_s=1.5),
    Round("file", "damaged file", **ONE, damage="pickle", which=0.5),
    Round("manifest", "damaged manifest", **ONE, damage="flip a bit", background=True),
    Round("folders", "left-over folders", **ONE, inside=False),
]
"""Most of them on one process, which starts sooner; what needs ranks has two."""

JOBS = 2


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Outcome]]]:
    """The rounds, which are played beside each other: most of their time is waiting for imports."""
    folder = tmp_path_factory.mktemp("chaos")
    references = References(folder)
    with ThreadPoolExecutor(JOBS) as pool:
        yield {plan.name: pool.submit(play, plan, references, folder / f"round-{plan.name}") for plan in ROUNDS}


@pytest.mark.parametrize("name", [plan.name for plan in ROUNDS])
def test_nothing_is_lost(outcomes: dict[str, Future[Outcome]], name: str) -> None:
    outcome = outcomes[name].result()
    assert outcome.problems == [], outcome.folder
    assert outcome.struck


def test_strikes_fall_inside_saves(outcomes: dict[str, Future[Outcome]]) -> None:
    aimed = [outcomes[plan.name].result() for plan in ROUNDS if plan.inside]
    assert sum(outcome.inside for outcome in aimed) >= len(aimed) - 2


def test_rounds_follow_from_the_seed() -> None:
    drawn = [draw(5, number) for number in range(200)]
    assert drawn == [draw(5, number) for number in range(200)]
    assert drawn != [draw(6, number) for number in range(200)]
    assert {plan.kind for plan in drawn} == set(KINDS) == {plan.kind for plan in ROUNDS}
    assert {plan.changed for plan in drawn} == {plan.background for plan in drawn} == {True, False}
