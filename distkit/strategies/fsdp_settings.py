"""The keys of ``engine.fsdp``, and how many replicas hsdp makes; needs no torch, so the launcher can check them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from distkit.config.nearest import nearest
from distkit.errors import ConfigError

if TYPE_CHECKING:
    from distkit.config import Config

__all__ = ["FsdpSettings", "check_replicas", "choose_replicas"]

ELSEWHERE = {
    "mp_policy": "precision",
    "param_dtype": "precision",
    "reduce_dtype": "compress.method",
    "offload_policy": "memory.offload",
    "mesh": "parallel.replicate",
}
"""Arguments of fully_shard that follow from portable keys."""


@dataclass(frozen=True)
class FsdpSettings:
    """``engine.fsdp``.

    Args:
        wrap: Class names of the modules that become units; None takes the repeated blocks.
        min_params: Instead of ``wrap``: cut the model into units of at least so many parameters.
        reshard_after_forward: As fully_shard's argument; None frees every unit but the outermost after its forward.
        prefetch: How many units ahead parameters are gathered; 0 leaves it to torch (one ahead, where streams overlap).
        cast_forward_inputs: Whether units cast floating inputs to the 16-bit compute dtype.
        reduce_every_micro_batch: Reduce gradients after every micro batch, instead of keeping whole ones until the
            window ends: less memory, more traffic.
    """

    wrap: tuple[str, ...] | None = None
    min_params: int | None = None
    reshard_after_forward: bool | int | None = None
    prefetch: int = 0
    cast_forward_inputs: bool = True
    reduce_every_micro_batch: bool = False

    @classmethod
    def parse(cls, given: dict[str, Any]) -> FsdpSettings:
        """Read and check the section.

        Raises:
            ConfigError: An unknown key, a value that doesn't fit, or two keys that contradict each other.
        """
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                raise _unknown(name, known)
        values = dict(given)
        wrap = values.get("wrap")
        if wrap is not None:
            names = [wrap] if isinstance(wrap, str) else wrap
            if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
                raise _wrong("wrap", wrap, "a list of class names", "[Block]")
            values["wrap"] = tuple(names)
        _check_count(values, "min_params", 1)
        _check_count(values, "prefetch", 0)
        for name in ("cast_forward_inputs", "reduce_every_micro_batch"):
            if not isinstance(values.get(name, False), bool):
                raise _wrong(name, values[name], "true or false", "true")
        reshard = values.get("reshard_after_forward")
        if reshard is not None and not isinstance(reshard, bool | int):
            raise _wrong("reshard_after_forward", reshard, "true, false or a number of ranks", "true")
        if values.get("wrap") is not None and values.get("min_params") is not None:
            raise ConfigError(
                f"engine.fsdp.wrap={list(values['wrap'])} and engine.fsdp.min_params={values['min_params']} were both "
                "set, and each says how the model is cut",
                hint="--set engine.fsdp.min_params=null",
            )
        return cls(**values)

    def check_ranks(self, shards: int) -> None:
        """Hold ``reshard_after_forward`` against the number of ranks that share one copy.

        Raises:
            ConfigError: It doesn't divide them.
        """
        size = self.reshard_after_forward
        if size is None or isinstance(size, bool):
            return
        if size < 2 or shards % size:
            raise ConfigError(
                f"engine.fsdp.reshard_after_forward was set to {size}, which must be at least 2 and divide the {shards} "
                "ranks that share one copy of the model",
                hint="--set engine.fsdp.reshard_after_forward=true",
            )


def check_replicas(replicate: int, processes: int | None) -> None:
    """``parallel.replicate`` must divide the processes.

    Raises:
        ConfigError: It doesn't; lists what would.
    """
    if processes is None or processes % replicate == 0:
        return
    fitting = [n for n in range(1, processes + 1) if processes % n == 0]
    close = min(fitting, key=lambda n: (abs(n - replicate), n))
    raise ConfigError(
        f"parallel.replicate was set to {replicate}, which doesn't divide the {processes} processes; "
        f"these do: {', '.join(map(str, fitting))}",
        hint=f"--set parallel.replicate={close}",
    )


def choose_replicas(config: Config, size: int, nodes: int) -> tuple[int, str]:
    """How many copies of the model hsdp keeps, and why.

    Args:
        config: ``parallel.replicate`` above 1 is taken as it is.
        size: Number of processes.
        nodes: Number of nodes; each gets a copy, so that parameters are gathered inside it.
    """
    asked = config.parallel.replicate
    if asked > 1:
        return asked, "parallel.replicate"
    if nodes > 1 and size % nodes == 0:
        return nodes, "one for each node"
    if size >= 4 and size % 2 == 0:
        return 2, "parallel.replicate isn't set; two on one node"
    return 1, f"parallel.replicate isn't set, and {size} processes on one node are not split further: the same as fsdp"


def _unknown(name: str, known: list[str]) -> ConfigError:
    if name in ELSEWHERE:
        return ConfigError(
            f"engine.fsdp.{name} was set, but it follows from {ELSEWHERE[name]}", hint=f"--set {ELSEWHERE[name]}=..."
        )
    close = nearest(name, known)
    return ConfigError(
        f"engine.fsdp.{name} was set, but there are: {', '.join(known)}",
        hint=f"--set engine.fsdp.{close}=..." if close else f"remove engine.fsdp.{name}",
    )


def _wrong(name: str, value: Any, wanted: str, example: str) -> ConfigError:
    return ConfigError(
        f"engine.fsdp.{name} was set to {value!r}, but must be {wanted}", hint=f"--set engine.fsdp.{name}={example}"
    )


def _check_count(values: dict[str, Any], name: str, least: int) -> None:
    value = values.get(name)
    if value is None:
        values.pop(name, None)
    elif isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"a whole number, at least {least}", str(max(least, 1)))
