"""The interface of a strategy. All that an engine does differently is in its own file, behind these methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from distkit.state import clean_name

if TYPE_CHECKING:
    import torch

    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.state import OptimizerLayout, ReadShard, Shard
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["Capabilities", "Strategy"]


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do; the table of the documentation and `distkit strategies` are made from it.

    Args:
        summary: One line: what it is.
        engine: The library that does the work, as a pip requirement; empty for torch itself.
        layers: A second library that it needs, whose layers it computes with; empty for none.
        processes: ``one`` process in all, or ``many``.
        shards: Which of ``parameters``, ``gradients``, ``optimizer`` are split over data-parallel ranks.
        precisions: Which values of ``precision`` it takes.
        offload: Which values of ``memory.offload`` it takes.
        tensor_parallel: Whether ``parallel.tensor`` above 1 works with it.
        lr_scaling: What ``optim.lr_scaling: auto`` means here.
        compress: Which values of ``compress.method`` it takes.
        install: The line that installs the engine.
        best_for: When to choose it, one short sentence.
    """

    summary: str
    engine: str = ""
    layers: str = ""
    processes: str = "many"
    shards: frozenset[str] = frozenset()
    precisions: frozenset[str] = frozenset({"fp32", "bf16", "fp16", "bf16-pure"})
    offload: frozenset[str] = frozenset({"none"})
    tensor_parallel: bool = False
    lr_scaling: str = "none"
    compress: frozenset[str] = frozenset({"none"})
    install: str = ""
    best_for: str = ""


