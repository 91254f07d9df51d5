"""What `distkit plan train.py` does in the script's process: look at the model and one step of it, without values.

Parameters are made on the meta device and then stand for fake tensors, which have shapes and no memory. The script's own
forward and loss run on them; what autograd keeps for backward and the operations are counted. Nothing is trained.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distkit.errors import PlanError, UsageError
from distkit.strategies.blocks import find_blocks
from distkit.strategies.single import SingleStrategy
from distkit.strategies.without_data import fake_mode, numbers_without_data

if TYPE_CHECKING:
    from distkit.config import Config
    from distkit.precision import Precision
    from distkit.strategies.tensor_parallel.layout import Layout
    from distkit.world import World
    from distkit.world.environment import Environment

__all__ = ["ProfilePreview", "StepCounter", "layout_without_values", "materialize", "model_facts", "on_meta"]


class ProfilePreview(SingleStrategy):
    """One process, up to the first backward.

    Args:
        config: As for a run.
        done: A file for the facts, as JSON; written when the model is prepared, and again after the step.
    """

    def __init__(self, config: Config, *, done: Path) -> None:
        super().__init__(config)
        self.done = done
        self._facts: dict[str, Any] = {}
        self._open, self._running = ExitStack(), ExitStack()
        self._counter: StepCounter | None = None

    @classmethod
    def check(cls, config: Config, *, processes: int | None) -> None:
        """See :class:`Strategy`; the strategy that is to train has had its say."""

    def connect(self, environment: Environment) -> World:
        """See :class:`Strategy`; from here on parameters have no values."""
        self._open.enter_context(on_meta())
        return super().connect(environment)

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], precision: Precision
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        """Note the first model that is trained, and put fake tensors into it."""
        self._open.close()
        for model in models:
            if not self._facts and any(p.requires_grad for p in model.parameters()):
                self._facts = model_facts(model)
                if optimizers:
                    self._facts["optimizer"] = type(optimizers[0]).__name__.lower()
                    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
                    groups = (group["params"] for group in optimizers[0].param_groups)
                    self._facts["groups"] = [[places[id(p)] for p in group if p.requires_grad] for group in groups]
                self._facts |= {**self._batch(), "settings": asdict(self.config)}
                if self.config.parallel.tensor > 1:
                    self._facts["tensor"] = _tensor_facts(model, self.config, self.example_loader)
                self._write()
                self._counter = StepCounter(model)
            materialize(model, optimizers)
            precision.apply(model)
        self.keep(models, optimizers, precision)
        self._running.enter_context(numbers_without_data())  # scripts read their loss
        if self._counter is not None:
            self._counter.start()
        return list(models), list(optimizers)

    def backward(self, loss: torch.Tensor, *, optimizer: Optimizer | None = None) -> None:
        """Count, and end the process with status 0."""
        if self._counter is not None:
            self._facts["step"] = self._counter.finish(loss)
            self._write()
            raise SystemExit(0)
        super().backward(loss, optimizer=optimizer)

    def _batch(self) -> dict[str, Any]:
        """Samples in a batch of the script's loader, and tokens in each where it hands out whole numbers."""
        batch = getattr(self.example_loader, "batch_size", None)
        return {"batch": batch if isinstance(batch, int) else None}

    def _write(self) -> None:
        self.done.write_text(json.dumps(self._facts), encoding="utf-8")


