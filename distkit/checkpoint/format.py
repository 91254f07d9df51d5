"""The layout of a checkpoint on disk, and its manifest.

A checkpoint is a folder ``step-00000100`` with::

    manifest.json                    written last; makes the folder a checkpoint
    trainer.json                     counters, schedulers, position in the data; its tensors in trainer.safetensors
    optimizers.safetensors           tensors inside hyper-parameters and nested optimizer states (rank 0)
    model-00000.safetensors          what rank 0 wrote of the first model; model_1-00000.safetensors of the second
    optimizer-00000.safetensors      what rank 0 wrote of the first optimizer's state
    rng-00000.safetensors            rank 0's random number generators

Files that would hold nothing are left out. The manifest says which box of which tensor lies under which key of which
file; keys are the model's own names, in optimizers ``<parameter>/<field>``, with ``@<offset>`` where one rank wrote
several boxes of one tensor. Its last line is the SHA-256 of all bytes before it.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from distkit.checkpoint.cover import cover_problem
from distkit.errors import CheckpointError
from distkit.state import Region

__all__ = [
    "MANIFEST",
    "TRAINER",
    "FileEntry",
    "Manifest",
    "StoredRegion",
    "StoredTensor",
    "read_json_file",
    "step_folder",
]

FORMAT = "distkit-checkpoint"
SCHEMA = 1
MANIFEST = "manifest.json"
TRAINER = "trainer.json"
TRAINER_TENSORS = "trainer.safetensors"
OPTIMIZER_TENSORS = "optimizers.safetensors"
MAX_JSON_BYTES = 1 << 30
"""A manifest of a million tensors has about 200 MB; what is larger than this is not read into memory."""

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
GROUP_NAME = re.compile(r"(model|optimizer)(_[1-9][0-9]*)?")
STEP_FOLDER = re.compile(r"step-(\d{8,})(\.[1-9][0-9]*)?")
CHECKSUM_LINE = b',\n"checksum": "'


def step_folder(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class FileEntry:
    """What a file must be.

    Args:
        bytes: Its size.
        sha256: Its checksum, in hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredRegion:
    """Where a box of a tensor lies: under ``key`` in ``file``."""

    file: str
    key: str
    region: Region


@dataclass
class StoredTensor:
    """One tensor of the state; the regions hold each of its elements once.

    Args:
        dtype: torch's name of it, like ``float32``.
        shape: Shape of the whole tensor.
        regions: None for a tensor without elements.
    """

    dtype: str
    shape: tuple[int, ...]
    regions: list[StoredRegion] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Size of its values."""
        from distkit.checkpoint.codec import dtype_from_name

        return prod(self.shape) * dtype_from_name(self.dtype).itemsize


@dataclass
class Manifest:
    """What a checkpoint holds.

    Args:
        step: Optimizer steps taken.
        epoch: Epoch it was taken in.
        strategy: Who wrote it.
        world_size: Number of processes that wrote it.
        sequence: Counts the checkpoints of a folder; the highest is the newest, whatever steps and clocks say.
        time: When, in ISO 8601.
        distkit: Version of distkit.
        torch: Version of torch.
        files: All files but the manifest.
        tensors: By group, name and kind.
        aliases: By model group: names of tied parameters and the names under which their values are stored.
        optimizers: Parameter groups and values without tensors of each optimizer, as the codec encodes them.
        metrics: The last evaluation, as the codec encodes it.
    """

    step: int
    epoch: int
    strategy: str
    world_size: int
    sequence: int
    time: str
    distkit: str
    torch: str
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, dict[str, dict[str, StoredTensor]]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def all_tensors(self) -> Iterator[tuple[str, str, str, StoredTensor]]:
        """Group, name, kind and tensor of each."""
        for group, names in self.tensors.items():
            for name, kinds in names.items():
                for kind, tensor in kinds.items():
                    yield group, name, kind, tensor

    def to_bytes(self) -> bytes:
        """The text of ``manifest.json``: one line a member, the checksum last."""
        body = {"format": FORMAT, "schema": SCHEMA, **vars(self)}
        body["files"] = {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in self.files.items()}
        body["tensors"] = {
            group: {name: {kind: tensor_to_json(t) for kind, t in kinds.items()} for name, kinds in names.items()}
            for group, names in self.tensors.items()
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items()]
        head = ("{\n" + ",\n".join(lines)).encode()
        return head + CHECKSUM_LINE + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a checkpoint.

        Raises:
            CheckpointError: There is none, or it is cut off, garbled, of another program or a newer distkit, or
                contradicts itself.
        """
        path = folder / MANIFEST
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder", hint="give the folder of a checkpoint, like step-00000100"
            )
        if not path.exists():
            raise CheckpointError(
                f"{folder} is not a checkpoint: it has no {MANIFEST}, which is written last",
                hint="choose another folder; this one was not finished, or is something else",
            )
        text = read_json_file(path)
        return cls.from_bytes(text, str(path))

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Parse and check the text of a manifest; ``where`` is what messages call it."""
        data = parse_json(text, where)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CheckpointError(f'{where} is not of a distkit checkpoint: it doesn\'t say "format": "{FORMAT}"')
        schema = data.get("schema")
        if type(schema) is not int or schema < 1:
            raise CheckpointError(f"{where} is garbled: schema is {schema!r}")
        if schema > SCHEMA:
            raise CheckpointError(
                f"{where} has schema {schema}; this distkit reads schemas up to {SCHEMA}", hint="pip install -U distkit"
            )
        end = text.rfind(CHECKSUM_LINE)
        if end < 0 or data.get("checksum") != hashlib.sha256(text[:end]).hexdigest():
            raise CheckpointError(f"{where} is not as it was written: its checksum differs")
        try:
            return _parse(data)
        except (_GarbledError, RecursionError) as error:
            raise CheckpointError(f"{where} is garbled: {error}") from error


def tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    """As it stands in the manifest."""
    regions = [
        {"file": r.file, "key": r.key, "offset": list(r.region.offset), "shape": list(r.region.shape)}
        for r in tensor.regions
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "regions": regions}


def tensor_from_json(data: Any, where: str = "tensor") -> StoredTensor:
    """The opposite of :func:`tensor_to_json`; checks types, not whether the regions fit."""
    _typed(data, dict, where)
    regions = []
    for i, r in enumerate(_member(data, "regions", list, where)):
        here = f"{where}.regions[{i}]"
        _typed(r, dict, here)
        region = Region(_sizes(r, "offset", here), _sizes(r, "shape", here))
        regions.append(StoredRegion(_member(r, "file", str, here), _member(r, "key", str, here), region))
    return StoredTensor(_member(data, "dtype", str, where), _sizes(data, "shape", where), regions)


def read_json_file(path: Path) -> bytes:
    """The bytes of a JSON file of a checkpoint.

    Raises:
        CheckpointError: It can't be read, is no plain file or is larger than any that distkit writes.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is not a plain file")
        if found.st_size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path} has {found.st_size:,} bytes; more than {MAX_JSON_BYTES:,} are not read as JSON"
            )
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}") from error


