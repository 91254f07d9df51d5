"""Models on torch's own attention and transformer layers; no dropout unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.strategies.tensor_parallel.models import images, tokens


def padding(idx: torch.Tensor) -> torch.Tensor:
    """True where a sample is padded: 0 to 3 tokens at its end, as its first token says."""
    length = idx.shape[1]
    return torch.arange(length, device=idx.device) >= (length - idx[:, :1] % 4)


class Encoder(nn.Module):
    """A language model on nn.TransformerEncoder."""

    def __init__(self, *, batch_first: bool = True, causal: bool = False, padded: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, **{"dropout": 0.0, **options})
        self.embed, self.encoder, self.head = nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 64)
        self.batch_first, self.causal, self.padded = batch_first, causal, padded

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.embed(idx)
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1], device=x.device) if self.causal else None
        pad = padding(idx) if self.padded else None
        if pad is not None and mask is not None:
            pad = torch.zeros(pad.shape, device=x.device).masked_fill(pad, float("-inf"))
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=pad, is_causal=self.causal and pad is None)
        x = x if self.batch_first else x.transpose(0, 1)
        if pad is not None:
            x = x.masked_fill(padding(idx).unsqueeze(-1), 0.0)
        logits: torch.Tensor = self.head(x)
        return logits


class Translator(nn.Module):
    """nn.Transformer: encoder, decoder and what lies between them."""

    def __init__(self, *, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.transformer = nn.Transformer(
            32, 4, 2, 2, 64, batch_first=batch_first, **{"dropout": 0.0, "norm_first": True, **options}
        )
        self.batch_first = batch_first

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        source, target = self.embed(idx), self.embed(idx.roll(1, 1)[:, :7])
        if not self.batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(7, device=idx.device)
        pad = padding(idx)
        x = self.transformer(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=pad,
            memory_key_padding_mask=pad,
            tgt_is_causal=True,
        )
        logits: torch.Tensor = self.head(x if self.batch_first else x.transpose(0, 1))
        return logits


class SmallViT(nn.Module):
    """Patches, a class token, and nn.MultiheadAttention called as most write it, with its weights, which nobody uses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(32),
                    "attn": nn.MultiheadAttention(32, 4, dropout, batch_first=True),
                    "mlp": nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            y = block["norm"](x)
            x = x + block["attn"](y, y, y)[0]
            x = x + block["mlp"](x)
        logits: torch.Tensor = self.head(x[:, 0])
        return logits


class Everything(nn.Module):
    """What nn.MultiheadAttention can do besides: other widths of keys and values, biases and zeros behind them, a learned
    mask for each head, weights of heads that the loss depends on, unbatched inputs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.keys, self.values = nn.Embedding(64, 32), nn.Embedding(64, 24), nn.Embedding(64, 16)
        self.cross = nn.MultiheadAttention(32, 4, dropout, kdim=24, vdim=16, add_bias_kv=True, batch_first=True)
        self.own = nn.MultiheadAttention(32, 4, dropout, bias=False, add_zero_attn=True)
        self.single = nn.MultiheadAttention(32, 4, dropout)
        self.position = nn.Parameter(torch.randn(4, 9, 9))  # of up to 9 tokens
        self.head = nn.Linear(32, 64)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.embed(idx)
        length = idx.shape[1]
        mask = self.position[:, :length, :length].repeat(len(x), 1, 1)
        y, each = self.cross(x, self.keys(idx), self.values(idx), attn_mask=mask, average_attn_weights=False)
        y = (x + y).transpose(0, 1)
        z, mean = self.own(y, y, y, key_padding_mask=padding(idx))
        x = (y + z).transpose(0, 1)
        x = x + torch.stack([self.single(sample, sample, sample, need_weights=False)[0] for sample in x])
        logits: torch.Tensor = self.head(x)
        return logits + each.square().mean((1, 3)).unsqueeze(-1) * logits + mean.mean(1)[:, :length, None]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    "encoder-sequence-first": lambda: Encoder(batch_first=False, causal=True, padded=False, norm_first=True),
    "encoder-causal-padded": lambda: Encoder(causal=True, activation="gelu"),
    "encoder-dropout": lambda: Encoder(dropout=0.1),
    "transformer": Translator,
    "transformer-sequence-first": lambda: Translator(batch_first=False, norm_first=False),
    "transformer-dropout": lambda: Translator(dropout=0.1),
    "small-vit": SmallViT,
    "small-vit-dropout": lambda: SmallViT(0.1),
    "everything": Everything,
    "everything-dropout": lambda: Everything(0.1),
}


def run(model: nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(images() if isinstance(model, SmallViT) else tokens())
    return output
