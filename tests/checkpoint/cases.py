"""What the tests run on several ranks. Each function gives one JSON value a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from distkit.config import Config
from distkit.errors import CheckpointError
from distkit.state import Region, Shard
from distkit.world import World, detect_environment
from distkit.world.torch_group import connect_torch
from tests.checkpoint.states import cut, layouts, manager, same, save, whole_state


def connected(work: Callable[[World], Any]) -> Any:
    config = Config()
    config.device = "cpu"
    config.timeouts.step_s = 30
    world = connect_torch(detect_environment(), config)
    try:
        return work(world)
    finally:
        world.close()


def write(folder: str, how: str, step: int = 100, **config: Any) -> str:
    """Save the known state, each rank a share of it."""

    def work(world: World) -> str:
        rng = {"torch": torch.full((4,), world.rank, dtype=torch.uint8)}
        return str(save(manager(Path(folder), world, **config), step, how=how, rng=rng, metrics={"loss": 1.0 / step}))

    return str(connected(work))


def read_back(folder: str, how: str) -> dict[str, Any]:
    """Open the newest together and read this rank's share, cut in another way."""

    def work(world: World) -> dict[str, Any]:
        checkpoints = manager(Path(folder), world)
        newest = checkpoints.latest()
        assert newest is not None
        reader = checkpoints.open(newest)
        state = whole_state()
        shards = list(cut(state, world.rank, world.size, how))
        equal = [same(reader.read(s.group, s.name, s.kind, s.region), s.tensor) for s in shards]
        fields = reader.layouts()[0].fields == layouts(state)[0].fields
        return {
            "path": newest.name,
            "equal": all(equal) and fields,
            "read": len(equal),
            "written_by": reader.manifest.world_size,
            "rng": {key: value.tolist() for key, value in reader.rng(world.rank).items()},
        }

    return dict(connected(work))


def fail_on_one(folder: str, rank: int, how: str) -> str:
    """A save in which one rank fails; gives the message that each rank sees."""

    def work(world: World) -> str:
        checkpoints = manager(Path(folder), world)

        def shards() -> Iterator[Shard]:
            yield from cut(whole_state(), world.rank, world.size, "rows")
            if world.rank == rank and how == "big":
                yield Shard("model", "big", "parameter", (10**6,), Region((0,), (10**6,)), torch.ones(10**6))
            if world.rank == rank and how == "raises":
                raise RuntimeError("lost the device")
            if world.rank == rank and how == "twice":
                yield Shard("model", "wte.weight", "parameter", (11, 6), Region((0, 0), (11, 6)), torch.ones(11, 6))
            if world.rank == rank and how == "sparse":
                yield Shard("model", "odd", "parameter", (2, 2), Region.whole((2, 2)), torch.eye(2).to_sparse())

        state: dict[str, Any] = {"odd": object()} if how == "state" else {}
        try:
            save(checkpoints, 200, shards=shards, trainer_state=state)
        except CheckpointError as error:
            world.barrier()  # the ranks are still in step
            return str(error)
        return "saved"

    return str(connected(work))


def open_damaged(folder: str, file: str) -> str:
    """Open a checkpoint of which one file is damaged; gives the message that each rank sees."""

    def work(world: World) -> str:
        if world.is_main:
            path = Path(folder) / file
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        world.barrier()
        try:
            manager(Path(folder).parent, world).open(folder)
        except CheckpointError as error:
            return str(error)
        return "opened"

    return str(connected(work))
