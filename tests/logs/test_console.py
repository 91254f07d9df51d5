"""The screen: a bar on a terminal that nothing tears, plain lines elsewhere, and no control codes in a log file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distkit.logs.console import Console, duration, format_values
from tests.logs.screen import ROOT, on_a_terminal, shown

LINES = [
    line
    for step in (5, 10, 15, 20)
    for line in (
        *([f"step {step}  eval/loss 1.5"] if step % 10 == 0 else []),
        f"half a line at step {step}",
        f"warning [at] step {step}",
        f"100% of another bar {step}",
    )
]


@pytest.mark.parametrize("how", ["tee", "plain"])
def test_printed_lines_stand_whole_above_the_bar(tmp_path: Path, how: str) -> None:
    status, output = on_a_terminal(str(tmp_path), how)
    assert status == 0, output
    *lines, bar, after, empty = shown(output)
    assert lines == ["starting", *LINES]
    assert bar.startswith("step 20/20 ━━━")
    assert bar.endswith("0s left  loss 2.50000  lr 0.1  grad_norm 1  samples/s 1000")
    assert (after, empty) == ("after the end", "")
    hidden, seen = output.find("\x1b[?25l"), output.find("\x1b[?25h")
    assert hidden < seen < output.find("starting"), "a process that is killed must not leave the cursor hidden"
    if how == "tee":
        log = (tmp_path / "logs" / "rank-000.log").read_text()
        assert "\x1b" not in log
        assert "━" not in log
        assert [line for line in log.splitlines() if not line.startswith("----")] == [
            "starting",
            *LINES,
            "after the end",
        ]


def test_a_narrow_terminal_keeps_the_bar_on_one_line(tmp_path: Path) -> None:
    _, output = on_a_terminal(str(tmp_path), "plain", columns=40)
    (bar,) = [line for line in shown(output) if "━" in line]
    assert bar.startswith("step 20/20 ━")
    assert len(bar) == 40


def test_a_traceback_stands_above_the_bar(tmp_path: Path) -> None:
    status, output = on_a_terminal(str(tmp_path), "raise")
    assert status == 1
    lines = shown(output)
    assert "RuntimeError: boom" in lines
    assert lines[-1] == "", "the prompt of the shell comes on a line of its own"
    assert lines.index("RuntimeError: boom") < next(i for i, line in enumerate(lines) if line.startswith("step 20/20"))


def test_a_forked_child_writes_past_the_bar(tmp_path: Path) -> None:
    status, output = on_a_terminal(str(tmp_path), "fork")
    assert status == 0
    assert "hello from a child" in output


def test_lines_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.logs.screen", str(tmp_path), "plain"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "starting"
    points = [line for line in lines if "grad_norm" in line]
    assert points[0].startswith("step 10/20  epoch 0  loss 2.50000  lr 0.1  grad_norm 1  samples/s 1000  eta 0s")
    assert "\x1b" not in done.stdout


def test_points_are_shown_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(points=False)
    console.start(10, 0)
    console.point(1, {"loss": 1.0})
    console.log(1, {"x": 1.0})
    console.say("said")
    assert capsys.readouterr().out == "said\n"


def test_values_as_words() -> None:
    values = {"accuracy": 0.9, "epoch": 1, "loss": None, "skipped_steps": 2, "lrs": [0.1, 0.2], "n": 3}
    assert list(format_values(values)) == ["loss None", "skipped 2", "accuracy 0.9", "n 3"]


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 192, 7500, 273600)] == ["0s", "1m00s", "3m12s", "2h05m", "3d04h"]
