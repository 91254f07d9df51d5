"""`distkit plan`: what a run would be like, before it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from distkit.errors import UsageError

__all__ = ["plan"]


def plan(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
    layout: Annotated[
        bool, typer.Option("--layout", help="Show how tensor parallelism would split each layer of the model, and why.")
    ] = False,
    file: Annotated[str | None, typer.Option("-c", "--config", metavar="FILE", help="YAML file with settings.")] = None,
    strategy: Annotated[
        str | None, typer.Option("-s", "--strategy", metavar="NAME", help="Way of training, as for distkit-run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; can be given often.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show what a run would be like.

    With --layout the script runs in one process up to trainer.prepare(), shows how its model would be split, and ends
    there: no other process is started and nothing is trained.

    \b
    Examples:
      distkit plan --layout --set parallel.tensor=4 train.py
      distkit plan --layout -c config.yaml --json train.py --size small
    """
    if not layout:
        raise UsageError("what to show was not said", hint=f"distkit plan --layout --set parallel.tensor=2 {script}")
    if not Path(script).is_file():
        raise UsageError(f"{script} is no file", hint="distkit plan --layout --set parallel.tensor=2 train.py")
    from distkit.config import load_config

    chosen = [*(overrides or []), *([] if strategy is None else [f"strategy={json.dumps(strategy)}"])]
    load_config(file=file, overrides=chosen)  # what is mistyped is said before the script runs
    raise typer.Exit(_run_script(script, arguments or [], file, chosen, as_json))


def _run_script(script: str, arguments: list[str], file: str | None, overrides: list[str], as_json: bool) -> int:
    """The script in a process of its own, whose Trainer ends it when it has seen the model."""
    from distkit.config.launchline import VARIABLE, LaunchSettings

    with tempfile.TemporaryDirectory(prefix="distkit-plan-") as folder:
        done = Path(folder) / "shown"
        settings = LaunchSettings(
            config=None if file is None else str(Path(file).resolve()),
            overrides=[*overrides, f"run_dir={json.dumps(folder)}", "log.to=[]", "checkpoint.resume=none"],
            preview={"what": "layout", "json": as_json, "done": str(done)},
        )
        environment = {**os.environ, VARIABLE: settings.to_json()}
        ended = subprocess.run([sys.executable, script, *arguments], env=environment, check=False)
        if ended.returncode == 0 and not done.exists():
            raise UsageError(
                f"{script} ended without preparing a model",
                hint="model, optimizer, loader = trainer.prepare(model, optimizer, loader)",
            )
    return ended.returncode
