"""Who this process is: ranks and sizes from the variables that launchers set. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distkit.errors import LaunchError

__all__ = ["Environment", "detect_environment"]


@dataclass(frozen=True)
class Environment:
    """The place of one process among all.

    Args:
        rank: 0 <= rank < size, unique over all nodes.
        size: Number of processes in all.
        local_rank: Place inside the node; chooses the device.
        local_size: Processes on this node.
        node_rank: Place of the node among the nodes.
        nodes: Number of nodes.
        source: Which launcher's variables said so; ``none`` for a process that was started alone.
        address: Host where the processes meet, where a variable names one.
        port: Port there.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    source: str = "none"
    address: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        for what, value, size in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if not 0 <= value < size:
                raise LaunchError(
                    f"the {self.source} environment says {what} {value} of {size}, which can't be",
                    hint="start the script with distkit-run, or unset the launcher's variables",
                )


def detect_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables; a process without any is alone.

    The most specific launcher wins: torchrun's variables are there too when torchrun runs under Slurm.

    Args:
        environ: Variables to read; None reads this process's.

    Raises:
        LaunchError: The variables are incomplete or contradict each other.
    """
    env = os.environ if environ is None else environ
    for detect in (_torchrun, _horovod, _open_mpi, _slurm, _hydra):
        found = detect(env)
        if found is not None:
            return found
    return Environment()


def _reader(env: Mapping[str, str], source: str) -> Callable[..., int]:
    def read(*names: str, default: int | None = None) -> int:
        for name in names:
            text = env.get(name)
            if text is not None and text != "":
                try:
                    return int(text)
                except ValueError as error:
                    raise LaunchError(
                        f"{name} was set to {text!r} by {source}, but it takes a whole number", hint=f"unset {name}"
                    ) from error
        if default is None:
            raise LaunchError(
                f"the variables of {source} are incomplete: {' or '.join(names)} is not set",
                hint=f"export {names[0]}=...   or start the script with distkit-run",
            )
        return default

    return read


def _meeting(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = env.get("MASTER_PORT")
    return env.get("MASTER_ADDR"), int(port) if port and port.isdigit() else None


def _torchrun(env: Mapping[str, str]) -> Environment | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    read = _reader(env, "torchrun")
    rank, size = read("RANK"), read("WORLD_SIZE")
    local_size = read("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=size)  # the second of each is DeepSpeed's
    address, port = _meeting(env)
    return Environment(
        rank=rank,
        size=size,
        local_rank=read("LOCAL_RANK", default=rank % local_size),
        local_size=local_size,
        node_rank=read("GROUP_RANK", "CROSS_RANK", default=rank // local_size),
        nodes=read("GROUP_WORLD_SIZE", "CROSS_SIZE", default=-(-size // local_size)),
        source="torchrun",
        address=address,
        port=port,
    )


def _horovod(env: Mapping[str, str]) -> Environment | None:
    if "HOROVOD_RANK" not in env:
        return None
    read = _reader(env, "horovodrun")
    size = read("HOROVOD_SIZE")
    address, port = _meeting(env)
    return Environment(
        rank=read("HOROVOD_RANK"),
        size=size,
        local_rank=read("HOROVOD_LOCAL_RANK"),
        local_size=read("HOROVOD_LOCAL_SIZE"),
        node_rank=read("HOROVOD_CROSS_RANK", default=0),
        nodes=read("HOROVOD_CROSS_SIZE", default=1),
        source="horovodrun",
        address=address,
        port=port,
    )


def _open_mpi(env: Mapping[str, str]) -> Environment | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    read = _reader(env, "Open MPI")
    rank, size = read("OMPI_COMM_WORLD_RANK"), read("OMPI_COMM_WORLD_SIZE")
    local_size = read("OMPI_COMM_WORLD_LOCAL_SIZE", default=size)
    address, port = _meeting(env)
    return Environment(
        rank=rank,
        size=size,
        local_rank=read("OMPI_COMM_WORLD_LOCAL_RANK", default=rank % local_size),
        local_size=local_size,
        node_rank=rank // local_size,
        nodes=-(-size // local_size),
        source="Open MPI",
        address=address,
        port=port,
    )


def _slurm(env: Mapping[str, str]) -> Environment | None:
    """srun's variables; those of the batch script itself (one task, no step) are not a launch."""
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env or env.get("SLURM_STEP_NODELIST") is None:
        return None
    read = _reader(env, "Slurm")
    rank, size = read("SLURM_PROCID"), read("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = read("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    node_rank = read("SLURM_NODEID", default=0)
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
    local_size = counts[node_rank] if node_rank < len(counts) else -(-size // nodes)
    address, port = _meeting(env)
    if port is None and env.get("SLURM_JOB_ID", "").isdigit():
        port = 20000 + int(env["SLURM_JOB_ID"]) % 10000
    return Environment(
        rank=rank,
        size=size,
        local_rank=read("SLURM_LOCALID"),
        local_size=local_size,
        node_rank=node_rank,
        nodes=nodes,
        source="Slurm",
        address=address or _first_host(env.get("SLURM_STEP_NODELIST", "")),
        port=port,
    )


def _hydra(env: Mapping[str, str]) -> Environment | None:
    """MPICH, Intel MPI and others that speak PMI."""
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    read = _reader(env, "PMI")
    rank, size = read("PMI_RANK"), read("PMI_SIZE")
    local_size = read("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", default=size)
    address, port = _meeting(env)
    return Environment(
        rank=rank,
        size=size,
        local_rank=read("MPI_LOCALRANKID", "PMI_LOCAL_RANK", default=rank % local_size),
        local_size=local_size,
        node_rank=rank // local_size,
        nodes=-(-size // local_size),
        source="PMI",
        address=address,
        port=port,
    )


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _first_host(nodelist: str) -> str | None:
    """First host of Slurm's ``node[003-005,9],other``: ``node003``."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]*)\])?([^,]*)", nodelist)
    if match is None:
        return None
    stem, inside, tail = match.groups()
    return stem if inside is None else stem + re.split(r"[,-]", inside)[0] + tail
