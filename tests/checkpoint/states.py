"""States made by hand, cut in the ways that engines cut them, and short ways to save and read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint import CheckpointManager
from distkit.config.schema import CheckpointConfig
from distkit.state import OptimizerLayout, Region, Shard, flat_regions
from distkit.world import World

Tensors = dict[tuple[str, str, str], torch.Tensor]


def whole_state(seed: int = 0) -> Tensors:
    """Model and Adam state of odd shapes and several dtypes; 0-dim and empty ones among them."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    return {
        ("model", "wte.weight", "parameter"): randn(11, 6),
        ("model", "h.0.conv.weight", "parameter"): randn(4, 3, 5),
        ("model", "h.0.bias", "parameter"): randn(7).bfloat16(),
        ("model", "scale", "parameter"): randn(),
        ("model", "nothing", "parameter"): torch.empty(0, 3),
        ("model", "bn.num_batches_tracked", "buffer"): torch.tensor(17),
        ("model", "mask", "buffer"): randn(3, 4) > 0,
        ("model", "freqs", "buffer"): torch.complex(randn(5, 2), randn(5, 2)),
        ("model_1", "wte.weight", "parameter"): randn(2, 2).double(),
        ("optimizer", "wte.weight", "exp_avg"): randn(11, 6),
        ("optimizer", "wte.weight", "step"): torch.tensor(3.0),
        ("optimizer", "scale", "exp_avg"): randn(),
    }


def cut(tensors: Tensors, rank: int, size: int, how: str) -> Iterator[Shard]:
    """A rank's share: by `rows` (as FSDP cuts), `columns` (tensor parallel), `flat` ranges (ZeRO) or `whole` tensors."""
    for index, ((group, name, kind), tensor) in enumerate(tensors.items()):
        for region in regions(tuple(tensor.shape), rank, size, how, index):
            yield Shard(group, name, kind, tuple(tensor.shape), region, tensor[region.slices])


def regions(shape: tuple[int, ...], rank: int, size: int, how: str, index: int) -> list[Region]:
    numel = torch.Size(shape).numel()
    if how == "flat" and numel:
        per = -(-numel // size)
        start = min(rank * per, numel)
        return list(flat_regions(shape, start, min(per, numel - start)))
    dim = {"rows": 0, "columns": len(shape) - 1}.get(how)
    if dim is None or not shape:
        return [Region.whole(shape)] if index % size == rank else []
    per = -(-shape[dim] // size)
    start = min(rank * per, shape[dim])
    offset, box = [0] * len(shape), list(shape)
    offset[dim], box[dim] = start, min(per, shape[dim] - start)
    return [Region(tuple(offset), tuple(box))]  # empty where there are more ranks than rows


def layouts(tensors: Tensors) -> list[OptimizerLayout]:
    """What the optimizer of such a state would say of itself."""
    fields: dict[str, dict[str, tuple[int, ...]]] = {}
    for (group, name, kind), tensor in tensors.items():
        if group == "optimizer":
            fields.setdefault(name, {})[kind] = tuple(tensor.shape)
    params = {"params": ["wte.weight", "scale"], "lr": 1e-3, "betas": (0.9, 0.999), "foreach": None}
    return [OptimizerLayout([params], fields, {"scale": {"note": "kept"}})]


def manager(folder: Path, world: World | None = None, **config: Any) -> CheckpointManager:
    return CheckpointManager(folder, world or World.alone(), CheckpointConfig(**{"keep": None, **config}))


def save(checkpoints: CheckpointManager, step: int = 100, **changes: Any) -> Path:
    """Save a small state."""
    state = changes.pop("state", None) or whole_state()
    how, world = changes.pop("how", "whole"), checkpoints.world
    arguments: dict[str, Any] = {
        "shards": lambda: cut(state, world.rank, world.size, how),
        "layouts": layouts(state),
        "trainer_state": {"step": step},
        "aliases": {},
        "strategy": "single",
    }
    return checkpoints.save(step, **{**arguments, **changes})


def snapshot_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and what is in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, dtype included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def names_of(paths: Sequence[Path]) -> list[str]:
    return sorted(p.name for p in paths)
