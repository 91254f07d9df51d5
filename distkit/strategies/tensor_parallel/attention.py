"""torch's own attention, ``nn.MultiheadAttention``, split by heads, and the transformer layers of torch around it.

Its weights for q, k and v are parameters of its own and no layers, so what depends on what can't be seen from outside. But
what it computes is known, so it is split as one: a column layer whose features are the heads, which feeds the row layer
``out_proj`` inside of it. Where torch calls one function with all weights, :class:`AttentionForward` goes step by step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from distkit.errors import UsageError
from distkit.strategies.tensor_parallel.group import (
    TensorGroup,
    gather_from_group,
    part_is_used,
    reduce_from_group,
)
from distkit.strategies.tensor_parallel.layers import all_tokens, over_tokens
from distkit.strategies.tensor_parallel.layout import Runs, Split
from distkit.strategies.tensor_parallel.sharded import ShardedTensor, local_part

__all__ = ["AttentionForward", "inputs_of_call", "out_of", "place_in_attention", "turn_off_fast_paths"]

_FEATURES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("in_proj_weight", "in_proj_bias"), (0, 3)),
    **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (0, 1)),
    **dict.fromkeys(("bias_k", "bias_v"), (2, 1)),
}
"""Of each parameter: the dimension that the features of heads are, and how often they come one behind the other."""


def out_of(name: str) -> str:
    """The name of the row layer inside of an attention."""
    return f"{name}.out_proj" if name else "out_proj"


def inputs_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Query, key and value, however they were passed."""
    return [*args[:3], *(kwargs[name] for name in ("query", "key", "value")[len(args) :])]


def place_in_attention(own: str, features: int, split: Split) -> tuple[int, tuple[Runs, ...]] | None:
    """Where the ranks' parts of a parameter lie.

    Args:
        own: The parameter's name in the attention.
        features: Of all heads together.
        split: Of the attention.

    Returns:
        The split dimension, and for each rank its runs along it; None for a parameter that is whole on all ranks.
    """
    if own not in _FEATURES:
        return None
    dim, times = _FEATURES[own]
    runs = (tuple((i * features + first, n) for i in range(times) for first, n in held) for held in split.runs)
    return dim, tuple(runs)


