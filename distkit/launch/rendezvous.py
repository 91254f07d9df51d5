"""Where the processes of a run meet: on one host a store that only this host can reach, on several a port of node 0."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from distkit.errors import LaunchError

__all__ = ["Rendezvous", "endpoint_rendezvous"]

_LOOPBACK = "127.0.0.1"


class Rendezvous(RendezvousHandler):
    """A fixed set of nodes that meets again at every attempt.

    The agents have one store for the whole run, and the workers of each attempt a store of their own. torch's static
    rendezvous keeps one store for all, and the workers of a second attempt then read the addresses of the first
    (torch 2.13, torch/distributed/rendezvous.py: ``_create_c10d_store`` expects "a new TCPStore for every retry").

    torchrun's back ends listen on all interfaces even on one host, and its free port is chosen first and bound later,
    so that two jobs can get the same one. Here the socket is bound first and then given to the store.

    Args:
        run_id: Name of the run.
        rank: Place of this node.
        nodes: Number of nodes.
        address: Where node 0 is reached; not used on one node.
        port: Port there; not used on one node.
        timeout: For the nodes to meet.
    """

    def __init__(
        self, run_id: str, *, rank: int = 0, nodes: int = 1, address: str = "", port: int = 0, timeout: timedelta
    ) -> None:
        self._run_id = run_id
        self._rank, self._nodes = rank, nodes
        self._address, self._port = (_LOOPBACK, 0) if nodes == 1 else (address, port)
        self._timeout = timeout
        self._agents: Store | None = None
        self._workers: Store | None = None
        self._attempt = -1

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet; the workers' store is a new one each time."""
        self._attempt += 1
        if self._agents is None:
            self._agents = self._meet()
        agents = PrefixStore(f"{self._run_id}/{self._attempt}", self._agents)
        if self._rank == 0:
            port = self._open_for_workers()
            agents.set("workers-port", str(port))
        port = int(agents.get("workers-port"))
        return RendezvousInfo(agents, self._rank, self._nodes, RendezvousStoreInfo(self._address, port))

    def _meet(self) -> Store:
        """The agents' store; on several nodes it waits until all are there."""
        if self._nodes == 1:
            return HashStore()
        try:
            return TCPStore(self._address, self._port, self._nodes, self._rank == 0, self._timeout)
        except RuntimeError as error:
            waited = f"within {self._timeout.total_seconds():g} s (timeouts.start_s)"
            if self._rank == 0:
                raise LaunchError(
                    f"not all {self._nodes} nodes came to {self._address}:{self._port} {waited}",
                    hint=f"start distkit-run with --node-rank 1 to {self._nodes - 1} on the other hosts",
                ) from error
            raise LaunchError(
                f"node 0 didn't answer at {self._address}:{self._port} {waited}",
                hint="start distkit-run with --node-rank 0 there, and give its --master-addr and --master-port here",
            ) from error

    def _open_for_workers(self) -> int:
        """A store at a port that the kernel chooses; on one node nothing outside can reach it."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((_LOOPBACK if self._nodes == 1 else "", 0))
        port: int = listener.getsockname()[1]
        self._workers = TCPStore(
            _LOOPBACK, port, 1, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    @property
    def use_agent_store(self) -> bool:
        """Yes: rank 0 opens no store, it connects to the one that is there."""
        return True

    def get_backend(self) -> str:
        """Its name."""
        return "distkit"

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to close: the set of nodes is fixed."""

    def num_nodes_waiting(self) -> int:
        """None: the set of nodes is fixed."""
        return 0

    def shutdown(self) -> bool:
        """The stores end with the process."""
        return True


def endpoint_rendezvous(config: LaunchConfig) -> RendezvousHandler:
    """torch's own rendezvous at an endpoint: hosts come in any order and number, and those that are lost may return.

    torch guesses from host names whether this host is the endpoint, and where none believes to be it, all wait for
    each other; here the host that has the address is it. Each attempt's workers get a store of their own (see
    :class:`Rendezvous`).

    Args:
        config: torchrun's settings.
    """
    host, _, port = config.rdzv_endpoint.rpartition(":")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    settings = {**config.rdzv_configs, "is_host": _is_own_address(host)}
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{host}:{port}",
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=_address_towards(host, int(port)),
            **settings,
        )
    )


def _is_own_address(host: str) -> bool:
    """Whether one of this host's interfaces has the address."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
        return True
    except OSError:
        return False


def _address_towards(host: str, port: int) -> str | None:
    """The address of this host that others see when it talks to another; None if that one isn't known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None
