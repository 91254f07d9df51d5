"""Building a model without its values, and giving it later the values that it would have had.

While :class:`DeferredInit` is open, tensors are made on the meta device and the operations on them are noted. Replaying
the notes on the host gives each parameter exactly the values of an ordinary construction with the same seed, custom
initialisation included, one tensor at a time: so each rank can keep its own shard and drop the rest.

The idea is that of torchdistX's ``deferred_init`` (github.com/pytorch/torchdistx, no longer kept up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from distkit.errors import UsageError

__all__ = ["DeferredInit", "View"]

FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
        *("randint", "randn", "randperm", "tril_indices", "triu_indices", "zeros"),
    )
)
"""Functions that make a tensor from nothing. ``torch.tensor`` isn't among them: its values are there already."""

OVERWRITES = frozenset(
    (
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
        "copy_",
    )
)
"""In-place operations after which nothing of the former values is left."""


@dataclass(frozen=True)
class View:
    """How a tensor looks at a storage; storages are known by their address while notes are taken."""

    storage: int
    nbytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that this tensor is."""
        held = tensor.untyped_storage()
        return cls(
            held._cdata, held.nbytes(), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def whole(self) -> bool:
        """Whether it covers its storage."""
        count = torch.Size(self.size).numel()
        return count * self.dtype.itemsize == self.nbytes and self.offset == 0


@dataclass
class _Note:
    """One operation.

    Args:
        function: What was called.
        arguments: Flattened, meta tensors as :class:`View`.
        structure: To put them together again.
        written: Storages that it changes or makes.
        read: Storages whose former values matter.
        made: Views of its results in storages that it makes, with their places among the results.
        random: Whether it draws random numbers.
        state: State of the generator to draw from; None goes on from the last drawing.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    structure: Any
    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    made: list[tuple[int, View]] = field(default_factory=list)
    random: bool = False
    state: torch.Tensor | None = None


class DeferredInit:
    """Notes of all constructions; may be opened more than once."""

    def __init__(self) -> None:
        self.notes: list[_Note] = []
        self._kept: dict[int, torch.UntypedStorage] = {}
        """Keeps noted storages alive, so that their addresses stay theirs."""
        self._last_state: torch.Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Modules built inside are on the meta device."""
        draws = torch.nn.init._no_grad_trunc_normal_

        def deferred(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # Draws again until all values are inside its bounds (torch 2.13, nn/init.py), which needs values.
            if tensor.device.type != "meta":
                drawn: torch.Tensor = draws(tensor, *args, **kwargs)
                return drawn
            self._note(draws, (tensor, *args), kwargs, tensor, writes=[tensor], random=True)
            return tensor

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", deferred))
            stack.enter_context(_Noting(self))
            stack.enter_context(_OnMeta())
            yield

    def knows(self, view: View) -> bool:
        """Whether the storage was made while recording."""
        return view.storage in self._kept

    # -- taking notes -----------------------------------------------------------------------------------------------

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """One operator call; views are not noted, since every tensor is noted as what it sees of its storage."""
        schema = function._schema
        writes = [
            value
            for argument, value in _bound(schema, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        random = torch.Tag.nondeterministic_seeded in function.tags
        self._note(function, args, kwargs, result, writes=writes, random=random)

    def _note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        writes: list[Any],
        random: bool,
    ) -> None:
        flat, structure = tree_flatten((args, kwargs))
        note = _Note(function, [_encode(value) for value in flat], structure, random=random)
        inputs = {value.storage for value in note.arguments if isinstance(value, View)}
        targets = [View.of(tensor) for tensor in tree_flatten(writes)[0] if _is_meta(tensor)]
        results = [(place, View.of(value)) for place, value in enumerate(tree_flatten(result)[0]) if _is_meta(value)]
        note.made = [(place, view) for place, view in results if view.storage not in inputs]
        note.written = {view.storage for view in (*targets, *(view for _, view in note.made))}
        name = getattr(function, "_schema", None)
        overwritten = {
            view.storage for view in targets if view.whole and name is not None and _bare(name.name) in OVERWRITES
        }
        sources = {view.storage for view in note.arguments[1:] if isinstance(view, View)}
        note.read = (inputs - overwritten) | (sources & overwritten)
        if not note.written:
            return
        for tensor in tree_flatten((args, kwargs, result))[0]:
            if _is_meta(tensor):
                self._kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        if random:
            state = torch.get_rng_state()
            if self._last_state is None or not torch.equal(state, self._last_state):
                note.state = self._last_state = state
        self.notes.append(note)

    # -- replaying --------------------------------------------------------------------------------------------------

    def replay(
        self, wanted: dict[int, Callable[[torch.UntypedStorage], None]], agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Work the notes off on the host, and hand out each wanted storage when nothing more is going to change it.

        Args:
            wanted: For each storage what to do with its final values; it is freed afterwards.
            agree: Makes a generator's state that of rank 0.
        """
        plan = self._plan(set(wanted))
        real: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for note, live, done in zip(self.notes, *plan, strict=True):
                if note.state is not None:
                    torch.set_rng_state(agree(note.state))
                if live or note.random:
                    self._run(note, real if live else {})
                for storage in done:
                    if storage in wanted:
                        wanted[storage](real[storage])
                    real.pop(storage, None)

    def _plan(self, wanted: set[int]) -> tuple[list[bool], list[list[int]]]:
        """Which notes matter, and which storages are done after each."""
        needed = set(wanted)
        seen: set[int] = set()
        live: list[bool] = []
        done: list[list[int]] = []
        for note in reversed(self.notes):
            matters = bool(note.written & needed)
            touched = note.written | {v.storage for v in note.arguments if isinstance(v, View)} if matters else set()
            live.append(matters)
            done.append(sorted(touched - seen))
            seen |= touched
            if matters:
                needed = (needed - note.written) | note.read
        return live[::-1], done[::-1]

    def _run(self, note: _Note, real: dict[int, torch.UntypedStorage]) -> None:
        def decode(value: Any) -> Any:
            if isinstance(value, View):
                if value.storage not in real:
                    real[value.storage] = torch.UntypedStorage(value.nbytes)
                return value.on(real[value.storage])
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_unflatten([decode(value) for value in note.arguments], note.structure)
        results = tree_flatten(note.function(*args, **kwargs))[0]
        for place, view in note.made:
            tensor = results[place]
            if (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) != (view.size, view.stride, view.offset):
                target = view.on(torch.UntypedStorage(view.nbytes))
                tensor = target.copy_(tensor)
            real[view.storage] = tensor.untyped_storage()


