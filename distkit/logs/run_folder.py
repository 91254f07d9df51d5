"""The run's folder: which one it is, and what is written into it before anything else."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.config.naming import run_name
from distkit.config.text import settings_yaml
from distkit.errors import ConfigError
from distkit.logs.machine import describe_rank, describe_run
from distkit.masking import mask_values

if TYPE_CHECKING:
    from distkit.config import LoadedConfig
    from distkit.world import World

__all__ = ["choose_run_dir", "create_run_folder"]


def choose_run_dir(loaded: LoadedConfig, world: World) -> Path:
    """The folder that ``run_dir`` names, or a new ``runs/<name>-<time>``. Called by all ranks; rank 0 decides.

    Args:
        loaded: The settings.
        world: All ranks.

    Returns:
        An absolute path, the same on all ranks. A new folder exists already, so that no other run takes it.

    Raises:
        ConfigError: A new folder can't be made; on all ranks.
    """
    chosen, problem = _decide(loaded) if world.is_main else ("", None)
    chosen, problem = world.broadcast_object([chosen, problem])
    _raise(problem)
    return Path(chosen)


def create_run_folder(run_dir: Path, loaded: LoadedConfig, world: World) -> None:
    """Make the folder with config.yaml and environment.json: rank 0 does, then the others go on. Called by all ranks.

    Of a run that goes on, the files of earlier starts are kept as ``config.1.yaml`` and so on if they differ.

    Args:
        run_dir: As :func:`choose_run_dir` gives it.
        loaded: The settings.
        world: All ranks.

    Raises:
        ConfigError: The folder can't be written; on all ranks.
    """
    ranks = world.all_gather_objects(describe_rank(world))
    problem = None
    if world.is_main:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _write(run_dir / "config.yaml", _config_text(loaded))
            _write(run_dir / "environment.json", json.dumps(describe_run(world, ranks), indent=2) + "\n")
        except OSError as error:
            problem = _problem(run_dir, error)
    _raise(world.broadcast_object(problem))


def _decide(loaded: LoadedConfig) -> tuple[str, str | None]:
    config = loaded.config
    if config.run_dir is not None:
        return str(Path.cwd() / Path(config.run_dir).expanduser()), None
    name = run_name(config.name, sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "run")
    stem = Path.cwd() / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, count = stem, 1
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return str(folder), None
            except FileExistsError:
                count += 1
                folder = stem.with_name(f"{stem.name}-{count}")
    except OSError as error:
        return "", _problem(folder, error)


def _problem(folder: Path, error: OSError) -> str:
    at = f" ({error.filename})" if error.filename and str(error.filename) != str(folder) else ""
    return f"the run's folder {str(folder)!r} can't be written: {error.strerror or error}{at}"


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise ConfigError(problem, hint="--set run_dir=DIR   a folder that can be written")


def _config_text(loaded: LoadedConfig) -> str:
    flat = mask_values(loaded.flat())
    origins = {name: origin for name, origin in loaded.origins.items() if origin != "default"}
    # With its folder in it, `-c config.yaml` would go on with this run where a new one is meant.
    if flat["run_dir"] is not None:
        flat["run_dir"] = None
        origins["run_dir"] = "null, so that this file can start a new run; this one's is where the file is"
    head = "# The settings of this run. A comment says where a value came from; the others are defaults.\n"
    return head + settings_yaml(flat, beside=origins)


def _write(path: Path, text: str) -> None:
    """Whole or not at all; what was there and differs is kept under a number."""
    if path.exists():
        before = path.read_text(encoding="utf-8")
        if _timeless(before) == _timeless(text):
            return
        number = 1
        while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.replace(kept)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _timeless(text: str) -> Any:
    """The content without the time of the start."""
    return [line for line in text.splitlines() if not line.startswith('  "time":')]
