"""Models that are made of megatron-core's own layers: tensor-parallel already, so that nothing is left to split. What is
needed is where each rank's part of a parameter lies in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.mlp import MLP
from torch import nn

from distkit.errors import ConfigError, UsageError
from distkit.strategies.tensor_parallel.apply import PlacedParameter
from distkit.strategies.tensor_parallel.layout import Runs, join_runs

__all__ = ["check_megatron_model", "is_megatron_model", "places_of"]

ONE = ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
"""Sizes of kinds of parallelism that these strategies don't have."""

OFF = ("sequence_parallel", "gradient_accumulation_fusion", "num_moe_experts")
"""Fields of a model's configuration that must be off: the first leaves gradients of norms for others to sum, the second
puts gradients where DeepSpeed doesn't look, and experts are laid out in ways of their own."""


def is_megatron_model(model: nn.Module) -> bool:
    """Whether any of its layers is megatron-core's, or says that a rank holds a part of it."""
    return any(type(module).__module__.startswith("megatron.core.") for module in model.modules()) or any(
        getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters()
    )


def check_megatron_model(model: nn.Module, size: int) -> None:
    """Refuse what would train wrongly.

    Args:
        model: Made of megatron-core's layers.
        size: Ranks of a tensor group.

    Raises:
        ConfigError: Its configuration contradicts the run's.
        UsageError: It has layers whose parts are laid out in another way.
    """
    for config in _configs(model):
        own = config.tensor_model_parallel_size
        if own != size:
            raise ConfigError(
                f"{type(model).__name__} was built with tensor_model_parallel_size={own}, and parallel.tensor is {size}",
                hint=f"tensor_model_parallel_size=trainer.world.tensor.size   or --set parallel.tensor={own}",
            )
        wrong = [name for name in ONE if getattr(config, name, 1) not in (None, 1)]
        wrong += [name for name in OFF if getattr(config, name, None)]
        if wrong:
            raise ConfigError(
                f"{type(model).__name__} was built with {wrong[0]}={getattr(config, wrong[0])!r}, which does not go together "
                "with DeepSpeed ZeRO here",
                hint=f"leave {wrong[0]} out of the model's configuration",
            )
        groups = getattr(config, "num_query_groups", None)
        if groups is not None and groups % size:
            raise ConfigError(
                f"{type(model).__name__} was built with num_query_groups={groups}, which parallel.tensor={size} doesn't divide",
                hint="--set parallel.tensor=N   where N divides it",
            )
    for name, module in model.named_modules():
        if type(module).__module__.startswith("megatron.core.ssm"):
            raise UsageError(
                f"{name or 'the model'} is a {type(module).__name__}, which lays out its parts in a way of its own that checkpoints "
                "don't know",
                hint="--strategy ddp   with tensor_model_parallel_size=1",
            )


def _configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, ModelParallelConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config


def places_of(model: nn.Module, size: int) -> dict[str, PlacedParameter]:
    """Where parts lie, by parameter name, under all names of tied ones; marks the parameters as split.

    A fused q, k, v lies by query groups, so a rank's part is one run of it. Of a gated MLP a rank has its piece of the gate
    and its piece of the other half.

    Args:
        model: Made of megatron-core's layers.
        size: Ranks of a tensor group.
    """
    gated = {
        id(module.linear_fc1)
        for module in model.modules()
        if isinstance(module, MLP) and module.config.gated_linear_unit
    }
    places: dict[str, PlacedParameter] = {}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            dim = _split_dim(module, own, parameter)
            if dim is None:
                continue
            name = f"{prefix}.{own}" if prefix else own
            pieces = 2 if id(module) in gated else getattr(parameter, "partition_stride", 1)
            places[name] = _place(name, tuple(parameter.shape), dim, pieces, size)
            parameter.tensor_model_parallel = True  # 0.16 leaves it out without initialisation
    return places


def _split_dim(module: nn.Module, own: str, parameter: nn.Parameter) -> int | None:
    if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
        return 0
    if isinstance(module, RowParallelLinear):
        return 1 if own == "weight" else None
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(getattr(parameter, "partition_dim", -1))


def _place(name: str, shape: tuple[int, ...], dim: int, pieces: int, size: int) -> PlacedParameter:
    if not 0 <= dim < len(shape) or shape[dim] % pieces:
        raise UsageError(
            f"{name} of shape {shape} says that it is split along dimension {dim} in {pieces} pieces, which can't be",
            hint="partition_dim and partition_stride of the parameter, as megatron-core sets them",
        )
    length = shape[dim] // pieces
    runs: tuple[Runs, ...] = tuple(
        join_runs([((piece * size + rank) * length, length) for piece in range(pieces)]) for rank in range(size)
    )
    return PlacedParameter(tuple(n * size if d == dim else n for d, n in enumerate(shape)), dim, runs)
