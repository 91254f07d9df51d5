"""What a plan says when another launcher (horovodrun, mpirun) starts the processes, on all hosts from one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import LaunchError, StrategyUnavailable
from distkit.launch.hosts import Host, common_slots, parse_hosts, read_hostfile
from distkit.launch.launchers.horovodrun import HorovodrunCommand
from distkit.launch.launchers.mpirun import MpirunCommand
from distkit.launch.ports import derive_port
from distkit.launch.worker import LAUNCH_VARIABLE

if TYPE_CHECKING:
    from distkit.launch.plan import LaunchOptions, Machine

__all__ = [
    "EXTERNAL",
    "ExternalCommand",
    "check_external",
    "external_command",
    "hosts_of",
    "is_elastic",
    "nodes_of",
    "processes_on_each",
]

EXTERNAL = ("horovodrun", "mpirun")
"""Launchers with a program of their own."""

_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that a process on another host needs to find the same programs; exported where they are set."""


def hosts_of(options: LaunchOptions, machine: Machine) -> tuple[Host, ...]:
    """The hosts that were named; empty where the run is on this one.

    Raises:
        LaunchError: They can't be read, are named twice, or their number isn't ``--nnodes``.
    """
    given = {"--hosts": options.hosts, "--hostfile": options.hostfile, "--host-discovery": options.host_discovery}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise LaunchError(f"{' and '.join(named)} were set, and each names the hosts", hint="leave one out")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = read_hostfile(machine.directory / options.hostfile)
    else:
        return ()
    if options.min_nodes is not None and options.min_nodes > len(hosts):
        raise LaunchError(
            f"--nnodes asks for {options.min_nodes} hosts at least, but {len(hosts)} are named",
            hint=f"--nnodes {len(hosts)}",
        )
    if options.min_nodes is None and options.nnodes not in (1, len(hosts)):
        raise LaunchError(
            f"--nnodes was set to {options.nnodes}, but {len(hosts)} hosts are named", hint=f"--nnodes {len(hosts)}"
        )
    return hosts


def check_external(options: LaunchOptions, launcher: str, hosts: Sequence[Host], machine: Machine) -> None:
    """Refuse options that the launcher has no use for, and a launcher that isn't there.

    Raises:
        LaunchError: Naming the option and what to use.
        StrategyUnavailable: The launcher's program is missing.
    """
    if launcher not in EXTERNAL:
        _refuse_external_options(options, launcher)
        return
    for name, value in (("--node-rank", options.node_rank), ("--master-addr", options.master_addr)):
        if value is not None:
            raise LaunchError(
                f"{name} was set, but --launcher {launcher} starts all hosts from this one",
                hint="--hosts host0,host1   or --launcher torchrun",
            )
    if options.nnodes > 1 and not hosts and options.host_discovery is None:
        raise LaunchError(
            f"--nnodes {options.nnodes} was set, but not which hosts these are",
            hint="--hosts host0,host1   or --hostfile F",
        )
    for name, text in (("--interface", options.interface), ("--ssh-identity", options.ssh_identity)):
        if text is not None and not re.fullmatch(r"[\w./,@+:-]+", text):  # horovodrun hands it to a shell
            raise LaunchError(f"{name} was set to {text!r}, which has characters that shells read", hint="rename it")
    if launcher == "horovodrun":
        _check_horovodrun()
    elif machine.mpi() is None:
        raise StrategyUnavailable(
            "--launcher mpirun was set, but mpirun is not there",
            hint="apt-get install openmpi-bin libopenmpi-dev   (or: module load openmpi), or --launcher torchrun",
        )


def processes_on_each(options: LaunchOptions, hosts: Sequence[Host]) -> str:
    """``--nproc`` for hosts that say how much room they have.

    Raises:
        LaunchError: More were asked for than one has room for.
    """
    slots = common_slots(hosts)
    if slots is None:
        return options.nproc
    if options.nproc == "auto":
        return str(slots)
    if options.nproc.isdecimal() and int(options.nproc) > slots:
        least = next(host for host in hosts if host.slots == slots)
        raise LaunchError(
            f"--nproc was set to {options.nproc}, but {least.name} has room for {slots}", hint=f"--nproc {slots}"
        )
    return options.nproc


