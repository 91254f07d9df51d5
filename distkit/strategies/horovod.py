"""Horovod: a copy of the model in every process; gradients are averaged by Horovod's background thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distkit.config.nearest import nearest
from distkit.errors import ConfigError
from distkit.strategies.base import Capabilities
from distkit.strategies.horovod_connect import INSTALL, connect_horovod, import_horovod
from distkit.strategies.modules import compile_in_place, dress, parameter_names, trained_parameters
from distkit.strategies.replicated import ReplicatedStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.strategies.horovod_collectives import HorovodCollectives
    from distkit.strategies.horovod_gradients import GradientExchange
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["HorovodStrategy"]

OWN_SETTINGS = ("op", "bucket_cap_mb", "process_sets")
"""Keys of ``engine.horovod`` that this file reads."""

VARIABLES = (
    "autotune",
    "autotune_log",
    "batch_d2d_memcopies",
    "cache_capacity",
    "cycle_time",
    "fusion_threshold",
    "gloo_timeout_seconds",
    "hierarchical_allgather",
    "hierarchical_allreduce",
    "log_level",
    "num_nccl_streams",
    "stall_check_disable",
    "stall_check_time_seconds",
    "stall_shutdown_time_seconds",
    "thread_affinity",
    "timeline",
    "timeline_mark_cycles",
    "torus_allreduce",
)
"""Further keys: each becomes the variable of the same name, such as HOROVOD_CYCLE_TIME (horovod/common/common.h)."""

BUCKET_MB = 25.0
"""As DistributedDataParallel's default."""


