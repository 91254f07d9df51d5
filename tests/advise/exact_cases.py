"""What the tests of exact plans run in worker processes."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from distkit.advise.exact.allocations import Allocations
from distkit.advise.exact.faking import Watch, watching
from distkit.advise.exact.run import Rehearsal, Run, rehearse, strategy_of
from distkit.advise.models import ModelShape
from distkit.memory import count_state
from distkit.world.environment import detect_environment


def faked(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is seen of each on tensors without data."""
    return [asdict(rehearse(_run(run))) for run in runs]


def real(run: dict[str, Any], *, record: bool) -> dict[str, Any]:
    """The same step with data, on as many processes as it has ranks: what is seen of it, and what torch's allocator says.

    The states are those after a step; the allocator's peak is the largest sum of what it gave since the step began. It is
    looked at in a further step, if ``record``.
    """
    strategy = strategy_of(_run(run))
    strategy.connect(detect_environment())
    watch = Watch(Allocations())
    with watching(watch):
        rehearsal = Rehearsal(_run(run), strategy, watch)
        rehearsal.step(look=False)
        rehearsal.step()
        seen = rehearsal.seen()
    states = asdict(count_state(strategy))
    peak = _allocated(rehearsal) if record else 0
    strategy.close()
    return {"seen": asdict(seen), "states": states, "allocated": peak}


def _allocated(rehearsal: Rehearsal) -> int:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        rehearsal.step(look=False)
    events = sorted(
        (e.start_ns(), e.nbytes()) for e in record.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak


def _run(values: dict[str, Any]) -> Run:
    torch.manual_seed(0)
    return Run(**{**values, "model": ModelShape(**values["model"])})
