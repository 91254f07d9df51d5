"""Where DeepSpeed keeps what: the flat partitions of this rank, and which piece of which parameter lies where in them.

Stages 1 and 2 put the parameters of a group behind each other into one flat buffer and give each rank an equal stretch of
it. Stage 3 cuts every parameter into equal stretches, one a rank, the last ones padded. In both, one fp32 tensor holds this
rank's share of a group (the master weights), and it is what the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from torch import nn

__all__ = ["FlatLayout", "Layout", "Partition", "Piece", "SplitLayout", "layout_of", "numel_of"]

FIRST_MICRO_STEP = -1
"""INITIAL_MICRO_STEP_ID of stage_1_and_2.py (0.19.8)."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of one parameter inside of a partition.

    Args:
        parameter: The model's own parameter.
        shape: Its whole shape.
        start: Its first element here, counted in the parameter's row-major order.
        length: Number of elements.
        offset: Where it lies in the partition.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int


@dataclass(eq=False)
class Partition:
    """This rank's share of one parameter group (of a sub-group under stage 3).

    Args:
        group: Index of the group in the optimizer that DeepSpeed was given.
        index: DeepSpeed's own index of the partition.
        master: The weights that the optimizer steps, flat.
        pieces: What lies in it, in order.
        gradient: Of ``master``'s layout, between the end of a window and its step.
        swapped: Whether master and optimizer state lie on NVMe, and are empty here but for :meth:`Layout.resident`.
        numel: Elements of the master, padding included.
    """

    group: int
    index: int
    master: torch.Tensor
    pieces: list[Piece]
    gradient: torch.Tensor | None = field(default=None)
    swapped: bool = False
    numel: int = 0


