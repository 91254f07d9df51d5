"""Unmodified models on 2 x 2 processes: 20 losses, and the gradient of every parameter, are those of one process.

All models under all strategies are done by scripts/benchmarks/tensor_parallel.py --strategies.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import Pool
from tests.strategies.tensor_parallel.engines import compare

PAIRS = [
    ("llama", "zero3"),
    ("gpt2", "fsdp"),
    ("bert", "zero1"),
    ("t5", "fsdp"),
    ("t5", "zero2"),
    ("vit", "zero3"),
    ("mixtral", "fsdp"),
    ("transformer", "zero3"),
    ("small-gpt", "ddp"),
    ("t5", "megatron-zero3"),
]


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_losses_and_gradients_are_those_of_one_process(pool: Pool, tmp_path: Path, model: str, strategy: str) -> None:
    """L1, P1: within 1e-5, gradients relative to the largest value of each."""
    found = compare(pool, model, strategy, tmp_path)
    assert found.losses <= 1e-5
    assert found.gradients <= 1e-5, found.worst
    assert found.parameters > 10
