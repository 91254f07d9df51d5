"""Finding out what can be split, by looking at what depends on what.

A copy of the model with random weights runs once on an example. The graph is cut behind every linear layer and embedding, so
that what reaches a layer's input comes from the layers just before it. For each layer B and each rank's slice of B's input
features, one backward pass shows on which output features of which layer A that slice depends. Where the slices depend on
parts of A that don't overlap, A can be split by column and B by row, and the parts say how: one run a rank for a plain
layer, several for a fused q, k, v, whole heads for attention, whichever way it is written. A normalisation or anything else
that mixes features makes the parts overlap, and the layers stay whole.

torch's own attention has no layers to look at, but it is known what it computes: it is split by heads. The layout is then
tried out (:mod:`.trial`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from distkit.strategies.tensor_parallel.apply import tied_otherwise
from distkit.strategies.tensor_parallel.attention import inputs_of_call, out_of, turn_off_fast_paths
from distkit.strategies.tensor_parallel.kinds import Kind, kind_of
from distkit.strategies.tensor_parallel.layout import COLUMN, REPLICATE, ROW, Layout, Runs, Split, join_runs
from distkit.strategies.tensor_parallel.trial import try_out
from distkit.strategies.tensor_parallel.vocabulary import enter_vocabulary
from distkit.strategies.tensor_parallel.wishes import refuse_unmet

__all__ = ["detect", "random_twin"]

Run = Callable[[nn.Module], Any]
"""Calls a model on the example."""


@dataclass
class _Trace:
    """One run of the twin, cut behind every layer.

    Args:
        outputs: By layer, what it gave in each call; leaves of the graph.
        inputs: By layer, what reached it in each call.
    """

    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass
class _Group:
    """A row layer and the column layers that feed it."""

    row: str
    columns: dict[str, tuple[Runs, ...]]


def detect(
    model: nn.Module,
    run: Run,
    size: int,
    wishes: Mapping[str, str] | None = None,
    plan: Mapping[str, str] | None = None,
) -> Layout:
    """Find the layers of a model that can be split.

    Args:
        model: Not changed; its values don't matter.
        run: Calls a model like it on an example, in evaluation mode.
        size: Ranks of a tensor group.
        wishes: Styles that the settings want, by layer; they come first.
        plan: Styles of the model's own plan, by layer; they come next, and the rest is free.

    Returns:
        The layout; what isn't recognised is not in it, and ``notes`` say why.

    Raises:
        ConfigError: A layer can't be split as the settings want.
    """
    wishes, plan = wishes or {}, plan or {}
    twin = random_twin(model)
    turn_off_fast_paths(twin, [name for name, _ in twin.named_modules()])
    kinds = {name: kind for name, module in twin.named_modules() if (kind := kind_of(module)) is not None}
    with _reproducible():
        trace = _trace(twin, kinds, run)
    layout = Layout(size)
    enter_vocabulary(twin, kinds, trace.inputs, trace.outputs, wishes, layout)
    of_vocabulary = dict(layout.notes)
    groups = [group for name in kinds if (group := _group_of(name, trace, kinds, layout)) is not None]
    groups += _groups_of_attention(twin, kinds, layout)
    layout.work = _work(trace, kinds)
    del trace
    layout.notes |= of_vocabulary
    vocabulary = _tried_vocabulary(twin, layout, run)
    # Embeddings alone (without a norm behind them) come last: a split table saves little, and the row behind it sums a lot.
    groups = [group for group in groups if _is_wanted(group, wishes, layout)]
    planned = [_is_planned(group, wishes) or _is_planned(group, plan) for group in groups]
    alone = [all(kinds[name].name == "embedding" for name in group.columns) for group in groups]
    groups = [groups[i] for i in sorted(range(len(groups)), key=lambda i: (not planned[i], alone[i]))]
    refused: set[str] = set()
    while True:
        layout.splits = dict(vocabulary)
        chosen = _agreeing([group for group in groups if not _is_refused(group.row, refused)], layout)
        for group in chosen:
            _enter(group, kinds, layout)
        while (shared := tied_otherwise(twin, layout)) is not None:
            layout.take_out(shared, "another layer has the same weight, and can't be split in the same way")
        with _reproducible():
            failure = try_out(twin, layout, run)
        if failure is None:
            refuse_unmet(wishes, layout)
            layout.notes |= {name: "the settings say so" for name, style in wishes.items() if style == REPLICATE}
            _note_sources(layout, wishes, plan)
            return layout
        row, why = failure
        if row not in {group.row for group in chosen}:  # a layer that was tried before: what is new has done it
            row = chosen[-1].row
        layout.notes[row] = why
        layout.notes |= {name: why for name, kind in kinds.items() if kind.name == "attention" and out_of(name) == row}
        refused |= {row, *([_family(row)] if any(_family(row) == _family(other) for other in refused) else [])}


def _is_wanted(group: _Group, wishes: Mapping[str, str], layout: Layout) -> bool:
    """Whether the settings want no layer of a group otherwise."""
    other = next((name for name in group.columns if wishes.get(name, COLUMN) != COLUMN), None)
    other = group.row if other is None and wishes.get(group.row, ROW) != ROW else other
    if other is not None:
        layout.notes[group.row] = f"parallel.tensor_layout says {wishes[other]} for {other}"
        for name in group.columns:
            layout.notes.setdefault(name, layout.notes[group.row])
    return other is None


def _is_planned(group: _Group, styles: Mapping[str, str]) -> bool:
    return styles.get(group.row) == ROW or any(styles.get(name) == COLUMN for name in group.columns)


def _note_sources(layout: Layout, wishes: Mapping[str, str], plan: Mapping[str, str]) -> None:
    for name, split in layout.splits.items():
        source = next((s for s, by in (("settings", wishes), ("plan", plan)) if by.get(name) == split.style), "found")
        layout.splits[name] = replace(split, source=source)


def _work(trace: _Trace, kinds: dict[str, Kind]) -> dict[str, int]:
    """Multiplications of each linear layer in the traced run, and of those inside of attentions."""
    work = {
        name: sum(leaf.numel() for leaf in calls) * kinds[name].inputs
        for name, calls in trace.outputs.items()
        if kinds[name].name != "embedding"
    }
    for name, values in trace.inputs.items():
        if kinds[name].name == "attention":
            work[name] = sum(value.numel() for value in values) * kinds[name].outputs
            work[out_of(name)] = sum(query.numel() for query in values[::3]) * kinds[name].outputs
    return work


def _tried_vocabulary(twin: nn.Module, layout: Layout, run: Run) -> dict[str, Split]:
    """What of the vocabulary can be split: all of it, or nothing if the model does something else with its weights."""
    with _reproducible():
        failure = try_out(twin, layout, run) if layout.splits else None
    if failure is not None:
        for name in layout.splits:
            layout.notes[name] = f"the model can't do with a part of its weight: {failure[1]}"
        return {}
    return dict(layout.splits)


def _family(name: str) -> str:
    """The same layer of all blocks."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _is_refused(row: str, refused: set[str]) -> bool:
    """Itself, or its whole family after two of it: a model of a hundred blocks is not tried a hundred times."""
    return row in refused or _family(row) in refused


