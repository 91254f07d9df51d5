"""Which hosts a run gets: filters, the exported variables, and which launcher starts them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from distkit.errors import LaunchError
from distkit.launch.build import build_plan
from distkit.launch.choosing import choose_launcher
from distkit.launch.exports import exported, exported_names
from distkit.launch.hosts import Host, chosen, parse_hosts, read_hostfile
from distkit.launch.machine import Machine
from distkit.launch.plan import LaunchOptions
from distkit.launch.ssh import SshOptions

HOSTS = parse_hosts("a:4,b:4,c")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "script.py").write_text("")
    return Machine(
        directory=tmp_path,
        environ={
            "PATH": "/bin",
            "PYTHONPATH": "/x",
            "HTTPS_PROXY": "http://proxy",
            "NCCL_DEBUG": "INFO",
            "SECRET": "s",
        },
        python="python",
        host="host0",
        cores=8,
        gpus=lambda: 0,
        system="linux",
        now="20260102-030405",
        claim=lambda folder: True,
    )


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("b,c", None, ["b", "c"]),
        ("c@a", None, ["a", "c"]),
        (None, "b", ["a", "c"]),
        ("a:1,3@b", None, [Host("a", 2, (1, 3)), "b"]),
        (None, "a:0", [Host("a", 3, (1, 2, 3)), "b", "c"]),
    ],
)
def test_include_and_exclude(include: str | None, exclude: str | None, left: list[str | Host]) -> None:
    by_name = {host.name: host for host in HOSTS}
    assert chosen(HOSTS, include, exclude) == tuple(by_name[x] if isinstance(x, str) else x for x in left)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "leave one out"),
        ("d", None, "'d', which is not among the hosts"),
        ("a:4", None, "device 4 of a, which has 4 slots"),
        (None, "c:0", "its slots aren't said"),
        (None, "a@b@c", "leaves no room"),
        (None, "a:0,1,2,3", "leaves no room"),
        ("a;b", None, "is no host"),
        ("a:0,0", None, "'a:0,0' twice"),
        ("a:0@a:1", None, "'a:1' twice"),
    ],
)
def test_filters_that_make_no_sense(include: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        chosen(HOSTS, include, exclude)


def test_one_file_for_all(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4 max_slots=8\nb max-slots=2\nc:3\n")
    assert read_hostfile(file) == (Host("a", 4), Host("b", 2), Host("c", 3))


def test_a_file_from_windows(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfa slots=4\r\nb slots=2\r\n")
    assert read_hostfile(file) == (Host("a", 4), Host("b", 2))
    file.write_bytes("a # f\xfcr uns".encode("latin-1"))
    with pytest.raises(LaunchError, match="can't be read: it is no text in UTF-8"):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "'a:0' has room for no process"),
        ("a:00,b", "'a:00' has room for no process"),
        ("me@a:2", "ssh is told the user by itself\nHint: --ssh-option User=me"),
        ("a,", "'' is no host"),
        ("a,a", "'a' is there twice"),
    ],
)
def test_hosts_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_hosts(text)


def test_exported_variables() -> None:
    environ = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "https_proxy": "http://p", "SHELL": "/bin/sh", "MY_KEY": "k"}
    names = exported_names(environ, ["OMP_NUM_THREADS"], ["MY_KEY", "UNSET"])
    assert exported({**environ, "OMP_NUM_THREADS": "1"}, names) == {
        "OMP_NUM_THREADS": "1",
        "NCCL_DEBUG": "INFO",
        "PATH": "/bin",
        "MY_KEY": "k",
    }
    assert "https_proxy" in exported_names(environ, [], ["https_proxy"])  # asked for by name


def test_ssh_options_are_appended() -> None:
    words = SshOptions(2222, "/k", ("ProxyJump=gate", "ConnectTimeout=3")).command("host1", ["echo", "a b; c"])
    assert words[:9] == ["ssh", "-p", "2222", "-i", "/k", "-o", "ProxyJump=gate", "-o", "ConnectTimeout=3"]
    assert words.index("ConnectTimeout=3") < words.index("ConnectTimeout=10")  # ssh takes the first
    assert words[-2:] == ["host1", "echo 'a b; c'"]


@pytest.mark.parametrize(
    ("environ", "options", "launcher", "why"),
    [
        ({}, {}, "torchrun", ""),
        ({}, {"hosts": "a,b"}, "torchrun", "--hosts names the hosts"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, {}, "slurm", "Slurm job 7 with 2 nodes"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, {}, "torchrun", ""),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, {"hosts": "a,b"}, "torchrun", "--hosts"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, {"node_rank": 0}, "torchrun", ""),
        ({"RAY_ADDRESS": "h:6379"}, {"nnodes": 2}, "ray", "RAY_ADDRESS is h:6379"),
    ],
)
def test_auto_says_why(
    machine: Machine, environ: dict[str, str], options: dict[str, object], launcher: str, why: str
) -> None:
    found, notes = choose_launcher(
        LaunchOptions(script="s", **options),  # type: ignore[arg-type]
        dataclasses.replace(machine, environ=environ),
    )
    assert found == launcher
    assert (why in notes[0]) if why else notes == []


def test_places_by_torchruns_own_variables(machine: Machine) -> None:
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "29400"}
    pod = dataclasses.replace(machine, environ={**pet, "PET_NPROC_PER_NODE": "4"})
    made = build_plan(LaunchOptions(script="script.py", run_dir="r"), pod)
    line = " ".join(made.hosts[0].command)
    assert "--nnodes 2 --nproc-per-node 4" in line and "--node-rank 1 --master-addr pod-0 --master-port 29400" in line
    with pytest.raises(LaunchError, match="--nnodes was set to 3, but PET_NNODES says 2"):
        build_plan(LaunchOptions(script="script.py", run_dir="r", nnodes=3), pod)


def test_hosts_over_ssh(machine: Machine) -> None:
    (machine.directory / "hosts").write_text("a slots=4\nb slots=4\n")
    options = LaunchOptions(
        script="script.py", hostfile="hosts", include="a:0,2@b:1,3", strategy="ddp", export=("SECRET",), max_restarts=1
    )
    made = build_plan(options, machine)
    line = " ".join(made.hosts[0].command)
    assert line.startswith("python -m distkit.launch.elastic --run-dir ")
    assert "--launcher torchrun --nproc 2 --min-nodes 2 --max-nodes 2 --hosts a:2,b:2 --max-restarts 1 " in line
    assert "--devices a=0,2 --devices b=1,3 -- python -m distkit.launch.worker" in line
    assert "NCCL_DEBUG" in line and ",SECRET," in line and "HTTPS_PROXY" not in line
    shown = made.as_dict()["exports"]
    assert shown["NCCL_DEBUG"] == "INFO" and shown["SECRET"] == "***" and "HTTPS_PROXY" not in shown
    assert made.places == ("a", "b") and made.checks is not None and not made.checks.cuda
    assert "GLOO_SOCKET_IFNAME" not in made.hosts[0].environment


def test_deepspeed_gets_nothing_for_a_shell(machine: Machine) -> None:
    made = build_plan(LaunchOptions(script="script.py", hosts="a:2,b:2", launcher="deepspeed"), machine)
    assert "--launcher deepspeed" in " ".join(made.hosts[0].command)
    with pytest.raises(LaunchError, match="characters that shells read"):
        build_plan(LaunchOptions(script="script.py", hosts="a", launcher="deepspeed", run_dir="a b;c"), machine)


def test_hosts_that_meet_at_an_endpoint(machine: Machine) -> None:
    options = LaunchOptions(script="script.py", meet_at="h:29400", min_nodes=1, nnodes=3, run_dir="r", max_restarts=2)
    line = " ".join(build_plan(options, machine).hosts[0].command)
    assert "--nnodes 1:3 " in line and "--rdzv-backend c10d --rdzv-endpoint h:29400 " in line
    for wrong, message in (
        ({"meet_at": "h"}, "--meet-at host0:29400"),
        ({"node_rank": 1}, "find their places"),
        ({"run_dir": None}, "must be named"),
        ({"meet_at": None}, "not which hosts these are"),
    ):
        with pytest.raises(LaunchError if "run_dir" not in wrong else Exception, match=message):
            build_plan(dataclasses.replace(options, **wrong), machine)  # type: ignore[arg-type]