class _Noting(TorchDispatchMode):
    """Sees every operator below autograd."""

    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deferred = deferred

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_is_meta(value) for value in tree_flatten((args, kwargs))[0]):
            _refuse_what_needs_values(func, args, kwargs)
            stay = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
            stay = tree_map_only(torch.device, lambda _: torch.device("meta"), stay)
            result = func(*stay[0], **stay[1])
        else:
            result = func(*args, **kwargs)
        if any(_is_meta(value) for value in tree_flatten((args, kwargs, result))[0]):
            self.deferred.note(func, args, kwargs, result)
        return result


class _OnMeta(TorchFunctionMode):
    """New tensors are made on the meta device, without anybody's noticing: torch's and other libraries' initialisation
    is skipped on tensors that say they are there, and under ``torch.device("meta")``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.is_meta and func.__name__ == "__get__":
            return False
        if func in FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _refuse_what_needs_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func is torch.ops.aten._local_scalar_dense.default:
        raise UsageError(
            "the model's constructor looks at the values of a tensor, which aren't there under trainer.init_model()",
            hint="make that tensor with device='cpu', or build the model outside of trainer.init_model()",
        )
    for argument, value in _bound(func._schema, args, kwargs):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(value, torch.Tensor) and not _is_meta(value):
            raise UsageError(
                f"the model's constructor writes values that aren't there under trainer.init_model() into a tensor that "
                f"has some ({func})",
                hint="make that tensor without device='cpu', or build the model outside of trainer.init_model()",
            )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Real tensors beside meta ones take part with their shapes; numbers (no dimensions) may stay."""
    return tensor if _is_meta(tensor) or tensor.dim() == 0 else torch.empty_like(tensor, device="meta")


def _encode(value: Any) -> Any:
    return View.of(value) if _is_meta(value) else value


def _bare(name: str) -> str:
    return name.rpartition("::")[2]


def _bound(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The schema's arguments with what was given for them."""
    for index, argument in enumerate(schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
