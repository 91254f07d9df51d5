"""One model under one strategy on 2 x 2 processes, against one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pool import Pool

__all__ = ["Found", "compare"]

CASES = "tests.strategies.tensor_parallel.engine_cases:"


@dataclass
class Found:
    """Differences from one process.

    Args:
        losses: Largest of a loss, relative where losses are above 1.
        gradients: Largest of a gradient, relative to the largest value of that gradient.
        worst: Of which parameter.
        parameters: How many gradients were compared.
    """

    losses: float
    gradients: float
    worst: str
    parameters: int


def compare(pool: Pool, model: str, strategy: str, folder: Path, *, steps: int = 20, sequence: bool = False) -> Found:
    """Train twice under both, once for losses and once for gradients, and compare."""
    from safetensors.torch import load_file

    settings: dict[str, Any] = {"parallel.tensor": 2, "parallel.sequence": sequence}
    if strategy.endswith("zero3"):  # of so small models every parameter would stay whole
        settings["engine.deepspeed.zero_optimization"] = {"stage3_param_persistence_threshold": 16}
    alone: dict[str, Any] = {"strategy": "single", "model": model, "run_dir": str(folder / "single"), "settings": {}}
    split: dict[str, Any] = {
        "strategy": strategy,
        "model": model,
        "run_dir": str(folder / "split"),
        "settings": settings,
    }
    expected = pool.run(CASES + "train", 1, steps=steps, **alone)[0]
    found = pool.run(CASES + "train", 4, steps=steps, **split)[0]
    assert len(found) == len(expected) >= steps
    losses = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))
    whole = load_file(pool.run(CASES + "gradients", 1, **alone)[0])
    parts = load_file(pool.run(CASES + "gradients", 4, **split)[0])
    apart = {
        name: float((parts[name] - value).abs().max() / value.abs().max())
        for name, value in whole.items()
        if float(value.abs().max()) > 1e-6  # a key's bias has none in exact arithmetic
    }
    assert parts.keys() == whole.keys()
    worst = max(apart, key=lambda name: apart[name])
    return Found(losses, apart[worst], worst, len(apart))
