"""A model's weights as safetensors, in one file or several, that need no distkit to read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from distkit.checkpoint.tensorfile import fsync_folder, write_bytes, write_tensors, writing
from distkit.errors import CheckpointError

__all__ = ["split_by_size", "write_sharded_weights", "write_weights"]

INDEX = "model.safetensors.index.json"


def write_weights(path: Path, state: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
    """Write a state dict; a file that is there is replaced at the end, in one step.

    Args:
        path: The file.
        state: Whole tensors by name.
        aliases: Names of tied parameters and the names under which their values are stored. They go into the file's
            metadata, as ``safetensors.torch.save_model`` does.

    Raises:
        CheckpointError: It can't be written.
    """
    tensors = {name: tensor for name, tensor in state.items() if aliases.get(name) not in state}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
    try:
        write_tensors(beside, tensors, dict(aliases))
        with writing(path):
            beside.replace(path)
            fsync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def split_by_size(sizes: Iterable[tuple[str, int]], most: int) -> list[list[str]]:
    """Names in their order, cut where a part would pass ``most`` bytes; a larger tensor is a part of its own."""
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes:
        if not parts or size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    return parts


def write_sharded_weights(
    folder: Path,
    parts: Sequence[Sequence[str]],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> list[Path]:
    """Write a folder as transformers' ``from_pretrained`` takes it: numbered files and an index, which comes last.

    Args:
        folder: Is made; must hold no weights yet.
        parts: Names, file by file.
        read: Gives a whole tensor by its name; those of one file are in memory at a time.
        metadata: Strings for the headers.

    Returns:
        The files.

    Raises:
        CheckpointError: They can't be written, or weights are there already.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if there:
        raise CheckpointError(
            f"{folder} holds {there[0]} already; files of two models would mix",
            hint="give another folder, or remove what is in it",
        )
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(parts, start=1):
        file = folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: read(name) for name in names}
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_tensors(file, tensors, metadata)
        weight_map.update(dict.fromkeys(names, file.name))
        files.append(file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_bytes(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    fsync_folder(folder)
    return files
