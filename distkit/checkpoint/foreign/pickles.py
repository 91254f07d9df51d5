"""Reading what others pickled, without ever calling or building a class that a file names.

``torch.load(weights_only=True)`` builds tensors and plain values. Classes that other frameworks put beside them become
inert records of this module, under the names that the files use, so those frameworks needn't be installed. Anything else
is an error that names file and class.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from distkit.errors import CheckpointError

__all__ = ["Record", "load_bytes", "load_metadata", "load_torch", "map_bytes", "map_tensor"]

NAMED = re.compile(r"(?:GLOBAL|class|recognized function) ([\w.<>]+)")
MAX_METADATA_BYTES = 1 << 30
"""DCP's index of a million tensors has about 500 MB."""


class Record:
    """What stands for an object of a class that is not loaded: its arguments and attributes, and no behaviour."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class Stage(int):
    """DeepSpeed's ZeroStageEnum: a number."""


class _LossScaler(Record):
    """DeepSpeed's loss scalers: ``cur_scale`` and more."""


class _Fragment(Record):
    """DeepSpeed's fragment_address: ``numel`` and ``start``."""


_STAND_INS: dict[str, Callable[..., Any]] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _LossScaler,
    "deepspeed.utils.tensor_fragment.fragment_address": _Fragment,
}


