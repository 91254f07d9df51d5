"""Applying fully_shard to a model, and pointing its optimizer at the parameters that come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from distkit.errors import StrategyUnavailable, UsageError
from distkit.state import clean_name
from distkit.strategies.fsdp_engine import RoundingReduceScatter, fsdp_modules, local
from distkit.strategies.fsdp_meta import DeferredInit, View
from distkit.strategies.fsdp_settings import FsdpSettings
from distkit.strategies.fsdp_state import like_parameter, region_of
from distkit.strategies.fsdp_units import Unit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.world import World

__all__ = ["Blueprint", "Sharder", "replaced"]

REFUSED = ("Adafactor", "Rprop")
"""Their in-place arithmetic has no meaning for DTensors in torch 2.13: aten.pow_ on a norm, aten.index_put_."""

WANTS_ROWS = ("Muon",)
"""With fewer rows than ranks torch 2.13 replicates the result of its matrix products, and can't add that to the split
momentum in place (aten.add_.Tensor, "in-place operations that require placement changes")."""

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Blueprint:
    """What of a model must be remembered while it is wrapped.

    Args:
        names: Name of each parameter by identity; the first name of a tied one.
        ties: For each further name of a tied parameter its first name.
        views: What the meta tensors among parameters and buffers looked like when the constructor was done, by name.
    """

    names: dict[int, str]
    ties: dict[str, str]
    views: dict[str, View]

    @classmethod
    def of(cls, model: nn.Module) -> Blueprint:
        """Note a model, before anything is done to it."""
        names: dict[int, str] = {}
        ties: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            if first != name:
                ties[name] = first
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return cls(names, ties, {name: View.of(tensor) for name, tensor in tensors if tensor.is_meta})


class Sharder:
    """Shards models.

    Args:
        config: ``memory.offload``, ``compress.method``, ``compile``, ``optim.unused_parameters`` are used.
        settings: ``engine.fsdp``.
        world: All ranks.
        mesh: The mesh that parameters are split over.
        precision: For the compute dtype.
        deferred: The notes of models that were built under ``init_model``.
    """

    def __init__(
        self,
        config: Config,
        settings: FsdpSettings,
        world: World,
        mesh: DeviceMesh,
        precision: Precision,
        deferred: DeferredInit,
    ) -> None:
        self.config, self.settings, self.world, self.mesh = config, settings, world, mesh
        self.precision, self.deferred = precision, deferred

    # -- wrapping ---------------------------------------------------------------------------------------------------

    def shard(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Apply fully_shard to the units, inner ones first, and to the model itself; in place.

        Each unit goes to the device, takes rank 0's values and is split before the next one, so that the device never
        holds more than one whole unit.
        """
        arguments = self._arguments(self._stays_whole(model))
        if self.config.compile:
            outermost = [m for name, m in units if not any(name.startswith(other + ".") for other, _ in units)]
            for module in outermost or [model]:
                module.compile(**self.config.engine.compile)  # without a wrapper, so that names stay
        taken: set[int] = set()
        for module in [*(module for _, module in reversed(units)), model]:
            self._take_main_values(module, taken)
            _fully_shard(module, arguments)
        self._set_up_traffic(model, units)

    def _stays_whole(self, model: nn.Module) -> set[nn.Parameter]:
        """Parameters that every rank keeps: scalars, which fully_shard can't split (_fsdp_param.py, "Shard dim 0 is
        invalid for 0D tensor"), empty ones, whose gradients it can't put together (_fsdp_collectives.py, "_chunk_cat
        expects non-empty tensor"), and BatchNorm's in 16-bit compute, since it wants the dtype of its running
        statistics."""
        whole = {p for p in model.parameters() if p.dim() == 0 or p.numel() == 0}
        if self.precision.mixed:
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    whole.update(module.parameters(recurse=False))
        return whole

    def _arguments(self, whole: set[nn.Parameter]) -> dict[str, Any]:
        mixed = self.precision.mixed
        offload = self.config.memory.offload == "params"
        arguments: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.precision.compute_dtype if mixed else None,
                reduce_dtype=torch.float32 if mixed else None,
                cast_forward_inputs=self.settings.cast_forward_inputs,
            ),
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda") if offload else OffloadPolicy()
            ),
        }
        if self.settings.reshard_after_forward is not None:
            arguments["reshard_after_forward"] = self.settings.reshard_after_forward
        if whole:
            arguments["ignored_params"] = whole
        return arguments

    @torch.no_grad()
    def _take_main_values(self, module: nn.Module, taken: set[int]) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_meta or isinstance(tensor, DTensor) or id(tensor) in taken:
                continue
            taken.add(id(tensor))
            tensor.data = tensor.data.to(self.world.device).contiguous()
            tensor.data.copy_(self.world.broadcast(tensor.data, axis="data"))

    def _set_up_traffic(self, model: nn.Module, units: Sequence[Unit]) -> None:
        ahead = self.settings.prefetch
        order: list[FSDPModule] = [module for _, module in units if isinstance(module, FSDPModule)]
        if ahead and order and isinstance(model, FSDPModule):
            model.set_modules_to_forward_prefetch(order[:ahead])
            for place, unit in enumerate(order):
                unit.set_modules_to_forward_prefetch(order[place + 1 : place + 1 + ahead])
                unit.set_modules_to_backward_prefetch(order[max(0, place - ahead) : place][::-1])
        if self.config.compress.method != "none":
            for unit in fsdp_modules(model):
                if not hasattr(unit, "set_custom_reduce_scatter"):
                    raise StrategyUnavailable(
                        f"compress.method was set to {self.config.compress.method!r}, but fully_shard of torch "
                        f"{torch.__version__} takes no reduce-scatter of others",
                        hint="pip install --upgrade torch   or --set compress.method=none",
                    )
                unit.set_custom_reduce_scatter(RoundingReduceScatter(HALF[self.config.compress.method]))  # type: ignore[arg-type]
        if self.config.optim.unused_parameters == "allow":
            for unit in fsdp_modules(model):
                if hasattr(unit, "set_reduce_scatter_unused_params"):
                    unit.set_reduce_scatter_unused_params(True, recurse=False)

    # -- models without values --------------------------------------------------------------------------------------

    def materialise(self, models: Sequence[nn.Module], blueprints: Sequence[Blueprint]) -> None:
        """Give memory to what is on the meta device, tie again what was tied, and fill in the constructor's values.

        Raises:
            UsageError: Tensors that were put on the meta device in another way than by ``init_model``.
        """
        wanted: dict[int, list[Callable[[torch.UntypedStorage], None]]] = {}
        for model, blueprint in zip(models, blueprints, strict=True):
            if not blueprint.views:
                continue
            unknown = [name for name, view in blueprint.views.items() if not self.deferred.knows(view)]
            if unknown:
                raise UsageError(
                    f"{len(unknown)} tensors of {type(model).__name__} are on the meta device, and nothing says what "
                    f"values they are to get: {', '.join(unknown[:5])}",
                    hint="with trainer.init_model(): model = ...",
                )
            model._apply(self._allocate)  # as to_empty() does, but only to those that are on the meta device
            for name, first in blueprint.ties.items():  # DTensors were swapped in place, but plain ones came apart
                owner, _, attribute = name.rpartition(".")
                model.get_submodule(owner)._parameters[attribute] = model.get_parameter(first)
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, view in blueprint.views.items():
                wanted.setdefault(view.storage, []).append(_filler(view, tensors[name]))
        if wanted:
            self.deferred.replay(
                {key: _each(fillers) for key, fillers in wanted.items()},
                lambda state: self.world.broadcast(state, axis="data"),
            )

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        on_host = self.config.memory.offload == "params" and isinstance(tensor, DTensor)
        return torch.empty_like(tensor, device="cpu" if on_host else self.world.device)

    # -- optimizers -------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer, before: dict[int, nn.Parameter]) -> None:
        """Put the live parameters into the optimizer, with what state it already has for them.

        Args:
            optimizer: As the script made it.
            before: For each parameter that it may hold, by identity, the one that took its place.

        Raises:
            UsageError: The optimizer can't step sharded parameters.
        """
        name = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in (*REFUSED, *WANTS_ROWS)), None)
        if name in REFUSED:
            raise UsageError(
                f"{name} can't step parameters that are split over ranks: torch's DTensor lacks operations that it uses",
                hint="--strategy ddp   or another optimizer, such as AdamW",
            )
        state = {before.get(id(p), p): values for p, values in optimizer.state.items()}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"][:] = [before.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list
            if name in WANTS_ROWS:
                self._refuse_few_rows(name, group["params"])
        for parameter, values in state.items():
            optimizer.state[parameter] = {k: self._adopt_field(parameter, v) for k, v in values.items()}

    def _refuse_few_rows(self, name: str, parameters: Sequence[nn.Parameter]) -> None:
        ranks = self.mesh.size(-1)
        few = [p for p in parameters if isinstance(p, DTensor) and p.shape[0] < ranks]
        if few:
            raise UsageError(
                f"{name} can't step {len(few)} matrices that have fewer rows than the {ranks} ranks they are split over; the "
                f"first has the shape {tuple(few[0].shape)}",
                hint=f"give them to another optimizer, or take fewer ranks: --nproc {min(p.shape[0] for p in few)}",
            )

    def _adopt_field(self, parameter: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return value
        value = self.world.broadcast(value, axis="data")
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            return like_parameter(value[region_of(parameter).slices].clone(), parameter)
        return value


def _fully_shard(module: nn.Module, arguments: dict[str, Any]) -> None:
    try:
        fully_shard(module, **arguments)
    except TypeError as error:
        if "ignored_params" not in str(error):
            raise
        raise StrategyUnavailable(
            f"{len(arguments['ignored_params'])} parameters can't be split (scalars, empty ones, or BatchNorm's in 16 "
            f"bits), and "
            f"fully_shard of torch {torch.__version__} can't leave them out",
            hint="pip install --upgrade torch",
        ) from error


def _filler(view: View, tensor: torch.Tensor) -> Callable[[torch.UntypedStorage], None]:
    region = region_of(tensor)

    def fill(storage: torch.UntypedStorage) -> None:
        with torch.no_grad():
            local(tensor).copy_(view.on(storage)[region.slices])

    return fill


def _each(
    fillers: Sequence[Callable[[torch.UntypedStorage], None]],
) -> Callable[[torch.UntypedStorage], None]:
    def fill(storage: torch.UntypedStorage) -> None:
        for one in fillers:
            one(storage)

    return fill


def replaced(blueprint: Blueprint, model: nn.Module) -> dict[int, nn.Parameter]:
    """For each parameter before wrapping, by identity, the one of the same name now."""
    now = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    return {identity: now[clean_name(name)] for identity, name in blueprint.names.items()}
