"""Trying a layout out: each rank of the group in turn runs a copy of the model on its parts.

What reaches every layer that talks to the group, and what comes out of the model, must be what they were. Such layers give
what they gave when whole, since the other ranks' parts aren't there to be summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distkit.strategies.tensor_parallel.apply import tried_out
from distkit.strategies.tensor_parallel.attention import AttentionForward, out_of
from distkit.strategies.tensor_parallel.group import TensorGroup
from distkit.strategies.tensor_parallel.layout import COLUMN, ROW, Layout, Split
from distkit.strategies.tensor_parallel.sharded import ShardedTensor, local_part

__all__ = ["try_out"]

Run = Callable[[nn.Module], Any]
"""Calls a model on the example."""


def try_out(twin: nn.Module, layout: Layout, run: Run) -> tuple[str, str] | None:
    """Run each rank's part.

    Args:
        twin: A copy of the model, in evaluation mode; left as it is.
        layout: For it.
        run: Calls it on an example.

    Returns:
        The first row layer that is wrong, and why; None if all is as it was.
    """
    with torch.no_grad():
        try:
            expected = _record(twin, layout, run)
        except _UnlikeTorchError as error:
            return error.row, str(error)
        for row, _ in layout.of_style(ROW):
            if row not in expected.inputs:
                return row, "nothing calls it on the example"
        for rank in range(layout.size):
            failure = _differs(twin, layout, rank, run, expected) if layout.splits else None
            if failure is not None:
                return failure
    return None


@dataclass
class _Expected:
    """What layers that talk to the group take and give in each call, the weights that attentions give, and what comes out
    of the model."""

    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    weights: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    result: list[torch.Tensor] = field(default_factory=list)


class _DifferentError(Exception):
    """A layer that talks to the group got something else than its part."""


def _record(twin: nn.Module, layout: Layout, run: Run) -> _Expected:
    expected, handles = _Expected(), []
    for name, split in layout.splits.items():
        if split.style == COLUMN and not split.leaves:
            continue

        def note(module: nn.Module, args: Any, output: torch.Tensor, name: str = name) -> None:
            expected.inputs.setdefault(name, []).append(args[0])
            expected.outputs.setdefault(name, []).append(output)

        handles.append(twin.get_submodule(name).register_forward_hook(note))
    try:
        with _in_steps(twin, layout, expected.weights):
            expected.result = _tensors(run(twin))
    finally:
        for handle in handles:
            handle.remove()
    return expected


def _differs(twin: nn.Module, layout: Layout, rank: int, run: Run, expected: _Expected) -> tuple[str, str] | None:
    """Run one rank's part, where row layers give what they gave when whole; the first row layer that is wrong, and why."""
    at: list[str] = []
    with tried_out(twin, layout, rank):
        for name in expected.inputs:
            calls = zip(expected.inputs[name], expected.outputs[name], strict=True)
            twin.get_submodule(name).forward = _checking(name, layout.splits[name], rank, calls, at)
        for name, weights in expected.weights.items():
            attention = twin.get_submodule(name)
            attention.forward = _giving(attention.forward, iter(weights))
        try:
            found = _tensors(run(twin))
        except Exception as error:  # whatever a model does with parts that it can't work with
            waiting = [name for name in expected.inputs if name not in at]
            return (waiting[0] if waiting else at[-1]), f"{type(error).__name__}: {error}"
    same = len(found) == len(expected.result) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(found, expected.result, strict=False)
    )
    return None if same else (at[-1] if at else next(iter(layout.splits)), "the model's output was another")


def _checking(
    name: str, split: Split, rank: int, calls: Iterator[Any], at: list[str]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        whole, output = next(calls)
        start, length = split.runs[rank][0]
        part = whole.narrow(-1, start, length) if split.style == ROW else whole
        if isinstance(inputs, ShardedTensor) != (split.style == ROW) or not _close(local_part(inputs), part):
            raise _DifferentError(f"{name} doesn't get its part of the input")
        at.append(name)
        result: torch.Tensor = output
        return result

    return forward


class _UnlikeTorchError(Exception):
    """An attention that gives something else step by step than in one; ``row`` is the row layer inside of it."""

    def __init__(self, row: str, why: str) -> None:
        super().__init__(why)
        self.row = row


@contextmanager
def _in_steps(twin: nn.Module, layout: Layout, weights: dict[str, list[torch.Tensor | None]]) -> Iterator[None]:
    """While it is open, attentions of a layout also go step by step, so that the row layer inside of each is called."""
    modules = {name: twin.get_submodule(name) for name in layout.splits}
    attentions = {name: module for name, module in modules.items() if isinstance(module, nn.MultiheadAttention)}
    for name, module in attentions.items():
        module.forward = _compared(name, module, weights.setdefault(name, []))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in attentions.values():
            del module.forward


def _compared(name: str, module: nn.MultiheadAttention, weights: list[torch.Tensor | None]) -> Callable[..., Any]:
    in_one, in_steps = module.forward, AttentionForward(name, module, TensorGroup(0, 1, None))

    def forward(*args: Any, **kwargs: Any) -> Any:
        expected = in_one(*args, **kwargs)
        try:
            found = in_steps(*args, **kwargs)
        except Exception as error:  # whatever torch takes and we don't
            raise _UnlikeTorchError(out_of(name), f"{type(error).__name__}: {error}") from error
        if not all(_close(a, b) for a, b in zip(_tensors(found), _tensors(expected), strict=True)):
            raise _UnlikeTorchError(out_of(name), "it gives something else step by step")
        weights.append(expected[1])
        return expected

    return forward


def _giving(part: Callable[..., Any], weights: Iterator[torch.Tensor | None]) -> Callable[..., Any]:
    """One rank's part of an attention, which gives out the weights of all ranks."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return part(*args, **kwargs)[0], next(weights)

    return forward


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of an output; of parts that come out, this rank's can't be compared and are left out."""
    values = value.to_tuple() if hasattr(value, "to_tuple") else value
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and not isinstance(t, ShardedTensor)]
