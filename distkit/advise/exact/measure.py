"""What a candidate allocates and sends when it is run: the real engine and a model, on tensors without data.

Users' own scripts and models are run whole. The layers of a transformer of given sizes are all alike, so a few are run, with three
different counts. What each stretch of a step (the backward of the last layer but one, the optimizer's step ...) holds at its peak
is a straight line in the number of layers; the third count must lie on the line through the first two, else all layers are run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import ceil
from typing import TYPE_CHECKING, Any

from distkit.advise.exact.children import rehearsed, rehearsed_script
from distkit.advise.exact.observing import Called, Seen
from distkit.advise.exact.run import EDGE, OPTIMIZERS, Run
from distkit.advise.exact.sizes import sizes_of
from distkit.advise.layout import Layout
from distkit.advise.memory import KINDS, MemoryBytes
from distkit.errors import PlanError

if TYPE_CHECKING:
    from distkit.advise.advisor import Advice, Candidate, Task
    from distkit.advise.hardware import Hardware
    from distkit.advise.script import Script

__all__ = ["Exact", "check_exact", "exact_of_advice", "extend", "measure", "of_step"]

OTHERS_UNTIL_S = 100.0
"""Further candidates are run until so many seconds have gone by."""

STRATEGIES = ("single", "ddp", "horovod", "zero1", "zero2", "zero3", "fsdp", "hsdp")

OTHERS = 3
"""So many further candidates at most."""

SLACK = 0.002
"""Share of a stretch's peak by which what is extended may be wrong: partitions are padded."""

_ENGINES = {"zero1": "DeepSpeed", "zero2": "DeepSpeed", "zero3": "DeepSpeed", "horovod": "Horovod"}
"""Of the strategies that aren't torch's own."""

LIVE = 1_000_000_000
"""Parameters that DeepSpeed's stage 3 leaves gathered at the end of the forward (``stage3_max_reuse_distance``)."""


@dataclass(frozen=True)
class Exact:
    """What was seen.

    Args:
        layout: Of the candidate.
        memory: At the peak; what the framework itself takes isn't in it.
        where: In which stretch of the step that was.
        collectives: Of a step.
        method: How it was found.
        seconds: That took.
        parameters: Of the model that ran, extended to all layers.
    """

    layout: Layout
    memory: MemoryBytes
    where: str
    collectives: tuple[Called, ...]
    method: str
    seconds: float
    parameters: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bytes_per_rank": self.memory.as_dict(),
            "host_bytes_per_rank": round(self.memory.host),
            "peak": self.where,
            "collectives": [
                {**asdict(one), "count": round(one.count), "message": round(one.message)} for one in self.collectives
            ],
            "method": self.method,
            "seconds": round(self.seconds, 1),
        }


def measure(
    task: Task,
    hardware: Hardware,
    layout: Layout,
    *,
    micro: int,
    accumulate: int,
    all_layers: bool = False,
    subject: Script | str | None = None,
) -> Exact:
    """Run one candidate, in a process of its own.

    Args:
        task: What is to be trained.
        hardware: Where.
        layout: The way.
        micro: Sequences in a micro batch of a data-parallel rank.
        accumulate: Micro batches in a step.
        all_layers: Whether to run all layers in any case.
        subject: What is run: a script, or ``module:function`` that builds the model; None for a transformer of the model's
            sizes. Of the first two all layers are run.

    Raises:
        PlanError: It can't be run: no such model or optimizer, or the engine isn't installed.
    """
    started = time.monotonic()
    check_exact(task, subject)
    target = subject if isinstance(subject, str) else ""
    model = task.model if subject is None else replace(task.model, seen=None)
    run = Run(
        model, model.layers, layout.strategy, layout.tensor, hardware.nodes, hardware.each, micro, accumulate,
        task.sequence, task.optimizer, task.precision, layout.recompute, layout.offload, task.fused_attention, target,
    )  # fmt: skip
    if subject is None:
        seen, how = _reference(run, all_layers)
    elif isinstance(subject, str):
        (seen,), how = rehearsed(run, [run.layers]), f"the model of {subject}"
    else:
        seen, how = rehearsed_script(subject, run), f"two steps of {subject.path}"
    where, kinds = max(seen.peaks.items(), key=lambda item: sum(item[1].values()))
    return Exact(
        layout,
        _placed(kinds, layout),
        where,
        of_step(seen, accumulate),
        f"{layout.strategy} on tensors without data, as rank 0 of {run.ranks} ({_engine(layout)}); {how}",
        time.monotonic() - started,
        seen.parameters,
    )


