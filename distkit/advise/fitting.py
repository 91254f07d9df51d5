"""How far the memory reaches: the largest micro batch on this hardware, and the fewest nodes that are enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from distkit.advise.advisor import Task
from distkit.advise.hardware import Hardware, catalogue
from distkit.advise.layout import Layout, layouts
from distkit.advise.memory import memory_of

__all__ = ["Fit", "fits_of"]

_MOST_NODES = 4096
_MOST_MICRO = 1 << 16


@dataclass(frozen=True)
class Fit:
    """One way of laying the run out.

    Args:
        layout: On the hardware that was asked for.
        micro: Largest number of sequences in a micro batch there; 0 where not even one fits.
        nodes: Fewest nodes with the same devices on which one sequence fits; None where no number is enough.
    """

    layout: Layout
    micro: int
    nodes: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "strategy": self.layout.strategy,
            "tensor": self.layout.tensor,
            "offload": self.layout.offload,
            "activation_checkpointing": self.layout.recompute,
            "largest_micro_batch": self.micro,
            "fewest_nodes": self.nodes,
        }


def fits_of(task: Task, hardware: Hardware) -> list[Fit]:
    """Every way, with what fits.

    Args:
        task: The model and how it is trained; its batch doesn't matter.
        hardware: Devices and nodes.

    Raises:
        PlanError: The task makes no sense.
    """
    task.check()
    found = []
    for layout in layouts(task.model, hardware, task.framework, published=task.published):
        if task.recompute in ("auto", layout.recompute):
            found.append(Fit(layout, _largest_micro(task, hardware, layout), _fewest_nodes(task, hardware, layout)))
    return found


def _fits(task: Task, hardware: Hardware, layout: Layout, micro: int) -> bool:
    memory = memory_of(
        task.model,
        layout,
        micro=micro,
        sequence=task.sequence,
        optimizer=task.optimizer,
        precision=task.precision,
        fused_attention=task.fused_attention,
        accumulate=task.accumulate or 1,
        cpu=hardware.cpu,
    )
    return memory.total <= hardware.device.memory * float(catalogue()["assumed"]["usable"]["value"])


def _largest_micro(task: Task, hardware: Hardware, layout: Layout) -> int:
    """Memory grows with it, so it is bisected."""
    return _last(lambda micro: _fits(task, hardware, layout, micro), _MOST_MICRO)


def _fewest_nodes(task: Task, hardware: Hardware, layout: Layout) -> int | None:
    """More nodes only help what is split over them."""

    def enough(nodes: int) -> bool:
        other = next(_same_on(task, replace(hardware, nodes=nodes), layout), None)
        return other is not None and _fits(task, hardware, other, 1)

    if enough(1):
        return 1
    if not enough(_MOST_NODES):
        return None
    return 1 + _last(lambda nodes: not enough(nodes), _MOST_NODES)


def _same_on(task: Task, hardware: Hardware, layout: Layout) -> Iterator[Layout]:
    wanted = (layout.strategy, layout.tensor, layout.offload, layout.recompute)
    for other in layouts(task.model, hardware, task.framework, published=task.published):
        if (other.strategy, other.tensor, other.offload, other.recompute) == wanted:
            yield other


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` for which it holds, as it does for all smaller ones; 0 for none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
