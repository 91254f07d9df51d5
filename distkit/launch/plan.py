"""The launch plan: everything that is decided before anything starts. ``--dry-run`` prints it, `distkit-run` executes it.

Launching is data: :func:`build_plan` is a function of the options, the config file and the :class:`Machine`; nothing
is decided later, so what a dry run prints is what runs.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.config.launchline import VARIABLE, LaunchSettings
from distkit.config.naming import run_name
from distkit.config.nearest import nearest
from distkit.errors import ConfigError, LaunchError
from distkit.launch.external_plan import (
    EXTERNAL,
    check_external,
    external_command,
    hosts_of,
    is_elastic,
    nodes_of,
    processes_on_each,
)
from distkit.launch.hardware import usable_cores, visible_gpus
from distkit.launch.launchers.mpirun import mpi_version
from distkit.launch.launchers.torchrun import HostCommand
from distkit.launch.ports import derive_port
from distkit.logs.trackers import check_trackers
from distkit.masking import mask_environment, mask_text

if TYPE_CHECKING:
    from distkit.config import LoadedConfig
    from distkit.strategies.base import Strategy

__all__ = ["HostPlan", "LaunchOptions", "LaunchPlan", "Machine", "build_plan"]

LAUNCHERS = ("torchrun", *EXTERNAL)

OPTIONS_BEFORE_SCRIPT = ("-s", "--strategy", "--set", "--nproc", "--nnodes", "--run-dir", "--launcher", "--dry-run")
"""Those that people put in the wrong place."""


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
        interface: Network interface between them.
        ssh_port: Port of ssh there.
        ssh_identity: Private key for ssh.
        export: Further variables that processes on other hosts get.
        host_discovery: A program that prints the hosts that are there now.
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
    interface: str | None = None
    ssh_port: int | None = None
    ssh_identity: str | None = None
    export: tuple[str, ...] = ()
    host_discovery: str | None = None


@dataclass(frozen=True)
class Machine:
    """What a plan depends on besides options and config.

    Args:
        directory: The working directory.
        environ: Variables of this process.
        python: The interpreter.
        host: This host's name.
        cores: CPU cores that may be used.
        gpus: Counts the GPUs that a process would see; asked only where the number matters.
        system: ``sys.platform``.
        now: ``YYYYmmdd-HHMMSS``, the time in the name of a new run's folder.
        claim: Takes a folder for a new run; False when it is taken already.
        mpi: Says which MPI ``mpirun`` belongs to; None where there is none.
        root: Whether the user is root.
    """

    directory: Path
    environ: Mapping[str, str]
    python: str
    host: str
    cores: int
    gpus: Callable[[], int]
    system: str
    now: str
    claim: Callable[[Path], bool]
    mpi: Callable[[], str | None] = mpi_version
    root: bool = False

    @classmethod
    def here(cls, *, claim: bool) -> Machine:
        """This machine, now.

        Args:
            claim: Make a new run's folder, so that another run that starts in the same second takes another one;
                False only looks.
        """
        environ = dict(os.environ)
        return cls(
            directory=Path.cwd(),
            environ=environ,
            python=sys.executable,
            host=socket.gethostname(),
            cores=usable_cores(),
            gpus=lambda: visible_gpus(environ),
            system=sys.platform,
            now=time.strftime("%Y%m%d-%H%M%S"),
            claim=_make_folder if claim else lambda folder: not folder.exists(),
            root=hasattr(os, "geteuid") and os.geteuid() == 0,
        )


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
        words = ["env", *variables, *(mask_text(word) for word in self.command)]
        return f"cd {shlex.quote(self.directory)} && {shlex.join(words)}"


@dataclass(frozen=True)
class LaunchPlan:
    """All that a launch does.

    Args:
        strategy: Name of the strategy; None when only the script knows.
        nnodes: Number of nodes.
        nproc: Processes on each node.
        run_dir: The run's folder, absolute.
        settings: What the workers are told of the launch line.
        hosts: The hosts that this plan starts.
        notes: Lines for people that say what was chosen and why.
    """

    strategy: str | None
    nnodes: int
    nproc: int
    run_dir: str
    settings: LaunchSettings
    hosts: tuple[HostPlan, ...]
    notes: tuple[str, ...] = field(default=())

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
                    "command": [mask_text(word) for word in host.command],
                }
                for host in self.hosts
            ],
        }


def build_plan(options: LaunchOptions, machine: Machine) -> LaunchPlan:
    """Decide everything, and refuse what can't work.

    Raises:
        ConfigError: A setting is unknown, wrong, or can't go with the strategy.
        StrategyUnavailable: The strategy's engine isn't installed.
        LaunchError: The script isn't there, or the options don't describe a launch.
    """
    from distkit.config import load_config

    launcher = _launcher(options.launcher)
    target = _target(options, machine)
    hosts = hosts_of(options, machine)
    check_external(options, launcher, hosts, machine)
    if launcher in EXTERNAL:
        options = replace(options, nnodes=nodes_of(options, hosts), nproc=processes_on_each(options, hosts))
    given = _overrides(options)
    config_file = None if options.config is None else str(machine.directory / options.config)
    loaded = load_config(file=config_file, overrides=given)
    options = _launched_by_accelerate(options, loaded)
    strategy = loaded.config.strategy if loaded.origins["strategy"] != "default" else None
    nproc, notes = _processes(options, loaded, strategy, machine)
    notes += _misplaced(options)
    if launcher not in EXTERNAL:
        _check_nodes(options, loaded)
    name = run_name(loaded.config.name, target, module=options.module)
    check_trackers(loaded.config.log.to)
    run_dir = _run_dir(loaded.config.run_dir, name, machine)
    settings = LaunchSettings(
        config=config_file, overrides=[*given, f"run_dir={_yaml_text(str(run_dir))}"], launcher=launcher
    )
    timeouts = loaded.config.timeouts
    environment = {VARIABLE: settings.to_json(), **_environment(machine, options.nnodes, nproc)}
    gpus = loaded.accelerate.launch.gpus if loaded.accelerate and loaded.accelerate.launch else None
    if gpus is not None and "CUDA_VISIBLE_DEVICES" not in machine.environ:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    if launcher in EXTERNAL:
        external = external_command(
            options,
            launcher,
            hosts,
            machine,
            target=target,
            run_dir=run_dir,
            nproc=nproc,
            start_s=timeouts.start_s,
            grace_s=timeouts.grace_s,
            environment=environment,
        )
        host = HostPlan(machine.host, 0, str(machine.directory), external.words, external.environment)
        checkpoint = loaded.config.checkpoint
        if is_elastic(options) and checkpoint.every_steps is None and checkpoint.every_seconds is None:
            notes.append("no checkpoint.every_steps is set: after a failure the run goes on from its start")
        return LaunchPlan(strategy, options.nnodes, nproc, str(run_dir), settings, (host,), tuple(notes))
    node_rank = options.node_rank or 0
    command = HostCommand(
        python=machine.python,
        run_dir=run_dir,
        name=name,
        nodes=options.nnodes,
        node_rank=node_rank,
        processes=nproc,
        address=options.master_addr,
        port=options.master_port or derive_port(name),
        max_restarts=options.max_restarts,
        start_s=timeouts.start_s,
        grace_s=timeouts.grace_s,
        output=options.output,
        target=target,
        module=options.module,
        arguments=options.arguments,
    )
    host = HostPlan(machine.host, node_rank, str(machine.directory), command.words(), environment)
    if options.nnodes > 1:
        notes.append(f"node {node_rank} of {options.nnodes}, meeting at {options.master_addr}:{command.port}")
    return LaunchPlan(strategy, options.nnodes, nproc, str(run_dir), settings, (host,), tuple(notes))


def _launcher(wanted: str) -> str:
    if wanted == "auto":
        return LAUNCHERS[0]
    if wanted not in LAUNCHERS:
        found = nearest(wanted, LAUNCHERS)
        raise LaunchError(
            f"--launcher was set to {wanted!r}; valid: auto, {', '.join(LAUNCHERS)}",
            hint=f"--launcher {found or 'auto'}",
        )
    return wanted


def _target(options: LaunchOptions, machine: Machine) -> str:
    """The script's absolute path, or the module's name; both must exist."""
    if options.module:
        top = options.script.partition(".")[0]
        if PathFinder.find_spec(top, [str(machine.directory), *sys.path]) is None:
            raise LaunchError(
                f"module {options.script!r} was given with -m, but there is no {top!r} in {str(machine.directory)!r} "
                "or among the installed packages",
                hint="distkit-run SCRIPT.py   takes a path",
            )
        return options.script
    path = machine.directory / options.script
    if path.is_file() or (path / "__main__.py").is_file():
        return str(path)
    others = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
    found = nearest(path.name, others)
    raise LaunchError(
        f"script {options.script!r} was given, but there is no such file in {str(machine.directory)!r}",
        hint=f"did you mean {Path(options.script).with_name(found)}?" if found else "distkit-run [OPTIONS] SCRIPT.py",
    )


def _overrides(options: LaunchOptions) -> list[str]:
    """The options that are settings, in the settings' own form; what is said twice is said last by its own option."""
    overrides = list(options.overrides)
    if options.strategy is not None:
        overrides.append(f"strategy={_yaml_text(options.strategy)}")
    if options.run_dir is not None:
        overrides.append(f"run_dir={_yaml_text(options.run_dir)}")
    return overrides


