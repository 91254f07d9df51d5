"""What is written for Slurm, and what is refused; tests/cluster runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from distkit.errors import LaunchError
from distkit.launch.build import build_plan
from distkit.launch.launchers import slurm
from distkit.launch.machine import Machine
from distkit.launch.plan import LaunchOptions, LaunchPlan

ALLOCATION = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(slurm, "_host_names", lambda text: ("node7", "node8"))  # scontrol isn't here
    return Machine(
        directory=tmp_path,
        environ={},
        python="python",
        host="login",
        cores=8,
        gpus=lambda: 0,
        system="linux",
        now="20260102-030405",
        claim=lambda folder: True,
    )


def plan(machine: Machine, environ: dict[str, str] | None = None, **options: object) -> LaunchPlan:
    options = {"script": "script.py", "strategy": "ddp", "launcher": "slurm", **options}
    here = dataclasses.replace(machine, environ=environ or {})
    return build_plan(LaunchOptions(**options), here)  # type: ignore[arg-type]


def test_job_file(machine: Machine) -> None:
    made = plan(
        machine,
        nnodes=2,
        nproc="4",
        job=("time=2:00:00", "gpus_per_node=4", "--exclusive", "comment=two words"),
        arguments=("--name", "it's", "$HOME"),
        overrides=("checkpoint.requeue=true",),
        max_restarts=1,
    )
    (file,) = made.files
    lines = file.text.splitlines()
    assert lines[0] == "#!/bin/bash"
    for wanted in (
        "--nodes=2",
        "--ntasks-per-node=4",
        "--time=2:00:00",
        "--gpus-per-node=4",
        "--exclusive",
        '--comment="two words"',
        "--requeue",
        "--signal=USR1@60",
    ):
        assert f"#SBATCH {wanted}" in lines
    assert f"#SBATCH --output={made.run_dir}/launch/slurm-%j.out" in lines
    assert lines[-1].startswith(
        "python -m distkit.launch.command --launcher slurm -s ddp --set checkpoint.requeue=true "
    )
    assert f"--run-dir {made.run_dir} --max-restarts 1 {machine.directory}/script.py --name" in lines[-1]
    assert lines[-1].endswith("""--name 'it'"'"'s' '$HOME'""")
    (host,) = made.hosts
    assert host.command == ("sbatch", file.path) and host.environment == {}


def test_tasks_of_an_array_have_folders_of_their_own(machine: Machine) -> None:
    made = plan(machine, nnodes=2, nproc="1", job=("array=0-3%2",))
    assert f'--run-dir {made.run_dir}/task-"$SLURM_ARRAY_TASK_ID" ' in made.files[0].text
    assert "slurm-%A_%a.out" in made.files[0].text


def test_inside_an_allocation(machine: Machine) -> None:
    made = plan(machine, ALLOCATION, launcher="auto", nproc="4")
    line = " ".join(made.hosts[0].command).partition(" -- ")[2]
    assert line.startswith(
        "srun --nodes 2 --ntasks 8 --ntasks-per-node 4 --kill-on-bad-exit=1 --export=ALL --cpus-per-task 2 python "
    )
    assert made.nnodes == 2 and made.checks is None
    assert made.hosts[0].environment["MASTER_ADDR"] == "node7"
    assert plan(machine, {**ALLOCATION, "SLURM_NTASKS_PER_NODE": "3"}).nproc == 3


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        (ALLOCATION, {"nnodes": 4}, r"--nnodes was set to 4, but Slurm job 12 has 2 nodes \(node7, node8\)"),
        (ALLOCATION, {"nproc": "9"}, "--nproc was set to 9, but Slurm job 12 has 8 CPU cores on each node"),
        ({**ALLOCATION, "SLURM_NTASKS_PER_NODE": "4"}, {"nproc": "2"}, "--nproc was set to 2, .* has 4 tasks on each"),
        (ALLOCATION, {"job": ("time=1",)}, "this is Slurm job 12 already"),
        ({}, {"job": ("tim=1",)}, "no option --tim\nHint: --job time="),
        ({}, {"job": ("nodes=2",)}, "--nnodes says it"),
        ({}, {"job": ("time=",)}, "needs a value"),
        ({}, {"job": ('comment=a"b',)}, "quotes"),
        ({}, {"hosts": "a,b"}, "--hosts was set, but --launcher slurm doesn't take it"),
        ({}, {"overrides": ("engine.deepspeed.api_key=sk-123",)}, r"api_key=\*\*\* would stand in the job file"),
        ({}, {"arguments": ("--hub-token", "hf-456")}, r"--hub-token \*\*\* would stand in the job file"),
    ],
)
def test_refusals(machine: Machine, environ: dict[str, str], options: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(machine, environ, **options)
