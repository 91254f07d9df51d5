"""horovodrun and mpirun: what their plans say, and whole launches through them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from distkit.config.launchline import VARIABLE
from distkit.errors import LaunchError, StrategyUnavailable
from distkit.launch.build import build_plan
from distkit.launch.hardware import mpi_version
from distkit.launch.hosts import Host, parse_hosts, read_hostfile
from distkit.launch.machine import Machine
from distkit.launch.plan import LaunchOptions, LaunchPlan
from tests.launch.support import COMMAND, Launch, wait_until

needs_horovod = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod isn't installed: scripts/install-horovod"
)
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")

launchers = pytest.mark.parametrize(
    "launcher", [pytest.param("horovodrun", marks=needs_horovod), pytest.param("mpirun", marks=needs_mpi)]
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "script.py").write_text("")
    return Machine(
        directory=tmp_path,
        environ={"PATH": "/bin", "PYTHONPATH": "/x"},
        python="python",
        host="host0",
        cores=8,
        gpus=lambda: 0,
        system="linux",
        now="20260102-030405",
        claim=lambda folder: True,
        mpi=lambda: "openmpi4.1.4",
        root=True,
    )


def plan(machine: Machine, **options: object) -> LaunchPlan:
    return build_plan(LaunchOptions(script="script.py", **options), machine)  # type: ignore[arg-type]


def words(made: LaunchPlan) -> str:
    """The launcher's own command line, without what wraps it."""
    return " ".join(made.hosts[0].command).partition(" -- ")[2]


# -- plans --------------------------------------------------------------------------------------------------------------


def test_hosts() -> None:
    assert parse_hosts("a:2, b-1.c:4,d") == (Host("a", 2), Host("b-1.c", 4), Host("d"))
    for wrong in ("a:x", "a:0", "", "a;reboot", "a,a"):
        with pytest.raises(LaunchError, match="--hosts"):
            parse_hosts(wrong)


