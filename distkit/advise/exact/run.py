"""One candidate, run: the real strategy with a reference model, on one rank of as many as the plan has.

As a program (``python -m distkit.advise.exact.run``) it takes a :class:`Run` as JSON on stdin and answers on stdout. It is a
process of its own since a process group that only pretends is one for the whole process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distkit.advise.exact.sizes import sizes_of
from distkit.advise.models import ModelShape
from distkit.errors import DistkitError, PlanError

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from distkit.advise.exact.faking import Watch
    from distkit.config import Config
    from distkit.strategies.base import Strategy

__all__ = ["OPTIMIZERS", "Called", "Rehearsal", "Run", "Seen", "rehearse", "strategy_of"]

EDGE = 2
"""So many layers at each end are looked at one by one."""

OPTIMIZERS = ("adamw", "adam", "nadam", "radam", "adagrad", "rmsprop", "momentum", "sgd")
"""Those that torch has and every engine takes."""


@dataclass(frozen=True)
class Run:
    """What is to be run.

    Args:
        model: The model.
        layers: With so many layers.
        strategy: As in the settings.
        tensor: Ranks of a tensor group.
        nodes: Number of nodes.
        each: Devices in each.
        micro: Sequences in a micro batch of a data-parallel rank.
        accumulate: Micro batches in a step.
        sequence: Tokens in each sequence.
        optimizer: Name of the optimizer.
        precision: As in the settings.
        recompute: ``none``, ``selective`` or ``full``.
        offload: ``none``, ``optimizer`` or ``params``.
        fused_attention: Whether attention keeps no scores.
    """

    model: ModelShape
    layers: int
    strategy: str
    tensor: int
    nodes: int
    each: int
    micro: int
    accumulate: int
    sequence: int
    optimizer: str
    precision: str
    recompute: str
    offload: str
    fused_attention: bool

    @property
    def ranks(self) -> int:
        """All."""
        return self.nodes * self.each


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


def rehearse(run: Run) -> Seen:
    """Run a step of it, on this process alone."""
    from distkit.advise.exact.allocations import Allocations
    from distkit.advise.exact.faking import Watch, fake_ranks, fake_tensors, watching
    from distkit.world.environment import Environment

    environment = Environment(0, run.ranks, 0, run.each, 0, run.nodes, "torchrun", "127.0.0.1", 1)
    with fake_ranks(run.ranks) if run.ranks > 1 else nullcontext():
        strategy = strategy_of(run)
        strategy.connect(environment)
        watch = Watch(Allocations())
        with fake_tensors(), watching(watch):
            rehearsal = Rehearsal(run, strategy, watch)
            rehearsal.step(look=False)
            rehearsal.step()
            seen = rehearsal.seen()
        strategy.close()
    return seen


def strategy_of(run: Run, **more: Any) -> Strategy:
    """The strategy, as its settings make it.

    Args:
        run: What is to be run.
        more: Further settings, by name with underscores for dots.
    """
    from distkit.advise.exact.model import tensor_layout
    from distkit.config import load_config
    from distkit.strategies.registry import strategy_class

    sizes = replace(sizes_of(run.model, fused=run.fused_attention), layers=run.layers)
    config = load_config(
        overrides=[f"{key}={json.dumps(value)}" for key, value in _settings(run, **more).items()]
    ).config
    chosen = strategy_class(run.strategy)
    if run.tensor == 1:
        return chosen.for_run(config)(config)
    chosen.check(config, processes=run.ranks)
    return _split_as_written(chosen, config, tensor_layout(sizes, run.tensor))


def _settings(run: Run, **more: Any) -> dict[str, Any]:
    from distkit.strategies.zero_config import reduce_bucket_size

    found: dict[str, Any] = {
        "strategy": run.strategy,
        "precision": "bf16" if run.precision == "fp16" else run.precision,  # as large, and CPUs compute in it
        "device": "cpu",
        "parallel.tensor": run.tensor,
        "memory.activation_checkpointing": run.recompute,
        "memory.offload": run.offload,
        **{key.replace("_", "."): value for key, value in more.items()},
    }
    if run.strategy.startswith("zero"):  # that of the whole model, however many layers are run
        size = reduce_bucket_size(sizes_of(run.model).parameters // run.tensor)
        found["engine.deepspeed"] = {"zero_optimization": {"reduce_bucket_size": size}}
    return found


def _split_as_written(chosen: type[Strategy], config: Config, layout: Any) -> Strategy:
    """The strategy over split layers; rank 0 needn't look at numbers to find out which are split."""
    from distkit.strategies.tensor_parallel.mixin import TensorParallelMixin, with_tensor_parallelism

    class Written(TensorParallelMixin):
        def _agreed_layout(self, model: torch.nn.Module) -> Any:
            return layout

    return with_tensor_parallelism(chosen, Written)(config)


