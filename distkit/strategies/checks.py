"""Settings held against what a strategy says it can do; needs neither torch nor the engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.config.nearest import nearest
from distkit.errors import ConfigError, StrategyUnavailable

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.strategies.base import Strategy

__all__ = ["check_capabilities", "check_layout", "engine_installed", "missing_engines"]

MODULES = {"megatron-core": "megatron.core"}
"""Modules of libraries that are installed by another name."""


def engine_installed(strategy: type[Strategy]) -> bool:
    """Whether the strategy's engine can be imported; nothing is imported to find out."""
    return not missing_engines(strategy)


def missing_engines(strategy: type[Strategy]) -> list[str]:
    """Names of the libraries that the strategy needs and that aren't there."""
    can = strategy.capabilities
    return [name for name in (can.engine, can.layers) if name and not _is_there(name)]


def _is_there(requirement: str) -> bool:
    package, _, inner = MODULES.get(requirement, requirement).partition(".")
    spec = find_spec(package)
    if spec is None or not inner:
        return spec is not None
    return any(Path(folder, inner).is_dir() for folder in spec.submodule_search_locations or ())


def check_capabilities(strategy: type[Strategy], config: Config, processes: int | None) -> None:
    """Refuse settings that the strategy can't follow.

    Raises:
        ConfigError: Naming the setting and the values that work.
        StrategyUnavailable: The engine is not installed.
    """
    can, name = strategy.capabilities, strategy.name
    missing = missing_engines(strategy)
    if missing:
        names, verb = " and ".join(missing), "is" if len(missing) == 1 else "are"
        raise StrategyUnavailable(f"strategy {name!r} needs {names}, which {verb} not installed", hint=can.install)
    if can.processes == "one" and processes is not None and processes > 1:
        raise ConfigError(
            f"strategy {name!r} runs in one process, but {processes} were asked for",
            hint="--strategy ddp   or --nproc 1",
        )
    for key, value, allowed in (
        ("precision", config.precision, can.precisions),
        ("memory.offload", config.memory.offload, can.offload),
        ("compress.method", config.compress.method, can.compress),
    ):
        if value not in allowed:
            valid = sorted(allowed)
            raise ConfigError(
                f"{key} was set to {value!r}, but strategy {name!r} takes: {', '.join(valid)}",
                hint=f"--set {key}={valid[0]}",
            )
    if config.parallel.tensor > 1 and not can.tensor_parallel:
        raise ConfigError(
            f"parallel.tensor was set to {config.parallel.tensor}, but strategy {name!r} splits no layers",
            hint="--set parallel.tensor=1",
        )
    if config.parallel.tensor > 1:
        _check_tensor_parallel(config)
    elif config.parallel.sequence:
        raise ConfigError(
            "parallel.sequence was set, but parallel.tensor is 1: there is no group to share the tokens",
            hint="--set parallel.tensor=2   or --set parallel.sequence=false",
        )
    if config.parallel.replicate > 1 and name != "hsdp":
        raise ConfigError(
            f"parallel.replicate was set to {config.parallel.replicate}, but strategy {name!r} has no replica groups",
            hint="--set parallel.replicate=1",
        )
    if config.parallel.tensor > 1 and processes is not None and processes % config.parallel.tensor:
        raise ConfigError(
            f"parallel.tensor={config.parallel.tensor} doesn't divide the {processes} processes",
            hint="--set parallel.tensor=1",
        )


LAYOUT_STYLES = ("column", "row", "vocabulary", "replicate")


def check_layout(config: Config) -> None:
    """Refuse what ``parallel.tensor_layout`` can't mean for any model."""
    chosen = config.parallel.tensor_layout
    if isinstance(chosen, dict):
        for pattern, style in chosen.items():
            if style not in LAYOUT_STYLES:
                raise ConfigError(
                    f"parallel.tensor_layout.{pattern} was set to {style!r}; there are: {', '.join(LAYOUT_STYLES)}",
                    hint=f"--set 'parallel.tensor_layout={{\"{pattern}\": {nearest(str(style), LAYOUT_STYLES) or 'replicate'}}}'",
                )
    elif chosen != "auto":
        raise ConfigError(
            f"parallel.tensor_layout was set to {chosen!r}; it is auto, or patterns of names with their styles",
            hint="--set 'parallel.tensor_layout={\"*.experts.*\": replicate}'",
        )


def _check_tensor_parallel(config: Config) -> None:
    check_layout(config)
    for key, value, refused, instead in (
        ("precision", config.precision, "fp16", "--set precision=bf16"),
        ("compile", config.compile, True, "--set compile=false"),
    ):
        if value == refused:
            raise ConfigError(
                f"{key} was set to {str(value).lower()}, which does not go together with parallel.tensor={config.parallel.tensor}",
                hint=f"{instead}   or --set parallel.tensor=1",
            )
