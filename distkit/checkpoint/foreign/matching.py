"""Every tensor of a foreign checkpoint under the name that the user's own module has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from distkit.checkpoint.foreign.naming import HINT, Candidate, infer_names, name_cleaner, trainable
from distkit.checkpoint.foreign.origin import Origin, OriginOptimizer, Pieces, Slot
from distkit.checkpoint.foreign.user_model import UserModel
from distkit.errors import CheckpointError

__all__ = ["Matched", "match"]

SHOWN = 10


@dataclass
class Matched:
    """A checkpoint in the model's own names.

    Args:
        model: Parameters and buffers; of tied ones the first name.
        buffers: Which of them are buffers.
        ties: Further names of tied parameters and the names in ``model``.
        optimizers: Every slot has its name.
        notes: What the user should know.
    """

    model: dict[str, Pieces]
    buffers: set[str] = field(default_factory=set)
    ties: dict[str, str] = field(default_factory=dict)
    optimizers: list[OriginOptimizer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def match(origin: Origin, user: UserModel | None, strip_prefix: str | None) -> Matched:
    """Give everything its name.

    Args:
        origin: The checkpoint; its optimizers are changed.
        user: The user's model, where it was given; its names and ties count then.
        strip_prefix: A prefix to take off.

    Raises:
        CheckpointError: A name can't be known, or the model is another one.
    """
    clean = name_cleaner([*origin.model, *origin.ties], strip_prefix)
    found = Matched({clean(name): pieces for name, pieces in origin.model.items()})
    found.ties = {clean(alias): clean(name) for alias, name in origin.ties.items()}
    _tie_by_place(found)
    if user is not None:
        _fit(found, user, origin.kind)
    _drop_ties(found)
    found.buffers = _buffers(found, origin, user, clean)
    found.optimizers = origin.optimizers
    if user is not None and user.groups is not None and len(found.optimizers) > 1:
        raise CheckpointError(
            f"the checkpoint has {len(found.optimizers)} optimizers, but --model returned one",
            hint="let the function return the model alone",
        )
    for index, optimizer in enumerate(found.optimizers):
        for slot in optimizer.all():
            slot.name = clean(slot.name) if slot.name is not None else None
        _name_optimizer(found, optimizer, user, origin, f"optimizer {index} of the checkpoint")
    if user is not None and user.groups is not None and not found.optimizers:
        found.optimizers = [OriginOptimizer(user.hyper, [[Slot(name) for name in group] for group in user.groups])]
        found.notes.append(
            "the source has no optimizer: its state begins afresh, with the groups that --model returned"
        )
    _tie_by_value(found)
    _follow_ties(found)
    _take_masters(found)
    found.buffers &= found.model.keys()
    _mention_prefix(found, origin.kind, strip_prefix)
    _check_optimizers(found)
    return found


def _tie_by_place(found: Matched) -> None:
    """Tensors that share their values in the file are tied; the first name counts."""
    first: dict[object, str] = {}
    for name, pieces in found.model.items():
        place = pieces.address()
        if place is None:
            continue
        key = (place, pieces.shape, pieces.dtype)
        other = first.setdefault(key, name)
        if other != name:
            found.ties.setdefault(name, other)


def _fit(found: Matched, user: UserModel, kind: str) -> None:
    """Names, shapes and ties of the user's model."""
    for alias, name in user.ties.items():
        if name not in found.model and alias in found.model:
            found.model[name] = found.model[alias]
    found.ties = dict(user.ties)
    have = found.model.keys() - user.ties.keys()
    missing, extra = [n for n in user.shapes if n not in have], sorted(have - user.shapes.keys())
    other = [f"{n} {list(found.model[n].shape)} instead of {list(s)}" for n, s in user.shapes.items() if n in have and found.model[n].shape != s]  # fmt: skip
    lines = [
        f"\n  {what} ({len(names)}): {', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
        for what, names in (("missing", missing), ("unexpected", extra), ("of another shape", other))
        if names
    ]
    if lines:
        prefix = next((e[: -len(m)] for e in extra for m in missing if e.endswith("." + m)), None)
        raise CheckpointError(
            f"the {kind} checkpoint doesn't fit the model that --model built:{''.join(lines)}",
            hint=f"--strip-prefix {prefix}" if prefix else "build the model as in the run that wrote it",
        )
    found.model = {name: found.model[name] for name in (*user.shapes, *(user.ties.keys() & found.model.keys()))}


def _drop_ties(found: Matched) -> None:
    """Tied tensors are stored once; a tie whose values lie under its alias only is turned round."""
    for alias, name in list(found.ties.items()):
        if name in found.model:
            found.model.pop(alias, None)
        elif alias in found.model:
            found.ties[name] = alias
            del found.ties[alias]
        else:
            del found.ties[alias]


def _name_optimizer(
    found: Matched, optimizer: OriginOptimizer, user: UserModel | None, origin: Origin, what: str
) -> None:
    named = [slot.name is not None for slot in optimizer.all()]
    if all(named):
        if user is not None and user.groups is not None:
            _regroup(optimizer, user.groups, found)
        return
    if user is not None and user.groups is not None:
        names = user.groups
        if [len(group) for group in names] != [len(group) for group in optimizer.slots]:
            raise CheckpointError(
                f"{what} has parameter groups of {[len(g) for g in optimizer.slots]} parameters, the one that --model "
                f"returned of {[len(g) for g in names]}",
                hint="make the optimizer as in the run that wrote the checkpoint",
            )
    else:
        names = infer_names(
            [[slot.shape for slot in slots] for slots in optimizer.slots],
            _candidates(found, optimizer, user),
            ordered=origin.ordered or user is not None,
            what=what,
        )
    for group, slots in zip(names, optimizer.slots, strict=True):
        for name, slot in zip(group, slots, strict=True):
            slot.name = name


