"""Writing one checkpoint: a snapshot of this rank's share, then files, then the manifest, then the name.

Everything is written into a folder with a temporary name, which is renamed at the very end. So a checkpoint is there as a
whole or not at all, and a failure on any rank leaves older checkpoints and the training state as they were.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import distkit
from distkit.checkpoint.agreement import on_all, on_main
from distkit.checkpoint.codec import dtype_name, encode
from distkit.checkpoint.cover import cover_problem
from distkit.checkpoint.format import (
    GROUP_NAME,
    MANIFEST,
    OPTIMIZER_TENSORS,
    TRAINER,
    TRAINER_TENSORS,
    FileEntry,
    Manifest,
    StoredRegion,
    StoredTensor,
    dump_json,
    step_folder,
    tensor_from_json,
    tensor_to_json,
)
from distkit.checkpoint.tensorfile import fsync_folder, write_bytes, write_tensors, writing
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Shard, clean_name
from distkit.strategies.modules import group_name
from distkit.world import World

__all__ = ["SaveJob", "SaveRequest", "Snapshot", "take_snapshot", "this_process"]


@dataclass(frozen=True)
class SaveRequest:
    """What goes into a checkpoint besides tensors; rank 0's is used.

    Args:
        step: Optimizer steps taken.
        epoch: Epoch.
        strategy: Its name.
        layouts: Parameter groups and fields of the optimizers.
        trainer_state: What the Trainer must remember; anything that :func:`distkit.checkpoint.codec.encode` takes.
        aliases: By model group: names of tied parameters and their canonical names.
        metrics: The last evaluation, reduced over ranks.
        sequence: Place among the checkpoints of the folder.
    """

    step: int
    epoch: int
    strategy: str
    layouts: list[OptimizerLayout]
    trainer_state: dict[str, Any]
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    sequence: int = 1


@dataclass
class Snapshot:
    """This rank's share of the state: all that a save needs of the live training."""

    shards: list[Shard]
    rng: dict[str, torch.Tensor]


def take_snapshot(shards: Iterable[Shard], rng: dict[str, torch.Tensor] | None = None) -> Snapshot:
    """Note this rank's shards; tensors are referred to, not copied, so write them before the next step."""
    return Snapshot(list(shards), dict(rng or {}))


@dataclass
class _Part:
    """What one rank wrote."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[tuple[str, str, str], StoredTensor] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [[name, entry.bytes, entry.sha256] for name, entry in self.files.items()],
            "tensors": [[*key, tensor_to_json(tensor)] for key, tensor in self.tensors.items()],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> _Part:
        files = {name: FileEntry(size, sha256) for name, size, sha256 in data["files"]}
        return cls(files, {(g, n, k): tensor_from_json(tensor) for g, n, k, tensor in data["tensors"]})


class SaveJob:
    """One save. All ranks make it and call :meth:`run`.

    Args:
        folder: Where checkpoints lie.
        world: All ranks.
        request: What to write besides tensors.
    """

    def __init__(self, folder: Path, world: World, request: SaveRequest) -> None:
        self.folder, self.world, self.request = folder, world, request
        self.final = folder / step_folder(request.step)
        self._documents: dict[str, Any] = {}
        self._document_tensors: dict[str, dict[str, torch.Tensor]] = {}

    def run(self, snapshot: Snapshot) -> Path:
        """Write the checkpoint.

        Args:
            snapshot: This rank's share.

        Returns:
            Its folder.

        Raises:
            CheckpointError: The same on all ranks; nothing of this checkpoint is left then.
        """
        temporary = self.folder / on_main(self.world, self._begin)
        try:
            parts = on_all(self.world, lambda: self._write_share(temporary, snapshot).to_json())
            on_main(self.world, lambda: self._commit(temporary, [_Part.from_json(part) for part in parts]))
        except CheckpointError:  # agreed: no rank is writing any more
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.final

    def _begin(self) -> str:
        """Rank 0: what can't be stored is found before anything is written; then the folder is made."""
        request = self.request
        self._encode(TRAINER, TRAINER_TENSORS, request.trainer_state, "the Trainer's state")
        optimizers = [{"groups": layout.groups, "values": layout.values} for layout in request.layouts]
        self._encode("optimizers", OPTIMIZER_TENSORS, optimizers, "optimizers")
        metrics = {name: float(value) for name, value in request.metrics.items()}
        self._documents["metrics"] = encode(metrics, {}, "metrics")
        name = f".tmp-{step_folder(request.step)}-{this_process()}-{time.time_ns()}"
        with writing(self.folder / name):
            (self.folder / name).mkdir(parents=True)
        return name

    def _encode(self, document: str, tensor_file: str, value: Any, what: str) -> None:
        tensors: dict[str, torch.Tensor] = {}
        self._documents[document] = encode(value, tensors, what)
        self._document_tensors[tensor_file] = tensors

    def _write_share(self, temporary: Path, snapshot: Snapshot) -> _Part:
        part = _Part()
        groups = _lay_out(part, snapshot.shards, self._file_of)
        if snapshot.rng:
            groups["rng"] = snapshot.rng
        for group, tensors in groups.items():
            name = self._file_of(group)
            part.files[name] = write_tensors(temporary / name, tensors)
        return part

    def _file_of(self, group: str) -> str:
        return f"{group}-{self.world.rank:05d}.safetensors"

    def _commit(self, temporary: Path, parts: list[_Part]) -> None:
        """Rank 0: all files are on the disk; check, write the manifest, give the folder its name."""
        request = self.request
        manifest = Manifest(
            step=request.step,
            epoch=request.epoch,
            strategy=request.strategy,
            world_size=self.world.size,
            sequence=request.sequence,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            distkit=distkit.__version__,
            torch=torch.__version__,
            tensors=_merge(parts),
            aliases=request.aliases,
            optimizers=self._documents["optimizers"],
            metrics=self._documents["metrics"],
        )
        _check_layouts(manifest, request.layouts)
        for part in parts:
            manifest.files.update(part.files)
        manifest.files[TRAINER] = write_bytes(temporary / TRAINER, dump_json(self._documents[TRAINER]))
        for name, tensors in self._document_tensors.items():
            if tensors:
                manifest.files[name] = write_tensors(temporary / name, tensors)
        write_bytes(temporary / MANIFEST, manifest.to_bytes())
        with writing(self.final):
            fsync_folder(temporary)
            self._rename(temporary)
            fsync_folder(self.folder)

    def _rename(self, temporary: Path) -> None:
        """An older checkpoint of the same step is moved aside first; clean_up() puts it back if we die in between."""
        aside = self.folder / f".old-{step_folder(self.request.step)}-{time.time_ns()}"
        replaced = self.final.exists()
        if replaced:
            self.final.rename(aside)
        try:
            temporary.rename(self.final)
        except OSError:
            if replaced:
                aside.rename(self.final)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _lay_out(part: _Part, shards: Sequence[Shard], file_of: Callable[[str], str]) -> dict[str, dict[str, torch.Tensor]]:
    """Enter shards into a rank's part.

    Returns:
        By group: the tensors of its file, by key.
    """
    pieces = Counter((shard.group, shard.name, shard.kind) for shard in shards if shard.region.numel)
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for shard in shards:
        _check_shard(shard)
        identity = (shard.group, clean_name(shard.name), shard.kind)
        dtype, shape = dtype_name(shard.tensor.dtype), tuple(shard.global_shape)
        stored = part.tensors.setdefault(identity, StoredTensor(dtype, shape))
        if (stored.dtype, stored.shape) != (dtype, shape):
            raise CheckpointError(f"the shards of {' '.join(identity)} differ in dtype or shape of the whole")
        if shard.region.numel == 0:
            continue  # an empty tensor, or more ranks than rows
        keys = groups.setdefault(shard.group, {})
        key = identity[1] if shard.group.startswith("model") else f"{identity[1]}/{shard.kind}"
        if pieces[shard.group, shard.name, shard.kind] > 1:
            key += "@" + ",".join(map(str, shard.region.offset))
        while key in keys or key == "__metadata__":  # names may hold "/" and "@" themselves; the manifest has the key
            key += "'"
        keys[key] = shard.tensor
        stored.regions.append(StoredRegion(file_of(shard.group), key, shard.region))
    return groups


