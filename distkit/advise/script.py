"""A training script, looked at in a process of its own: its model's sizes, and one step of it without values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.advise.advisor import Task
from distkit.advise.hardware import Hardware
from distkit.advise.models import ModelShape, model_of_facts
from distkit.config import load_config
from distkit.config.launchline import VARIABLE, LaunchSettings
from distkit.errors import PlanError, UsageError

if TYPE_CHECKING:
    from distkit.config import Config

__all__ = ["Script", "SeenScript", "look_at", "quiet_overrides", "task_of"]


@dataclass(frozen=True)
class Script:
    """What was typed.

    Args:
        path: Of the script.
        arguments: Its own.
        config: The YAML file with settings.
        overrides: ``KEY=VALUE`` texts.
        module: Whether ``path`` is a module's name.
    """

    path: str
    arguments: Sequence[str] = ()
    config: str | None = None
    overrides: Sequence[str] = ()
    module: bool = False

    def preview(self, what: str, folder: str, *, overrides: Sequence[str] = (), **more: Any) -> subprocess.Popen[str]:
        """Start it with a wish for what it shows instead of training.

        Args:
            what: ``layout``, ``profile`` or ``exact``.
            folder: Takes what a run writes.
            overrides: Further settings, as ``KEY=VALUE``.
            **more: What that preview wants to know.
        """
        settings = LaunchSettings(
            config=None if self.config is None else str(Path(self.config).resolve()),
            overrides=[*self.overrides, *overrides, *quiet_overrides(folder)],
            preview={"what": what, **more},
        )
        environment = {**os.environ, VARIABLE: settings.to_json()}
        shown = None if what == "layout" else subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *(["-m"] if self.module else []), self.path, *self.arguments],
            env=environment,
            stdout=shown,
            stderr=shown,
            text=True,
        )


@dataclass(frozen=True)
class SeenScript:
    """What a script trains.

    Args:
        model: Its model.
        batch: Samples in a batch of its loader; None where it has none of a fixed size.
        tokens: In each sample; 1 where samples aren't made of tokens.
        optimizer: Name of its optimizer.
        config: All its settings: what it gives to its Trainer, the file's, and the launch line's.
        note: Why its step couldn't be looked at; empty if it could.
    """

    model: ModelShape
    batch: int | None
    tokens: int
    optimizer: str
    config: Config
    note: str

    def config_for(self, script: Script) -> Config:
        """The settings of a run: the script's own, and over them what was typed for that run."""
        return load_config(script=asdict(self.config), file=script.config, overrides=list(script.overrides)).config


def quiet_overrides(folder: str) -> list[str]:
    """Settings of a run that leaves nothing behind."""
    return [f"run_dir={json.dumps(folder)}", "log.to=[]", "checkpoint.resume=none", "checkpoint.at_end=false"]


def look_at(script: Script) -> SeenScript:
    """Run the script until its first backward.

    Raises:
        UsageError: It ends or fails before it has prepared a model.
    """
    with tempfile.TemporaryDirectory(prefix="distkit-plan-") as folder:
        done = Path(folder) / "facts.json"
        process = script.preview("profile", folder, done=str(done))
        _, said = process.communicate()
        if not done.exists():
            last = said.strip().splitlines()[-1] if said.strip() else f"exit status {process.returncode}"
            hint = "model, optimizer, loader = trainer.prepare(model, optimizer, loader)"
            if script.arguments and "arguments" in last:
                hint = f"distkit plan OPTIONS {script.path} ARGUMENTS   options of distkit plan stand before the script"
            raise UsageError(f"{script.path} ended without preparing a model: {last}", hint=hint)
        facts = json.loads(done.read_text(encoding="utf-8"))
    note = ""
    if facts.get("step") is None:
        last = said.strip().splitlines()[-1] if said.strip() else "no step was taken"
        note = f"the script's step can't be run without values ({last[:200]}), so a typical one is assumed"
    config = load_config(script=facts["settings"]).config
    model = model_of_facts(facts, config.precision)
    step = None if model.seen is None else model.seen.step
    tokens = round(step.tokens) if step is not None and step.tokens > 1 else 1
    return SeenScript(model, facts["batch"], tokens, facts["optimizer"] or "adamw", config, note)


def task_of(script: Script, hardware: Hardware, wishes: Mapping[str, Any]) -> tuple[Task, str]:
    """What the script trains, as a task for the advisor.

    Args:
        script: The script.
        hardware: Where; a batch of one device's size is multiplied by the devices.
        wishes: Fields of :class:`Task`; None is what the script has.

    Returns:
        The task, and a note where the script's step couldn't be looked at.

    Raises:
        UsageError: The script doesn't prepare a model.
        ConfigError: Batch sizes of the settings contradict each other.
        PlanError: The script's loader has no batch size, and none was given.
    """
    from distkit.data.batch import resolve_batch

    seen = look_at(script)
    config = seen.config
    batch = wishes["batch"]
    if batch is None:
        found = resolve_batch(config.batch, seen.batch, hardware.devices).global_batch
        if found is None:
            raise PlanError("the script's loader has no batch size of its own", hint="--batch 256")
        batch = found
    mine: dict[str, Any] = {
        "batch": batch, "sequence": seen.tokens, "optimizer": seen.optimizer, "precision": config.precision,
        "accumulate": config.batch.accumulate,
    }  # fmt: skip
    fields: dict[str, Any] = {name: mine.get(name) if value is None else value for name, value in wishes.items()}
    return Task(seen.model, script=script.path, **fields), seen.note