def model_facts(model: nn.Module) -> dict[str, Any]:
    """What a plan has to know of a model: sizes only.

    Returns:
        JSON values: ``name``, ``parameters`` and ``trained`` (numbers of elements), ``sizes`` (of each parameter), ``blocks``
        (of each repeated block), ``buffers`` (bytes), ``hidden``, ``heads``, ``kv_heads``, ``feed_forward``,
        ``vocabulary``.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    seen: set[int] = set()
    blocks = []
    for _, block in find_blocks(model):
        own = [p for p in block.parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        blocks.append(sum(p.numel() for p in own))
    hidden = _width(parameters)
    heads, kv_heads = _heads(model)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    inner = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    return {
        "name": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in trained),
        "blocks": blocks,
        "sizes": [p.numel() for p in parameters],
        "buffers": sum(b.numel() * b.element_size() for b in model.buffers()),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "feed_forward": max([n for n in inner if n not in tables], default=hidden),
        "vocabulary": max(tables, default=0),
    }


def _width(parameters: Sequence[nn.Parameter]) -> int:
    """The most frequent size among the dimensions of matrices, by how many parameters have it."""
    counts: Counter[int] = Counter()
    for parameter in parameters:
        if parameter.dim() == 2:
            for size in set(parameter.shape):
                counts[size] += 1
    return counts.most_common(1)[0][0] if counts else max((p.shape[-1] for p in parameters if p.dim()), default=1)


def _heads(model: nn.Module) -> tuple[int, int]:
    """Attention heads, and those of keys and values, by the attributes that models have for them; 1 where none is found."""
    names = ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads")
    holders = [getattr(model, "config", None), *model.modules()]
    for holder in holders:
        for name in names:
            found = getattr(holder, name, None)
            if isinstance(found, int) and found > 0:
                kv = getattr(holder, "num_key_value_heads", None)
                return found, kv if isinstance(kv, int) and kv > 0 else found
    return 1, 1


def layout_without_values(model: nn.Module, config: Config, loader: Any) -> Layout:
    """How a tensor group of the size that is set would split a model on the meta device.

    Layers have to be tried out, for which their values are drawn anew: of layers that are all alike only a few, if the model
    runs with them.

    Raises:
        ConfigError: ``parallel.tensor_layout`` names what can't be split so.
        UsageError: The model can't be run on a batch, or the host hasn't the memory.
    """
    from distkit.strategies.tensor_parallel.shortened import lengthen, shorten

    short = copy.deepcopy(model)
    lengths = {} if isinstance(config.parallel.tensor_layout, dict) else shorten(short)
    if lengths:
        with suppress(UsageError):
            return lengthen(_found_layout(short, config, loader), lengths)
    return _found_layout(copy.deepcopy(model), config, loader)


_COPIES = 3
"""Of its weights, while a model's layers are tried out."""


def _found_layout(model: nn.Module, config: Config, loader: Any) -> Layout:
    from distkit.memory import free_on_host
    from distkit.strategies.tensor_parallel.detect import detect, random_twin
    from distkit.strategies.tensor_parallel.example import find_run
    from distkit.strategies.tensor_parallel.wishes import plan_of, wishes_of

    needed, free = _COPIES * sum(p.numel() * p.element_size() for p in model.parameters()), free_on_host()
    if free is not None and needed > free:
        raise PlanError(
            f"how {type(model).__name__} is split over a tensor group is tried out, for which its layers need {needed / 1e9:.1f} GB "
            f"of this host's memory, and {free / 1e9:.1f} GB are free",
            hint="a host with more memory; or leave out what asks for tensor groups: --exact, or parallel.tensor",
        )
    chosen = config.parallel.tensor_layout
    wishes = wishes_of(model, chosen if isinstance(chosen, dict) else {})
    _replace_parameters(model, _drawn)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else _drawn(buffer)
    return detect(model, find_run(model, random_twin(model), loader), config.parallel.tensor, wishes, plan_of(model))


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Values for one on the meta device; random ones, where it isn't of whole numbers."""
    if not tensor.is_meta:
        return tensor.detach()
    random = tensor.is_floating_point()
    return torch.rand(tensor.shape, dtype=tensor.dtype) if random else torch.zeros(tensor.shape, dtype=tensor.dtype)


