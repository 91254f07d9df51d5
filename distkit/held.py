"""What a Trainer holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from distkit.data import PreparedLoader

__all__ = ["Held"]


@dataclass
class Held:
    """All that was prepared, in the order of preparation."""

    models: list[nn.Module] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    """Indices of the loaders whose batches were trained on; only their positions matter."""