def _misplaced(options: LaunchOptions) -> list[str]:
    """A note on words after the script that look like options of distkit-run: a script may have such ones itself."""
    words = [word.partition("=")[0] for word in options.arguments]
    ours = sorted({word for word in words if word in OPTIONS_BEFORE_SCRIPT})
    if not ours:
        return []
    return [f"{', '.join(ours)} stands after the script, so the script gets it; options of distkit-run stand before it"]


def _launched_by_accelerate(options: LaunchOptions, loaded: LoadedConfig) -> LaunchOptions:
    """Numbers of processes and nodes from Accelerate's configuration, where the launch line doesn't say them."""
    launch = loaded.accelerate.launch if loaded.accelerate is not None else None
    if launch is None:
        return options
    if options.nproc == "auto" and launch.nproc is not None:
        options = replace(options, nproc=str(launch.nproc))
    if options.nnodes == 1 and options.node_rank is None and launch.nnodes > 1:
        options = replace(
            options,
            nnodes=launch.nnodes,
            node_rank=launch.node_rank,
            master_addr=options.master_addr or launch.address,
            master_port=options.master_port or launch.port,
        )
    return options


def _processes(
    options: LaunchOptions, loaded: LoadedConfig, strategy: str | None, machine: Machine
) -> tuple[int, list[str]]:
    """Processes on each node, checked against the strategy; and a note where that needs one."""
    from distkit.config.checks import check_tensor_groups
    from distkit.strategies.registry import apply_defaults, strategy_class

    several = options.nnodes > 1 or options.nproc not in ("auto", "1")
    found = None if strategy is None else strategy_class(strategy, several=several)
    notes: list[str] = []
    if options.nproc == "auto":
        nproc = _automatic(found, loaded, machine, notes)
    else:
        nproc = _number(options.nproc)
        gpus = machine.gpus() if loaded.config.device in ("auto", "cuda") else 0
        if 0 < gpus < nproc:
            raise LaunchError(
                f"--nproc was set to {nproc}, but {gpus} GPUs are visible here",
                hint=f"--nproc {gpus}   or --set device=cpu",
            )
    if found is not None:
        apply_defaults(loaded, nproc)
        found.check(loaded.config, processes=options.nnodes * nproc)
        check_tensor_groups(loaded.config, nodes=options.nnodes, each=nproc)
    return nproc, notes


