"""Real text with no download: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

VALIDATION_SHARE = 0.1
LARGEST_PART = 16_384
"""Bytes that are taken from one file, so that no single one decides the result."""
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "pydoc_data", "turtledemo"}
"""Folders that aren't the library's own code, or are tables."""


def read_text(limit: int) -> tuple[bytes, bytes]:
    """Training and validation text. Which of them a file belongs to follows from its name alone.

    Args:
        limit: Bytes of training text at most; validation gets its share of that.
    """
    library = Path(sysconfig.get_path("stdlib"))
    # In the order of the names' hashes, so that a small limit gives a mixture and not the letter a.
    files = sorted((hashlib.sha256(name.encode()).digest(), name) for name in _source_files(library))
    train, validation = bytearray(), bytearray()
    for digest, name in files:
        text = validation if digest[-1] < 256 * VALIDATION_SHARE else train
        if len(text) < limit:
            text += (library / name).read_bytes()[:LARGEST_PART]
    return bytes(train[:limit]), bytes(validation[: int(limit * VALIDATION_SHARE)])


def _source_files(library: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        yield from ((Path(folder) / name).relative_to(library).as_posix() for name in names if name.endswith(".py"))


class Blocks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A text cut into blocks that don't overlap, each with the same block one byte later as its target.

    Args:
        text: Any bytes.
        length: Bytes in a block.
    """

    def __init__(self, text: bytes, length: int) -> None:
        if len(text) <= length:
            raise ValueError(f"a text of {len(text)} bytes has no block of {length} bytes and one more to predict")
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two int64 tensors of shape (length,)."""
        start = index * self.length
        block = self.bytes[start : start + self.length + 1].long()
        return block[:-1], block[1:]
