"""What worker processes run for the tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distkit.config import load_config
from distkit.errors import DistkitError


def track(run_dir: str, strategy: str) -> dict[str, Any]:
    """Log to TensorBoard in a world of several, or in a process that a launcher started but that joined no group."""
    import torch

    from distkit.logs import RunLog
    from distkit.strategies.registry import strategy_class
    from distkit.world import detect_environment
    from distkit.world.environment import Environment

    loaded = load_config(overrides=[f"strategy={strategy}", "log.to=[tensorboard]"])
    engine = strategy_class(strategy)(loaded.config)
    environment = detect_environment()
    world = engine.connect(Environment() if strategy == "single" else environment)
    before = dict(os.environ)
    log = RunLog(loaded.config, Path(run_dir), is_main=environment.rank == 0)
    log.start(4, 0)
    log.point(2, {"loss": float(world.rank), "lrs": [0.1, 0.2]})
    summed = float(world.all_reduce(torch.ones(())))
    log.close()

    from accelerate.state import PartialState

    return {
        "state": dict(PartialState._shared_state),
        "group": torch.distributed.is_initialized(),
        "sum": summed,
        "env": {k: v for k, v in os.environ.items() if before.get(k) != v},
        "closed": engine.close(),
    }


def make_folder(run_dir: str | None, directory: str) -> dict[str, Any]:
    """Choose and create the run's folder on several ranks."""
    from distkit.logs import choose_run_dir, create_run_folder
    from distkit.strategies.registry import strategy_class
    from distkit.world import detect_environment

    here = os.getcwd()
    os.chdir(directory)
    loaded = load_config(script={"strategy": "ddp", "run_dir": run_dir})
    engine = strategy_class("ddp")(loaded.config)
    world = engine.connect(detect_environment())
    try:
        found = choose_run_dir(loaded, world)
        create_run_folder(found, loaded, world)
        return {"path": str(found), "there": (found / "environment.json").exists()}
    except DistkitError as error:
        return {"error": str(error)}
    finally:
        os.chdir(here)
        engine.close()
