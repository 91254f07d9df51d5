"""The processes in which candidates are run: one of ours for a model that is built, the script's own for a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.advise.exact.observing import Called, Seen
from distkit.errors import PlanError

if TYPE_CHECKING:
    from distkit.advise.exact.run import Run
    from distkit.advise.script import Script

__all__ = ["rehearsed", "rehearsed_script"]

PREVIEW = "distkit.advise.exact.preview:ExactPreview"

LIMIT_S = 600.0
"""A run that takes longer is given up."""


def rehearsed(run: Run, layers: Sequence[int]) -> list[Seen]:
    """Run it with each of these numbers of layers, in a process of its own.

    Raises:
        PlanError: It can't be run.
    """
    asked = json.dumps({"run": asdict(run), "layers": list(layers)})
    command = [sys.executable, "-m", "distkit.advise.exact.run"]
    here = Path(__file__).parents[3]  # -m looks in the working directory first, and is to find this distkit there
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])  # the user's modules
    try:
        done = subprocess.run(
            command,
            input=asked,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=here,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise _too_long(f"{run.strategy} with {run.layers} layers") from error
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for answer in answers:
        if "error" in answer:
            raise PlanError(f"{run.strategy} can't be run: {answer['error']}", hint=answer["hint"])
    if done.returncode or len(answers) != len(layers):
        raise _ended(run.strategy, done.returncode, done.stderr)
    return [_seen(answer["seen"]) for answer in answers]


def rehearsed_script(script: Script, run: Run) -> Seen:
    """Let the script take two steps as rank 0 of all ranks.

    Args:
        script: What was typed.
        run: The candidate; model, optimizer and tokens are the script's own.

    Raises:
        PlanError: It can't be run.
    """
    settings: dict[str, Any] = {
        "strategy": run.strategy,
        "precision": run.computed_in,
        "device": "cpu",
        "max_steps": None,
        "parallel.tensor": run.tensor,
        "memory.offload": run.offload,
        "memory.activation_checkpointing": run.recompute,
        "batch.per": "device",
        "batch.size": run.micro,
        "batch.micro": None,
        "batch.accumulate": min(run.accumulate, 2),  # all but the last do the same
        "log.every_steps": 10**9,
        "checkpoint.every_steps": None,
        "checkpoint.every_seconds": None,
        "checkpoint.keep_best": None,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    with tempfile.TemporaryDirectory(prefix="distkit-plan-") as folder:
        done = Path(folder) / "seen.json"
        process = script.preview(
            "exact", folder, overrides=overrides, **{"class": PREVIEW}, nodes=run.nodes, each=run.each, done=str(done)
        )
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise _too_long(f"{script.path} under {run.strategy}") from error
        if not done.exists():
            if process.returncode == 0:
                need = 2 * run.micro * min(run.accumulate, 2)
                raise PlanError(
                    f"{script.path} ended before its second optimizer step, which --exact looks at; it takes {need} samples",
                    hint="more data or epochs, a smaller --batch, or leave --exact out",
                )
            raise _ended(f"{script.path} under {run.strategy}", process.returncode, said)
        return _seen(json.loads(done.read_text(encoding="utf-8")))


def _too_long(what: str) -> PlanError:
    return PlanError(f"running {what} on tensors without data took more than {LIMIT_S:g} s", hint="leave --exact out")


def _ended(what: str, status: int, said: str) -> PlanError:
    lines = said.strip().splitlines() or ["no message"]
    hint = "leave --exact out"
    if lines[-1].startswith("Hint: ") and len(lines) > 1:  # an error of ours
        hint = lines.pop().removeprefix("Hint: ")
    if "numpy" in lines[-1]:
        hint = "read numbers with .item(), or leave --exact out"
    reason = "it was killed, as by a host without memory" if status == -signal.SIGKILL else lines[-1]
    return PlanError(
        f"running {what} on tensors without data ended with status {status} before its second step: {reason}", hint=hint
    )


def _seen(found: Mapping[str, Any]) -> Seen:
    calls = {part: [Called(**one) for one in found[part]] for part in ("first", "last")}
    return Seen(found["parameters"], found["peaks"], **calls)
