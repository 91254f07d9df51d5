"""What is run: the reference transformer of a plan's sizes, or the model that a user's function builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from distkit.advise.exact.run import EDGE, OPTIMIZERS, Run
from distkit.advise.exact.sizes import sizes_of
from distkit.errors import PlanError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distkit.advise.inputs import Inputs

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """A model, with what trains it.

    Args:
        model: Its parameters have no values.
        optimizer: Over its parameters.
        loss: Runs one micro batch of the prepared model, which it is given.
        place: Names a module's stretches.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module], torch.Tensor]
    place: Callable[[str], str]


def subject_of(run: Run, built: tuple[nn.Module, Inputs] | None) -> Subject:
    """Make it.

    Args:
        run: What is to be run.
        built: What the user's function built, and what goes into it; None for the reference model.
    """
    if built is not None:
        return _built(run, *built)
    from distkit.advise.exact.model import ReferenceModel

    sizes = replace(sizes_of(run.model, fused=run.fused_attention), layers=run.layers)
    model = ReferenceModel(sizes)
    shape = (run.micro, run.sequence)
    tokens = torch.randint(0, run.model.vocabulary, shape)
    targets = torch.randint(0, run.model.vocabulary, shape)

    def loss(prepared: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(prepared(tokens).flatten(0, 1), targets.flatten())

    return Subject(model, _optimizer(run.optimizer, model), loss, lambda name: _place(name, run.layers))


def _built(run: Run, model: nn.Module, example: Inputs) -> Subject:
    from distkit.advise.inputs import loss_of_outputs
    from distkit.strategies.profiling import materialize
    from distkit.strategies.without_data import open_mode

    materialize(model, [], open_mode())
    inputs = example.of_size(run.micro, run.sequence)
    optimizer = _optimizer(run.optimizer, model)
    return Subject(model, optimizer, lambda prepared: loss_of_outputs(inputs.into(prepared)), lambda name: name)


def _place(name: str, layers: int) -> str:
    """The same name for layers that do the same in models of different depth."""
    head, _, rest = name.partition(".")
    if head != "layers":
        return name
    number, _, rest = rest.partition(".")
    index = int(number)
    if index < EDGE:
        return f"layer {index} {rest}"
    return f"layer {index - layers} {rest}" if index >= layers - EDGE else f"middle {rest}"


def _optimizer(name: str, model: nn.Module) -> Optimizer:
    """torch's, parameter by parameter: what works on lists of them counts as one operation and shows no single tensor."""
    from torch import optim

    trained = [p for p in model.parameters() if p.requires_grad]
    same: dict[str, Any] = {"params": trained, "lr": 1e-3, "foreach": False}
    if name == "momentum":
        return optim.SGD(momentum=0.9, **same)
    classes: dict[str, Any] = {
        "adamw": optim.AdamW,
        "adam": optim.Adam,
        "nadam": optim.NAdam,
        "radam": optim.RAdam,
        "adagrad": optim.Adagrad,
        "rmsprop": optim.RMSprop,
        "sgd": optim.SGD,
    }
    if name not in classes:
        raise PlanError(
            f"--optimizer was set to {name!r}, which --exact can't run: it runs torch's own {', '.join(OPTIMIZERS)}",
            hint="--optimizer adamw",
        )
    made: Optimizer = classes[name](**same)
    return made
