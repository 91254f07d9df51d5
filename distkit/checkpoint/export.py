"""A model's weights as one safetensors file that needs no distkit to read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from distkit.checkpoint.tensorfile import fsync_folder, write_tensors, writing

__all__ = ["write_weights"]


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
