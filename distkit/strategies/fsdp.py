"""Fully sharded data parallelism on torch's own fully_shard (FSDP2): parameters, gradients and optimizer states split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distkit.errors import ConfigError
from distkit.strategies.base import Capabilities, Strategy
from distkit.strategies.fsdp_settings import FsdpSettings, check_replicas, choose_replicas
from distkit.strategies.modules import dress, is_split, named_buffers, trained_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.state import OptimizerLayout, ReadShard, Shard
    from distkit.strategies.fsdp_engine import AgreedGradScaler
    from distkit.strategies.fsdp_meta import DeferredInit
    from distkit.strategies.fsdp_state import FsdpState
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["FSDPStrategy", "HSDPStrategy"]

PRECISIONS = frozenset({"fp32", "bf16", "fp16", "bf16-pure"})


class FSDPStrategy(Strategy):
    """Every parameter split over all ranks by its first dimension, and gathered unit by unit for computing."""

    name = "fsdp"
    averages_gradients = True  # _fsdp_collectives.py, _get_gradient_divide_factors: the mean over the whole mesh
    capabilities = Capabilities(
        summary="fully_shard (FSDP2): parameters, gradients and optimizer states split over the ranks",
        tensor_parallel=True,
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        precisions=PRECISIONS,
        offload=frozenset({"none", "params"}),
        compress=frozenset({"none", "fp16", "bf16"}),
        best_for="models that don't fit one device with their optimizer, without another library",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = FsdpSettings.parse(config.engine.fsdp)
        self._scalers: dict[int, AgreedGradScaler] = {}
        self._trains: dict[int, list[nn.Module]] = {}
        """For each optimizer, by identity, the models whose parameters it steps."""
        self._deferred: DeferredInit | None = None
        self._sync = True
        self._accumulated = False
        """Whether a backward left whole gradients in fully_shard's keeping."""
        self._stale_buffers: set[int] = set()
        """Models whose buffers may differ between ranks, since they were trained."""
        self._used: set[int] = set()
        """Identities of the sharded parameters that got a gradient in this window; only where unused ones are allowed."""
        self._lines: list[str] = []

    # -- before anything starts -------------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; also ``engine.fsdp``."""
        if config.memory.offload == "optimizer":
            raise ConfigError(
                f"memory.offload was set to 'optimizer', but strategy {cls.name!r} keeps optimizer states where the "
                "parameters are, since the optimizer steps the sharded parameters themselves",
                hint="--set memory.offload=params   or --strategy zero2",
            )
        super().check(config, processes=processes)
        FsdpSettings.parse(config.engine.fsdp)

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`."""
        from distkit.world.torch_group import connect_torch

        self.check(self.config, processes=environment.size)
        world = connect_torch(environment, self.config)
        if world.device.type == "mps":
            raise ConfigError(
                f"strategy {self.name!r} works on CUDA devices and CPUs, and this process has 'mps'",
                hint="--set device=cpu   or --strategy single",
            )
        self.world = world
        world.mesh = self._mesh(world)
        self.settings.check_ranks(world.mesh.size(-1))
        return world

    def _mesh(self, world: World) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        if world.collectives.data_group is not None:
            return _mesh_of(world)
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))

    def notes(self) -> list[str]:
        """See :class:`Strategy`."""
        return self._lines

    # -- preparing --------------------------------------------------------------------------------------------------

    @contextmanager
    def init_model(self) -> Iterator[None]:
        """Modules built inside have no memory; ``prepare`` gives each rank its shards of the values that the constructor
        would have given them. The generator of random numbers is not moved on."""
        from distkit.strategies.fsdp_meta import DeferredInit

        if self._deferred is None:
            self._deferred = DeferredInit()
        with self._deferred.recording():
            yield

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`. Activation checkpointing, then compiling, then fully_shard: each around the one before."""
        from distkit.strategies.fsdp_engine import AgreedGradScaler
        from distkit.strategies.fsdp_meta import DeferredInit
        from distkit.strategies.fsdp_units import choose_units
        from distkit.strategies.fsdp_wrap import Blueprint, Sharder, replaced

        world = self._world
        assert world.mesh is not None
        sharder = Sharder(self.config, self.settings, world, world.mesh, precision, self._deferred or DeferredInit())
        blueprints = [Blueprint.of(model) for model in models]
        for model in models:
            units = choose_units(dress(model, self.config, precision), self.settings)
            self._note_units(model, [type(module).__name__ for _, module in units])
            sharder.shard(model, units)
            self._watch_buffers(model)
        sharder.materialise(models, blueprints)
        self.models += models
        before = {
            k: v for model, plan in zip(models, blueprints, strict=True) for k, v in replaced(plan, model).items()
        }
        for optimizer in optimizers:
            sharder.adopt(optimizer, before)
            if precision.name == "fp16":
                self._scalers[id(optimizer)] = AgreedGradScaler(world)
        self.optimizers += optimizers
        if self.config.optim.unused_parameters == "allow":
            self._watch_use(models)
        self._set_sync(models, self._sync)
        return list(models), list(optimizers)

    def _note_units(self, model: nn.Module, kinds: list[str]) -> None:
        count = self._world.mesh.size(-1) if self._world.mesh is not None else 1
        over = f"over {count} rank{'s' if count != 1 else ''}"
        if kinds:
            inner = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            self._lines.append(f"{type(model).__name__} split {over}, in {len(kinds) + 1} units: {inner}, and the rest")
        else:
            self._lines.append(
                f"{type(model).__name__} split {over}, and gathered as one: it has no repeated blocks "
                "(engine.fsdp.wrap or engine.fsdp.min_params cuts it into units)"
            )

    def _watch_buffers(self, model: nn.Module) -> None:
        """Buffers that training changes (BatchNorm's statistics) are rank 0's under ddp, which sends them round before
        every forward. Here they are sent round before they are read: in the first forward of an evaluation, which
        all ranks run as they run every forward, and before state is read."""
        import torch

        if not any(True for _ in named_buffers(model)):
            return

        def before_forward(module: nn.Module, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self._stale_buffers.add(id(module))
            elif not module.training:
                self._refresh_buffers([module])

        model.register_forward_pre_hook(torch.compiler.disable(before_forward))

    def _refresh_buffers(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            if id(model) in self._stale_buffers:
                self._stale_buffers.discard(id(model))
                for _, buffer in named_buffers(model):
                    buffer.data.copy_(self._world.broadcast(buffer.data))

    def _watch_use(self, models: Sequence[nn.Module]) -> None:
        from distkit.strategies.fsdp_engine import watch_gradients

        for model in models:
            watch_gradients(model, self._used)

    # -- one window -------------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        """See :class:`Strategy`; fully_shard reads the flags in the backward."""
        if sync != self._sync:
            self._sync = sync
            self._set_sync(self.models, sync)

    def _set_sync(self, models: Sequence[nn.Module], sync: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        for model in models:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(sync or self.settings.reduce_every_micro_batch)
                model.set_is_last_backward(sync)
                if self.settings.reshard_after_forward is False:  # memory is no concern: gather once a window
                    model.set_reshard_after_backward(sync)

    def backward(self, loss: torch.Tensor, *, optimizer: Optimizer | None = None) -> None:
        """See :class:`Strategy`; fp16 scales the loss by the optimizer's own scale."""
        scaler = self._scaler(optimizer)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if self._sync:
            self._complete_gradients(optimizer)
        else:
            self._accumulated = True

    def _complete_gradients(self, optimizer: Optimizer | None) -> None:
        """What fully_shard leaves out: parameters that aren't split, and those that no rank used."""
        from torch.distributed.tensor import DTensor

        from distkit.strategies.fsdp_engine import average_gradients

        chosen = optimizer or (self.optimizers[0] if self.optimizers else None)
        if chosen is None:
            return
        parameters = trained_parameters(chosen)
        if self.config.optim.unused_parameters == "allow":
            self._forget_unused(parameters)
        average_gradients([p for p in parameters if not isinstance(p, DTensor)], self._world)

    def _forget_unused(self, parameters: list[nn.Parameter]) -> None:
        """Where ranks may use different parameters, fully_shard gives zeros to all. Those that no rank used get None, so
        that weight decay leaves them alone; a whole one that only other ranks used gets zeros."""
        import torch
        from torch.distributed.tensor import DTensor

        here = [id(p) in self._used if isinstance(p, DTensor) else p.grad is not None for p in parameters]
        flags = torch.tensor(here, dtype=torch.int32, device=self._world.device)
        for parameter, anywhere in zip(parameters, self._world.all_reduce(flags, "max").tolist(), strict=True):
            if not anywhere:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def sync_accumulated(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`."""
        from distkit.strategies.fsdp_engine import reduce_accumulated

        before = self._sync
        self.set_gradient_sync(True)
        for model in self._models_of(optimizer):
            reduce_accumulated(model)
        self._complete_gradients(optimizer)
        self.set_gradient_sync(before)

    def unscale(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`."""
        scaler = self._scaler(optimizer)
        if scaler is not None:
            scaler.unscale_(optimizer)

    def scale_gradients(self, optimizer: Optimizer, factor: torch.Tensor | float) -> None:
        """See :class:`Strategy`; one fused pass over this rank's shards."""
        if isinstance(factor, float) and factor == 1.0:
            return
        import torch

        from distkit.strategies.fsdp_engine import local

        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in _gradients(optimizer):
            by_device.setdefault(gradient.device, []).append(local(gradient))
        for device, parts in by_device.items():
            torch._foreach_mul_(parts, factor if isinstance(factor, float) else factor.to(device))

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> torch.Tensor:
        """See :class:`Strategy`."""
        from distkit.strategies.fsdp_engine import global_norm

        trained = [p for p in trained_parameters(optimizer) if p.grad is not None]
        norm = global_norm([p.grad for p in trained if not is_split(p)], self._world)
        if self._world.tensor.size > 1:
            parts = global_norm([p.grad for p in trained if is_split(p)], self._world)
            norm = (norm.square() + self._world.all_reduce(parts.square(), axis="tensor")).sqrt()
        if max_norm != float("inf"):
            self.scale_gradients(optimizer, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """See :class:`Strategy`."""
        from distkit.strategies.fsdp_engine import reshard

        scaler = self._scaler(optimizer)
        stepped = True
        if scaler is None:
            optimizer.step()
        else:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= before
        for model in self._models_of(optimizer):
            reshard(model)
        return stepped

    def zero_grad(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`; also forgets what backwards without a reduction left."""
        optimizer.zero_grad(set_to_none=True)
        if self._accumulated:
            from distkit.strategies.fsdp_engine import drop_accumulated

            drop_accumulated(self.models, trained_parameters(optimizer))
        self._used.difference_update(id(p) for p in trained_parameters(optimizer))

    def without_gradient(self, optimizer: Optimizer) -> list[str]:
        """See :class:`Strategy`; a gradient of which this rank holds no row is one."""
        missing = [p for p in trained_parameters(optimizer) if p.grad is None]
        if not missing:
            return []
        names = self._state().names
        return [names.get(id(p), "?") for p in missing]

    def _scaler(self, optimizer: Optimizer | None) -> AgreedGradScaler | None:
        chosen = optimizer or (self.optimizers[0] if self.optimizers else None)
        return self._scalers.get(id(chosen))

    def _models_of(self, optimizer: Optimizer) -> list[nn.Module]:
        """The models that hold parameters of the optimizer."""
        if id(optimizer) not in self._trains:
            from distkit.strategies.fsdp_engine import holds

            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._trains[id(optimizer)] = [model for model in self.models if holds(model, own)]
        return self._trains[id(optimizer)]

    @property
    def _world(self) -> World:
        assert self.world is not None
        return self.world

    # -- state ------------------------------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :class:`Strategy`; fully_shard works in place."""
        return model

    def modules_with_hooked_arguments(self, model: nn.Module) -> Iterable[nn.Module]:
        """See :class:`Strategy`; every unit."""
        from torch.distributed.fsdp import FSDPModule

        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    def _state(self) -> FsdpState:
        """The state as it is now, every module showing its sharded parameters."""
        from distkit.strategies.fsdp_engine import reshard
        from distkit.strategies.fsdp_state import FsdpState

        for model in self.models:
            reshard(model)
        return FsdpState(self.models, self.optimizers, self._world)

    def masters(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """See :class:`Strategy`; under ``bf16`` gathered parameters are rounded, these are not."""
        from distkit.strategies.fsdp_engine import reshard
        from distkit.strategies.fsdp_state import whole_of

        reshard(model)
        for parameter in model.parameters():
            yield parameter, whole_of(parameter.detach(), self._world)

    def shards(self) -> Iterator[Shard]:
        """See :class:`Strategy`; replicas share the work."""
        self._refresh_buffers(self.models)
        return self._state().shards()

    def optimizer_layouts(self) -> list[OptimizerLayout]:
        """See :class:`Strategy`."""
        return self._state().layouts()

    def load_shards(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """See :class:`Strategy`."""
        self._state().load(read, layouts)
        self._stale_buffers.clear()

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[None]:
        """See :class:`Strategy`; in 16-bit precision they are the rounded ones that the model computes with."""
        from distkit.strategies.fsdp_engine import fsdp_modules, reshard

        for module in fsdp_modules(model):
            module.unshard()
        try:
            yield
        finally:
            reshard(model)

    def model_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """See :class:`Strategy`; the fp32 parameters, one at a time."""
        self._refresh_buffers([model])
        return self._state().gather_model(model)

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """See :class:`Strategy`; also what of parameters and gradients is gathered now."""
        from distkit.memory import state_of
        from distkit.strategies.fsdp_engine import gathered_tensors

        found = state_of(self.models, self.optimizers)
        for model in self.models:
            parameters, gradients = gathered_tensors(model)
            found["parameters"] += parameters
            found["gradients"] += gradients
        return found

    def state_dict(self) -> dict[str, Any]:
        """The loss scales of fp16, one an optimizer."""
        return {"scalers": [self._scalers[id(o)].state_dict() for o in self.optimizers if id(o) in self._scalers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loss scales; a checkpoint of another precision has none, and the scale starts anew."""
        with_scaler = [self._scalers[id(o)] for o in self.optimizers if id(o) in self._scalers]
        for scaler, saved in zip(with_scaler, state.get("scalers", []), strict=False):
            scaler.load_state_dict(saved)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See :class:`Strategy`."""
        self.models.clear()
        self.optimizers.clear()
        self._scalers.clear()
        self._trains.clear()
        if self.world is not None:
            self.world.mesh = None
            self.world.close()


class HSDPStrategy(FSDPStrategy):
    """Sharded inside each replica group, replicated across them: parameters are gathered inside a group only."""

    name = "hsdp"
    capabilities = Capabilities(
        summary="fully_shard on a 2-D mesh: split inside each replica group, copied across groups",
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        precisions=PRECISIONS,
        offload=frozenset({"none", "params"}),
        best_for="several nodes with a slow network between them, when one node's memory holds the split model",
    )

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; also that the replicas divide the processes."""
        super().check(config, processes=processes)
        check_replicas(config.parallel.replicate, processes)

    def _mesh(self, world: World) -> DeviceMesh:
        replicas, why = choose_replicas(self.config, world.size, world.nodes)
        shards = world.size // replicas
        self._lines.append(
            f"{replicas} replica{'s' if replicas != 1 else ''} of {shards} rank{'s' if shards != 1 else ''} each ({why})"
        )
        if replicas == 1:
            return super()._mesh(world)
        import torch.distributed as dist
        from torch import arange
        from torch.distributed.device_mesh import DeviceMesh

        ranks = arange(world.size).reshape(replicas, shards)
        # Made by hand: init_device_mesh gives its groups torch's own time limit instead of timeouts.step_s.
        limit = timedelta(seconds=self.config.timeouts.step_s)
        across = [dist.new_group(column, timeout=limit) for column in ranks.T.tolist()]
        inside = [dist.new_group(row, timeout=limit) for row in ranks.tolist()]
        groups = [across[world.rank % shards], inside[world.rank // shards]]
        return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for p in trained_parameters(optimizer) if p.grad is not None]


def _mesh_of(world: World) -> DeviceMesh:
    """Of the data-parallel ranks, where tensor groups share the layers."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    assert world.collectives.data_group is not None
    ranks = torch.arange(world.size).reshape(-1, world.tensor.size)[:, world.tensor.rank]
    return DeviceMesh.from_group(world.collectives.data_group, world.device.type, mesh=ranks, mesh_dim_names=("shard",))
