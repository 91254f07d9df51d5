"""What is found out about models as they are, without any process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distkit.strategies.tensor_parallel.detect import detect
from tests.strategies.tensor_parallel.models import OWN, TRANSFORMERS, model_and_run

VOCABULARY = {
    "small-gpt": ("wte", "lm_head"),
    "small-gpt-slow": ("wte", "lm_head"),
    "interleaved": ("embed", "head"),
    "llama": ("model.embed_tokens", "lm_head"),
    "gpt2": ("transformer.wte", "lm_head"),
    "bert": (
        "bert.embeddings.word_embeddings",
        "bert.embeddings.position_embeddings",  # 512 positions are a good part of a small model
        "cls.predictions.decoder",
    ),
    "t5": ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"),
    "mixtral": ("model.embed_tokens", "lm_head"),
}
"""Embeddings and heads that are split by vocabulary."""


def styles(name: str, size: int = 2) -> dict[str, str]:
    build, run = model_and_run(name)
    return {module: split.style for module, split in detect(build(), run, size).splits.items()}


@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("small-gpt", ("c_attn", "c_fc"), ("c_proj", "c_out")),
        ("small-gpt-slow", ("c_attn", "c_fc"), ("c_proj", "c_out")),
        ("interleaved", ("qkv", "q", "kv"), ("out", "back")),
        ("llama", ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")),
        ("gpt2", ("c_attn", "c_fc"), ("c_proj",)),
        ("bert", ("query", "key", "value", "intermediate.dense"), ("attention.output.dense", "output.dense")),
        ("t5", ("q", "k", "v", "wi", "relative_attention_bias"), ("o", "wo")),
        ("vit", ("q_proj", "k_proj", "v_proj", "fc1"), ("o_proj", "fc2")),
        ("mixtral", ("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    ],
)
def test_every_block_is_found(name: str, columns: tuple[str, ...], rows: tuple[str, ...]) -> None:
    """All modules with these names, and no others, in every layer."""
    build, _ = model_and_run(name)
    kinds = (nn.Linear, nn.Embedding)
    named = [n for n, m in build().named_modules() if isinstance(m, kinds) or type(m).__name__ == "Conv1D"]
    expected = {n: "column" for n in named if n.endswith(tuple("." + c for c in columns)) or n in columns}
    expected |= {n: "row" for n in named if n.endswith(tuple("." + r for r in rows)) or n in rows}
    expected |= {
        n: "column" if n.endswith(("head", "predictions.decoder")) else "vocabulary" for n in VOCABULARY.get(name, ())
    }
    assert styles(name) == expected


def test_fused_parts_and_heads_say_what_a_rank_holds() -> None:
    build, run = model_and_run("small-gpt")
    split = detect(build(), run, 4).splits["h.0.c_attn"]
    assert split.parts == (32, 32, 32)
    assert split.runs[1] == ((8, 8), (40, 8), (72, 8))
    build, run = model_and_run("interleaved")
    layout = detect(build(), run, 2)
    assert layout.splits["qkv"].runs == (((0, 48),), ((48, 48),))
    assert layout.splits["kv"].parts == (16, 16)


def test_heads_that_do_not_divide_stay_whole_and_are_named() -> None:
    build, run = model_and_run("llama")
    layout = detect(build(), run, 4)
    mlp = {"gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-1] for name in layout.splits} == {*mlp, "embed_tokens", "lm_head"}
    assert "k_proj" in layout.notes["model.layers.0.self_attn.o_proj"]
    assert "heads that 4 doesn't divide" in layout.notes["model.layers.0.self_attn.o_proj"]


class Mixing(nn.Module):
    """Nothing here can be split: a norm, a softmax or a sum over features lies between the layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.how = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(16), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = {
            "norm": lambda: self.norm(y),
            "softmax": lambda: y.softmax(-1),
            "sum": lambda: y + y.sum(-1, keepdim=True),
            "flip": lambda: y.flip(-1),
            "roll": lambda: y.roll(1, -1),
        }[self.how]()
        out: torch.Tensor = self.b(y)
        return out


@pytest.mark.parametrize("how", ["norm", "softmax", "sum", "flip", "roll"])
def test_what_mixes_features_is_left_alone(how: str) -> None:
    layout = detect(Mixing(how), lambda m: m(torch.rand(4, 8, generator=torch.Generator().manual_seed(0))), 2)
    assert layout.splits == {}
    assert "b" in layout.notes


class Reused(nn.Module):
    """The first layer's output is needed whole besides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        out: torch.Tensor = self.b(y.relu()) + y
        return out


def test_an_output_that_is_needed_whole_besides_is_left_alone() -> None:
    layout = detect(Reused(), lambda m: m(torch.rand(4, 8, generator=torch.Generator().manual_seed(0))), 2)
    assert layout.splits == {}


class TiedByHand(nn.Module):
    """The head is no layer: the embedding's weight is multiplied with as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(64, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return (x + self.down(self.up(x).relu())) @ self.embed.weight.t()


def test_a_weight_that_is_used_otherwise_too_stays_whole() -> None:
    layout = detect(TiedByHand(), lambda m: m(torch.arange(12).view(2, 6)), 2)
    assert {name: split.style for name, split in layout.splits.items()} == {"up": "column", "down": "row"}
    assert "the model can't do with a part of its weight" in layout.notes["embed"]


def test_a_vocabulary_that_does_not_divide_is_named() -> None:
    class Odd(nn.Sequential):
        pass

    model = Odd(nn.Embedding(51, 8), nn.LayerNorm(8), nn.Linear(8, 51))
    layout = detect(model, lambda m: m(torch.arange(12).view(2, 6)), 2)
    assert layout.splits == {}
    assert "its vocabulary of 51 doesn't divide by 2" in layout.notes["2"]
    assert "its vocabulary of 51 doesn't divide by 2" in layout.notes["0"]


@pytest.mark.parametrize("name", [*OWN, *TRANSFORMERS])
def test_the_model_and_the_generators_stay_as_they_were(name: str) -> None:
    build, run = model_and_run(name)
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    training, state = model.training, torch.get_rng_state()
    detect(model, run, 2)
    assert model.training == training
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert not any("forward" in vars(module) for module in model.modules())
