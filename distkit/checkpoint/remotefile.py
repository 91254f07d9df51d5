"""A safetensors file somewhere else: the header, and then only the ranges of bytes that are asked for.

It has the part of ``safetensors.safe_open``'s interface that :class:`distkit.checkpoint.tensorfile.TensorFile` uses, since
the library itself maps files of this machine only. The header is a stranger's: every offset is checked before memory is
taken on its word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

__all__ = ["RangedFile"]

MAX_HEADER_BYTES = 100_000_000
"""As in the library itself."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Of its first byte in the file."""


class RangedFile:
    """Reads tensors by range requests.

    Args:
        path: Of universal_pathlib.

    Raises:
        ValueError: It isn't a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        remote = cast(Any, path)
        self._fs, self._name = remote.fs, remote.path
        size = path.stat().st_size
        length = int.from_bytes(self._bytes(0, 8), "little") if size >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError("the header is longer than the file")
        header = json.loads(self._bytes(8, 8 + length))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
        header.pop("__metadata__", None)
        self._entries = {key: _parse(key, value, 8 + length, size) for key, value in header.items()}

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def get_tensor(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        return self.get_slice(key)[...]

    def get_slice(self, key: str) -> _Slice:
        """A tensor of which parts can be asked for.

        Raises:
            SafetensorError: There is none.
        """
        from safetensors import SafetensorError

        if key not in self._entries:
            raise SafetensorError(f"File does not contain tensor {key}")
        return _Slice(self, self._entries[key])

    def _bytes(self, begin: int, end: int) -> bytes:
        data: bytes = self._fs.cat_file(self._name, start=begin, end=end) if end > begin else b""
        if len(data) != end - begin:
            raise ValueError(f"{end - begin} bytes were asked for, {len(data)} came")
        return data


class _Slice:
    def __init__(self, file: RangedFile, entry: _Entry) -> None:
        self._file, self._entry = file, entry

    def get_dtype(self) -> str:
        return self._entry.dtype

    def get_shape(self) -> list[int]:
        return [*self._entry.shape]

    def __getitem__(self, box: Any) -> torch.Tensor:
        """One request: from the box's first element to its last, with what lies in between."""
        entry, dtype = self._entry, DTYPES[self._entry.dtype]
        whole = torch.empty(entry.shape, dtype=dtype, device="meta")
        part = whole[box]
        if part.numel() == 0:
            return torch.empty(part.shape, dtype=dtype)
        first = int(part.storage_offset())
        last = first + sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
        data = self._file._bytes(entry.begin + first * dtype.itemsize, entry.begin + (last + 1) * dtype.itemsize)
        flat = torch.frombuffer(bytearray(data), dtype=dtype)
        return flat.as_strided(part.shape, part.stride())


def _parse(key: str, value: Any, data: int, size: int) -> _Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sizes = [*shape, begin, end]
        fits = (
            dtype in DTYPES
            and all(type(n) is int and n >= 0 for n in sizes)
            and end - begin == prod(shape) * DTYPES[dtype].itemsize
            and data + end <= size
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"what the header says of {key!r} is garbled") from error
    if not fits:
        raise ValueError(f"what the header says of {key!r} doesn't fit the file")
    return _Entry(dtype, shape, data + begin)
