"""What a checkpoint costs: its bytes, and how long training stands still for it, written at once or in the background."""

from __future__ import annotations

from dataclasses import dataclass

from distkit.advise.engines import ENGINES
from distkit.advise.hardware import Hardware, catalogue
from distkit.advise.layout import Layout
from distkit.advise.memory import state_sizes
from distkit.advise.models import ModelShape

__all__ = ["CheckpointCost", "checkpoint_cost"]


@dataclass(frozen=True)
class CheckpointCost:
    """Of one checkpoint.

    Args:
        bytes: In all: parameters and optimizer states, each value once.
        blocking_s: Seconds that training stands still while it is written (``checkpoint.background: false``).
        background_s: Seconds that it stands still while each rank copies its share to host memory that it has from the
            save before (``checkpoint.background: true``).
        first_s: The same for the first save, which has to get that memory.
        written_s: Seconds until a checkpoint is on storage after that.
    """

    bytes: float
    blocking_s: float
    background_s: float
    first_s: float
    written_s: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "bytes": round(self.bytes),
            "blocking_s": round(self.blocking_s, 3),
            "background_s": round(self.background_s, 3),
            "first_background_s": round(self.first_s, 3),
            "written_s": round(self.written_s, 3),
        }

    def describe(self) -> str:
        """One line."""
        return (
            f"a checkpoint of {self.bytes / 1e9:.3g} GB holds training up for {_seconds(self.background_s)} "
            f"({_seconds(self.first_s)} the first time) and is written {_seconds(self.written_s)} later; "
            f"with checkpoint.background=false it holds it up for {_seconds(self.blocking_s)}"
        )


def _seconds(number: float) -> str:
    return f"{number:.3g} s" if number >= 0.01 else "less than 0.01 s"


def checkpoint_cost(
    model: ModelShape, layout: Layout, hardware: Hardware, *, optimizer: str, precision: str, link_share: float
) -> CheckpointCost:
    """Work it out. All ranks write at the same time, each its share, under replicated strategies too.

    Args:
        model: The model.
        layout: The candidate.
        hardware: With the speed of its storage.
        optimizer: Name of the optimizer.
        precision: As in the settings.
        link_share: Share of the speed of the way to the host that is reached.
    """
    sizes = state_sizes(
        precision, optimizer, ENGINES["torch"]
    )  # in the script's names parameters are what torch would hold
    whole = float(model.parameters) * (sizes.parameter + sizes.optimizer)
    share = whole / (1 if layout.strategy == "dp" else hardware.devices)
    copy = share / (hardware.host.each_way * link_share)
    written = whole / hardware.storage
    fresh = share / float(catalogue()["assumed"]["fresh_copy"]["bytes_per_s"])
    return CheckpointCost(whole, copy + written, copy, max(copy, fresh), written)