def load_torch(path: Path) -> Any:
    """What ``torch.save`` wrote into a file; its tensors are mapped, so that they are read when they are used.

    Args:
        path: A file, in torch's zip format or the older one.

    Returns:
        Tensors on the CPU, numbers, strings, lists, dicts, and :class:`Record` for classes of DeepSpeed that are known.

    Raises:
        CheckpointError: It can't be read, or holds something else; names file and class.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or is no plain file")
    return _load(path, path, mmap=zipfile.is_zipfile(path))


def load_bytes(data: bytes, path: Path, *, meta: bool = False) -> Any:
    """The same for bytes that lie inside of a file.

    Args:
        data: What ``torch.save`` wrote.
        path: Where it was found; for messages.
        meta: Tensors get no values, only dtype, shape and strides.
    """
    return _load(io.BytesIO(data), path, device="meta" if meta else "cpu")


def map_bytes(path: Path) -> torch.UntypedStorage:
    """A file as a storage that is read when it is used.

    Raises:
        CheckpointError: It can't be read.
    """
    try:
        mapped: torch.UntypedStorage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)  # type: ignore[assignment]
        return mapped
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error


def map_tensor(mapped: torch.UntypedStorage, start: int, end: int, path: Path) -> torch.Tensor:
    """A tensor that ``torch.save`` wrote into a part of a file, mapped and not read.

    The pickled part says dtype and shape; the values are one uncompressed record of the zip archive.

    Args:
        mapped: The file, from :func:`map_bytes`.
        start: First byte of the archive.
        end: The byte behind it.
        path: The file's name.

    Raises:
        CheckpointError: It is no such tensor.
    """
    data = _read(path, start, end)
    form = load_bytes(data, path, meta=True)
    if not isinstance(form, torch.Tensor):
        raise CheckpointError(
            f"{path} is damaged: at byte {start} it should hold a tensor, but has {type(form).__name__}"
        )
    nbytes = form.numel() * form.element_size()
    where = _record(data, nbytes) if nbytes and form.is_contiguous() and form.storage_offset() == 0 else None
    if where is None:
        loaded: torch.Tensor = load_bytes(data, path)
        return loaded
    values = torch.empty(0, dtype=form.dtype)
    return values.set_(mapped[start + where : start + where + nbytes], 0, form.shape, form.stride())


def load_metadata(path: Path) -> Record:
    """The index of a folder of torch.distributed.checkpoint, a bare pickle: its dataclasses as :class:`Record`.

    Raises:
        CheckpointError: It can't be read, or holds something else; names file and class.
    """
    try:
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_METADATA_BYTES:,} bytes, and is not read")
        with path.open("rb") as file:
            found = _MetadataUnpickler(file, path).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}") from error
    except Exception as error:  # a garbled pickle makes the unpickler raise almost anything
        raise CheckpointError(f"{path} is cut off or garbled: {type(error).__name__}: {error}") from error
    if not isinstance(found, _Metadata):
        raise CheckpointError(f"{path} is no index of torch.distributed.checkpoint: it holds a {type(found).__name__}")
    return found


class _Metadata(Record):
    """torch.distributed.checkpoint.metadata.Metadata."""


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that ``.metadata`` needs, and gives a record for each; torch itself gives only its dtypes."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """Called for every class or function that the pickle names."""
        known = _METADATA_CLASSES.get(f"{module}.{name}")
        if known is not None:
            return known
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        _refuse(self.path, f"{module}.{name}")


def _shape(sizes: Any = ()) -> tuple[int, ...]:
    return tuple(int(n) for n in sizes)


def _text(*parts: Any) -> str:
    return "/".join(map(str, parts))


_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES: dict[str, Callable[..., Any]] = {
    f"{_DCP}.metadata.Metadata": _Metadata,
    f"{_DCP}.metadata.MetadataIndex": type("MetadataIndex", (Record,), {}),
    f"{_DCP}.metadata.TensorStorageMetadata": type("TensorStorageMetadata", (Record,), {}),
    f"{_DCP}.metadata.BytesStorageMetadata": type("BytesStorageMetadata", (Record,), {}),
    f"{_DCP}.metadata.ChunkStorageMetadata": type("ChunkStorageMetadata", (Record,), {}),
    f"{_DCP}.metadata.TensorProperties": type("TensorProperties", (Record,), {}),
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _text,
    f"{_DCP}.metadata.StorageMeta": type("StorageMeta", (Record,), {}),
    f"{_DCP}.filesystem._StorageInfo": type("StorageInfo", (Record,), {}),
    "torch.Size": _shape,
    "torch.serialization._get_layout": _text,
    "collections.OrderedDict": OrderedDict,
    **{f"{module}.{name}": _text for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


def _load(source: Any, path: Path, *, device: str = "cpu", mmap: bool = False) -> Any:
    try:
        with _only(_STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source, map_location=device, weights_only=True, mmap=mmap or None)
    except Exception as error:  # a garbled pickle makes the unpickler raise almost anything
        named = NAMED.search(str(error))
        if isinstance(error, pickle.UnpicklingError) and named:
            _refuse(path, named[1], error)
        why = str(error).strip().partition("\n")[0][:200]
        raise CheckpointError(
            f"{path} can't be read as tensors and plain values: {type(error).__name__}: {why}"
        ) from error


@contextmanager
def _only(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Exactly these classes may be built: none that this process allowed for itself."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([(function, name) for name, function in stand_ins.items()])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _refuse(path: Path, name: str, error: Exception | None = None) -> NoReturn:
    raise CheckpointError(
        f"{path} holds an object of {name}, which is no tensor and no plain value; it is not built",
        hint="save tensors, numbers, strings, lists and dicts only, such as what state_dict() returns, and import that",
    ) from error


def _read(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _record(data: bytes, nbytes: int) -> int | None:
    """Where the values of the only tensor of an archive begin, if they lie there as they are."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found = [entry for entry in archive.infolist() if entry.filename.rpartition("/")[0].endswith("/data")]
            byteorder = [entry for entry in archive.infolist() if entry.filename.endswith("/byteorder")]
            native = all(archive.read(entry).decode() == sys.byteorder for entry in byteorder)
    except (zipfile.BadZipFile, ValueError):
        return None
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].file_size != nbytes or not native:
        return None
    header = found[0].header_offset
    sizes = data[header + 26 : header + 30]  # lengths of name and extra field, which lie before the values
    return header + 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")
