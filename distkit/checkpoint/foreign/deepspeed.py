"""Folders that DeepSpeed's ``save_checkpoint`` wrote, of ZeRO 0 to 3 on any number of processes.

Written against DeepSpeed 0.19.8. Each rank has its partition of flat buffers; which parameter lies where follows from
``param_shapes`` and the rules of ``deepspeed/utils/zero_to_fp32.py``:

* Stages 1 and 2: a group's parameters one behind the other, cut into partitions of equal length; the last are padded.
* Stage 3: each parameter is cut into equal parts, the last one padded; a rank's buffer has its part of each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint.foreign.optimizers import plain_optimizer, split_state
from distkit.checkpoint.foreign.origin import Origin, OriginOptimizer, Pieces, Slot, flat_pieces, whole_number
from distkit.checkpoint.foreign.pickles import Record, load_torch
from distkit.checkpoint.foreign.trees import (
    LIGHTNING_VERSION,
    lightning_leftovers,
    pick_counters,
    plain,
    take_schedulers,
)
from distkit.errors import CheckpointError

__all__ = ["is_deepspeed", "read_deepspeed"]

LATEST = "latest"
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
STEP_TAG = re.compile(r"global_step(\d+)")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OTHER_FILE = re.compile(r"layer_.*\.pt|.*expert_.*\.pt")
OWN_KEYS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "lr_scheduler",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
)
"""What DeepSpeed writes itself (engine.py, _common_checkpoint_state); other keys are the user's client_state."""


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder looks like one of DeepSpeed's, or holds one."""
    names = [path.name for path in folder.iterdir()]
    return LATEST in names or any(MODEL_FILE.fullmatch(n) or STEP_TAG.fullmatch(n) for n in names)


def read_deepspeed(folder: Path) -> Origin:
    """Read a folder: the one that ``save_checkpoint`` was given, or a ``global_stepN`` in it.

    Raises:
        CheckpointError: Files are missing or damaged, or are those of tensor, pipeline or expert parallelism.
    """
    files = _Files(_tagged(folder))
    first = files.model(0)
    if "module" not in first:
        raise CheckpointError(f"{files.models[0]} is no file of DeepSpeed's engine: it has no 'module'")
    optimizers = files.optimizer_states()
    if not optimizers:
        stage = 0
        if first.get("param_shapes"):
            raise CheckpointError(f"{files.folder} has no *_optim_states.pt, though it was written by ZeRO")
    else:
        stage = int(optimizers[0].get("zero_stage", 1))  # BF16_Optimizer, which is stage 1, writes none
    world_size = max(len(optimizers), whole_number(first, "dp_world_size") or 1)
    origin = Origin(f"deepspeed zero{stage}", world_size, {})
    origin.ties = dict(first.get("shared_params") or {})
    origin.buffers = set(first.get("buffer_names") or ())
    if stage == 3:
        _read_stage_3(origin, files, optimizers)
    else:
        origin.model = {n: Pieces.of(t) for n, t in first["module"].items() if isinstance(t, torch.Tensor)}
        if optimizers:
            _read_stages_1_2(origin, first, optimizers, files.folder)
        elif isinstance(first.get("optimizer"), dict):
            origin.optimizers = [_whole_optimizer(first["optimizer"], files.models[0])]
    _take_counters(origin, first, optimizers)
    return origin