def _reference(run: Run, all_layers: bool) -> tuple[Seen, str]:
    """Of a transformer of these sizes, and how much of it was run."""
    sizes_of(run.model)
    counts = [] if all_layers else _counts(run)
    seen = _extended(run, counts) if counts else None
    if seen is not None:
        return seen, f"layers {', '.join(map(str, counts))} of {run.layers} run and extended"
    return rehearsed(run, [run.layers])[0], f"all {run.layers} layers run"


def check_exact(task: Task, subject: Script | str | None = None) -> None:
    """Refuse what can't be run.

    Args:
        task: What is to be trained.
        subject: What is to be run, as for :func:`measure`.

    Raises:
        PlanError: Naming the option.
    """
    own_optimizer = subject is not None and not isinstance(subject, str)
    if task.optimizer not in OPTIMIZERS and not own_optimizer:
        raise PlanError(
            f"--optimizer was set to {task.optimizer!r}, which --exact can't run: it runs torch's own {', '.join(OPTIMIZERS)}",
            hint="--optimizer adamw   or leave --exact out",
        )
    if subject is None and task.model.convolution is not None:
        raise PlanError(
            f"--exact runs a real model, and of {task.model.name} only sizes are known",
            hint="--model package.module:function   a function that returns such a network and a batch, or leave --exact out",
        )
    if task.compress != "none":
        raise PlanError(
            f"--compress was set to {task.compress!r}, which --exact can't run", hint="leave --compress or --exact out"
        )


def exact_of_advice(
    advice: Advice,
    say: Callable[[str], None],
    subject: Script | str | None = None,
    *,
    warn: Callable[[str], None] = lambda _: None,
) -> list[tuple[Candidate, Exact]]:
    """The recommended candidate, and as many of other kinds as time allows.

    Args:
        advice: What was worked out.
        say: Is told what runs now.
        subject: What is run, as for :func:`measure`.
        warn: Is told which of the others was left out, and why.

    Raises:
        PlanError: The recommended one can't be run, or nothing fits.
    """
    from distkit.advise.report import shown

    check_exact(advice.task, subject)
    if advice.recommended is None:
        raise PlanError(
            f"--exact runs what fits, and {advice.reason}",
            hint="--fit instead of --exact   shows the largest micro batch and the fewest nodes",
        )
    if advice.recommended.layout.strategy not in STRATEGIES:
        raise PlanError(
            f"--exact can't run {advice.recommended.layout.strategy}, which is recommended; it runs {', '.join(STRATEGIES)}",
            hint="leave --exact out",
        )
    chosen = [c for c in shown(advice) if c.fits and c.layout.strategy in STRATEGIES][: OTHERS + 1]
    started, longest, found = time.monotonic(), 0.0, list[tuple["Candidate", Exact]]()
    for candidate in chosen:
        if found and time.monotonic() - started + longest > OTHERS_UNTIL_S:
            break
        say(f"running {candidate.layout.describe()} on tensors without data ({len(found) + 1} of up to {len(chosen)})")
        try:
            one = measure(
                advice.task, advice.hardware, candidate.layout, micro=candidate.micro, accumulate=candidate.accumulate,
                subject=subject,
            )  # fmt: skip
        except PlanError as error:
            if not found:
                raise
            warn(f"{candidate.layout.describe()} was left out: {error.message}")
            continue
        longest = max(longest, one.seconds)
        found.append((candidate, one))
    return found


# -- from a few layers to all -------------------------------------------------------------------------------------------


def _counts(run: Run) -> list[int]:
    """Three neighbouring numbers of layers; none where running all costs no more."""
    first = 2 * EDGE
    if run.strategy == "zero3":
        first = max(first, EDGE + ceil(LIVE / (run.model.layer_parameters / run.tensor)))
    return [first, first + 1, first + 2] if 3 * first + 3 < run.layers else []


def _extended(run: Run, counts: Sequence[int]) -> Seen | None:
    """What a run of all layers would show; None where it is no straight line in their number."""
    return extend(rehearsed(run, counts), run.layers - counts[0])


