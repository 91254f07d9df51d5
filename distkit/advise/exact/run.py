"""One candidate, run: the real strategy with a reference model, on one rank of as many as the plan has.

As a program (``python -m distkit.advise.exact.run``) it takes a :class:`Run` as JSON on stdin and answers on stdout. It is a
process of its own since a process group that only pretends is one for the whole process.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from distkit.advise.exact.sizes import sizes_of
from distkit.advise.models import ModelShape
from distkit.errors import DistkitError, PlanError

if TYPE_CHECKING:
    import torch

    from distkit.advise.exact.faking import Watch
    from distkit.advise.exact.observing import Seen
    from distkit.config import Config
    from distkit.strategies.base import Strategy
    from distkit.strategies.tensor_parallel.layout import Layout
    from distkit.world.environment import Environment

__all__ = ["EDGE", "OPTIMIZERS", "Rehearsal", "Run", "one_of_many", "rehearse", "strategy_of", "strategy_over"]

EDGE = 2
"""So many layers at each end of the reference model are looked at one by one."""

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
        target: ``module:function`` that builds the model, of which all layers are run; empty for a reference model of these
            sizes.
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
    target: str = ""

    @property
    def computed_in(self) -> str:
        """The precision that is run: CPUs have no fp16, and bf16 is as large."""
        return "bf16" if self.precision == "fp16" else self.precision

    @property
    def ranks(self) -> int:
        """All."""
        return self.nodes * self.each


def rehearse(run: Run) -> Seen:
    """Run a step of it, on this process alone."""
    from distkit.advise.building import build
    from distkit.advise.exact.allocations import Allocations
    from distkit.advise.exact.faking import Watch, fake_tensors, watching
    from distkit.strategies.without_data import fake_mode

    built = None
    if run.target:
        try:
            built = build(run.target)
        except Exception as error:  # the user's code may raise anything
            problem = f"{type(error).__name__}: {error}"
            raise PlanError(f"{run.target} doesn't build a model: {problem}", hint="leave --exact out") from error
        if not built[1].may_go_into(built[0]):
            raise PlanError(
                f"the {type(built[0]).__name__} of {run.target} has no embedding for tokens, and no batch came with it",
                hint="return model, torch.zeros(1, 3, 224, 224)   a batch beside the model, or leave --exact out",
            )
    with one_of_many(run.strategy, run.nodes, run.each) as environment:
        strategy = strategy_of(run, built)
        strategy.connect(environment)
        watch = Watch(Allocations())
        with fake_tensors(fake_mode()), watching(watch):
            rehearsal = Rehearsal(run, strategy, watch, built)
            rehearsal.step(look=False)
            rehearsal.step()
            seen = rehearsal.seen()
        strategy.close()
    return seen


@contextmanager
def one_of_many(strategy: str, nodes: int, each: int) -> Iterator[Environment]:
    """This process is rank 0 of so many, of which the others don't exist.

    Args:
        strategy: Its name.
        nodes: So many.
        each: Processes on each.

    Raises:
        StrategyUnavailable: The strategy's engine isn't installed.
    """
    from distkit.advise.exact.faking import fake_horovod, fake_ranks
    from distkit.world.environment import Environment

    ranks = nodes * each
    if strategy == "horovod":
        from distkit.strategies.horovod_connect import import_horovod

        import_horovod()
    source = "horovodrun" if strategy == "horovod" else "torchrun"
    with fake_horovod(ranks) if strategy == "horovod" else fake_ranks(ranks):
        yield Environment(0, ranks, 0, each, 0, nodes, source, "127.0.0.1", 1)


def strategy_of(run: Run, built: Any = None, **more: Any) -> Strategy:
    """The strategy, as its settings make it.

    Args:
        run: What is to be run.
        built: The model of the user's function and its inputs; None for the reference model.
        more: Further settings, by name with underscores for dots.
    """
    from distkit.advise.exact.model import tensor_layout
    from distkit.config import load_config

    config = load_config(
        overrides=[f"{key}={json.dumps(value)}" for key, value in _settings(run, **more).items()]
    ).config
    if run.tensor == 1:
        return strategy_over(config, run.ranks)
    if built is not None:
        from distkit.strategies.profiling import layout_without_values

        model, inputs = built
        if getattr(model, "example_input_array", None) is None:
            model.example_input_array = inputs.example_for(model)
        layout = layout_without_values(model, config, None)
    else:
        layout = tensor_layout(replace(sizes_of(run.model, fused=run.fused_attention), layers=run.layers), run.tensor)
    return strategy_over(config, run.ranks, lambda _: layout)


def strategy_over(config: Config, ranks: int, layout_of: Callable[[torch.nn.Module], Layout] | None = None) -> Strategy:
    """The strategy of these settings.

    Args:
        config: The settings.
        ranks: As many as the plan has.
        layout_of: How a model is split over a tensor group: rank 0 needn't look at numbers to find out.
    """
    from distkit.strategies.registry import strategy_class

    chosen = strategy_class(config.strategy)
    chosen.check(config, processes=ranks)
    if layout_of is None:
        return chosen.for_run(config)(config)
    from distkit.strategies.tensor_parallel.mixin import TensorParallelMixin, with_tensor_parallelism

    found = layout_of

    class Written(TensorParallelMixin):
        def _agreed_layout(self, model: torch.nn.Module) -> Layout:
            return found(model)

    return with_tensor_parallelism(chosen, Written)(config)


def _settings(run: Run, **more: Any) -> dict[str, Any]:
    from distkit.strategies.zero_config import reduce_bucket_size

    found: dict[str, Any] = {
        "strategy": run.strategy,
        "precision": run.computed_in,
        "device": "cpu",
        "parallel.tensor": run.tensor,
        "memory.activation_checkpointing": run.recompute,
        "memory.offload": run.offload,
        **{key.replace("_", "."): value for key, value in more.items()},
    }
    if run.strategy.startswith("zero") and not run.target:  # that of the whole model, however many layers are run
        size = reduce_bucket_size(sizes_of(run.model).parameters // run.tensor)
        found["engine.deepspeed"] = {"zero_optimization": {"reduce_bucket_size": size}}
    return found


class Rehearsal:
    """A model, its optimizer and a batch, prepared by a strategy.

    Args:
        run: What is to be run.
        strategy: Connected.
        watch: What looks on.
        built: The model of the user's function and its inputs; None for the reference model.
    """

    def __init__(self, run: Run, strategy: Strategy, watch: Watch, built: Any = None) -> None:
        import torch

        from distkit.advise.exact.observing import Observer
        from distkit.advise.exact.subjects import subject_of
        from distkit.precision import Precision

        self.run, self.strategy = run, strategy
        self.subject = subject_of(run, built)
        self.observer = Observer(strategy, watch, each=run.each, place=self.subject.place)
        precision = Precision(strategy.config.precision, torch.device("cpu"))
        prepared = self.observer.prepare([self.subject.model], [self.subject.optimizer], precision)
        (self.model,), (self.optimizer,) = prepared

    def step(self, *, look: bool = True) -> None:
        """An optimizer step, as the Trainer takes it.

        Args:
            look: Whether it is to be looked at; of an earlier one, which makes the optimizer's state, only one micro batch
                is run.
        """
        strategy, optimizer = self.strategy, self.optimizer
        for last in (False, True) if look and self.run.accumulate > 1 else (True,):
            strategy.set_gradient_sync(last)
            self.observer.forward_begins()
            loss = self.subject.loss(self.model)
            strategy.backward(loss / self.run.accumulate, optimizer=optimizer)
            del loss
        strategy.unscale(optimizer)
        strategy.scale_gradients(optimizer, 1.0)
        strategy.clip_grad_norm(optimizer, 1.0)
        strategy.optimizer_step(optimizer)
        strategy.zero_grad(optimizer)

    def seen(self) -> Seen:
        """What was seen of the step that was looked at."""
        return self.observer.seen()


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
