"""distkit: one training API over every way of training a PyTorch model on many devices.

The public names are resolved when they are first used, so that ``import distkit`` loads neither torch nor any engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distkit.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DistkitError,
    LaunchError,
    OutOfStepError,
    StrategyUnavailable,
    UsageError,
)

if TYPE_CHECKING:
    from distkit.callbacks import Callback, EarlyStopping
    from distkit.config import Config
    from distkit.state import Region, Shard
    from distkit.strategies.base import Capabilities, Strategy
    from distkit.trainer import Trainer
    from distkit.window import StepOutput
    from distkit.world import World

__version__ = "0.1.0"

_LAZY = {
    "Callback": "distkit.callbacks",
    "Capabilities": "distkit.strategies.base",
    "Config": "distkit.config",
    "EarlyStopping": "distkit.callbacks",
    "Region": "distkit.state",
    "Shard": "distkit.state",
    "StepOutput": "distkit.window",
    "Strategy": "distkit.strategies.base",
    "Trainer": "distkit.trainer",
    "World": "distkit.world",
}

__all__ = [
    "Callback",
    "Capabilities",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DistkitError",
    "EarlyStopping",
    "LaunchError",
    "OutOfStepError",
    "Region",
    "Shard",
    "StepOutput",
    "Strategy",
    "StrategyUnavailable",
    "Trainer",
    "UsageError",
    "World",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'distkit' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
