"""Looking at the checkpoints of a folder, from one process and without reading any tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from distkit.checkpoint.codec import decode
from distkit.checkpoint.format import MANIFEST, STEP_FOLDER, Manifest
from distkit.checkpoint.load import check_files
from distkit.checkpoint.paths import look_again
from distkit.errors import CheckpointError

__all__ = ["MARKER", "CheckpointInfo", "inspect_checkpoint", "is_unfinished", "list_checkpoints"]

MARKER = "unfinished-"
"""Begins the name of a file in a checkpoint that is being written where nothing can be renamed."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a folder that looks like a checkpoint is.

    Args:
        path: The folder.
        step: Optimizer steps taken; from the folder's name if the manifest can't be read.
        epoch: Epoch it was taken in.
        sequence: Place among the checkpoints of the folder; the highest is the newest.
        time: When it was written, in ISO 8601.
        strategy: Who wrote it.
        world_size: Number of processes that wrote it.
        bytes: Size of all its files.
        metrics: The last evaluation before it.
        problem: Why it can't be loaded; None if manifest and file sizes are as they should be.
    """

    path: Path
    step: int
    epoch: int = 0
    sequence: int = 0
    time: str = ""
    strategy: str = ""
    world_size: int = 0
    bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Read the manifest and compare file sizes; never raises for a damaged one, but says what is wrong."""
    match = STEP_FOLDER.fullmatch(path.name)
    step = int(match[1]) if match else 0
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return CheckpointInfo(path, step, problem=error.message)
    problem = None
    metrics: dict[str, float] = {}
    try:
        check_files(path, manifest)
        metrics = {key: float(value) for key, value in decode(manifest.metrics, {}).items()}
    except CheckpointError as error:
        problem = error.message
    except (TypeError, ValueError):
        problem = f"{path / MANIFEST} is garbled: a metric is not a number"
    return CheckpointInfo(
        path,
        manifest.step,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
        time=manifest.time,
        strategy=manifest.strategy,
        world_size=manifest.world_size,
        bytes=sum(file.bytes for file in manifest.files.values()),
        metrics=metrics,
        problem=problem,
    )


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """All that looks like a checkpoint in a folder, the oldest first; damaged ones are among them.

    Raises:
        CheckpointError: The folder can't be read.
    """
    try:
        look_again(folder)
        found = [p for p in folder.iterdir() if STEP_FOLDER.fullmatch(p.name)] if folder.is_dir() else []
        found = [p for p in found if not is_unfinished(p)]
    except OSError as error:
        raise CheckpointError(f"can't read {folder}: {error.strerror or error}") from error
    return _in_order([inspect_checkpoint(path) for path in found])


def _in_order(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """By sequence. One whose manifest can't be read has none, and takes the place that its step would have had."""

    def place(info: CheckpointInfo) -> tuple[float, int]:
        if info.sequence:
            return info.sequence, info.step
        before = [other.sequence for other in infos if other.step < info.step]
        return max(before, default=0) + 0.5, info.step

    return sorted(infos, key=place)


def is_unfinished(path: Path) -> bool:
    """Whether a checkpoint is being written under its final name, or its writer died: it isn't damaged, but isn't one."""
    if (path / MANIFEST).exists() or not path.is_dir():
        return False
    return any(file.name.startswith(MARKER) for file in path.iterdir())
