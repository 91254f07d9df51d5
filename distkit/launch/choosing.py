"""Which launcher starts the run, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.config.nearest import nearest
from distkit.errors import LaunchError
from distkit.launch.launchers import LAUNCHERS

if TYPE_CHECKING:
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["choose_launcher"]


def choose_launcher(options: LaunchOptions, machine: Machine) -> tuple[str, list[str]]:
    """The launcher's name, and a line that says why if ``auto`` chose it and there was a choice.

    Raises:
        LaunchError: The name isn't one.
    """
    wanted = options.launcher
    if wanted != "auto":
        if wanted not in LAUNCHERS:
            raise LaunchError(
                f"--launcher was set to {wanted!r}; valid: auto, {', '.join(LAUNCHERS)}",
                hint=f"--launcher {nearest(wanted, LAUNCHERS) or 'auto'}",
            )
        return wanted, []
    name, why = _found(options, machine)
    return name, [f"--launcher {name}: {why}"] if why else []


def _found(options: LaunchOptions, machine: Machine) -> tuple[str, str]:
    environ = machine.environ
    for flag, value in (
        ("--hosts", options.hosts),
        ("--hostfile", options.hostfile),
        ("--host-discovery", options.host_discovery),
    ):
        if value is not None:
            return "torchrun", f"{flag} names the hosts, which are started over ssh"
    if options.node_rank is not None or options.meet_at is not None:
        return "torchrun", ""
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "SLURM_SRUN_COMM_HOST" not in environ:
        return "torchrun", ""
    job, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    if job is not None and nodes != "1":
        return "slurm", f"this is Slurm job {job} with {nodes} nodes, whose srun starts the processes"
    if job is not None and options.nnodes > 1:
        return "slurm", f"this is Slurm job {job}"
    if "RAY_ADDRESS" in environ and options.nnodes > 1:
        return "ray", f"RAY_ADDRESS is {environ['RAY_ADDRESS']}"
    return "torchrun", ""
