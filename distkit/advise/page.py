"""The answer as one HTML page with pictures, without anything to load from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from distkit.advise.advisor import Advice, Candidate, advise
from distkit.advise.exact.report import Comparison
from distkit.advise.report import launch_line, settings_of, shown
from distkit.errors import PlanError

__all__ = ["page_of"]

_COLOURS = ("#3b6fd4", "#7fa8f0", "#f0a23b", "#5aa469", "#b9bec8")
_LEFT, _WIDTH, _ROW = 290.0, 510.0, 24


def page_of(advice: Advice, compared: Sequence[Comparison] = ()) -> str:
    """The page's text.

    Args:
        advice: What was worked out.
        compared: What runs on tensors without data showed.
    """
    import jinja2

    chosen = advice.recommended
    text = files("distkit.advise").joinpath("page.html.jinja").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
    model = advice.task.model
    verdict = advice.reason if chosen is None else f"Take {chosen.layout.describe()}: {advice.reason}."
    return template.render(
        title=f"{model.name} on {advice.hardware.devices} x {advice.hardware.device.name}",
        hardware=f"{advice.hardware.describe()}; batch {advice.task.batch_words}, {advice.task.optimizer}, {advice.task.precision}",
        verdict=verdict,
        path=advice.path,
        charts=[_memory(advice), _traffic(advice), _time(advice), *_scaling(advice)],
        rows=[_row(candidate, candidate is chosen) for candidate in advice.candidates],
        config=None if chosen is None else _config(settings_of(advice, chosen)),
        line="" if chosen is None else launch_line(advice, chosen),
        exact=[(one.candidate.layout.describe(), one.rows(), one.verdict(), one.exact.method) for one in compared],
        parts=[] if chosen is None else [part.as_dict() for part in chosen.memory.parts],
        rules=advice.rules,
        assumptions=list(advice.assumptions.items()),
    )


def _memory(advice: Advice) -> dict[str, Any]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    chart = _bars(
        "Memory of a rank, GB",
        kinds,
        [(c, [getattr(c.memory, kind) / 1e9 for kind in kinds]) for c in shown(advice)],
        advice.recommended,
        value="{:.1f}",
    )
    limit = advice.hardware.device.memory / 1e9
    x = _LEFT + _WIDTH * limit / chart["largest"]
    return {**chart, "limit": {"x": x, "label": f"{advice.hardware.device.name}: {limit:g} GB"} if x < 890 else None}


def _traffic(advice: Advice) -> dict[str, Any]:
    return _bars(
        "Sent by a rank in a step, GB",
        ("inside of a node", "between nodes", "to and from the host"),
        [(c, [b / 1e9 for b in (c.traffic.intra, c.traffic.inter, c.traffic.host)]) for c in shown(advice)],
        advice.recommended,
        value="{:.1f}",
    )


def _time(advice: Advice) -> dict[str, Any]:
    return _bars(
        "A step of those that fit, seconds",
        ("compute", "waiting for the network and the host", "the host's optimizer"),
        [(c, [c.step.compute, c.step.communication, c.step.host]) for c in shown(advice) if c.fits],
        advice.recommended,
        value="{:.2f}",
    )


def _scaling(advice: Advice) -> list[dict[str, Any]]:
    """The recommended strategy's speed on other numbers of nodes, with a batch that grows with them."""
    chosen, hardware = advice.recommended, advice.hardware
    if chosen is None:
        return []
    speeds: list[tuple[str, float]] = []
    unit = advice.task.model.unit
    for nodes in sorted({1, 2, 4, 8, 16, hardware.nodes, 2 * hardware.nodes}):
        batch = max(1, advice.task.batch * nodes // hardware.nodes)
        try:
            there = advise(replace(advice.task, batch=batch), replace(hardware, nodes=nodes))
        except PlanError:
            continue
        same = [c for c in there.candidates if c.layout.describe() == chosen.layout.describe() and c.fits]
        if same:
            speeds.append(
                (f"{nodes} {'node' if nodes == 1 else 'nodes'}", same[0].tokens_per_s / (nodes * hardware.each))
            )
    rows = [
        _bar(index, label, [speed], max(s for _, s in speeds), "{:,.0f}", (unit,))
        for index, (label, speed) in enumerate(speeds)
    ]
    title = f"{unit.capitalize()} a second and device of {chosen.layout.describe()}, by nodes"
    return [{"title": title, "key": [], "bars": rows, "height": _ROW * len(rows) + 8, "limit": None}] if rows else []


def _bars(
    title: str,
    kinds: Sequence[str],
    values: Sequence[tuple[Candidate, list[float]]],
    chosen: Candidate | None,
    *,
    value: str,
) -> dict[str, Any]:
    largest = max((sum(numbers) for _, numbers in values), default=1.0) or 1.0
    bars = [
        {**_bar(index, candidate.layout.describe(), numbers, largest, value, kinds), "chosen": candidate is chosen}
        for index, (candidate, numbers) in enumerate(values)
    ]
    key = list(zip(kinds, _COLOURS, strict=False))
    return {
        "title": title,
        "key": key,
        "bars": bars,
        "height": _ROW * len(bars) + 20,
        "limit": None,
        "largest": largest,
    }


def _bar(
    index: int, label: str, numbers: Sequence[float], largest: float, value: str, kinds: Sequence[str]
) -> dict[str, Any]:
    pieces, x = [], _LEFT
    write: Callable[[float], str] = value.format
    for kind, number, colour in zip(kinds, numbers, _COLOURS, strict=False):
        width = _WIDTH * number / largest
        pieces.append(
            {"x": round(x, 2), "width": round(width, 2), "colour": colour, "title": f"{kind}: {write(number)}"}
        )
        x += width
    return {
        "y": _ROW * index,
        "label": label,
        "pieces": pieces,
        "end": round(x, 2),
        "value": write(sum(numbers)),
        "chosen": False,
    }


def _row(candidate: Candidate, chosen: bool) -> dict[str, Any]:
    cells = (
        candidate.layout.describe(),
        candidate.accumulate,
        f"{candidate.memory.total / 1e9:.1f}",
        f"{(candidate.traffic.intra + candidate.traffic.inter) / 1e9:.1f}",
        f"{candidate.step.total:.2f}" if candidate.fits else "-",
        f"{candidate.tokens_per_s:,.0f}" if candidate.fits else "-",
        candidate.reason,
    )
    return {"kind": "chosen" if chosen else "" if candidate.fits else "out", "cells": cells}


def _config(settings: Mapping[str, object]) -> str:
    """As a config file, with the keys of a section together."""
    lines, sections = [], dict[str, list[str]]()
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        if dot:
            sections.setdefault(section, []).append(f"{name}: {value}")
        else:
            lines.append(f"{key}: {value}")
    return "\n".join([*lines, *(f"{section}: {{{', '.join(items)}}}" for section, items in sections.items())])
