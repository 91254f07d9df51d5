"""A model with few of its repeated layers, for finding out how they are split; and what was found, carried over to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from distkit.forward import plain_class
from distkit.strategies.tensor_parallel.layout import Layout

__all__ = ["lengthen", "shorten"]

KEEP = 2
"""Layers that stay: one that others come before, and the first."""


def shorten(model: nn.Module) -> dict[str, int]:
    """Take layers out of a model, in place, where they are all of one class and one size.

    Args:
        model: A copy.

    Returns:
        How many there were, by the name of what holds them; empty where nothing was taken out.
    """
    lengths: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        inside = any(name.startswith(f"{holder}.") for holder in lengths)
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and not inside
            and len(module) > KEEP
            and _alike(list(module))
        ):
            lengths[name] = len(module)
            del module[KEEP:]
    return lengths


def _alike(layers: list[nn.Module]) -> bool:
    if not all(any(True for _ in layer.children()) for layer in layers):
        return False  # single layers may be split in turns, one by its outputs and the next by its inputs
    sizes = [[(name, tuple(p.shape)) for name, p in layer.named_parameters()] for layer in layers]
    return bool(sizes[0]) and all(
        plain_class(layer) is plain_class(layers[0]) and size == sizes[0]
        for layer, size in zip(layers, sizes, strict=True)
    )


def lengthen(layout: Layout, lengths: Mapping[str, int]) -> Layout:
    """All layers are split like the last that stayed.

    Args:
        layout: Of the shortened model.
        lengths: From :func:`shorten`.
    """
    for holder, length in lengths.items():
        dot = f"{holder}." if holder else ""
        last = f"{dot}{KEEP - 1}."
        for name, split in [item for item in layout.splits.items() if item[0].startswith(last)]:
            for index in range(KEEP, length):
                here = f"{dot}{index}."
                partners = tuple(
                    here + other.removeprefix(last) if other.startswith(last) else other for other in split.partners
                )
                layout.splits[here + name.removeprefix(last)] = replace(split, partners=partners)
    return layout
