"""Joining the processes of a run through Horovod, whoever started them.

horovodrun and mpirun bring all that ``hvd.init()`` needs. For processes of torchrun or Slurm, rank 0 runs Horovod's
rendezvous server itself, and its port travels through the store in which torch's processes meet.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distkit.config import Config
from distkit.errors import LaunchError, StrategyUnavailable
from distkit.world.environment import Environment

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from distkit.world import World

__all__ = ["INSTALL", "connect_horovod"]

INSTALL = "python -m distkit.doctor.horovod_build   (in a checkout: scripts/install-horovod)"

_MPI = ("Open MPI", "PMI")
"""Environments in which the processes can meet through MPI."""

_PLACE, _SERVER = "distkit/horovod/place", "distkit/horovod/server"
_LOOPBACK = "127.0.0.1"


def connect_horovod(environment: Environment, config: Config, variables: dict[str, str], sets: Sequence[Any]) -> World:
    """A World over Horovod alone; no process group of torch is made.

    Args:
        environment: From the launcher's variables.
        config: ``device`` and ``timeouts`` are used.
        variables: Horovod's own variables for this run; those that are set already win.
        sets: Process sets (``hvd.ProcessSet``) to register.

    Raises:
        StrategyUnavailable: Horovod can't be loaded, or is built without what is needed here.
        LaunchError: The processes don't find each other.
    """
    hvd = import_horovod()
    from distkit.strategies.horovod_collectives import HorovodCollectives, Operations
    from distkit.world.device import choose_device
    from distkit.world.world import World

    device = choose_device(config.device, environment.local_rank, environment.size)
    _check_build(hvd, environment, device)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(config.timeouts.start_s)))
    server = None
    if environment.source in _MPI:
        os.environ.update(HOROVOD_CONTROLLER="mpi", HOROVOD_CPU_OPERATIONS="mpi")
    elif environment.source != "horovodrun":
        os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
        if environment.source != "none":
            server = _meet(environment, config.timeouts.start_s)
    try:
        hvd.init(process_sets=list(sets))
    except ValueError as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.size} didn't meet the others through Horovod within "
            f"timeouts.start_s={config.timeouts.start_s:g}",
            hint="were all processes started? HOROVOD_LOG_LEVEL=debug   shows what it waits for",
        ) from error
    _check_places(hvd, environment)

    def leave() -> None:
        hvd.shutdown()
        if server is not None:
            server.stop()

    if server is not None:
        server.met()
    collectives = HorovodCollectives(Operations(config.timeouts.step_s), leave)
    controller = "mpi" if hvd.mpi_enabled() else "gloo"
    return World(environment, device, collectives, backend=f"horovod over {controller}")


def import_horovod() -> Any:
    """``horovod.torch``.

    Raises:
        StrategyUnavailable: It isn't installed, or was compiled for another torch or against a library that is gone.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise StrategyUnavailable(
            f"Horovod is installed, but can't be loaded: {str(error).strip().splitlines()[-1]}", hint=INSTALL
        ) from error
    return hvd


def _check_build(hvd: Any, environment: Environment, device: torch.device) -> None:
    """What is missing in the wheel is said here, not by a crash in the first collective."""
    if environment.source in _MPI and not hvd.mpi_built():
        raise StrategyUnavailable(
            f"the processes were started by {environment.source}, but Horovod is built without MPI",
            hint="scripts/install-horovod --mpi yes   or --launcher torchrun",
        )
    if device.type == "cuda" and not (hvd.nccl_built() or hvd.cuda_built()):
        raise StrategyUnavailable(
            "the device is a GPU, but Horovod is built for CPU tensors only",
            hint="scripts/install-horovod --nccl yes   or --set device=cpu",
        )


def _check_places(hvd: Any, environment: Environment) -> None:
    if (hvd.rank(), hvd.size()) != (environment.rank, environment.size):
        found = f"rank {hvd.rank()} of {hvd.size()}"
        hvd.shutdown()
        raise LaunchError(
            f"{environment.source} says that this is rank {environment.rank} of {environment.size}, Horovod says {found}",
            hint="is Horovod built against the MPI whose mpirun started this? scripts/install-horovod --mpi yes --rebuild",
        )


# -- meeting through torch's store --------------------------------------------------------------------------------------


