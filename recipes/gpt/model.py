"""GPT-2's architecture (Radford et al. 2019) over bytes, with the names that nanoGPT made common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Args:
        vocab_size: Number of tokens; bytes have 256.
        block_size: Longest sequence.
        n_layer: Blocks.
        n_head: Attention heads in each; divides n_embd.
        n_embd: Width.
        dropout: Share of activations that are dropped in training.
        tied: Whether the output layer shares its weights with the embedding.
    """

    vocab_size: int = 256
    block_size: int = 64
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 96
    dropout: float = 0.0
    tied: bool = True


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same shape."""
        batch, length, _ = x.shape
        heads = self.c_attn(x).view(batch, length, 3, self.n_head, -1).transpose(1, 3)
        query, key, value = heads.unbind(2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same shape."""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Predicts the next token at every position.

    Args:
        config: Sizes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the residual stream is a sum of 2 * n_layer terms
                nn.init.normal_(parameter, std=0.02 / (2 * config.n_layer) ** 0.5)
        if config.tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, length), int64, to logits (batch, length, vocab_size)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.transformer["drop"](self.transformer["wte"](tokens) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    def decay_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Parameter groups for an optimizer: matrices and embeddings decay, norms and biases don't."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
