"""Preparing the script's objects; before anything is wrapped: do they belong together, are ranks alike?"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from distkit.config import Config
from distkit.config.schema import BatchConfig
from distkit.data import PreparedLoader, batch_size_of, resolve_batch
from distkit.errors import OutOfStepError, UsageError
from distkit.held import Held
from distkit.precision import Precision
from distkit.state import clean_name
from distkit.stepping import Stepper
from distkit.strategies.base import Strategy
from distkit.strategies.modules import group_name
from distkit.world import World

if TYPE_CHECKING:
    from distkit.pace import PaceSetter

__all__ = ["Objects", "Preparer", "compare_across_ranks", "find_aliases", "sort_objects"]


class Preparer:
    """Takes objects from the script and gives back those that work under the strategy.

    Args:
        strategy: Wraps modules and optimizers.
        world: All ranks.
        config: ``batch``, ``data`` and ``seed`` are used.
        precision: How to cast.
        held: Where everything is noted.
        stepper: Gets the optimizers.
        listener: Told of batches by the loaders.
    """

    def __init__(
        self,
        strategy: Strategy,
        world: World,
        config: Config,
        precision: Precision,
        held: Held,
        stepper: Stepper,
        listener: PaceSetter,
    ) -> None:
        self.strategy, self.world, self.config, self.precision = strategy, world, config, precision
        self.held, self.stepper, self.listener = held, stepper, listener

    def prepare(self, objects: Sequence[Any]) -> tuple[Any, ...]:
        """See :meth:`distkit.Trainer.prepare`."""
        given = sort_objects(objects)
        if given.models or given.optimizers:
            self.world.control.together("prepare")
            compare_across_ranks(self.world, given.models)
        own = [self.strategy.unwrap(model) for model in self.held.models]
        check_ownership(given.optimizers, [*own, *given.models])
        self._note_aliases(given.models)
        if self.strategy.example_loader is None and given.loaders:
            self.strategy.example_loader = given.loaders[0]
        models, optimizers = self.strategy.prepare(given.models, given.optimizers, self.precision)
        self.held.models += models
        self._attach(given, optimizers)
        loaders = [self._prepare_loader(loader) for loader in given.loaders]
        replaced: dict[int, Any] = {
            id(old): new
            for olds, news in ((given.models, models), (given.optimizers, optimizers), (given.loaders, loaders))
            for old, new in zip(olds, news, strict=True)
        }
        return tuple(replaced.get(id(item), item) for item in objects)

    def missing(self, objects: Sequence[Any]) -> list[Any]:
        """Prepare those that were not prepared before."""
        known = {id(x) for x in (*self.held.models, *self.held.loaders, *self.held.schedulers)}
        known |= {id(run.optimizer) for run in self.stepper.runs}
        missing = [x for x in objects if id(x) not in known]
        new = dict(zip(map(id, missing), self.prepare(missing), strict=True)) if missing else {}
        return [new.get(id(x), x) for x in objects]

    def _note_aliases(self, models: Sequence[nn.Module]) -> None:
        """Tied weights are found by identity, so before anything is wrapped."""
        for index, model in enumerate(models, start=len(self.held.models)):
            self.held.aliases[group_name("model", index)] = find_aliases(model)

    def _attach(self, given: Objects, optimizers: Sequence[Optimizer]) -> None:
        self.held.schedulers += given.schedulers
        for old, new in zip(given.optimizers, optimizers, strict=True):
            own = [s for s in self.held.schedulers if getattr(s, "optimizer", None) in (old, new)]
            for scheduler in own:
                scheduler.optimizer = new
            self.stepper.attach(new, own[0] if own else None)
        for scheduler in given.schedulers:
            for run in self.stepper.runs:
                if scheduler.optimizer is run.optimizer and run.rates.scheduler is None:
                    run.rates.scheduler = scheduler
                    run.rates.restored()

    def _prepare_loader(self, loader: Any) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            return loader
        size = self.world.data.size
        if self.held.loaders:  # evaluation data and the like: its own batch size on each device
            plan = resolve_batch(BatchConfig(), batch_size_of(loader), size)
        else:
            plan = resolve_batch(self.config.batch, batch_size_of(loader), size)
        prepared = PreparedLoader(
            loader,
            plan=plan,
            rank=self.world.data.rank,
            size=size,
            device=self.world.device,
            seed=self.config.seed,
            config=self.config.data,
            any_rank=self.world.any if self.world.size > 1 else None,
            listener=self.listener,
        )
        if not self.held.loaders:
            self.stepper.set_accumulate(prepared.plan.accumulate)
        self.held.loaders.append(prepared)
        return prepared


@dataclass
class Objects:
    """What was given to ``prepare``, by kind, in the user's order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)


