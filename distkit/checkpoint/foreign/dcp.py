"""Folders of torch.distributed.checkpoint, as FSDP, torchtitan and others write them: ``.metadata`` and ``*.distcp``.

Written against torch 2.13; the index has had this form since torch 2.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint.foreign.optimizers import is_optimizer, plain_optimizer
from distkit.checkpoint.foreign.origin import Origin, Pieces, whole_number
from distkit.checkpoint.foreign.pickles import Record, load_bytes, load_metadata, load_torch, map_bytes, map_tensor
from distkit.checkpoint.foreign.trees import LIGHTNING_VERSION, lightning_leftovers, pick_counters, take_schedulers
from distkit.errors import CheckpointError
from distkit.state import Region

__all__ = ["METADATA", "is_dcp", "read_dcp", "read_tree"]

METADATA = ".metadata"
DATA_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
RANK = re.compile(r"__(\d+)_\d+\.distcp")
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = re.compile(r"(optimizers?|optim)(_\d+)?")
LIGHTNING_META = "meta.pt"
"""What Lightning saves beside a sharded checkpoint: counters, schedulers, loops."""


def is_dcp(folder: Path) -> bool:
    """Whether a folder was written by torch.distributed.checkpoint."""
    return (folder / METADATA).is_file()


def read_dcp(folder: Path) -> Origin:
    """Read a folder.

    Raises:
        CheckpointError: It is damaged, or holds no model.
    """
    tree, world_size = read_tree(folder)
    kind = "torch.distributed.checkpoint"
    if (folder / LIGHTNING_META).exists():
        meta = load_torch(folder / LIGHTNING_META)
        tree = {**(meta if isinstance(meta, dict) else {}), **tree}
        kind = f"lightning {tree.get(LIGHTNING_VERSION, '')}, {kind}"
    tree = _unwrapped(tree)
    key = next((k for k in MODEL_KEYS if isinstance(tree.get(k), dict)), None)
    if key is not None:
        model = {name: value for name, value in _flat(tree[key]).items() if isinstance(value, Pieces)}
        rest = {k: v for k, v in tree.items() if k != key}
    else:  # torchtitan puts the model's names beside the other keys
        model = {name: value for name, value in tree.items() if isinstance(value, Pieces) and value.shape != ()}
        rest = {k: v for k, v in tree.items() if k not in model}
    if not model:
        raise CheckpointError(
            f"{folder} holds no model: its keys are {', '.join(sorted(map(str, tree))[:10])}",
            hint='save it as {"model": ..., "optimizer": ...}',
        )
    optimizers = [k for k in rest if OPTIMIZER_KEYS.fullmatch(str(k)) and is_optimizer(rest[k])]
    origin = Origin(kind, world_size, model)
    origin.left = lightning_leftovers(rest)
    origin.optimizers = [plain_optimizer(rest.pop(k), f"{k!r} in {folder}") for k in sorted(optimizers)]
    for nested in ("train_state", "trainer", "progress"):
        inner = rest.get(nested)
        if isinstance(inner, dict) and whole_number(inner, "step", "global_step") is not None:
            rest = {**inner, **{k: v for k, v in rest.items() if k != nested}}
    origin.schedulers = take_schedulers(rest)
    pick_counters(origin, rest)
    return origin


def read_tree(folder: Path) -> tuple[dict[str, Any], int]:
    """The state dict that was saved, with :class:`Pieces` for tensors, and the number of ranks that wrote.

    Raises:
        CheckpointError: It is damaged, or written by an extension of torch's format.
    """
    metadata = load_metadata(folder / METADATA)
    entries, places = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    paths = getattr(metadata, "planner_data", None)
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{folder / METADATA} is garbled: it lists no tensors")
    reader = _Items(folder, places)
    tree: dict[str, Any] = {}
    for name, entry in entries.items():
        path = paths.get(name) if isinstance(paths, dict) else None
        node = tree
        *above, last = path if isinstance(path, tuple) and path else (name,)
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"{folder / METADATA} is garbled: {name} lies below a value")
        node[last] = reader.tensor(name, entry) if hasattr(entry, "chunks") else reader.value(name)
    return tree, reader.ranks()


class _Items:
    """The items that lie in the data files, found by name and offset."""

    def __init__(self, folder: Path, places: Mapping[Any, Any]) -> None:
        self.folder = folder
        self.index = folder / METADATA
        self._mapped: dict[str, torch.UntypedStorage] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for key, place in places.items():
            offset = getattr(key, "offset", None)
            if offset is not None and not isinstance(offset, tuple):
                raise CheckpointError(f"{self.index} is garbled: an offset is {offset!r}")
            self._places[str(getattr(key, "fqn", "")), offset] = place

    def ranks(self) -> int:
        """How many ranks wrote, by the names of files."""
        found = [RANK.fullmatch(str(getattr(p, "relative_path", ""))) for p in self._places.values()]
        return 1 + max((int(match[1]) for match in found if match), default=0)

    def value(self, name: str) -> Any:
        """An item that is no tensor."""
        path, start, end = self._find(name, None)
        with path.open("rb") as file:
            file.seek(start)
            return load_bytes(file.read(end - start), path)

    def tensor(self, name: str, entry: Record) -> Pieces:
        """A tensor from its chunks."""
        try:
            shape = tuple(entry.size)  # type: ignore[attr-defined]
            boxes = [Region(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]  # type: ignore[attr-defined]
        except (AttributeError, TypeError) as error:
            raise CheckpointError(f"{self.index} is garbled: {name} has no size or chunks") from error
        parts = []
        for box in boxes:
            path, start, end = self._find(name, box.offset)
            values = map_tensor(self._map(path), start, end, path)
            if tuple(values.shape) != box.shape:
                raise CheckpointError(
                    f"{path} is damaged: {name} from {list(box.offset)} on has shape {list(values.shape)} there, but "
                    f"{list(box.shape)} in {METADATA}"
                )
            parts.append((box, values))
        if not parts:
            raise CheckpointError(f"{self.index} is garbled: {name} has no chunks")
        return Pieces(shape, parts[0][1].dtype, tuple(parts))

    def _find(self, name: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        place = self._places.get((name, offset))
        file, start, length = (getattr(place, key, None) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise CheckpointError(f"{self.index} doesn't say where {name} lies")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{name} in {self.folder} was written through an extension: {place.transform_descriptors}",  # type: ignore[union-attr]
                hint="save it without extensions, such as compression",
            )
        path = self.folder / file
        if not DATA_FILE.fullmatch(file) or not path.is_file():
            raise CheckpointError(f"{path}, in which {name} should lie, is missing or outside of the folder")
        if start + length > path.stat().st_size:
            raise CheckpointError(f"{path} is cut off: {name} should end at byte {start + length:,}")
        return path, start, start + length

    def _map(self, path: Path) -> torch.UntypedStorage:
        if path.name not in self._mapped:
            self._mapped[path.name] = map_bytes(path)
        return self._mapped[path.name]


def _unwrapped(tree: dict[str, Any]) -> dict[str, Any]:
    """The state below one key of the user's, like ``app`` in torch's tutorial."""
    inner = [value for value in tree.values() if isinstance(value, dict)]
    if len(inner) == 1 and not any(k in tree for k in MODEL_KEYS) and any(k in inner[0] for k in MODEL_KEYS):
        return {**{k: v for k, v in tree.items() if v is not inner[0]}, **inner[0]}
    return tree


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Names of nested dicts joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