def random_twin(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, on the CPU in fp32, whose weights are random: zeros and ones would hide dependencies."""
    twin = copy.deepcopy(model).to("cpu", torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / max(1, parameter.shape[-1]) ** 0.5)
            else:
                parameter.copy_(1 + noise / 10)
    return twin


@contextmanager
def _reproducible() -> Iterator[None]:
    """Whatever the model draws, the script's generators stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _trace(twin: nn.Module, kinds: dict[str, Kind], run: Run) -> _Trace:
    trace = _Trace()
    handles = []
    for name, kind in kinds.items():
        module = twin.get_submodule(name)
        if kind.name == "attention":
            handles.append(module.register_forward_pre_hook(_noting_inputs(name, trace), with_kwargs=True))
            continue

        def before(module: nn.Module, args: Any, name: str = name) -> None:
            if args and isinstance(args[0], torch.Tensor):
                trace.inputs.setdefault(name, []).append(args[0])

        def after(module: nn.Module, args: Any, output: Any, name: str = name) -> torch.Tensor:
            leaf: torch.Tensor = output.detach().requires_grad_()
            trace.outputs.setdefault(name, []).append(leaf)
            return leaf

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with torch.enable_grad():
            run(twin)
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _noting_inputs(name: str, trace: _Trace) -> Callable[..., None]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        trace.inputs.setdefault(name, []).extend(inputs_of_call(args, kwargs))

    return before


def _group_of(name: str, trace: _Trace, kinds: dict[str, Kind], layout: Layout) -> _Group | None:
    """The group of which this layer is the row, if it can be one."""
    kind, size = kinds[name], layout.size
    if kind.name in ("embedding", "attention") or name not in trace.inputs:
        return None
    if not all(value.requires_grad for value in trace.inputs[name]):
        layout.notes[name] = "no layer feeds it"
        return None
    if kind.inputs % size:
        layout.notes[name] = f"{kind.inputs} input features don't divide by {size}"
        return None
    leaves = [(other, leaf) for other, calls in trace.outputs.items() for leaf in calls]
    needed: dict[str, list[torch.Tensor]] = {}
    for rank in range(size):
        masks = _dependencies(trace.inputs[name], rank, size, leaves)
        for other, mask in masks.items():
            if bool(mask.all()):
                layout.notes[name] = f"each part of its input depends on all of {other or 'the model'}"
                return None
            needed.setdefault(other, []).append(mask)
    columns: dict[str, tuple[Runs, ...]] = {}
    for other, masks_of in needed.items():
        runs = _runs(masks_of, size)
        if runs is None:
            layout.notes[name] = f"its {size} parts share features of {other}, such as heads that {size} doesn't divide"
            return None
        columns[other] = runs
    return _Group(name, columns) if columns else None


def _groups_of_attention(twin: nn.Module, kinds: dict[str, Kind], layout: Layout) -> Iterator[_Group]:
    """torch's attentions, where each rank can have the same number of heads."""
    size = layout.size
    for name, kind in kinds.items():
        module = twin.get_submodule(name)
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if module.num_heads % size:
            why = f"{size} doesn't divide the {module.num_heads} heads"
            layout.notes |= {name: why, out_of(name): why}
            continue
        piece = kind.outputs // size
        yield _Group(out_of(name), {name: tuple(((rank * piece, piece),) for rank in range(size))})


def _dependencies(
    inputs: Sequence[torch.Tensor],
    rank: int,
    size: int,
    leaves: Sequence[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Which output features of which layers one rank's slice depends on."""
    part = sum(
        (value.narrow(-1, rank * (value.shape[-1] // size), value.shape[-1] // size) * _weights(value, size)).sum()
        for value in inputs
    )
    assert isinstance(part, torch.Tensor)
    wanted = [leaf for _, leaf in leaves]
    gradients = torch.autograd.grad(part, wanted, retain_graph=True, allow_unused=True)
    masks: dict[str, torch.Tensor] = {}
    for (name, leaf), gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            mask = (gradient != 0).reshape(-1, leaf.shape[-1]).any(0)
            if bool(mask.any()):
                masks[name] = masks[name] | mask if name in masks else mask
    return masks


def _weights(value: torch.Tensor, size: int) -> torch.Tensor:
    """Random, so that contributions don't cancel: a plain sum over a softmax is constant."""
    shape = [*value.shape[:-1], value.shape[-1] // size]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _runs(masks: Sequence[torch.Tensor], size: int) -> tuple[Runs, ...] | None:
    """Each rank's features as runs; None if they overlap, are of unequal number or don't cover all."""
    if len(masks) != size:
        return None
    stacked = torch.stack(list(masks)).int()
    if bool((stacked.sum(0) > 1).any()):
        return None
    owner = torch.where(stacked.sum(0) == 1, stacked.argmax(0), -1).tolist()
    found = next((o for o in _filled(owner, size) if all(o.count(rank) * size == len(o) for rank in range(size))), None)
    if found is None:
        return None
    return tuple(join_runs([(i, 1) for i, rank in enumerate(found) if rank == own]) for own in range(size))


def _filled(owner: list[int], size: int) -> Iterator[list[int]]:
    """Features that no slice depends on, such as those that a ReLU shut for the whole example (-1), go with their
    neighbours; whether that is right is tried out."""
    if -1 not in owner:
        yield owner
        return
    even = [i * size // len(owner) for i in range(len(owner))]
    if all(a in (-1, b) for a, b in zip(owner, even, strict=True)):
        yield even
    for order in (1, -1):
        filled, last = [], -1
        for rank in owner[::order]:
            last = rank if rank != -1 else last
            filled.append(last)
        yield filled[::order]


def _agreeing(groups: Sequence[_Group], layout: Layout) -> list[_Group]:
    """A column layer that feeds several rows must be cut the same way for all of them, and a layer has one style; of
    groups that can't be together, the first. What is split by vocabulary comes before all."""
    kept: list[_Group] = []
    rows: set[str] = set(layout.splits)
    seen: dict[str, tuple[Runs, ...]] = {}
    for group in groups:
        own = group.columns
        clash = next((c for c in own if c in rows or seen.get(c, own[c]) != own[c]), None)
        if clash is None and (group.row in seen or group.row in layout.splits):
            clash = group.row
        if clash is not None:
            layout.notes[group.row] = f"{clash} would have to be split in two ways"
            continue
        seen.update(own)
        rows.add(group.row)
        kept.append(group)
    return kept


def _enter(group: _Group, kinds: dict[str, Kind], layout: Layout) -> None:
    kind = kinds[group.row]
    piece = kind.inputs // layout.size
    row_runs: tuple[Runs, ...] = tuple(((rank * piece, piece),) for rank in range(layout.size))
    layout.splits[group.row] = Split(ROW, row_runs, (kind.inputs,), partners=tuple(group.columns))
    for name, runs in group.columns.items():
        layout.splits[name] = Split(COLUMN, runs, _parts(runs, kinds[name].outputs))


def _parts(runs: tuple[Runs, ...], outputs: int) -> tuple[int, ...]:
    """Sizes of the parts that are each cut into one piece a rank, from what the first rank holds."""
    starts = [start for start, _ in runs[0]]
    return tuple(b - a for a, b in zip(starts, [*starts[1:], outputs], strict=True))
