"""Heads and embeddings that are split by vocabulary.

A linear layer is a head over a vocabulary if it gives as many features as an embedding has rows, tied or not, and no other
layer takes what it gives. Its logits leave the model split, and the loss is computed from the parts. The embedding is split
by rows with it, as is one that holds a good part of the parameters by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from distkit.strategies.tensor_parallel.kinds import Kind
from distkit.strategies.tensor_parallel.layout import COLUMN, VOCABULARY, Layout, Split, join_runs

__all__ = ["enter_vocabulary"]

LARGE = 0.05
"""Share of the parameters from which on an embedding without a head is worth its all-reduce."""

Calls = Mapping[str, Sequence[torch.Tensor]]


def enter_vocabulary(
    model: nn.Module,
    kinds: Mapping[str, Kind],
    inputs: Calls,
    outputs: Calls,
    wishes: Mapping[str, str],
    layout: Layout,
) -> None:
    """Enter a model's vocabulary into a layout.

    Args:
        model: With its tied weights.
        kinds: Of its layers.
        inputs: By layer, what reached it in each call.
        outputs: By layer, what it gave in each call; leaves of the inputs' graph.
        wishes: Styles that layers are to have, by name.
        layout: Empty; gets splits, and notes of what could not be.
    """
    embeddings = {name: kind for name, kind in kinds.items() if kind.name == "embedding"}
    rows = {kind.inputs for kind in embeddings.values()}
    heads = {
        name: kind
        for name, kind in kinds.items()
        if kind.name != "embedding"
        and name in outputs
        and (kind.outputs in rows if wishes.get(name) is None else wishes[name] == COLUMN)
        and _leaves(name, inputs, outputs)
    }
    total = sum(p.numel() for p in model.parameters())
    spoken = {kind.outputs for kind in heads.values()}
    vocabularies = {
        name: kind
        for name, kind in embeddings.items()
        if (wishes[name] == VOCABULARY if name in wishes else kind.inputs in spoken or _is_large(kind, total))
    }
    for name, kind in {**heads, **vocabularies}.items():
        count = kind.inputs if kind.name == "embedding" else kind.outputs
        if count % layout.size:
            layout.notes[name] = f"its vocabulary of {count} doesn't divide by {layout.size}; pad it to split it"
            continue
        piece = count // layout.size
        runs = tuple(join_runs([(rank * piece, piece)]) for rank in range(layout.size))
        tied = _tied(model, name, kinds)
        if kind.name == "embedding":
            layout.splits[name] = Split(VOCABULARY, runs, (count,), partners=tied)
        else:
            layout.splits[name] = Split(COLUMN, runs, (count,), partners=tied, leaves=True)
    for name, split in list(layout.splits.items()):
        missing = next((other for other in split.partners if other not in layout.splits), None)
        if missing is not None:
            layout.take_out(name, f"its weight is also that of {missing}, which is not split by vocabulary")


def _is_large(kind: Kind, total: int) -> bool:
    return kind.inputs * kind.outputs >= LARGE * total


def _leaves(name: str, inputs: Calls, outputs: Calls) -> bool:
    """Whether no layer's input depends on it."""
    for values in inputs.values():
        for value in values:
            if value.requires_grad:
                found = torch.autograd.grad(value.sum(), list(outputs[name]), retain_graph=True, allow_unused=True)
                if any(gradient is not None for gradient in found):
                    return False
    return True


def _tied(model: nn.Module, name: str, kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    """Other modules with the same weight."""
    weight = model.get_submodule(name).weight
    return tuple(
        other for other, module in model.named_modules() if other != name and getattr(module, "weight", None) is weight
    )
