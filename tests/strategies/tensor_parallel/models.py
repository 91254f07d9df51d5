"""Unmodified models from small random configurations, and how they are called; no dropout unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Build = Callable[[], nn.Module]
Run = Callable[[nn.Module], torch.Tensor]


def tokens(rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 60, (rows, 8), generator=torch.Generator().manual_seed(1))


def images(rows: int = 4) -> torch.Tensor:
    return torch.rand(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class SmallGPT(nn.Module):
    """In the manner of the small GPT repositories: fused c_attn, n_head and sizes from the input, tied head."""

    def __init__(self, dropout: float = 0.0, flash: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.h = nn.ModuleList(SmallBlock(dropout, flash) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


class SmallBlock(nn.Module):
    def __init__(self, dropout: float, flash: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.c_fc, self.c_out = nn.Linear(32, 128), nn.Linear(128, 32)
        self.n_head, self.n_embd, self.dropout, self.flash = 4, 32, dropout, flash

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            att = att.masked_fill(torch.tril(torch.ones(T, T)).view(1, 1, T, T) == 0, float("-inf"))
            y = F.dropout(F.softmax(att, dim=-1), self.dropout, self.training) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.ln_1(x))
        hidden = F.dropout(F.gelu(self.c_fc(self.ln_2(x))), self.dropout, self.training)
        return x + F.dropout(self.c_out(hidden), self.dropout, self.training)


class Interleaved(nn.Module):
    """Fused q, k, v with the heads outside, as GPT-NeoX lays them; a norm over each head's features; grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.q, self.kv, self.back = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.q_norm, self.head = nn.LayerNorm(8), nn.Linear(32, 64)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.embed(idx)
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 4, 24).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.q_norm(k), v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, 32))
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).split([16, 16], dim=-1)
        k, v = (z.view(b, t, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.head(x + self.back(y.transpose(1, 2).flatten(2)))


def _transformers(name: str) -> tuple[Build, Run]:
    import transformers as tf

    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name in ("llama", "mixtral"):
        kind = {"llama": "Llama", "mixtral": "Mixtral"}[name]
        extra = {"num_local_experts": 4} if name == "mixtral" else {}
        config = getattr(tf, f"{kind}Config")(**small, intermediate_size=48, num_key_value_heads=2, **extra)
        return lambda: getattr(tf, f"{kind}ForCausalLM")(config), lambda m: m(tokens()).logits
    if name == "gpt2":
        config = tf.GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        return lambda: tf.GPT2LMHeadModel(config), lambda m: m(tokens()).logits
    if name == "bert":
        config = tf.BertConfig(**small, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        return lambda: tf.BertForMaskedLM(config), lambda m: m(tokens()).logits
    if name == "t5":
        config = tf.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            dropout_rate=0,
        )
        run = lambda m: m(input_ids=tokens(), decoder_input_ids=tokens()).logits  # noqa: E731
        return lambda: tf.T5ForConditionalGeneration(config), run
    config = tf.ViTConfig(
        **{k: v for k, v in small.items() if k != "vocab_size"}, intermediate_size=64, image_size=16, patch_size=4
    )
    return lambda: tf.ViTForImageClassification(config), lambda m: m(images()).logits


OWN: dict[str, Build] = {
    "small-gpt": SmallGPT,
    "small-gpt-slow": lambda: SmallGPT(flash=False),
    "small-gpt-dropout": lambda: SmallGPT(dropout=0.1),
    "small-gpt-slow-dropout": lambda: SmallGPT(dropout=0.1, flash=False),
    "interleaved": Interleaved,
}
BLOCKS = {
    **dict.fromkeys(("small-gpt", "small-gpt-slow", "small-gpt-dropout", "small-gpt-slow-dropout"), 4),
    **dict.fromkeys(("llama", "gpt2", "bert", "vit"), 4),
    "t5": 10,
    "mixtral": 2,
    "interleaved": 2,
    **dict.fromkeys(("encoder", "small-vit"), 4),
    "transformer": 10,
}
"""Attentions and MLPs of each model, without those of experts: Megatron's scheme has one all-reduce for each, forward and
backward, and one more for the embedding and the head."""

SECOND_INPUTS = {"t5": 2, "transformer": 2}
"""Attentions that take keys and values from elsewhere than queries: backward sums for both."""

TRANSFORMERS = ("llama", "gpt2", "bert", "t5", "vit", "mixtral")


def model_and_run(name: str) -> tuple[Build, Run]:
    from tests.strategies.tensor_parallel import attention_models

    if name in attention_models.MODELS:
        return attention_models.MODELS[name], attention_models.run
    if name in OWN:
        return OWN[name], lambda m: m(tokens())
    return _transformers(name)
