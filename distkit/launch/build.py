"""From the command line to the plan: everything is decided here, and what can't work is refused.

:func:`build_plan` is a function of the options, the config file and the :class:`Machine`; nothing is decided later, so
what a dry run prints is what runs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.config.launchline import VARIABLE, LaunchSettings
from distkit.config.naming import run_name
from distkit.config.nearest import nearest
from distkit.errors import ConfigError, LaunchError
from distkit.launch.advised import choose_strategy
from distkit.launch.choosing import choose_launcher
from distkit.launch.exports import exported, exported_names
from distkit.launch.launchers import launcher_of
from distkit.launch.launchers.base import Request, is_elastic
from distkit.launch.placing import hosts_of, nodes_of, processes_on_each
from distkit.launch.plan import HostChecks, LaunchOptions, LaunchPlan
from distkit.logs.trackers import check_trackers

if TYPE_CHECKING:
    from distkit.config import LoadedConfig
    from distkit.launch.hosts import Host
    from distkit.launch.launchers.base import Launcher
    from distkit.launch.machine import Machine
    from distkit.strategies.base import Strategy

__all__ = ["build_plan"]

OPTIONS_BEFORE_SCRIPT = ("-s", "--strategy", "--set", "--nproc", "--nnodes", "--run-dir", "--launcher", "--dry-run")
"""Those that people put in the wrong place."""


def build_plan(options: LaunchOptions, machine: Machine) -> LaunchPlan:
    """Decide everything, and refuse what can't work.

    Raises:
        ConfigError: A setting is unknown, wrong, or can't go with the strategy.
        StrategyUnavailable: The strategy's engine or the launcher isn't installed.
        LaunchError: The script isn't there, or the options don't describe a launch.
    """
    from distkit.config import load_config

    name, notes = choose_launcher(options, machine)
    launcher = launcher_of(name)
    target = _target(options, machine)
    given = _overrides(options)
    config_file = None if options.config is None else str(machine.directory / options.config)
    loaded = load_config(file=config_file, overrides=given)
    options = _launched_by_accelerate(options, loaded)
    options, hosts, said = launcher.fill_in(options, machine)
    hosts = hosts or hosts_of(options, machine)
    launcher.check(options, hosts, machine)
    options = replace(options, nnodes=nodes_of(options, hosts), nproc=processes_on_each(options, hosts))
    if loaded.config.strategy == "auto":
        chosen = choose_strategy(options, loaded, given, machine, target)
        given, notes = [*given, *chosen.overrides], [*notes, *chosen.notes]
        loaded = load_config(file=config_file, overrides=given)
    strategy = loaded.config.strategy if loaded.origins["strategy"] != "default" else None
    nproc, about = _processes(
        options, loaded, strategy, replace(machine, gpus=lambda: 0) if launcher.elsewhere else machine
    )
    notes = [*notes, *said, *about, *_misplaced(options), *_without_checkpoints(options, loaded)]
    _check_folder(options, loaded, hosts)
    title = run_name(loaded.config.name, target, module=options.module)
    check_trackers(loaded.config.log.to)
    run_dir = _run_dir(loaded.config.run_dir, title, machine)
    settings = LaunchSettings(
        config=config_file,
        overrides=[*given, f"run_dir={_yaml_text(str(run_dir))}"],
        launcher=name,
        preview=dict(options.preview),
    )
    request = Request(
        options=options,
        machine=machine,
        hosts=hosts,
        name=title,
        target=target,
        run_dir=run_dir,
        strategy=strategy,
        nnodes=options.nnodes,
        nproc=nproc,
        start_s=loaded.config.timeouts.start_s,
        grace_s=loaded.config.timeouts.grace_s,
        step_s=loaded.config.timeouts.step_s,
        environment={VARIABLE: settings.to_json(), **_environment(options, hosts, loaded, machine, nproc)},
        requeue=loaded.config.checkpoint.requeue,
        device=loaded.config.device,
    )
    commands = launcher.commands(request)
    return LaunchPlan(
        strategy,
        options.nnodes,
        nproc,
        str(run_dir),
        settings,
        commands.hosts,
        (*notes, *commands.notes),
        commands.files,
        tuple(host.name for host in hosts),
        _checks(options, launcher, hosts, loaded, machine, target),
        exported(machine.environ, exported_names(machine.environ, (), options.export)) if hosts else {},
    )


def _checks(
    options: LaunchOptions,
    launcher: Launcher,
    hosts: tuple[Host, ...],
    loaded: LoadedConfig,
    machine: Machine,
    target: str,
) -> HostChecks | None:
    """What hosts that are started over ssh must have."""
    if not hosts or "ssh_port" not in launcher.takes:
        return None
    device = loaded.config.device
    return HostChecks(
        directory=str(machine.directory),
        target=None if options.module else target,
        cuda=device == "cuda" or (device == "auto" and machine.gpus() > 0),
        least=options.min_nodes or len(hosts),
        interface=options.interface,
        ssh_port=options.ssh_port,
        ssh_identity=options.ssh_identity,
        ssh_options=options.ssh_options,
    )


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


def _without_checkpoints(options: LaunchOptions, loaded: LoadedConfig) -> list[str]:
    checkpoint = loaded.config.checkpoint
    if not is_elastic(options) or checkpoint.every_steps is not None or checkpoint.every_seconds is not None:
        return []
    return ["no checkpoint.every_steps is set: after a failure the run goes on from its start"]


def _check_folder(options: LaunchOptions, loaded: LoadedConfig, hosts: tuple[Host, ...]) -> None:
    """Hosts that are started by hand must be told the same folder."""
    by_hand = options.node_rank is not None or options.meet_at is not None
    if by_hand and (options.nnodes > 1 or options.meet_at is not None) and loaded.config.run_dir is None:
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


def _environment(
    options: LaunchOptions, hosts: tuple[Host, ...], loaded: LoadedConfig, machine: Machine, nproc: int
) -> dict[str, str]:
    """Variables to add. What the user has set is left alone, CUDA_VISIBLE_DEVICES in any case."""
    wanted = {"OMP_NUM_THREADS": str(max(1, machine.cores // nproc))}
    alone = options.nnodes == 1 and not hosts and options.host_discovery is None and options.meet_at is None
    if alone and machine.system.startswith("linux"):
        # Gloo and NCCL would listen on the interface of the host's name, where others could connect.
        wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    gpus = loaded.accelerate.launch.gpus if loaded.accelerate and loaded.accelerate.launch else None
    if gpus is not None:
        wanted["CUDA_VISIBLE_DEVICES"] = gpus
    return {name: value for name, value in wanted.items() if name not in machine.environ}


def _yaml_text(text: str) -> str:
    """The text as YAML reads it back: quoted where it would mean something else."""
    import json

    return text if re.fullmatch(r"[A-Za-z/][\w./-]*", text) and not _is_word_of_yaml(text) else json.dumps(text)


def _is_word_of_yaml(text: str) -> bool:
    return text.lower() in {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
