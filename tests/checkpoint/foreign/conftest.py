"""Checkpoints of other frameworks, made once by the frameworks themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool

KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero0": ("deepspeed", 2, {"stage": 0}),
    "zero1": ("deepspeed", 2, {"stage": 1}),
    "zero2": ("deepspeed", 2, {"stage": 2}),
    "zero3": ("deepspeed", 2, {"stage": 3}),
    "zero3-of-3": ("deepspeed", 3, {"stage": 3}),
    "zero2-of-3": ("deepspeed", 3, {"stage": 2}),
    "zero3-frozen": ("deepspeed", 2, {"stage": 3, "model": {"frozen": True}}),
    "zero2-frozen": ("deepspeed", 2, {"stage": 2, "model": {"frozen": True}}),
    "zero0-bf16": ("deepspeed", 2, {"stage": 0, "bf16": True}),
    "zero1-bf16": ("deepspeed", 2, {"stage": 1, "bf16": True}),
    "zero3-bf16": ("deepspeed", 2, {"stage": 3, "bf16": True}),
    "dcp": ("dcp", 2, {}),
    "dcp-flat": ("dcp", 2, {"flat": True}),
    "titan": ("dcp", 2, {"flat": True, "titan": True}),
    "accelerate": ("accelerate", 1, {}),
    "accelerate-bin": ("accelerate", 1, {"safe": False}),
    "accelerate-fsdp": ("accelerate_fsdp", 2, {}),
    "accelerate-fsdp-full": ("accelerate_fsdp", 2, {"full": True}),
    "torch": ("plain", 1, {}),
    "torch-names": ("plain", 1, {"names": True}),
    "lightning": ("plain", 1, {"lightning": True}),
}


@dataclass(frozen=True)
class Made:
    """A checkpoint, and the losses with which its engine went on."""

    folder: Path
    losses: list[float]

    @property
    def source(self) -> Path:
        file = self.folder / "last.ckpt"
        return file if file.exists() else self.folder


class Origins:
    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self._made: dict[str, Made] = {}

    def __getitem__(self, kind: str) -> Made:
        if kind not in self._made:
            function, processes, arguments = KINDS[kind]
            folder = self.folder / kind
            losses = self.pool.run(
                f"tests.checkpoint.foreign.origins:{function}", processes, folder=str(folder), timeout=400, **arguments
            )
            self._made[kind] = Made(folder, losses[0])
        return self._made[kind]


@pytest.fixture(scope="session")
def origins(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Origins:
    return Origins(pool, tmp_path_factory.mktemp("origins"))
