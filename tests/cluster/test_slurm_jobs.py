"""Jobs of Slurm on emulated hosts."""

from __future__ import annotations

import re

import pytest

from tests.cluster.running import CHECKPOINTS, TRAINING, MakeRun, Run, environment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def test_a_job_is_stopped_and_goes_on(make: MakeRun, undisturbed: Run, single: dict[int, float]) -> None:
    """Once warned by Slurm and once asked to end, it is queued again each time, and trains as if nothing happened."""
    run, cluster = make("run"), make("run").cluster
    with cluster.slurm():
        words = ["-s", "ddp", "--launcher", "slurm", "--nnodes", "2", "--nproc", "2", "--job", "time=10:00"]
        words += [*CHECKPOINTS, "--set", "checkpoint.requeue=true", "--set", "checkpoint.at_end=true"]
        said = run.once(*words, script=(TRAINING, "--pause", "0.5"))
        found = re.search(r"Submitted batch job (\d+)", said)
        assert found, said
        job = found[1]
        output = run.folder / "launch" / f"slurm-{job}.out"
        for step, number in [(3, "USR1"), (7, "TERM")]:
            run.until_step(step)
            cluster.exec("host0", "scancel", f"--signal={number}", job)
            until(lambda word=f"SIG{number} at step": word in output.read_text(), 20)
        until(lambda: len(run.weights_files()) == 4, 120)
        until(lambda: not cluster.exec("host0", "squeue", "-h").stdout)
    text = output.read_text()
    assert text.count(f"asked Slurm to run job {job} again") == 2, text
    assert text.count("distkit-run: stopped by SIG") == 2, text
    assert "failed" not in text
    first = (run.folder / "logs" / "rank-003.log").read_text()
    assert first.count("---- rank 3 of 4, host1, ") == 3
    assert run.sizes() == [4, 4, 4], text
    assert run.losses() == undisturbed.losses()
    assert run.weights() == undisturbed.weights()
    assert run.losses() == pytest.approx(single, rel=1e-5)


def test_what_an_allocation_has(make: MakeRun, undisturbed: Run) -> None:
    """Numbers come from it; others than its own are refused, with both."""
    run, cluster = make("run"), make("run").cluster

    def allocated(*words: object) -> str:
        salloc = ["salloc", "--nodes=2", "--ntasks-per-node=2", "--time=10"]
        done = cluster.exec(
            "host0", *salloc, *run.line("-s", "ddp", *words), check=False, env=environment(), timeout=90
        )
        return f"{done.returncode} {done.stdout} {done.stderr}"

    with cluster.slurm():
        said = allocated("--nproc", "3")
        assert said.startswith("2 ")
        assert re.search(r"--nproc was set to 3, but Slurm job \d+ has 2 tasks on each node", said), said
        said = allocated("--nnodes", "4")
        assert said.startswith("2 ")
        assert re.search(r"--nnodes was set to 4, but Slurm job \d+ has 2 nodes \(host0, host1\)", said), said
        said = allocated()
        assert said.startswith("0 "), said
    assert run.losses() == undisturbed.losses()
    assert run.weights() == undisturbed.weights()
