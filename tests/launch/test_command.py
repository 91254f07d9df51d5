"""The command line itself: quick, light, and errors of two lines."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.support import COMMAND

HEAVY = {"torch", "numpy", "omegaconf", "yaml", "rich", "accelerate", "safetensors"}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=60)


def test_help_is_quick_and_has_an_example(tmp_path: Path) -> None:
    seconds = []  # of CPU time: what a machine that is not busy with other tests takes on the clock
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(tmp_path, "--help")
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
    assert done.returncode == 0 and "distkit-run -s ddp --nproc 2 train.py" in done.stdout
    assert min(seconds) < 0.4, seconds


@pytest.mark.parametrize("words", [["--help"], ["-s", "ddp", "--nproc", "2", "--dry-run", "script.py"]])
def test_nothing_heavy_is_imported(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "script.py").write_text("")
    code = (
        "import sys\nfrom distkit.launch.command import app\n"
        f"try: app({words!r})\nexcept SystemExit: pass\n"
        "print(len(sys.modules), *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    count, *modules = done.stdout.splitlines()[-1].split()
    allowed = set() if words == ["--help"] else {"omegaconf", "yaml"}
    assert HEAVY & set(modules) <= allowed
    assert words != ["--help"] or int(count) < 350, count


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["-s", "dpd", "script.py"], "--strategy dp"),
        (["--set", "optim.clip_nrom=1", "script.py"], "did you mean optim.clip_norm?"),
        (["other/thing.py"], "distkit-run [OPTIONS] SCRIPT.py"),
        (["--output", "some", "script.py"], "--output all"),
        (["--json", "script.py"], "--dry-run --json"),
    ],
)
def test_errors_are_two_lines(tmp_path: Path, words: list[str], hint: str) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    done = run(tmp_path, *words)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 2, done.stderr
    assert lines[0].startswith("distkit-run: ") and lines[1] == f"Hint: {hint}"


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    done = run(tmp_path, "--dry-run", "--json", "-s", "ddp", "--nproc", "2", "script.py", "--help", "--dry-run")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["processes"] == 2 and plan["hosts"][0]["command"][-2:] == ["--help", "--dry-run"]
    assert not (tmp_path / "runs").exists()
