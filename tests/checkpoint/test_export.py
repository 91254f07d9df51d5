"""Weights for programs that don't know distkit."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from distkit.checkpoint.export import write_weights
from distkit.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_plain_safetensors_loads_it_with_tied_weights(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = tmp_path / "new" / "weights.safetensors"
    for _ in range(2):  # the second replaces the first
        write_weights(path, model.state_dict(), {"head.weight": "embed.weight"})
    assert list(safetensors.torch.load_file(path)) == ["embed.weight"]
    safetensors.torch.load_model(other, path)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight
    assert [p.name for p in path.parent.iterdir()] == ["weights.safetensors"]


def test_a_path_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="can't write"):
        write_weights(tmp_path / "file" / "weights.safetensors", {}, {})
    with pytest.raises(CheckpointError, match="can't write"):
        write_weights(tmp_path / "folder", {}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
