"""What fully_shard's public interface doesn't offer, and what it leaves to its user: all of it in one place.

Private names of torch are used here and in no other file; they were read in torch 2.13.0,
``torch/distributed/fsdp/_fully_shard/``, and compared with the source of 2.6.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from distkit.world import World

__all__ = [
    "AgreedGradScaler",
    "RoundingReduceScatter",
    "average_gradients",
    "copies",
    "drop_accumulated",
    "fsdp_modules",
    "fsdp_parameters",
    "gathered_tensors",
    "global_norm",
    "holds",
    "local",
    "reduce_accumulated",
    "reshard",
    "watch_gradients",
]


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The model's units, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the module holds its sharded ones.

    After a forward without a backward the outermost unit stays gathered; it would be read, or computed with, although the
    optimizer or a checkpoint has changed the sharded parameters meanwhile.
    """
    for module in fsdp_modules(model):
        module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor itself. No copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def copies(tensor: torch.Tensor, ranks: int) -> int:
    """On how many of the ranks each element of a parameter or gradient lies."""
    if not isinstance(tensor, DTensor):
        return ranks
    count = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        count *= size if isinstance(placement, Replicate) else 1
    return count


def global_norm(gradients: Sequence[torch.Tensor], world: World) -> torch.Tensor:
    """The 2-norm over all elements of all ranks, each counted once: one small all-reduce.

    torch's clip_grad_norm_ refuses lists in which DTensors and plain tensors meet.
    """
    by_copies: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        part = local(gradient)
        if part.numel():
            by_copies.setdefault((copies(gradient, world.data.size), part.device), []).append(part)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for (count, _), parts in by_copies.items():
        norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).double()
        total += norms.square().sum().to(total.device) / count
    return world.all_reduce(total, axis="data").sqrt().float()


# -- gradients that fully_shard keeps -------------------------------------------------------------------------------


def _groups(model: nn.Module) -> Iterator[Any]:
    """The FSDPParamGroups of a model, outer units first."""
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # older versions have one group or None
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        yield from groups


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """The FSDPParams of a model."""
    for group in _groups(model):
        yield from group.fsdp_params


def holds(model: nn.Module, parameters: set[int]) -> bool:
    """Whether one of the parameters, given by identity, is the model's; also while it is gathered."""
    return any(id(held.sharded_param) in parameters for held in fsdp_parameters(model)) or any(
        id(p) in parameters for p in model.parameters()
    )


def watch_gradients(model: nn.Module, used: set[int]) -> None:
    """From now on note the identity of each sharded parameter that gets a gradient; called by all ranks.

    Gradients come to the gathered parameter, which is made at the first gathering and kept from then on
    (_fsdp_param.py, init_unsharded_param).
    """
    for module in fsdp_modules(model):
        module.unshard()
        module.reshard()
    for held in fsdp_parameters(model):
        if held._unsharded_param.requires_grad:
            held._unsharded_param.register_post_accumulate_grad_hook(
                lambda _, held=held: used.add(id(held.sharded_param))
            )


def drop_accumulated(models: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
    """Forget whole gradients that backwards without a reduction left: zero_grad() doesn't know of them.

    They are in ``unsharded_accumulated_grad`` where they were cast, else in the gathered parameter's own ``grad``
    (_fsdp_param.py, to_accumulated_grad_if_needed).
    """
    wanted = {id(p) for p in parameters}
    for model in models:
        for held in fsdp_parameters(model):
            if id(held.sharded_param) in wanted:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None


def gathered_tensors(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sharded parameters whose place in the module gathered ones have taken, with these; and whole gradients."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for held in fsdp_parameters(model):
        parameters += [held.sharded_param.detach(), *held.all_gather_outputs]  # the latter are empty while freed
        whole = [held.unsharded_accumulated_grad, getattr(getattr(held, "_unsharded_param", None), "grad", None)]
        gradients += [gradient for gradient in (held.sharded_param.grad, *whole) if gradient is not None]
    return parameters, gradients


def reduce_accumulated(model: nn.Module) -> None:
    """Reduce those whole gradients without another backward.

    It is what the end of a backward does for units that it didn't reach (_fsdp_state.py,
    _root_post_backward_final_callback); ``set_requires_gradient_sync(True)`` comes before.
    """
    for group in reversed(list(_groups(model))):
        if all(hasattr(held, "_unsharded_param") for held in group.fsdp_params):  # else it was never computed with
            group.post_backward()
    modules = fsdp_modules(model)
    if modules:
        modules[0]._get_fsdp_state()._root_post_backward_final_callback()


def average_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Average the gradients of parameters that every rank holds whole, as fully_shard does with the others."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world.data.size == 1 or not gradients:
        return
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        same = [g for g in gradients if g.dtype == dtype]
        flat = world.all_reduce(torch.cat([g.reshape(-1) for g in same]), axis="data").div_(world.data.size)
        for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(part.view_as(gradient))


# -- fp16 and compression -------------------------------------------------------------------------------------------


class AgreedGradScaler(torch.amp.GradScaler):
    """A loss scaler whose overflow flag all ranks agree on, with one all-reduce, whatever kinds of tensors meet.

    torch's own looks at one list of gradients a device, in which DTensors and plain tensors must not be mixed, and
    reduces over the mesh of the first one only (torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler).
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.device.type)
        self._world = world

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local(parameter.grad)
                    by_device.setdefault(part.device, []).append(part)
        agreed = torch.zeros_like(found_inf, device=self._world.device)
        with torch.no_grad():
            for device, parts in by_device.items():
                flag = torch.zeros_like(found_inf, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(parts, flag, inv_scale.to(device))
                agreed = torch.maximum(agreed, flag.to(agreed.device))
        return {self._world.device: self._world.all_reduce(agreed, "max")}


class RoundingReduceScatter:
    """A reduce-scatter that rounds gradients to 16 bits for the wire only.

    fully_shard's own ``reduce_dtype`` would also add up the micro batches of a window in 16 bits.

    Args:
        dtype: fp16 or bf16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer, as fully_shard's default makes it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; the mean over the ranks is divided before it is rounded, so that no sum can overflow fp16."""
        scale = group.size() if op == dist.ReduceOp.AVG else 1
        part = torch.empty_like(output_tensor, dtype=self.dtype)
        dist.reduce_scatter_tensor(part, input_tensor.div(scale).to(self.dtype), op=dist.ReduceOp.SUM, group=group)
        output_tensor.copy_(part)
