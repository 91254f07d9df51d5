"""Small models and data for the contract suite; deterministic, no dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.c_proj(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class TinyGPT(nn.Module):
    """Next-token model; `tied` shares embedding and head, `frozen` trains only the last block and the head."""

    def __init__(self, *, tied: bool = True, frozen: bool = False, unused: bool = False, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.register_buffer("calls", torch.zeros(3))
        if tied:
            self.head.weight = self.wte.weight
        if unused:
            self.spare = nn.Linear(width, width)
        if frozen:
            for module in (self.wte, self.wpe, self.blocks[0]):
                module.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln_f(x))
        return logits


class Tokens(Dataset[dict[str, Any]]):
    """Sequences of 8 tokens, their successors, a weight each, and their place in the set."""

    def __init__(self, length: int) -> None:
        made = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, 32, (length, 9), generator=made)
        self.weights = torch.randint(1, 9, (length,), generator=made).float()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index]
        return {"x": row[:-1], "y": row[1:], "weight": self.weights[index], "index": index}


def sample_losses(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The mean loss of each sample, shape [batch]."""
    logits = model(batch["x"]).float()
    return F.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none").mean(dim=1)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay on matrices, none on the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
