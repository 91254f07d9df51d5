"""Checkpoints that move: each strategy writes one and loads one, over every change of the number of processes.

All ordered pairs are done by scripts/benchmarks/checkpoint_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from distkit.strategies.registry import strategy_names
from tests.contract.matrix import VARIANTS, Options, Place, Source, make_move, make_source
from tests.pool import Pool

ROUND = [
    Place("single", 1),
    Place("fsdp", 4),
    Place("zero3", 2),
    Place("ddp", 4),
    Place("dp", 1),
    Place("hsdp", 4),
    Place("zero1", 2),
    Place("horovod", 4),
    Place("zero2", 1),
    Place("zero3+offload", 4),
    Place("zero2+offload", 2),
    Place("fsdp+tensor2", 4),
    Place("zero3+tensor2", 4),
    Place("ddp+tensor2", 2),
    Place("zero1+tensor2", 4),
    Place("zero2+tensor2", 2),
    Place("megatron-zero1", 4),
    Place("megatron-zero3", 4),
    Place("megatron-zero2", 2),
]
"""Each one's checkpoint moves to the next one, the last one's to the first."""

MOVES = list(zip(ROUND, [*ROUND[1:], ROUND[0]], strict=True))

OTHER_OPTIMIZERS = [
    ("SGD:momentum=0.9", Place("fsdp", 4), Place("zero3", 2)),
    ("Adafactor", Place("ddp", 4), Place("single", 1)),
    ("NAdam", Place("zero1", 2), Place("hsdp", 4)),
    ("Adagrad:initial_accumulator_value=0.1", Place("zero3", 2), Place("fsdp", 4)),
]
"""Momentum only; factored states; a field of one number a parameter; state that is there before the first step."""


@pytest.fixture(scope="module")
def source(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Place, str], Source]:
    """A run that wrote a checkpoint and went on, trained once."""

    @cache
    def get(place: Place, optimizer: str = "AdamW") -> Source:
        return make_source(pool, place, tmp_path_factory.mktemp("source"), Options(optimizer))

    return get


def check(pool: Pool, source: Source, target: Place, folder: Path, optimizer: str = "AdamW") -> int:
    assert not source.failed and not source.refused, source.failed or source.refused
    move = make_move(pool, source, target, folder, Options(optimizer))
    assert not move.failed and not move.refused, move.failed or move.refused
    assert move.difference <= 1e-6
    return move.tensors


def test_every_strategy_and_every_change_of_size_is_in_it() -> None:
    assert {place.label for place in ROUND} == {*strategy_names(), *VARIANTS}
    assert {(1, 4), (4, 1), (2, 4), (4, 2)} <= {(a.size, b.size) for a, b in MOVES}


@pytest.mark.parametrize(("writer", "reader"), MOVES, ids=str)
def test_nothing_is_lost_and_training_goes_on_the_same(
    pool: Pool, source: Callable[..., Source], tmp_path: Path, writer: Place, reader: Place
) -> None:
    """K8, K9, K11, C4: the same bits, groups and counters, and losses within 1e-6 of those of staying."""
    assert check(pool, source(writer), reader, tmp_path) > 80


@pytest.mark.parametrize(("optimizer", "writer", "reader"), OTHER_OPTIMIZERS, ids=str)
def test_states_of_other_optimizers(
    pool: Pool, source: Callable[..., Source], tmp_path: Path, optimizer: str, writer: Place, reader: Place
) -> None:
    check(pool, source(writer, optimizer), reader, tmp_path, optimizer)


@pytest.mark.parametrize(
    ("label", "optimizer", "reason"),
    [
        ("fsdp", "Adafactor", "Adafactor can't step parameters that are split over ranks"),
        ("fsdp", "Rprop", "Rprop can't step parameters that are split over ranks"),
        ("fsdp", "Muon", "Muon can't step 2 matrices that have fewer rows than the 2 ranks"),
        ("zero1", "Adafactor", "Adafactor needs each parameter whole"),
        ("zero3", "Muon", "Muon needs each parameter whole"),
    ],
)
def test_what_an_engine_cannot_step_is_refused_before_training(
    source: Callable[..., Source], label: str, optimizer: str, reason: str
) -> None:
    found = source(Place(label, 2), optimizer)
    assert reason in found.refused and "Hint: " in found.refused
