"""The script's own optimizer, stepping the partitions that DeepSpeed keeps on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distkit.errors import UsageError
from distkit.strategies.zero_partitions import Partition, Piece

__all__ = ["PartitionOptimizer", "Run", "refuse_whole_tensor_optimizers"]

WHOLE_TENSOR = ("Adafactor", "LBFGS", "Muon", "Lamb", "LAMB", "Shampoo", "SOAP", "FusedLamb", "LARS", "SM3")
"""Optimizers whose update of an element depends on others of its tensor."""


@dataclass(eq=False)
class Run:
    """Neighbouring pieces of a partition that were stepped together in every step so far.

    DeepSpeed has one optimizer parameter a partition, and so gives parameters without a gradient weight decay and a
    step count that torch would not. Here a partition is one run until some of its parameters get a gradient and others
    don't; then it is cut there. So the usual case is as fast as DeepSpeed's, and every case is torch's arithmetic.

    Args:
        partition: Where it lies.
        pieces: In order.
        parameter: What the optimizer steps: a view of the master weights.
    """

    partition: Partition
    pieces: list[Piece]
    parameter: torch.Tensor

    @property
    def offset(self) -> int:
        """Where it begins in the partition."""
        return 0 if self.partition.swapped else self.pieces[0].offset

    @property
    def length(self) -> int:
        """From its first piece's begin to its last one's end, with what padding lies between."""
        if self.partition.swapped:
            return self.partition.numel
        return self.pieces[-1].offset + self.pieces[-1].length - self.offset


class PartitionOptimizer(Optimizer):
    """What DeepSpeed takes for the optimizer. Its step is one step of the script's own over all partitions.

    Partitions that lie on NVMe are in memory one after the other only, so each is stepped when DeepSpeed brings it in, and
    is never cut: it is one run, whose parameter is DeepSpeed's own.

    The script's optimizer keeps its groups and hyper-parameters; the parameters in them become runs.

    Args:
        own: The script's optimizer.
    """

    def __init__(self, own: Optimizer) -> None:
        self.own = own
        self.group_of: list[int] = []
        """For each group here the index of the script's: DeepSpeed can't have groups with nothing to train."""
        groups = []
        for index, group in enumerate(own.param_groups):
            trained = [p for p in group["params"] if p.requires_grad]
            if trained:
                groups.append({**group, "params": trained})
                self.group_of.append(index)
        super().__init__(groups, {})
        self.runs: list[Run] = []
        self.used: set[int] = set()
        """Identities of the parameters that got a gradient since the last step."""
        self._stepped = False

    def adopt(self, partitions: Sequence[Partition]) -> None:
        """Put the partitions into the script's optimizer, with what state it already had for their parameters."""
        own = self.own
        before = {id(p): state for p, state in own.state.items()}
        scalars = _fields_without_dimensions(own)
        own.state.clear()
        for group in own.param_groups:
            group["params"] = []
        for partition in partitions:
            if not partition.pieces:
                continue
            known = [piece for piece in partition.pieces if id(piece.parameter) in before]
            if known and partition.swapped:
                raise UsageError(
                    f"{type(own).__name__} had state before it was prepared, which can't be moved to NVMe",
                    hint="prepare a new optimizer, and load its state from a checkpoint",
                )
            parts = [[piece] for piece in partition.pieces] if known else [partition.pieces]
            for pieces in parts:
                run = self._new_run(partition, pieces)
                self.runs.append(run)
                if id(pieces[0].parameter) in before:
                    _refuse_state_of_nothing(own, pieces[0], before[id(pieces[0].parameter)])
                    own.state[run.parameter] = _cut_state(before[id(pieces[0].parameter)], pieces[0], scalars)
        self._fill_groups()

    def _new_run(self, partition: Partition, pieces: list[Piece]) -> Run:
        if partition.swapped:
            return Run(partition, pieces, partition.master)
        begin, end = pieces[0].offset, pieces[-1].offset + pieces[-1].length
        view = partition.master.detach()[begin:end]
        return Run(partition, pieces, nn.Parameter(view, requires_grad=True))

    def _fill_groups(self) -> None:
        for group in self.own.param_groups:
            group["params"] = []
        for run in self.runs:
            self.own.param_groups[self.group_of[run.partition.group]]["params"].append(run.parameter)

    # -- stepping ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step of DeepSpeed's comes now."""
        self._stepped = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Called by DeepSpeed for each partition in turn; the first call steps all that are in memory."""
        present = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        swapped = [run for run in self.runs if run.partition.swapped and id(run.parameter) in present]
        if swapped:
            self._step_swapped(swapped)
        elif not self._stepped:
            self._stepped = True
            self.cut(lambda run, piece: id(piece.parameter) in self.used)
            self._step([run for run in self.runs if not run.partition.swapped])

    def _step(self, runs: Sequence[Run]) -> None:
        """Step those that got a gradient; the optimizer leaves parameters without one alone."""
        for run in runs:
            gradient = run.partition.gradient
            if gradient is not None and id(run.pieces[0].parameter) in self.used:
                run.parameter.grad = gradient[run.offset : run.offset + run.length]
        self.own.step()
        for run in runs:
            run.parameter.grad = None

    def _step_swapped(self, runs: Sequence[Run]) -> None:
        for run in runs:
            unused = sum(id(piece.parameter) not in self.used for piece in run.pieces)
            if 0 < unused < len(run.pieces):
                raise UsageError(
                    f"{unused} of {len(run.pieces)} parameters whose optimizer states lie together on NVMe got no gradient, "
                    "and can't be left out of the step",
                    hint="--set engine.deepspeed.zero_optimization.offload_optimizer.device=cpu",
                )
        self._step(runs)
        self.show_swapped_state()

    def active_gradients(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Pieces of parameters that got a gradient in this window, and that gradient."""
        for run in self.runs:
            gradient = run.partition.gradient
            if gradient is None:
                continue
            for piece in run.pieces:
                if id(piece.parameter) in self.used:
                    yield piece, gradient[piece.offset : piece.offset + piece.length]

    def forget_state(self) -> None:
        """Drop all state, before another is loaded."""
        self.own.state.clear()
        self.state.clear()

    def show_swapped_state(self) -> None:
        """Let DeepSpeed's swapper see state that was loaded for partitions on NVMe."""
        for run in self.runs:
            if run.partition.swapped and run.parameter in self.own.state:
                self.state[run.parameter] = self.own.state[run.parameter]

    def cut(self, kind: Callable[[Run, Piece], Any]) -> None:
        """Cut runs between neighbours of a different kind; state goes along."""
        runs: list[Run] = []
        for run in self.runs:
            parts = [list(part) for _, part in groupby(run.pieces, key=lambda piece, run=run: kind(run, piece))]  # type: ignore[misc]
            runs += [run] if len(parts) == 1 or run.partition.swapped else self._cut(run, parts)
        if len(runs) != len(self.runs):
            self.runs = runs
            self._fill_groups()

    def _cut(self, run: Run, parts: list[list[Piece]]) -> list[Run]:
        state = self.own.state.pop(run.parameter, None)
        new = [self._new_run(run.partition, part) for part in parts]
        for part in new if state else []:
            begin = part.offset - run.offset
            self.own.state[part.parameter] = {
                field: _part_of(value, run.length, begin, part.length) for field, value in (state or {}).items()
            }
        return new