def test_hostfiles_of_all_launchers(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\nhost0 slots=4  # first\nhost1:2\n\nhost2\n")
    assert read_hostfile(file) == (Host("host0", 4), Host("host1", 2), Host("host2"))
    file.write_text("host0 slots=4\nhost1 slot=4\n")
    with pytest.raises(LaunchError, match=r"hosts:2: 'host1 slot=4' is no host"):
        read_hostfile(file)
    with pytest.raises(LaunchError, match="No such file"):
        read_hostfile(tmp_path / "gone")


@needs_horovod
def test_horovodrun_on_hosts(machine: Machine) -> None:
    made = plan(machine, launcher="horovodrun", hosts="a:4,b:2", interface="eth0", ssh_port=2222, ssh_identity="/k")
    assert words(made).startswith(
        "python -m horovod.runner.launch --gloo -np 4 --hosts a:2,b:2 --start-timeout 300 --network-interfaces eth0 "
        f"--ssh-port 2222 --ssh-identity-file /k python -m distkit.launch.worker --run-dir {made.run_dir} --output main "
    )
    assert (made.nnodes, made.nproc) == (2, 2)
    assert made.hosts[0].command[:4] == ("python", "-m", "distkit.launch.external", "--run-dir")
    assert made.hosts[0].environment["MASTER_ADDR"] == "a"
    assert made.hosts[0].environment["GLOO_SOCKET_IFNAME"] == "eth0"


@needs_horovod
@needs_horovod
def test_horovodrun_on_hosts_needs_a_plain_folder(machine: Machine) -> None:
    folder = machine.directory / "it's here"
    folder.mkdir()
    (folder / "script.py").write_text("")
    with pytest.raises(LaunchError, match="the working directory was set to .*it's here"):
        plan(dataclasses.replace(machine, directory=folder), launcher="horovodrun", hosts="a:1,b:1")


def test_horovodrun_on_this_host_stays_on_loopback(machine: Machine) -> None:
    made = plan(machine, launcher="horovodrun", strategy="horovod", nproc="3")
    assert "-np 3 --hosts localhost:3 --start-timeout 300 --network-interfaces lo python" in words(made)
    assert made.settings.launcher == "horovodrun"


def test_open_mpi(machine: Machine) -> None:
    (machine.directory / "hosts").write_text("a slots=2\nb slots=2\n")
    made = plan(machine, launcher="mpirun", hostfile="hosts", ssh_port=22, ssh_identity="/k", export=("TOKEN",))
    line = words(made)
    assert line.startswith(
        "mpirun -np 4 --allow-run-as-root --host a:2,b:2 --bind-to none --map-by slot --mca mpi_yield_when_idle 1 "
    )
    assert "--mca plm_rsh_args -p 22 -i /k" in line
    for name in (VARIABLE, "OMP_NUM_THREADS", "MASTER_ADDR", "PATH", "PYTHONPATH", "TOKEN", "DISTKIT_LAUNCH_ID"):
        assert f"-x {name} " in line
    assert "LD_LIBRARY_PATH" not in line  # it isn't set here
    assert "--allow-run-as-root" not in words(plan(dataclasses.replace(machine, root=False), launcher="mpirun"))


def test_hydra(machine: Machine) -> None:
    mpich = dataclasses.replace(machine, mpi=lambda: "mpich4.0.2")
    made = plan(mpich, launcher="mpirun", hosts="a,b", nproc="2", interface="eth0", ssh_port=22)
    assert words(made).startswith(
        "mpirun -np 4 -hosts a:2,b:2 -iface eth0 -bind-to none python -m distkit.launch.worker"
    )
    assert made.hosts[0].environment["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 22"


def test_secrets_are_masked(machine: Machine) -> None:
    made = plan(machine, launcher="mpirun", overrides=("engine.horovod.api_key=sk-123",), export=("API_KEY",))
    assert "sk-123" not in made.hosts[0].shell() and "sk-123" not in " ".join(made.hosts[0].command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "torchrun", "interface": "eth0"}, "--hosts H0,H1"),
        ({"launcher": "mpirun", "hosts": "a,b", "nnodes": 3}, "--nnodes 2"),
        ({"launcher": "mpirun", "nnodes": 2}, "--hosts host0,host1"),
        ({"launcher": "mpirun", "hosts": "a:2,b:4", "nproc": "3"}, "a has room for 2"),
        ({"launcher": "mpirun", "node_rank": 0}, "--launcher torchrun"),
        ({"launcher": "mpirun", "min_nodes": 3, "nnodes": 4, "hosts": "a,b"}, "--nnodes 2"),
        ({"launcher": "mpirun", "interface": "eth0;reboot"}, "characters that shells read"),
        ({"launcher": "mpirun", "hosts": "a", "hostfile": "b"}, "leave one out"),
        ({"launcher": "horovodrum"}, "--launcher horovodrun"),
    ],
)
def test_refusals(machine: Machine, options: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan(machine, **options)


def test_mpirun_is_missing(machine: Machine) -> None:
    with pytest.raises(StrategyUnavailable, match="openmpi-bin"):
        plan(dataclasses.replace(machine, mpi=lambda: None), launcher="mpirun")


@needs_mpi
def test_which_mpi_it_is() -> None:
    version = mpi_version()
    assert version is not None and version.startswith(("openmpi", "mpich", "intelmpi"))
    assert mpi_version("/nowhere/mpirun") is None


# -- launches -----------------------------------------------------------------------------------------------------------

TRAIN = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch, distkit
    from torch.utils.data import DataLoader
    from tests.contract.models import TinyGPT, Tokens, groups, sample_losses
    with distkit.Trainer({"batch.per": "global", "log.every_steps": 1, "device": "cpu"}) as trainer:
        net = TinyGPT()
        loader = DataLoader(Tokens(36), batch_size=12, shuffle=True)
        net, opt, loader = trainer.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2), loader)
        for _ in trainer.epochs(2):
            for item in loader:
                trainer.step(sample_losses(net, item).mean())
"""

RANK = """
    import os, subprocess, sys, time
    rank = int(next(os.environ[n] for n in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if n in os.environ))
    open(f"up-{rank}.new", "w").write(str(os.getpid()))
    os.rename(f"up-{rank}.new", f"up-{rank}")
