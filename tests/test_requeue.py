"""X8: a run that Slurm stops asks to be run again, if it is told to. Slurm itself is not here: its command is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distkit.requeue import requeue, requeue_note
from tests.pool import ROOT

SCRIPT = """
    import os, signal, sys, torch, distkit
    from torch.utils.data import DataLoader
    trainer = distkit.Trainer(run_dir="run", checkpoint={"requeue": sys.argv[2] == "on"})
    net = torch.nn.Linear(3, 1)
    net, opt, loader = trainer.prepare(net, torch.optim.Adam(net.parameters()), DataLoader(torch.rand(9, 3)))
    for _ in trainer.epochs(1):
        for x in loader:
            trainer.step(net(x).mean())
            if trainer.global_step == 2:
                os.kill(os.getpid(), int(sys.argv[1]))
    trainer.close()
"""


def scontrol(folder: Path, answer: str = "exit 0") -> dict[str, str]:
    """An environment in which `scontrol` notes its arguments, and what is there of the checkpoint by then."""
    folder.mkdir()
    file = folder / "scontrol"
    file.write_text(f'#!/bin/sh\necho "$@" $(ls run/checkpoints 2>/dev/null) >> told\n{answer}\n')
    file.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "4711"}


def run(tmp_path: Path, number: int, asked: str, slurm: bool = True) -> tuple[int, str, str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    if slurm:
        env |= scontrol(tmp_path / "bin")
    result = subprocess.run(
        [sys.executable, str(script), str(int(number)), asked],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = tmp_path / "told"
    return result.returncode, result.stdout, told.read_text() if told.exists() else ""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_slurm_is_asked_once_the_checkpoint_is_there(tmp_path: Path, number: int, status: int) -> None:
    returncode, out, told = run(tmp_path, number, "on")
    assert returncode == status
    assert told.startswith("requeue 4711 step-0000000")
    assert out.rstrip().endswith("asked Slurm to run job 4711 again")


@pytest.mark.parametrize(
    ("number", "asked", "status"),
    [(signal.SIGINT, "on", 130), (signal.SIGUSR1, "off", 138), (signal.SIGTERM, "off", 143)],
)
def test_not_after_ctrl_c_and_not_unasked(tmp_path: Path, number: int, asked: str, status: int) -> None:
    returncode, _, told = run(tmp_path, number, asked)
    assert (returncode, told) == (status, "")


def test_outside_of_slurm_the_start_says_that_it_means_nothing(tmp_path: Path) -> None:
    returncode, out, _ = run(tmp_path, signal.SIGUSR1, "on", slurm=False)
    assert returncode == 138
    assert "checkpoint.requeue is on, but this is no Slurm job" in out
    assert requeue_note({"SLURM_JOB_ID": "1"}) is None
    assert requeue({}) == "not requeued: this is no Slurm job"


def test_what_slurm_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key, value in scontrol(tmp_path / "bin", "echo 'Job/step already completing' >&2; exit 1").items():
        monkeypatch.setenv(key, value)
    assert requeue() == "not requeued: scontrol requeue 4711: Job/step already completing"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert requeue().startswith("not requeued: scontrol requeue 4711: ")
