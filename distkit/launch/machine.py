"""What a plan depends on besides options and config: this machine, now."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distkit.errors import LaunchError
from distkit.launch.hardware import mpi_version, usable_cores, visible_gpus

__all__ = ["Machine"]


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
