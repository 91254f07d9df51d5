"""From a foreign checkpoint to a folder of distkit: which reader, which names, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distkit.checkpoint.foreign.accelerate import is_accelerate, read_accelerate
from distkit.checkpoint.foreign.dcp import is_dcp, read_dcp
from distkit.checkpoint.foreign.deepspeed import is_deepspeed, read_deepspeed
from distkit.checkpoint.foreign.matching import Matched, match
from distkit.checkpoint.foreign.origin import Origin
from distkit.checkpoint.foreign.torch_file import read_lightning_file, read_torch_file
from distkit.checkpoint.foreign.user_model import build_model
from distkit.checkpoint.listing import list_checkpoints
from distkit.checkpoint.manager import CheckpointManager
from distkit.checkpoint.paths import to_path
from distkit.config.schema import CheckpointConfig
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Region, Shard
from distkit.strategies.modules import group_name
from distkit.world import World

__all__ = ["FORMATS", "Imported", "import_checkpoint"]

FORMATS = ("auto", "deepspeed", "dcp", "accelerate", "lightning", "torch")


@dataclass
class Imported:
    """What was done, for the user to read.

    Args:
        path: The new checkpoint.
        origin: Who wrote the old one.
        world_size: On how many processes, as far as its files tell.
        step: Optimizer steps taken.
        epoch: The epoch at whose beginning a run goes on.
        parameters: How many.
        buffers: How many.
        optimizers: For each optimizer: how many parameters have state, and how many have which field.
        schedulers: How many.
        ties: Further names of tied parameters and the names under which they are stored.
        left: What was not taken.
        notes: What the user should know.
    """

    path: Path
    origin: str
    world_size: int
    step: int
    epoch: int
    parameters: int
    buffers: int
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: int = 0
    ties: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def import_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    origin: str = "auto",
    model: str | None = None,
    strip_prefix: str | None = None,
    epoch: int | None = None,
) -> Imported:
    """Write a foreign checkpoint as the first checkpoint of a run.

    Nothing that the source names is ever imported or called; ``model`` is the user's own and is.

    Args:
        source: Its file or folder.
        destination: The run's folder, or its URL; the checkpoint goes into ``checkpoints`` below it.
        origin: One of :data:`FORMATS`; ``auto`` looks at the files.
        model: ``MODULE:FUNCTION``, which builds the model, or model and optimizer.
        strip_prefix: A prefix to take off names.
        epoch: At whose beginning a run goes on; None is what the source says.

    Raises:
        CheckpointError: It can't be read or named, or the destination has checkpoints already. Nothing is written then.
    """
    source, destination = Path(source), to_path(destination)
    folder = destination / "checkpoints"
    if list_checkpoints(folder):
        raise CheckpointError(f"{folder} holds checkpoints already", hint="give the folder of a new run")
    found = _reader(source, origin)(source)
    matched = match(found, build_model(model) if model else None, strip_prefix)
    step = _step(found, matched)
    at = epoch if epoch is not None else found.epoch or 0
    manager = CheckpointManager(folder, World.alone(), CheckpointConfig(keep=None, background=False))
    path = manager.save(
        step,
        shards=lambda: shards(matched),
        layouts=layouts(matched),
        trainer_state=_trainer_state(found, step, at, len(matched.optimizers)),
        aliases={"model": matched.ties} if matched.ties else {},
        epoch=at,
        strategy=f"{found.kind} (imported)",
    )
    return _report(path, found, matched, step, at)


def shards(matched: Matched) -> Iterator[Shard]:
    """All of it, in boxes as they lie in the source."""
    for name, pieces in matched.model.items():
        kind = "buffer" if name in matched.buffers else "parameter"
        for region, values in pieces.parts:
            yield Shard("model", name, kind, pieces.shape, region, values)
    for index, optimizer in enumerate(matched.optimizers):
        for slot in optimizer.all():
            for kind, pieces in slot.fields.items():
                for region, values in pieces.parts:
                    yield Shard(group_name("optimizer", index), str(slot.name), kind, pieces.shape, region, values)


def layouts(matched: Matched) -> list[OptimizerLayout]:
    """Parameter groups and fields, as strategies describe them."""
    return [
        OptimizerLayout(
            [
                {**hyper, "params": [str(slot.name) for slot in slots]}
                for hyper, slots in zip(optimizer.groups, optimizer.slots, strict=True)
            ],
            {str(s.name): {k: p.shape for k, p in s.fields.items()} for s in optimizer.all() if s.fields or s.values},
            {str(s.name): s.values for s in optimizer.all() if s.fields or s.values},
        )
        for optimizer in matched.optimizers
    ]


def _reader(source: Path, origin: str) -> Callable[[Path], Origin]:
    readers: dict[str, Callable[[Path], Origin]] = {
        "deepspeed": read_deepspeed,
        "dcp": read_dcp,
        "accelerate": read_accelerate,
        "torch": read_torch_file,
    }
    if origin not in FORMATS:
        raise CheckpointError(f"--from was set to {origin!r}; there are: {', '.join(FORMATS)}", hint="--from auto")
    try:
        if not source.exists():
            raise CheckpointError(f"{str(source)!r} isn't there", hint="give the file or folder of the old checkpoint")
        if source.is_file():
            if origin not in ("auto", "torch", "lightning"):
                raise CheckpointError(f"{source} is a file, but {origin} writes folders", hint="--from auto")
            return read_lightning_file if origin == "lightning" else read_torch_file
        if origin == "torch":
            raise CheckpointError(f"{source} is a folder, but --from torch reads files", hint="--from auto")
        if origin in readers:
            return readers[origin]
        kinds = {"dcp": is_dcp, "deepspeed": is_deepspeed, "accelerate": is_accelerate}
        kind = next((name for name, test in kinds.items() if test(source)), None)
    except OSError as error:
        raise CheckpointError(f"can't read {source}: {error.strerror}") from error
    if kind is None:
        names = ", ".join(sorted(path.name for path in source.iterdir())[:6]) or "nothing"
        raise CheckpointError(
            f"{source} is no checkpoint folder that distkit knows: it holds {names}",
            hint="give the folder itself that DeepSpeed, torch.distributed.checkpoint, Accelerate or Lightning wrote",
        )
    return readers[kind]


def _step(found: Origin, matched: Matched) -> int:
    """What the source says; else the step counters of the optimizer's state."""
    counters = [
        int(slot.fields["step"].whole().max())
        for optimizer in matched.optimizers[:1]
        for slot in optimizer.all()
        if "step" in slot.fields and Region.whole(slot.fields["step"].shape).numel
    ]
    counted = max(counters, default=None)
    if found.step is None and counted is None:
        found.notes.append("the source doesn't say how many steps were taken: the run counts from 0")
    return found.step if found.step is not None else counted or 0


