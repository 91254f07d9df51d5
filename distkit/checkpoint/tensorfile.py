"""One safetensors file: written tensor by tensor, hashed on the way; read box by box.

safetensors' own writer takes all tensors at once, contiguous and on the host, and its errors carry no errno. This one
brings one tensor at a time to the host, so that the extra memory of a save is that of the largest tensor, and computes
the checksum from what was meant to be written, not from what a failing disk gives back. The format is that of
https://github.com/huggingface/safetensors#format. Reading is left to the library.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from distkit.checkpoint.codec import dtype_name
from distkit.checkpoint.format import FileEntry
from distkit.checkpoint.paths import is_local
from distkit.errors import CheckpointError

__all__ = ["TensorFile", "explain", "fsync_folder", "refuse_special", "write_bytes", "write_tensors", "writing"]

NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Types that every safetensors since 0.4.3 reads. Others (complex, unsigned) are stored as their bytes: one more
dimension, of ``itemsize`` elements of U8; the manifest has the true dtype."""

ALIGNMENT = 64
CHUNK = 4 << 20


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new safetensors file and flush it to the disk.

    Args:
        path: Must not exist.
        tensors: Of any strides, on any device, of any dtype with whole bytes.
        metadata: Strings for the header.

    Returns:
        Its size and checksum.

    Raises:
        CheckpointError: A tensor has no plain values, or the file can't be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    order = sorted(tensors, key=lambda key: -tensors[key].element_size())  # all aligned to their own size
    position = 0
    for key in order:
        tensor = tensors[key]
        refuse_special(key, tensor)
        length = tensor.numel() * tensor.element_size()
        native = tensor.dtype in NATIVE
        shape = [*tensor.shape] if native else [*tensor.shape, tensor.element_size()]
        dtype = NATIVE.get(tensor.dtype, "U8")
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + length]}
        position += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with _new_file(path) as (file, digest):
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            file.write(part)
        for key in order:
            _write_tensor(file, digest, tensors[key])
    return FileEntry(8 + len(text) + position, digest.hexdigest())


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write a new file and flush it to the disk.

    Raises:
        CheckpointError: It can't be written.
    """
    with _new_file(path) as (file, digest):
        digest.update(data)
        file.write(data)
    return FileEntry(len(data), digest.hexdigest())


def fsync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk, without which a finished file may be gone after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't, and needn't
            raise
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says into an error that names the file, the cause and a remedy."""
    try:
        yield
    except OSError as error:
        raise explain(error, path) from error


def explain(error: OSError, path: Path) -> CheckpointError:
    """The error for a file that can't be written."""
    hints = {
        errno.ENOSPC: "free space there, or keep fewer: --set checkpoint.keep=1",
        errno.EDQUOT: "free space under your quota, or keep fewer: --set checkpoint.keep=1",
        errno.EROFS: "choose a folder that can be written: --set run_dir=DIR",
        errno.EACCES: "choose a folder that can be written: --set run_dir=DIR",
        errno.EPERM: "choose a folder that can be written: --set run_dir=DIR",
        errno.ENOTDIR: "a part of this path is a file; choose another: --set run_dir=DIR",
        errno.ENOENT: "put the run's folder where all nodes see it: --set run_dir=DIR",
    }
    return CheckpointError(f"can't write {path}: {error.strerror or error}", hint=hints.get(error.errno or 0))


class TensorFile:
    """A safetensors file, mapped into memory or read range by range: only what is asked for is read.

    Args:
        path: The file.

    Raises:
        CheckpointError: It isn't a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            if is_local(path):
                self._file: Any = safe_open(str(path), framework="pt", device="cpu")
            else:
                from distkit.checkpoint.remotefile import RangedFile

                self._file = RangedFile(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error

    def read_into(self, out: torch.Tensor, key: str, box: tuple[slice, ...], *, whole: bool) -> None:
        """Copy a box of a tensor into ``out``; the tensor has been through :meth:`check`.

        A copy and not a view: a view would read a file that may be deleted by then.

        Args:
            out: Where to; of the box's shape and the tensor's true dtype.
            key: The tensor.
            box: Which part.
            whole: Whether the box is the whole.
        """
        source = self._file.get_tensor(key) if whole else self._file.get_slice(key)[box]
        if out.dtype not in NATIVE:
            source = source.clone().view(out.dtype).squeeze(-1)  # cloned: a view of another dtype needs alignment
        out.copy_(source)

    def check(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raise a CheckpointError unless the tensor is there, of this dtype and shape."""
        from safetensors import SafetensorError

        wanted = (NATIVE[dtype], [*shape]) if dtype in NATIVE else ("U8", [*shape, dtype.itemsize])
        try:
            entry = self._file.get_slice(key)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path} has no tensor {key!r}, which the manifest says it has") from error
        found = (str(entry.get_dtype()), list(entry.get_shape()))
        if found != wanted:
            raise CheckpointError(
                f"{self.path}: {key!r} is {found[0]}{found[1]}, but by the manifest {wanted[0]}{wanted[1]}"
            )

    def get_all(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, as they lie in the file."""
        return {key: self._file.get_tensor(key).clone() for key in list(self._file.keys())}


@contextmanager
def _new_file(path: Path) -> Iterator[tuple[BinaryIO, hashlib._Hash]]:
    """On this machine the file must be new, and is on the disk afterwards; elsewhere it is there when it is closed."""
    with writing(path), path.open("xb" if is_local(path) else "wb") as file:
        yield cast(BinaryIO, file), hashlib.sha256()
        if is_local(path):
            file.flush()
            os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    if tensor.numel() == 0:
        return
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK):  # small enough that hashing leaves it in the cache for writing
        piece = data[start : start + CHUNK]
        digest.update(piece)
        file.write(piece)


def refuse_special(key: str, tensor: torch.Tensor) -> None:
    """Raise a CheckpointError for a tensor without plain values; ``key`` is what the message calls it."""
    special = None
    if tensor.layout != torch.strided:
        special = f"of the layout {tensor.layout}"
    elif tensor.is_quantized:
        special = f"quantized ({tensor.dtype})"
    elif tensor.is_meta:
        special = "on the meta device, without values"
    elif hasattr(tensor, "to_local"):
        special = "a DTensor, of which only the local part can be written"
    if special is not None:
        raise CheckpointError(f"the tensor {key!r} ({dtype_name(tensor.dtype)}) is {special}; it can't be saved")
