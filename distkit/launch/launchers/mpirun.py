"""The command that starts a run's processes over MPI: Open MPI's mpirun, or the Hydra of MPICH and Intel MPI."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkit.errors import StrategyUnavailable
from distkit.launch.exports import exported_names
from distkit.launch.launchers.base import ON_HOSTS, Commands, Launcher, Request
from distkit.launch.ssh import SshOptions, check_words

if TYPE_CHECKING:
    from distkit.launch.hosts import Host
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["MpirunCommand", "MpirunLauncher"]


@dataclass(frozen=True)
class MpirunCommand:
    """What mpirun's command line depends on.

    Args:
        mpi: Which MPI it is, from :func:`distkit.launch.hardware.mpi_version`.
        hosts: Names of the hosts; empty is this one.
        nproc: Processes on each host.
        root: Whether the user is root, which Open MPI must be told is meant.
        cpu: Whether the processes compute on the CPU.
        interface: Network interface to use; None lets MPI choose.
        ssh: Options of ssh to the other hosts.
        export: Names of variables that the processes on other hosts get too.
        worker: What runs in each process.
    """

    mpi: str
    hosts: Sequence[str]
    nproc: int
    root: bool
    cpu: bool
    interface: str | None
    ssh: SshOptions
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
        return shlex.join(self.ssh.words())


class MpirunLauncher(Launcher):
    """Open MPI's mpirun, or Hydra; it works with every strategy."""

    name = "mpirun"
    over_ssh = True
    takes = ON_HOSTS

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; mpirun must be there."""
        super().check(options, hosts, machine)
        check_words({"--interface": options.interface, "--ssh-identity": options.ssh_identity})
        if machine.mpi() is None:
            raise StrategyUnavailable(
                "--launcher mpirun was set, but mpirun is not there",
                hint="apt-get install openmpi-bin libopenmpi-dev   (or: module load openmpi), or --launcher torchrun",
            )

    def commands(self, request: Request) -> Commands:
        """mpirun under our supervision."""
        options, machine = request.options, request.machine
        local = not request.hosts and machine.system.startswith("linux")
        environment = request.meeting()
        command = MpirunCommand(
            mpi=machine.mpi() or "mpi",
            hosts=[host.name for host in request.hosts],
            nproc=request.nproc,
            root=machine.root,
            cpu=machine.gpus() == 0,
            interface=options.interface or ("lo" if local else None),
            ssh=SshOptions(options.ssh_port, options.ssh_identity, options.ssh_options),
            export=exported_names(machine.environ, [*request.environment, *environment], options.export),
            worker=(machine.python, *request.worker),
        )
        return Commands((request.supervised(self.name, command.words(), {**environment, **command.environment()}),))
