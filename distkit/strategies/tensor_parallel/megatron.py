"""megatron-core: importing it, its parallel state and generators, and what it takes to run on a CPU.

Written for 0.16 to 0.19. What differs between them is looked for, and their version numbers are not.

On a CPU megatron-core asks torch.cuda for the present device and for generators. The name ``torch`` is bound to something
that answers for the CPU, in megatron-core's own modules only and only while a run is connected.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from distkit.config.nearest import nearest
from distkit.errors import ConfigError, StrategyUnavailable, UsageError
from distkit.seeds import mix_seed

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.world import World

__all__ = ["Megatron", "before_devices", "import_megatron"]

INSTALL = "pip install 'megatron-core>=0.16'"

ASKS_CUDA = (
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.random",
    "megatron.core.tensor_parallel.utils",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.utils",
)
"""Modules that call torch.cuda in what also works on a CPU."""

OURS = ("tensor_model_parallel_size", "use_cpu_initialization", "perform_initialization")
"""Fields of ModelParallelConfig that follow from the run."""

REFUSED = {
    "sequence_parallel": "activations between split layers are whole on every rank",
    "gradient_accumulation_fusion": "DeepSpeed reads gradients where torch puts them",
    "defer_embedding_wgrad_compute": "DeepSpeed reads gradients when backward ends",
}
"""Fields that are on or off by their nature, with why they stay off."""


class Megatron:
    """megatron-core for one run, from ``connect`` to ``close``.

    Args:
        world: Its tensor and data-parallel ranks become megatron-core's.
        config: ``seed``, ``timeouts.step_s`` and ``engine.megatron`` are used.

    Raises:
        StrategyUnavailable: megatron-core is too old.
        ConfigError: ``engine.megatron`` has what ModelParallelConfig doesn't take, or what can't be.
        UsageError: The script made megatron-core's groups itself, and they are others.
    """

    running: ClassVar[Megatron | None] = None
    """The one whose parallel state there is now; its run may have ended without ``close``."""

    def __init__(self, world: World, config: Config) -> None:
        if Megatron.running is not None:
            Megatron.running.close()
        import_megatron()
        self._undo: list[tuple[ModuleType, str, Any]] = []
        self._owns_state = False
        self._host: _HostGenerators | None = None
        Megatron.running = self
        try:
            if world.device.type == "cpu":
                self._run_on_host()
            self._owns_state = _join(world, config)
            self.settings = _layer_settings(config, world.tensor.size)
            _add_generators(world, config.seed)
        except BaseException:
            self.close()
            raise

    def _run_on_host(self) -> None:
        from megatron.core.tensor_parallel import layers, random

        for name in ASKS_CUDA:
            self._rebind(import_module(name), "torch", _HostTorch())
        self._rebind(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
        self._rebind(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
        # It asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which means nothing here.
        layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
        self._host = _HostGenerators()
        logging.getLogger(random.__name__).addFilter(self._host)

    def _rebind(self, module: ModuleType, name: str, value: Any) -> None:
        self._undo.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def close(self) -> None:
        """Leave megatron-core as it was found; its groups end with the process group."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        if self._owns_state:
            parallel_state.destroy_model_parallel()
        random.get_cuda_rng_tracker().reset()
        if self._host is not None:
            logging.getLogger(random.__name__).removeFilter(self._host)
        for module, name, value in reversed(self._undo):
            setattr(module, name, value)
        self._undo.clear()
        Megatron.running = None

    # -- generators -------------------------------------------------------------------------------------------------

    def rng_states(self) -> dict[str, torch.Tensor]:
        """The states of megatron-core's tracker, by name."""
        return {f"megatron:{name}": state.cpu().clone() for name, state in self._tracker().get_states().items()}

    def restore_rng_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take them back; other names are passed over."""
        kept = {name.removeprefix("megatron:"): s for name, s in states.items() if name.startswith("megatron:")}
        if kept:
            self._tracker().set_states({**self._tracker().get_states(), **kept})

    @staticmethod
    def _tracker() -> Any:
        from megatron.core.tensor_parallel import random

        return random.get_cuda_rng_tracker()


def before_devices(config: Config) -> None:
    """What must be set before CUDA starts: with one queue to the device the all-reduce of input gradients is on its way before
    the weight's gradient is computed (core/tensor_parallel/layers.py)."""
    if config.device != "cpu":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


# -- importing --------------------------------------------------------------------------------------------------------


