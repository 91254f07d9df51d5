"""Checkpoints: tensors in safetensors, everything else in JSON, one manifest that makes a folder a checkpoint.

State is seen only as :class:`distkit.state.Shard`, so nothing here knows of any engine, and what was written by one
strategy on any number of processes is read by every other. The layout on disk is described in
:mod:`distkit.checkpoint.format`.
"""

from distkit.checkpoint.listing import CheckpointInfo, inspect_checkpoint, list_checkpoints
from distkit.checkpoint.load import CheckpointReader
from distkit.checkpoint.manager import CheckpointManager
from distkit.checkpoint.rng import collect_rng, restore_rng

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointReader",
    "collect_rng",
    "inspect_checkpoint",
    "list_checkpoints",
    "restore_rng",
]