class Layout(Protocol):
    """One stage's way of keeping things."""

    keeps_whole: bool
    """Whether the model has its parameters whole on every rank between steps."""
    partitions: list[Partition]

    def share_masters(self) -> None:
        """Let fp32 masters be the parameters' own memory where both are fp32 on one device."""

    def collect_gradients(self) -> None:
        """Fill ``Partition.gradient`` after the window's reductions."""

    def forget_gradients(self) -> None:
        """As if no backward had run since the last step."""

    def resident(self, partition: Partition, *, write: bool = False) -> AbstractContextManager[None]:
        """While it is open master and optimizer state are in memory; with ``write`` they are written back."""

    def master_changed(self, partition: Partition) -> None:
        """Copy a resident master to the parameters that the model computes with."""

    def masters_changed(self) -> None:
        """All masters were copied; called by all ranks, to send round what the model holds whole."""

    def global_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Shape of the whole parameter."""

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What DeepSpeed holds besides the modules' own tensors, by kind as in :mod:`distkit.memory`."""

    def stretch(self, parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
        """The part of a parameter that the model on this rank holds, flat, and its first element."""


def layout_of(zero: Any) -> Layout:
    """The layout of DeepSpeed's ZeRO optimizer."""
    return SplitLayout(zero) if isinstance(zero, DeepSpeedZeroOptimizer_Stage3) else FlatLayout(zero)


class FlatLayout:
    """Stages 1 and 2 (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8)."""

    keeps_whole = True

    def __init__(self, zero: DeepSpeedZeroOptimizer) -> None:
        self.zero = zero
        self.partitions = [
            Partition(index, index, master, list(self._pieces(index)), numel=master.numel())
            for index, master in enumerate(zero.single_partition_of_fp32_groups)
        ]

    def _pieces(self, index: int) -> Iterator[Piece]:
        zero = self.zero
        size = int(zero.partition_size[index])
        first = _rank(zero.real_dp_process_group[index]) * size
        offsets = zero.round_robin_bit16_offsets[index]
        for parameter, offset in zip(zero.round_robin_bit16_groups[index], offsets, strict=True):
            begin, end = max(offset, first), min(offset + parameter.numel(), first + size)
            if begin < end:
                yield Piece(parameter, tuple(parameter.shape), begin - offset, end - begin, begin - first)

    def share_masters(self) -> None:
        """DeepSpeed clones the partition also where it has the masters' dtype; that is 4 bytes a parameter over N."""
        zero = self.zero
        if zero.cpu_offload:
            return
        shared = False
        for partition in self.partitions:
            rank = _rank(zero.real_dp_process_group[partition.index])
            weights = zero.parallel_partitioned_bit16_groups[partition.index][rank]
            if weights.dtype == partition.master.dtype and weights.device == partition.master.device:
                partition.master.data = weights.data
                shared = True
        if shared:  # its fragments (safe_get_full_fp32_param ...) are views of the clones
            zero._link_all_hp_params()

    def collect_gradients(self) -> None:
        """Flatten DeepSpeed's lists once; its step finds the flat one there (``_get_preflattened_grad_partition``)."""
        zero = self.zero
        for partition in self.partitions:
            if zero.cpu_offload:
                partition.gradient = partition.master.grad
                continue
            found = zero.averaged_gradients.get(partition.index)
            flat = getattr(found, "flat_partition", None)
            if flat is None:
                flat = zero.flatten(found)
            flat = flat.to(partition.master.dtype)
            zero.averaged_gradients[partition.index] = GradPartitionBufferGroup([flat], flat)
            partition.gradient = flat
        for group in zero.bit16_groups:
            for parameter in group:
                parameter.grad_accum = None  # whole fp32 gradients, which DeepSpeed keeps until the next forward

    def forget_gradients(self) -> None:
        """What DeepSpeed's own step() and epilogue reset, for the case that neither ran."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        zero.averaged_gradients.clear()
        zero.all_grad_tensors.clear()
        zero._release_ipg_buffers()
        zero.micro_step_id = FIRST_MICRO_STEP
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        for partition in self.partitions:
            partition.gradient = None

    def resident(self, partition: Partition, *, write: bool = False) -> AbstractContextManager[None]:
        """See :class:`Layout`; they always are."""
        return nullcontext()

    def master_changed(self, partition: Partition) -> None:
        """See :class:`Layout`; DeepSpeed copies all of them at once."""

    def masters_changed(self) -> None:
        """See :class:`Layout`."""
        self.zero.update_lp_params()

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """See :class:`Layout`; under offload DeepSpeed keeps a copy of the partition in the parameters' dtype on the host
        too, on its way to the device."""
        zero = self.zero
        listed = [
            g for found in (zero.all_grad_tensors, zero.averaged_gradients) for g in found.values() if g is not None
        ]
        gradients = [*(t for group in listed for t in group), *_gradients_of(self.partitions)]
        gradients += [p.grad_accum for group in zero.bit16_groups for p in group if p.grad_accum is not None]
        if zero.cpu_offload:
            gradients += zero.accumulated_grads_in_cpu.values()
        masters = [partition.master.detach() for partition in self.partitions]
        parameters = zero.param_buffer_of_bit16_for_cpu_offload_groups if zero.cpu_offload else []
        return {"parameters": [*zero.bit16_groups_flat, *parameters], "gradients": gradients, "optimizer": masters}

    def global_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See :class:`Layout`; parameters are whole on every rank."""
        return tuple(parameter.shape)

    def stretch(self, parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
        """See :class:`Layout`; every rank has all of it."""
        return parameter.data.reshape(-1), 0


class SplitLayout:
    """Stage 3 (deepspeed/runtime/zero/stage3.py, 0.19.8)."""

    keeps_whole = False

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3) -> None:
        self.zero = zero
        self.partitions = [
            Partition(
                zero.sub_group_to_group_id[index],
                index,
                master,
                list(self._pieces(index)),
                swapped=zero._swappable_optimizer_subgroup(index),
                numel=zero.fp16_partitioned_groups_flat_numel[index],
            )
            for index, master in enumerate(zero.fp32_partitioned_groups_flat)
        ]
        self._cut_again = False
        # Gradients are scaled and stepped where they are reduced to, also under offload, so that DeepSpeed's second place
        # for them (offload: 4 bytes an element on the host) and its unscaling are not needed.
        zero.unscale_and_clip_grads = lambda sub_group_id, total_norm: None
        for master in zero.fp32_partitioned_groups_flat:
            master.grad = None

    def _pieces(self, index: int) -> Iterator[Piece]:
        offset = 0
        for parameter in self.zero.fp16_groups[index]:
            start, length = _stretch(parameter)
            if length:
                yield Piece(parameter, tuple(parameter.ds_shape), start, length, offset)
            offset += parameter.partition_numel()

    def share_masters(self) -> None:
        """DeepSpeed means to (``_create_fp32_partitions``), but compares a device with its name and copies always."""
        zero = self.zero
        if zero.offload_optimizer:
            return
        for partition in self.partitions:
            weights = zero.fp16_partitioned_groups_flat[partition.index]
            if weights.dtype == partition.master.dtype and weights.device == partition.master.device:
                partition.master.data = weights.data

    def collect_gradients(self) -> None:
        """Each sub-group's gradients lie behind each other in one buffer, in the order of the masters."""
        zero = self.zero
        offset = 0
        for partition in self.partitions:
            flat = zero.grad_partitions_flat_buffer.narrow(0, offset, partition.numel).to(partition.master.dtype)
            if not zero.offload_optimizer:
                zero.averaged_gradients[partition.index] = [flat]
            partition.gradient = flat
            offset += partition.numel

    def forget_gradients(self) -> None:
        """Zero the buffer too: the first backward of a window overwrites only what it reaches, and later ones add
        (``partition_grads``), so a parameter that comes in late would start from the last window's gradient."""
        zero = self.zero
        for group in zero.fp16_groups:
            for parameter in group:
                if parameter.grad is not None and parameter.grad.device.type == "cpu":
                    parameter.grad = (
                        None  # DeepSpeed would record a stream on it, which only devices have (stage3.py:2384)
                    )
        zero.zero_grad(set_to_none=True)
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        for name in zero.params_already_reduced:
            zero.params_already_reduced[name] = False
        zero._offload_boundary_param_ids = set()
        zero.averaged_gradients.clear()
        zero.grad_partitions_flat_buffer.zero_()
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        for partition in self.partitions:
            partition.gradient = None

    @contextmanager
    def resident(self, partition: Partition, *, write: bool = False) -> Iterator[None]:
        """See :class:`Layout`."""
        zero, index = self.zero, partition.index
        if not partition.swapped:
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
        finally:
            if write:
                zero._optimizer_states_and_gradient_swap_out(index)
            else:
                zero._release_swap_buffers(index)

    def master_changed(self, partition: Partition) -> None:
        """See :class:`Layout`."""
        if not self._cut_again:
            self.zero._partition_all_parameters()  # small ones are whole, and would keep their old values
            self._cut_again = True
        self.zero._reassign_or_swap_out_partitioned_parameters(partition.index)

    def masters_changed(self) -> None:
        """See :class:`Layout`; small parameters that stay whole are gathered anew, as after a step (``_post_step``)."""
        self._cut_again = False
        persistent = self.zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """See :class:`Layout`."""
        zero = self.zero
        return {
            "parameters": [parameter.ds_tensor.data for parameter in zero.module.parameters()],
            "gradients": [zero.grad_partitions_flat_buffer, *_gradients_of(self.partitions)],
            "optimizer": [partition.master.detach() for partition in self.partitions],
        }

    def global_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See :class:`Layout`."""
        return tuple(parameter.ds_shape) if hasattr(parameter, "ds_shape") else tuple(parameter.shape)

    def stretch(self, parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
        """See :class:`Layout`; frozen ones are cut like the others."""
        start, length = _stretch(parameter)
        held: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        return held.data.view(-1)[:length], start


def _gradients_of(partitions: Sequence[Partition]) -> list[torch.Tensor]:
    """Flat gradients: between a window's end and its step, and under offload at all times."""
    found = [*(p.gradient for p in partitions), *(p.master.grad for p in partitions)]
    return [gradient for gradient in found if gradient is not None]


def _stretch(parameter: Any) -> tuple[int, int]:
    """First element and number of elements of this rank's part of a stage-3 parameter, without padding."""
    size = parameter.partition_numel()
    start = min(_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def _rank(group: Any) -> int:
    return torch.distributed.get_rank(group)


def numel_of(parameters: Sequence[nn.Parameter]) -> int:
    """Elements of whole parameters, also of those that zero.Init cut already."""
    return sum(int(p.ds_numel) if hasattr(p, "ds_numel") else p.numel() for p in parameters)