def _tensor_facts(model: nn.Module, config: Config, loader: Any) -> dict[str, Any]:
    """How a tensor group of the size that is set would split the model."""
    layout, size = layout_without_values(model, config, loader), config.parallel.tensor
    split: dict[int, int] = {}
    for name, how in layout.splits.items():
        module = model.get_submodule(name)
        for key, parameter in module.named_parameters(recurse=False):
            if how.style != "row" or key != "bias":
                split[id(parameter)] = parameter.numel()
    styles = Counter(how.style for how in layout.splits.values())
    mine = [p.numel() // (size if id(p) in split else 1) for p in model.parameters()]
    return {
        "size": size,
        "split": sum(split.values()),
        "sizes": mine,
        "columns": styles["column"],
        "rows": styles["row"],
        "vocabulary": styles["vocabulary"],
    }


@contextmanager
def on_meta() -> Iterator[None]:
    """While it is open, parameters that modules are given lose their values, one by one: a model needs no memory."""
    register = nn.Module.register_parameter

    def without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = meta

    nn.Module.register_parameter = without_values  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(model: nn.Module, optimizers: Sequence[Optimizer], mode: Any = None) -> None:
    """Fake tensors, which have no memory, in the place of parameters and buffers; in the model and in its optimizers.

    Args:
        model: May be on the meta device.
        optimizers: Over its parameters.
        mode: From :func:`distkit.strategies.without_data.fake_mode`: what the tensors are to belong to; None for one of their
            own. Buffers with values keep them then.
    """
    own = fake_mode() if mode is None else mode

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with own:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    made = _replace_parameters(model, fake)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and (buffer.is_meta or mode is not None):
                module._buffers[name] = fake(buffer)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]


def _replace_parameters(model: nn.Module, other: Callable[[nn.Parameter], torch.Tensor]) -> dict[int, nn.Parameter]:
    """Put others in their places; what was tied stays tied.

    Returns:
        The new ones, by the identity of the old.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(other(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    return made


class StepCounter:
    """Counts what one forward and backward keep and compute.

    Args:
        model: Whose step it is; its blocks are looked at one by one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._open = ExitStack()
        self._held: dict[int, torch.Tensor] = {}
        self._own: set[int] = set()
        self._in_block: int | None = None
        self._of_blocks: Counter[int] = Counter()
        self._inputs = 0
        self._samples = 0
        self._tokens = 0

    def start(self) -> None:
        """From here on."""
        from torch.utils.flop_counter import FlopCounterMode

        self._own = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        for place, (_, block) in enumerate(find_blocks(self.model)):
            block.register_forward_pre_hook(self._entering(place), with_kwargs=True)
            block.register_forward_hook(self._leaving)
        self.model.register_forward_pre_hook(self._begins, with_kwargs=True)
        self._flops = FlopCounterMode(display=False)
        self._casts = _Casts(self._own)

    def finish(self, loss: torch.Tensor) -> dict[str, Any]:
        """Run backward, and say what was counted.

        Args:
            loss: The script's.

        Returns:
            ``saved`` (bytes that autograd keeps at the end of the forward, parameters not among them), ``casts`` (bytes of
            parameters in 16 bits that autocast made and autograd keeps, not in the former), ``block_inputs`` (of what is
            saved, the inputs of the blocks), ``largest_block`` (what the largest block keeps), ``in_blocks`` (all of them),
            ``flops`` (forward and backward), ``samples``, ``tokens``.
        """
        self._open.close()
        flops = self._flops.get_total_flops()
        with self._flops:  # begins anew
            loss.backward()
        return {
            "saved": sum(t.untyped_storage().nbytes() for t in self._held.values()),
            "casts": sum(t.untyped_storage().nbytes() for t in self._casts.made.values()),
            "block_inputs": self._inputs,
            "in_blocks": sum(self._of_blocks.values()),
            "largest_block": max(self._of_blocks.values(), default=0),
            "flops": flops + self._flops.get_total_flops(),
            "samples": self._samples,
            "tokens": self._tokens,
        }

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._samples:
            return
        first = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()), None)
        if first is None:
            return
        self._samples = first.shape[0]
        self._tokens = first.numel() if not first.is_floating_point() else 0
        self._open.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
        self._open.enter_context(self._flops)
        self._open.enter_context(self._casts)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held and key not in self._own and key not in self._casts.made:
            self._held[key] = tensor
            if self._in_block is not None:
                self._of_blocks[self._in_block] += storage.nbytes()
        return tensor

    def _entering(self, place: int) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._in_block = place
            first = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), None)
            self._inputs += 0 if first is None else first.numel() * first.element_size()

        return enter

    def _leaving(self, *_: Any) -> None:
        self._in_block = None


class _Casts(TorchDispatchMode):
    """Notes copies of parameters in another dtype.

    Args:
        parameters: Identities of the parameters' storages.
    """

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._parameters:
            self.made[result.untyped_storage()._cdata] = result
        return result