def dump_json(value: Any) -> bytes:
    """JSON as every reader takes it, without NaN."""
    return json.dumps(value, allow_nan=False).encode()


def parse_json(text: bytes, where: str) -> Any:
    """JSON, or a CheckpointError that says what is wrong with it."""
    if not text.strip():
        raise CheckpointError(f"{where} is empty")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{where} is garbled: nested too deeply") from error
    except ValueError as error:  # of JSON or of UTF-8
        raise CheckpointError(f"{where} is cut off or garbled: {error}") from error


class _GarbledError(Exception):
    """A member of the manifest is not what it should be."""


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise _GarbledError(f"{where} should be of type {kind.__name__}, but is {str(value)[:80]!r}")
    return value


def _member(data: dict[str, Any], key: str, kind: type, where: str = "") -> Any:
    path = f"{where}.{key}" if where else key
    if key not in data:
        raise _GarbledError(f"{path} is missing")
    return _typed(data[key], kind, path)


def _sizes(data: dict[str, Any], key: str, where: str) -> tuple[int, ...]:
    values = _member(data, key, list, where)
    if not all(type(n) is int and n >= 0 for n in values):
        raise _GarbledError(f"{where}.{key} should be whole numbers from 0 on, but is {str(values)[:80]}")
    return tuple(values)


def _parse(data: dict[str, Any]) -> Manifest:
    manifest = Manifest(
        **{key: _member(data, key, int) for key in ("step", "epoch", "world_size", "sequence")},
        **{key: _member(data, key, str) for key in ("strategy", "time", "distkit", "torch")},
        optimizers=_member(data, "optimizers", list),
        metrics=_member(data, "metrics", dict),
    )
    for name, entry in _member(data, "files", dict).items():
        where = f"files.{name}"
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise _GarbledError(f"{name!r} can't be the name of a file of a checkpoint")
        _typed(entry, dict, where)
        manifest.files[name] = FileEntry(_member(entry, "bytes", int, where), _member(entry, "sha256", str, where))
    for group, names in _member(data, "tensors", dict).items():
        if not GROUP_NAME.fullmatch(group):
            raise _GarbledError(f"{group!r} can't be a group of tensors")
        manifest.tensors[group] = {
            name: {
                kind: _checked_tensor(value, manifest.files, f"tensors.{group}.{name}.{kind}")
                for kind, value in _typed(kinds, dict, f"tensors.{group}.{name}").items()
            }
            for name, kinds in _typed(names, dict, f"tensors.{group}").items()
        }
    for group, table in _member(data, "aliases", dict).items():
        where = f"aliases.{group}"
        manifest.aliases[group] = {k: _typed(v, str, f"{where}.{k}") for k, v in _typed(table, dict, where).items()}
    return manifest


def _checked_tensor(data: Any, files: dict[str, FileEntry], where: str) -> StoredTensor:
    tensor = tensor_from_json(data, where)
    for stored in tensor.regions:
        if stored.file not in files or not stored.file.endswith(".safetensors"):
            raise _GarbledError(f"{where} lies in {stored.file!r}, which is not among the files")
    problem = cover_problem(tensor.shape, [stored.region for stored in tensor.regions])
    if problem is not None:
        raise _GarbledError(f"{where} of shape {list(tensor.shape)}: {problem}")
    return tensor
