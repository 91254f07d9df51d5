"""A launch as data: the options that ask for it, and the plan that says all that is done.

``--dry-run`` prints the plan, `distkit-run` executes it. :func:`distkit.launch.build.build_plan` makes one from the other.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distkit.config.launchline import LaunchSettings
from distkit.masking import mask_arguments, mask_environment, mask_text

__all__ = ["HostChecks", "HostPlan", "LaunchOptions", "LaunchPlan", "PlannedFile"]


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of `distkit-run`.

    Args:
        script: Path of the script, or a module's name.
        arguments: The script's own arguments.
        module: Whether ``script`` is a module.
        strategy: Name of the strategy; None leaves it to the config and the script.
        config: Path of the config file.
        overrides: ``KEY=VALUE`` texts.
        nproc: Processes on each node, or ``auto``.
        nnodes: Number of nodes.
        node_rank: Place of this node.
        master_addr: Address of node 0.
        master_port: Port there; None derives one from the run's name.
        launcher: ``auto`` or a launcher's name.
        max_restarts: How often all workers are started again after a failure.
        run_dir: The run's folder.
        output: Which ranks show their output: main or all.
        min_nodes: Fewest nodes of an elastic run, whose most is ``nnodes``; None is no elastic run.
        hosts: Hosts for a launcher that starts them all, as ``host0:4,host1:4``.
        hostfile: Or a file with a host a line.
        include: Only these of them, in DeepSpeed's form ``host0@host1:0,2``.
        exclude: All but these.
        interface: Network interface between them.
        ssh_port: Port of ssh there.
        ssh_identity: Private key for ssh.
        ssh_options: Further words for ssh, such as ``ProxyJump=gate``.
        export: Further variables that processes on other hosts get.
        host_discovery: A program that prints the hosts that are there now.
        meet_at: ``HOST:PORT`` at which hosts that are started by hand meet, in any order and number.
        job: ``KEY=VALUE`` texts for the scheduler that runs the job (Slurm, Kubernetes, Ray).
        preview: What `distkit plan` wants to be measured; empty for a run.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    strategy: str | None = None
    config: str | None = None
    overrides: tuple[str, ...] = ()
    nproc: str = "auto"
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "auto"
    max_restarts: int = 0
    run_dir: str | None = None
    output: str = "main"
    min_nodes: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    interface: str | None = None
    ssh_port: int | None = None
    ssh_identity: str | None = None
    ssh_options: tuple[str, ...] = ()
    export: tuple[str, ...] = ()
    host_discovery: str | None = None
    meet_at: str | None = None
    job: tuple[str, ...] = ()
    preview: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HostPlan:
    """What runs on one host.

    Args:
        host: Its name.
        node_rank: Its place among the nodes.
        directory: The working directory.
        command: The program and its arguments; no shell reads them.
        environment: Variables that are added to those of the host.
    """

    host: str
    node_rank: int
    directory: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """One line for a shell that runs the same; secrets are masked."""
        variables = [f"{name}={value}" for name, value in mask_environment(self.environment).items()]
        words = ["env", *variables, *mask_arguments(self.command)]
        return f"cd {shlex.quote(self.directory)} && {shlex.join(words)}"


@dataclass(frozen=True)
class PlannedFile:
    """A file that the launch writes before it starts anything.

    Args:
        path: Where, absolute.
        text: What; no secret is in it.
    """

    path: str
    text: str


@dataclass(frozen=True)
class HostChecks:
    """What is looked at on every host before anything is started.

    Args:
        directory: The working directory.
        target: The script's path; None for a module.
        cuda: Whether each process needs a GPU.
        least: Fewest hosts that must be fit.
        interface: Network interface that must be there.
        ssh_port: Port of ssh there.
        ssh_identity: Private key for ssh.
        ssh_options: Further options of ssh.
    """

    directory: str
    target: str | None
    cuda: bool
    least: int
    interface: str | None
    ssh_port: int | None
    ssh_identity: str | None
    ssh_options: tuple[str, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """All that a launch does.

    Args:
        strategy: Name of the strategy; None when only the script knows.
        nnodes: Number of nodes.
        nproc: Processes on each node.
        run_dir: The run's folder, absolute.
        settings: What the workers are told of the launch line.
        hosts: What runs, and where: one command on this host that may start all others; none where only files are made.
        notes: Lines for people that say what was chosen and why.
        files: Written before anything starts.
        places: Names of the hosts on which processes run; empty is this one, or the scheduler's choice.
        checks: What these hosts must have; None where nothing is looked at.
        exports: Variables that processes on other hosts get, beside those that the plan adds.
    """

    strategy: str | None
    nnodes: int
    nproc: int
    run_dir: str
    settings: LaunchSettings
    hosts: tuple[HostPlan, ...]
    notes: tuple[str, ...] = field(default=())
    files: tuple[PlannedFile, ...] = field(default=())
    places: tuple[str, ...] = field(default=())
    checks: HostChecks | None = None
    exports: Mapping[str, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Number of processes on all nodes."""
        return self.nnodes * self.nproc

    def summary(self) -> str:
        """One line: strategy, processes, folder."""
        nodes = f"{self.nnodes} {'node' if self.nnodes == 1 else 'nodes'}"
        each = f"{self.nproc} {'process' if self.nproc == 1 else 'processes'}"
        strategy = self.strategy or "strategy as the script says"
        return f"{strategy}, {nodes} x {each} = {self.processes}, run folder {self.run_dir}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; secrets are masked."""
        return {
            "strategy": self.strategy,
            "nnodes": self.nnodes,
            "nproc": self.nproc,
            "processes": self.processes,
            "run_dir": self.run_dir,
            "settings": {
                "config": self.settings.config,
                "overrides": [mask_text(text) for text in self.settings.overrides],
                "launcher": self.settings.launcher,
            },
            "hosts": [
                {
                    "host": host.host,
                    "node_rank": host.node_rank,
                    "directory": host.directory,
                    "environment": mask_environment(host.environment),
                    "command": mask_arguments(host.command),
                }
                for host in self.hosts
            ],
            "places": list(self.places),
            "exports": mask_environment(self.exports),
            "files": [{"path": file.path, "text": file.text} for file in self.files],
        }
