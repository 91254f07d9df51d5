"""All candidates for a model on some hardware, and which one to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distkit.advise.checkpointing import CheckpointCost, checkpoint_cost
from distkit.advise.compression import check_method, compression_of, takes
from distkit.advise.hardware import Hardware, catalogue
from distkit.advise.layout import RECOMPUTE, Layout, layouts
from distkit.advise.memory import OPTIMIZERS, MemoryBytes, memory_of, split_parameters, state_sizes
from distkit.advise.models import ModelShape
from distkit.advise.rules import Rule, matching
from distkit.advise.timing import Calibration, StepSeconds, compute_share_of, step_seconds
from distkit.advise.traffic import Collective, LinkBytes, collectives_of, link_bytes
from distkit.config.nearest import nearest
from distkit.errors import PlanError

__all__ = ["Advice", "Candidate", "Task", "advise"]

_AS_FAST = 1.1
"""A simpler way that takes at most so much longer is taken."""

_TOO_SHORT = 1e-3
"""Seconds that don't count: below that, steps take what Python and the start of kernels take, which isn't worked out."""

_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-pure")


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    Args:
        model: The model.
        batch: Sequences in an optimizer step, over all devices.
        accumulate: Micro batches in it; None takes the fewest that fit.
        sequence: Tokens in a sequence; 1 where samples aren't sequences, whatever is given.
        optimizer: Name of the optimizer.
        precision: As in the settings.
        recompute: ``none``, ``selective``, ``full``, or ``auto``: as little as it takes to fit.
        fused_attention: Whether attention keeps no scores.
        framework: ``torch``, ``horovod`` or ``tensorflow``: what the code is written for now.
        compress: ``compress.method`` of the strategies that have it.
        published: Whether ZeRO is counted as in the papers, and not as DeepSpeed does it here.
        script: For the line to type.
    """

    model: ModelShape
    batch: int
    accumulate: int | None = None
    sequence: int = 2048
    optimizer: str = "adamw"
    precision: str = "bf16"
    recompute: str = "auto"
    fused_attention: bool = True
    framework: str = "torch"
    compress: str = "none"
    published: bool = False
    script: str = "train.py"

    def __post_init__(self) -> None:
        if self.model.convolution is not None:
            object.__setattr__(self, "sequence", 1)

    @property
    def batch_words(self) -> str:
        """The batch, for people."""
        return f"{self.batch} samples" if self.model.unit == "samples" else f"{self.batch} x {self.sequence} tokens"

    def check(self) -> None:
        """Refuse what can't be.

        Raises:
            PlanError: Naming the option.
        """
        for flag, value in (("--batch", self.batch), ("--seq", self.sequence), ("--accumulate", self.accumulate)):
            if value is not None and value < 1:
                raise PlanError(f"{flag} was set to {value}; it takes a number from 1 on", hint=f"{flag} 1")
        for flag, text, known in (
            ("--optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("--precision", self.precision, _PRECISIONS),
            ("--recompute", self.recompute, ("auto", *RECOMPUTE)),
        ):
            if text not in known:
                near = nearest(text, list(known)) or known[0]
                raise PlanError(f"{flag} was set to {text!r}; valid: {', '.join(known)}", hint=f"{flag} {near}")
        check_method(self.compress)


@dataclass(frozen=True)
class Candidate:
    """One way, with what it would cost.

    Args:
        layout: The way.
        micro: Sequences in a micro batch of a data-parallel rank.
        accumulate: Micro batches in a step.
        memory: Of a rank.
        limit: Bytes that a plan may fill.
        compress: Its ``compress.method``.
        traffic: Of a rank in a step.
        collectives: Of a step.
        step: Seconds of a step; ``fast`` and ``slow`` are the ends of the range.
        tokens: In a step; samples where they aren't sequences.
        reason: Why it is out, or what decides its speed.
    """

    layout: Layout
    micro: int
    accumulate: int
    memory: MemoryBytes
    limit: float
    compress: str
    traffic: LinkBytes
    collectives: tuple[Collective, ...]
    step: StepSeconds
    fast: float
    slow: float
    tokens: int
    reason: str

    @property
    def fits(self) -> bool:
        """Whether a rank's memory is enough."""
        return self.memory.total <= self.limit

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.tokens / self.step.total

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "strategy": self.layout.strategy,
            "tensor": self.layout.tensor,
            "offload": self.layout.offload,
            "activation_checkpointing": self.layout.recompute,
            "also": self.layout.also,
            "compress": self.compress,
            "micro_batch": self.micro,
            "accumulate": self.accumulate,
            "fits": self.fits,
            "bytes_per_rank": self.memory.as_dict(),
            "host_bytes_per_rank": round(self.memory.host),
            "traffic_bytes": self.traffic.as_dict(),
            "step_s": self.step.as_dict(),
            "step_s_range": [round(self.fast, 6), round(self.slow, 6)],
            "tokens_per_s": round(self.tokens_per_s, 3),
            "samples_per_s": round(self.micro * self.accumulate * self.layout.data / self.step.total, 3),
            "reason": self.reason,
            "memory_parts": [part.as_dict() for part in self.memory.parts],
        }


