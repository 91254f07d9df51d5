"""What can be known to be wrong from the settings alone, before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distkit.config.nearest import nearest, nearest_key
from distkit.config.schema import Config, keys
from distkit.errors import ConfigError

__all__ = ["check_config", "check_tensor_groups", "check_values", "unknown_key"]

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")


def unknown_key(name: str, known: Iterable[str], origin: str) -> ConfigError:
    """The error for a key that the schema doesn't have; names the nearest one."""
    found = nearest_key(name, known)
    hint = f"did you mean {found}?" if found else "distkit config schema   lists every key"
    return ConfigError(f"unknown key {name!r} was set ({origin})", hint=hint)


def check_values(flat: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Each value alone: is it one of the choices, is it in range?

    Raises:
        ConfigError: Naming the key, its origin, and the nearest valid value.
    """
    for key in keys():
        value, origin = flat[key.name], origins.get(key.name, "default")
        if key.choices and value not in key.choices:
            found = nearest(str(value), key.choices)
            raise ConfigError(
                f"{key.name} was set to {value!r} ({origin}); valid: {', '.join(key.choices)}",
                hint=f"--set {key.name}={found or key.default}",
            )
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key.minimum is not None and not value >= key.minimum:
            raise ConfigError(
                f"{key.name} was set to {value!r} ({origin}), but its least value is {key.minimum:g}",
                hint=f"--set {key.name}={key.minimum:g}",
            )
        if key.above is not None and not value > key.above:
            raise ConfigError(
                f"{key.name} was set to {value!r} ({origin}), but it must be above {key.above:g}",
                hint=f"--set {key.name}={key.default if key.default is not None else 1.0}",
            )


def check_config(config: Config, origins: Mapping[str, str]) -> None:
    """Values that contradict each other, as far as the settings alone tell.

    What depends on the number of processes is checked in :mod:`distkit.batch`, and what depends on the strategy by
    the strategy itself.

    Raises:
        ConfigError: Showing both values.
    """
    batch = config.batch
    if batch.per == "device" and batch.micro is not None and batch.size is not None and batch.micro != batch.size:
        raise ConfigError(
            f"batch.per is 'device', so batch.size={batch.size} and batch.micro={batch.micro} both speak of one micro "
            "batch, and they differ",
            hint="--set batch.per=global",
        )
    for name in config.log.to:
        if name not in LOGGERS:
            found = nearest(name, LOGGERS)
            raise ConfigError(
                f"log.to has {name!r} ({origins.get('log.to', 'default')}); valid: {', '.join(LOGGERS)}",
                hint=f"--set log.to=[{found or 'console'}]",
            )
    ddp = config.engine.ddp
    wanted = config.optim.unused_parameters == "allow"
    if "find_unused_parameters" in ddp and bool(ddp["find_unused_parameters"]) != wanted:
        raise ConfigError(
            f"engine.ddp.find_unused_parameters={ddp['find_unused_parameters']} contradicts "
            f"optim.unused_parameters={config.optim.unused_parameters}",
            hint=f"--set optim.unused_parameters={'allow' if ddp['find_unused_parameters'] else 'error'}",
        )


def check_tensor_groups(config: Config, *, nodes: int, each: int) -> None:
    """Refuse tensor groups that would reach over several nodes, unless that is asked for.

    Args:
        config: The merged settings.
        nodes: Number of nodes.
        each: Processes on each.

    Raises:
        ConfigError: Some group would.
    """
    size = config.parallel.tensor
    if size == 1 or nodes == 1 or each % size == 0 or config.parallel.allow_tensor_across_nodes:
        return
    fitting = max(n for n in range(1, size + 1) if each % n == 0)
    raise ConfigError(
        f"parallel.tensor was set to {size}, but each of the {nodes} nodes has {each} processes: tensor groups would reach over "
        "nodes, and every layer would wait for the network between them",
        hint=f"--set parallel.tensor={fitting}   or, if the network is that fast, --set parallel.allow_tensor_across_nodes=true",
    )