def _automatic(found: type[Strategy] | None, loaded: LoadedConfig, machine: Machine, notes: list[str]) -> int:
    """``--nproc auto``: one process a GPU, for strategies that take several."""
    if found is not None and found.capabilities.processes == "one":
        return 1
    gpus = machine.gpus() if loaded.config.device in ("auto", "cuda") else 0
    if found is None and gpus > 1:
        notes.append(f"{gpus} GPUs are visible, one process is started: -s ddp takes all of them")
        return 1
    return max(1, gpus)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"--nproc was set to {text!r}; valid: auto, or a number from 1 on", hint="--nproc 2")
    return int(text)


def _check_nodes(options: LaunchOptions, loaded: LoadedConfig) -> None:
    rank = options.node_rank
    if rank is not None and not 0 <= rank < options.nnodes:
        raise LaunchError(
            f"--node-rank was set to {rank}, but --nnodes {options.nnodes} means 0 to {options.nnodes - 1}",
            hint=f"--node-rank {options.nnodes - 1}",
        )
    if options.nnodes == 1:
        return
    if rank is None or options.master_addr is None:
        raise LaunchError(
            f"--nnodes {options.nnodes} was set, so each host must be told its place and where the nodes meet",
            hint="--node-rank 0 --master-addr HOST   on the first host, --node-rank 1 ... on the next",
        )
    if loaded.config.run_dir is None:
        raise ConfigError(
            f"--nnodes {options.nnodes} was set, so the run's folder must be named: its default has the time in it, and "
            "each host would take another one",
            hint="--run-dir runs/NAME   the same on every host",
        )


def _run_dir(wanted: str | None, name: str, machine: Machine) -> Path:
    """An absolute path; a new folder unless one was named."""
    if wanted is not None:
        folder = machine.directory / Path(wanted).expanduser()
        if folder.exists() and not folder.is_dir():
            raise LaunchError(f"run_dir was set to {wanted!r}, which is a file", hint="--run-dir runs/NAME")
        return folder
    stem = machine.directory / "runs" / f"{name}-{machine.now}"
    folder, count = stem, 1
    while not machine.claim(folder):
        count += 1
        folder = stem.with_name(f"{stem.name}-{count}")
    return folder


def _make_folder(folder: Path) -> bool:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise LaunchError(
            f"the run's folder {str(folder)!r} can't be made: {error.strerror}", hint="--run-dir DIR"
        ) from error
    return True


def _environment(machine: Machine, nnodes: int, nproc: int) -> dict[str, str]:
    """Variables to add. What the user has set is left alone, CUDA_VISIBLE_DEVICES in any case."""
    wanted = {"OMP_NUM_THREADS": str(max(1, machine.cores // nproc))}
    if nnodes == 1 and machine.system.startswith("linux"):
        # Gloo and NCCL would listen on the interface of the host's name, where others could connect.
        wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {name: value for name, value in wanted.items() if name not in machine.environ}


def _yaml_text(text: str) -> str:
    """The text as YAML reads it back: quoted where it would mean something else."""
    import json

    return text if re.fullmatch(r"[A-Za-z/][\w./-]*", text) and not _is_word_of_yaml(text) else json.dumps(text)


def _is_word_of_yaml(text: str) -> bool:
    return text.lower() in {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
