"""Which strategies there are. A name leads to a module and a class; nothing is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from distkit.config.nearest import nearest
from distkit.errors import ConfigError, StrategyUnavailable

if TYPE_CHECKING:
    from distkit.config import Config, LoadedConfig
    from distkit.strategies.base import Strategy

__all__ = [
    "BUILT_IN",
    "RESOLVED",
    "apply_defaults",
    "make_strategy",
    "settle_strategy",
    "strategy_class",
    "strategy_names",
]

BUILT_IN = {
    "single": "distkit.strategies.single:SingleStrategy",
    "dp": "distkit.strategies.dp:DataParallelStrategy",
    "ddp": "distkit.strategies.ddp:DDPStrategy",
    "horovod": "distkit.strategies.horovod:HorovodStrategy",
    "fsdp": "distkit.strategies.fsdp:FSDPStrategy",
    "hsdp": "distkit.strategies.fsdp:HSDPStrategy",
    "zero1": "distkit.strategies.zero:Zero1Strategy",
    "zero2": "distkit.strategies.zero:Zero2Strategy",
    "zero3": "distkit.strategies.zero:Zero3Strategy",
    "megatron-zero1": "distkit.strategies.megatron:MegatronZero1Strategy",
    "megatron-zero2": "distkit.strategies.megatron:MegatronZero2Strategy",
    "megatron-zero3": "distkit.strategies.megatron:MegatronZero3Strategy",
}
"""One line a strategy, in the order in which the documentation lists them."""

RESOLVED = {
    "accelerate": "one of these, with its settings, as a configuration of Hugging Face Accelerate says",
    "auto": "the one that `distkit plan` recommends for the script on the machines at hand; distkit-run says which and why",
}
"""Values of ``strategy`` that stand for another one. For which, :func:`distkit.config.load_config` finds out, and for
``auto`` the launcher."""

ENTRY_POINTS = "distkit.strategies"
"""Packages add strategies of their own under this entry point group: ``name = "package.module:Class"``."""


@lru_cache(maxsize=1)
def _outside() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def strategy_names() -> list[str]:
    """All names: the built-in ones, then those of other packages."""
    return [*BUILT_IN, *(name for name in sorted(_outside()) if name not in BUILT_IN)]


def strategy_class(name: str, *, several: bool = False) -> type[Strategy]:
    """The class behind a name.

    Args:
        name: As in the config key ``strategy``.
        several: Whether several processes were asked for, so that a mistyped name isn't taken for one of one process.

    Raises:
        ConfigError: There is no such strategy; names the nearest.
        StrategyUnavailable: Another package's strategy can't be imported.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: type[Strategy] = getattr(import_module(module), attribute)
        return found
    point = _outside().get(name)
    if point is None:
        known = [*strategy_names(), *RESOLVED]
        fitting = [n for n in known if n in _outside() or n in RESOLVED or _takes_several(n)] if several else known
        close = nearest(name, fitting)
        raise ConfigError(
            f"strategy was set to {name!r}; there are: {', '.join(known)}",
            hint=f"--strategy {close}" if close else "distkit strategies   says what each is for",
        )
    try:
        loaded: type[Strategy] = point.load()
    except ImportError as error:
        raise StrategyUnavailable(
            f"strategy {name!r} comes from {point.value}, which can't be imported: {error}",
            hint=f"pip install {point.dist.name if point.dist else point.module.partition('.')[0]}",
        ) from error
    return loaded


def make_strategy(config: Config, preview: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of a run; with ``parallel.tensor`` above 1 over models whose layers are split.

    Args:
        config: The merged settings.
        preview: What `distkit plan` wants to be shown instead of training.

    Raises:
        ConfigError: There is no such strategy, or it can't follow the settings.
    """
    chosen = strategy_class(config.strategy)
    if preview and preview["what"] != "measure":
        return _make_preview(chosen, config, preview)
    return chosen.for_run(config)(config)


def apply_defaults(loaded: LoadedConfig, processes_per_node: int) -> None:
    """Fill in the strategy's own defaults for settings that nobody set."""
    name = loaded.config.strategy
    for key, value in strategy_class(name).defaults(processes_per_node).items():
        if loaded.origins[key] == "default":
            loaded.set(key, value, f"strategy {name}, {processes_per_node} processes per node")


def _make_preview(chosen: type[Strategy], config: Config, preview: Mapping[str, Any]) -> Strategy:
    from distkit.strategies.tensor_parallel.preview import LayoutPreview, show_errors_short

    show_errors_short()
    if preview["what"] == "profile":
        from distkit.strategies.profiling import ProfilePreview

        return ProfilePreview(config, done=Path(preview["done"]))
    if preview["what"] == "exact":
        brought: type[Strategy] = resolve_name(preview["class"])  # who asks for it brings it
        return brought(config, nodes=preview["nodes"], each=preview["each"], done=Path(preview["done"]))  # type: ignore[call-arg]
    if config.parallel.tensor == 1:
        raise ConfigError("parallel.tensor is 1: no layer would be split", hint="--set parallel.tensor=2")
    if chosen.name != "single":  # the default, where only the layout is asked for
        chosen.check(config, processes=None)
    from distkit.strategies.checks import check_layout

    check_layout(config)
    return LayoutPreview(config, as_json=bool(preview["json"]), done=Path(preview["done"]))


def settle_strategy(loaded: LoadedConfig, processes: int) -> None:
    """What is trained with where nobody named it: ddp for several processes; and where ``strategy: auto`` was not settled by
    `distkit-run`: one process has no choice.

    Raises:
        ConfigError: Several processes were started, and the strategy is auto.
    """
    config = loaded.config
    if processes > 1 and loaded.origins["strategy"] == "default":
        config.strategy = "ddp"
        loaded.origins["strategy"] = f"{processes} processes were started and none was named"
    if config.strategy != "auto":
        return
    if processes > 1:
        raise ConfigError(
            f"strategy is auto, which is settled before processes are started, and {processes} were started",
            hint="distkit-run -s auto --nproc 2 train.py",
        )
    config.strategy = "single"


def _takes_several(name: str) -> bool:
    return strategy_class(name).capabilities.processes == "many"