def extend(seen: Sequence[Seen], further: int) -> Seen | None:
    """From three runs with neighbouring numbers of layers to one with ``further`` more than the first.

    Args:
        seen: In the order of layers.
        further: Layers to add to the first.

    Returns:
        None where the third doesn't lie on the line through the others, or the peak is among layers that weren't looked at
        one by one.
    """
    first, second, _ = seen
    found = Seen(first.parameters + (second.parameters - first.parameters) * further)
    tops = [max(one.peaks, key=lambda name: sum(one.peaks[name].values())) for one in seen]
    if any("middle" in top for top in tops):
        return None
    for name in (name for name in first.peaks if "middle" not in name):
        if not all(name in one.peaks for one in seen):
            return None
        lines = {kind: _line([one.peaks[name][kind] for one in seen], further) for kind in KINDS}
        values = {kind: value for kind, (value, _) in lines.items()}
        straight = all(abs(wrong) <= SLACK * sum(values.values()) for _, wrong in lines.values())
        if straight and min(values.values()) >= 0:
            found.peaks[name] = values
        elif _may_be_peak(name, seen, tops, max(abs(wrong) for _, wrong in lines.values()) // further):
            return None
    for part in ("first", "last"):
        lists = [{(one.what, one.ranks, one.in_node): one for one in getattr(s, part)} for s in seen]
        if not lists[0].keys() == lists[1].keys() == lists[2].keys():
            return None
        for key in lists[0]:
            getattr(found, part).append(_more_calls([calls[key] for calls in lists], further))
    return found


def _more_calls(seen: Sequence[Called], further: int) -> Called:
    """Bytes lie on a line, and calls if each layer makes some; those that send a bucket when it is full are about as many as
    the bytes."""
    message, _ = _line([round(one.message) for one in seen], further)
    count, wrong = _line([round(one.count) for one in seen], further)
    grows = seen[2].message > seen[0].message
    if wrong or (grows and seen[2].count == seen[0].count > 1):
        count = round(seen[2].count * message / seen[2].message)
    return replace(seen[0], message=message, count=count)


def _may_be_peak(name: str, seen: Sequence[Seen], tops: Sequence[str], jump: int) -> bool:
    """Whether a stretch that is no straight line matters: one in which a bucket is full in some of the runs only doesn't,
    as long as it stays below the peak with that bucket too."""
    return any(
        sum(one.peaks[name].values()) + jump > sum(one.peaks[top].values()) for one, top in zip(seen, tops, strict=True)
    )


def _line(values: Sequence[int], further: int) -> tuple[int, int]:
    """The value that far from the first of three, and how far the third is from the line, carried as far."""
    first, second, third = values
    return first + (second - first) * further, (third - 2 * second + first) * further


# -- what is made of it -------------------------------------------------------------------------------------------------


def _placed(kinds: Mapping[str, int], layout: Layout) -> MemoryBytes:
    """On the device or the host.

    With their optimizer there, stages 1 and 2 keep a 16-bit copy of the partition on the host too, on its way to the device
    (stage_1_and_2.py:575), and stage 1 the partition of its gradients, which are whole on the device.
    """
    here = {kind: float(kinds[kind]) for kind in KINDS}
    away = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    if layout.offload != "none":
        away["optimizer"] = here["optimizer"]
        split = "gradients" in layout.shards
        away["gradients"] = here["gradients"] if split else here["gradients"] / (layout.shard_ranks + 1)
        if "parameters" not in layout.shards:
            away["parameters"] = here["parameters"] / (layout.shard_ranks + 1)
    if layout.offload == "params":
        away["parameters"] = here["parameters"]
    here.update({kind: here[kind] - size for kind, size in away.items()})
    return MemoryBytes(parts=(), **here, **{f"host_{kind}": size for kind, size in away.items()})


def of_step(seen: Seen, accumulate: int) -> tuple[Called, ...]:
    """Collectives of a step; all micro batches before the last do the same."""
    found: dict[tuple[str, int, int], Called] = {}
    for calls, times in ((seen.first, accumulate - 1), (seen.last, 1)):
        for call in calls:
            key = (call.what, call.ranks, call.in_node)
            one = found.setdefault(key, Called(*key))
            one.count += call.count * times
            one.message += call.message * times
    return tuple(found.values())


def _engine(layout: Layout) -> str:
    torch = f"torch {version('torch')}"
    engine = _ENGINES.get(layout.strategy)
    return torch if engine is None else f"{engine} {version(engine.lower())}, {torch}"
