"""Cases of test_traffic.py, run by the worker processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.data import DataLoader, TensorDataset

import distkit
from distkit.traffic import TrafficCounter, socket_bytes


def called(run_dir: str) -> dict[str, Any]:
    """Each kind of call once over all ranks, one over two of them; as (what, message, ranks) and how often."""
    trainer = distkit.Trainer(strategy="ddp", run_dir=run_dir, checkpoint={"at_end": False}, log={"to": []})
    size = dist.get_world_size()
    pair = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][dist.get_rank() // 2]
    whole, part = torch.zeros(4 * size), torch.zeros(4)
    with TrafficCounter() as counter:
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather([torch.zeros(4) for _ in range(size)], part)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(whole, 0)
        dist.reduce(whole, 0)
        dist.all_to_all_single(torch.zeros(4 * size), whole)
        dist.all_reduce(whole, group=pair)
        functional.all_reduce(whole, "sum", dist.group.WORLD).sum()
        dist.barrier()
    dist.all_reduce(whole)  # nobody counts any more
    trainer.close()
    return {"calls": sorted([c.what, c.message, c.ranks, n] for c, n in counter.calls.items()), "sent": counter.sent}


def trained(run_dir: str) -> dict[str, Any]:
    """What a step of ddp moves, which C++ calls in backward; by calls and by sockets."""
    trainer = distkit.Trainer(strategy="ddp", run_dir=run_dir, checkpoint={"at_end": False}, log={"to": []})
    net = torch.nn.Linear(1000, 1000)
    data = TensorDataset(torch.randn(16, 1000), torch.randn(16, 1000))
    net, opt, loader = trainer.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=2))
    counter, before = TrafficCounter(), 0
    for _ in trainer.epochs(1):
        for x, y in loader:
            if trainer.global_step == 1:
                before = socket_bytes() or 0
                counter.__enter__()
            trainer.step(torch.nn.functional.mse_loss(net(x), y))
            if trainer.global_step == 2:
                counter.__exit__()
                carried = (socket_bytes() or 0) - before
                break
    trainer.close()
    return {"sent": counter.sent, "carried": carried}
