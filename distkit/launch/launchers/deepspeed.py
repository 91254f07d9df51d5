"""DeepSpeed's own launcher: over pdsh where that is installed, else its part for one host, started over our ssh."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import StrategyUnavailable
from distkit.launch.launchers.base import ON_HOSTS, Commands, Launcher, Request
from distkit.launch.ssh import check_words

if TYPE_CHECKING:
    from distkit.launch.hosts import Host
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["DeepspeedCommand", "DeepspeedLauncher"]


@dataclass(frozen=True)
class DeepspeedCommand:
    """What DeepSpeed's command lines depend on.

    DeepSpeed puts variables and arguments unquoted into a line for a shell. So its processes read both from a file, the
    order, and nothing of the user's is in that line.

    Args:
        python: The interpreter, the same on all hosts.
        hosts: Devices on each host, by name.
        address: Where the processes meet.
        port: Port there.
        ssh_port: Port of ssh on the other hosts; None is ssh's own.
        order: The file with the worker's arguments and variables.
    """

    python: str
    hosts: Mapping[str, Sequence[int]]
    address: str
    port: int
    ssh_port: int | None
    order: Path

    def over_pdsh(self, hostfile: Path) -> tuple[str, ...]:
        """One command for all hosts.

        Args:
            hostfile: With as many slots for each host as the highest of its devices needs.
        """
        some = "@".join(f"{name}:{','.join(map(str, devices))}" for name, devices in self.hosts.items())
        return (
            *(self.python, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--include", some),
            *("--force_multi", "--launcher", "pdsh", "--launcher_args=-N", "--quiet"),
            *("--master_addr", self.address, "--master_port", str(self.port)),
            *(("--ssh_port", str(self.ssh_port)) if self.ssh_port else ()),
            *self._worker(),
        )

    def on(self, place: int) -> tuple[str, ...]:
        """The command for one host.

        Args:
            place: Its place among the hosts.
        """
        world = {name: list(devices) for name, devices in self.hosts.items()}
        coded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        return (
            *(self.python, "-m", "deepspeed.launcher.launch", f"--world_info={coded}", f"--node_rank={place}"),
            *(f"--master_addr={self.address}", f"--master_port={self.port}", "--quiet"),
            *self._worker(),
        )

    def hostfile(self) -> str:
        """Its text."""
        return "".join(f"{name} slots={max(devices) + 1}\n" for name, devices in self.hosts.items())

    def _worker(self) -> tuple[str, ...]:
        return ("--module", "--no_local_rank", "distkit.launch.worker", "--order", str(self.order))


class DeepspeedLauncher(Launcher):
    """It works with every strategy."""

    name = "deepspeed"
    over_ssh = True
    takes = ON_HOSTS

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; DeepSpeed must be installed."""
        super().check(options, hosts, machine)
        check_words({"--interface": options.interface, "--ssh-identity": options.ssh_identity})
        if find_spec("deepspeed") is None:
            raise StrategyUnavailable(
                "--launcher deepspeed was set, but DeepSpeed is not installed", hint="pip install 'distkit[deepspeed]'"
            )

    def commands(self, request: Request) -> Commands:
        """Attempts, each with files of its own."""
        check_words({"--run-dir": str(request.run_dir)})
        host = request.supervised(self.name, (), request.network(), always_elastic=True, repeats=request.places())
        return Commands((host,))
