"""Runs whose hosts change: kills, hosts that come and go, and what each sample's fate is."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from distkit.errors import LaunchError
from distkit.launch.elastic import HostPool, discover
from distkit.launch.hosts import parse_hosts
from tests.launch.support import Launch, wait_until
from tests.launch.test_external import machine, needs_horovod, needs_mpi, plan  # noqa: F401

pytestmark = pytest.mark.timeout(420)  # several starts of Horovod in one test; a loaded machine takes minutes

ROOT = str(Path(__file__).resolve().parents[2])

TRAIN = """
    import json, os, sys, time
    sys.path.insert(0, sys.argv[1])
    import torch, distkit
    from torch.utils.data import DataLoader
    from tests.contract.models import TinyGPT, Tokens, groups, sample_losses
    attempt, pause = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), float(sys.argv[2])
    settings = {"batch.per": "global", "log.every_steps": 1, "checkpoint.every_steps": 2, "device": "cpu"}
    with distkit.Trainer(settings) as trainer:
        rank, size = trainer.world.rank, trainer.world.size
        net = TinyGPT()
        loader = DataLoader(Tokens(40), batch_size=8, shuffle=True)
        net, opt, loader = trainer.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2), loader)
        with open(f"{trainer.run_dir}/seen-{attempt}-{rank}", "w", buffering=1) as seen:
            seen.write(json.dumps({"pid": os.getpid(), "size": size}) + "\\n")
            for _ in trainer.epochs(3):
                for item in loader:
                    seen.write(json.dumps({"step": trainer.global_step + 1, "index": item["index"].tolist()}) + "\\n")
                    trainer.step(sample_losses(net, item).mean())
                    time.sleep(pause)
"""


def seen(run_dir: Path, attempt: int) -> dict[int, list[int]]:
    """Samples of each step, of all ranks together."""
    steps: dict[int, list[int]] = {}
    for path in run_dir.glob(f"seen-{attempt}-*"):
        for line in path.read_text().splitlines()[1:]:
            entry = json.loads(line)
            steps[entry["step"]] = sorted(steps.get(entry["step"], []) + entry["index"])
    return steps


def first_line(run_dir: Path, attempt: int, rank: int) -> dict[str, int]:
    path = run_dir / f"seen-{attempt}-{rank}"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= 1, 60)
    found: dict[str, int] = json.loads(path.read_text().splitlines()[0])
    return found


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return [by_step[step] for step in sorted(by_step)]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run on one process."""
    launch = Launch(tmp_path_factory.mktemp("single"))
    launch.script(TRAIN)
    assert launch.start("-s", "single", "script.py", ROOT, "0").wait(120) == 0
    launch.close()
    return launch.run_dir


# -- parts --------------------------------------------------------------------------------------------------------------


def test_hosts_that_failed_are_left_out_for_longer_and_longer() -> None:
    now = [0.0]
    pool = HostPool(lambda: parse_hosts("a:4,b:2,c"), 4, clock=lambda: now[0])
    assert pool.usable() == ["a", "c"]  # b has no room for 4
    assert pool.leave_out("a") == 60
    assert pool.usable() == ["c"]
    now[0] = 60
    assert pool.usable() == ["a", "c"]
    assert pool.leave_out("a") == 120


def test_a_discovery_program(tmp_path: Path) -> None:
    program = tmp_path / "discover.sh"
    program.write_text("#!/bin/sh\necho host0:2\necho\necho host1\n")
    program.chmod(0o755)
    assert [(host.name, host.slots) for host in discover(program)] == [("host0", 2), ("host1", None)]
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(LaunchError, match="exit status 3"):
        discover(program)
    with pytest.raises(LaunchError, match="host0:4"):
        discover(tmp_path / "gone")


@needs_horovod
def test_the_plan_of_an_elastic_run(machine) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    made = plan(machine, launcher="horovodrun", min_nodes=1, nnodes=4, host_discovery="d.sh", nproc="2", max_restarts=3)
    line = " ".join(made.hosts[0].command)
    assert line.startswith("python -m distkit.launch.elastic --run-dir ")
    assert f"--nproc 2 --min-nodes 1 --max-nodes 4 --host-discovery {machine.directory}/d.sh --max-restarts 3" in line
    assert (made.nnodes, made.nproc) == (4, 2)
    assert any("checkpoint.every_steps" in note for note in made.notes)
    made = plan(
        machine, launcher="mpirun", min_nodes=1, nnodes=4, hosts="a:2,b:2", overrides=("checkpoint.every_steps=9",)
    )
    assert "--nproc 2 --min-nodes 1 --max-nodes 2 --hosts a:2,b:2" in " ".join(made.hosts[0].command)
    assert not any("checkpoint.every_steps" in note for note in made.notes)
    with pytest.raises(LaunchError, match="not which hosts these are"):
        plan(machine, launcher="torchrun", min_nodes=1, nnodes=4)
    made = plan(machine, launcher="torchrun", host_discovery="d.sh", nnodes=4)
    assert "--launcher torchrun --nproc 1 --min-nodes 4" in " ".join(made.hosts[0].command)


