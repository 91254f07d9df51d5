"""Runs on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distkit.errors import LaunchError, StrategyUnavailable
from distkit.launch.build import build_plan
from distkit.launch.launchers import ray as launcher
from distkit.launch.machine import Machine
from distkit.launch.plan import LaunchOptions, LaunchPlan
from tests.launch.support import Launch, wait_until

pytestmark = pytest.mark.timeout(600)  # two nodes of Ray start in ten seconds alone, and in a minute beside other tests

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has the driver look for the cluster at 127.0.0.1 itself, not at this machine's other address."""

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
    import os, sys, time, torch, distkit
    from torch.utils.data import DataLoader, TensorDataset
    mode = sys.argv[1]
    settings = {"log.every_steps": 1, "device": "cpu", "batch.per": "global", "checkpoint.every_steps": 2}
    with distkit.Trainer(settings) as trainer:
        torch.manual_seed(0)
        rank, attempt = trainer.world.rank, os.environ.get("DISTKIT_ATTEMPT", "0")
        open(f"pid-{attempt}-{rank}", "w").write(f"{os.getpid()} {os.environ.get('RAY_RAYLET_PID', '-')}")
        net, x = torch.nn.Linear(4, 1), torch.randn(64, 4)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        net, opt, loader = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        for _ in trainer.epochs(100 if mode == "wait" else 1):
            for x, y in loader:
                trainer.step(torch.nn.functional.mse_loss(net(x), y))
                if trainer.global_step == 3 and mode == "raise" and rank == 3 and attempt == "0":
                    raise ValueError("rank 3 has had enough")
                if mode == "wait":
                    open(f"step-{rank}", "w").write(str(trainer.global_step))
                    time.sleep(0.2)
        print("ended", trainer.world.size, trainer.global_step, flush=True)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """Two nodes with two CPUs each; each is a process group that ends with the tests."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._groups = folder, [0, 0]
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        shared = ("--num-cpus", "2", "--disable-usage-stats", "--object-store-memory", "80000000", "--block")
        head = ("--head", "--port", str(self.port), "--include-dashboard=false", "--temp-dir", str(folder / "t"))
        head += ("--ray-client-server-port", str(free_port()))
        self._words = [
            (*head, "--node-ip-address", "127.0.0.1", *shared),
            ("--address", self.address, "--node-ip-address", "127.0.0.1", *shared),
        ]

    def start(self) -> None:
        for place in (0, 1):
            self._start(place)

    def _start(self, place: int) -> None:
        log = self._folder / f"node-{place}"
        # Ray starts workers with niceness 15, and beside other tests they would hardly run.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        # Ports that the node's agents choose themselves must be known within 15 s.
        kinds = ("metrics-export", "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen")
        ports = [word for kind in kinds for word in (f"--{kind}-port", str(free_port()))]
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch.ray_start", "start", *self._words[place], *ports],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=ROOT,
                start_new_session=True,
            )
        self._groups[place] = process.pid
        wait_until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, 240)
        assert process.poll() is None, log.read_text()

    def _end(self, place: int) -> None:
        for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._groups[place], number)
                wait_until(lambda: self._gone(place), seconds) if number == signal.SIGKILL else time.sleep(2)

    def _gone(self, place: int) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._groups[place], os.WNOHANG)
        try:
            os.killpg(self._groups[place], 0)
        except ProcessLookupError:
            return True
        return False

    def close(self) -> None:
        for place in (1, 0):
            if self._groups[place]:
                self._end(place)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not below pytest's own folder: Ray's sockets lie here, and a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        started = Cluster(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.close()


def words(cluster: Cluster, mode: str, *more: str) -> tuple[str, ...]:
    address = ("--launcher", "ray", "--job", f"address={cluster.address}")
    return (*address, "--nnodes", "2", "--nproc", "2", "-s", "ddp", *more, "script.py", mode)


def start(launch: Launch, cluster: Cluster, mode: str, *more: str) -> subprocess.Popen[str]:
    launch.script(TRAIN)
    launch.environ |= {**LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
    return launch.start(*words(cluster, mode, *more))


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return [by_step[step] for step in sorted(by_step)]


def ranks(launch: Launch) -> list[int]:
    return [int(path.read_text().split()[0]) for path in launch.folder.glob("pid-*")]


def all_gone(launch: Launch) -> bool:
    return not launch.left() and not any(Path(f"/proc/{pid}").exists() for pid in ranks(launch))


@pytest.mark.slow
def test_trains_as_one_process(launch: Launch, cluster: Cluster, tmp_path: Path) -> None:
    process = start(launch, cluster, "train")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "ended 4 8" in out and f"on the Ray cluster at {cluster.address}" in err
    nodes = {path.read_text().split()[1] for path in launch.folder.glob("pid-0-*")}
    assert len(nodes) == 2, nodes
    alone = launch.start("-s", "single", "script.py", "train", run_dir=tmp_path / "single")
    assert alone.wait(120) == 0
    assert losses(launch.run_dir) == pytest.approx(losses(tmp_path / "single"), abs=1e-6)
    assert all_gone(launch)


@pytest.mark.slow
def test_an_exception_is_reported_once(launch: Launch, cluster: Cluster) -> None:
    process = start(launch, cluster, "raise")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    assert err.count("ValueError: rank 3 has had enough") == 1 and err.count("Traceback") == 1, err
    assert "rank 3 of 4 failed on" in err, err
    wait_until(lambda: all_gone(launch), 20)


@pytest.mark.slow
def test_all_ranks_start_again(launch: Launch, cluster: Cluster) -> None:
    process = start(launch, cluster, "raise", "--max-restarts", "1")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "all ranks start again (restart 1 of 1)" in err and "ended 4 8" in out, err
    assert (launch.folder / "pid-1-3").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_nothing_else(launch: Launch, cluster: Cluster) -> None:
    process = start(launch, cluster, "wait")
    launch.wait_for("step-0", "step-3", seconds=200)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "stopped by Ctrl-C" in err and "killed" not in err, err
    assert list((launch.run_dir / "checkpoints").iterdir())
    wait_until(lambda: all_gone(launch), 20)


@pytest.mark.slow
def test_nothing_is_left_when_the_driver_dies(launch: Launch, cluster: Cluster) -> None:
    process = start(launch, cluster, "wait")
    launch.wait_for("step-0", "step-3", seconds=200)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: all_gone(launch), 60)


@pytest.mark.slow
def test_too_little_room_is_said_with_both_numbers(launch: Launch, cluster: Cluster) -> None:
    process = start(launch, cluster, "train", "--job", "cpus=3", "--set", "timeouts.start_s=2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "2 nodes with 3 CPUs each were asked for, and 0 such nodes are in the Ray cluster" in err, err
    assert "127.0.0.1 with 2 CPUs, 127.0.0.1 with 2 CPUs" in err and "timeouts.start_s=2" in err


# -- without a cluster --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "train.py").write_text("")
    return Machine(
        directory=tmp_path,
        environ={"WANDB_API_KEY": "hunter2", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO"},
        python="python",
        host="host0",
        cores=8,
        gpus=lambda: 1,
        system="linux",
        now="20260102-030405",
        claim=lambda folder: not folder.exists(),
    )


def plan(machine: Machine, *job: str, **options: Any) -> LaunchPlan:
    settings = {"nnodes": 2, "nproc": "2", "strategy": "ddp", **options}
    return build_plan(LaunchOptions(script="train.py", launcher="ray", job=job, **settings), machine)


def test_the_drivers_command_line(machine: Machine) -> None:
    (host,) = plan(machine, "address=host0:6379", "cpus=8", "gpus=2", max_restarts=1).hosts
    line = " ".join(host.command)
    assert "--address host0:6379 --nnodes 2 --nproc 2 --cpus 8 --gpus 2 --max-restarts 1" in line
    assert host.environment["OMP_NUM_THREADS"] == "4"
    export = host.command[host.command.index("--export") + 1].split(",")
    assert {"WANDB_API_KEY", "NCCL_DEBUG", "DISTKIT_SETTINGS"} <= set(export) and "CUDA_VISIBLE_DEVICES" not in export
    assert "hunter2" not in line
    assert "--gpus 0" in " ".join(plan(machine, overrides=("device=cpu",)).hosts[0].command)
    assert plan(machine, "gpus=4", nproc="auto").nproc == 4


def test_the_cluster_of_the_environment(machine: Machine) -> None:
    environ = {"RAY_ADDRESS": "host7:6379"}
    made = build_plan(
        LaunchOptions(script="train.py", nnodes=2, nproc="1", strategy="ddp"),
        Machine(**{**vars(machine), "environ": environ}),
    )
    assert "--address host7:6379" in " ".join(made.hosts[0].command)


@pytest.mark.parametrize(
    "job, message",
    [("adress=x", "adress"), ("gpus=x", "gpus"), ("cpus=0", "cpus"), ("address=ray://h:1", "host of the")],
)
def test_refused(machine: Machine, job: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(machine, job)


def test_without_ray(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    with pytest.raises(StrategyUnavailable, match=r"pip install 'distkit\[ray\]'"):
        plan(machine)


def test_no_cluster(launch: Launch) -> None:
    launch.script(TRAIN)
    address = ("--launcher", "ray", "--job", f"address=127.0.0.1:{free_port()}")
    done = launch.run(*address, "--nproc", "1", "-s", "ddp", "script.py", "train")
    assert done.returncode == 1 and "no Ray cluster can be reached" in done.stderr and "Traceback" not in done.stderr
