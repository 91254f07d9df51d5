"""Checkpoints between any two strategies and numbers of processes: who is there, and one move from one to the other.

Needs no torch: what runs in the worker processes is in :mod:`tests.contract.matrix_cases`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.strategies.checks import engine_installed
from distkit.strategies.registry import strategy_class, strategy_names
from tests.pool import Pool, WorkerError

__all__ = ["SIZES", "VARIANTS", "Move", "Options", "Place", "Source", "make_move", "make_source", "places"]

CASES = "tests.contract.matrix_cases:"

SIZES = (1, 2, 4)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2+offload": ("zero2", {"memory.offload": "optimizer"}),
    "zero3+offload": ("zero3", {"memory.offload": "optimizer"}),
    **{f"{name}+tensor2": (name, {"parallel.tensor": 2}) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")},
}
"""Besides the registered strategies: a strategy and settings under which it keeps its state in another way."""

REFUSALS = ("ConfigError", "UsageError", "StrategyUnavailable")


@dataclass(frozen=True)
class Place:
    """A way of training on a number of processes.

    Args:
        label: A strategy's name, or a key of :data:`VARIANTS`.
        size: Number of processes.
    """

    label: str
    size: int

    def __str__(self) -> str:
        return f"{self.label} x{self.size}"

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return VARIANTS[self.label][0] if self.label in VARIANTS else self.label

    @property
    def settings(self) -> dict[str, Any]:
        """What it needs besides the strategy's name."""
        settings = dict(VARIANTS[self.label][1]) if self.label in VARIANTS else {}
        if self.strategy == "hsdp" and self.size > 1:
            settings["parallel.replicate"] = 2
        if self.strategy.startswith("megatron") and self.size == 4:
            settings["parallel.tensor"] = 2
        if self.strategy.endswith(
            "zero3"
        ):  # the model is small: some parameters stay whole on every rank, others are cut
            settings["engine.deepspeed.zero_optimization"] = {"stage3_param_persistence_threshold": 16}
        return settings


@dataclass(frozen=True)
class Options:
    """What is the same in all runs.

    Args:
        optimizer: Class in torch.optim and its arguments, as ``SGD:momentum=0.9``.
        settings: Of distkit.
        before: Optimizer steps before the checkpoint.
        after: Optimizer steps after it.
    """

    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    before: int = 4
    after: int = 5

    def arguments(self, place: Place) -> dict[str, Any]:
        """For the functions in matrix_cases."""
        return {
            "strategy": place.strategy,
            "settings": {**self.settings, **place.settings},
            "optimizer": self.optimizer,
            "after": self.after,
        }


@dataclass(frozen=True)
class Source:
    """A run that wrote a checkpoint and went on.

    Args:
        place: Where it ran.
        checkpoint: The folder; None if it failed.
        losses: Of the steps after the checkpoint.
        refused: Why the strategy doesn't take this optimizer or these settings, said before training.
        failed: What went wrong.
    """

    place: Place
    checkpoint: Path | None = None
    losses: tuple[float, ...] = ()
    refused: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Move:
    """One checkpoint that was loaded somewhere, written again, and trained on from.

    Args:
        source: Who wrote it.
        target: Who loaded it.
        tensors: How many tensors were compared.
        difference: Largest absolute difference of the losses after it from those of staying.
        refused: As in :class:`Source`, of either.
        failed: What went wrong, or what of the state isn't the same bit for bit.
        seconds: How long it took.
    """

    source: Place
    target: Place
    tensors: int = 0
    difference: float = float("nan")
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0


def places(labels: Sequence[str] | None = None, sizes: Sequence[int] = SIZES) -> list[Place]:
    """Every strategy whose engine is installed with every number of processes that it takes.

    Args:
        labels: Only these strategies and variants.
        sizes: Numbers of processes.
    """
    found = []
    for label in labels if labels is not None else [*strategy_names(), *VARIANTS]:
        strategy = strategy_class(Place(label, 1).strategy)
        if not engine_installed(strategy):
            continue
        one = strategy.capabilities.processes == "one"
        group = Place(label, 1).settings.get("parallel.tensor", 1)
        found += [Place(label, size) for size in sizes if (size == 1 or not one) and size % group == 0]
    return found


def make_source(pool: Pool, place: Place, folder: Path, options: Options) -> Source:
    """Train, write a checkpoint, and go on."""
    try:
        results = pool.run(
            CASES + "stay", place.size, run_dir=str(folder), before=options.before, **options.arguments(place)
        )
    except (WorkerError, TimeoutError) as error:
        refused, failed = _sort(pool, error)
        return Source(place, refused=refused, failed=failed)
    return Source(place, Path(results[0]["checkpoint"]), tuple(results[0]["losses"]))


def make_move(pool: Pool, source: Source, target: Place, folder: Path, options: Options) -> Move:
    """Load a source's checkpoint, write it again, and train on; the run's folder is removed if all went well."""
    if source.checkpoint is None:
        failed = f"the source failed: {source.failed}" if source.failed else ""
        return Move(source.place, target, refused=source.refused, failed=failed)
    try:
        result = pool.run(
            CASES + "move",
            target.size,
            run_dir=str(folder),
            source=str(source.checkpoint),
            **options.arguments(target),
        )[0]
    except (WorkerError, TimeoutError) as error:
        refused, failed = _sort(pool, error)
        return Move(source.place, target, refused=refused, failed=failed)
    failed = "; ".join(result["differences"])
    if len(result["losses"]) != len(source.losses):
        failed = failed or f"{len(result['losses'])} losses after loading, {len(source.losses)} of staying"
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    apart = [abs(a - b) for a, b in zip(result["losses"], source.losses, strict=False)]
    return Move(source.place, target, result["tensors"], max(apart, default=float("nan")), failed=failed)


def _sort(pool: Pool, error: WorkerError | TimeoutError) -> tuple[str, str]:
    """Why it was refused, and what went wrong: one of the two is empty."""
    if isinstance(error, WorkerError):
        _, kind, message, trace = error.errors[0]
        text = f"{kind}: {message}"
        early = "in prepare" in trace or ("trainer.py" in trace and "in __init__" in trace)
        if kind in REFUSALS and early:
            return text, ""
    else:
        text = str(error)
    pool.close()  # an engine that wasn't closed may have left its own functions in torch
    return "", text
