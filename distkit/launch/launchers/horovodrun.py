"""The command that starts a run's processes over horovodrun and Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HorovodrunCommand"]


@dataclass(frozen=True)
class HorovodrunCommand:
    """What horovodrun's command line depends on.

    Args:
        python: The interpreter, the same on all hosts.
        hosts: Names of the hosts; empty is this one.
        nproc: Processes on each host.
        start_s: Time limit for the processes to meet, in seconds.
        interface: Network interface to use; None lets horovodrun find one.
        ssh_port: Port of ssh on the other hosts; None is ssh's own.
        ssh_identity: Private key for ssh; None is ssh's own.
        worker: What runs in each process.
    """

    python: str
    hosts: Sequence[str]
    nproc: int
    start_s: float
    interface: str | None
    ssh_port: int | None
    ssh_identity: str | None
    worker: Sequence[str]

    def words(self) -> tuple[str, ...]:
        """The command as a list of words.

        The module is named instead of the program ``horovodrun``, so that it runs in this interpreter whatever PATH
        says.
        """
        hosts = ",".join(f"{name}:{self.nproc}" for name in self.hosts or ("localhost",))
        return (
            *(self.python, "-m", "horovod.runner.launch", "--gloo"),
            *("-np", str(self.nproc * max(1, len(self.hosts))), "--hosts", hosts),
            *("--start-timeout", str(max(1, round(self.start_s)))),
            *(("--network-interfaces", self.interface) if self.interface else ()),
            *(("--ssh-port", str(self.ssh_port)) if self.ssh_port else ()),
            *(("--ssh-identity-file", self.ssh_identity) if self.ssh_identity else ()),
            *self.worker,
        )
