"""A rank's memory, term by term: how much, how it was worked out, and where that comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Part"]

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Part:
    """One term of a rank's memory.

    Args:
        kind: One of :data:`KINDS`.
        what: In words.
        bytes: How much.
        formula: How it was worked out.
        source: Where that comes from.
        on_host: Whether it lies in host memory.
    """

    kind: str
    what: str
    bytes: float
    formula: str
    source: str
    on_host: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        place = "host" if self.on_host else "device"
        return {
            "kind": self.kind, "what": self.what, "bytes": round(self.bytes), "place": place, "formula": self.formula,
            "source": self.source,
        }  # fmt: skip
