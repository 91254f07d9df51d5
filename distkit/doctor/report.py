"""What is on this machine that training needs: one line each, with the line that mends what is missing."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        what: Its name.
        found: What is there; empty when nothing is.
        mend: The line that installs it.
    """

    what: str
    found: str
    mend: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine() -> Iterator[Finding]:
    """Look at interpreter, torch, devices, engines, launchers and compilers; nothing is started or changed.

    GPUs are counted without torch, which would need seconds.
    """
    import os

    from distkit.launch.hardware import mpi_version, usable_cores, visible_gpus

    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("torch", _version("torch"), "pip install torch")
    yield Finding("devices", f"{usable_cores()} CPU cores, {visible_gpus(os.environ)} GPUs")
    yield from _engines()
    mpi = mpi_version() if shutil.which("mpirun") else None
    yield Finding("mpirun", mpi or "", "apt-get install openmpi-bin libopenmpi-dev")
    for program, mend in (("horovodrun", "distkit doctor --install horovod"), ("c++", "apt-get install g++"),
                          ("ninja", "pip install ninja"), ("ssh", "apt-get install openssh-client")):  # fmt: skip
        yield Finding(program, shutil.which(program) or _beside_python(program), mend)


def _engines() -> Iterator[Finding]:
    from distkit.strategies.registry import BUILT_IN, strategy_class

    mends: dict[str, str] = {}
    for name in BUILT_IN:
        can = strategy_class(name).capabilities
        for library in (can.engine, can.layers):
            if library:
                mends.setdefault(library, can.install)
    for engine, mend in mends.items():
        yield Finding(engine, _version(engine), mend)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _beside_python(program: str) -> str:
    """In the environment's own folder of programs, which need not be in the path."""
    from pathlib import Path

    path = Path(sys.executable).with_name(program)
    return str(path) if path.exists() else ""
