"""RunLog: one call reaches screen, metrics.jsonl and trackers; on other ranks nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distkit.config import load_config
from distkit.errors import ConfigError, UsageError
from distkit.logs import RunLog

POINT = {
    "epoch": 0,
    "samples": 64,
    "loss": 2.25,
    "lr": 0.1,
    "grad_norm": 1.5,
    "step_time_s": 0.5,
    "samples_per_s": 128.0,
    "skipped_steps": 0,
}


def make(tmp_path: Path, *, is_main: bool = True, **settings: Any) -> RunLog:
    return RunLog(load_config(script=settings).config, tmp_path, is_main=is_main)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_a_log_point_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = make(tmp_path)
    log.start(100, 0)
    log.say("hello")
    log.point(10, {**POINT, "accuracy": torch.tensor(0.5)})
    log.log({"eval/loss": np.float32(2.0), "eval/samples": 30}, 10)
    log.close()
    (line,) = lines(tmp_path)
    assert list(line) == ["time", "step", *POINT, "accuracy", "eval/loss", "eval/samples"]
    assert {**line, "time": None} == {
        "time": None,
        "step": 10,
        **POINT,
        "accuracy": 0.5,
        "eval/loss": 2.0,
        "eval/samples": 30,
    }
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "hello"
    assert out[1].startswith(
        "step 10/100  epoch 0  loss 2.25000  lr 0.1  grad_norm 1.5  samples/s 128  accuracy 0.5  eta "
    )
    assert out[2] == "step 10  eval/loss 2  eval/samples 30"


def test_the_trainers_own_names_keep_their_meaning(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.start(None)
    log.log({"loss": 9.0}, 1)
    log.point(1, POINT)
    log.log({"loss": 8.0, "step": 7, "mine": 1.0}, 1)
    log.close()
    (line,) = lines(tmp_path)
    assert (line["loss"], line["step"], line["user/loss"], line["user/step"], line["mine"]) == (2.25, 1, 8.0, 7, 1.0)


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = make(tmp_path, is_main=False)
    log.start(10)
    log.say("hello")
    log.advance(1)
    log.point(1, POINT)
    log.log({"x": object()}, 1)
    log.rewind(0)
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_lines_after_the_checkpoint_are_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = make(tmp_path)
    log.start(10)
    for step in (1, 2, 3, 4):
        log.point(step, POINT)
    log.close()
    log = make(tmp_path)
    log.start(10, 2)
    assert "metrics.jsonl: 2 lines after step 2 moved to metrics.lost.jsonl" in capsys.readouterr().out
    log.point(3, POINT)
    log.rewind(1)
    log.point(2, POINT)
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, r"'x' was logged as a dict.*\n?.*float\(value\)"),
        (torch.ones(2, 3), r"the shape \(2, 3\).*\n?.*value\.mean\(\)"),
        (np.ones(2), r"the shape \(2,\)"),
        ([object()], "as a object"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    log = make(tmp_path)
    with pytest.raises(UsageError, match=message):
        log.log({"x": value}, 1)
    log.close()


def test_a_disk_that_fails_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    log = make(tmp_path, **{"log.to": ["jsonl"]})
    log.start(10)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for step in (1, 2):
            log.point(step, POINT)
    log.point(3, POINT)
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [3]
    assert capsys.readouterr().out.count("No space left on device; training goes on") == 1


def test_a_file_that_can_not_be_opened_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    log = make(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl can't be written"):
        log.start(10)
    log.close()
    log.close()
