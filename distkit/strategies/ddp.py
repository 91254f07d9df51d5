"""DistributedDataParallel: a copy of the model in every process, gradients averaged in buckets during backward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distkit.config.nearest import nearest
from distkit.errors import ConfigError
from distkit.strategies.base import Capabilities
from distkit.strategies.modules import dress, trained_parameters
from distkit.strategies.replicated import ReplicatedStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.strategies.passthrough import OpenDDP
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["DDPStrategy"]

OWN_ARGUMENTS = (
    "module",
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "delay_all_reduce_named_params",
    "self",
)
"""Arguments of DistributedDataParallel that follow from the device and the world, and are not for users to set."""


class DDPStrategy(ReplicatedStrategy):
    """torch's DistributedDataParallel; ``engine.ddp`` holds its arguments, and ``sync_batchnorm``."""

    name = "ddp"
    averages_gradients = True  # its reducer divides by the number of ranks
    capabilities = Capabilities(
        summary="DistributedDataParallel: a whole copy in every process",
        tensor_parallel=True,
        compress=frozenset({"none", "fp16", "bf16"}),
        best_for="models that fit one device with their optimizer: start here",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._wrapped: list[OpenDDP] = []

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; also compares ``engine.ddp`` with what DDP takes, once torch is loaded."""
        super().check(config, processes=processes)
        ddp = config.engine.ddp
        if ddp.get("static_graph") and config.optim.unused_parameters == "allow":
            raise ConfigError(
                "engine.ddp.static_graph=True says that the graph never changes, and optim.unused_parameters=allow that it may",
                hint="--set engine.ddp.static_graph=false",
            )

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`."""
        from distkit.world.torch_group import connect_torch

        self.check(self.config, processes=environment.size)
        self.world = connect_torch(environment, self.config)
        self.rank, self.size = self.world.data.rank, self.world.data.size
        return self.world

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`. Wrapping broadcasts rank 0's parameters and buffers."""
        prepared: list[nn.Module] = []
        own: list[nn.Module] = []
        for model in models:
            model = dress(self._synchronise_norms(model.to(precision.device)), self.config, precision)
            own.append(model)
            if any(p.requires_grad for p in model.parameters()):
                prepared.append(self._wrap(model, precision.device))
            else:  # DDP refuses a module that has nothing to train, like a frozen teacher
                self._broadcast(model)
                prepared.append(model)
        self.keep(own, optimizers, precision)
        return prepared, list(optimizers)

    def _wrap(self, model: nn.Module, device: torch.device) -> OpenDDP:
        from distkit.strategies.passthrough import OpenDDP

        assert self.world is not None
        arguments = {**self._arguments(), "process_group": self.world.collectives.data_group}
        if device.type == "cuda":
            arguments["device_ids"] = [device]
        wrapped = OpenDDP(model, **arguments)
        if not arguments["find_unused_parameters"] and not arguments.get("static_graph"):
            wrapped.settle_buckets()
        hook = self._compression_hook()
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        if self.config.compile:
            wrapped.compile(**self.config.engine.compile)  # around DDP, so that its optimizer splits graphs at buckets
        self._wrapped.append(wrapped)
        return wrapped

    def _arguments(self) -> dict[str, Any]:
        from torch.nn.parallel import DistributedDataParallel

        given = {k: v for k, v in self.config.engine.ddp.items() if k != "sync_batchnorm"}
        known = [n for n in inspect.signature(DistributedDataParallel).parameters if n not in OWN_ARGUMENTS]
        for name in given:
            if name not in known:
                close = nearest(name, [*known, "sync_batchnorm"])
                raise ConfigError(
                    f"engine.ddp.{name} was set, but DistributedDataParallel takes: {', '.join(known)}",
                    hint=f"--set engine.ddp.{close or known[0]}={given[name]}",
                )
        defaults = {
            "gradient_as_bucket_view": True,
            "find_unused_parameters": self.config.optim.unused_parameters == "allow",
        }
        return {**defaults, **given}

    @property
    def sees_outputs(self) -> bool:
        """See :class:`Strategy`; that is how DDP knows which parameters were not used."""
        return self.config.optim.unused_parameters == "allow" or bool(self.config.engine.ddp.get("static_graph"))

    def _synchronise_norms(self, model: nn.Module) -> nn.Module:
        if not self.config.engine.ddp.get("sync_batchnorm"):
            return model
        from torch.nn import SyncBatchNorm

        if next(model.parameters()).device.type == "cpu":
            raise ConfigError(
                "engine.ddp.sync_batchnorm was set, but torch's SyncBatchNorm works on GPUs only, and this run is on the CPU",
                hint="--set engine.ddp.sync_batchnorm=false",
            )
        converted: nn.Module = SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def _compression_hook(self) -> Any:
        if self.config.compress.method == "none":
            return None
        from distkit.strategies.compression import half_hook

        assert self.world is not None
        return half_hook(self.config.compress.method, self.world.collectives.data_group)

    def _broadcast(self, model: nn.Module) -> None:
        assert self.world is not None
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.copy_(self.world.broadcast(tensor.data))

    def set_gradient_sync(self, sync: bool) -> None:
        """See :class:`Strategy`. DDP reads the flag in its forward, so that has to be known before (L7)."""
        for wrapped in self._wrapped:
            wrapped.require_backward_grad_sync = sync

    def sync_accumulated(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`: averages, as the reducer would have done."""
        import torch

        assert self.world is not None
        parameters = trained_parameters(optimizer)
        if self.size == 1 or not parameters:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        for parameter, anywhere in zip(
            parameters, self.world.all_reduce(present, "max", axis="data").tolist(), strict=True
        ):
            if anywhere:
                gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                parameter.grad = self.world.all_reduce(gradient, axis="data").div_(self.size)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :class:`Strategy`."""
        from torch.nn.parallel import DistributedDataParallel

        return model.module if isinstance(model, DistributedDataParallel) else model

    def close(self) -> None:
        """See :class:`Strategy`."""
        self._wrapped.clear()
        if self.world is not None:
            self.world.close()
