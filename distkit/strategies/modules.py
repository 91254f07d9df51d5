"""What every strategy does to a module before its engine wraps it, and names of its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distkit.state import clean_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distkit.config import Config
    from distkit.precision import Precision

__all__ = [
    "compile_in_place",
    "dress",
    "group_name",
    "is_split",
    "named_buffers",
    "parameter_names",
    "trained_parameters",
]


def dress(model: nn.Module, config: Config, precision: Precision) -> nn.Module:
    """Activation checkpointing and precision, in place and in the order in which they must lie around each other."""
    from distkit.strategies.blocks import apply_activation_checkpointing

    apply_activation_checkpointing(model, config.memory.activation_checkpointing)
    return precision.apply(model)


def compile_in_place(model: nn.Module, config: Config) -> nn.Module:
    """torch.compile without a wrapper, so that names stay; nothing unless ``compile`` is set."""
    if config.compile:
        model.compile(**config.engine.compile)
    return model


def group_name(kind: str, index: int) -> str:
    """``model``, ``model_1`` ... or ``optimizer``, ``optimizer_1`` ..., in the order of preparation."""
    return kind if index == 0 else f"{kind}_{index}"


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Name of each parameter by its identity; the first name of a tied one.

    With several models the names of the second and later ones begin with the model's group, since two models may use
    the same names.
    """
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = "" if index == 0 else group_name("model", index) + "."
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + clean_name(name))
    return names


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers: those that state_dict() would hold."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizer's parameters that want a gradient, in its own order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def is_split(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank holds a part of it, and others of its tensor group the rest. Megatron's mark, which DeepSpeed reads."""
    return bool(getattr(parameter, "tensor_model_parallel", False))
