"""How long a step takes: operations at a stated utilisation, collectives by an alpha-beta model on the two-level network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distkit.advise.hardware import Hardware, catalogue
from distkit.advise.layout import Layout
from distkit.advise.memory import OPTIMIZERS, split_parameters
from distkit.advise.models import ModelShape
from distkit.advise.traffic import Collective
from distkit.errors import PlanError

__all__ = ["Calibration", "StepSeconds", "collective_seconds", "compute_share_of", "step_seconds"]


@dataclass(frozen=True)
class Calibration:
    """What was measured, or is assumed (catalogue.yaml has the sources).

    Args:
        compute_share: Share of the device's speed that training reaches.
        link_share: Share of a link's speed that large collectives reach.
        overlap: Share of the time of forward and backward under which collectives hide.
        measured: Whether any of it was measured.
    """

    compute_share: float
    link_share: float
    overlap: float
    measured: bool = False

    @classmethod
    def assumed(cls, which: str = "value") -> Calibration:
        """The catalogue's; ``low`` and ``high`` are the ends of the range."""
        found = catalogue()["assumed"]
        compute, overlap = found["compute_share"], found["overlap"]
        return cls(float(compute[which]), float(found["link_share"]["value"]), float(overlap[which]))

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """From a JSON file with any of ``compute_share``, ``link_share``, ``overlap``, each above 0 and at most 1.

        Raises:
            PlanError: It can't be read, or has something else in it.
        """
        names = ("compute_share", "link_share", "overlap")
        hint = '{"compute_share": 0.45, "link_share": 0.8, "overlap": 0.6}   in the file'
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            values = {name: float(value) for name, value in found.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise PlanError(f"--calibrate {path} can't be read: {error}", hint=hint) from error
        wrong = [name for name, value in values.items() if name not in names or not 0 < value <= 1]
        if wrong or not values:
            raise PlanError(f"--calibrate {path} has {', '.join(wrong) or 'nothing'}", hint=hint)
        base = cls.assumed()
        compute, link, overlap = (values.get(name, getattr(base, name)) for name in names)
        return cls(compute, link, overlap, measured=True)


@dataclass(frozen=True)
class StepSeconds:
    """One optimizer step.

    Args:
        compute: Forward, backward and recomputation.
        communication: Collectives that aren't hidden under it, and transfers to the host.
        hidden: Collectives that are.
        host: The optimizer on the host.
    """

    compute: float
    communication: float
    hidden: float
    host: float

    @property
    def total(self) -> float:
        """All that isn't hidden."""
        return self.compute + self.communication + self.host

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "compute": round(self.compute + self.host, 6),
            "communication": round(self.communication, 6),
            "total": round(self.total, 6),
        }


def collective_seconds(one: Collective, hardware: Hardware, link_share: float) -> float:
    """Of all calls of a kind in a step: the slower of the two levels carries the ring.

    Args:
        one: The collective.
        hardware: Where.
        link_share: Share of a link's speed that is reached.
    """
    rounds = 2 if one.what == "all_reduce" else 1
    seconds = one.sent / (hardware.intra.each_way * link_share) if one.in_node > 1 else 0.0
    latency = hardware.intra.latency_s
    if one.crosses:
        seconds = max(seconds, one.groups * one.sent / (hardware.inter.each_way * link_share))
        latency = hardware.inter.latency_s
    return seconds + rounds * one.parts * max(1, (one.ranks - 1).bit_length()) * latency


def step_seconds(
    model: ModelShape,
    layout: Layout,
    hardware: Hardware,
    collectives: Iterable[Collective],
    *,
    tokens: float,
    sequence: int,
    optimizer: str,
    precision: str,
    host_bytes: float,
    calibration: Calibration,
) -> StepSeconds:
    """The time of one optimizer step.

    Args:
        model: The model.
        layout: The candidate.
        hardware: Where.
        collectives: Of the step.
        tokens: In all, of the step.
        sequence: Tokens in a sequence.
        optimizer: Name of the optimizer.
        precision: As in the settings.
        host_bytes: To and from host memory, of a rank.
        calibration: Shares that are reached.
    """
    flops = model.flops_per_token(sequence) * tokens / hardware.devices
    flops *= _again(layout)
    compute = flops / (hardware.device.speed(precision) * compute_share_of(model, hardware, precision, calibration))
    timed = [(one, collective_seconds(one, hardware, calibration.link_share)) for one in collectives]
    forward = compute / (3 * _again(layout))
    early = [(one, seconds * one.forward) for one, seconds in timed if one.hides]
    late = [(one, seconds * (1 - one.forward)) for one, seconds in timed if one.hides]
    hidden = _hidden(early, calibration.overlap * forward) + _hidden(late, calibration.overlap * (compute - forward))
    transfer = host_bytes / (hardware.host.each_way * calibration.link_share)
    communication = sum(seconds for _, seconds in timed) - hidden + transfer
    return StepSeconds(compute, communication, hidden, _host_optimizer(model, layout, hardware, optimizer))


def _again(layout: Layout) -> float:
    """All operations, as a multiple of those of a forward and a backward: a second forward is a third more."""
    if layout.recompute == "selective":
        return 1 + float(catalogue()["assumed"]["selective"]["value"])
    return 4 / 3 if layout.recompute == "full" else 1.0


def _hidden(timed: Sequence[tuple[Collective, float]], room: float) -> float:
    """Seconds of a phase's collectives that run while it computes.

    Those of every micro batch have the whole phase, those of the last one only its part of what is left. One call of each
    pass never hides: the first weights are waited for, and the last gradients are there when nothing is left to compute.

    Args:
        timed: Collectives with their seconds in this phase.
        room: Seconds of the phase under which collectives hide.
    """
    able = [(one.window, seconds * (1 - min(1.0, one.count / one.parts))) for one, seconds in timed]
    always = min(room, sum(seconds for window, seconds in able if window == 1))
    late = [(window, seconds) for window, seconds in able if window < 1]
    return always + min(sum(seconds for _, seconds in late), (room - always) * max((w for w, _ in late), default=0.0))


def compute_share_of(model: ModelShape, hardware: Hardware, precision: str, calibration: Calibration) -> float:
    """Share of the device's speed that is reached: for networks for images what such ones were measured to reach.

    Args:
        model: The model.
        hardware: Where.
        precision: As in the settings.
        calibration: What was measured there, which goes before all else, or is assumed.
    """
    if model.convolution is None or calibration.measured:
        return calibration.compute_share
    known = catalogue()
    share = float(known["assumed"]["convolution_share"]["value"])
    if hardware.device.format_of(precision) == "fp32":
        share = model.convolution.flops_per_s / float(known["accelerators"]["P100-16G"]["flops"]["fp32"])
    return share * calibration.compute_share / Calibration.assumed().compute_share


def _host_optimizer(model: ModelShape, layout: Layout, hardware: Hardware, optimizer: str) -> float:
    """Its states are read and written in the host's memory once a step.

    States, master weights and gradients in fp32: each read, all but the gradients written (28 bytes with Adam); before
    that gradients are scaled and clipped in place (DeepSpeed 0.19.8, zero/stage3.py, unscale_and_clip_grads).
    """
    if layout.offload == "none":
        return 0.0
    each = split_parameters(model, layout.tensor) / layout.shard_ranks
    touched = each * (8 * OPTIMIZERS[optimizer] + 8 + 4 + 8)
    return touched * hardware.each / float(catalogue()["assumed"]["host_optimizer"]["bytes_per_s"])
