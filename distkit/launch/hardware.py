"""What this host offers, found without torch: the launcher must not load it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["mpi_version", "usable_cores", "visible_gpus"]

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")


def usable_cores() -> int:
    """CPU cores that this process may use; a batch system may have given it only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs that a process would see.

    Args:
        environ: Variables; CUDA_VISIBLE_DEVICES limits the number. Entries after an invalid one (-1) don't count, as
            in CUDA's own rule (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    present = _installed_gpus()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    count = 0
    for entry in chosen.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return min(count, present)


def _installed_gpus() -> int:
    try:
        return len(list(_NVIDIA_DRIVER.iterdir()))
    except OSError:
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def mpi_version(mpirun: str = "mpirun") -> str | None:
    """``openmpi4.1.4``, ``mpich4.0.2``, ``intelmpi2021.9``, by what the launcher says of itself.

    Returns:
        None if it can't be run; ``mpi`` and the version for one that isn't known.
    """
    try:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"(\d+\.\d+[\w.]*)", said)
    number = found.group(1) if found else ""
    for text, name in (("Open MPI", "openmpi"), ("Intel(R) MPI", "intelmpi"), ("HYDRA", "mpich"), ("mpich", "mpich")):
        if text in said:
            return name + number
    return "mpi" + number