def _check_shard(shard: Shard) -> None:
    problem = None
    if not GROUP_NAME.fullmatch(shard.group):
        problem = "its group is not model, model_1 ... or optimizer, optimizer_1 ..."
    elif shard.group.startswith("model") and shard.kind not in ("parameter", "buffer"):
        problem = "of a model only the kinds parameter and buffer are stored"
    elif tuple(shard.tensor.shape) != tuple(shard.region.shape):
        problem = f"its values have shape {list(shard.tensor.shape)}, its region {list(shard.region.shape)}"
    if problem is not None:
        raise CheckpointError(f"the shard {shard.group} {shard.name} {shard.kind} can't be saved: {problem}")


def this_process() -> str:
    """Host and process, as they stand in the name of an unfinished folder.

    The number of the PID namespace is part of the host: two containers may have the same host name.
    """
    return f"{this_host()}-{os.getpid()}"


def this_host() -> str:
    """See :func:`this_process`."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "host"
    try:
        return f"{host}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return host


def _merge(parts: list[_Part]) -> dict[str, dict[str, dict[str, StoredTensor]]]:
    """The tensors of all ranks, each element of each of them on exactly one."""
    merged: dict[str, dict[str, dict[str, StoredTensor]]] = {}
    for rank, part in enumerate(parts):
        for (group, name, kind), piece in part.tensors.items():
            kinds = merged.setdefault(group, {}).setdefault(name, {})
            tensor = kinds.setdefault(kind, StoredTensor(piece.dtype, piece.shape))
            if (tensor.dtype, tensor.shape) != (piece.dtype, piece.shape):
                raise CheckpointError(
                    f"{group} {name} {kind} is {piece.dtype}{list(piece.shape)} on rank {rank}, but "
                    f"{tensor.dtype}{list(tensor.shape)} on ranks before it"
                )
            tensor.regions += piece.regions
    for group, names in merged.items():
        for name, kinds in names.items():
            for kind, tensor in kinds.items():
                problem = cover_problem(tensor.shape, [stored.region for stored in tensor.regions])
                if problem is not None:
                    raise CheckpointError(f"{group} {name} {kind} of shape {list(tensor.shape)}: {problem}")
    return merged


def _check_layouts(manifest: Manifest, layouts: list[OptimizerLayout]) -> None:
    """Each field that an optimizer says it has was written by some rank, and no other."""
    for index, layout in enumerate(layouts):
        group = group_name("optimizer", index)
        stored = {(name, kind): tensor.shape for g, name, kind, tensor in manifest.all_tensors() if g == group}
        said = {
            (clean_name(name), kind): tuple(shape)
            for name, kinds in layout.fields.items()
            for kind, shape in kinds.items()
        }
        for name, kind in sorted(stored.keys() ^ said.keys()):
            where = "was written, but is not in" if (name, kind) in stored else "was written by no rank, but is in"
            raise CheckpointError(f"{group} {name} {kind} {where} the optimizer's layout")
        for key, shape in said.items():
            if stored[key] != shape:
                raise CheckpointError(
                    f"{group} {key[0]} {key[1]} was written with shape {list(stored[key])}, but the optimizer's layout "
                    f"says {list(shape)}"
                )
