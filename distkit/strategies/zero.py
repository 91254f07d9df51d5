"""DeepSpeed ZeRO: optimizer states (1), gradients too (2) and parameters too (3) split over the ranks."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distkit.errors import ConfigError, OutOfStepError, StrategyUnavailable, UsageError
from distkit.state import clean_name
from distkit.strategies.base import Capabilities, Strategy
from distkit.strategies.zero_config import deepspeed_config

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.state import OptimizerLayout, ReadShard, Shard
    from distkit.strategies.buffers import BufferWatch
    from distkit.strategies.zero_state import ZeroState
    from distkit.strategies.zero_units import Unit
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["Zero1Strategy", "Zero2Strategy", "Zero3Strategy", "ZeroStrategy"]

INSTALL = "pip install 'distkit[deepspeed]'"

OLDEST = (0, 19, 8)
"""The first version whose ``managed_gradient_accumulation: false`` covers stages 1 to 3 and offload."""


class ZeroStrategy(Strategy):
    """One engine of DeepSpeed for each optimizer and its models; ``engine.deepspeed`` is merged over its JSON."""

    stage: ClassVar[int]
    averages_gradients = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.units: list[Unit] = []
        """One an optimizer, in the optimizers' order."""
        self._inner: dict[int, nn.Module] = {}
        self._buffers: BufferWatch | None = None

    # -- before anything starts -------------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; also holds ``engine.deepspeed`` against the portable keys."""
        super().check(config, processes=processes)
        _check_version(cls.name)
        cls.engine_config(config, processes)
        if config.precision == "bf16-pure" and config.memory.offload != "none":
            raise ConfigError(
                f"precision=bf16-pure and memory.offload={config.memory.offload} were set, but DeepSpeed steps bf16 masters in "
                "host memory with an optimizer of its own only",
                hint="--set precision=bf16   or --set memory.offload=none",
            )
        if config.precision == "fp16" and config.device == "cpu" and not _cpu_computes_fp16():
            raise _no_fp16("this CPU")

    @classmethod
    def engine_config(cls, config: Config, processes: int | None) -> dict[str, Any] | None:
        """DeepSpeed's JSON, as far as it is known without a model."""
        data_size = None if processes is None else processes // config.parallel.tensor
        return deepspeed_config(config, stage=cls.stage, data_size=data_size)

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`."""
        from distkit.world.torch_group import connect_torch

        self.check(self.config, processes=environment.size)
        self.world = connect_torch(environment, self.config)
        if self.world.device.type == "mps":
            raise ConfigError(
                f"strategy {self.name!r} works on CUDA devices and CPUs, and this process has 'mps'",
                hint="--set device=cpu   or --strategy single",
            )
        from distkit.strategies.zero_import import import_deepspeed

        import_deepspeed(self.world.device.type)
        from distkit.strategies.zero_engine import computes_fp16, join

        join(self.world)
        if self.config.precision == "fp16" and not computes_fp16():
            raise _no_fp16(f"this {self.world.device.type.upper()}")
        return self.world

    def notes(self) -> list[str]:
        """See :class:`Strategy`."""
        lines = [
            f"DeepSpeed {version('deepspeed')}, ZeRO stage {self.stage}: distkit config show --engine deepspeed   prints its JSON"
        ]
        if self.config.memory.offload != "none":
            names = ", ".join(type(unit.own).__name__ for unit in self.units)
            lines.append(f"optimizer states lie in host memory, and {names} steps them there")
        return lines

    # -- preparing --------------------------------------------------------------------------------------------------

    def init_model(self) -> AbstractContextManager[None]:
        """Stage 3 cuts each parameter as soon as it is made (deepspeed.zero.Init), so no rank holds the whole model."""
        if self.stage < 3:
            return nullcontext()
        from distkit.strategies.zero_engine import split_at_birth

        return split_at_birth(self._settings(None))

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """See :class:`Strategy`. A model and its optimizer must come in one call; models without one are replicated."""
        from distkit.strategies.buffers import BufferWatch
        from distkit.strategies.modules import compile_in_place, dress
        from distkit.strategies.zero_optimizer import refuse_whole_tensor_optimizers
        from distkit.strategies.zero_units import assign_models, refuse_empty_parameters

        assert self.world is not None
        self._buffers = self._buffers or BufferWatch(self.world)
        for optimizer in optimizers:
            refuse_whole_tensor_optimizers(optimizer, self.name)
        refuse_empty_parameters(models, optimizers, self.name, cut=self.stage == 3)
        trained = assign_models(models, optimizers, self.name)
        self.models += models
        prepared: dict[int, nn.Module] = {}
        for number, model in enumerate(models):
            dress(model, self.config, precision)
            if not any(number in numbers for numbers in trained):
                prepared[number] = self._replicate(model, precision.device)
        stepping = []
        for optimizer, numbers in zip(optimizers, trained, strict=True):
            unit = self._start([models[n] for n in numbers], optimizer, precision)
            prepared.update(zip(numbers, _callable_modules(unit), strict=True))
            stepping.append(unit.own)
        self.optimizers += stepping
        for number, model in enumerate(models):
            self._buffers.watch(model)
            compile_in_place(model, self.config)
            self._inner[id(prepared[number])] = model
        return [prepared[n] for n in range(len(models))], stepping

    def _start(self, models: list[nn.Module], optimizer: Optimizer, precision: Precision) -> Unit:
        from distkit.strategies.modules import parameter_names
        from distkit.strategies.zero_compile import load_async_io
        from distkit.strategies.zero_cpu_adam import host_optimizer
        from distkit.strategies.zero_engine import Bundle, start_engine
        from distkit.strategies.zero_partitions import numel_of
        from distkit.strategies.zero_units import Unit, stepped_parameters

        assert self.world is not None
        stepped = stepped_parameters(optimizer)
        names = parameter_names(self.models)
        group_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        originals = self._originals(stepped) if precision.mixed else {}
        optimizer = host_optimizer(optimizer, self.config, self.world)
        module = models[0] if len(models) == 1 else Bundle(models)
        settings = self._settings(numel_of(stepped))
        if settings["zero_optimization"].get("offload_optimizer", {}).get("device") == "nvme":
            load_async_io(self.world)
        engine, layout = start_engine(module, optimizer, settings, self.world)
        unit = Unit(models, optimizer, group_names, stepped, engine, layout)
        self.units.append(unit)
        self._set_masters(unit, originals)
        used = unit.partitioned.used
        unit.hooks = [p.register_post_accumulate_grad_hook(lambda p: used.add(id(p))) for p in stepped]
        return unit

    def _settings(self, trained: int | None) -> dict[str, Any]:
        assert self.world is not None
        return deepspeed_config(self.config, stage=self.stage, data_size=self.world.data.size, trained=trained)

    def _originals(self, parameters: Sequence[nn.Parameter]) -> dict[int, torch.Tensor]:
        """The fp32 values on the host: DeepSpeed rounds parameters to 16 bits and makes the masters of those."""
        import torch

        whole = [p for p in parameters if p.dtype is torch.float32 and not hasattr(p, "ds_id")]
        return {id(p): p.data.cpu() for p in whole}

    def _set_masters(self, unit: Unit, values: dict[int, torch.Tensor]) -> None:
        """Give masters rank 0's fp32 values, one parameter at a time."""
        assert self.world is not None
        pieces = [(partition, piece) for partition in unit.layout.partitions for piece in partition.pieces]
        for parameter in unit.stepped:
            value = values.pop(id(parameter), None)
            if value is None:
                continue
            whole = self.world.broadcast(value.to(self.world.device), axis="data").reshape(-1)
            for partition, piece in pieces:
                if piece.parameter is parameter:
                    with unit.layout.resident(partition, write=True):
                        stretch = whole[piece.start : piece.start + piece.length]
                        partition.master.data[piece.offset : piece.offset + piece.length].copy_(stretch)

    def _replicate(self, model: nn.Module, device: torch.device) -> nn.Module:
        """A model that nothing trains: a copy on every rank, rank 0's."""
        assert self.world is not None
        if any(hasattr(p, "ds_id") for p in model.parameters()):
            raise UsageError(
                f"{type(model).__name__} was built under trainer.init_model(), so it lies in pieces on all ranks, and has no "
                "optimizer whose engine could put them together",
                hint="build it outside of trainer.init_model(), or prepare it in one call with its optimizer",
            )
        model.to(device)
        for tensor in model.parameters():
            tensor.data.copy_(self.world.broadcast(tensor.data, axis="data"))
        return model

    # -- one window -------------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        """Nothing to say: stage 1 reduces when the window ends, 2 and 3 in every backward, since no rank has room for
        whole gradients."""

    def backward(self, loss: torch.Tensor, *, optimizer: Optimizer | None = None) -> None:
        """See :class:`Strategy`; fp16 scales the loss by DeepSpeed's own loss scale."""
        unit = self._unit(optimizer)
        for other in self.units:
            if other is not unit:
                other.engine.expect_foreign_backward()
        unit.engine.scale_losses()
        unit.engine.backward(loss, scale_wrt_gas=False)
        for other in self.units:
            other.engine.backward_is_over()

    def unscale(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`."""
        unit = self._closed(optimizer)
        scale = unit.engine.take_loss_scale()
        if scale != 1.0:
            self.scale_gradients(optimizer, 1.0 / scale)

    def scale_gradients(self, optimizer: Optimizer, factor: torch.Tensor | float) -> None:
        """See :class:`Strategy`; one pass over this rank's partitions."""
        if isinstance(factor, float) and factor == 1.0:
            return
        for partition in self._closed(optimizer).layout.partitions:
            if partition.gradient is not None:
                same_place = factor if isinstance(factor, float) else factor.to(partition.gradient.device)
                partition.gradient.mul_(same_place)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> torch.Tensor:
        """See :class:`Strategy`; the squares of all ranks' partitions are summed, so it's the one-process norm."""
        import torch

        from distkit.strategies.modules import is_split

        assert self.world is not None
        world = self.world
        whole: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []  # of layers that a tensor group shares
        for piece, gradient in self._closed(optimizer).partitioned.active_gradients():
            (parts if is_split(piece.parameter) else whole).append(gradient)

        def squares(gradients: list[torch.Tensor]) -> torch.Tensor:
            norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)) if gradients else torch.zeros(1)
            return norms.square().sum().to(world.device)

        total = squares(whole) + self.world.all_reduce(squares(parts), axis="tensor")
        norm = self.world.all_reduce(total, axis="data").sqrt()
        if max_norm != float("inf"):
            self.scale_gradients(optimizer, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """See :class:`Strategy`."""
        unit = self._closed(optimizer)
        unit.partitioned.begin()
        unit.engine.step()
        return bool(unit.engine.was_step_applied())

    def zero_grad(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`; nothing to do where no backward has run since."""
        unit = self._unit(optimizer)
        if unit.partitioned.used or unit.engine.window_closed:
            unit.layout.forget_gradients()
            unit.partitioned.used.clear()
            for parameter in unit.parameters():
                parameter.grad = None  # of those that want a gradient and have no optimizer
        unit.engine.begin_window()

    def without_gradient(self, optimizer: Optimizer) -> list[str]:
        """See :class:`Strategy`."""
        from distkit.strategies.modules import parameter_names

        unit = self._unit(optimizer)
        names = parameter_names(self.models)
        return [names[id(p)] for p in unit.stepped if id(p) not in unit.partitioned.used]

    def _unit(self, optimizer: Optimizer | None) -> Unit:
        return next(unit for unit in self.units if optimizer is None or unit.own is optimizer)

    def _closed(self, optimizer: Optimizer) -> Unit:
        """The optimizer's unit, its gradients reduced."""
        unit = self._unit(optimizer)
        if not unit.engine.window_closed:
            if self.config.optim.unused_parameters == "allow":
                self._refuse_different_use(unit)
            unit.engine.close_window()
            unit.layout.collect_gradients()
        return unit

    def _refuse_different_use(self, unit: Unit) -> None:
        """DeepSpeed puts what got a gradient into buckets one after the other, so ranks that used different parameters
        would add up gradients of different ones without a word."""
        import torch

        assert self.world is not None
        if self.world.data.size == 1:
            return
        used = torch.tensor([id(p) in unit.partitioned.used for p in unit.stepped], dtype=torch.int32)
        most, least = self.world.all_reduce(torch.stack([used, -used]), "max", axis="data")
        if torch.equal(most, -least):
            return
        from distkit.strategies.modules import parameter_names

        names = parameter_names(self.models)
        differ = [names[id(p)] for p, a, b in zip(unit.stepped, most, -least, strict=True) if a != b]
        raise OutOfStepError(
            f"{len(differ)} parameters took part in the loss on some ranks only, which strategy {self.name!r} can't add up: "
            f"{', '.join(differ[:5])}",
            hint="--strategy ddp   or add 0 * parameter.sum() to the loss where a parameter isn't used",
        )

    # -- state ------------------------------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :class:`Strategy`."""
        return self._inner.get(id(model), model)

    def shards(self) -> Iterator[Shard]:
        """See :class:`Strategy`."""
        self._refresh_buffers()
        return self._state().shards()

    def optimizer_layouts(self) -> list[OptimizerLayout]:
        """See :class:`Strategy`; called by all ranks, since each knows the state of its pieces only."""
        return self._state().layouts()

    def load_shards(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """See :class:`Strategy`."""
        self._state().load(read, layouts)
        if self._buffers is not None:
            self._buffers.restored()

    def global_shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """See :class:`Strategy`."""
        shapes = super().global_shapes(model)
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "ds_shape"):
                shapes[clean_name(name)] = tuple(parameter.ds_shape)
        return shapes

    def full_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :class:`Strategy`; in 16-bit precision they are the rounded ones that the model computes with."""
        inner = self.unwrap(model)
        if self.stage < 3 or not any(hasattr(p, "ds_id") for p in inner.parameters()):
            return nullcontext()
        from distkit.strategies.zero_engine import gathered

        return gathered(list(inner.parameters()))

    def model_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """See :class:`Strategy`; the fp32 masters, one parameter at a time."""
        self._refresh_buffers()
        return self._state().gather_model(self.unwrap(model))

    def masters(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """See :class:`Strategy`; in 16-bit precision parameters are rounded from them."""
        return self._state().masters(self.unwrap(model))

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """See :class:`Strategy`; also what lies in DeepSpeed's flat buffers. Its communication buckets are not in it."""
        found = super().state_tensors()
        for unit in self.units:
            for kind, tensors in unit.layout.state_tensors().items():
                found[kind] += tensors
        return found

    def _refresh_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.refresh(self.models)

    def state_dict(self) -> dict[str, Any]:
        """The loss scales of fp16, one an optimizer."""
        return {"loss_scales": [unit.engine.loss_scale_state() for unit in self.units]} if self._scales_losses else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loss scales; a checkpoint of another precision or strategy has none, and the scale starts anew."""
        if self._scales_losses:
            for unit, saved in zip(self.units, state.get("loss_scales", []), strict=False):
                unit.engine.load_loss_scale_state(saved)

    @property
    def _scales_losses(self) -> bool:
        return self.config.precision == "fp16"

    def _state(self) -> ZeroState:
        from distkit.strategies.zero_state import ZeroState

        assert self.world is not None
        return ZeroState(self.models, self.units, self.world)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See :class:`Strategy`."""
        if self.world is None:
            return
        from distkit.strategies.zero_engine import leave, release

        for unit in self.units:
            release(unit)
        self.units.clear()
        self.models.clear()
        self.optimizers.clear()
        self._inner.clear()
        leave()
        self.world.close()


class Zero1Strategy(ZeroStrategy):
    """Stage 1: optimizer states are split."""

    name = "zero1"
    stage = 1
    capabilities = Capabilities(
        summary="DeepSpeed ZeRO 1: optimizer states split over the ranks",
        engine="deepspeed",
        tensor_parallel=True,
        shards=frozenset({"optimizer"}),
        offload=frozenset({"none", "optimizer"}),
        compress=frozenset({"none", "fp16", "bf16"}),
        install=INSTALL,
        best_for="models that fit one device, but not with their optimizer",
    )


class Zero2Strategy(ZeroStrategy):
    """Stage 2: optimizer states and gradients are split."""

    name = "zero2"
    stage = 2
    capabilities = Capabilities(
        summary="DeepSpeed ZeRO 2: optimizer states and gradients split over the ranks",
        engine="deepspeed",
        tensor_parallel=True,
        shards=frozenset({"gradients", "optimizer"}),
        offload=frozenset({"none", "optimizer"}),
        compress=frozenset({"none", "fp16", "bf16"}),
        install=INSTALL,
        best_for="the same with gradients out of the way; offload of the optimizer to host memory",
    )


class Zero3Strategy(ZeroStrategy):
    """Stage 3: optimizer states, gradients and parameters are split."""

    name = "zero3"
    stage = 3
    capabilities = Capabilities(
        summary="DeepSpeed ZeRO 3: parameters, gradients and optimizer states split over the ranks",
        engine="deepspeed",
        tensor_parallel=True,
        shards=frozenset({"parameters", "gradients", "optimizer"}),
        offload=frozenset({"none", "optimizer", "params"}),
        compress=frozenset({"none", "fp16", "bf16"}),
        install=INSTALL,
        best_for="models that don't fit one device; with offload, devices much smaller than the model",
    )


def _callable_modules(unit: Unit) -> list[nn.Module]:
    """What the script calls in its models' place."""
    from distkit.strategies.zero_engine import ZeroModule

    engine: Any = unit.engine
    if len(unit.models) == 1:
        return [ZeroModule(unit.models[0], engine)]
    return [ZeroModule(model, partial(engine, index)) for index, model in enumerate(unit.models)]


def _check_version(strategy: str) -> None:
    """Older ones can't leave the accumulation boundary to the caller in every stage and with offload."""
    found = version("deepspeed")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if numbers < OLDEST:
        raise StrategyUnavailable(
            f"strategy {strategy!r} needs DeepSpeed {'.'.join(map(str, OLDEST))} or newer, and {found} is installed",
            hint=INSTALL,
        )


def _cpu_computes_fp16() -> bool:
    """Whether oneDNN can compute in fp16 on this CPU, by its flags; true where they can't be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    wanted = ("avx512_fp16", "amx_fp16", "avx_ne_convert")
    return platform.machine() not in ("x86_64", "AMD64") or any(flag in text for flag in wanted)


def _no_fp16(where: str) -> ConfigError:
    return ConfigError(
        f"precision was set to 'fp16', but DeepSpeed can't compute in fp16 on {where}", hint="--set precision=bf16"
    )
