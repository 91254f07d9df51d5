"""How a model without values is split is found with a few of its layers, and is what the whole model would show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distkit.config import load_config
from distkit.errors import PlanError
from distkit.strategies.profiling import layout_without_values
from distkit.strategies.tensor_parallel.detect import detect, random_twin
from distkit.strategies.tensor_parallel.example import find_run
from distkit.strategies.tensor_parallel.shortened import lengthen, shorten
from distkit.strategies.tensor_parallel.wishes import plan_of

CONFIG = load_config(overrides=["strategy=ddp", "parallel.tensor=2"]).config


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, widths: list[int], *, counted: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for width in widths)
        self.counted = len(widths) if counted else None
        self.example_input_array = torch.randn(2, widths[0])
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.layers) if self.counted is None else [self.layers[i] for i in range(self.counted)]
        for layer in layers:
            x = layer(x) * self.scale
        return x


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, use_cache=False, **sizes))


@pytest.mark.parametrize("build", [lambda: Stack([8] * 6), lambda: Stack([8] * 5, counted=True), llama])
def test_as_the_whole_model_shows(build: Any) -> None:
    model = build()
    if not hasattr(model, "example_input_array"):
        model.example_input_array = torch.arange(32).view(2, 16)
    whole = detect(model, find_run(model, random_twin(model), None), 2, plan=plan_of(model))
    found = layout_without_values(model.to("meta"), CONFIG, None)
    assert len(whole.splits) >= 10 and found.splits == whole.splits


def test_what_is_taken_out() -> None:
    model = Stack([8] * 6)
    assert shorten(model) == {"layers": 6} and len(model.layers) == 2
    assert shorten(Stack([8, 8, 8, 16])) == {}
    assert shorten(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))) == {}  # may be split in turns
    sequence = nn.Sequential(*(Block(8) for _ in range(4)))
    assert shorten(sequence) == {"": 4}
    x = torch.randn(2, 8)
    layout = detect(sequence, lambda model: model(x), 2)
    assert sorted(lengthen(layout, {"": 4}).splits) == sorted(
        f"{i}.{name}" for i in range(4) for name in ("up", "down")
    )


def test_too_large_for_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkit.memory.free_on_host", lambda: 1000)
    with pytest.raises(PlanError, match=r"how Stack is split .* need 0\.0 GB .*\n?.*parallel\.tensor"):
        layout_without_values(Stack([8] * 6).to("meta"), CONFIG, None)
