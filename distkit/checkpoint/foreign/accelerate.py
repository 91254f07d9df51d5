"""Folders of Accelerate's ``save_state``: plain and DDP, FSDP whole or sharded, DeepSpeed.

Written against Accelerate 1.15 (checkpointing.py, utils/fsdp_utils.py). Random states and samplers are pickles of Python
objects and are never opened.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from distkit.checkpoint.foreign.dcp import is_dcp, read_tree
from distkit.checkpoint.foreign.deepspeed import read_deepspeed
from distkit.checkpoint.foreign.optimizers import plain_optimizer
from distkit.checkpoint.foreign.origin import Origin, Pieces
from distkit.checkpoint.foreign.pickles import load_torch
from distkit.checkpoint.foreign.torch_file import state_dict_pieces
from distkit.checkpoint.foreign.trees import plain
from distkit.checkpoint.format import MAX_JSON_BYTES
from distkit.errors import CheckpointError

__all__ = ["is_accelerate", "read_accelerate"]

RANDOM_STATES = re.compile(r"random_states_(\d+)\.pkl")
MARKS = re.compile(
    r"optimizer\.bin|model\.safetensors(\.index\.json)?|pytorch_model\.bin(\.index\.json)?|pytorch_model(_fsdp(_0|\.bin))?"
    r"|optimizer_0|random_states_\d+\.pkl"
)
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.(safetensors|bin)")
LEFT = {
    r"sampler.*\.bin": "samplers (pickled objects)",
    r"dl_state_dict.*\.bin": "positions of data loaders",
    r"custom_checkpoint_\d+\.pkl": "registered objects (custom_checkpoint_*.pkl)",
}


def is_accelerate(folder: Path) -> bool:
    """Whether a folder looks like one of save_state's."""
    return any(MARKS.fullmatch(path.name) for path in folder.iterdir())


def read_accelerate(folder: Path) -> Origin:
    """Read a folder.

    Raises:
        CheckpointError: Files are missing or damaged, or it holds several models.
    """
    names = sorted(path.name for path in folder.iterdir())
    several = [n for n in names if re.fullmatch(r"(model|pytorch_model)_1\..*|pytorch_model_(fsdp_)?1(\.bin)?", n)]
    if several:
        raise CheckpointError(f"{folder} holds several models ({several[0]}); only one can be imported")
    ranks = [int(match[1]) for match in map(RANDOM_STATES.fullmatch, names) if match]
    if (folder / "pytorch_model").is_dir():
        origin = read_deepspeed(folder / "pytorch_model")
    else:
        origin = _read_model(folder)
        origin.optimizers = _optimizers(folder, names)
    origin.kind = f"accelerate, {origin.kind}" if origin.kind else "accelerate"
    origin.world_size = max(origin.world_size, 1 + max(ranks, default=0))
    for name in (n for n in names if re.fullmatch(r"scheduler(_\d+)?\.bin", n)):
        origin.schedulers.append(plain(_dict(folder / name)))
    if (folder / "scaler.pt").exists():
        origin.scaler = _dict(folder / "scaler.pt")
    if ranks:
        origin.left.append("random number generators (pickled Python objects)")
    origin.left += [words for pattern, words in LEFT.items() if any(re.fullmatch(pattern, n) for n in names)]
    return origin


def _read_model(folder: Path) -> Origin:
    if (folder / "pytorch_model_fsdp_0").is_dir():
        tree, ranks = read_tree(folder / "pytorch_model_fsdp_0")
        model = tree.get("model")
        if not isinstance(model, dict) or not model:
            raise CheckpointError(f"{folder / 'pytorch_model_fsdp_0'} holds no model")
        return Origin("fsdp", ranks, {str(k): v for k, v in model.items() if isinstance(v, Pieces)})
    if (folder / "pytorch_model_fsdp.bin").exists():
        return Origin("fsdp", 1, state_dict_pieces(_dict(folder / "pytorch_model_fsdp.bin")))
    for name, safe in (("model.safetensors", True), ("pytorch_model.bin", False)):
        files = [folder / name] if (folder / name).exists() else _listed(folder / f"{name}.index.json")
        if files:
            model = {}
            for path in files:
                model.update(_safetensors(path) if safe else state_dict_pieces(_dict(path)))
            return Origin("", 1, model, ordered=not safe)  # safetensors sorts names
    raise CheckpointError(
        f"{folder} holds no model: no model.safetensors, pytorch_model.bin, pytorch_model_fsdp* or pytorch_model/",
        hint="give the folder that save_state was given",
    )


def _optimizers(folder: Path, names: list[str]) -> list[Any]:
    found = []
    for name in names:
        if re.fullmatch(r"optimizer(_\d+)?\.bin", name):
            found.append(plain_optimizer(_dict(folder / name), str(folder / name)))
        elif re.fullmatch(r"optimizer_\d+", name) and is_dcp(folder / name):
            tree, _ = read_tree(folder / name)
            inner = tree.get("optimizer")
            found.append(plain_optimizer(inner if isinstance(inner, dict) else tree, str(folder / name)))
        elif re.fullmatch(r".*_rank\d+\.bin", name):
            raise CheckpointError(
                f"{folder / name} is one rank's part of a sharded state that says nothing of its place",
                hint="save with fsdp_state_dict_type: FULL_STATE_DICT, or SHARDED_STATE_DICT with use_dcp",
            )
    return found


def _listed(index: Path) -> list[Path]:
    """The files that an index names, in its order."""
    if not index.is_file():
        return []
    try:
        if index.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        names = list(dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{index} is garbled: {error}") from error
    for name in names:
        if not isinstance(name, str) or not SHARD.fullmatch(name):
            raise CheckpointError(f"{index} names {name!r}, which is no file of weights beside it")
    return [index.parent / name for name in names]


def _safetensors(path: Path) -> dict[str, Pieces]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {name: Pieces.of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _dict(path: Path) -> dict[str, Any]:
    data = load_torch(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is garbled: it holds a {type(data).__name__} instead of a dict")
    return data
