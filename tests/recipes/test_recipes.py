"""The recipes run as their texts say, and their results are what is promised."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT

SMALL = ("--layers", "2", "--width", "32", "--block", "32", "--bytes", "60000")


def run(run_dir: Path, *arguments: str) -> str:
    """A command with this interpreter; its output, or its failure."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=run_dir.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def launch(
    run_dir: Path, strategy: str, processes: int, recipe: str, *arguments: str, settings: tuple[str, ...] = ()
) -> str:
    sets = [word for setting in settings for word in ("--set", setting)]
    options = ["-s", strategy, "--nproc", str(processes), "--run-dir", str(run_dir), *sets]
    return run(
        run_dir, "-m", "distkit.launch.command", *options, str(ROOT / "recipes" / recipe / "train.py"), *arguments
    )


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("ddp", 2)])
def test_digits_reach_96_percent(tmp_path: Path, strategy: str, processes: int) -> None:
    output = launch(tmp_path / "run", strategy, processes, "digits", settings=("batch.per=global",))
    found = re.search(r"test accuracy ([\d.]+) % of (\d+) images", output)
    assert found, output
    assert float(found[1]) >= 96
    assert int(found[2]) == 360


EQUAL = ("batch.per=global", "max_steps=50", "log.every_steps=1", "optim.clip_norm=1", "checkpoint.at_end=false")


@pytest.fixture(scope="module")
def single_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """50 steps of gpt in fp32 on one process, at the recipe's own size."""
    run_dir = tmp_path_factory.mktemp("gpt") / "single"
    launch(run_dir, "single", 1, "gpt", "--bytes", "60000", settings=EQUAL)
    return losses(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_gpt_has_the_same_losses_on_two_processes(tmp_path: Path, single_losses: list[float], accumulate: int) -> None:
    settings = (*EQUAL, f"batch.accumulate={accumulate}")
    launch(tmp_path / "ddp", "ddp", 2, "gpt", "--bytes", "60000", settings=settings)
    assert len(single_losses) == 50
    assert single_losses[-1] < single_losses[0] - 1
    assert losses(tmp_path / "ddp") == pytest.approx(single_losses, abs=1e-5)


def test_gpt_under_plain_python_reports_perplexity(tmp_path: Path) -> None:
    output = run(tmp_path / "run", str(ROOT / "recipes" / "gpt" / "train.py"), *SMALL, "--untied", "--dropout", "0.1")
    found = re.search(r"perplexity ([\d.]+)", output)
    assert found, output
    assert 2 < float(found[1]) < 256 / 4


def test_gpt_reads_the_same_text_each_time() -> None:
    code = (
        "import hashlib, sys; sys.path.insert(0, 'recipes/gpt'); from data import read_text; "
        "train, validation = read_text(200_000); "
        "print(len(train), len(validation), hashlib.sha256(train + validation).hexdigest())"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert first.split()[:2] == ["200000", "20000"]
