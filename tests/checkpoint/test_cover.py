"""Gaps and overlaps between regions."""

from __future__ import annotations

import random
import time

import pytest

from distkit.checkpoint.cover import cover_problem
from distkit.state import Region, flat_regions


def split_rows(rows: int, columns: int, parts: int) -> list[Region]:
    per = rows // parts
    return [Region((i * per, 0), (per, columns)) for i in range(parts)]


def test_whole_rows_columns_and_flat_ranges_cover() -> None:
    assert cover_problem((), [Region((), ())]) is None
    assert cover_problem((0, 4), []) is None
    assert cover_problem((8, 5), split_rows(8, 5, 4)) is None
    assert cover_problem((5, 8), [Region((0, i), (5, 1)) for i in range(8)]) is None
    pieces = [r for start in range(0, 7 * 5 * 3, 11) for r in flat_regions((7, 5, 3), start, min(11, 105 - start))]
    random.Random(0).shuffle(pieces)
    assert cover_problem((7, 5, 3), pieces) is None


@pytest.mark.parametrize(
    ("shape", "pieces", "what"),
    [
        ((4, 2), [Region((0, 0), (3, 2))], "2 of 8 elements are in no region"),
        ((4, 2), [Region((0, 0), (3, 2)), Region((2, 0), (2, 2))], "overlap"),
        ((4, 2), [Region((0, 0), (2, 2)), Region((0, 0), (2, 2))], "overlap"),
        ((), [Region((), ()), Region((), ())], "overlap"),
        ((), [], "1 of 1 elements"),
        ((4,), [Region((2,), (3,))], "outside"),
        ((4,), [Region((0, 0), (4, 1))], "number of dimensions"),
    ],
)
def test_what_is_wrong_is_named(shape: tuple[int, ...], pieces: list[Region], what: str) -> None:
    assert what in str(cover_problem(shape, pieces))


def test_many_pieces_are_quick_whichever_way_they_are_cut() -> None:
    began = time.perf_counter()
    n = 20_000
    assert cover_problem((n, 2), [Region((i, 0), (1, 2)) for i in range(n)]) is None
    assert cover_problem((2, n), [Region((0, i), (2, 1)) for i in range(n)]) is None
    assert time.perf_counter() - began < 5


def test_against_counting_each_element() -> None:
    rng = random.Random(7)
    for _ in range(300):
        pieces = [
            Region((x, y), (rng.randint(0, 3 - x), rng.randint(0, 3 - y)))
            for x, y in ((rng.randint(0, 2), rng.randint(0, 2)) for _ in range(rng.randint(1, 5)))
        ]
        counts = [[0] * 3 for _ in range(3)]
        for piece in pieces:
            for i in range(piece.offset[0], piece.offset[0] + piece.shape[0]):
                for j in range(piece.offset[1], piece.offset[1] + piece.shape[1]):
                    counts[i][j] += 1
        good = all(count == 1 for row in counts for count in row)
        assert (cover_problem((3, 3), pieces) is None) == good
