"""Bytes that a rank needs, by kind, in closed form: each term with its formula and source.

P parameters, D data-parallel ranks, t tensor-parallel ranks; b sequences of s tokens in a micro batch; h hidden width, a
heads, l layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distkit.advise.activations import activations_of
from distkit.advise.engines import Engine
from distkit.advise.hardware import catalogue
from distkit.advise.layout import Layout
from distkit.advise.models import ModelShape
from distkit.advise.parts import KINDS, Part
from distkit.strategies.zero_config import reduce_bucket_size

__all__ = ["KINDS", "OPTIMIZERS", "MemoryBytes", "Part", "StateSizes", "memory_of", "split_parameters", "state_sizes"]

ZERO = "arXiv 1910.02054, section 3 and figure 1"
DEEPSPEED = "DeepSpeed 0.19.8; distkit's settings for it (strategies/zero_config.py)"
FULLY_SHARD = "torch's fully_shard: a unit is gathered while the one before is computed with"
AUTOCAST = "torch.autocast keeps its copies of weights for the backward"

OPTIMIZERS: Mapping[str, int] = {
    "adamw": 2,
    "adam": 2,
    "lamb": 2,
    "nadam": 2,
    "radam": 2,
    "lion": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "momentum": 1,
    "muon": 1,
    "sgd": 0,
}
"""Values that each keeps for a parameter."""

_ROOTS = ("adamw", "adam", "nadam", "radam", "adagrad", "rmsprop")
"""Optimizers that divide by the roots of their second moments."""

FOREACH = "torch.optim, foreach: about as much as the parameters beyond the for-loop"


@dataclass(frozen=True)
class MemoryBytes:
    """Of one rank.

    Args:
        parameters: Its parameters.
        gradients: Its gradients.
        optimizer: Optimizer states and master copies on the device.
        activations: What the backward needs, with logits and loss.
        buffers: Gathered parameters, communication buckets, the framework's own.
        host_parameters: Parameters in host memory.
        host_gradients: Gradients there.
        host_optimizer: Optimizer states and master copies there.
        parts: What these are the sums of.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host_parameters: float = 0.0
    host_gradients: float = 0.0
    host_optimizer: float = 0.0
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part]) -> MemoryBytes:
        """The sums of the parts that there are."""
        there = tuple(part for part in parts if part.bytes)

        def total(kind: str, on_host: bool) -> float:
            return sum(part.bytes for part in there if (part.kind, part.on_host) == (kind, on_host))

        device = {kind: total(kind, False) for kind in KINDS}
        host = {f"host_{kind}": total(kind, True) for kind in ("parameters", "gradients", "optimizer")}
        return cls(parts=there, **device, **host)

    @property
    def host(self) -> float:
        """All in host memory."""
        return self.host_parameters + self.host_gradients + self.host_optimizer

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All on the device."""
        return self.states + self.activations + self.buffers

    def as_dict(self) -> dict[str, int]:
        """Rounded, for JSON."""
        return {**{kind: round(getattr(self, kind)) for kind in KINDS}, "total": round(self.total)}


@dataclass(frozen=True)
class StateSizes:
    """Bytes for each parameter."""

    parameter: int
    gradient: int
    optimizer: int
    compute: int = field(default=2)
    """Of the copy that is computed with."""

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.optimizer


def state_sizes(precision: str, optimizer: str, engine: Engine) -> StateSizes:
    """What an engine keeps for each parameter.

    Args:
        precision: As in the settings.
        optimizer: One of :data:`OPTIMIZERS`.
        engine: Who keeps it.
    """
    states = OPTIMIZERS[optimizer]
    if precision == "bf16-pure":
        return StateSizes(2, 2, 2 * states)
    if precision == "fp32":
        return StateSizes(4, 4, 4 * states, compute=4)
    if engine.master:
        return StateSizes(2, engine.gradient, 4 + 4 * states)
    return StateSizes(4, engine.gradient, 4 * states)


def memory_of(
    model: ModelShape,
    layout: Layout,
    *,
    micro: float,
    sequence: int,
    optimizer: str,
    precision: str,
    fused_attention: bool,
    accumulate: int = 1,
    cpu: bool = False,
) -> MemoryBytes:
    """A rank's memory at the peak of a step.

    Args:
        model: The model.
        layout: The strategy with its degrees.
        micro: Sequences in a micro batch of a data-parallel rank.
        sequence: Tokens in each.
        optimizer: One of :data:`OPTIMIZERS`.
        precision: As in the settings.
        fused_attention: Whether scores aren't kept.
        accumulate: Micro batches in a step.
        cpu: Whether the framework's own memory is left out.
    """
    sizes = state_sizes(precision, optimizer, layout.engine)
    mine = split_parameters(model, layout.tensor)
    trained = mine * model.trained_parameters / model.parameters
    kept = [
        *_parameters(model, layout, sizes, mine),
        *_gradients(model, layout, sizes, trained, accumulate),
        *_states(layout, sizes, trained, optimizer, precision),
    ]
    moving = [
        *activations_of(model, layout, micro, sequence, precision, fused_attention),
        *_buffers(model, layout, sizes, mine, trained),
    ]
    moving += _step(layout, sizes, trained, optimizer, precision, sum(part.bytes for part in moving), cpu)
    return MemoryBytes.of([*_offloaded(kept, layout, sizes, trained, precision), *moving, *_own(moving, cpu)])


def _parameters(model: ModelShape, layout: Layout, sizes: StateSizes, mine: float) -> Iterator[Part]:
    split = "parameters" in layout.shards
    ranks = layout.shard_ranks if split else 1
    each = f"{sizes.parameter} bytes x P / t" + (" / D" if split else "")
    yield Part("parameters", "parameters", mine * sizes.parameter / ranks, each, ZERO)
    if split and layout.engine.small_stay and ranks > 1:
        small = sizes.parameter * min(mine, model.small_parameters(layout.tensor))
        yield Part("parameters", "small tensors, whole", small, f"{sizes.parameter} bytes an element", DEEPSPEED)


def _gradients(model: ModelShape, layout: Layout, sizes: StateSizes, trained: float, accumulate: int) -> Iterator[Part]:
    whole = layout.engine.whole_in_windows and accumulate > 1
    split = "gradients" in layout.shards and not whole
    each = f"{sizes.gradient} bytes x P / t" + (
        " / D" if split else ", whole while micro batches are added" if whole else ""
    )
    size = trained * sizes.gradient / (layout.shard_ranks if split else 1)
    yield Part("gradients", "gradients", size, each, ZERO)
    if layout.engine.twice_in_windows and accumulate > 1 and layout.data > 1:
        yield Part(
            "buffers", "buckets beside the gradients", size, each, "torch's DistributedDataParallel under no_sync"
        )
    if layout.engine.cuts_flat and split and "parameters" not in layout.shards:
        beyond = sizes.gradient * _beyond_cuts(model, layout)
        yield Part("gradients", "gradients that reach over a cut", beyond, "whole tensors at a part's ends", DEEPSPEED)


def _states(layout: Layout, sizes: StateSizes, trained: float, optimizer: str, precision: str) -> Iterator[Part]:
    split = "optimizer" in layout.shards
    each, rank = (f"P / t{' / D' if split else ''}", trained / (layout.shard_ranks if split else 1))
    values = OPTIMIZERS[optimizer]
    states = values * (2 if precision == "bf16-pure" else 4)
    yield Part("optimizer", "master weights", rank * (sizes.optimizer - states), f"4 bytes x {each}", ZERO)
    yield Part("optimizer", "optimizer states", rank * states, f"{states} bytes x {each}: {values} values", ZERO)


def _offloaded(
    kept: Sequence[Part], layout: Layout, sizes: StateSizes, trained: float, precision: str
) -> Iterator[Part]:
    """What goes to the host, and what is there besides."""
    if layout.offload == "none":
        yield from kept
        return
    away = {"optimizer"} | ({"gradients"} & layout.shards) | ({"parameters"} if layout.offload == "params" else set())
    yield from (replace(part, on_host=part.kind in away) for part in kept)
    if not layout.engine.master:
        return
    each, part = "bytes x P / t / D", trained / layout.shard_ranks
    if precision == "fp32":
        yield Part("optimizer", "master weights", 4 * part, f"4 {each}", DEEPSPEED, on_host=True)
    if "parameters" not in layout.shards:
        size = sizes.parameter * part
        yield Part(
            "parameters", "updated weights on their way", size, f"{sizes.parameter} {each}", DEEPSPEED, on_host=True
        )
        size = sizes.gradient * part
        yield Part("gradients", "gradients of the masters", size, f"{sizes.gradient} {each}", DEEPSPEED, on_host=True)


def _buffers(model: ModelShape, layout: Layout, sizes: StateSizes, mine: float, trained: float) -> Iterator[Part]:
    """What an engine needs besides, while it works."""
    engine, seen = layout.engine, model.seen
    yield Part("buffers", "the model's buffers", 0.0 if seen is None else seen.buffers, "counted", "the model itself")
    layer, outside = model.layer_parameters / layout.tensor, model.outside_parameters / layout.tensor
    bucket = float(reduce_bucket_size(int(trained)))
    if "parameters" in layout.shards:
        gathered = sizes.compute * (2.0 * layer + outside)
        how, source = f"{sizes.compute} bytes x (2 layers + what is in none)", FULLY_SHARD
        reduced, what = sizes.gradient * max(layer, outside), f"{sizes.gradient} bytes x the largest unit"
        if engine.kept:
            gathered = sizes.compute * min(mine, engine.kept + engine.prefetched + max(layer, outside))
            how, source = f"{sizes.compute} bytes x what is kept, gathered ahead, and the largest unit", DEEPSPEED
            ahead = sizes.compute * min(mine, engine.prefetched)
            yield Part(
                "buffers", "gathered ahead, before it is cut up", ahead, f"{sizes.compute} bytes x those", DEEPSPEED
            )
            reduced, what = sizes.gradient * bucket, f"{sizes.gradient} bytes x reduce_bucket_size"
        yield Part("buffers", "gathered parameters", gathered, how, source)
        yield Part("buffers", "gradients on their way", reduced, what, source)
        return
    if "optimizer" in layout.shards:
        count = 2 if "gradients" in layout.shards else 1  # overlap_comm fills one while the other travels
        formula = f"{count} x {sizes.gradient} bytes x reduce_bucket_size"
        yield Part("buffers", "gradients on their way", count * sizes.gradient * bucket, formula, DEEPSPEED)
        return
    if engine.copies_gradients:
        yield Part(
            "buffers", "gradients on their way", sizes.gradient * trained, f"{sizes.gradient} bytes x P", "distkit"
        )
    yield Part(
        "buffers", "autocast's weights", _casts(model, sizes, layout), f"{sizes.compute} bytes x P / t", AUTOCAST
    )


def _step(
    layout: Layout, sizes: StateSizes, trained: float, optimizer: str, precision: str, backward: float, cpu: bool
) -> Iterator[Part]:
    """What an optimizer's step needs beyond what forward and backward need, which is free by then.

    torch's adaptive optimizers take the roots of all second moments at once on GPUs (``foreach``, the default there), and
    tensor by tensor on CPUs; DeepSpeed steps one flat tensor, for which it puts the gradients into one.
    """
    engine = layout.engine
    if layout.offload != "none" or layout.published:
        return
    ranks = layout.shard_ranks if "optimizer" in layout.shards else 1
    each = 2 if precision == "bf16-pure" else 4
    roots = each if optimizer in _ROOTS and (not cpu or engine.cuts_flat) else 0
    flat = each if engine.cuts_flat else 0
    whole = engine.cuts_flat and "gradients" not in layout.shards  # all but a rank's part are freed first
    freed = sizes.gradient * (1 - 1 / ranks) if whole else 0.0
    needed = ((roots + flat) / ranks - freed) * trained
    how = f"{roots + flat} bytes x P / t" + (" / D" if ranks > 1 else "") + ", less what backward needs"
    source = DEEPSPEED if engine.cuts_flat else FOREACH
    yield Part("buffers", "the optimizer's step", max(0.0, needed - backward), how, source)


def _own(moving: Sequence[Part], cpu: bool) -> Iterator[Part]:
    assumed = catalogue()["assumed"]
    if not cpu:
        own, share = assumed["framework"], assumed["fragmentation"]
        yield Part("buffers", "the framework's own", float(own["bytes"]), "assumed", own["source"])
        lost = float(share["value"]) * sum(part.bytes for part in moving)
        yield Part("buffers", "fragmentation", lost, f"{share['value']} x activations and buffers", share["source"])


def _beyond_cuts(model: ModelShape, layout: Layout) -> float:
    """Elements of gradients that reach into other ranks' parts, of the rank with the most of its own and these."""
    if model.seen is None or not model.seen.groups:
        return 0.0
    totals = [0] * layout.shard_ranks
    for sizes in model.seen.groups:
        part = -(-sum(sizes) // layout.shard_ranks)
        end = 0
        for size in sizes:
            begin, end = end, end + size
            for rank in range(begin // part, (end - 1) // part + 1):
                totals[rank] += size
    return max(totals) - sum(map(sum, model.seen.groups)) / layout.shard_ranks


def split_parameters(model: ModelShape, tensor: int) -> float:
    """Parameters of a rank in a tensor group: matrices and the vocabulary are split, norms are whole."""
    whole = model.whole_parameters(tensor)
    return (model.parameters - whole) / tensor + whole


def _casts(model: ModelShape, sizes: StateSizes, layout: Layout) -> float:
    """Parameters that autocast makes in 16 bits for a forward, which the backward wants again."""
    if sizes.compute == sizes.parameter:
        return 0.0
    if model.seen is not None and model.seen.step is not None and model.seen.precision != "fp32":
        return model.seen.step.casts / layout.tensor
    return sizes.compute * split_parameters(model, layout.tensor)
