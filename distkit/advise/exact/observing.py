"""Looking on while a strategy takes two steps: the second is told apart into short stretches, each with its own peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distkit.measuring import around

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from distkit.advise.exact.faking import Watch
    from distkit.precision import Precision
    from distkit.strategies.base import Strategy

__all__ = ["Called", "Observer", "Seen"]


@dataclass
class Called:
    """Collectives of one kind.

    Args:
        what: ``all_reduce``, ``all_gather``, ``reduce_scatter`` ...
        ranks: Size of the group.
        in_node: How many of them are on this rank's node.
        count: Calls.
        message: Bytes of the whole tensors, of all calls together.
    """

    what: str
    ranks: int
    in_node: int
    count: float = 0
    message: float = 0


@dataclass
class Seen:
    """What was seen in one step.

    Args:
        parameters: Of the model that ran.
        peaks: By stretch of the step, bytes by kind at the stretch's peak.
        first: Collectives of a micro batch before the last; empty without accumulation.
        last: Those of the last micro batch and the optimizer's step.
    """

    parameters: int
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    first: list[Called] = field(default_factory=list)
    last: list[Called] = field(default_factory=list)


class Observer:
    """Looks on.

    The first step makes the optimizer's states and is no example. Whoever leads the strategy calls its methods in their
    order, and :meth:`forward_begins` before each forward.

    Args:
        strategy: Connected; nothing is prepared yet.
        watch: What sees operations; it is open whenever the strategy works.
        each: Processes of a node.
        place: The name of a module's stretches.
    """

    def __init__(
        self, strategy: Strategy, watch: Watch, *, each: int, place: Callable[[str], str] = lambda name: name
    ) -> None:
        self.strategy, self.watch = strategy, watch
        self.steps = 0
        """That all optimizers took."""
        self._each, self._place = each, place
        self._seen = Seen(0)
        self._phase, self._batch = "", ""
        self._syncs = True
        self._start = 0
        self._stepped: set[int] = set()
        around(strategy, "set_gradient_sync", before=self._batch_comes)
        around(strategy, "backward", before=self._backward_begins, after=self._backward_ended)
        around(strategy, "unscale", before=self._gradients_are_there)
        around(strategy, "scale_gradients", after=self._note_gradients)
        around(strategy, "optimizer_step", before=self._step_begins, after=self._step_ended)
        around(strategy, "zero_grad", after=self._zeroed)

    @property
    def done(self) -> bool:
        """Whether the second step is over."""
        return self.steps > 1

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """Let the strategy prepare them, and know what is what from then on."""
        for model in models:
            parameters = list(model.parameters())
            self._seen.parameters += sum(p.numel() for p in parameters)
            self.watch.note_state({"parameters": [p.detach() for p in parameters]})
        prepared = self.strategy.prepare(models, optimizers, precision)
        self.watch.note_state(self.strategy.state_tensors())
        group = None if self.strategy.world is None else self.strategy.world.collectives.tensor_group
        if group is not None:
            self.watch.quiet_groups.add(group.group_name)
        for model, one in zip(models, prepared[0], strict=True):
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):  # until an engine has reduced them
                parameter.register_post_accumulate_grad_hook(self._whole_gradient)
            self._mark(model)
            one.register_forward_hook(lambda *_: self._enter("loss"))
        return prepared

    def forward_begins(self) -> None:
        """Of a micro batch."""
        self._phase = f"{self._batch}, forward"
        self._enter("start")

    def seen(self) -> Seen:
        """What was seen of the second step."""
        self._seen.peaks = {peak.where: peak.kinds for peak in self.watch.allocations.peaks()}
        return self._seen

    # -- stretches --------------------------------------------------------------------------------------------------

    def _mark(self, model: nn.Module) -> None:
        """Let every module begin a stretch in forward, and one when the gradient of its output is there.

        In a stretch as short as that the peak is at one operation, whatever the number of layers; in longer ones it could
        move.
        """
        for name, module in model.named_modules():
            if any(True for _ in module.children()):
                continue
            name = self._place(name)
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            module.register_forward_hook(lambda _, __, output, name=name: self._on_gradient(output, name))

    def _on_gradient(self, output: Any, name: str) -> None:
        local = getattr(output, "local", output)  # of one that a tensor group shares
        if getattr(local, "requires_grad", False):
            local.register_hook(lambda gradient: self._enter(f"{name} gradient"))

    def _enter(self, where: str) -> None:
        self.watch.allocations.enter(f"{self._phase}: {where}")

    def _whole_gradient(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            self.watch.allocations.is_buffer([self.watch.piece(parameter.grad)])

    # -- what the strategy is told to do ----------------------------------------------------------------------------

    def _batch_comes(self, sync: bool) -> None:
        self._syncs = sync
        self._batch = "last micro batch" if sync else "micro batch before"

    def _backward_begins(self, *_: Any, **__: Any) -> None:
        self._phase = f"{self._batch}, backward"
        self._enter("start")
        self._ends_window = self._syncs

    def _backward_ended(self, *_: Any, **__: Any) -> None:
        self._note_gradients()
        if not self._ends_window:
            self._seen.first = self._called()

    def _gradients_are_there(self, *_: Any) -> None:
        self._phase = "optimizer"
        self._enter("gradients")
        self.watch.stepping = True

    def _note_gradients(self, *_: Any) -> None:
        self.watch.note_state({"gradients": self.strategy.state_tensors().get("gradients", [])})

    def _step_begins(self, *_: Any) -> None:
        self._enter("step")

    def _step_ended(self, optimizer: Optimizer) -> None:
        self.watch.stepping = False
        self.watch.note_state(self.strategy.state_tensors())
        self._stepped.add(id(optimizer))

    def _zeroed(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._stepped or len(self._stepped) < len(self.strategy.optimizers):
            return
        self._stepped.clear()
        self.steps += 1
        if self.steps == 1:
            self._called()
            gc.collect()
            self.watch.allocations.begin()
        elif self.steps == 2:
            self._seen.last = self._called()

    def _called(self) -> list[Called]:
        """Collectives since it was asked before."""
        found: dict[tuple[str, int, int], Called] = {}
        for call, ranks in self.watch.calls[self._start :]:
            key = (call.what, call.ranks, sum(rank // self._each == 0 for rank in ranks))
            one = found.setdefault(key, Called(*key))
            one.count += 1
            one.message += call.message
        self._start = len(self.watch.calls)
        return list(found.values())