class Strategy(ABC):
    """One way of training. The Trainer calls the methods in this order.

    ``connect``, then ``prepare`` once or more, then for each micro batch ``set_gradient_sync``, the user's forward,
    ``backward``; at the end of a window ``unscale``, ``scale_gradients``, ``clip_grad_norm``, ``optimizer_step``,
    ``zero_grad``; ``shards`` and ``load_shards`` at checkpoints; ``close``.

    Gradients: ``backward`` is given the loss times its weight in the window (see :mod:`distkit.window`), so that the
    *sum* over micro batches and data-parallel ranks is the gradient. An engine that averages over ranks says so in
    ``averages_gradients``, and the window multiplies by the number of ranks; no engine divides by anything else.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    averages_gradients: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.world: World | None = None
        """Set by ``connect``."""
        self.models: list[torch.nn.Module] = []
        """The users' own modules that were prepared, in their order."""
        self.optimizers: list[torch.optim.Optimizer] = []
        """The prepared optimizers, in their order; empty where the engine holds them otherwise."""
        self.example_loader: Any = None
        """The script's training DataLoader, once it is prepared: for strategies that must see a model's forward."""

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """Refuse what can't work before anything starts; called by the launcher too, without torch loaded.

        Args:
            config: The merged settings.
            processes: Number of processes, where it is known.

        Raises:
            ConfigError: The settings contradict what the strategy can do.
            StrategyUnavailable: The engine isn't installed; the hint is the install line.
        """
        from distkit.strategies.checks import check_capabilities

        check_capabilities(cls, config, processes)

    @classmethod
    def defaults(cls, processes_per_node: int) -> dict[str, Any]:
        """Settings whose default is another one under this strategy, by dotted name."""
        return {}

    @classmethod
    def for_run(cls, config: Config) -> type[Strategy]:
        """The class that runs: this one, or with ``parallel.tensor`` above 1 the one over models whose layers are split."""
        if config.parallel.tensor == 1:
            return cls
        cls.check(config, processes=None)
        from distkit.strategies.tensor_parallel.mixin import with_tensor_parallelism

        return with_tensor_parallelism(cls)

    @property
    def lr_scaling(self) -> str:
        """What ``optim.lr_scaling: auto`` means under this run's settings."""
        return self.capabilities.lr_scaling

    @classmethod
    def engine_config(cls, config: Config, processes: int | None) -> dict[str, Any] | None:
        """The engine's own configuration file that these settings make, as JSON values; None where it has none.

        Args:
            config: The merged settings.
            processes: Number of processes, where it is known.
        """
        return None

    @abstractmethod
    def connect(self, environment: Environment) -> World:
        """Join the other processes and choose the device."""

    @abstractmethod
    def prepare(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], precision: Precision
    ) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Put the modules on the device and wrap them, so that calling one trains in step with the other ranks.

        Args:
            models: In the user's order; already compared between ranks and with tied weights noted.
            optimizers: In the user's order, each over parameters of these models. The returned ones must step the
                live parameters.
            precision: Says how to cast the forward and whether the loss is scaled.
        """

    @property
    def sees_outputs(self) -> bool:
        """Whether the engine looks for the graph behind what a model's forward returns."""
        return False

    def modules_with_hooked_arguments(self, model: torch.nn.Module) -> Iterable[torch.nn.Module]:
        """The modules of a prepared model whose arguments the engine passes through functions of its own."""
        return ()

    def whole_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a model gave out, with nothing of it on other ranks of a tensor group; called by all of those."""
        return tensor

    def notes(self) -> list[str]:
        """Lines for the start of the log: what a user should know of this strategy on this machine."""
        return []

    def init_model(self) -> AbstractContextManager[None]:
        """While it is open, modules are built the way that suits the engine (sharded, or on the meta device)."""
        return nullcontext()

    @abstractmethod
    def set_gradient_sync(self, sync: bool) -> None:
        """Whether the micro batch that comes next ends its window: only then gradients travel. Before its forward."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Accumulate the gradients of this scalar."""

    def sync_accumulated(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange gradients that were accumulated with sync off, when a window ends unforeseen."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the fp16 loss scale out of the gradients."""

    @abstractmethod
    def scale_gradients(self, optimizer: torch.optim.Optimizer, factor: torch.Tensor | float) -> None:
        """Multiply all gradients of the optimizer by a factor that is the same on all ranks; nothing if it is 1.0."""

    @abstractmethod
    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Clip by the global 2-norm; ``inf`` only measures it.

        Returns:
            The norm before clipping, a scalar on the device, the same on all ranks.
        """

    @abstractmethod
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step. Returns False when the step was skipped because a gradient overflowed (fp16)."""

    @abstractmethod
    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients."""

    @abstractmethod
    def without_gradient(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of the optimizer's trained parameters that backward left without a gradient, before its step."""

    @abstractmethod
    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's own module inside a prepared one."""

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """This rank's share of the state, each element of the state on exactly one rank. No collectives that some
        ranks might skip; no rank holds more than its share plus one tensor."""

    @abstractmethod
    def optimizer_layouts(self) -> list[OptimizerLayout]:
        """Parameter groups and fields of each optimizer, by parameter name; the same on all ranks."""

    @abstractmethod
    def load_shards(self, read: ReadShard, layouts: Sequence[OptimizerLayout]) -> None:
        """Fill parameters, buffers and optimizer states; reads only what this rank needs."""

    @abstractmethod
    def full_parameters(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """While it is open every parameter of the model is whole on every rank; called by all."""

    def global_shapes(self, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the parameters and persistent buffers of a user's own module, by name."""
        from distkit.strategies.modules import named_buffers

        shapes = {clean_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return {**shapes, **{name: tuple(buffer.shape) for name, buffer in named_buffers(model)}}

    def masters(self, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]] | None:
        """Each parameter with the values that the optimizer steps, put together from the data-parallel ranks; called by all.
        None where they are the parameters themselves."""
        return None

    def model_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The whole state of a model in its own names, on the CPU of rank 0; empty on other ranks. Called by all."""
        with self.full_parameters(model):
            if self.is_main:
                return {clean_name(name): tensor.detach().cpu().clone() for name, tensor in _state(self.unwrap(model))}
        return {}

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that this rank holds now, by kind: ``parameters``, ``gradients``, ``optimizer``, ``buffers``.

        For :func:`distkit.memory.count_state`, which counts each storage once. An engine that keeps gradients or
        optimizer states elsewhere than in ``self.models`` and ``self.optimizers`` says here where.
        """
        from distkit.memory import state_of

        return state_of(self.models, self.optimizers)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.world is None or self.world.is_main

    def state_dict(self) -> dict[str, Any]:
        """What else the engine must remember (the loss scale); JSON values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""

    def rng_states(self) -> dict[str, torch.Tensor]:
        """States of generators of the engine's own, on the CPU; they are kept for each rank apart."""
        return {}

    def restore_rng_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take them back; what other generators were kept is among them too."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other processes."""


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.state_dict().items():
        if hasattr(value, "detach"):  # extra state of a module may be anything
            yield name, value
