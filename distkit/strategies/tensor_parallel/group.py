"""The ranks that share each layer, and the ways in which activations travel between them."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "TensorGroup",
    "copy_to_group",
    "gather_from_group",
    "gather_tokens",
    "part_is_used",
    "reduce_from_group",
    "scatter_tokens",
]


class TensorGroup:
    """A tensor group.

    Args:
        rank: This rank in it.
        size: Ranks in it.
        group: How they talk; None for one that nobody else is in, as when a layout is tried out.
        sequence: Whether what lies between a row layer and the next column layer is split over the tokens.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup | None, *, sequence: bool = False) -> None:
        self.rank, self.size, self.group, self.sequence = rank, size, group, sequence
        self.last_copy: tuple[torch.Tensor, torch.Tensor] | None = None
        """The tensor that was copied last, and its copy; until backward comes by."""
        self.gathers = False
        """Whether a tensor that is split over it is made whole where a function needs all of it."""

    @cached_property
    def for_outputs(self) -> TensorGroup:
        """The same ranks, for what a model gives out: the script may do anything with that."""
        made = copy.copy(self)
        made.gathers = True
        return made

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, as a new tensor."""
        if self.group is None:
            return tensor
        from torch.distributed import all_reduce

        total = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group=self.group)
        return total

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along a dimension of the sum over the group."""
        import torch.distributed as dist

        exchange = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from torch 2.13 on
        pieces = torch.cat(tensor.chunk(self.size, dim))  # contiguous, one rank's behind the other
        part = tensor.new_empty([n // self.size if d == dim % tensor.dim() else n for d, n in enumerate(tensor.shape)])
        exchange(part, pieces, group=self.group)
        return part

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each element over the group, as a new tensor."""
        if self.group is None:
            return tensor
        from torch.distributed import ReduceOp, all_reduce

        largest = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(largest, op=ReduceOp.MAX, group=self.group)
        return largest

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks of the group."""
        if self.group is None:
            return [tensor] * self.size
        from torch.distributed import all_gather

        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        all_gather(parts, tensor.contiguous(), group=self.group)
        return parts


class _Copy(torch.autograd.Function):
    """The same forward; backward sums what each rank's part of the layers gave (Megatron-LM's f, arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.group.last_copy = None
        return ctx.group.all_reduce(gradients[0]), None


class _Reduce(torch.autograd.Function):
    """Forward sums over the group; backward is the same (its g)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Forward puts the parts together; what follows is the same on all ranks, so backward is a rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, tensor.shape[dim]
        return torch.cat(group.all_gather(tensor), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].narrow(ctx.dim, ctx.group.rank * ctx.size, ctx.size).contiguous(), None, None


class _GatherTokens(torch.autograd.Function):
    """In front of column layers, where ranks hold some tokens each (Megatron-LM's g-bar, arXiv 2205.05198)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(group.all_gather(tensor), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.group.last_copy = None
        return ctx.group.reduce_scatter(gradients[0], ctx.dim), None, None


class _ScatterTokens(torch.autograd.Function):
    """Behind row layers (its g)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return group.reduce_scatter(tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.cat(ctx.group.all_gather(gradients[0]), ctx.dim), None, None


def gather_tokens(key: torch.Tensor, tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
    """All tokens, from ranks that hold some each; backward sums what each rank's part of the layers gave.

    Args:
        key: What is told from the next call by identity: layers that take the same tensor share what was gathered.
        tensor: This rank's tokens.
        dim: The dimension of the tokens.
        group: The tensor group.
    """
    if group.last_copy is not None and group.last_copy[0] is key:
        return group.last_copy[1]
    made: torch.Tensor = _GatherTokens.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    if made.requires_grad:
        group.last_copy = (key, made)
    return made


def scatter_tokens(tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
    """This rank's tokens of the sum over the group."""
    result: torch.Tensor = _ScatterTokens.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return result


def copy_to_group(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Before split layers: each rank goes on with the same values.

    Layers that take the same tensor one after the other (q, k and v) share the copy, so that backward sums once for them all.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    if group.last_copy is not None and group.last_copy[0] is tensor:
        return group.last_copy[1]
    made: torch.Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    group.last_copy = (tensor, made)
    return made


def reduce_from_group(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Behind a row layer: the sum of all ranks' parts."""
    result: torch.Tensor = _Reduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def gather_from_group(tensor: torch.Tensor, dim: int, group: TensorGroup) -> torch.Tensor:
    """The whole, from parts that lie one behind the other along a dimension."""
    result: torch.Tensor = _Gather.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return result


def part_is_used(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """A tensor that is whole on every rank, of which each rank uses what meets its own part of another: a norm inside of
    each head, a mask. Its gradient is the sum over the group."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    result: torch.Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result
