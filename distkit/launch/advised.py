"""``strategy: auto``: the strategy that ``distkit plan`` recommends for the script on the machines at hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkit.errors import DistkitError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distkit.advise.advisor import Advice, Candidate
    from distkit.config import LoadedConfig
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions

__all__ = ["Chosen", "choose_strategy"]


@dataclass(frozen=True)
class Chosen:
    """What was found.

    Args:
        overrides: Settings of the recommended run.
        notes: Lines that say what was chosen and why.
    """

    overrides: tuple[str, ...]
    notes: tuple[str, ...]


def choose_strategy(
    options: LaunchOptions, loaded: LoadedConfig, overrides: Sequence[str], machine: Machine, target: str
) -> Chosen:
    """Look at the script's model and one step of it, and plan for these nodes.

    Args:
        options: With the number of nodes and, where it was said, of processes.
        loaded: The settings.
        overrides: Those of the launch line.
        machine: This one; other nodes are taken to be like it.
        target: The script.

    Raises:
        LaunchError: Nothing fits; says by how much.
        UsageError: The script can't be looked at.
        PlanError: This machine isn't known.
    """
    from distkit.advise.advisor import advise
    from distkit.advise.here import this_machine
    from distkit.advise.script import Script, task_of

    each = int(options.nproc) if options.nproc.isdecimal() else max(1, machine.gpus())
    hardware = this_machine(nodes=options.nnodes, each=each, environ=machine.environ)
    script = Script(target, options.arguments, options.config, tuple(overrides), options.module)
    wishes = dict.fromkeys(("batch", "sequence", "optimizer", "precision", "accumulate"))
    task, note = task_of(script, hardware, wishes)
    advice = advise(task, hardware)
    why: list[str] = []
    for candidate in advice.candidates:
        if not candidate.fits:
            break
        found = _settings(advice, candidate, loaded)
        problem = _refused(options.config, [*overrides, *found], options.nnodes * each)
        if problem is None:
            reason = advice.reason if candidate is advice.recommended else candidate.reason
            first = f"strategy auto: {candidate.layout.describe()} for {hardware.describe()}: {reason}"
            return Chosen(tuple(found), (first, *why, *([note] if note else [])))
        why.append(f"strategy auto: not {candidate.layout.describe()}: {problem}")
    raise LaunchError(
        f"strategy auto: {advice.reason}" if advice.recommended is None else "; ".join(why),
        hint=f"distkit plan --here {target}   shows every strategy",
    )


def _settings(advice: Advice, candidate: Candidate, loaded: LoadedConfig) -> list[str]:
    """What the candidate needs set. The script's batch stays as it is where it means the same."""
    from distkit.advise.report import settings_of

    found = settings_of(advice, candidate)
    del found["precision"]
    if candidate.layout.tensor == 1 and candidate.accumulate == (loaded.config.batch.accumulate or 1):
        found = {name: value for name, value in found.items() if not name.startswith("batch.")}
    return [f"{name}={json.dumps(value)}" for name, value in found.items()]


def _refused(file: str | None, overrides: Sequence[str], processes: int) -> str | None:
    """Why a strategy can't run here: its engine isn't installed, or it can't follow the settings."""
    from distkit.config import load_config
    from distkit.strategies.registry import strategy_class

    try:
        config = load_config(file=file, overrides=list(overrides)).config
        strategy_class(config.strategy).check(config, processes=processes)
    except DistkitError as error:
        return error.message
    return None
