"""What the tests of World run in worker processes."""

from __future__ import annotations

import time
from typing import Any

import torch

from distkit.config import load_config
from distkit.errors import OutOfStepError
from distkit.world import World, detect_environment
from distkit.world.torch_group import connect_torch


def connect(**settings: Any) -> World:
    return connect_torch(detect_environment(), load_config(script=settings).config)


def verbs() -> dict[str, Any]:
    world = connect()
    r, n = world.rank, world.size
    rows = torch.arange(r + 1).float() + 10 * r
    found = {
        "sum": world.all_reduce(torch.tensor([1.0 * r, 1.0])).tolist(),
        "max": int(world.all_reduce(torch.tensor(r), "max")),
        "min": int(world.all_reduce(torch.tensor(r + 5), "min")),
        "any": [world.any(r == n - 1), world.any(False)],
        "all": [world.all(True), world.all(r == 0)],
        "gathered": [t.tolist() for t in world.all_gather(rows, axis="data")],
        "scalars": [float(t) for t in world.all_gather(torch.tensor(float(r)))],
        "bools": [t.tolist() for t in world.all_gather(torch.tensor([r == 0]))],
        "empty": [t.tolist() for t in world.all_gather(torch.zeros(r))],
        "objects": world.all_gather_objects({"rank": r, "text": "x" * r, "none": None}),
        "broadcast": world.broadcast(torch.full((2,), float(r)), source=n - 1).tolist(),
        "object": world.broadcast_object({"from": r} if r == 0 else None),
    }
    world.barrier()
    world.close()
    return found


def mismatch() -> str:
    """Rank 1 skips a verb."""
    world = connect()
    try:
        if world.rank != 1:
            world.control.together("save")
        world.control.together("evaluate")
    except OutOfStepError as error:
        return str(error)
    finally:
        world.close()
    return "no error"


def flags() -> list[list[bool]]:
    """Flags of a step survive another verb in between."""
    world = connect()
    world.control.begin("step", world.rank == 1, False, False)
    between = list(world.control.together("evaluate", False, False, world.rank == 0))
    step = list(world.control.finish())
    after = list(world.control.together("save"))
    world.close()
    return [between, step, after]


def main_first(step_s: float, work_s: float) -> list[float]:
    """Rank 0 works longer than a collective may take."""
    from distkit.world import world as module

    module.KEEP_WAITING_S = 0.2
    world = connect(timeouts={"step_s": step_s})
    with world.main_first():
        if world.is_main:
            time.sleep(work_s)
        stamp = time.time()
    world.close()
    return [stamp, time.time()]