class AttentionForward:
    """Called in place of an attention's forward, with the same arguments and results.

    Args:
        name: The module's, for messages.
        module: Holds the local weights.
        group: The tensor group; one of one rank gives what the whole module gives, in evaluation mode.
    """

    def __init__(self, name: str, module: nn.MultiheadAttention, group: TensorGroup) -> None:
        self.name, self.module, self.group = name, module, group
        self.heads = module.num_heads // group.size

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``nn.MultiheadAttention.forward``; every rank gives the whole output, and the weights of all heads."""
        self._check(query, key, value, is_causal and attn_mask is None)
        batched = query.dim() == 3
        q, k, v = self._heads(query, key, value)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.module.dropout if self.module.training else 0.0
        weights: torch.Tensor | None = None
        if need_weights or dropout:
            weights = self._weights(q, k, _causal(q, k) if causal else mask, dropout)
            output = weights @ v
        else:
            output = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        output = self._out(output, batched)
        if weights is None or not need_weights:
            return output, None
        weights = self._of_all_heads(weights, average_attn_weights)
        return output, weights if batched else weights.squeeze(0)

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, no_mask: bool) -> None:
        hint = f"keep it whole: --set 'parallel.tensor_layout={{\"{self.name}\": replicate}}'"
        if any(isinstance(tensor, ShardedTensor) and not over_tokens(tensor) for tensor in (query, key, value)):
            raise UsageError(f"{self.name} is split by heads, but what reaches it is split already", hint=hint)
        if any(tensor.is_nested for tensor in (query, key, value)):
            raise UsageError(f"{self.name} is split by heads, and can't take nested tensors", hint=hint)
        if no_mask:
            raise UsageError(
                f"{self.name} was called with is_causal=True and without attn_mask",
                hint="attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(length)",
            )

    def _heads(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v of this rank's heads, [batch, heads, length, features of a head]."""
        module = self.module
        copies = {id(tensor): all_tokens(tensor, self.group) for tensor in inputs}
        placed = {name: self._batch_first(tensor) for name, tensor in copies.items()}
        if len(placed) == 1 and module.in_proj_weight is not None:
            fused = functional.linear(placed[id(inputs[0])], module.in_proj_weight, module.in_proj_bias)
            projected = list(fused.chunk(3, -1))
        else:
            separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            weights = separate if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
            biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
            projected = [
                functional.linear(placed[id(tensor)], weight, bias)
                for tensor, weight, bias in zip(inputs, weights, biases, strict=True)
            ]
        for index, bias in ((1, module.bias_k), (2, module.bias_v)):
            if bias is not None:
                own = projected[index]
                projected[index] = torch.cat([own, bias.expand(own.shape[0], 1, own.shape[2])], 1)
        q, k, v = (x.unflatten(-1, (self.heads, module.head_dim)).transpose(1, 2) for x in projected)
        if module.add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _batch_first(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2:
            return tensor.unsqueeze(0)
        return tensor if self.module.batch_first else tensor.transpose(0, 1)

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor | None:
        """What is added to the scores of this rank's heads, [batch or 1, heads or 1, queries, keys]."""
        added = (self.module.bias_k is not None) + self.module.add_zero_attn
        batch, heads, queries, keys = q.shape[0], self.module.num_heads, q.shape[2], k.shape[2] - added
        masks: list[torch.Tensor] = []
        if attn_mask is not None:
            self._check_shape("attn_mask", attn_mask, (queries, keys), (batch * heads, queries, keys))
            mask = part_is_used(_additive(attn_mask, q.dtype), self.group)
            mask = mask.view(-1, 1 if mask.dim() == 2 else heads, queries, keys)
            own = (self.group.rank * self.heads, self.heads) if mask.shape[1] == heads else (0, 1)
            masks.append(mask.narrow(1, *own))
        if padding is not None:
            self._check_shape("key_padding_mask", padding, (batch, keys), *([(keys,)] if batch == 1 else []))
            masks.append(part_is_used(_additive(padding, q.dtype), self.group).view(batch, 1, 1, keys))
        return functional.pad(sum(masks[1:], masks[0]), (0, added)) if masks else None

    def _check_shape(self, argument: str, mask: torch.Tensor, *shapes: tuple[int, ...]) -> None:
        if tuple(mask.shape) not in shapes:
            raise UsageError(
                f"{argument} of {self.name} has the shape {tuple(mask.shape)}",
                hint=f"its shape can be {' or '.join(map(str, shapes))}",
            )

    def _weights(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> torch.Tensor:
        """[batch, heads, queries, keys] of this rank's heads, after dropout, as torch gives them out."""
        scores = q * sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if not dropout:
            return weights
        split = ShardedTensor(weights, 1, (self.module.num_heads,), self.group)  # so that the masks are one process's
        return local_part(functional.dropout(split, dropout))

    def _out(self, output: torch.Tensor, batched: bool) -> torch.Tensor:
        """From [batch, heads, length, features] of this rank to what the attention gives.

        In memory the result is [length, batch, features] as torch has it, since a dropout that follows draws its mask in the
        order of memory. Where ranks are to hold some tokens each, the row layer must see which dimension tokens are.
        """
        batch_first = batched and self.module.batch_first
        tokens_last = batch_first and self.group.sequence
        output = output.permute(0, 2, 1, 3).flatten(2) if tokens_last else output.permute(2, 0, 1, 3).flatten(2)
        if self.group.size > 1:
            output = ShardedTensor(output, -1, (self.module.embed_dim,), self.group)
        output = self.module.out_proj(output)
        if tokens_last:
            output = output.transpose(0, 1).contiguous().transpose(0, 1)
        if not batched:
            return output.squeeze(1)
        return output.transpose(0, 1) if batch_first and not tokens_last else output

    def _of_all_heads(self, weights: torch.Tensor, average: bool) -> torch.Tensor:
        if average:
            return reduce_from_group(weights.sum(1) / self.module.num_heads, self.group)
        return gather_from_group(weights, 1, self.group)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to scores; where a boolean one is True nothing is attended to."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _causal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What ``is_causal`` stands for, to be added to scores; torch ignores the mask then."""
    return torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)


def turn_off_fast_paths(model: nn.Module, names: Collection[str]) -> None:
    """Keep torch's encoder layers from reading the weights of layers inside of them.

    In evaluation mode without gradients ``nn.TransformerEncoderLayer`` gives all weights to one fused function and doesn't
    call the forwards of its layers, and ``nn.TransformerEncoder`` hands it nested tensors (torch 2.13,
    ``torch/nn/modules/transformer.py``). With parts of the weights the result would be wrong without a sign of it.

    Args:
        model: Holds such layers somewhere, or none.
        names: Modules that are split; only what is around them is changed.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            continue
        if not any(other.startswith(f"{name}." if name else "") for other in names):
            continue
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        else:
            module.activation_relu_or_gelu = 0
