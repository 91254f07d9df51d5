"""Split layers: what a module's forward becomes. The module stays the user's own, with its names, and a smaller weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from distkit.errors import UsageError
from distkit.strategies.tensor_parallel.group import (
    TensorGroup,
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    scatter_tokens,
)
from distkit.strategies.tensor_parallel.kinds import Kind
from distkit.strategies.tensor_parallel.layout import Split
from distkit.strategies.tensor_parallel.sharded import ShardedTensor

__all__ = ["ColumnForward", "RowForward", "VocabularyForward", "all_tokens", "over_tokens", "summed"]


class _SplitForward:
    """Called in place of a module's forward.

    Args:
        name: The module's, for messages.
        module: Holds the local weight.
        kind: As it was when it was whole.
        split: How it is split.
        group: The tensor group.
    """

    def __init__(self, name: str, module: nn.Module, kind: Kind, split: Split, group: TensorGroup) -> None:
        self.name, self.module, self.kind, self.split, self.group = name, module, kind, split, group

    def _multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: Any = self.module.weight
        if self.kind.name == "conv1d":
            weight = weight.t()
        return functional.linear(inputs, weight, bias)

    @property
    def _bias(self) -> torch.Tensor | None:
        bias: Any = getattr(self.module, "bias", None)
        return bias if isinstance(bias, torch.Tensor) else None


def over_tokens(tensor: ShardedTensor) -> bool:
    """Whether ranks hold some tokens each, with all their features; which dimension tokens are depends on the model."""
    return tensor.group.sequence and tensor.split_dim < tensor.dim() - 1


def all_tokens(inputs: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """What goes into column layers: of inputs that ranks hold some tokens of, all."""
    if isinstance(inputs, ShardedTensor):
        return gather_tokens(inputs, inputs.local, inputs.split_dim, group)
    return copy_to_group(inputs, group)


def summed(output: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The sum of all ranks' parts: the same on all, or some tokens on each, if there are as many for each."""
    tokens = output.shape[-2] if output.dim() > 2 else 0
    if not group.sequence or group.group is None or tokens == 0 or tokens % group.size:
        return reduce_from_group(output, group)
    dim = output.dim() - 2
    return ShardedTensor(scatter_tokens(output, dim, group), dim, (tokens,), group.for_outputs)


class ColumnForward(_SplitForward):
    """Whole inputs; each rank computes its output features. Also an embedding of which each rank has some features."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(inputs, ShardedTensor) and not over_tokens(inputs):
            raise UsageError(
                f"{self.name} is split by column, but what reaches it is split already",
                hint=f"--set 'parallel.tensor_layout={{\"{self.name}\": row}}'",
            )
        if self.kind.name == "embedding":
            output = functional.embedding(inputs, self.module.weight, self.module.padding_idx)  # type: ignore[arg-type]
        else:
            output = self._own_features(inputs)
        return ShardedTensor(output, -1, self.split.parts, self.group.for_outputs if self.split.leaves else self.group)

    def _own_features(self, inputs: torch.Tensor) -> torch.Tensor:
        """This rank's output features."""
        return self._multiply(all_tokens(inputs, self.group), self._bias)


class RowForward(_SplitForward):
    """Each rank has its input features; the outputs are summed over the group, and the bias added once."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if not isinstance(inputs, ShardedTensor) or inputs.split_dim != inputs.dim() - 1 or len(inputs.parts) != 1:
            raise UsageError(
                f"{self.name} is split by row, but no layer split by column feeds it",
                hint=f"--set 'parallel.tensor_layout={{\"{self.name}\": replicate}}'",
            )
        output = self._sum(inputs.local)
        bias = self._bias
        return output if bias is None else output + bias

    def _sum(self, inputs: torch.Tensor) -> torch.Tensor:
        """Over the group, of what each rank's input features give."""
        return summed(self._multiply(inputs, None), self.group)


class VocabularyForward(_SplitForward):
    """An embedding of which each rank has some rows; what the others hold is zero, and the sum is the lookup."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        first, length = self.split.runs[self.group.rank][0]
        own = inputs - first
        outside = (own < 0) | (own >= length)
        padding: Any = self.module.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + length else None
        weight: Any = self.module.weight
        rows = functional.embedding(own.masked_fill(outside, 0), weight, padding)
        return summed(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.group)