def _meet(environment: Environment, start_s: float) -> _Server | None:
    """Set the variables from which ``hvd.init()`` finds the others; the server, on rank 0."""
    store = _store(environment, start_s)
    place = [environment.node_rank, environment.local_rank, environment.local_size]
    store.set(f"{_PLACE}/{environment.rank}", json.dumps(place))
    server = None
    if environment.rank == 0:
        places = [json.loads(store.get(f"{_PLACE}/{rank}")) for rank in range(environment.size)]
        crosses = [_cross(places, rank) for rank in range(environment.size)]
        server = _Server(environment, places, crosses, store)
        store.set(_SERVER, json.dumps({"port": server.port, "crosses": crosses}))
    answer = json.loads(store.get(_SERVER))
    cross_rank, cross_size = answer["crosses"][environment.rank]
    os.environ.update(
        HOROVOD_HOSTNAME=f"node{environment.node_rank}",
        HOROVOD_RANK=str(environment.rank),
        HOROVOD_SIZE=str(environment.size),
        HOROVOD_LOCAL_RANK=str(environment.local_rank),
        HOROVOD_LOCAL_SIZE=str(environment.local_size),
        HOROVOD_CROSS_RANK=str(cross_rank),
        HOROVOD_CROSS_SIZE=str(cross_size),
        HOROVOD_GLOO_RENDEZVOUS_ADDR=_address(environment),
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(answer["port"]),
    )
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME") or _interface(environment)
    if interface:
        os.environ["HOROVOD_GLOO_IFACE"] = interface
    return server


def _store(environment: Environment, start_s: float) -> Store:
    from torch.distributed import DistNetworkError, DistStoreError, rendezvous  # type: ignore[attr-defined]

    if (environment.address is None and environment.nodes > 1) or environment.port is None:
        raise LaunchError(
            f"{environment.size} processes were started by {environment.source}, but MASTER_ADDR="
            f"{environment.address or 'unset'} and MASTER_PORT={environment.port or 'unset'} don't say where they meet",
            hint="export MASTER_ADDR=<first host> MASTER_PORT=29500   or start the script with distkit-run",
        )
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = _address(environment), str(environment.port)
    limit = timedelta(seconds=start_s)
    try:
        store, _, _ = next(iter(rendezvous("env://", environment.rank, environment.size, timeout=limit)))
    except (DistStoreError, DistNetworkError) as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.size} didn't meet the others at {_address(environment)}:"
            f"{environment.port} within timeouts.start_s={start_s:g}: {str(error).splitlines()[0]}",
            hint=f"check that all {environment.size} processes were started and reach this address",
        ) from error
    found: Store = store
    found.set_timeout(limit)
    return found


def _address(environment: Environment) -> str:
    return _LOOPBACK if environment.nodes == 1 else str(environment.address)


def _cross(places: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Place among the ranks of other nodes that have the same local rank, and how many they are."""
    same = sorted(node for node, local_rank, _ in places if local_rank == places[rank][1])
    return same.index(places[rank][0]), len(same)


def _interface(environment: Environment) -> str | None:
    """The network interface through which node 0 is reached; None leaves the choice to Gloo."""
    if environment.nodes == 1:
        return "lo" if sys.platform == "linux" else None
    import psutil  # type: ignore[import-untyped]  # Horovod needs it too

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((str(environment.address), 9))  # sends nothing; the kernel only chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses) and not own.startswith("127."):
            return str(name)
    return None


class _Server:
    """Horovod's rendezvous server, on loopback where all processes are on one machine.

    Its own class binds to all interfaces (horovod/runner/http/http_server.py, RendezvousServer.start).

    Args:
        environment: Of rank 0.
        places: Node rank, local rank and local size of each rank.
        crosses: Cross rank and cross size of each rank.
        store: Where the ranks meet; what was left there is removed when all have met.
    """

    def __init__(
        self,
        environment: Environment,
        places: Sequence[Sequence[int]],
        crosses: Sequence[tuple[int, int]],
        store: Store,
    ) -> None:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        slots = [
            SlotInfo(f"node{node}", rank, local_rank, cross_rank, len(places), local_size, cross_size)
            for rank, ((node, local_rank, local_size), (cross_rank, cross_size)) in enumerate(
                zip(places, crosses, strict=True)
            )
        ]
        self._size = len(places)
        self._store: Store | None = store
        self._server = RendezvousHTTPServer((_LOOPBACK if environment.nodes == 1 else "", 0), RendezvousHandler, 0)
        self._server.init(slots)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="distkit-horovod", daemon=True)
        self._thread.start()

    def met(self) -> None:
        """All ranks are connected: a later run in the same processes must find a clean store."""
        if self._store is not None:
            for key in (_SERVER, *(f"{_PLACE}/{rank}" for rank in range(self._size))):
                self._store.delete_key(key)
            self._store = None

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