def import_megatron() -> None:
    """Import it, and see that it has what is used."""
    _stand_in_for_triton()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says one by one what it goes on without
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    wanted = {"tp_group", "disable_grad_reduce", "skip_weight_param_allocation"}
    missing = wanted - set(inspect.signature(ColumnParallelLinear).parameters)
    missing |= {"tp_group"} - set(inspect.signature(RowParallelLinear).parameters)
    if missing:
        raise StrategyUnavailable(
            f"megatron-core {version('megatron-core')} is installed, and its layers take no {', '.join(sorted(missing))}",
            hint=INSTALL,
        )


def _stand_in_for_triton() -> None:
    """0.19 imports triton in one module that every import of it reaches (core/transformer/moe/ops/paged_stash.py:4), also
    where there is none. What is in it is for experts on GPUs."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if name in sys.modules or find_spec("triton") is not None:
        return
    package = find_spec("megatron.core")
    folders = package.submodule_search_locations or () if package is not None else ()
    if any(Path(folder, "transformer", "moe", "ops", "paged_stash.py").is_file() for folder in folders):
        sys.modules[name] = _Empty(name)


class _Empty(ModuleType):
    """A module in which every name that is imported from it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# -- parallel state ---------------------------------------------------------------------------------------------------


def _join(world: World, config: Config) -> bool:
    """Make megatron-core's groups, unless the script did.

    Returns:
        Whether they were made here.
    """
    from megatron.core import parallel_state

    own = not parallel_state.model_parallel_is_initialized()
    if own:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world.tensor.size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(config.timeouts.step_s / 60),
        )
    ranks = torch.arange(world.size).reshape(-1, world.tensor.size)
    expected = {
        "tensor": ranks[world.rank // world.tensor.size].tolist(),
        "data": ranks[:, world.rank % world.tensor.size].tolist(),
    }
    found = {
        "tensor": torch.distributed.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
        "data": torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group()),
    }
    for kind, group in expected.items():
        if found[kind] != group:
            raise UsageError(
                f"the script called initialize_model_parallel, whose {kind} group of rank {world.rank} has ranks {found[kind]}; "
                f"parallel.tensor={world.tensor.size} makes it {group}",
                hint="leave initialize_model_parallel out: distkit.Trainer() makes the groups",
            )
    return own


def _layer_settings(config: Config, size: int) -> Any:
    """The ModelParallelConfig of split layers: ``engine.megatron``, and what follows from the run.

    Layers are made without weights of their own (:mod:`.megatron_layers`), wherever they will compute.
    """
    from megatron.core import ModelParallelConfig

    given = dict(config.engine.megatron)
    known = inspect.signature(ModelParallelConfig).parameters
    for name, value in given.items():
        if name in OURS:
            raise ConfigError(
                f"engine.megatron.{name} was set to {value!r}, and it follows from other settings",
                hint="--set parallel.tensor=N" if name == "tensor_model_parallel_size" else f"leave {name} out",
            )
        if name in REFUSED and value:
            raise ConfigError(
                f"engine.megatron.{name} was set to {value!r}, which can't be: {REFUSED[name]}",
                hint=f"--set engine.megatron.{name}=false",
            )
        if name not in known:
            close = nearest(name, known)
            raise ConfigError(
                f"engine.megatron.{name} was set, and megatron-core's ModelParallelConfig has no such field",
                hint=f"did you mean engine.megatron.{close}?" if close else "leave it out",
            )
    own = {"tensor_model_parallel_size": size, "use_cpu_initialization": True, "perform_initialization": False}
    try:
        return ModelParallelConfig(**{**given, **dict.fromkeys(REFUSED, False), **own})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"megatron-core refuses engine.megatron={given}: {error}", hint="leave it out") from error


# -- generators -------------------------------------------------------------------------------------------------------


def _add_generators(world: World, seed: int) -> None:
    """Start megatron-core's tracker: what it calls model-parallel differs between the ranks of a tensor group, for dropout
    in split layers. The default generator, for dropout in what is whole, is the Trainer's, and stays as it was."""
    from megatron.core.tensor_parallel import random

    devices = [] if world.device.type == "cpu" else [world.device]
    with torch.random.fork_rng(devices):
        random.model_parallel_cuda_manual_seed(mix_seed(seed, world.data.rank))


class _HostGenerators(logging.Filter):
    """On the host one generator does both jobs, so what the tracker warns of is as it should be (random.py, fork)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


class _HostCuda:
    """torch.cuda as megatron-core asks it, answering for the CPU."""

    @property
    def random(self) -> _HostCuda:
        return self

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def get_rng_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _HostTorch:
    """torch, but for its cuda."""

    cuda = _HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
