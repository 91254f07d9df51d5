"""Bytes that a rank holds."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distkit.memory import StateBytes, count_bytes, state_of
from tests.pool import Pool

CASES = "tests.memory_cases:"


def test_each_storage_counts_once() -> None:
    flat = torch.zeros(100)
    tied = torch.zeros(10)
    counted = count_bytes(
        {
            "parameters": [flat[:40].view(4, 10), flat[40:], tied, tied.view(5, 2)],
            "gradients": [flat[10:20], torch.zeros(3, dtype=torch.bfloat16), torch.zeros(5, device="meta")],
            "buffers": [torch.zeros(0)],
        }
    )
    assert counted == StateBytes(parameters=440, gradients=6)
    assert counted.total == 446


def test_plain_modules() -> None:
    net = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10))
    opt = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 10)).sum().backward()
    opt.step()
    assert count_bytes(state_of([net], [opt])) == StateBytes(parameters=480, gradients=480, optimizer=972, buffers=88)


@pytest.mark.parametrize("processes", [2, 4])
def test_fsdp_holds_its_share(pool: Pool, tmp_path: Path, processes: int) -> None:
    """16 bytes a parameter for fp32 AdamW, over the ranks: 4 parameter, 4 gradient, 8 moments (numbers: ZeRO, stage 3).

    Exactly, padding included: fully_shard cuts the first dimension into equal pieces and pads the last ones, so a rank
    holds ceil(rows / ranks) rows of each parameter (optimizer states aren't padded), and 4 bytes of step count.
    """
    for rank, found in enumerate(pool.run(CASES + "held", processes, strategy="fsdp", run_dir=str(tmp_path))):
        share = 4 * found["numel"] / processes
        padded = 4 * sum(-(-shape[0] // processes) * prod(shape[1:]) for shape in found["shapes"])
        after = found["backward"]
        assert after["parameters"] == after["gradients"] == padded
        assert after["parameters"] == pytest.approx(share, rel=0.03)
        own = [
            max(0, min(-(-s[0] // processes), s[0] - rank * -(-s[0] // processes))) * prod(s[1:])
            for s in found["shapes"]
        ]
        assert after["optimizer"] == 8 * sum(own) + 4 * len(found["shapes"])
        assert sum(after.values()) == pytest.approx(4 * share, rel=0.03)
        assert found["step"] == {**after, "gradients": 0}
        whole = 4 * found["numel"]
        assert padded < found["forward"]["parameters"] < whole + padded  # the outermost unit is gathered now


@pytest.mark.parametrize(("strategy", "processes", "expected"), [("ddp", 2, 1), ("hsdp", 4, 2), ("single", 1, 1)])
def test_other_strategies(pool: Pool, tmp_path: Path, strategy: str, processes: int, expected: int) -> None:
    """ddp holds all of it, hsdp the share of its replica group."""
    for found in pool.run(CASES + "held", processes, strategy=strategy, run_dir=str(tmp_path)):
        assert sum(found["backward"].values()) == pytest.approx(16 * found["numel"] / expected, rel=0.03)


@pytest.mark.parametrize("settings", [{"batch.accumulate": 2}, {"batch.accumulate": 2, "precision": "bf16"}], ids=str)
def test_whole_gradients_inside_a_window_count(pool: Pool, tmp_path: Path, settings: dict[str, Any]) -> None:
    """While micro batches are accumulated, fully_shard keeps whole gradients in fp32."""
    found = pool.run(CASES + "held", 2, strategy="fsdp", run_dir=str(tmp_path), settings=settings)[0]
    assert found["forward"]["gradients"] == 4 * found["numel"]
    assert found["step"]["gradients"] == 0
