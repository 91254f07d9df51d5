"""Writing one checkpoint: the files of all ranks, then the manifest, then the name.

The store (:mod:`distkit.checkpoint.store`) sees to it that a checkpoint is there as a whole or not at all; a failure on any
rank leaves older checkpoints and the training state as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    tensor_from_json,
    tensor_to_json,
)
from distkit.checkpoint.listing import list_checkpoints
from distkit.checkpoint.paths import look_again
from distkit.checkpoint.snapshot import Snapshot
from distkit.checkpoint.store import Store
from distkit.checkpoint.tensorfile import write_bytes, write_tensors
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Shard, clean_name
from distkit.strategies.modules import group_name
from distkit.world import World

__all__ = ["SaveJob", "SaveRequest"]


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
    """

    step: int
    epoch: int
    strategy: str
    layouts: list[OptimizerLayout]
    trainer_state: dict[str, Any]
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


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
    """One save: made by all ranks, encoded on rank 0, then run by all.

    Args:
        store: Where checkpoints lie.
        request: What to write besides tensors.
    """

    def __init__(self, store: Store, request: SaveRequest) -> None:
        self.store, self.request = store, request
        self._documents: dict[str, Any] = {}
        self._document_tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._sequence = 0

    def encode(self, *, copy: bool) -> str:
        """Rank 0, before :meth:`run`: what can't be stored is found before anything is written.

        Args:
            copy: Copy the tensors in it, because training goes on while they are written.

        Returns:
            The checkpoint's name.

        Raises:
            CheckpointError: A value is of a type that isn't stored; names its place.
        """
        request = self.request
        self._encode(TRAINER, TRAINER_TENSORS, request.trainer_state, "the Trainer's state", copy)
        optimizers = [{"groups": layout.groups, "values": layout.values} for layout in request.layouts]
        self._encode("optimizers", OPTIMIZER_TENSORS, optimizers, "optimizers", copy)
        metrics = {name: float(value) for name, value in request.metrics.items()}
        self._documents["metrics"] = encode(metrics, {}, "metrics")
        return self.store.name_for(request.step)

    def _encode(self, document: str, tensor_file: str, value: Any, what: str, copy: bool) -> None:
        tensors: dict[str, torch.Tensor] = {}
        self._documents[document] = encode(value, tensors, what)
        self._document_tensors[tensor_file] = {
            key: tensor.detach().to("cpu", copy=True) if copy else tensor for key, tensor in tensors.items()
        }

    def run(self, name: str, world: World, snapshot: Snapshot) -> Path:
        """Write the checkpoint; called by all ranks.

        Args:
            name: From rank 0's :meth:`encode`.
            world: All ranks.
            snapshot: This rank's share.

        Returns:
            Its folder.

        Raises:
            CheckpointError: The same on all ranks; nothing of this checkpoint is left then.
        """
        temporary = on_main(world, lambda: self._begin(name))
        folder = self.store.folder / temporary
        try:
            parts = on_all(world, lambda: self._write_share(folder, snapshot, world.rank).to_json())
            on_main(world, lambda: self._commit(temporary, name, [_Part.from_json(part) for part in parts]))
        except CheckpointError:  # agreed: no rank is writing any more
            if world.is_main:
                self.store.abandon(temporary)
            raise
        return self.store.folder / name

    def _begin(self, name: str) -> str:
        """Rank 0: its place in the order of checkpoints, and a folder to write into."""
        self._sequence = 1 + max((info.sequence for info in list_checkpoints(self.store.folder)), default=0)
        return self.store.begin(name)

    def _write_share(self, folder: Path, snapshot: Snapshot, rank: int) -> _Part:
        def file_of(group: str) -> str:
            return f"{group}-{rank:05d}.safetensors"

        part = _Part()
        snapshot.arrived()
        groups = _lay_out(part, snapshot.shards, file_of)
        if snapshot.rng:
            groups["rng"] = snapshot.rng
        for group, tensors in groups.items():
            part.files[file_of(group)] = write_tensors(folder / file_of(group), tensors)
        return part

    def _commit(self, temporary: str, name: str, parts: list[_Part]) -> None:
        """Rank 0: all ranks' files are written; check, write the manifest, let the checkpoint be found."""
        request, folder = self.request, self.store.folder / temporary
        manifest = Manifest(
            step=request.step,
            epoch=request.epoch,
            strategy=request.strategy,
            world_size=len(parts),
            sequence=self._sequence,
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
        manifest.files[TRAINER] = write_bytes(folder / TRAINER, dump_json(self._documents[TRAINER]))
        for file, tensors in self._document_tensors.items():
            if tensors:
                manifest.files[file] = write_tensors(folder / file, tensors)
        self._check_all_there(folder, manifest)
        write_bytes(folder / MANIFEST, manifest.to_bytes())
        self.store.publish(temporary, name)

    def _check_all_there(self, folder: Path, manifest: Manifest) -> None:
        """What the other ranks wrote must be where this one, and the run that resumes, looks for it."""
        look_again(folder)
        missing = sorted(set(manifest.files) - {file.name for file in folder.iterdir()})
        if missing:
            raise CheckpointError(
                f"{folder} has no {missing[0]}, which another rank wrote: ranks don't see the same folder",
                hint="put checkpoints where all ranks see them: --set checkpoint.dir=...",
            )


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
