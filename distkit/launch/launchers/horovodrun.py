"""The command that starts a run's processes over horovodrun and Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distkit.errors import StrategyUnavailable
from distkit.launch.launchers.base import ON_HOSTS, Commands, Launcher, Request
from distkit.launch.ssh import check_words

if TYPE_CHECKING:
    from distkit.launch.hosts import Host
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["HorovodrunCommand", "HorovodrunLauncher"]


@dataclass(frozen=True)
class HorovodrunCommand:
    """What horovodrun's command line depends on.

    Args:
        python: The interpreter, the same on all hosts.
        hosts: Names of the hosts; empty is this one.
        nproc: Processes on each host.
        start_s: Time limit for the processes to meet, in seconds.
        interface: Network interface to use; None lets horovodrun find one.
        ssh_port: Port of ssh on the other hosts; None is ssh's own.
        ssh_identity: Private key for ssh; None is ssh's own.
        worker: What runs in each process.
    """

    python: str
    hosts: Sequence[str]
    nproc: int
    start_s: float
    interface: str | None
    ssh_port: int | None
    ssh_identity: str | None
    worker: Sequence[str]

    def words(self) -> tuple[str, ...]:
        """The command as a list of words.

        The module is named instead of the program ``horovodrun``, so that it runs in this interpreter whatever PATH
        says.
        """
        hosts = ",".join(f"{name}:{self.nproc}" for name in self.hosts or ("localhost",))
        return (
            *(self.python, "-m", "horovod.runner.launch", "--gloo"),
            *("-np", str(self.nproc * max(1, len(self.hosts))), "--hosts", hosts),
            *("--start-timeout", str(max(1, round(self.start_s)))),
            *(("--network-interfaces", self.interface) if self.interface else ()),
            *(("--ssh-port", str(self.ssh_port)) if self.ssh_port else ()),
            *(("--ssh-identity-file", self.ssh_identity) if self.ssh_identity else ()),
            *self.worker,
        )


class HorovodrunLauncher(Launcher):
    """horovodrun with Gloo; it works with every strategy."""

    name = "horovodrun"
    over_ssh = True
    takes = ON_HOSTS - {"ssh_options"}

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; Horovod must be installed."""
        super().check(options, hosts, machine)
        check_words({"--interface": options.interface, "--ssh-identity": options.ssh_identity})
        if hosts:  # horovod/runner/gloo_run.py changes to it there in a line for a shell, unquoted
            check_words({"the working directory": str(machine.directory)})
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

    def commands(self, request: Request) -> Commands:
        """horovodrun under our supervision."""
        options, machine = request.options, request.machine
        local = not request.hosts and machine.system.startswith("linux")
        words = HorovodrunCommand(
            python=machine.python,
            hosts=[host.name for host in request.hosts],
            nproc=request.nproc,
            start_s=request.start_s,
            interface=options.interface or ("lo" if local else None),
            ssh_port=options.ssh_port,
            ssh_identity=options.ssh_identity,
            worker=(machine.python, *request.worker),
        ).words()
        return Commands((request.supervised(self.name, words, request.meeting()),))
