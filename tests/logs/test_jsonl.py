"""metrics.jsonl: valid JSON, no step twice, nothing lost but what a resumed run writes again."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from distkit.logs.jsonl import MetricsFile


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write(path: Path, *steps: int) -> None:
    file = MetricsFile(path)
    for step in steps:
        file.write(step, {"loss": step / 10}, time=1.0)
    file.close()


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        file.write(step, {"loss": 0.1 + 0.2}, time=1700000000.12345)
        assert read(tmp_path / "metrics.jsonl")[-1] == {"time": 1700000000.123, "step": step, "loss": 0.1 + 0.2}
    file.close()


def test_what_is_logged_at_one_step_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    file = MetricsFile(path)  # also the last line of an earlier process
    file.write(2, {"eval/loss": 5.0}, time=2.0)
    file.write(2, {"eval/loss": 6.0}, time=3.0)
    file.write(3, {"a": math.nan}, time=4.0)
    file.write(3, {"b": math.inf}, time=4.0)
    file.write(3, {"a": 1.0}, time=4.0)
    file.close()
    assert read(path)[1:] == [
        {"time": 3.0, "step": 2, "loss": 0.2, "eval/loss": 6.0},
        {"time": 4.0, "step": 3, "a": 1.0, "b": None, "non_finite": ["b"]},
    ]


def test_a_shorter_line_in_place_leaves_no_rest(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"text": "x" * 100}, time=1.0)
    file.write(1, {"text": "y"}, time=1.0)
    file.write(2, {}, time=1.0)
    file.close()
    assert [line.get("text") for line in read(tmp_path / "metrics.jsonl")] == ["y", None]


def test_non_finite_numbers_are_null_and_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"loss": math.nan, "lrs": [0.1, -math.inf], "fine": 1.0}, time=1.0)
    file.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["loss"] is None
    assert line["lrs"] == [0.1, None]
    assert line["non_finite"] == ["loss", "lrs"]


def test_lines_of_a_killed_run_are_moved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    with path.open("a") as file:
        file.write('{"time": 1, "step": 5, "lo')
    metrics = MetricsFile(path)
    assert metrics.truncate_after(2) == 3
    metrics.write(3, {"loss": 9.0}, time=2.0)
    metrics.close()
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 0.1), (2, 0.2), (3, 9.0)]
    lost = (tmp_path / "metrics.lost.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lost[:2]] == [3, 4]
    assert lost[2] == '{"time": 1, "step": 5, "lo'
    assert MetricsFile(path).truncate_after(3) == 0


def test_going_back_moves_what_was_given_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 2)
    assert [line["step"] for line in read(path)] == [1, 2]


def test_damage_in_the_middle_does_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnothing\n[2]\n{"step": "3"}\n\n{"step": 4}\n{"step": 5}')
    metrics = MetricsFile(path)
    assert metrics.truncate_after(9) == 5
    metrics.close()
    assert [line["step"] for line in read(path)] == [1, 4]


@pytest.mark.parametrize("merge", [False, True])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, merge: bool) -> None:
    """The size limit of this process stands in for the disk: a part is written, then comes the error."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(1, {"loss": 1.0}, time=1.0)
    before = path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        with pytest.raises(OSError):
            metrics.write(1 if merge else 2, {"text": "x" * 100}, time=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    metrics.write(2, {"loss": 2.0}, time=1.0)
    metrics.close()
    assert [line["loss"] for line in read(path)] == [1.0, 2.0]


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    pid = os.fork()
    if pid == 0:
        file = MetricsFile(path)
        file.write(1, {"loss": 1.0}, time=1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [line["step"] for line in read(path)] == [1]
