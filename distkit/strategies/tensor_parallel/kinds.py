"""Modules that can be split: linear layers of torch and of transformers, and embeddings, seen alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """Where features lie in a module's weight.

    Args:
        name: ``linear``, ``conv1d`` (transformers' linear layer with a transposed weight) or ``embedding``.
        inputs: Input features, or rows of an embedding.
        outputs: Output features.
        input_dim: Dimension of the weight that the inputs are.
        output_dim: Dimension of the weight that the outputs are.
    """

    name: str
    inputs: int
    outputs: int
    input_dim: int
    output_dim: int


def kind_of(module: nn.Module) -> Kind | None:
    """What kind of module it is; None for all that is not split. Subclasses may compute anything, so they are not."""
    if type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        assert isinstance(module, nn.Linear)
        return Kind("linear", module.in_features, module.out_features, 1, 0)
    if type(module) is nn.Embedding and not (module.max_norm or module.sparse or module.scale_grad_by_freq):
        return Kind("embedding", module.num_embeddings, module.embedding_dim, 0, 1)
    if type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return Kind("conv1d", weight.shape[0], weight.shape[1], 0, 1)
    return None