class _Files:
    """The files of one tag, in the order of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name for path in folder.iterdir())
        others = [name for name in names if OTHER_FILE.fullmatch(name)]
        models = {int(m[1] or 0): m for m in map(MODEL_FILE.fullmatch, names) if m}
        states = {int(m[1]): m for m in map(OPTIMIZER_FILE.fullmatch, names) if m}
        parallel = [m[0] for m in (*models.values(), *states.values()) if int(m[2])]
        if others or parallel:
            raise CheckpointError(
                f"{folder} was written under tensor, pipeline or expert parallelism: {(others + parallel)[0]}; only ZeRO "
                "checkpoints are read",
                hint="save the whole model's state dict in the run that wrote it, and import that",
            )
        if not models:
            raise CheckpointError(
                f"{folder} has no *_model_states.pt", hint="give the folder that save_checkpoint was given"
            )
        self.models = self._in_order(models)
        self.states = self._in_order(states)
        self._loaded: dict[int, dict[str, Any]] = {}

    def _in_order(self, found: Mapping[int, re.Match[str]]) -> list[Path]:
        missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
        if missing:
            raise CheckpointError(
                f"{self.folder}: the file of rank {missing[0]} is missing: no {found[max(found)][0]!r} like it"
            )
        return [self.folder / found[rank][0] for rank in sorted(found)]

    def model(self, rank: int) -> dict[str, Any]:
        """The model file of a rank."""
        if rank not in self._loaded:
            self._loaded[rank] = _dict(load_torch(self.models[rank]), self.models[rank])
        return self._loaded[rank]

    def optimizer_states(self) -> list[dict[str, Any]]:
        """The optimizer file of each rank."""
        found = []
        for path in self.states:
            whole = _dict(load_torch(path), path)
            found.append(_dict(whole.get("optimizer_state_dict"), path))
        if found:
            count = found[0].get("partition_count", len(found))
            counts = set(count) if isinstance(count, list) else {count}
            if counts != {len(found)}:
                raise CheckpointError(
                    f"{self.folder} holds files of {len(found)} ranks, but they say that there were {sorted(counts)}",
                    hint="copy the files of all ranks into one folder",
                )
        return found


def _tagged(folder: Path) -> Path:
    """The folder of the newest tag, as ``latest`` says."""
    latest = folder / LATEST
    if latest.is_file():
        try:
            tag = latest.read_bytes()[:256].decode("ascii").strip()
        except (UnicodeDecodeError, OSError) as error:
            raise CheckpointError(f"{latest} is no name of a folder") from error
        if not TAG.fullmatch(tag) or not (folder / tag).is_dir():
            raise CheckpointError(f"{latest} says {tag!r}, but there is no such folder beside it")
        return folder / tag
    if any(MODEL_FILE.fullmatch(path.name) for path in folder.iterdir()):
        return folder
    tags = [path for path in folder.iterdir() if STEP_TAG.fullmatch(path.name) and path.is_dir()]
    if len(tags) == 1:
        return tags[0]
    raise CheckpointError(
        f"{folder} has no file {LATEST!r}, and {len(tags)} folders that could be meant",
        hint=f"give one of them, like {folder}/global_step100",
    )


def _read_stages_1_2(
    origin: Origin, first: Mapping[str, Any], states: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    shapes = _group_shapes(first, folder)
    base = [_base(state, "base_optimizer_state", folder) for state in states]
    masters = [_tensors(state.get("single_partition_of_fp32_groups"), folder) for state in states]
    stripped = "zero_stage" in states[0]  # BF16_Optimizer leaves the padding in
    optimizer = OriginOptimizer([], [])
    for index, group in enumerate(shapes):
        what = f"parameter group {index} in {folder}"
        lengths = {
            m[index].numel() + (int(s["group_paddings"][index]) if stripped and "group_paddings" in s else 0)
            for m, s in zip(masters, states, strict=True)
        }
        if len(lengths) != 1:
            raise CheckpointError(f"{what} is cut into partitions of different lengths: {sorted(lengths)}")
        (length,) = lengths
        gaps = (states[0].get("param_alignment_paddings") or [[]] * len(shapes))[index] or [0] * len(group)
        starts = _running([prod(shape) + int(gap) for shape, gap in zip(group.values(), gaps, strict=True)])
        flat = [(rank * length, m[index].reshape(-1)) for rank, m in enumerate(masters)]
        fields, values = _flat_fields([b["state"].get(key, {}) for b, key in _keys(base, index)], length, what)
        optimizer.groups.append(_hyper(base[0]["param_groups"][index]))
        slots = []
        for (name, shape), start in zip(group.items(), starts, strict=True):
            origin.model[name] = flat_pieces(shape, start, flat, f"{name} in {folder}")
            own = {
                field: whole
                if isinstance(whole, Pieces)
                else flat_pieces(shape, start, whole, f"{name} {field} in {folder}")
                for field, whole in fields.items()
            }
            slots.append(Slot(name, own, dict(values)))
        optimizer.slots.append(slots)
    origin.optimizers = [optimizer]


def _read_stage_3(origin: Origin, files: _Files, states: Sequence[Mapping[str, Any]]) -> None:
    first, folder = files.model(0), files.folder
    if len(files.models) != len(states):
        raise CheckpointError(f"{folder} has {len(states)} files of optimizers, but {len(files.models)} of models")
    base = [_base(state, "optimizer_state_dict", folder) for state in states]
    slots, trained = _cut_parameters(_group_shapes(first, folder), base, states, folder)
    optimizer = OriginOptimizer([], [])
    for hyper in base[0]["param_groups"]:
        optimizer.groups.append(_hyper(hyper))
        optimizer.slots.append([slot for key in hyper["params"] for slot in slots[key]])
    origin.optimizers = [optimizer]
    frozen = dict(first.get("frozen_param_shapes") or {})
    for name, value in first["module"].items():  # in the model's order; parameters are empty here
        if name in trained:
            origin.model[name] = trained[name]
        elif name in frozen:
            origin.model[name] = _frozen(name, tuple(frozen[name]), files)
        elif name not in origin.ties and isinstance(value, torch.Tensor):
            if not value.numel() and name not in (origin.buffers or ()):
                origin.left.append(f"{name} (its values are not in the files)")
            else:
                origin.model[name] = Pieces.of(value)


def _cut_parameters(
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    base: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    folder: Path,
) -> tuple[list[list[Slot]], dict[str, Pieces]]:
    """Stage 3: the slots of each sub-group (groups are cut where they are large), and the parameters by name."""
    masters = [_tensors(state.get("fp32_flat_groups"), folder) for state in states]
    if any(len(m) != len(shapes) for m in masters):
        raise CheckpointError(f"{folder} has {len(shapes)} groups of names, but {len(masters[0])} of values")
    trained: dict[str, Pieces] = {}
    slots: list[list[Slot]] = []
    for index, group in enumerate(shapes):
        what = f"group {index} in {folder}"
        share = [-(-prod(shape) // len(states)) for shape in group.values()]
        length = masters[0][index].numel()
        if sum(share) != length:
            raise CheckpointError(
                f"{what} has {length:,} elements a rank, but its names have {sum(share):,}",
                hint="save without offloading to NVMe, and without hpZ or MiCS",
            )
        fields, values = _flat_fields([b["state"].get(index, {}) for b in base], length, what)
        slots.append([])
        for (name, shape), start, count in zip(group.items(), _running(share), share, strict=True):
            place = (shape, start, count, f"{name} in {folder}")
            trained[name] = _put_together([m[index].reshape(-1) for m in masters], *place)
            own = {
                field: whole if isinstance(whole, Pieces) else _put_together([part for _, part in whole], *place)
                for field, whole in fields.items()
            }
            slots[-1].append(Slot(name, own, dict(values)))
    return slots, trained


def _put_together(parts: Sequence[torch.Tensor], shape: tuple[int, ...], start: int, count: int, what: str) -> Pieces:
    """A tensor of which each rank has ``count`` elements, from ``start`` on in its flat part; the last are padding."""
    return flat_pieces(shape, 0, [(rank * count, p[start : start + count]) for rank, p in enumerate(parts)], what)


def _frozen(name: str, shape: tuple[int, ...], files: _Files) -> Pieces:
    chunks = []
    for rank in range(len(files.models)):
        part = (files.model(rank).get("frozen_param_fragments") or {}).get(name)
        if not isinstance(part, torch.Tensor):
            raise CheckpointError(f"{files.models[rank]} lacks its part of the frozen parameter {name}")
        chunks.append((rank * part.numel(), part.reshape(-1)))
    return flat_pieces(shape, 0, chunks, f"{name} in {files.folder}")


def _flat_fields(
    states: Sequence[Mapping[str, Any]], length: int, what: str
) -> tuple[dict[str, Pieces | list[tuple[int, torch.Tensor]]], dict[str, Any]]:
    """The state of one flat group: chunks for each field that lies flat as the parameters do, others as they are.

    Args:
        states: Each rank's.
        length: Elements in each rank's partition.
        what: How messages call it.
    """
    fields, values = split_state(states[0])
    found: dict[str, Pieces | list[tuple[int, torch.Tensor]]] = {}
    for name, field in fields.items():
        if field.shape == ():
            found[name] = field
            continue
        chunks = []
        for rank, state in enumerate(states):
            part = state.get(name)
            if not isinstance(part, torch.Tensor) or part.numel() != length:
                raise CheckpointError(f"{name} of {what} doesn't lie flat as its parameters do on rank {rank}")
            chunks.append((rank * length, part.reshape(-1)))
        found[name] = chunks
    return found, values


def _whole_optimizer(state: Mapping[str, Any], path: Path) -> OriginOptimizer:
    """Stage 0: torch's own state dict, or around it what keeps fp32 masters of a bf16 or fp16 model."""
    if "fp32_groups_flat" in state:
        raise CheckpointError(
            f"{path} has the fp32 masters of a fused optimizer without names for them",
            hint='train on with "zero_optimization": {"stage": 1}, save, and import that',
        )
    inner = state.get("optimizer_state_dict", state)
    optimizer = plain_optimizer(_dict(inner, path), f"the optimizer in {path}")
    masters = [tensor for group in state.get("fp32_groups") or [] for tensor in group]
    slots = list(optimizer.all())
    if masters and len(masters) == len(slots):
        for slot, master in zip(slots, masters, strict=True):
            slot.master = Pieces.of(master)
    return optimizer


