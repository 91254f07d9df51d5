"""Runs whose files are written slowly, or not at all, while training goes on. One JSON value a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import distkit
from distkit.checkpoint import CheckpointReader, save
from distkit.errors import CheckpointError
from distkit.state import Region
from tests.contract.models import TinyGPT, Tokens, groups, sample_losses

STEPS = 6


@contextmanager
def slow_files(seconds: float) -> Iterator[None]:
    """Each file is opened so much later than it would be."""
    write = save.write_tensors

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments, **options)

    save.write_tensors = slow
    try:
        yield
    finally:
        save.write_tensors = write


class Watch(distkit.Callback):
    """Notes for each checkpoint whether it was there when it was asked for."""

    def __init__(self) -> None:
        self.there: list[bool] = []

    def on_save(self, trainer: distkit.Trainer, path: Path) -> None:
        self.there.append((path / "manifest.json").exists())


def _trainer(strategy: str, run_dir: str, watch: Watch, **settings: Any) -> Any:
    base = {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.every_steps": 1, "log.to": ["jsonl"]}
    trainer = distkit.Trainer(
        {**base, "checkpoint.keep": None, "max_steps": STEPS, "checkpoint.every_steps": 1, **settings},
        callbacks=[watch],
    )
    net = TinyGPT()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
    loader = DataLoader(Tokens(36), batch_size=12, shuffle=True)
    return trainer, *trainer.prepare(net, optimizer, loader)


def train(strategy: str, run_dir: str, *, background: bool, every: int = 1, seconds: float = 0.1) -> dict[str, Any]:
    """Save at every step; digests of all checkpoints, and whether each was there when it was asked for."""
    watch = Watch()
    settings = {"checkpoint.background": background, "checkpoint.every_steps": every}
    trainer, net, _, loader = _trainer(strategy, run_dir, watch, **settings)
    with slow_files(seconds if background else 0.0):
        for _ in trainer.epochs(3):
            for item in loader:
                trainer.step(sample_losses(net, item).mean())
        trainer.close()
    return {"there": watch.there, "checkpoints": contents(run_dir)}


def contents(run_dir: str) -> dict[str, dict[str, list[float]]]:
    """All values of all checkpoints."""
    found: dict[str, dict[str, list[float]]] = {}
    for path in sorted((Path(run_dir) / "checkpoints").glob("step-*")):
        reader = CheckpointReader(path)
        found[path.name] = {
            f"{group}/{name}/{kind}": reader.read(group, name, kind, Region.whole(entry.shape)).flatten().tolist()
            for group, name, kind, entry in reader.manifest.all_tensors()
        }
        state = reader.trainer_state()
        found[path.name]["trainer"] = [state["step"], state["samples"], *map(float, state["optimizer_steps"])]
        found[path.name]["rates"] = [group["lr"] for layout in reader.layouts() for group in layout.groups]
    return found


def lose_the_folder(strategy: str, run_dir: str) -> dict[str, Any]:
    """Rank 0 makes the folder of checkpoints unwritable after step 2; saves are at 2, 4 and 6."""
    trainer, net, _, loader = _trainer(strategy, run_dir, Watch(), **{"checkpoint.every_steps": 2})
    folder, elsewhere = Path(run_dir) / "checkpoints", Path(run_dir) / "kept"
    raised: list[list[Any]] = []
    for _ in trainer.epochs(3):
        for item in loader:
            try:
                trainer.step(sample_losses(net, item).mean())
            except CheckpointError as error:
                raised.append([trainer.global_step, str(error)])
                if trainer.is_main:
                    folder.unlink()
                    elsewhere.rename(folder)
            while trainer._checkpoints.under_way is not None:
                time.sleep(0.01)
            trainer.world.barrier()
            if trainer.global_step == 2:
                if trainer.is_main:
                    folder.rename(elsewhere)
                    folder.write_text("a file where the folder was")
                trainer.world.barrier()
    trainer.close()
    return {"raised": raised, "steps": sorted(os.listdir(folder)), "last": trainer.global_step}


def fail_at_the_end(strategy: str, run_dir: str) -> list[str]:
    """The last step's checkpoint fails in the background; close() writes it again."""
    trainer, net, _, loader = _trainer(strategy, run_dir, Watch(), **{"checkpoint.every_steps": STEPS})
    folder = Path(run_dir) / "checkpoints"
    if trainer.is_main:
        folder.write_text("a file where the folder should be")
    with slow_files(0.05):
        for _ in trainer.epochs(3):
            for item in loader:
                trainer.step(sample_losses(net, item).mean())
        while trainer._checkpoints.under_way is not None:
            time.sleep(0.01)
        trainer.world.barrier()
        if trainer.is_main:
            folder.unlink()
        trainer.close()
    return sorted(os.listdir(folder))
