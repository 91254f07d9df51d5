"""What the strategies share that keep a whole copy of model and optimizer on every rank: single, dp, ddp, horovod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from distkit.state import OptimizerLayout, ReadShard, Region, Shard, clean_name
from distkit.strategies.base import Strategy
from distkit.strategies.modules import group_name, is_split, named_buffers, parameter_names, trained_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from distkit.config import Config
    from distkit.precision import Precision

__all__ = ["ReplicatedStrategy"]


class ReplicatedStrategy(Strategy):
    """Whole copies everywhere: gradients, steps and state in plain torch terms."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rank, self.size = 0, 1
        self.models: list[nn.Module] = []
        """The users' own modules, unwrapped."""
        self.optimizers: list[Optimizer] = []
        self._precision: Precision | None = None
        self._scalers: dict[int, torch.amp.GradScaler] = {}

    def keep(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision) -> None:
        """Remember what was prepared; called by ``prepare``."""
        self._precision = precision
        self.models += models
        self.optimizers += optimizers
        for optimizer in optimizers:
            scaler = precision.new_scaler()
            if scaler is not None:
                self._scalers[id(optimizer)] = scaler

    # -- one window -------------------------------------------------------------------------------------------------

    def set_gradient_sync(self, sync: bool) -> None:
        """Nothing travels in one process."""

    def backward(self, loss: torch.Tensor, *, optimizer: Optimizer | None = None) -> None:
        """See :class:`Strategy`; fp16 scales the loss by the optimizer's own scale."""
        scaler = self._scaler(optimizer)
        (loss if scaler is None else scaler.scale(loss)).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`."""
        scaler = self._scaler(optimizer)
        if scaler is not None:
            scaler.unscale_(optimizer)

    def scale_gradients(self, optimizer: Optimizer, factor: torch.Tensor | float) -> None:
        """See :class:`Strategy`; one fused pass over the gradients."""
        if isinstance(factor, float) and factor == 1.0:
            return
        import torch

        gradients = _gradients(optimizer)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> torch.Tensor:
        """See :class:`Strategy`; every rank holds all gradients, but for those of layers that a tensor group shares."""
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        parameters = trained_parameters(optimizer)
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None and not is_split(p)])
        parts = [p.grad for p in parameters if p.grad is not None and is_split(p)]
        if parts and self.world is not None:
            squares = self.world.all_reduce(get_total_norm(parts).square().to(norm.device), axis="tensor")
            norm = (norm.square() + squares).sqrt()
        if max_norm != float("inf"):
            clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """See :class:`Strategy`."""
        scaler = self._scaler(optimizer)
        if scaler is None:
            optimizer.step()
            return True
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() >= before

    def zero_grad(self, optimizer: Optimizer) -> None:
        """See :class:`Strategy`; gradients become None, which frees their memory."""
        optimizer.zero_grad(set_to_none=True)

    def without_gradient(self, optimizer: Optimizer) -> list[str]:
        """See :class:`Strategy`."""
        names = parameter_names(self.models)
        return [names.get(id(p), "?") for p in trained_parameters(optimizer) if p.grad is None]

    def _scaler(self, optimizer: Optimizer | None) -> torch.amp.GradScaler | None:
        if optimizer is None:
            optimizer = self.optimizers[0] if self.optimizers else None
        return self._scalers.get(id(optimizer))

    # -- state ------------------------------------------------------------------------------------------------------

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :class:`Strategy`."""
        return model

    def shards(self) -> Iterator[Shard]:
        """See :class:`Strategy`; the copies are equal, so each rank gives a share of whole tensors."""
        mine = self._own_share()
        for group, name, kind, tensor in self._tensors():
            if (group, name, kind) in mine:
                shape = tuple(tensor.shape)
                yield Shard(group, name, kind, shape, Region.whole(shape), tensor.detach())

    def optimizer_layouts(self) -> list[OptimizerLayout]:
        """See :class:`Strategy`."""
        import torch

        names = parameter_names(self.models)
        layouts = []
        for optimizer in self.optimizers:
            groups = [
                {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            fields: dict[str, dict[str, tuple[int, ...]]] = {}
            values: dict[str, dict[str, Any]] = {}
            for parameter, state in optimizer.state.items():
                name = names[id(parameter)]
                fields[name] = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, torch.Tensor)}
                values[name] = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
            layouts.append(OptimizerLayout(groups, fields, values))
        return layouts

    def load_shards(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """See :class:`Strategy`."""
        for index, model in enumerate(self.models):
            group = group_name("model", index)
            for name, parameter in model.named_parameters():
                parameter.data.copy_(read(group, clean_name(name), "parameter", Region.whole(parameter.shape)))
            for name, buffer in named_buffers(model):
                buffer.copy_(read(group, name, "buffer", Region.whole(buffer.shape)))
        for index, (optimizer, layout) in enumerate(zip(self.optimizers, layouts, strict=True)):
            self._load_optimizer(group_name("optimizer", index), optimizer, layout, read)

    def full_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :class:`Strategy`; they are whole at all times."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The loss scales of fp16, one an optimizer."""
        return {"scalers": [self._scalers[id(o)].state_dict() for o in self.optimizers if id(o) in self._scalers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loss scales; a checkpoint of another precision has none, and the scale starts anew."""
        with_scaler = [self._scalers[id(o)] for o in self.optimizers if id(o) in self._scalers]
        for scaler, saved in zip(with_scaler, state.get("scalers", []), strict=False):
            scaler.load_state_dict(saved)

    def _tensors(self) -> Iterator[tuple[str, str, str, torch.Tensor]]:
        """Every tensor of the state: group, name, kind and value."""
        import torch

        for index, model in enumerate(self.models):
            group = group_name("model", index)
            for name, parameter in model.named_parameters():
                yield group, clean_name(name), "parameter", parameter.data
            for name, buffer in named_buffers(model):
                yield group, name, "buffer", buffer
        names = parameter_names(self.models)
        for index, optimizer in enumerate(self.optimizers):
            group = group_name("optimizer", index)
            for owner, state in optimizer.state.items():
                for field, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield group, names[id(owner)], field, value

    def _own_share(self) -> set[tuple[str, str, str]]:
        from distkit.checkpoint.replicated import own_share

        items = [((g, n, k), t.numel() * t.element_size()) for g, n, k, t in self._tensors()]
        return own_share(items, self.rank, self.size)

    def _load_optimizer(self, group: str, optimizer: Optimizer, layout: OptimizerLayout, read: ReadShard) -> None:
        names = parameter_names(self.models)
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        for saved, current in zip(layout.groups, optimizer.param_groups, strict=True):
            start = sum(len(g["params"]) for g in groups)
            order = [names[id(p)] for p in current["params"]]
            for offset, name in enumerate(order):
                fields = layout.fields.get(name, {})
                if fields or layout.values.get(name):
                    state[start + offset] = {
                        **{field: read(group, name, field, Region.whole(shape)) for field, shape in fields.items()},
                        **layout.values.get(name, {}),
                    }
            groups.append({**saved, "params": list(range(start, start + len(order)))})
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for p in trained_parameters(optimizer) if p.grad is not None]
