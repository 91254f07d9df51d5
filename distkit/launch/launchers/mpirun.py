"""The command that starts a run's processes over MPI: Open MPI's mpirun, or the Hydra of MPICH and Intel MPI."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MpirunCommand", "mpi_version"]


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


@dataclass(frozen=True)
class MpirunCommand:
    """What mpirun's command line depends on.

    Args:
        mpi: Which MPI it is, from :func:`mpi_version`.
        hosts: Names of the hosts; empty is this one.
        nproc: Processes on each host.
        root: Whether the user is root, which Open MPI must be told is meant.
        cpu: Whether the processes compute on the CPU.
        interface: Network interface to use; None lets MPI choose.
        ssh_port: Port of ssh on the other hosts; None is ssh's own.
        ssh_identity: Private key for ssh; None is ssh's own.
        export: Names of variables that the processes on other hosts get too.
        worker: What runs in each process.
    """

    mpi: str
    hosts: Sequence[str]
    nproc: int
    root: bool
    cpu: bool
    interface: str | None
    ssh_port: int | None
    ssh_identity: str | None
    export: Sequence[str]
    worker: Sequence[str]

    def words(self) -> tuple[str, ...]:
        """The command as a list of words."""
        own = self._open_mpi() if self.mpi.startswith("openmpi") else self._hydra()
        return ("mpirun", "-np", str(self.nproc * max(1, len(self.hosts))), *own, *self.worker)

    def environment(self) -> dict[str, str]:
        """Variables for mpirun itself: Hydra takes ssh's options from one."""
        ssh = self._ssh()
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh} if ssh and not self.mpi.startswith("openmpi") else {}

    def _open_mpi(self) -> tuple[str, ...]:
        """Unbound: by default each process is pinned to one core, and torch's threads with it.

        A process that waits in MPI spins; where the cores compute, it must let go of its core (on two busy cores an
        all-reduce takes 3 ms instead of 70).
        """
        places = ",".join(f"{name}:{self.nproc}" for name in self.hosts or ("localhost",))
        network = ("btl_tcp_if_include", "oob_tcp_if_include") if self.interface else ()
        return (
            *(("--allow-run-as-root",) if self.root else ()),
            *("--host", places, "--bind-to", "none", "--map-by", "slot"),
            *(("--mca", "mpi_yield_when_idle", "1") if self.cpu else ()),
            *(word for key in network for word in ("--mca", key, str(self.interface))),
            *(("--mca", "plm_rsh_args", self._ssh()) if self._ssh() else ()),
            *(word for name in self.export for word in ("-x", name)),
        )

    def _hydra(self) -> tuple[str, ...]:
        """Its processes inherit the whole environment, on other hosts too."""
        places = ",".join(f"{name}:{self.nproc}" for name in self.hosts)
        return (
            *(("-hosts", places) if self.hosts else ()),
            *(("-iface", self.interface) if self.interface and self.hosts else ()),
            *(("-bind-to", "none") if self.mpi.startswith("mpich") else ()),
        )

    def _ssh(self) -> str:
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        return shlex.join([*port, *(["-i", self.ssh_identity] if self.ssh_identity else [])])