def sort_objects(given: Sequence[Any]) -> Objects:
    """Tell the objects apart.

    Raises:
        UsageError: Something that can't be prepared.
    """
    objects = Objects()
    for item in given:
        if isinstance(item, nn.Module):
            objects.models.append(item)
        elif isinstance(item, Optimizer):
            _refuse_closure(item)
            objects.optimizers.append(item)
        elif isinstance(item, LRScheduler | ReduceLROnPlateau):
            objects.schedulers.append(item)
        elif isinstance(item, DataLoader):
            objects.loaders.append(item)
        else:
            raise UsageError(
                f"trainer.prepare() was given a {type(item).__name__}, and takes modules, optimizers, schedulers and DataLoaders",
                hint="model, optimizer, loader = trainer.prepare(model, optimizer, loader)",
            )
    return objects


def _refuse_closure(optimizer: Optimizer) -> None:
    """The Trainer has run forward and backward when it steps, and can't run them again.

    Raises:
        UsageError: The optimizer asks for that (LBFGS).
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and the Trainer steps with gradients that "
            "are there",
            hint="an optimizer whose step() needs no closure, such as AdamW",
        )


def check_ownership(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    """Every optimizer's parameters belong to a prepared model.

    Raises:
        UsageError: Counting those that don't.
    """
    known = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            raise UsageError(
                f"{len(strangers)} parameters of {type(optimizer).__name__} belong to no prepared model, so they would "
                f"be trained on each rank apart (the first has the shape {tuple(strangers[0].shape)})",
                hint="model, optimizer = trainer.prepare(model, optimizer)   with the model that the optimizer was made for",
            )


def find_aliases(model: nn.Module) -> dict[str, str]:
    """Tied parameters, by identity.

    Returns:
        For each further name of a parameter, the name that it has in ``named_parameters()``.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), clean_name(name))
        if canonical != clean_name(name):
            aliases[clean_name(name)] = canonical
    return aliases


def compare_across_ranks(world: World, models: Sequence[nn.Module]) -> None:
    """Names, shapes, dtypes and order of all parameters and buffers are the same on every rank.

    One digest a rank travels; whole lists only when they differ.

    Raises:
        OutOfStepError: Naming the first difference.
    """
    if world.size == 1:
        return
    lines = [_describe(name, tensor) for model in models for name, tensor in _state(model)]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(world.all_gather_objects(digest))) == 1:
        return
    everyone = world.all_gather_objects(lines)
    raise OutOfStepError(
        f"the models differ between ranks: {_first_difference(everyone)}",
        hint="build the same model on every rank; nothing in its size or order may depend on the rank or on a random number",
    )


def _state(model: nn.Module) -> list[tuple[str, Any]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _describe(name: str, tensor: Any) -> str:
    trained = ", trained" if tensor.requires_grad else ""
    return f"{clean_name(name)} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trained}"


def _first_difference(everyone: list[list[str]]) -> str:
    here = everyone[0]
    for rank, lines in enumerate(everyone):
        if lines == here:
            continue
        for index in range(max(len(here), len(lines))):
            a = here[index] if index < len(here) else "nothing"
            b = lines[index] if index < len(lines) else "nothing"
            if a != b:
                return f"tensor {index} is {a} on rank 0 and {b} on rank {rank}"
    return "no difference"
