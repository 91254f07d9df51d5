"""Slurm: srun inside an allocation; outside of one a job file, which is submitted."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.config.nearest import nearest
from distkit.errors import LaunchError
from distkit.launch.hosts import Host
from distkit.launch.launchers.base import Commands, Launcher, Request
from distkit.launch.plan import PlannedFile
from distkit.masking import mask_arguments

if TYPE_CHECKING:
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["SlurmLauncher", "SrunCommand", "job_settings", "step_command"]

_FLAGS = frozenset(("exclusive", "requeue", "no-requeue", "spread-job", "oversubscribe"))
_KEYS = _FLAGS | frozenset(
    [
        "account",
        "array",
        "begin",
        "clusters",
        "comment",
        "constraint",
        "cpus-per-gpu",
        "cpus-per-task",
        "dependency",
        "distribution",
        "error",
        "exclude",
        "gpus",
        "gpus-per-node",
        "gpus-per-task",
        "gres",
        "hint",
        "job-name",
        "licenses",
        "mail-type",
        "mail-user",
        "mem",
        "mem-per-cpu",
        "mem-per-gpu",
        "network",
        "nice",
        "nodelist",
        "output",
        "partition",
        "prefer",
        "priority",
        "qos",
        "reservation",
        "signal",
        "switches",
        "time",
        "time-min",
        "tmp",
        "wait-all-nodes",
        "wckey",
    ]
)
"""Long options of sbatch that a job may need (sbatch's manual page, Slurm 22.05 to 25.05)."""

_OURS = {"nodes": "--nnodes", "ntasks-per-node": "--nproc", "ntasks": "--nnodes and --nproc", "export": "--export"}
"""Those that distkit-run says itself."""

_WARN_S = 30
"""So much earlier than the grace time before its limit the job is warned, in seconds."""


@dataclass(frozen=True)
class SrunCommand:
    """What srun's command line depends on.

    Args:
        nodes: Number of hosts.
        nproc: Processes on each.
        cpus: CPU cores for each process; None leaves it to Slurm.
        hosts: Names of the hosts; empty leaves the choice to Slurm.
        gpus: Whether the job has GPUs: each process sees all of its host, and takes the one with its local rank.
        worker: What runs in each process.
    """

    nodes: int
    nproc: int
    cpus: int | None
    hosts: Sequence[str]
    gpus: bool
    worker: Sequence[str]

    def words(self) -> tuple[str, ...]:
        """The command as a list of words."""
        return (
            *("srun", "--nodes", str(self.nodes), "--ntasks", str(self.nodes * self.nproc)),
            *("--ntasks-per-node", str(self.nproc), "--kill-on-bad-exit=1", "--export=ALL"),
            *(("--cpus-per-task", str(self.cpus)) if self.cpus else ()),
            *(("--nodelist", ",".join(self.hosts)) if self.hosts else ()),
            *(("--gpu-bind=none",) if self.gpus else ()),
            *self.worker,
        )


class SlurmLauncher(Launcher):
    """In an allocation the processes are tasks of one step; outside a job is written that does the same."""

    name = "slurm"
    takes = frozenset(("job", "interface"))
    instead = "leave it out: Slurm chooses the hosts (--job nodelist=H0,H1) and passes variables on"

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; and what is for sbatch must be known to it."""
        super().check(options, hosts, machine)
        settings = job_settings(options.job)
        if settings and "SLURM_JOB_ID" in machine.environ:
            raise LaunchError(
                f"--job {options.job[0]} was set, but this is Slurm job {machine.environ['SLURM_JOB_ID']} already",
                hint="leave --job out; it is for jobs that distkit-run writes",
            )

    def fill_in(self, options: LaunchOptions, machine: Machine) -> tuple[LaunchOptions, tuple[Host, ...], list[str]]:
        """Nodes and processes from the allocation."""
        if "SLURM_JOB_ID" not in machine.environ:
            return options, (), []
        facts = _Allocation.of(machine.environ)
        options, notes = facts.compare(options)
        return options, tuple(Host(name) for name in facts.hosts[: options.nnodes]), notes

    def commands(self, request: Request) -> Commands:
        """srun here, or a job file and sbatch."""
        if "SLURM_JOB_ID" in request.machine.environ:
            return self._step(request)
        return self._job(request)

    def _step(self, request: Request) -> Commands:
        names = [host.name for host in request.hosts]
        words = step_command(request.machine.environ, names, request.nproc, (request.machine.python, *request.worker))
        host = request.supervised(self.name, words, request.meeting())
        return Commands((host,))

    def _job(self, request: Request) -> Commands:
        folder = Path(request.run_dir, "launch")
        path = folder / "job.sbatch"
        text = _job_text(request, folder)
        host = replace(request.here(("sbatch", str(path))), environment={})
        return Commands((host,), (PlannedFile(str(path), text),), (f"job file {path}",))


def step_command(
    environ: Mapping[str, str], hosts: Sequence[str], nproc: int, worker: Sequence[str]
) -> tuple[str, ...]:
    """srun's command line for hosts of this allocation.

    Args:
        environ: Variables of a process in it.
        hosts: Names of the hosts.
        nproc: Processes on each.
        worker: What runs in each process.
    """
    facts = _Allocation.of(environ)
    return SrunCommand(
        nodes=len(hosts),
        nproc=nproc,
        cpus=facts.cpus and max(1, facts.cpus // nproc),
        hosts=hosts if len(hosts) < facts.nodes else (),
        gpus=facts.gpus,
        worker=worker,
    ).words()


@dataclass(frozen=True)
class _Allocation:
    """What Slurm gave this job.

    Args:
        job: Its number.
        nodes: Number of hosts.
        hosts: Their names.
        tasks: Tasks on each host, if the job says so.
        cpus: CPU cores on each host, the fewest.
        gpus: Whether there are GPUs.
    """

    job: str
    nodes: int
    hosts: tuple[str, ...]
    tasks: int | None
    cpus: int | None
    gpus: bool

    @classmethod
    def of(cls, environ: Mapping[str, str], ask: Callable[[str], tuple[str, ...]] | None = None) -> _Allocation:
        nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
        tasks = environ.get("SLURM_NTASKS_PER_NODE", "")
        cpus = [int(part.partition("(")[0]) for part in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(",") if part]
        return cls(
            job=environ["SLURM_JOB_ID"],
            nodes=int(nodes),
            hosts=(ask or _host_names)(environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")),
            tasks=int(tasks) if tasks.isdecimal() else None,
            cpus=min(cpus, default=None),
            gpus=any(environ.get(name) for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
        )

    def compare(self, options: LaunchOptions) -> tuple[LaunchOptions, list[str]]:
        """The options, completed; an error where they ask for what isn't there."""
        asked, notes = options.nnodes, []
        if asked > self.nodes:
            raise LaunchError(
                f"--nnodes was set to {asked}, but Slurm job {self.job} has {self.nodes} nodes ({', '.join(self.hosts)})",
                hint=f"--nnodes {self.nodes}   or sbatch --nodes={asked}",
            )
        if 1 < asked < self.nodes:
            notes.append(f"{asked} of the {self.nodes} nodes of Slurm job {self.job} are used")
        nproc = options.nproc
        if nproc == "auto" and self.tasks is not None:
            nproc = str(self.tasks)
        if nproc.isdecimal():
            if self.tasks is not None and int(nproc) != self.tasks:
                raise LaunchError(
                    f"--nproc was set to {nproc}, but Slurm job {self.job} has {self.tasks} tasks on each node",
                    hint=f"--nproc {self.tasks}   or sbatch --ntasks-per-node={nproc}",
                )
            if self.cpus is not None and int(nproc) > self.cpus:
                raise LaunchError(
                    f"--nproc was set to {nproc}, but Slurm job {self.job} has {self.cpus} CPU cores on each node",
                    hint=f"--nproc {self.cpus}   or sbatch --ntasks-per-node={nproc}",
                )
        return replace(options, nnodes=self.nodes if asked == 1 else asked, nproc=nproc), notes


def _host_names(text: str) -> tuple[str, ...]:
    """``host[0-1]`` is host0 and host1; Slurm itself knows best.

    Raises:
        LaunchError: It can't be asked.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"scontrol couldn't be asked for the hosts {text!r} of this job: {error}",
            hint="PATH must have Slurm's programs in it",
        ) from error
    return tuple(done.stdout.split())


def job_settings(texts: Sequence[str]) -> dict[str, str]:
    """``--job KEY=VALUE`` as options of sbatch.

    Returns:
        Values by long option; an empty one is an option without a value.

    Raises:
        LaunchError: sbatch has no such option, or `distkit-run` says it itself.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().lstrip("-").replace("_", "-")
        if key in _OURS:
            raise LaunchError(f"--job {text} was set, but {_OURS[key]} says it", hint=f"{_OURS[key]} ...")
        if key not in _KEYS:
            near = nearest(key, sorted(_KEYS))
            raise LaunchError(
                f"--job {text} was set, but sbatch has no option --{key}", hint=f"--job {near or 'time'}=..."
            )
        if not value and key not in _FLAGS:
            raise LaunchError(f"--job {text} was set, but --{key} needs a value", hint=f"--job {key}=...")
        if re.search(r"[\n\r\"'\\]", value):
            raise LaunchError(
                f"--job {text!r} was set; no value of sbatch has quotes or lines", hint=f"--job {key}=..."
            )
        found[key] = value
    return found


def _job_text(request: Request, folder: Path) -> str:
    """The job file."""
    settings = job_settings(request.options.job)
    array = "array" in settings
    wanted = {
        "job-name": request.name,
        "nodes": str(request.nnodes),
        "ntasks-per-node": str(request.nproc),
        "output": str(folder / ("slurm-%A_%a.out" if array else "slurm-%j.out")),
        "open-mode": "append",
        "signal": f"USR1@{round(request.grace_s) + _WARN_S}",
        **({"requeue": ""} if request.requeue and "no-requeue" not in settings else {}),
        **settings,
    }
    lines = [f"#SBATCH --{key}={_quoted(value)}" if value else f"#SBATCH --{key}" for key, value in wanted.items()]
    words = request.again(("--launcher", "slurm"))
    shown = mask_arguments(words)
    secret = next((place for place, word in enumerate(words) if shown[place] != word), None)
    if secret is not None:
        raise LaunchError(
            f"{' '.join(shown[max(0, secret - 1) : secret + 1])} would stand in the job file, where others may read it",
            hint="export it as a variable, and set KEY='${oc.env:VARIABLE}'; sbatch passes variables on",
        )
    place = shlex.quote(str(request.run_dir))
    if array:
        place += '/task-"$SLURM_ARRAY_TASK_ID"'
    line = shlex.join(words).replace(request.RUN_DIR, place)
    own = [f"# Written by distkit-run; each attempt goes on from the newest checkpoint in {request.run_dir}."]
    return "\n".join(
        ["#!/bin/bash", *lines, "", *own, f"cd {shlex.quote(str(request.machine.directory))} || exit 1", line, ""]
    )


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s|#", value) else value