class Rehearsal:
    """A model, its optimizer and a batch, prepared by a strategy.

    Args:
        run: What is to be run.
        strategy: Connected.
        watch: What looks on.
    """

    def __init__(self, run: Run, strategy: Strategy, watch: Watch) -> None:
        import torch

        from distkit.advise.exact.model import ReferenceModel
        from distkit.precision import Precision

        self.run, self.strategy, self.watch = run, strategy, watch
        sizes = replace(sizes_of(run.model, fused=run.fused_attention), layers=run.layers)
        model = ReferenceModel(sizes)
        optimizer = _optimizer(run.optimizer, model)
        watch.note_state({"parameters": [p.detach() for p in model.parameters()]})
        precision = Precision(strategy.config.precision, torch.device("cpu"))
        (self.model,), (self.optimizer,) = strategy.prepare([model], [optimizer], precision)
        watch.note_state(strategy.state_tensors())
        group = None if strategy.world is None else strategy.world.collectives.tensor_group
        if group is not None:
            watch.quiet_groups.add(group.group_name)
        for parameter in model.parameters():  # until an engine has reduced them
            parameter.register_post_accumulate_grad_hook(self._whole_gradient)
        self._mark(model)
        self._seen = Seen(sizes.parameters)
        self._phase = ""
        shape = (run.micro, run.sequence)
        self.tokens = torch.randint(0, run.model.vocabulary, shape)
        self.targets = torch.randint(0, run.model.vocabulary, shape)

    def _whole_gradient(self, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            self.watch.allocations.is_buffer([self.watch.piece(parameter.grad)])

    def _mark(self, model: Any) -> None:
        """Let every module begin a stretch in forward, and one when the gradient of its output is there.

        In a stretch as short as that the peak is at one operation, whatever the number of layers; in longer ones it could
        move.
        """
        layers = len(model.layers)
        for name, module in model.named_modules():
            if any(True for _ in module.children()):
                continue
            head, _, rest = name.partition(".")
            if head == "layers":
                index, _, rest = rest.partition(".")
                name = f"{_place(int(index), layers)} {rest}"
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
            module.register_forward_hook(lambda _, __, output, name=name: self._on_gradient(output, name))

    def _on_gradient(self, output: Any, name: str) -> None:
        local = getattr(output, "local", output)  # of one that a tensor group shares
        if local.requires_grad:
            local.register_hook(lambda gradient: self._enter(f"{name} gradient"))

    def _enter(self, where: str) -> None:
        self.watch.allocations.enter(f"{self._phase}: {where}")

    def step(self, *, look: bool = True) -> None:
        """An optimizer step.

        Args:
            look: Whether it is to be looked at; of an earlier one, which makes the optimizer's state, only one micro batch
                is run.
        """
        import torch

        strategy, optimizer, watch = self.strategy, self.optimizer, self.watch
        accumulates = look and self.run.accumulate > 1
        if look:
            gc.collect()
            watch.allocations.begin()
        for last in (False, True) if accumulates else (True,):
            start = len(watch.calls)
            batch = "last micro batch" if last else "micro batch before"
            self._phase = f"{batch}, forward"
            self._enter("start")
            strategy.set_gradient_sync(last)
            logits = self.model(self.tokens)
            self._enter("loss")
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
            del logits
            self._phase = f"{batch}, backward"
            self._enter("start")
            strategy.backward(loss / self.run.accumulate, optimizer=optimizer)
            del loss
            watch.note_state(_gradients(strategy))
            if look and not last:
                self._seen.first = self._called(start)
        self._phase = "optimizer"
        self._enter("gradients")
        watch.stepping = True
        strategy.unscale(optimizer)
        strategy.scale_gradients(optimizer, 1.0)
        watch.note_state(_gradients(strategy))
        strategy.clip_grad_norm(optimizer, 1.0)
        self._enter("step")
        strategy.optimizer_step(optimizer)
        watch.stepping = False
        watch.note_state(strategy.state_tensors())
        strategy.zero_grad(optimizer)
        if look:
            self._seen.last = self._called(start)

    def _called(self, start: int) -> list[Called]:
        found: dict[tuple[str, int, int], Called] = {}
        for call, ranks in self.watch.calls[start:]:
            here = sum(rank // self.run.each == 0 for rank in ranks)
            key = (call.what, call.ranks, here)
            one = found.setdefault(key, Called(*key))
            one.count += 1
            one.message += call.message
        return list(found.values())

    def seen(self) -> Seen:
        """What was seen of the step that was looked at."""
        self._seen.peaks = {peak.where: peak.kinds for peak in self.watch.allocations.peaks()}
        return self._seen


def _gradients(strategy: Strategy) -> dict[str, list[torch.Tensor]]:
    return {"gradients": strategy.state_tensors().get("gradients", [])}


def _place(index: int, layers: int) -> str:
    """The same name for layers that do the same in models of different depth."""
    if index < EDGE:
        return f"layer {index}"
    return f"layer {index - layers}" if index >= layers - EDGE else "middle"


def _optimizer(name: str, model: torch.nn.Module) -> Optimizer:
    """torch's, parameter by parameter: what works on lists of them counts as one operation and shows no single tensor."""
    from torch import optim

    same: dict[str, Any] = {"params": model.parameters(), "lr": 1e-3, "foreach": False}
    if name == "momentum":
        return optim.SGD(momentum=0.9, **same)
    classes: dict[str, Any] = {
        "adamw": optim.AdamW,
        "adam": optim.Adam,
        "nadam": optim.NAdam,
        "radam": optim.RAdam,
        "adagrad": optim.Adagrad,
        "rmsprop": optim.RMSprop,
        "sgd": optim.SGD,
    }
    if name not in classes:
        raise PlanError(
            f"--optimizer was set to {name!r}, which --exact can't run: it runs torch's own {', '.join(OPTIMIZERS)}",
            hint="--optimizer adamw",
        )
    made: Optimizer = classes[name](**same)
    return made


def main() -> None:
    """Read what to run, run it with each number of layers, and write what was seen."""
    answer = sys.stdout
    sys.stdout = sys.stderr  # engines print
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    asked = json.load(sys.stdin)
    run = Run(**{**asked["run"], "model": ModelShape(**asked["run"]["model"])})
    try:
        for layers in asked["layers"]:
            answer.write(json.dumps({"layers": layers, "seen": asdict(rehearse(replace(run, layers=layers)))}) + "\n")
            answer.flush()
    except DistkitError as error:
        answer.write(json.dumps({"error": error.message, "hint": error.hint}) + "\n")


if __name__ == "__main__":
    main()