# -- whole runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_horovod
def test_a_killed_worker_and_no_sample_is_lost_or_read_twice(launch: Launch, single: Path) -> None:
    """Two hosts of one process; one is killed, the run goes on with the other from the last checkpoint."""
    launch.script(TRAIN)
    words = ["-s", "horovod", "--launcher", "horovodrun", "--nnodes", "1:2", "--hosts", "localhost:1,127.0.0.1:1"]
    words += ["--interface", "lo", "--max-restarts", "2", "script.py", ROOT, "0.3"]
    process = launch.start(*words)
    assert first_line(launch.run_dir, 0, 0)["size"] == 2
    victim = first_line(launch.run_dir, 0, 1)["pid"]
    wait_until(lambda: max(seen(launch.run_dir, 0), default=0) >= 5, 60)
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "killed by SIGKILL" in err and "all ranks start again (restart 1 of 2)" in err
    assert "127.0.0.1 is left out for 60 s" in err
    assert first_line(launch.run_dir, 1, 0)["size"] == 1
    before, after, expected = seen(launch.run_dir, 0), seen(launch.run_dir, 1), seen(single, 0)
    commit = min(after) - 1
    assert commit >= 4 and commit % 2 == 0  # the last checkpoint of every second step
    assert list(after) == list(range(commit + 1, 16))
    whole = {step: samples for step, samples in before.items() if step <= commit} | after
    assert whole == expected
    assert losses(launch.run_dir) == pytest.approx(losses(single), abs=1e-5)
    assert not launch.left()


@pytest.mark.slow
@needs_horovod
def test_a_host_that_comes_is_taken_in(launch: Launch, single: Path) -> None:
    """The list grows: the ranks write a checkpoint, and one more takes part. No restart is spent on it."""
    launch.script(TRAIN)
    hosts = launch.folder / "hosts"
    hosts.write_text("localhost:1\n")
    program = launch.folder / "discover.sh"
    program.write_text(f"#!/bin/sh\ncat {hosts}\n")
    program.chmod(0o755)
    words = ["-s", "horovod", "--launcher", "horovodrun", "--nnodes", "1:2", "--nproc", "1", "--interface", "lo"]
    process = launch.start(*words, "--host-discovery", "discover.sh", "script.py", ROOT, "1.0")
    wait_until(lambda: max(seen(launch.run_dir, 0), default=0) >= 2, 60)
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "the hosts changed: going on with localhost, 127.0.0.1" in err
    assert [first_line(launch.run_dir, attempt, 0)["size"] for attempt in (0, 1)] == [1, 2]
    before, after = seen(launch.run_dir, 0), seen(launch.run_dir, 1)
    assert min(after) == max(before) + 1  # saved at the very step
    assert {**before, **after} == seen(single, 0)
    assert losses(launch.run_dir) == pytest.approx(losses(single), abs=1e-5)


@pytest.mark.slow
@needs_mpi
@needs_horovod
def test_restarts_on_the_same_host_with_mpirun(launch: Launch, single: Path) -> None:
    launch.script(TRAIN)
    words = ["-s", "horovod", "--launcher", "mpirun", "--nproc", "2", "--max-restarts", "1", "script.py", ROOT, "0.3"]
    process = launch.start(*words)
    victim = first_line(launch.run_dir, 0, 1)["pid"]
    wait_until(lambda: max(seen(launch.run_dir, 0), default=0) >= 3, 120)
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "rank 1 of 2 failed" in err and "(restart 1 of 1)" in err
    assert losses(launch.run_dir) == pytest.approx(losses(single), abs=1e-5)


@needs_horovod
def test_restarts_run_out(launch: Launch) -> None:
    """The last attempt's traceback is the last thing on the screen."""
    launch.script("import os\nraise ValueError('attempt ' + os.environ['TORCHELASTIC_RESTART_COUNT'])")
    done = launch.run("--launcher", "horovodrun", "--nproc", "1", "--max-restarts", "1", "script.py")
    assert done.returncode == 1
    assert "ValueError: attempt 0" in done.stderr and done.stderr.endswith("ValueError: attempt 1\n")


@needs_horovod
def test_a_signal_ends_all_attempts(launch: Launch) -> None:
    launch.script("open('up', 'w').write('x')\nimport time\ntime.sleep(100)")
    process = launch.start("--launcher", "horovodrun", "--nproc", "1", "--max-restarts", "3", "script.py")
    launch.wait_for("up")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "start again" not in err, err
    assert not launch.left()