@dataclass(frozen=True)
class Advice:
    """The answer.

    Args:
        task: What was asked.
        hardware: For where.
        candidates: All, the recommended first, then by time, those that don't fit last.
        recommended: Which to take; None where nothing fits.
        reason: Why, in a sentence.
        runner_up: The next.
        path: Strategies to start with and to go to, in order.
        rules: Selection rules that hold here.
        assumptions: What was taken for granted.
        compression: Gradients on the wire, by method.
        checkpoint: What a checkpoint of the recommended costs; None where nothing fits.
    """

    task: Task
    hardware: Hardware
    candidates: tuple[Candidate, ...]
    recommended: Candidate | None
    reason: str
    runner_up: Candidate | None
    path: tuple[str, ...]
    rules: tuple[Rule, ...]
    assumptions: Mapping[str, Any]
    compression: Mapping[str, Any]
    checkpoint: CheckpointCost | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        chosen = self.recommended
        return {
            "recommended": None
            if chosen is None
            else {
                "strategy": chosen.layout.strategy,
                "tensor": chosen.layout.tensor,
                "offload": chosen.layout.offload,
                "activation_checkpointing": chosen.layout.recompute,
                "reason": self.reason,
            },
            "runner_up": None if self.runner_up is None else self.runner_up.layout.describe(),
            "reason": self.reason,
            "path": list(self.path),
            "candidates": [candidate.as_dict() for candidate in self.candidates],
            "assumptions": dict(self.assumptions),
            "compression": dict(self.compression),
            "checkpoint": None if self.checkpoint is None else self.checkpoint.as_dict(),
            "rules": [{"id": rule.id, "says": rule.says, "source": rule.source} for rule in self.rules],
        }


def advise(task: Task, hardware: Hardware, calibration: Calibration | None = None) -> Advice:
    """Work out every candidate, and choose.

    Args:
        task: What is to be trained.
        hardware: Where.
        calibration: What was measured there; None takes the catalogue's assumptions.

    Raises:
        PlanError: The task makes no sense, or its batch can't be divided.
    """
    task.check()
    shares = calibration or Calibration.assumed()
    found = []
    for layout in layouts(task.model, hardware, task.framework, published=task.published):
        if task.recompute in ("auto", layout.recompute):
            candidate = _candidate(task, hardware, layout, shares)
            if candidate is not None:
                found.append(candidate)
    if not found:
        raise PlanError(
            f"--batch {task.batch} can't be divided over {hardware.devices} devices"
            + (f" with --accumulate {task.accumulate}" if task.accumulate else ""),
            hint=f"--batch {hardware.devices * (task.accumulate or 1)}",
        )
    found = _leave_out(found, task)
    facts = _facts(task, hardware, found)
    held = matching(facts)
    chosen = _choose(found, held)
    rest = sorted((c for c in found if c is not chosen), key=lambda c: (not c.fits, _last_resort(c), c.step.total))
    runner = next((c for c in rest if c.fits and (chosen is None or _other_kind(c, chosen))), None)
    return Advice(
        task,
        hardware,
        (*([chosen] if chosen is not None else []), *rest),
        chosen,
        _why(chosen, runner, found, held),
        runner,
        _path(found, chosen),
        tuple(held),
        _assumptions(task, hardware, shares),
        compression_of(task.model, hardware.devices, task.compress, (c.layout.strategy for c in found)),
        None if chosen is None else _checkpoint(task, hardware, chosen.layout, shares),
    )


