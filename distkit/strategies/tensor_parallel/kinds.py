"""Modules that can be split: linear layers of torch and of transformers, embeddings and torch's attention, seen alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """Where features lie in a module's weight.

    Args:
        name: ``linear``, ``conv1d`` (transformers' linear layer with a transposed weight), ``embedding`` or ``attention``
            (see :mod:`.attention` for where features lie in its parameters).
        inputs: Input features, or rows of an embedding.
        outputs: Output features; of an attention those of its heads, which feed the row layer inside of it.
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
    own = "forward" in vars(module)  # someone put another forward in its place
    if type(module) is nn.MultiheadAttention and not own and kind_of(module.out_proj) is not None:
        return Kind("attention", module.embed_dim, module.embed_dim, 1, 0)
    return None
