"""How an attempt of an elastic run begins, with each launcher, on the hosts that are there now."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distkit.launch.attempt import Attempt
from distkit.launch.exports import exported
from distkit.launch.external import ExternalRun
from distkit.launch.fleet import FleetRun
from distkit.launch.hardware import mpi_version, visible_gpus
from distkit.launch.hosts import is_this_host
from distkit.launch.launchers.deepspeed import DeepspeedCommand
from distkit.launch.launchers.horovodrun import HorovodrunCommand
from distkit.launch.launchers.mpirun import MpirunCommand
from distkit.launch.launchers.slurm import step_command
from distkit.launch.launchers.torchrun import HostCommand
from distkit.launch.ports import derive_port
from distkit.launch.ssh import SshOptions
from distkit.launch.worker import ATTEMPT_VARIABLE, LAUNCH_VARIABLE, write_order

__all__ = ["LAUNCHERS", "begin", "tidy"]

_TORCHRUNS = "TORCHELASTIC_RESTART_COUNT"
"""Under other launchers scripts find the number of restarts where torchrun has it; our agents count their own in it."""


def begin(options: argparse.Namespace, hosts: Sequence[str], number: int) -> Attempt:
    """Start an attempt.

    Args:
        options: The command line of :mod:`distkit.launch.elastic`.
        hosts: Where.
        number: How many attempts there were before.

    Raises:
        LaunchError: It can't be started.
    """
    return LAUNCHERS[options.launcher](options, hosts, number)


def _torchrun(options: argparse.Namespace, hosts: Sequence[str], number: int) -> Attempt:
    """The agents themselves make one attempt each; the next one is decided here."""
    port = (options.master_port or derive_port(str(options.run_dir))) + number
    commands = [
        HostCommand(
            python=options.worker[0],
            run_dir=options.run_dir,
            name=options.run_dir.name or "run",
            nodes=len(hosts),
            processes=options.nproc,
            start_s=options.start_s,
            grace_s=options.grace_s,
            step_s=options.step_s,
            worker=options.worker[1:],
            node_rank=place,
            address=hosts[0],
            port=port,
            hand_over=True,
        ).words()
        for place in range(len(hosts))
    ]
    devices = dict(text.split("=", 1) for text in options.devices)
    common = {**exported(os.environ, options.export.split(",")), ATTEMPT_VARIABLE: str(number)}
    if options.interface is None and _local(hosts) and sys.platform.startswith("linux"):
        common |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environments = [
        {**common, **({"CUDA_VISIBLE_DEVICES": devices[host]} if host in devices else {})} for host in hosts
    ]
    run = FleetRun(options.run_dir, hosts, options.nproc, options.grace_s, _ssh(options))
    run.start(commands, environments, options.worker[0])
    return run


def _horovodrun(options: argparse.Namespace, hosts: Sequence[str], number: int) -> Attempt:
    words = HorovodrunCommand(
        python=sys.executable,
        hosts=hosts,
        nproc=options.nproc,
        start_s=options.start_s,
        interface=_interface(options, hosts),
        ssh_port=options.ssh_port,
        ssh_identity=options.ssh_identity,
        worker=options.worker,
    ).words()
    return _external(options, hosts, words, _meeting(hosts, number))


def _mpirun(options: argparse.Namespace, hosts: Sequence[str], number: int) -> Attempt:
    meeting = _meeting(hosts, number)
    command = MpirunCommand(
        mpi=mpi_version() or "mpi",
        hosts=hosts,
        nproc=options.nproc,
        root=os.geteuid() == 0,
        cpu=visible_gpus(os.environ) == 0,
        interface=_interface(options, hosts),
        ssh=_ssh(options),
        export=list(dict.fromkeys([*(name for name in options.export.split(",") if name), *meeting])),
        worker=options.worker,
    )
    return _external(options, hosts, command.words(), {**meeting, **command.environment()})


def _slurm(options: argparse.Namespace, hosts: Sequence[str], number: int) -> Attempt:
    words = step_command(os.environ, hosts, options.nproc, options.worker)
    run = _external_run(options, hosts, over_ssh=False)
    run.start(words, _meeting(hosts, number))
    return run


def _deepspeed(options: argparse.Namespace, hosts: Sequence[str], number: int) -> Attempt:
    """DeepSpeed's launcher asks for files: the hosts, and what the processes are told."""
    folder = Path(options.run_dir, "launch")
    chosen = dict(text.split("=", 1) for text in options.devices)
    devices = {
        host: [int(n) for n in chosen[host].split(",")] if host in chosen else list(range(options.nproc))
        for host in hosts
    }
    command = DeepspeedCommand(
        python=sys.executable,
        hosts=devices,
        address="127.0.0.1" if _local(hosts) else hosts[0],
        port=(options.master_port or derive_port(str(options.run_dir))) + number,
        ssh_port=options.ssh_port,
        order=_order(options),
    )
    values = {**exported(os.environ, options.export.split(",")), _TORCHRUNS: str(number)}
    write_order(command.order, options.worker[3:], values)
    (folder / "hostfile").write_text(command.hostfile(), encoding="utf-8")
    if _local(hosts) or shutil.which("pdsh") is None:
        fleet = FleetRun(options.run_dir, hosts, options.nproc, options.grace_s, _ssh(options), agents=False)
        fleet.start([command.on(place) for place in range(len(hosts))], [values] * len(hosts), sys.executable)
        return fleet
    run = _external_run(options, hosts)
    marks = folder / "deepspeed.env"
    marks.write_text(f"{LAUNCH_VARIABLE}={run.id}", encoding="utf-8")  # a line's end would be taken as its value's
    ssh = " ".join(_ssh(options).words())
    run.start(command.over_pdsh(folder / "hostfile"), {"DS_ENV_FILE": str(marks), "PDSH_SSH_ARGS_APPEND": ssh})
    return run


LAUNCHERS: dict[str, Callable[[argparse.Namespace, Sequence[str], int], Attempt]] = {
    "torchrun": _torchrun,
    "horovodrun": _horovodrun,
    "mpirun": _mpirun,
    "deepspeed": _deepspeed,
    "slurm": _slurm,
}
"""Those that can make several attempts."""


def tidy(options: argparse.Namespace) -> None:
    """Remove what an attempt left that nobody should read later: the variables of its processes."""
    _order(options).unlink(missing_ok=True)


def _order(options: argparse.Namespace) -> Path:
    return Path(options.run_dir, "launch", "order.json")


def _external(
    options: argparse.Namespace, hosts: Sequence[str], words: Sequence[str], environ: dict[str, str]
) -> Attempt:
    run = _external_run(options, hosts)
    run.start(words, environ)
    return run


def _external_run(options: argparse.Namespace, hosts: Sequence[str], *, over_ssh: bool = True) -> ExternalRun:
    return ExternalRun(
        options.run_dir,
        len(hosts) * options.nproc,
        options.grace_s,
        step_s=options.step_s,
        hosts=hosts if over_ssh else (),
        ssh=_ssh(options),
    )


def _meeting(hosts: Sequence[str], number: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1" if _local(hosts) else hosts[0], _TORCHRUNS: str(number)}


def _interface(options: argparse.Namespace, hosts: Sequence[str]) -> str | None:
    found: str | None = options.interface or ("lo" if _local(hosts) and sys.platform.startswith("linux") else None)
    return found


def _local(hosts: Sequence[str]) -> bool:
    own = os.uname().nodename
    return all(is_this_host(name, own) for name in hosts)


def _ssh(options: argparse.Namespace) -> SshOptions:
    return SshOptions(options.ssh_port, options.ssh_identity, tuple(options.ssh_option))
