"""A layout for people, and as JSON between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from distkit.strategies.tensor_parallel.kinds import kind_of
from distkit.strategies.tensor_parallel.layout import COLUMN, REPLICATE, ROW, Layout, Split

__all__ = ["Family", "describe", "families", "layout_from_json", "layout_to_json", "summary"]

SOURCES = {"plan": "by the model's own plan", "settings": "by the settings", "found": ""}


@dataclass
class Family:
    """The same layer of all blocks.

    Args:
        name: With ``*`` for the numbers of blocks, if there are several.
        style: ``column``, ``row``, ``vocabulary``, or ``replicate``.
        why: What it goes together with, or why it stays whole.
        layers: How many layers it stands for.
        parameters: Of all of them together, while they are whole.
    """

    name: str
    style: str
    why: str
    layers: int = 0
    parameters: int = 0


def families(model: nn.Module, layout: Layout) -> list[Family]:
    """Every layer that could be split, in the model's order, what is alike in all blocks together; the model is still whole."""
    found: dict[tuple[str, str, str], Family] = {}
    rows_of = {column: row for row, split in layout.of_style(ROW) for column in split.partners}
    for name, module in model.named_modules():
        if kind_of(module) is None:
            continue
        family, style = _family(name or type(model).__name__), layout.style_of(name)
        why = _of_families(_why(name, layout, rows_of))
        entry = found.setdefault((family, style, why), Family(name or family, style, _why(name, layout, rows_of)))
        entry.layers += 1
        if entry.layers > 1:
            entry.name, entry.why = family, why
        entry.parameters += sum(p.numel() for p in module.parameters(recurse=False))
    return list(found.values())


def summary(model: nn.Module, layout: Layout) -> str:
    """How much is split, in one line; the model is still whole."""
    total = sum(p.numel() for p in model.parameters())
    split = {id(p): p.numel() for name in layout.splits for p in model.get_submodule(name).parameters(recurse=False)}
    line = (
        f"tensor parallel {layout.size}: {len(layout.splits)} layers of {type(model).__name__} are split, "
        f"{sum(split.values()) / max(total, 1):.0%} of its parameters"
    )
    work = sum(layout.work.values())
    if work:
        share = sum(count for name, count in layout.work.items() if name in layout.splits) / work
        line += f" and {share:.0%} of the multiplications in its layers"
    return line


def describe(model: nn.Module, layout: Layout) -> list[str]:
    """For the start of a run: what is split, how much that is, and why the rest is not; the model is still whole."""
    return [summary(model, layout), *_lines(families(model, layout))]


def _lines(found: list[Family]) -> Iterator[str]:
    for style in dict.fromkeys(family.style for family in found if family.style != REPLICATE):
        yield f"  {style}: {', '.join(_counted(family) for family in found if family.style == style)}"
    for why in dict.fromkeys(family.why for family in found if family.style == REPLICATE):
        names = [_counted(family) for family in found if family.style == REPLICATE and family.why == why]
        yield f"  whole: {', '.join(names)}: {why}"


def _counted(family: Family) -> str:
    return family.name if family.layers == 1 else f"{family.name} ({family.layers})"


def _why(name: str, layout: Layout, rows_of: dict[str, str]) -> str:
    split = layout.splits.get(name)
    if split is None:
        return layout.notes.get(name, "nothing split feeds it or takes what it gives")
    if split.style == COLUMN and split.leaves:
        why = "its output leaves the model in parts"
    elif split.style == COLUMN:
        why = f"feeds {rows_of.get(name, '?')}"
    elif split.style == ROW:
        why = f"takes {', '.join(split.partners)}"
    else:
        why = "each rank looks up its own rows"
    source = SOURCES[split.source]
    return f"{why}, {source}" if source else why


def _family(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _of_families(text: str) -> str:
    """A sentence about layers, as one about the same layers of all blocks; numbers of something else stay."""
    return " ".join(_family(word) if "." in word else word for word in text.split(" "))


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
    return Layout(data["size"], splits, dict(data["notes"]), dict(data["work"]))
