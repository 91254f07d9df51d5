"""The command that runs an agent on each of several nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distkit.errors import LaunchError, StrategyUnavailable
from distkit.launch.exports import exported_names
from distkit.launch.launchers.base import Commands, Launcher, Request
from distkit.launch.launchers.job import job_settings, whole_number

if TYPE_CHECKING:
    from distkit.launch.hosts import Host
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["RayLauncher"]

KEYS = ("address", "cpus", "gpus")
"""What ``--job`` takes."""


class RayLauncher(Launcher):
    """A driver on this host; the nodes are Ray's."""

    name = "ray"
    takes = frozenset(("job", "export", "interface"))
    instead = "leave it out: the Ray cluster chooses the nodes"
    elsewhere = True

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; and Ray must be there, and ``--job`` be right."""
        super().check(options, hosts, machine)
        said = job_settings(options.job, KEYS, self.name)
        if "cpus" in said:
            whole_number("cpus", said["cpus"])
        if said.get("gpus", "0") != "0":
            whole_number("gpus", said["gpus"])
        if "://" in said.get("address", ""):
            raise LaunchError(
                f"--job address was set to {said['address']!r}, but distkit-run must run on a host of the cluster",
                hint="--job address=HOST:PORT   there, with the port of ray start (6379)",
            )
        if find_spec("ray") is None:
            raise StrategyUnavailable(
                "--launcher ray was set, but Ray is not installed", hint="pip install 'distkit[ray]'"
            )

    def fill_in(self, options: LaunchOptions, machine: Machine) -> tuple[LaunchOptions, tuple[Host, ...], list[str]]:
        """``--nproc auto`` is a process for each GPU that is asked for on a node."""
        gpus = job_settings(options.job, KEYS, self.name).get("gpus", "0")
        if options.nproc == "auto":
            options = replace(options, nproc=gpus if gpus != "0" else "1")
        return options, (), []

    def commands(self, request: Request) -> Commands:
        """The driver's command line."""
        options, machine = request.options, request.machine
        said = job_settings(options.job, KEYS, self.name)
        address = said.get("address") or machine.environ.get("RAY_ADDRESS") or "auto"
        cpus = int(said.get("cpus", request.nproc))
        added = request.network()
        if "OMP_NUM_THREADS" not in machine.environ:
            added["OMP_NUM_THREADS"] = str(max(1, cpus // request.nproc))
        # Ray numbers the devices of each actor itself.
        names = exported_names(machine.environ, {**request.environment, **added}, options.export)
        export = ",".join(name for name in names if name != "CUDA_VISIBLE_DEVICES" or name in options.export)
        words = (
            *(machine.python, "-m", "distkit.launch.ray_driver", "--run-dir", str(request.run_dir)),
            *("--name", request.name, "--address", address),
            *("--nnodes", str(request.nnodes), "--nproc", str(request.nproc), "--cpus", str(cpus)),
            *("--gpus", said.get("gpus", "0" if request.device == "cpu" else "auto")),
            *("--max-restarts", str(options.max_restarts)),
            *("--grace-s", f"{request.grace_s:g}", "--start-s", f"{request.start_s:g}"),
            *("--step-s", f"{request.step_s:g}"),
            *(("--master-port", str(options.master_port)) if options.master_port else ()),
            *("--export", export, "--", *request.worker),
        )
        return Commands((request.here(words, added),), notes=(f"on the Ray cluster at {address}",))
