"""Split layers that megatron-core computes. The module stays the user's own; megatron-core's layer gets its weight at each
call and holds none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from distkit.strategies.tensor_parallel.apply import FORWARDS, Forwards
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.kinds import Kind
from distkit.strategies.tensor_parallel.layers import ColumnForward, RowForward, VocabularyForward, all_tokens
from distkit.strategies.tensor_parallel.layout import COLUMN, ROW, VOCABULARY, Layout, Split

__all__ = ["megatron_forwards"]


def megatron_forwards(layout: Layout, settings: Any) -> Forwards:
    """What makes the forwards of a layout's layers.

    Args:
        layout: Of the model.
        settings: megatron-core's ModelParallelConfig.
    """
    rows = [split.partners for _, split in layout.of_style(ROW)]
    beside_others = {name for columns in rows if len(columns) > 1 for name in columns}
    column: Callable[..., Any] = partial(MegatronColumn, settings=settings, beside_others=beside_others)
    row, vocabulary = partial(MegatronRow, settings=settings), partial(MegatronVocabulary, settings=settings)
    return {**FORWARDS, COLUMN: column, ROW: row, VOCABULARY: vocabulary}


def _no_values(weight: torch.Tensor) -> None:
    """Parameters have theirs already."""


@contextmanager
def _lent(weight: Any, layer: nn.Module) -> Iterator[None]:
    """For one call a layer has this weight; between calls it has none."""
    layer._parameters["weight"] = weight
    try:
        yield
    finally:
        layer._parameters["weight"] = None


class MegatronColumn(ColumnForward):
    """ColumnParallelLinear(gather_output=False).

    Backward sums input gradients over the group while the weight's gradient is computed. Where several column layers take
    the same input (q, k and v; gate and up) that would be one sum for each: there it is one for all, in front of them,
    as it is where ranks share the tokens.

    Args:
        settings: megatron-core's ModelParallelConfig.
        beside_others: Names of the layers that share their input.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        kind: Kind,
        split: Split,
        group: TensorGroup,
        *,
        settings: Any,
        beside_others: set[str],
    ) -> None:
        super().__init__(name, module, kind, split, group)
        self.sums_alone = name not in beside_others and not group.sequence
        if kind.name == "linear":
            self.layer = ColumnParallelLinear(
                kind.inputs,
                kind.outputs,
                config=settings,
                init_method=_no_values,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=True,
                disable_grad_reduce=not self.sums_alone,
                tp_group=group.group,
            )

    def _own_features(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind.name != "linear":
            return super()._own_features(inputs)
        if not self.sums_alone:
            inputs = all_tokens(inputs, self.group)
        return _rows_through(self._compute, inputs, self.module.weight, self._bias)

    def _compute(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(rows, weight=weight)[0]
        return output


class _SummedCopy(RowParallelLinear):  # type: ignore[misc]
    """megatron-core sums a matrix product over the group in place (mappings.py, _reduce). Selective recomputation keeps
    products, and would sum the kept sum a second time: under a mode that watches operators, as that is, a copy is summed."""

    def _forward_impl(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        product: torch.Tensor = super()._forward_impl(*args, **kwargs)
        return product.clone() if is_in_torch_dispatch_mode() else product


class MegatronRow(RowForward):
    """RowParallelLinear(input_is_parallel=True).

    Args:
        settings: megatron-core's ModelParallelConfig.
    """

    def __init__(
        self, name: str, module: nn.Module, kind: Kind, split: Split, group: TensorGroup, *, settings: Any
    ) -> None:
        super().__init__(name, module, kind, split, group)
        if kind.name == "linear":
            with torch.device("meta"):
                self.layer = _SummedCopy(
                    kind.inputs,
                    kind.outputs,
                    config=settings,
                    init_method=_no_values,
                    bias=False,
                    input_is_parallel=True,
                    skip_bias_add=False,
                    tp_group=group.group,
                )
            self.layer._parameters["weight"] = None

    def _sum(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.kind.name != "linear" or self.group.sequence:
            return super()._sum(inputs)
        return _rows_through(self._compute, inputs, self.module.weight, None)

    def _compute(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with _lent(weight, self.layer):
            output: torch.Tensor = self.layer(rows)[0]
        return output


class MegatronVocabulary(VocabularyForward):
    """VocabParallelEmbedding; with ``padding_idx``, which that doesn't know, the lookup of the other strategies.

    Args:
        settings: megatron-core's ModelParallelConfig.
    """

    def __init__(
        self, name: str, module: nn.Module, kind: Kind, split: Split, group: TensorGroup, *, settings: Any
    ) -> None:
        super().__init__(name, module, kind, split, group)
        length = kind.inputs // group.size
        self.layer: Any = None
        if getattr(module, "padding_idx", None) is None and split.runs[group.rank] == ((group.rank * length, length),):
            with torch.device("meta"):
                self.layer = VocabParallelEmbedding(
                    kind.inputs, kind.outputs, init_method=_no_values, config=settings, tp_group=group.group
                )
            self.layer._parameters["weight"] = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.layer is None or self.group.sequence:
            return super().__call__(inputs)
        with _lent(self.module.weight, self.layer):
            output: torch.Tensor = self.layer(inputs)
        return output


def _rows_through(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], inputs: torch.Tensor, weight: Any, bias: Any
) -> torch.Tensor:
    """Call a layer on inputs as two dimensions, in autocast's dtype, and add the bias.

    megatron-core's backward takes two or three dimensions (core/utils.py, prepare_input_tensors_for_wgrad_compute) and
    brings autocast back on CUDA only, so it computes in what it is given. It also leaves out the gradient of a bias beside a
    frozen weight.
    """
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        inputs, weight = inputs.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        output = compute(inputs.reshape(-1, inputs.shape[-1]), weight)
    output = output.view(*inputs.shape[:-1], output.shape[-1])
    return output if bias is None else output + bias