def _part_of(value: Any, whole: int, begin: int, length: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value[begin : begin + length].clone() if value.dim() == 1 and value.numel() == whole else value.clone()


def _fields_without_dimensions(optimizer: Optimizer) -> set[str]:
    """Fields that are one number a parameter. Of a parameter that is one number itself the others can't be told from
    them by their shape."""
    fields = {
        field
        for parameter, state in optimizer.state.items()
        for field, value in state.items()
        if getattr(parameter, "ds_shape", parameter.shape) and isinstance(value, torch.Tensor) and value.dim() == 0
    }
    return {"step", *fields}


def _refuse_state_of_nothing(optimizer: Optimizer, piece: Piece, state: dict[str, Any]) -> None:
    """Parameters that lie in pieces show no elements, and an optimizer that makes its state early makes it of those.

    Raises:
        UsageError: It did.
    """
    if piece.length and any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in state.values()):
        raise UsageError(
            f"{type(optimizer).__name__} made its state when it was made itself, of parameters that lay in pieces on all ranks",
            hint="build the model outside of trainer.init_model()",
        )


def _cut_state(state: dict[str, Any], piece: Piece, scalars: set[str]) -> dict[str, Any]:
    """A parameter's state to its piece's."""
    cut: dict[str, Any] = {}
    for field, value in state.items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape and field not in scalars:
            cut[field] = value.reshape(-1)[piece.start : piece.start + piece.length].clone()
        else:
            cut[field] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut


def refuse_whole_tensor_optimizers(optimizer: Optimizer, strategy: str) -> None:
    """ZeRO cuts parameters anywhere, so an optimizer must treat each element alone.

    Raises:
        UsageError: It is known not to.
    """
    name = next((c.__name__ for c in type(optimizer).__mro__ if c.__name__ in WHOLE_TENSOR), None)
    if name is not None:
        raise UsageError(
            f"strategy {strategy!r} cuts parameters into flat pieces, and {name} needs each parameter whole",
            hint="--strategy ddp   or an elementwise optimizer such as AdamW, Adam, SGD, RMSprop, Adagrad",
        )
