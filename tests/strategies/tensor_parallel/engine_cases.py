"""Unmodified models through the Trainer, under every engine that takes a tensor group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

RATE = 1024.0
"""Of one step of plain SGD, from which gradients are read off: so large that the parameter before it is lost beside it."""


def inputs_for(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and their targets."""
    from tests.strategies.tensor_parallel.models import images, tokens

    if name in ("vit", "small-vit"):
        return images(rows), torch.arange(rows) % 2
    x = tokens(rows)
    return x, x.roll(1, 1)[:, :7] if name.startswith("transformer") else x.roll(1, 1)


def logits_of(name: str, model: Any, x: torch.Tensor) -> torch.Tensor:
    """One call of a model."""
    output = model(input_ids=x, decoder_input_ids=x) if name == "t5" else model(x)
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits


def train(strategy: str, model: str, run_dir: str, settings: dict[str, Any], *, steps: int = 20) -> list[float]:
    """Losses of AdamW's steps."""
    trainer, net, loader = _prepared(strategy, model, f"{run_dir}-losses", settings, "AdamW", 1e-3)
    losses = []
    while trainer.global_step < steps:
        for _ in trainer.epochs(trainer.epoch + 1):
            for x, y in loader:
                loss = _loss(model, net, x, y)
                trainer.step(loss)
                losses.append(trainer.mean(loss))
    trainer.close()
    return losses


def gradients(strategy: str, model: str, run_dir: str, settings: dict[str, Any]) -> str:
    """A file with the gradient of every parameter, put together from all ranks."""
    from safetensors.torch import save_file

    trainer, net, loader = _prepared(strategy, model, f"{run_dir}-gradients", {**settings, "max_steps": 1}, "SGD", RATE)
    before = trainer.model_state_dict(net)
    for _ in trainer.epochs(1):
        for x, y in loader:
            trainer.step(_loss(model, net, x, y))
            break
    after = trainer.model_state_dict(net)
    file = Path(f"{run_dir}-gradients.safetensors")
    if trainer.is_main:
        named = dict(trainer.unwrap(net).named_parameters())
        save_file({name: (value - after[name]) / RATE for name, value in before.items() if name in named}, str(file))
    trainer.close()
    return str(file)


def _loss(name: str, net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_of(name, net, x).flatten(0, -2), y.flatten())


def _prepared(
    strategy: str, name: str, run_dir: str, settings: dict[str, Any], optimizer: str, rate: float
) -> tuple[Any, Any, Any]:
    import distkit
    from tests.strategies.tensor_parallel.models import model_and_run

    base = {"strategy": strategy, "run_dir": run_dir, "batch.per": "global", "log.to": ["jsonl"]}
    trainer = distkit.Trainer({**base, "checkpoint.at_end": False, "optim.lr_scaling": "none", **settings})
    torch.manual_seed(0)
    net: Any = model_and_run(name)[0]()
    if name == "t5":
        x = inputs_for(name, 2)[0]
        net.example_input_array = {"input_ids": x, "decoder_input_ids": x}
    chosen: Any = getattr(torch.optim, optimizer)(net.parameters(), lr=rate)
    loader: Any = DataLoader(TensorDataset(*inputs_for(name, 32)), batch_size=8)
    net, _, loader = trainer.prepare(net, chosen, loader)
    return trainer, net, loader
