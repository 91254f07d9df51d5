"""One file a launcher: how the processes of a run are started."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distkit.launch.launchers.base import Launcher

__all__ = ["LAUNCHERS", "launcher_of"]

LAUNCHERS = {
    "torchrun": "torchrun:TorchrunLauncher",
    "deepspeed": "deepspeed:DeepspeedLauncher",
    "horovodrun": "horovodrun:HorovodrunLauncher",
    "mpirun": "mpirun:MpirunLauncher",
    "slurm": "slurm:SlurmLauncher",
    "kubernetes": "kubernetes:KubernetesLauncher",
    "ray": "ray:RayLauncher",
}
"""Module and class of each, by the name that ``--launcher`` takes."""


def launcher_of(name: str) -> Launcher:
    """The launcher with one of these names."""
    module, _, kind = LAUNCHERS[name].partition(":")
    found: Launcher = getattr(import_module(f"distkit.launch.launchers.{module}"), kind)()
    return found
