"""The command that starts a host's processes over torchrun's own agent, with torchrun's own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostCommand"]


@dataclass(frozen=True)
class HostCommand:
    """What the command line of one host depends on.

    Args:
        python: The interpreter.
        run_dir: The run's folder, absolute.
        name: Name of the run, the id under which nodes meet.
        nodes: Number of hosts.
        node_rank: Place of this host.
        processes: Number of processes on this host.
        address: Host name or address where the nodes meet; None on one host.
        port: Port there.
        max_restarts: How often all workers are started again after a failure.
        start_s: Time limit for the nodes to meet, in seconds.
        grace_s: Time between asking workers to end and killing them, in seconds.
        output: Which ranks show their output: main or all.
        target: The script's absolute path, or the module's name.
        module: Whether ``target`` is a module.
        arguments: The script's own arguments.
    """

    python: str
    run_dir: Path
    name: str
    nodes: int
    node_rank: int
    processes: int
    address: str | None
    port: int | None
    max_restarts: int
    start_s: float
    grace_s: float
    output: str
    target: str
    module: bool
    arguments: Sequence[str]

    def words(self) -> tuple[str, ...]:
        """The command as a list of words, for exec: no shell reads it."""
        meeting = ["--standalone"]
        if self.nodes > 1:
            meeting = ["--node-rank", str(self.node_rank)]
            meeting += ["--master-addr", str(self.address), "--master-port", str(self.port)]
        return (
            *(self.python, "-m", "distkit.launch.agent"),
            *("--run-dir", str(self.run_dir), "--grace-s", f"{self.grace_s:g}"),
            *("--nnodes", str(self.nodes), "--nproc-per-node", str(self.processes)),
            *("--max-restarts", str(self.max_restarts)),
            *meeting,
            *("--rdzv-id", self.name, "--rdzv-conf", f"timeout={max(1, round(self.start_s))}"),
            *("-m", "distkit.launch.worker", "--run-dir", str(self.run_dir), "--output", self.output),
            *(("-m",) if self.module else ()),
            self.target,
            *self.arguments,
        )
