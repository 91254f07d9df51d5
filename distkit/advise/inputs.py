"""What goes into the forward of a model that a user's function builds, and a loss of what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Inputs", "inputs_of", "loss_of_outputs"]

_EXAMPLES, _TOKENS = 2, 16
"""Samples, and tokens in each, with which a forward is tried."""


@dataclass(frozen=True)
class Inputs:
    """Of one forward.

    Args:
        positional: Arguments.
        named: Arguments by name.
        given: Whether they are the function's own, and not just tokens.
    """

    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] | None = None
    given: bool = True

    @property
    def samples(self) -> int:
        """How many there are, by the first tensor."""
        found = tree_leaves((self.positional, dict(self.named or {})))
        return next(leaf.shape[0] for leaf in found if isinstance(leaf, torch.Tensor) and leaf.dim())

    def may_go_into(self, model: nn.Module) -> bool:
        """Whether they are the function's own, or the model has an embedding for tokens."""
        return self.given or any(isinstance(module, nn.Embedding) for module in model.modules())

    def into(self, model: nn.Module) -> Any:
        """What the model makes of them."""
        return model(*self.positional, **(self.named or {}))

    def example_for(self, model: nn.Module) -> Any:
        """A few samples with values, as ``example_input_array`` takes them."""
        rows = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)

        def valued(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.is_floating_point():
                return torch.randn(value.shape, dtype=value.dtype)
            return (torch.arange(value.numel()) % rows).view(value.shape).to(value.dtype)

        few = self.of_size(_EXAMPLES, _TOKENS)
        return tree_map(valued, dict(few.named) if few.named else few.positional)

    def of_size(self, samples: int, tokens: int) -> Inputs:
        """As many samples, without their values; they lie along the first dimension.

        Args:
            samples: How many.
            tokens: In each, where tokens go in and the function said nothing else.
        """
        if not self.given:
            return tokens_of(samples, tokens)

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            return torch.empty((samples, *value.shape[1:]), dtype=value.dtype)

        return Inputs(tree_map(resized, self.positional), tree_map(resized, dict(self.named or {})))


def tokens_of(samples: int, tokens: int) -> Inputs:
    """Sequences of tokens, all of them 0."""
    return Inputs((torch.zeros(samples, tokens, dtype=torch.int64),), given=False)


def inputs_of(example: Any) -> Inputs:
    """What a function gave beside its model.

    Args:
        example: A tensor, several, or a mapping of such by the forward's names; None where it gave none.

    Raises:
        TypeError: There is no tensor in it.
    """
    if example is None:
        return tokens_of(1, 1)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(example)):
        raise TypeError(f"beside the model it returned a {type(example).__name__} without a tensor")
    if isinstance(example, Mapping):
        return Inputs(named=dict(example))
    return Inputs(tuple(example) if isinstance(example, list | tuple) else (example,))


def loss_of_outputs(output: Any) -> torch.Tensor:
    """The model's own loss, where labels went in (``output.loss``); else the sum over the largest output's log-softmax.

    Raises:
        TypeError: There is nothing to make a loss of.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own
    plain = dict(output) if isinstance(output, Mapping) else output  # torch's trees don't know transformers' outputs
    outputs = [t for t in tree_leaves(plain) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        raise TypeError("nothing that its forward returns depends on its parameters")
    return max(outputs, key=torch.numel).float().log_softmax(-1).sum()