class HorovodStrategy(ReplicatedStrategy):
    """Horovod under the window: the modules and optimizers stay the user's own.

    ``engine.horovod``: ``op`` (average or adasum), ``bucket_cap_mb``, ``process_sets`` (lists of ranks, for a script's
    own collectives), and Horovod's variables in lower case without their prefix, such as ``cycle_time: 2``.
    """

    name = "horovod"
    averages_gradients = True
    capabilities = Capabilities(
        summary="Horovod: a whole copy in every process, over Gloo, MPI or NCCL",
        engine="horovod",
        lr_scaling="linear",
        compress=frozenset({"none", "fp16"}),
        install=INSTALL,
        best_for="clusters that run on MPI, and scripts that come from Horovod; else ddp",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.adasum = config.engine.horovod.get("op", "average") == "adasum"
        self.process_sets: list[Any] = []
        """``hvd.ProcessSet`` objects, in the order of ``engine.horovod.process_sets``."""
        self._sync = True
        self._exchanges: dict[int, GradientExchange] = {}
        self._versions: list[tuple[int, ...]] = []

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`."""
        super().check(config, processes=processes)
        given = config.engine.horovod
        known = (*OWN_SETTINGS, *VARIABLES)
        for key in given:
            if key not in known:
                close = nearest(key, known)
                raise ConfigError(
                    f"engine.horovod.{key} was set, but Horovod has no such setting; there are: {', '.join(known)}",
                    hint=f"--set engine.horovod.{close}={given[key]}" if close else "docs/how-to/horovod.md",
                )
        op = given.get("op", "average")
        if op not in ("average", "adasum"):
            raise ConfigError(
                f"engine.horovod.op was set to {op!r}; valid: average, adasum", hint="--set engine.horovod.op=average"
            )
        if op == "adasum":
            _check_adasum(config, processes)

    @property
    def lr_scaling(self) -> str:
        """Adasum keeps the learning rate of one process (Horovod's documentation, "AdaSum", Learning rate)."""
        return "none" if self.adasum else super().lr_scaling

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`."""
        self.check(self.config, processes=environment.size)
        wanted = self.config.engine.horovod.get("process_sets") or []
        if wanted:
            hvd = import_horovod()
            self.process_sets = [hvd.ProcessSet(list(ranks)) for ranks in wanted]
        self.world = connect_horovod(environment, self.config, self._variables(), self.process_sets)
        self.rank, self.size = self.world.rank, self.world.size
        if self.adasum and "mpi" not in self.world.backend and self.size > 1:
            self.world.close()
            raise ConfigError(
                f"engine.horovod.op was set to 'adasum', which Horovod has over MPI only; this run is {self.world.backend}",
                hint="--launcher mpirun   or --set engine.horovod.op=average",
            )
        return self.world

    def notes(self) -> list[str]:
        """What Horovod runs on."""
        hvd = import_horovod()
        built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
        assert self.world is not None
        how = "combined by Adasum" if self.adasum else "averaged"
        return [f"{self.world.backend} (built with {', '.join(built)}), gradients {how}"]

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`. All ranks take rank 0's parameters, buffers and optimizer states."""
        for model in models:
            compile_in_place(dress(model.to(precision.device), self.config, precision), self.config)
        known = len(self.optimizers)
        self.keep(models, optimizers, precision)
        if self.size > 1:
            self._collectives.broadcast_all(
                [
                    (f"{kind}.{index}.{name}", tensor.data)
                    for index, model in enumerate(models)
                    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
                    for name, tensor in named
                ]
            )
            for index, optimizer in enumerate(optimizers, start=known):
                self._share_optimizer(optimizer)
                self._exchanges[id(optimizer)] = self._new_exchange(index)
            self._versions = self._buffer_versions()
        return list(models), list(optimizers)

    # -- one window -------------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        """See :class:`Strategy`; the hooks in the coming backward send gradients, or nothing does."""
        self._sync = sync

    def backward(self, loss: torch.Tensor, *, optimizer: Optimizer | None = None) -> None:
        """See :class:`Strategy`; only the gradients of this optimizer's parameters travel."""
        if optimizer is None and self.optimizers:
            optimizer = self.optimizers[0]
        exchange = self._exchanges.get(id(optimizer))
        if exchange is None or optimizer is None or not self._sync:
            super().backward(loss, optimizer=optimizer)
            return
        with exchange.during_backward(trained_parameters(optimizer)):
            super().backward(loss, optimizer=optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`. A window that ended unforeseen sends its gradients only here."""
        self._finish(optimizer)
        super().unscale(optimizer)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`; nothing may be under way into gradients that are forgotten."""
        exchange = self._exchanges.get(id(optimizer))
        if exchange is not None and exchange.under_way:
            self._finish(optimizer)
        super().zero_grad(optimizer)

    def _finish(self, optimizer: Optimizer) -> None:
        """Gradients are averaged, and buffers that changed (statistics of BatchNorm) are rank 0's again, as with DDP."""
        exchange = self._exchanges.get(id(optimizer))
        if exchange is None:
            return
        versions = self._buffer_versions()
        changed = [now != before for now, before in zip(versions, self._versions, strict=True)]
        anywhere = exchange.finish(trained_parameters(optimizer), changed)
        if any(anywhere):
            modules = [m for m, moved in zip(self._modules_with_buffers(), anywhere, strict=True) if moved]
            self._collectives.broadcast_all(
                [(f"buffer.{name}.{key}", buffer) for name, module in modules for key, buffer in _own_buffers(module)]
            )
        self._versions = versions

    def _new_exchange(self, index: int) -> GradientExchange:
        import torch

        from distkit.strategies.horovod_gradients import GradientExchange

        megabytes = float(self.config.engine.horovod.get("bucket_cap_mb", BUCKET_MB))
        return GradientExchange(
            self._collectives.operations,
            self.size,
            name=f"gradient.{index}",
            bucket_bytes=0 if self.adasum else int(megabytes * 2**20),  # Adasum weighs each parameter by itself
            wire=torch.float16 if self.config.compress.method == "fp16" else None,
            adasum=self.adasum,
            names=lambda: parameter_names(self.models),
        )

    def _modules_with_buffers(self) -> list[tuple[str, nn.Module]]:
        return [
            (f"{index}.{name}", module)
            for index, model in enumerate(self.models)
            for name, module in model.named_modules()
            if any(True for _ in _own_buffers(module))
        ]

    def _buffer_versions(self) -> list[tuple[int, ...]]:
        """Changes with every change of a module's buffers: one entry a module, since BatchNorm's statistics are
        written behind autograd's back and only its counter gets a new version."""
        return [
            tuple(part for _, buffer in _own_buffers(module) for part in (id(buffer), buffer._version))
            for _, module in self._modules_with_buffers()
        ]

    # -- the start --------------------------------------------------------------------------------------------------

    @property
    def _collectives(self) -> HorovodCollectives:
        assert self.world is not None
        collectives: Any = self.world.collectives
        return collectives  # type: ignore[no-any-return]

    def _variables(self) -> dict[str, str]:
        """Horovod's own tensor fusion is off: gradients come in buckets already, see :class:`GradientExchange`."""
        given = {key: value for key, value in self.config.engine.horovod.items() if key in VARIABLES}
        settings = {"fusion_threshold": 0, **given}
        return {
            f"HOROVOD_{key.upper()}": str(int(value)) if isinstance(value, bool) else str(value)
            for key, value in settings.items()
        }

    def _share_optimizer(self, optimizer: Optimizer) -> None:
        """Take rank 0's groups and states, if they differ.

        ``hvd.broadcast_optimizer_state`` would first take a step to create states where there are none, which moves
        the parameters (weight decay) and counts (horovod/torch/functions.py).
        """
        import torch

        from distkit.checkpoint.codec import decode, dtype_from_name, dtype_name, encode

        assert self.world is not None
        tensors: dict[str, torch.Tensor] = {}
        state = encode(optimizer.state_dict(), tensors, "the optimizer's state")
        kinds = {key: [list(tensor.shape), dtype_name(tensor.dtype)] for key, tensor in tensors.items()}
        mine = json.loads(json.dumps({"state": state, "tensors": kinds}))
        first = self.world.broadcast_object(mine)
        if not self.world.any(mine != first or bool(optimizer.state)):
            return
        shared = {
            key: tensors[key].cpu().contiguous() if self.is_main else torch.empty(shape, dtype=dtype_from_name(dtype))
            for key, (shape, dtype) in first["tensors"].items()
        }
        self._collectives.broadcast_all([(f"optimizer.{key}", tensor) for key, tensor in shared.items()])
        if not self.is_main:
            optimizer.load_state_dict(decode(first["state"], shared))

    def close(self) -> None:
        """See :class:`Strategy`."""
        for exchange in self._exchanges.values():
            exchange.remove()
        self._exchanges.clear()
        if self.world is not None:
            self.world.close()


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _check_adasum(config: Config, processes: int | None) -> None:
    if processes is not None and processes & (processes - 1):
        raise ConfigError(
            f"engine.horovod.op was set to 'adasum', which takes 2, 4, 8 ... processes, but there are {processes}",
            hint=f"--nproc {2 ** (processes.bit_length() - 1)}   or --set engine.horovod.op=average",
        )
    if config.compress.method != "none":
        raise ConfigError(
            f"compress.method={config.compress.method} divides before rounding, and Adasum has no divisor",
            hint="--set compress.method=none",
        )
