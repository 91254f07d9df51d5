"""A layout for people, and as JSON between ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from distkit.strategies.tensor_parallel.kinds import kind_of
from distkit.strategies.tensor_parallel.layout import Layout, Split

__all__ = ["describe", "layout_from_json", "layout_to_json"]


def describe(model: nn.Module, layout: Layout) -> list[str]:
    """What is split, how much that is, and why the rest is not; the model is still whole."""
    total = sum(p.numel() for p in model.parameters())
    split = {id(p): p.numel() for name in layout.splits for p in model.get_submodule(name).parameters(recurse=False)}
    share = sum(split.values()) / max(total, 1)
    lines = [
        f"tensor parallel {layout.size}: {len(layout.splits)} layers of {type(model).__name__} are split, "
        f"{share:.0%} of its parameters"
    ]
    whole = [
        name for name, module in model.named_modules() if kind_of(module) is not None and name not in layout.splits
    ]
    reasons: dict[str, list[str]] = {}
    for name in whole:
        reasons.setdefault(layout.notes.get(name, "an embedding, or nothing feeds it"), []).append(
            name or type(model).__name__
        )
    for why, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"  whole: {', '.join(names[:3])}{more}: {why}")
    return lines


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Plain lists and dicts."""
    return {**vars(layout), "splits": {name: vars(split) for name, split in layout.splits.items()}}


def layout_from_json(data: dict[str, Any]) -> Layout:
    """The opposite of :func:`layout_to_json`."""
    splits = {}
    for name, value in data["splits"].items():
        runs = tuple(tuple((int(a), int(b)) for a, b in own) for own in value["runs"])
        tuples = {key: tuple(value[key]) for key in ("parts", "partners")}
        splits[name] = Split(**{**value, **tuples, "runs": runs})
    return Layout(data["size"], splits, dict(data["notes"]))
