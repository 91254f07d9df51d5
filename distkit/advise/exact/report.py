"""What the formulas say beside what a run on tensors without data shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkit.advise.advisor import Candidate, Task
from distkit.advise.exact.measure import Exact
from distkit.advise.hardware import catalogue
from distkit.advise.memory import KINDS, MemoryBytes, memory_of
from distkit.advise.report import unit_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Comparison", "compare", "show_exact"]


@dataclass(frozen=True)
class Comparison:
    """Of one candidate.

    Args:
        candidate: From the formulas.
        exact: From the run.
        closed: The formulas' tensors, without what the framework takes.
    """

    candidate: Candidate
    exact: Exact
    closed: MemoryBytes

    @property
    def needed(self) -> float:
        """Bytes of the device, with what the framework takes and the allocator leaves unused."""
        assumed, memory = catalogue()["assumed"], self.exact.memory
        unused = float(assumed["fragmentation"]["value"]) * (memory.activations + memory.buffers)
        return memory.total + float(assumed["framework"]["bytes"]) + unused

    @property
    def fits(self) -> bool:
        """Whether the device has as many."""
        return self.needed <= self.candidate.limit

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Kind, closed form, exact, and by how much the closed form is off."""
        scale, unit = unit_of(self.exact.memory.total)
        found = []
        for kind in (*KINDS, "total", "host"):
            closed, exact = float(getattr(self.closed, kind)), float(getattr(self.exact.memory, kind))
            if kind != "host" or closed or exact:
                off = f"{closed / exact - 1:+.0%}" if exact else "-"
                found.append((kind, f"{closed / scale:.2f} {unit}", f"{exact / scale:.2f} {unit}", off))
        return found

    def verdict(self) -> str:
        """Whether it fits, in a sentence."""
        name = self.candidate.layout.describe()
        fits = "fits" if self.fits else "does not fit"
        return (
            f"{name} {fits}: {self.needed / 1e9:.1f} GB of {self.candidate.limit / 1e9:.1f} GB with the framework's own; peak in "
            f"{self.exact.where}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.exact.as_dict(), "closed_form": self.closed.as_dict(), "fits": self.fits}


def compare(task: Task, found: Sequence[tuple[Candidate, Exact]]) -> list[Comparison]:
    """Put the formulas beside each run."""
    compared = []
    for candidate, exact in found:
        closed = memory_of(
            task.model,
            candidate.layout,
            micro=candidate.micro,
            sequence=task.sequence,
            optimizer=task.optimizer,
            precision=task.precision,
            fused_attention=task.fused_attention,
            accumulate=candidate.accumulate,
            cpu=True,
        )
        compared.append(Comparison(candidate, exact, closed))
    return compared


def show_exact(compared: Sequence[Comparison], console: Console) -> None:
    """Print it."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Tensors of a rank at the peak", title_justify="left")
    for name in ("strategy", "kind", "closed form", "exact", "difference"):
        table.add_column(name, justify="left" if name in ("strategy", "kind") else "right")
    for one in compared:
        for index, row in enumerate(one.rows()):
            table.add_row("" if index else one.candidate.layout.describe(), *row)
        table.add_section()
    console.print(table)
    for one in compared:
        console.print(one.verdict(), soft_wrap=True)
        if not one.fits:
            console.print(
                "  the formulas said that it fits: believe this, and take one below that fits, or a smaller --batch, more "
                "--accumulate, or --recompute full",
                soft_wrap=True,
            )
        console.print(f"  {one.exact.method}; {one.exact.seconds:.0f} s", soft_wrap=True)
