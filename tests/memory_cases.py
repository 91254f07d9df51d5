"""What the tests of memory run in worker processes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import DataLoader

import distkit
from distkit.memory import count_state
from tests.contract.models import TinyGPT, Tokens, sample_losses


def held(strategy: str, run_dir: str, *, width: int = 64, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Bytes by kind after a forward and backward of the second step, and after the step; and what the model has."""
    base = {
        "strategy": strategy,
        "run_dir": run_dir,
        "log.to": ["jsonl"],
        "checkpoint.at_end": False,
        "batch.per": "global",
    }
    trainer = distkit.Trainer({**base, **(settings or {})})
    net = TinyGPT(width=width)
    numel = sum(p.numel() for p in net.parameters())
    shapes = [list(p.shape) for p in net.parameters()]
    net, opt, loader = trainer.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(Tokens(24), batch_size=12))
    found: dict[str, Any] = {}
    for item in loader:
        loss = sample_losses(net, item).mean()
        found["forward"] = asdict(count_state(trainer.strategy))
        trainer.backward(loss)
        found["backward"] = asdict(count_state(trainer.strategy))
        trainer.optimizer_step()
        found["step"] = asdict(count_state(trainer.strategy))
    trainer.close()
    return {**found, "numel": numel, "shapes": shapes}
