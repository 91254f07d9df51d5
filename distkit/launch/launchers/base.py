"""What every launcher has in common: which options it takes, and how it turns a request into commands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distkit.errors import LaunchError
from distkit.launch.exports import exported_names
from distkit.launch.hosts import Host
from distkit.launch.plan import HostPlan, PlannedFile
from distkit.launch.ports import derive_port

if TYPE_CHECKING:
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["FLAGS", "ON_HOSTS", "Commands", "Launcher", "Request", "is_elastic"]

FLAGS = {
    "node_rank": "--node-rank",
    "master_addr": "--master-addr",
    "meet_at": "--meet-at",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "include": "--include",
    "exclude": "--exclude",
    "host_discovery": "--host-discovery",
    "min_nodes": "--nnodes MIN:MAX",
    "ssh_port": "--ssh-port",
    "ssh_identity": "--ssh-identity",
    "ssh_options": "--ssh-option",
    "interface": "--interface",
    "export": "--export",
    "job": "--job",
}
"""Options of `distkit-run` that not every launcher takes."""

JOB_HINT = "--launcher slurm, kubernetes or ray   take it"

ON_HOSTS = frozenset(
    ("hosts", "hostfile", "include", "exclude", "host_discovery", "min_nodes", "interface", "export")
) | frozenset(("ssh_port", "ssh_identity", "ssh_options"))
"""Those of a launcher that starts hosts over ssh."""


@dataclass(frozen=True)
class Request:
    """All that was decided before a launcher is asked for its commands.

    Args:
        options: The command line of `distkit-run`.
        machine: This machine.
        hosts: Where to run; empty is here, or where the scheduler says.
        name: Name of the run.
        target: The script's absolute path, or the module's name.
        run_dir: The run's folder, absolute; on storage that all hosts share.
        strategy: Name of the strategy; None when only the script knows.
        nnodes: Number of hosts, the most of an elastic run.
        nproc: Processes on each host.
        start_s: Time limit for the processes to meet, in seconds.
        grace_s: Between asking processes to end and killing them, in seconds.
        step_s: Time limit of a collective, in seconds.
        environment: What every process gets.
        requeue: Whether ``checkpoint.requeue`` is on.
        device: What the settings say of it.
    """

    options: LaunchOptions
    machine: Machine
    hosts: tuple[Host, ...]
    name: str
    target: str
    run_dir: Path
    strategy: str | None
    nnodes: int
    nproc: int
    start_s: float
    grace_s: float
    step_s: float
    environment: Mapping[str, str]
    requeue: bool = False
    device: str = "auto"

    RUN_DIR: ClassVar[str] = "@@run-dir@@"
    """Stands for the run's folder in :meth:`again`."""

    @property
    def processes(self) -> int:
        """Number of processes on all hosts."""
        return self.nnodes * self.nproc

    @property
    def worker(self) -> tuple[str, ...]:
        """What each process runs, behind the interpreter."""
        module = ("-m",) if self.options.module else ()
        own = ("-m", "distkit.launch.worker", "--run-dir", str(self.run_dir), "--output", self.options.output)
        return (*own, *module, self.target, *self.options.arguments)

    def again(self, more: Sequence[str]) -> tuple[str, ...]:
        """This launch line for another host or time, with :attr:`RUN_DIR` in place of the run's folder.

        Args:
            more: Further options of `distkit-run`.
        """
        options, directory = self.options, self.machine.directory
        return (
            *(self.machine.python, "-m", "distkit.launch.command", *more),
            *(("-s", options.strategy) if options.strategy else ()),
            *(("-c", str(directory / options.config)) if options.config else ()),
            *(word for text in options.overrides for word in ("--set", text)),
            *("--nnodes", str(self.nnodes), "--nproc", str(self.nproc), "--run-dir", self.RUN_DIR),
            *(("--max-restarts", str(options.max_restarts)) if options.max_restarts else ()),
            *(("--interface", options.interface) if options.interface else ()),
            *(("--output", options.output) if options.output != "main" else ()),
            *(("-m",) if options.module else ()),
            self.target,
            *options.arguments,
        )

    def here(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> HostPlan:
        """A command on this host, with the request's variables and more."""
        machine = self.machine
        return HostPlan(
            machine.host, 0, str(machine.directory), tuple(words), {**self.environment, **(environment or {})}
        )

    def meeting(self) -> dict[str, str]:
        """Where processes of torch meet if their launcher doesn't say; and the interface for their traffic."""
        found = {
            "MASTER_ADDR": self.hosts[0].name if self.hosts else "127.0.0.1",
            "MASTER_PORT": str(self.options.master_port or derive_port(str(self.run_dir))),
            **self.network(),
        }
        return {name: value for name, value in found.items() if name not in self.machine.environ}

    def network(self) -> dict[str, str]:
        """The interface that was named, for the processes' traffic."""
        interface = self.options.interface
        return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

    def supervised(
        self,
        launcher: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        always_elastic: bool = False,
        repeats: Sequence[str] = (),
    ) -> HostPlan:
        """The launcher's command under our supervision; an elastic run makes the command anew for each attempt.

        Args:
            launcher: Its name.
            words: Its command line for these hosts.
            environment: Variables that are added.
            always_elastic: Whether it is always run in attempts.
            repeats: Further options of :mod:`distkit.launch.elastic`.
        """
        if always_elastic or is_elastic(self.options):
            return self.here(self._attempts(launcher, environment, repeats), environment)
        own: tuple[str, ...] = (
            "-m",
            "distkit.launch.external",
            "--run-dir",
            str(self.run_dir),
            "--grace-s",
            f"{self.grace_s:g}",
        )
        own = (*own, "--step-s", f"{self.step_s:g}")
        more = (*self._ssh_words(), *(word for host in self.hosts for word in ("--host", host.name)))
        return self.here(
            (self.machine.python, *own, "--processes", str(self.processes), *more, "--", *words), environment
        )

    def places(self) -> list[str]:
        """Chosen devices and port, as options of :mod:`distkit.launch.elastic`."""
        devices = [f"{host.name}={','.join(map(str, host.devices))}" for host in self.hosts if host.devices]
        port = ["--master-port", str(self.options.master_port)] if self.options.master_port else []
        return [*(word for text in devices for word in ("--devices", text)), *port]

    def _ssh_words(self) -> tuple[str, ...]:
        options = self.options
        return (
            *(("--ssh-port", str(options.ssh_port)) if options.ssh_port else ()),
            *(("--ssh-identity", options.ssh_identity) if options.ssh_identity else ()),
            *(word for text in options.ssh_options for word in ("--ssh-option", text)),
        )

    def _attempts(self, launcher: str, environment: Mapping[str, str], repeats: Sequence[str]) -> tuple[str, ...]:
        options, machine = self.options, self.machine
        named: tuple[str, ...] = ()
        if options.host_discovery is not None:
            named = ("--host-discovery", str(machine.directory / options.host_discovery))
        elif self.hosts:
            named = ("--hosts", ",".join(host.as_text() for host in self.hosts))
        least = self.nnodes if options.min_nodes is None else options.min_nodes
        export = ",".join(exported_names(machine.environ, {**self.environment, **environment}, options.export))
        return (
            *(machine.python, "-m", "distkit.launch.elastic", "--run-dir", str(self.run_dir), "--launcher", launcher),
            *("--nproc", str(self.nproc), "--min-nodes", str(least), "--max-nodes", str(self.nnodes), *named),
            *("--max-restarts", str(options.max_restarts)),
            *("--grace-s", f"{self.grace_s:g}", "--start-s", f"{self.start_s:g}"),
            *("--step-s", f"{self.step_s:g}"),
            *(("--interface", options.interface) if options.interface else ()),
            *self._ssh_words(),
            *(("--export", export) if launcher != "horovodrun" else ()),
            *repeats,
            *("--", machine.python, *self.worker),
        )


@dataclass(frozen=True)
class Commands:
    """A launcher's answer.

    Args:
        hosts: What to run, and where.
        files: What to write before.
        notes: Lines for people.
    """

    hosts: tuple[HostPlan, ...] = ()
    files: tuple[PlannedFile, ...] = ()
    notes: tuple[str, ...] = ()


class Launcher(ABC):
    """One way of starting the processes of a run."""

    name: ClassVar[str]
    """As ``--launcher`` takes it."""

    takes: ClassVar[frozenset[str]]
    """Which of :data:`FLAGS`."""

    instead: ClassVar[str] = "--launcher torchrun"
    """What to use for those it doesn't take."""

    over_ssh: ClassVar[bool] = False
    """Whether it starts other hosts over ssh, and only so."""

    elsewhere: ClassVar[bool] = False
    """Whether no process runs on this machine, so that its GPUs say nothing."""

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """Refuse options that this launcher has no use for, and a launcher that isn't there.

        Raises:
            LaunchError: Naming the option and what to use.
            StrategyUnavailable: The launcher's program is missing.
        """
        for field, flag in FLAGS.items():
            if field not in self.takes and getattr(options, field) not in (None, ()):
                hint = JOB_HINT if field == "job" else self.instead
                raise LaunchError(f"{flag} was set, but --launcher {self.name} doesn't take it", hint=hint)
        if self.over_ssh and not hosts and options.host_discovery is None and options.nnodes == 1:
            for field in ("ssh_port", "ssh_identity", "ssh_options"):
                if getattr(options, field) not in (None, ()):
                    raise LaunchError(
                        f"{FLAGS[field]} was set, but no other hosts are named", hint="--hosts H0,H1   or --hostfile F"
                    )
        least = "" if options.min_nodes is None else f"{options.min_nodes}:"
        if self.over_ssh and options.nnodes > 1 and not hosts and options.host_discovery is None:
            raise LaunchError(
                f"--nnodes {least}{options.nnodes} was set, but not which hosts these are",
                hint="--hosts host0,host1   or --hostfile F",
            )

    def fill_in(self, options: LaunchOptions, machine: Machine) -> tuple[LaunchOptions, tuple[Host, ...], list[str]]:
        """Complete the options with what the surroundings say (an allocation), before they are checked.

        Returns:
            Options, hosts if the surroundings name them, and lines for people.

        Raises:
            LaunchError: What was asked for contradicts the surroundings; both are named.
        """
        return options, (), []

    @abstractmethod
    def commands(self, request: Request) -> Commands:
        """What to run for a request that has been checked."""


def is_elastic(options: LaunchOptions) -> bool:
    """Whether there may be more than one attempt, on other hosts perhaps."""
    return bool(options.max_restarts) or options.min_nodes is not None or options.host_discovery is not None