@dataclass(frozen=True)
class ExternalCommand:
    """The command and the variables of one launch.

    Args:
        words: What runs on this host.
        environment: Variables that are added.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]


def external_command(
    options: LaunchOptions,
    launcher: str,
    hosts: Sequence[Host],
    machine: Machine,
    *,
    target: str,
    run_dir: Path,
    nproc: int,
    start_s: float,
    grace_s: float,
    environment: Mapping[str, str],
) -> ExternalCommand:
    """The command line of a launcher under :mod:`distkit.launch.external`.

    Args:
        options: The command line of `distkit-run`.
        launcher: One of :data:`EXTERNAL`.
        hosts: Where; empty is here.
        machine: This one.
        target: The script's absolute path, or the module's name.
        run_dir: The run's folder, absolute, on storage that all hosts share.
        nproc: Processes on each host.
        start_s: Time limit for the processes to meet, in seconds.
        grace_s: Between asking processes to end and killing them, in seconds.
        environment: What every process gets besides.
    """
    module = ("-m",) if options.module else ()
    worker = (machine.python, "-m", "distkit.launch.worker", "--run-dir", str(run_dir), "--output", options.output)
    worker = (*worker, *module, target, *options.arguments)
    environment = {**environment, **_meeting(options, hosts, run_dir, machine)}
    inherited = [name for name in _INHERITED if name in machine.environ]
    export = list(dict.fromkeys([*environment, *inherited, *options.export, LAUNCH_VARIABLE, "TERM"]))
    if is_elastic(options):
        words = _elastic_words(options, launcher, hosts, machine, run_dir, nproc, start_s, grace_s, export, worker)
        return ExternalCommand(words, environment)
    names = [host.name for host in hosts]
    interface = options.interface or ("lo" if not hosts and machine.system.startswith("linux") else None)
    if launcher == "horovodrun":
        words = HorovodrunCommand(
            python=machine.python,
            hosts=names,
            nproc=nproc,
            start_s=start_s,
            interface=interface,
            ssh_port=options.ssh_port,
            ssh_identity=options.ssh_identity,
            worker=worker,
        ).words()
    else:
        command = MpirunCommand(
            mpi=machine.mpi() or "mpi",
            hosts=names,
            nproc=nproc,
            root=machine.root,
            cpu=machine.gpus() == 0,
            interface=interface,
            ssh_port=options.ssh_port,
            ssh_identity=options.ssh_identity,
            export=export,
            worker=worker,
        )
        words = command.words()
        environment = {**environment, **command.environment()}
    own = (machine.python, "-m", "distkit.launch.external", "--run-dir", str(run_dir), "--grace-s", f"{grace_s:g}")
    return ExternalCommand((*own, "--processes", str(nproc * max(1, len(hosts))), "--", *words), environment)


def is_elastic(options: LaunchOptions) -> bool:
    """Whether there may be more than one attempt, on other hosts perhaps."""
    return bool(options.max_restarts) or options.min_nodes is not None or options.host_discovery is not None


def nodes_of(options: LaunchOptions, hosts: Sequence[Host]) -> int:
    """Number of hosts, the most of an elastic run."""
    if options.host_discovery is not None:
        return options.nnodes
    return min(options.nnodes, len(hosts)) if options.min_nodes is not None and hosts else max(1, len(hosts))


def _elastic_words(
    options: LaunchOptions,
    launcher: str,
    hosts: Sequence[Host],
    machine: Machine,
    run_dir: Path,
    nproc: int,
    start_s: float,
    grace_s: float,
    export: Sequence[str],
    worker: Sequence[str],
) -> tuple[str, ...]:
    """The command line of :mod:`distkit.launch.elastic`, which makes the launcher's own for each attempt."""
    named: tuple[str, ...] = ()
    if options.host_discovery is not None:
        named = ("--host-discovery", str(machine.directory / options.host_discovery))
    elif hosts:
        named = ("--hosts", ",".join(host.name + (f":{host.slots}" if host.slots else "") for host in hosts))
    most = nodes_of(options, hosts)
    least = most if options.min_nodes is None else options.min_nodes
    return (
        *(machine.python, "-m", "distkit.launch.elastic", "--run-dir", str(run_dir), "--launcher", launcher),
        *("--nproc", str(nproc), "--min-nodes", str(least), "--max-nodes", str(most), *named),
        *("--max-restarts", str(options.max_restarts), "--grace-s", f"{grace_s:g}", "--start-s", f"{start_s:g}"),
        *(("--interface", options.interface) if options.interface else ()),
        *(("--ssh-port", str(options.ssh_port)) if options.ssh_port else ()),
        *(("--ssh-identity", options.ssh_identity) if options.ssh_identity else ()),
        *(("--export", ",".join(export)) if launcher == "mpirun" else ()),
        *("--", *worker),
    )


def _meeting(options: LaunchOptions, hosts: Sequence[Host], run_dir: Path, machine: Machine) -> dict[str, str]:
    """Where processes of torch meet, for strategies other than horovod; and the interface for their traffic."""
    found = {
        "MASTER_ADDR": hosts[0].name if hosts else "127.0.0.1",
        "MASTER_PORT": str(options.master_port or derive_port(str(run_dir))),
    }
    if options.interface:
        found |= {"GLOO_SOCKET_IFNAME": options.interface, "NCCL_SOCKET_IFNAME": options.interface}
    return {name: value for name, value in found.items() if name not in machine.environ}


def _refuse_external_options(options: LaunchOptions, launcher: str) -> None:
    given = {
        "--hosts": options.hosts,
        "--hostfile": options.hostfile,
        "--ssh-port": options.ssh_port,
        "--ssh-identity": options.ssh_identity,
        "--interface": options.interface,
        "--export": options.export or None,
        "--host-discovery": options.host_discovery,
        "--nnodes MIN:MAX": options.min_nodes,
    }
    for name, value in given.items():
        if value is not None:
            raise LaunchError(
                f"{name} was set, but --launcher {launcher} starts processes on this host only",
                hint="--launcher horovodrun   or --launcher mpirun",
            )


def _check_horovodrun() -> None:
    if find_spec("horovod") is None:
        raise StrategyUnavailable(
            "--launcher horovodrun was set, but Horovod is not installed",
            hint="python -m distkit.doctor.horovod_build   (in a checkout: scripts/install-horovod)",
        )
    if find_spec("distutils") is None:  # horovod/runner/js_run.py imports it; Python 3.12 dropped it
        raise StrategyUnavailable(
            "horovodrun needs distutils, which this Python has no more; setuptools brings it",
            hint="pip install setuptools   or --launcher torchrun",
        )
