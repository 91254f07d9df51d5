"""The answer for people: a table with the recommendation, its reasons, and the lines to type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distkit.advise.advisor import Advice, Candidate, Task
from distkit.advise.fitting import Fit
from distkit.advise.hardware import Hardware

if TYPE_CHECKING:
    from rich.console import Console

    from distkit.advise.checking import Compared

__all__ = ["launch_line", "settings_of", "show_advice", "show_check", "show_fits", "shown"]

_WIDE = 110
"""Columns of a terminal that shows memory by kind."""


def settings_of(advice: Advice, candidate: Candidate) -> dict[str, object]:
    """The settings that make a run like this candidate."""
    layout = candidate.layout
    found: dict[str, object] = {
        "strategy": layout.strategy,
        "precision": advice.task.precision,
        "batch.size": advice.task.batch,
        "batch.per": "global",
        "batch.accumulate": candidate.accumulate,
    }
    if layout.tensor > 1:
        found["parallel.tensor"] = layout.tensor
    if layout.offload != "none":
        found["memory.offload"] = layout.offload
    if layout.recompute != "none":
        found["memory.activation_checkpointing"] = layout.recompute
    if candidate.compress != "none":
        found["compress.method"] = candidate.compress
    return found


def launch_line(advice: Advice, candidate: Candidate) -> str:
    """The `distkit-run` line for it."""
    settings = settings_of(advice, candidate)
    hardware = advice.hardware
    processes = 1 if candidate.layout.strategy == "dp" else hardware.each
    words = ["distkit-run", "-s", str(settings.pop("strategy")), "--nproc", str(processes)]
    if hardware.nodes > 1:
        words += ["--hostfile", "hosts"]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return shlex.join([*words, advice.task.script])


def show_advice(advice: Advice, console: Console) -> None:
    """Print it."""
    from rich import box
    from rich.table import Table

    console.print(_headline(advice.task))
    console.print(advice.hardware.describe())
    rows, wide = shown(advice), console.width >= _WIDE
    scale, unit = unit_of(max(candidate.memory.total for candidate in rows))
    moved, moved_unit = unit_of(max(candidate.traffic.intra + candidate.traffic.inter for candidate in rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold")
    kinds = ("states", "activations") if wide else ()
    for name in (
        "acc x micro",
        f"memory {unit}",
        *kinds,
        f"traffic {moved_unit}",
        "step s",
        f"{advice.task.model.unit}/s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in rows:
        memory, traffic = candidate.memory, candidate.traffic
        parts = (memory.states, memory.activations) if wide else ()
        table.add_row(
            ("* " if candidate is advice.recommended else "  ") + candidate.layout.describe(),
            f"{candidate.accumulate} x {candidate.micro}",
            *(f"{size / scale:,.1f}" for size in (memory.total, *parts)),
            f"{(traffic.intra + traffic.inter) / moved:,.1f}",
            *((f"{candidate.step.total:.2f}", f"{candidate.tokens_per_s:,.0f}") if candidate.fits else ("-", "-")),
        )
    console.print(table)
    for candidate in rows:
        if not candidate.fits:
            console.print(f"{candidate.layout.describe()} {candidate.reason}")
    left = len(advice.candidates) - len(shown(advice))
    if left > 0:
        console.print(f"{left} more that are slower, or don't fit (--json has all)")
    chosen = advice.recommended
    if chosen is None:
        console.print(advice.reason)
        return
    console.print(f"take {chosen.layout.describe()}: {advice.reason}")
    if advice.runner_up is not None:
        console.print(f"runner-up: {advice.runner_up.layout.describe()}: {advice.runner_up.reason}")
    if chosen.layout.also is not None:
        console.print(f"{chosen.layout.also} costs the same; its split layers are computed by megatron-core")
    console.print(f"step {chosen.step.total:.2f} s, between {chosen.fast:.2f} and {chosen.slow:.2f}")
    if advice.checkpoint is not None:
        console.print(advice.checkpoint.describe())
    if len(advice.path) > 1:
        console.print(f"start with {advice.path[0]}, go on to {', then '.join(advice.path[1:])}")
    for rule in advice.rules:
        console.print(f"rule {rule.id}: {rule.says} ({rule.source})")
    console.print(launch_line(advice, chosen), soft_wrap=True)


def _headline(task: Task) -> str:
    model = task.model
    typical = " (a typical shape is assumed)" if model.assumed else ""
    shape = f"{model.layers} layers of {model.hidden}{typical}"
    if model.convolution is not None:
        shape = f"{model.layers} layers, images of {model.convolution.pixels} x {model.convolution.pixels}"
    size = f"{model.parameters / 1e9:.3g}B" if model.parameters >= 1e8 else f"{model.parameters / 1e6:.3g}M"
    return f"{model.name}: {size} parameters, {shape}; {task.optimizer}, {task.precision}; batch {task.batch_words}"


def show_fits(task: Task, hardware: Hardware, found: Sequence[Fit], console: Console) -> None:
    """Print how far the memory reaches; of each strategy and tensor size the ways that need least are at the end."""
    from rich import box
    from rich.table import Table

    length = "" if task.model.convolution else f" {task.sequence} tokens,"
    console.print(f"{task.model.name},{length} {task.optimizer}, {task.precision} on {hardware.describe()}")
    table = Table("strategy", "largest micro batch", "fewest nodes", box=box.SIMPLE_HEAD, pad_edge=False)
    for fit in sorted(found, key=lambda one: (one.nodes is None, one.nodes or 0, -one.micro)):
        nodes = "never" if fit.nodes is None else str(fit.nodes)
        table.add_row(fit.layout.describe(), str(fit.micro) if fit.micro else "-", nodes)
    console.print(table)


def shown(advice: Advice) -> tuple[Candidate, ...]:
    """The best of each strategy, with and without tensor groups."""
    found: dict[tuple[str, bool], Candidate] = {}
    for candidate in advice.candidates:
        found.setdefault((candidate.layout.strategy, candidate.layout.tensor > 1), candidate)
    return tuple(found.values())


def unit_of(largest: float) -> tuple[float, str]:
    """A unit in which the largest of some sizes has digits before its point, with its name."""
    return next(((scale, name) for scale, name in ((1e9, "GB"), (1e6, "MB")) if largest >= scale), (1e3, "KB"))


def show_check(line: str, note: str, found: Sequence[Compared]) -> None:
    """What was predicted beside what was counted."""
    import sys

    from distkit.commandline import print_table

    sys.stdout.write("".join(f"{text}\n" for text in (line, note) if text))
    rows = [
        (
            one.what,
            f"{one.predicted:,.0f}",
            "-" if one.measured is None else f"{one.measured:,.0f}",
            "" if one.error is None else f"{one.error:+.1%}",
            one.how,
        )
        for one in found
    ]
    print_table(("bytes of a rank", "predicted", "measured", "error", "how it was measured"), rows)