def _trainer_state(found: Origin, step: int, epoch: int, optimizers: int) -> dict[str, Any]:
    """What :mod:`distkit.resuming` restores. Positions in the data are unknown: loaders begin the epoch."""
    return {
        "step": step,
        "epoch": epoch,
        "samples": found.samples or 0,
        "metrics": {},
        "optimizer_steps": [step] * optimizers,
        "skipped_steps": [found.skipped] * optimizers,
        "schedulers": found.schedulers,
        "loaders": [],
        "strategy": {"scalers": [found.scaler]} if found.scaler else {},
        "callbacks": [],
        "global_batch": None,
        "lr_factor": 1.0,
    }


def _report(path: Path, found: Origin, matched: Matched, step: int, epoch: int) -> Imported:
    optimizers = []
    for optimizer in matched.optimizers:
        kinds: dict[str, int] = {}
        for slot in optimizer.all():
            for kind in (*slot.fields, *slot.values):
                kinds[kind] = kinds.get(kind, 0) + 1
        with_state = sum(bool(slot.fields or slot.values) for slot in optimizer.all())
        optimizers.append({"groups": len(optimizer.groups), "parameters": with_state, "fields": kinds})
    notes = [*found.notes, *matched.notes]
    for number, scheduler in enumerate(found.schedulers):
        count = scheduler.get("last_epoch")
        if isinstance(count, int) and count not in (step, epoch):
            notes.append(
                f"scheduler {number} has counted {count}, at step {step}: distkit steps it once an optimizer step"
            )
    if not matched.optimizers:
        notes.append(
            "there is no optimizer in it, so a run that has one can't go on from it: --model MODULE:FUNCTION that returns "
            "(model, optimizer) adds a fresh one, distkit checkpoint export takes the weights out"
        )
    left = [*found.left, "position in the data"]
    return Imported(
        path,
        found.kind,
        found.world_size,
        step,
        epoch,
        parameters=len(matched.model.keys() - matched.buffers),
        buffers=len(matched.buffers),
        optimizers=optimizers,
        schedulers=len(found.schedulers),
        ties=matched.ties,
        left=left,
        notes=notes,
    )
