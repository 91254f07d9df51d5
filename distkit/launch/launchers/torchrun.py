"""The command that starts a host's processes over torchrun's own agent, with torchrun's own arguments.

Several hosts are started from one over ssh, or by hand on each; those by hand are a fixed set, each with its place, or
meet at an endpoint, in any number between two (torchrun's c10d rendezvous).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.errors import LaunchError
from distkit.launch.launchers.base import FLAGS, JOB_HINT, ON_HOSTS, Commands, Launcher, Request
from distkit.launch.ports import derive_port

if TYPE_CHECKING:
    from distkit.launch.hosts import Host
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["HostCommand", "TorchrunLauncher"]


@dataclass(frozen=True)
class HostCommand:
    """What the command line of one host depends on.

    Args:
        python: The interpreter.
        run_dir: The run's folder, absolute.
        name: Name of the run, the id under which nodes meet.
        nodes: Number of hosts.
        processes: Number of processes on this host.
        start_s: Time limit for the nodes to meet, in seconds.
        grace_s: Time between asking workers to end and killing them, in seconds.
        step_s: Time limit of a collective, in seconds.
        worker: What each process runs, behind the interpreter.
        node_rank: Place of this host.
        address: Host name or address where the nodes meet; None on one host.
        port: Port there.
        max_restarts: How often all workers are started again after a failure.
        min_nodes: Fewest hosts, for those that meet at an endpoint.
        endpoint: ``HOST:PORT`` for them; None for a fixed set.
        hand_over: Whether failures are told to whoever started this host, who makes one report of all hosts'.
    """

    python: str
    run_dir: Path
    name: str
    nodes: int
    processes: int
    start_s: float
    grace_s: float
    step_s: float
    worker: Sequence[str]
    node_rank: int | None = 0
    address: str | None = None
    port: int | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    endpoint: str | None = None
    hand_over: bool = False

    def words(self) -> tuple[str, ...]:
        """The command as a list of words, for exec: no shell reads it."""
        nodes, conf = str(self.nodes), f"timeout={max(1, round(self.start_s))}"
        meeting = ["--standalone"]
        if self.endpoint is not None:
            nodes = nodes if self.min_nodes is None else f"{self.min_nodes}:{nodes}"
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
            conf = f"join_{conf}"
        elif self.nodes > 1:
            meeting = ["--node-rank", str(self.node_rank)]
            meeting += ["--master-addr", str(self.address), "--master-port", str(self.port)]
        return (
            *(self.python, "-m", "distkit.launch.agent"),
            *("--run-dir", str(self.run_dir), "--grace-s", f"{self.grace_s:g}"),
            *("--step-s", f"{self.step_s:g}"),
            *(("--hand-over",) if self.hand_over else ()),
            *("--nnodes", nodes, "--nproc-per-node", str(self.processes)),
            *("--max-restarts", str(self.max_restarts)),
            *meeting,
            *("--rdzv-id", self.name, "--rdzv-conf", conf),
            *self.worker,
        )


class TorchrunLauncher(Launcher):
    """Our agent over torchrun's."""

    name = "torchrun"
    takes = frozenset(FLAGS) - {"job"}
    instead = JOB_HINT

    def check(self, options: LaunchOptions, hosts: Sequence[Host], machine: Machine) -> None:
        """As the base says; and the hosts must be started in one way of the three."""
        super().check(options, hosts, machine)
        by_hand = {"node_rank", "master_addr", "meet_at"}
        if hosts or options.host_discovery is not None:
            _refuse(options, by_hand, "the hosts that are named are started from this one", "leave it out")
            return
        _refuse(options, ON_HOSTS - {"min_nodes"}, "no other hosts are named", "--hosts H0,H1   or --hostfile F")
        if options.meet_at is not None:
            _refuse(
                options,
                {"node_rank", "master_addr"},
                "hosts that meet at an endpoint find their places",
                "leave it out",
            )
            address, _, port = options.meet_at.rpartition(":")
            if not address or address.split() != [address] or not port.isdecimal() or not 0 < int(port) < 65536:
                raise LaunchError(
                    f"--meet-at was set to {options.meet_at!r}; valid: HOST:PORT, with a port from 1 to 65535",
                    hint="--meet-at host0:29400",
                )
        elif options.min_nodes is not None:
            raise LaunchError(
                f"--nnodes {options.min_nodes}:{options.nnodes} was set, but not which hosts these are or where they meet",
                hint="--hostfile F   starts them from here; --meet-at host0:29400   is for hosts that you start yourself",
            )
        elif options.nnodes > 1:
            _check_place(options)

    def fill_in(self, options: LaunchOptions, machine: Machine) -> tuple[LaunchOptions, tuple[Host, ...], list[str]]:
        """Kubeflow and others say number, place and meeting point in torchrun's own variables, PET_*."""
        said = {
            name: machine.environ.get(f"PET_{name}") for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        named = options.hosts or options.hostfile or options.host_discovery or options.meet_at or options.min_nodes
        if named or options.node_rank is not None or not (said["NNODES"] or "").isdecimal() or said["NNODES"] == "1":
            return options, (), []
        nnodes = int(str(said["NNODES"]))
        if options.nnodes not in (1, nnodes):
            raise LaunchError(
                f"--nnodes was set to {options.nnodes}, but PET_NNODES says {nnodes}", hint=f"--nnodes {nnodes}"
            )
        rank, port = said["NODE_RANK"] or "", said["MASTER_PORT"] or ""
        each = machine.environ.get("PET_NPROC_PER_NODE", "")
        options = replace(
            options,
            nnodes=nnodes,
            node_rank=int(rank) if rank.isdecimal() else None,
            master_addr=options.master_addr or said["MASTER_ADDR"],
            master_port=options.master_port or (int(port) if port.isdecimal() else None),
            nproc=each if options.nproc == "auto" and each.isdecimal() else options.nproc,
        )
        return options, (), ["number of nodes, place and meeting point by the variables PET_*"]

    def commands(self, request: Request) -> Commands:
        """The agent here; or what starts one on each host."""
        options = request.options
        if request.hosts or options.host_discovery is not None:
            return self._on_hosts(request)
        command = HostCommand(
            python=request.machine.python,
            run_dir=request.run_dir,
            name=request.name,
            nodes=request.nnodes,
            processes=request.nproc,
            start_s=request.start_s,
            grace_s=request.grace_s,
            step_s=request.step_s,
            worker=request.worker,
            node_rank=options.node_rank or 0,
            address=options.master_addr,
            port=options.master_port or derive_port(request.name),
            max_restarts=options.max_restarts,
            min_nodes=options.min_nodes,
            endpoint=options.meet_at,
        )
        host = replace(request.here(command.words()), node_rank=options.node_rank or 0)
        notes: tuple[str, ...] = ()
        if options.meet_at is not None:
            notes = (f"meeting at {options.meet_at}",)
        elif request.nnodes > 1:
            notes = (f"node {host.node_rank} of {request.nnodes}, meeting at {command.address}:{command.port}",)
        return Commands((host,), notes=notes)

    def _on_hosts(self, request: Request) -> Commands:
        options = request.options
        network = {} if options.interface is None else request.network()
        host = request.supervised(self.name, (), network, always_elastic=True, repeats=request.places())
        return Commands((host,))


def _refuse(options: LaunchOptions, fields: frozenset[str] | set[str], because: str, hint: str) -> None:
    for field in sorted(fields):
        if getattr(options, field) not in (None, ()):
            raise LaunchError(f"{FLAGS[field]} was set, but {because}", hint=hint)


def _check_place(options: LaunchOptions) -> None:
    rank = options.node_rank
    if rank is not None and not 0 <= rank < options.nnodes:
        raise LaunchError(
            f"--node-rank was set to {rank}, but --nnodes {options.nnodes} means 0 to {options.nnodes - 1}",
            hint=f"--node-rank {options.nnodes - 1}",
        )
    if rank is None or options.master_addr is None:
        raise LaunchError(
            f"--nnodes {options.nnodes} was set, so each host must be told its place and where the nodes meet",
            hint="--hostfile F   starts all hosts from here; else --node-rank 0 --master-addr HOST   on the first host, "
            "--node-rank 1 ... on the next",
        )