"""


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@needs_horovod
@launchers
def test_training_equals_one_process(launch: Launch, launcher: str) -> None:
    """And the pasted line of a dry run does the same run."""
    launch.script(TRAIN)
    root = str(Path(__file__).resolve().parents[2])
    single = launch.start("-s", "single", "script.py", root, run_dir=launch.folder / "single")
    assert single.wait(120) == 0
    dry = [*COMMAND, "--dry-run", "--run-dir", str(launch.folder / "many")]
    dry += ["-s", "horovod", "--nproc", "2", "--launcher", launcher, "script.py", root]
    line = subprocess.run(dry, cwd=launch.folder, env=launch.environ, capture_output=True, text=True, check=True).stdout
    many = launch.popen(["bash", "-c", line], cwd="/")
    out, err = many.communicate(timeout=120)
    assert many.returncode == 0, err
    assert f"horovod over {'mpi' if launcher == 'mpirun' else 'gloo'}" in out + err
    assert losses(launch.folder / "many") == pytest.approx(losses(launch.folder / "single"), abs=1e-5)
    assert len(losses(launch.folder / "many")) == 6
    assert "\x1b" not in out and "<stdout>" not in out
    assert (launch.folder / "many" / "logs" / "rank-001.log").read_text().startswith("---- rank 1 of 2, ")


@launchers
def test_the_failing_ranks_traceback_is_last(launch: Launch, launcher: str) -> None:
    """X5."""
    script = launch.script(
        RANK
        + """
    print("hello from", rank, flush=True)
    def fail():
        raise ValueError("boom")
    if rank == 1:
        fail()
    time.sleep(100)
    """
    )
    done = launch.run("--nproc", "2", "--launcher", launcher, "script.py")
    assert done.returncode == 1
    assert "hello from 0\n" in done.stdout and "hello from 1" not in done.stdout
    assert "rank 1 of 2 failed" in done.stderr and f'File "{script}"' in done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
    wait_until(lambda: not launch.left(), 5)


@launchers
def test_a_killed_rank_ends_all(launch: Launch, launcher: str) -> None:
    """X6: it is named, the others end in time, and what they started too."""
    launch.script(
        RANK
        + """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", os.getcwd()])
    time.sleep(120)
    """
    )
    process = launch.start("--nproc", "2", "--launcher", launcher, "script.py")
    pids = [int(text) for text in launch.wait_for("up-0", "up-1")]
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 137, err
    assert "rank 1 of 2 failed" in err and "killed by SIGKILL" in err
    wait_until(lambda: not launch.left(), 5)


@launchers
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ranks_get_the_grace_time(launch: Launch, launcher: str, number: signal.Signals, status: int) -> None:
    """X7, X8: each rank hears of it once, and writes its checkpoint longer than horovodrun and mpirun would wait."""
    launch.script(
        """
    import signal
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: heard.append(number))
    """
        + RANK
        + """
    while not heard:
        time.sleep(0.05)
    time.sleep(7)
    open(f"saved-{rank}", "w").write(str(len(heard)))
    sys.exit(128 + heard[0])
    """
    )
    process = launch.start("--nproc", "2", "--launcher", launcher, "script.py")
    launch.wait_for("up-0", "up-1")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status and "stopped by" in err, err
    assert launch.wait_for("saved-0", "saved-1", seconds=1) == ["1", "1"]
    assert not launch.left()


@launchers
def test_deaf_ranks_are_killed_after_the_grace_time(launch: Launch, launcher: str) -> None:
    launch.script(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _dedent(RANK) + "time.sleep(120)\n"
    )
    process = launch.start("--nproc", "2", "--launcher", launcher, "--set", "timeouts.grace_s=1", "script.py")
    launch.wait_for("up-0", "up-1")
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143 and "the processes were killed" in err
    assert time.monotonic() - begin < 15
    wait_until(lambda: not launch.left(), 5)


@launchers
def test_the_launcher_itself_is_killed(launch: Launch, launcher: str) -> None:
    launch.script(_dedent(RANK) + "time.sleep(120)\n")
    process = launch.start("--nproc", "2", "--launcher", launcher, "script.py")
    launch.wait_for("up-0", "up-1")
    process.kill()
    wait_until(lambda: not launch.left(), 20)


def _dedent(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)
