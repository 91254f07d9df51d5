"""Joining processes through torch.distributed: what ddp, fsdp and every other engine on top of it share."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, rendezvous  # type: ignore[attr-defined]

from distkit.config import Config
from distkit.config.checks import check_tensor_groups
from distkit.errors import LaunchError
from distkit.world.collectives import TorchCollectives
from distkit.world.device import backend_for, choose_device
from distkit.world.environment import Environment
from distkit.world.world import Axis, World

__all__ = ["connect_torch", "join_processes"]


def connect_torch(environment: Environment, config: Config) -> World:
    """A World over torch.distributed.

    ``parallel.tensor`` neighbouring ranks share each layer, so that they sit on one node; the ranks of equal place in those
    groups are the data-parallel ones.

    Args:
        environment: From the launcher's variables.
        config: ``device``, ``timeouts.start_s`` (to meet) and ``timeouts.step_s`` (for one collective) are used.

    Raises:
        LaunchError: The processes don't know where to meet, or didn't within ``timeouts.start_s``.
        ConfigError: Tensor groups would reach over several nodes.
    """
    check_tensor_groups(config, nodes=environment.nodes, each=environment.local_size)
    device = choose_device(config.device, environment.local_rank, environment.size)
    owns_world = join_processes(environment, config, device)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeouts.step_s))
    size = config.parallel.tensor
    data = tensor = None
    if size > 1:
        data, tensor = _cross_groups(environment, config, size)
    collectives = TorchCollectives(data=data, tensor=tensor, control=control, owns_world=owns_world)
    return World(
        environment,
        device,
        collectives,
        backend=dist.get_backend(),
        data=Axis(environment.rank // size, environment.size // size),
        tensor=Axis(environment.rank % size, size),
    )


def _cross_groups(environment: Environment, config: Config, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's data-parallel and tensor group; all ranks make all groups."""
    limit = timedelta(seconds=config.timeouts.step_s)
    ranks = torch.arange(environment.size).reshape(-1, size)
    across = [dist.new_group(column, timeout=limit) for column in ranks.T.tolist()]
    inside = [dist.new_group(row, timeout=limit) for row in ranks.tolist()]
    return across[environment.rank % size], inside[environment.rank // size]


def join_processes(environment: Environment, config: Config, device: torch.device) -> bool:
    """Make the default process group, unless the script did.

    Returns:
        Whether it was made here, and so is to be destroyed by us.
    """
    if dist.is_initialized():
        return False
    if environment.nodes == 1 and sys.platform == "linux":
        # On one machine no socket needs to be seen from outside it; what the user set wins.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    step = timedelta(seconds=config.timeouts.step_s)
    backend = backend_for(device)
    if environment.source == "none":
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=step)
        return True
    address, port = environment.address, environment.port
    if address is None and environment.nodes == 1:
        address = "127.0.0.1"
    if address is None or port is None:
        raise LaunchError(
            f"{environment.size} processes were started by {environment.source}, but MASTER_ADDR={address or 'unset'} and "
            f"MASTER_PORT={port or 'unset'} don't say where they meet",
            hint="export MASTER_ADDR=<first host> MASTER_PORT=29500   or start the script with distkit-run",
        )
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    start = timedelta(seconds=config.timeouts.start_s)
    try:
        meeting = rendezvous("env://", environment.rank, environment.size, timeout=start)
        store, rank, size = next(iter(meeting))
        store.set_timeout(start)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=step)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise LaunchError(
            f"rank {environment.rank} of {environment.size} didn't meet the others at {address}:{port} within "
            f"timeouts.start_s={config.timeouts.start_s:g}: {str(error).splitlines()[0]}",
            hint=f"check that all {environment.size} processes were started and reach {address}:{port}",
        ) from error
    return True