def _checkpoint(task: Task, hardware: Hardware, layout: Layout, shares: Calibration) -> CheckpointCost:
    return checkpoint_cost(
        task.model, layout, hardware, optimizer=task.optimizer, precision=task.precision, link_share=shares.link_share
    )


def _candidate(task: Task, hardware: Hardware, layout: Layout, shares: Calibration) -> Candidate | None:
    """With the micro batches that were asked for; else with the fewest that fit."""
    each, rest = divmod(task.batch, layout.data)
    if rest or each < 1:
        return None
    counts = [task.accumulate] if task.accumulate else [n for n in range(1, each + 1) if each % n == 0]
    counts = [n for n in counts if each % n == 0]
    best = None
    for accumulate in counts:
        best = _with(task, hardware, layout, shares, each // accumulate, accumulate)
        if best.fits:
            break
    return best


def _with(
    task: Task, hardware: Hardware, layout: Layout, shares: Calibration, micro: int, accumulate: int
) -> Candidate:
    model, usable = task.model, float(catalogue()["assumed"]["usable"]["value"])
    same: dict[str, Any] = {"optimizer": task.optimizer, "precision": task.precision, "sequence": task.sequence}
    compress = task.compress if takes(layout.strategy, task.compress) else "none"
    parts: dict[str, Any] = {"micro": micro, "accumulate": accumulate}
    memory = memory_of(model, layout, fused_attention=task.fused_attention, cpu=hardware.cpu, **parts, **same)
    collectives = tuple(collectives_of(model, layout, hardware, compress=compress, **parts, **same))
    host = _host_bytes(task, layout, accumulate)
    tokens = task.batch * task.sequence

    def seconds(calibration: Calibration) -> StepSeconds:
        return step_seconds(
            model, layout, hardware, collectives, tokens=tokens, host_bytes=host, calibration=calibration, **same
        )

    step = seconds(shares)
    low, high = Calibration.assumed("low"), Calibration.assumed("high")
    fast = step.total if shares.measured else seconds(high).total
    slow = step.total if shares.measured else seconds(low).total
    limit = hardware.device.memory * usable
    return Candidate(
        layout, micro, accumulate, memory, limit, compress, link_bytes(collectives, host), collectives, step, fast, slow,
        tokens, _remark(memory, limit, step),
    )  # fmt: skip


def _host_bytes(task: Task, layout: Layout, accumulate: int) -> float:
    """To and from host memory in a step, of a rank.

    DeepSpeed adds gradients up on the device in fp32 and keeps them on the host: they go down and come back with each
    micro batch, and go down once more for the optimizer (0.19.8, zero/stage3.py, partition_grads); updated weights
    come up in fp32 and are rounded there. torch sends gradients down once. Offloaded weights come for every pass.
    """
    if layout.offload == "none":
        return 0.0
    sizes = state_sizes(task.precision, task.optimizer, layout.engine)
    each = split_parameters(task.model, layout.tensor) / layout.shard_ranks
    found = each * sizes.gradient
    if layout.engine.master:
        width = 2 if task.precision == "bf16-pure" else 4
        found = each * width * (2 * accumulate + 1) + each * width
    if layout.offload == "params":
        found += each * sizes.parameter * 2 * accumulate
    return found


def _remark(memory: MemoryBytes, limit: float, step: StepSeconds) -> str:
    if memory.total > limit:
        kind = max(("parameters", "gradients", "optimizer", "activations"), key=lambda k: getattr(memory, k))
        return f"needs {_gb(memory.total)} of {_gb(limit)}, of which {_gb(getattr(memory, kind))} are {kind}"
    share = step.communication / step.total
    return f"{share:.0%} of a step waits for the network" + (
        f", {step.host:.1f} s for the host's optimizer" if step.host else ""
    )


def _leave_out(found: Sequence[Candidate], task: Task) -> list[Candidate]:
    """Recomputation is offered only where the same way doesn't fit without it."""
    if task.recompute != "auto":
        return list(found)
    of_one: dict[Layout, list[Candidate]] = {}
    for candidate in found:
        of_one.setdefault(replace(candidate.layout, recompute="none"), []).append(candidate)
    kept = []
    for same in of_one.values():  # in the order of RECOMPUTE
        kept.append(next((candidate for candidate in same if candidate.fits), same[-1]))
        kept += [same[0]] if not kept[-1].fits and len(same) > 1 else []
    return kept


def _last_resort(candidate: Candidate) -> int:
    return ("none", "optimizer", "params").index(candidate.layout.offload)


def _choose(found: Sequence[Candidate], held: Sequence[Rule]) -> Candidate | None:
    """The fastest that fits, without offload if there is one; a simpler one, or one that a rule prefers, if as fast."""
    fit = [c for c in found if c.fits]
    if not fit:
        return None
    least = min(_last_resort(c) for c in fit)
    fit = [c for c in fit if _last_resort(c) == least]
    fastest = min(c.step.total for c in fit)
    near = [c for c in fit if c.step.total <= max(fastest * _AS_FAST, fastest + _TOO_SHORT)]
    grouped = any(rule.when.get("tensor") for rule in held)  # a rule that calls for tensor groups
    preferred = [name for rule in held for name in rule.prefer]
    order = {name: place for place, name in reversed(list(enumerate(preferred)))}
    return min(
        near,
        key=lambda c: (
            c.layout.tensor > 1 and not grouped,
            order.get(c.layout.strategy, len(order)),
            RECOMPUTE.index(c.layout.recompute),
            c.step.total,
        ),
    )


def _other_kind(one: Candidate, other: Candidate) -> bool:
    return (one.layout.strategy, one.layout.tensor) != (other.layout.strategy, other.layout.tensor)


def _facts(task: Task, hardware: Hardware, found: Sequence[Candidate]) -> dict[str, Any]:
    able = [c for c in found if c.fits and c.layout.offload == "none"]
    fit = frozenset(c.layout.strategy for c in able)
    waits = min((c.step.communication / c.step.total for c in able), default=0.0)
    return {
        "waits": waits,
        "compress": task.compress,
        "framework": task.framework,
        "nodes": hardware.nodes,
        "devices": hardware.devices,
        "parameters": task.model.parameters,
        "fits": fit,
        "tensor": any(c.fits and c.layout.tensor > 1 for c in found),
    }


def _why(chosen: Candidate | None, runner: Candidate | None, found: Sequence[Candidate], held: Sequence[Rule]) -> str:
    if chosen is None:
        near = min(found, key=lambda c: c.memory.total)
        return f"nothing fits: {near.layout.describe()} is the smallest and needs {_gb(near.memory.total)} of {_gb(near.limit)} a rank"
    words = f"{_gb(chosen.memory.total)} of {_gb(chosen.limit)} a rank"
    if runner is not None:
        ratio = runner.step.total / chosen.step.total
        words += (
            f", {ratio:.2f} times as fast as {runner.layout.describe()}"
            if ratio > 1
            else f", simpler than {runner.layout.describe()}"
        )
    rule = next((rule for rule in held if chosen.layout.strategy in rule.prefer), None)
    return words + (f"; {rule.says}" if rule is not None else "")


def _path(found: Sequence[Candidate], chosen: Candidate | None) -> tuple[str, ...]:
    """Start with the simplest that fits, then go on to what was chosen."""
    fit = {c.layout.strategy for c in found if c.fits and c.layout.tensor == 1 and c.layout.offload == "none"}
    order: tuple[str, ...] = ("single", "ddp", "zero1", "zero2", "fsdp", "zero3")
    steps = [name for name in order if name in fit][:1]
    if chosen is not None:
        one = chosen.layout
        if one.strategy not in steps and one.tensor > 1 and one.strategy in fit:
            steps.append(one.strategy)
        if one.describe() not in steps:
            steps.append(one.describe())
    return tuple(steps)


def _assumptions(task: Task, hardware: Hardware, shares: Calibration) -> dict[str, Any]:
    model = task.model
    return {
        "model": {
            "name": model.name, "parameters": model.parameters, "layers": model.layers, "hidden": model.hidden,
            "heads": model.heads, "vocabulary": model.vocabulary, "shape_is_typical": model.assumed,
        },
        "hardware": hardware.describe(),
        "sequence": task.sequence, "batch": task.batch, "optimizer": task.optimizer, "precision": task.precision,
        "fused_attention": task.fused_attention,
        "compute_share": round(compute_share_of(model, hardware, task.precision, shares), 4),
        "link_share": shares.link_share, "overlap": shares.overlap,
        "measured": shares.measured,
    }  # fmt: skip


def _gb(number: float) -> str:
    return f"{number / 1e9:.1f} GB"
