"""What is asked of a layout before anything is looked at: by the settings, which are followed or refused, and by the model's own
plan, which is followed where it fits."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from distkit.errors import ConfigError
from distkit.strategies.tensor_parallel.attention import out_of
from distkit.strategies.tensor_parallel.kinds import kind_of
from distkit.strategies.tensor_parallel.layout import COLUMN, REPLICATE, ROW, VOCABULARY, Layout

__all__ = ["plan_of", "refuse_unmet", "wishes_of"]

PLAN_STYLES = {
    "colwise": COLUMN,
    "rowwise": ROW,
    "colwise_rep": COLUMN,
    "colwise_gather_output": COLUMN,
    "embedding_rowwise": VOCABULARY,
}
"""What transformers calls the styles in a model's ``tp_plan``; others are about things that are not split here."""


def wishes_of(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """The style of each layer that a pattern of the settings names; the first pattern that fits decides.

    Args:
        model: The user's.
        patterns: Of ``parallel.tensor_layout``: names of modules with ``*`` for any part. A name stands for all that is
            inside of the module too.

    Raises:
        ConfigError: A pattern fits no module, or asks for a style that the module can't have.
    """
    found: dict[str, str] = {}
    for pattern, style in patterns.items():
        names = [n for n, _ in model.named_modules() if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")]
        if not names:
            raise ConfigError(
                f"parallel.tensor_layout.{pattern} was set, but no module of {type(model).__name__} has such a name",
                hint="--set parallel.tensor_layout=auto   or a name from model.named_modules(), * for any part of it",
            )
        layers = [name for name in names if kind_of(model.get_submodule(name)) is not None]
        inside = {out_of(name) for name in layers if isinstance(model.get_submodule(name), nn.MultiheadAttention)}
        layers = [name for name in layers if name not in inside]  # what is asked of an attention, not of what is in it
        if not layers and style != REPLICATE:
            raise ConfigError(
                f"parallel.tensor_layout.{pattern} was set to {style}, but {names[0]} is a "
                f"{type(model.get_submodule(names[0])).__name__}; linear layers, embeddings and nn.MultiheadAttention can be split",
                hint=f"--set 'parallel.tensor_layout={{\"{pattern}\": replicate}}'",
            )
        for name in layers if style != REPLICATE else names:
            found.setdefault(name, style)
    return found


def plan_of(model: nn.Module) -> dict[str, str]:
    """What the model's own ``tp_plan`` says, as transformers' models have one."""
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        fitting = next((style for pattern, style in plan.items() if fnmatchcase(name, str(pattern))), None)
        if fitting in PLAN_STYLES and kind_of(module) is not None:
            found[name] = PLAN_STYLES[fitting]
    return found


def refuse_unmet(wishes: Mapping[str, str], layout: Layout) -> None:
    """Raise a ConfigError for a layer that the settings want to be split as it can't be."""
    for name, style in wishes.items():
        if style in (layout.style_of(name), REPLICATE):
            continue
        why = layout.notes.get(name)
        if why is None or style == COLUMN:
            why = {
                COLUMN: "no layer that is split by row takes what it gives, and nothing else, by the same parts",
                ROW: "no layer that is split by column feeds it",
            }.get(style, why or "it is no embedding")
        raise ConfigError(
            f"parallel.tensor_layout says {style} for {name}, but it can't be split so over {layout.size} ranks: {why}",
            hint=f"--set 'parallel.tensor_layout={{\"{name}\": replicate}}'",
        )