def _candidates(found: Matched, optimizer: OriginOptimizer, user: UserModel | None) -> list[Candidate]:
    if user is not None:
        count = len(list(optimizer.all()))
        names = user.trained if count == len(user.trained) else user.parameters
    else:
        names = [name for name in _not_buffers(found) if name not in found.buffers]
    return [Candidate(name, found.model[name].shape) for name in names]


def _regroup(optimizer: OriginOptimizer, groups: list[list[str]], found: Matched) -> None:
    """The groups of the user's optimizer; a flattened state has lost them."""
    slots = {found.ties.get(str(slot.name), str(slot.name)): slot for slot in optimizer.all()}
    hyper = {
        id(slot): group for group, members in zip(optimizer.groups, optimizer.slots, strict=True) for slot in members
    }
    for name in (name for group in groups for name in group):
        slots.setdefault(name, Slot(name))
    wanted = {name for group in groups for name in group}
    extra = sorted(slots.keys() - wanted)
    if extra:
        raise CheckpointError(
            f"the optimizer that --model returned doesn't have {', '.join(extra[:SHOWN])}, of which the checkpoint has state",
            hint="make the optimizer as in the run that wrote the checkpoint",
        )
    known = [[hyper[id(slots[n])] for n in group if id(slots[n]) in hyper] for group in groups]
    optimizer.groups = [dict(kept[0] if kept else optimizer.groups[0]) for kept in known]
    optimizer.slots = [[slots[name] for name in group] for group in groups]


def _tie_by_value(found: Matched) -> None:
    """Formats that store tied tensors twice: one of them is trained, the other only equal to it."""
    trained = {slot.name for optimizer in found.optimizers for slot in optimizer.all()}
    if not trained:
        return
    by_form: dict[object, list[str]] = {}
    for name, pieces in found.model.items():
        if len(pieces.shape) > 1:
            by_form.setdefault((pieces.shape, pieces.dtype), []).append(name)
    for names in by_form.values():
        for index, name in enumerate(names):
            for other in names[index + 1 :]:
                if other in found.model and (name in trained) != (other in trained) and _equal(found, name, other):
                    found.ties[other] = name
                    del found.model[other]


def _equal(found: Matched, name: str, other: str) -> bool:
    """The same values, bit for bit, that are not all the same number."""
    if name not in found.model:
        return False
    a, b = found.model[name].whole(), found.model[other].whole()
    return torch.equal(a, b) and not bool((a == a.flatten()[0]).all())


def _follow_ties(found: Matched) -> None:
    """Optimizers call a tied parameter by the name under which it is stored."""
    for optimizer in found.optimizers:
        for slots in optimizer.slots:
            for slot in slots:
                slot.name = found.ties.get(str(slot.name), slot.name)


def _take_masters(found: Matched) -> None:
    for slot in _all_slots(found):
        if slot.master is not None and slot.name in found.model:
            found.model[slot.name] = slot.master


def _buffers(found: Matched, origin: Origin, user: UserModel | None, clean: Callable[[str], str]) -> set[str]:
    if user is not None:
        return set(user.buffers)
    if origin.buffers is not None:
        return {clean(name) for name in origin.buffers} & found.model.keys()
    return found.model.keys() - set(_not_buffers(found))


def _not_buffers(found: Matched) -> list[str]:
    floating = {name: p.dtype.is_floating_point or p.dtype.is_complex for name, p in found.model.items()}
    return trainable(found.model, floating)


def _check_optimizers(found: Matched) -> None:
    for slot in _all_slots(found):
        if slot.name not in found.model:
            raise CheckpointError(
                f"the optimizer has a parameter {slot.name!r}, which the model in the checkpoint hasn't", hint=HINT
            )
        shape, own = slot.shape, found.model[slot.name].shape
        if shape is not None and shape != own:
            raise CheckpointError(
                f"the optimizer's state of {slot.name!r} has shape {list(shape)}, but the parameter {list(own)}",
                hint=HINT,
            )
    for optimizer in found.optimizers:
        names = [slot.name for slot in optimizer.all()]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise CheckpointError(f"the optimizer has {', '.join(twice[:SHOWN])} more than once", hint=HINT)


def _mention_prefix(found: Matched, kind: str, strip_prefix: str | None) -> None:
    """A LightningModule holds the model as an attribute, which a distkit script needn't have."""
    first = {name.partition(".")[0] for name in found.model}
    if kind.startswith("lightning") and strip_prefix is None and len(first) == 1:
        (attribute,) = first
        found.notes.append(
            f"every name begins with {attribute}. as in the LightningModule; for a script that trains the model itself: "
            f"--strip-prefix {attribute}."
        )


def _all_slots(found: Matched) -> Iterator[Slot]:
    for optimizer in found.optimizers:
        yield from optimizer.all()
