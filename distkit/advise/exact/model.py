"""A transformer of a :class:`~distkit.advise.models.ModelShape`'s sizes, for running: Llama-like where the feed-forward part is gated, else GPT-like.

It keeps for its backward what it would on a GPU, also where it runs on the CPU: norms are one operator, and under autocast
norms and softmax compute in fp32 (ATen/autocast_mode.h of torch 2.13.0, AT_FORALL_FP32, which holds for CUDA only).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from distkit.advise.exact.sizes import Sizes
from distkit.strategies.tensor_parallel.layout import COLUMN, ROW, VOCABULARY, Layout, Split

__all__ = ["LayerNorm", "RMSNorm", "ReferenceModel", "tensor_layout"]


class ReferenceModel(nn.Module):
    """Gives logits for tokens.

    Args:
        sizes: From :func:`~distkit.advise.exact.sizes.sizes_of`, with as many layers as are to be built.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape = sizes.shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(sizes.positions, shape.hidden) if sizes.positions else None
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits.

        Args:
            tokens: [batch, sequence], integers.
        """
        x: torch.Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    """Attention and feed-forward part, each behind a norm and around a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape, bias = sizes.shape, sizes.biases
        self.heads, self.kv_heads, self.fused = shape.heads, shape.kv_heads, sizes.fused
        self.width = shape.hidden // shape.heads
        kv = self.width * shape.kv_heads
        self.norm1, self.norm2 = _norm(sizes), _norm(sizes)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.k = nn.Linear(shape.hidden, kv, bias=bias)
        self.v = nn.Linear(shape.hidden, kv, bias=bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=bias)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.out(self._attention(self.norm1(x)))
        y: torch.Tensor = self.norm2(x)
        inner = functional.gelu(self.up(y)) if self.gate is None else functional.silu(self.gate(y)) * self.up(y)
        x = x + self.down(inner)
        return x

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.width).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.width).transpose(1, 2)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)
        else:
            if self.kv_heads < self.heads:
                k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            scores = (q @ k.transpose(-2, -1)) * self.width**-0.5
            y = functional.softmax(scores, -1, dtype=torch.float32 if _autocasts() else None) @ v
        return y.transpose(1, 2).reshape(batch, tokens, self.heads * self.width)


class LayerNorm(nn.LayerNorm):
    """torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape that ends with the width."""
        if not _autocasts():
            return super().forward(input)
        with torch.autocast("cpu", enabled=False):
            return functional.layer_norm(input.float(), self.normalized_shape, self.weight.float(), self.bias.float())


class RMSNorm(nn.RMSNorm):
    """torch's, as one operator: on the CPU it would be several, and keep what lies between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape that ends with the width."""
        assert self.weight is not None
        x, weight = (x.float(), self.weight.float()) if _autocasts() else (x, self.weight)
        y: torch.Tensor = torch.ops.distkit.rms_norm(x, weight)[0]
        return y


def _norm(sizes: Sizes) -> nn.Module:
    hidden = sizes.shape.hidden
    return LayerNorm(hidden) if sizes.biases else RMSNorm(hidden)


def _autocasts() -> bool:
    return torch.is_autocast_enabled("cpu")


# -- the norm's operators -----------------------------------------------------------------------------------------------

EPSILON = 1e-6


@torch.library.custom_op("distkit::rms_norm", mutates_args=(), schema="(Tensor x, Tensor weight) -> (Tensor, Tensor)")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.float().square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    return (x.float() * scale).to(x.dtype) * weight.to(x.dtype), scale


@torch.library.custom_op(
    "distkit::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
)
def _rms_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normal, inner = x.float() * scale, gradient.float() * weight.float()
    change = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return change.to(x.dtype), (gradient.float() * normal).flatten(0, -2).sum(0).to(weight.dtype)


_rms_norm.register_fake(lambda x, weight: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)))
_rms_norm_backward.register_fake(lambda gradient, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight)))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, scale = ctx.saved_tensors
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.distkit.rms_norm_backward(gradient, x, weight, scale)
    return found


_rms_norm.register_autograd(_differentiate, setup_context=_keep)


# -- over a tensor group ------------------------------------------------------------------------------------------------


def tensor_layout(sizes: Sizes, ranks: int) -> Layout:
    """How distkit splits such a model over a tensor group; what it finds by looking at a model, written down.

    Args:
        sizes: Of the model.
        ranks: Ranks of a tensor group.
    """
    shape = sizes.shape
    kv = shape.hidden * shape.kv_heads // shape.heads
    layout = Layout(ranks)

    def split(name: str, style: str, features: int, *, partners: tuple[str, ...] = (), leaves: bool = False) -> None:
        piece = features // ranks
        runs = tuple(((rank * piece, piece),) for rank in range(ranks))
        layout.splits[name] = Split(style, runs, (features,), partners=partners, leaves=leaves)

    for index in range(sizes.layers):
        at = f"layers.{index}."
        split(at + "q", COLUMN, shape.hidden)
        split(at + "k", COLUMN, kv)
        split(at + "v", COLUMN, kv)
        split(at + "out", ROW, shape.hidden, partners=(at + "q", at + "k", at + "v"))
        feeds = ("gate", "up") if shape.gated else ("up",)
        for name in feeds:
            split(at + name, COLUMN, shape.feed_forward)
        split(at + "down", ROW, shape.feed_forward, partners=tuple(at + name for name in feeds))
    if shape.vocabulary % ranks == 0:
        split("embedding", VOCABULARY, shape.vocabulary, partners=("head",) if shape.tied else ())
        split("head", COLUMN, shape.vocabulary, partners=("embedding",) if shape.tied else (), leaves=True)
    return layout