def _take_counters(origin: Origin, first: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> None:
    origin.step, origin.samples = whole_number(first, "global_steps"), whole_number(first, "global_samples")
    origin.skipped = whole_number(first, "skipped_steps") or 0
    if isinstance(first.get("lr_scheduler"), dict):
        origin.schedulers = [plain(first["lr_scheduler"])]
    client = {key: value for key, value in first.items() if key not in OWN_KEYS}
    origin.schedulers = origin.schedulers or take_schedulers(client)  # of Lightning, which steps them itself
    if LIGHTNING_VERSION in client:
        origin.kind = f"lightning {client[LIGHTNING_VERSION]}, {origin.kind}"
        origin.left += lightning_leftovers(client)
    pick_counters(origin, client)
    origin.notes += _clipping(first, optimizers)
    scaler = optimizers[0].get("loss_scaler") if optimizers else None
    if isinstance(scaler, Record) and optimizers[0].get("dynamic_loss_scale"):
        origin.left.append(f"the loss scale {getattr(scaler, 'cur_scale', '')}, which starts anew")


def _clipping(first: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> list[str]:
    """DeepSpeed clips gradients, even unasked (GRADIENT_CLIPPING_DEFAULT is 1.0 in runtime/constants.py of 0.19.8)."""
    config = first.get("ds_config")
    norm = optimizers[0].get("clip_grad") if optimizers else None
    if norm is None and isinstance(config, dict):
        norm = config.get("gradient_clipping")
    if norm is None:
        return ["DeepSpeed 0.19 clips gradients to the norm 1.0 if its config doesn't say: --set optim.clip_norm=1.0"]
    return [f"DeepSpeed clipped gradients to the norm {norm}: --set optim.clip_norm={norm}"] if norm else []


def _base(state: Mapping[str, Any], key: str, folder: Path) -> dict[str, Any]:
    base = state.get(key)
    if isinstance(base, list):
        raise CheckpointError(
            f"{folder} is an elastic checkpoint, without the optimizer's parameter groups",
            hint='save with "zero_optimization": {"elastic_checkpoint": false}',
        )
    base = _dict(base, folder)
    if not isinstance(base.get("state"), dict) or not isinstance(base.get("param_groups"), list):
        raise CheckpointError(f"the optimizer in {folder} is garbled: it has no state and param_groups")
    return base


def _keys(base: Sequence[Mapping[str, Any]], index: int) -> list[tuple[Mapping[str, Any], Any]]:
    """On each rank the key of the one flat parameter of a group."""
    found = []
    for state in base:
        params = state["param_groups"][index]["params"]
        if len(params) != 1:
            raise CheckpointError(f"a rank's parameter group {index} has {len(params)} flat parameters instead of one")
        found.append((state, params[0]))
    return found


def _group_shapes(first: Mapping[str, Any], folder: Path) -> list[dict[str, tuple[int, ...]]]:
    shapes = first.get("param_shapes")
    if not isinstance(shapes, list) or not all(isinstance(group, dict) for group in shapes):
        raise CheckpointError(f"{folder} doesn't say which parameters there are (param_shapes)")
    return [{str(name): tuple(int(n) for n in shape) for name, shape in group.items()} for group in shapes]


def _tensors(value: Any, folder: Path) -> list[torch.Tensor]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, torch.Tensor) for item in value):
        raise CheckpointError(f"{folder} has no fp32 parameters where DeepSpeed 0.19 puts them")
    return list(value)


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in group.items() if key not in ("params", "param_names")}


def _dict(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is garbled: it holds a {type(value).__name__} where DeepSpeed has a dict")
    return value


def _running(lengths: Sequence[int]) -> list[int]:
    starts, position = [], 0
    for length in lengths:
        starts.append(position)
        position += length
    return starts
