"""Bytes that a rank needs, by kind, in closed form: each term with its formula and source.

P parameters, D data-parallel ranks, t tensor-parallel ranks; b sequences of s tokens in a micro batch; h hidden width, a
heads, l layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distkit.advise.engines import Engine
from distkit.advise.hardware import catalogue
from distkit.advise.layout import Layout
from distkit.advise.models import ModelShape, SeenStep
from distkit.strategies.zero_config import reduce_bucket_size

__all__ = ["KINDS", "OPTIMIZERS", "MemoryBytes", "StateSizes", "layer_activations", "memory_of", "state_sizes"]

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")

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

FORMULAS: Mapping[str, str] = {
    "parameters": "bytes a parameter x P / (t, and D where they are split)",
    "gradients": "bytes a gradient x P / (t, and D where they are split); arXiv 1910.02054, section 3",
    "optimizer": "(master copy + states) x P / (t, and D where they are split); arXiv 1910.02054, figure 1",
    "activations": "l s b h (34 + 5 a s / h) for 16 bits, less where recomputed or split (arXiv 2205.05198, table 2), and logits 10 s b V / t",
    "buffers": "gathered parameters and gradients of two layers, communication buckets, the framework's own",
}

_SELECTIVE = 22
"""Of the 34 s b h bytes of a layer, what selective checkpointing keeps: its input and, in 16 bits, the results of the products
(3 for queries, keys and values, 1 and 1 for attention and what follows it, 4 and 1 for the feed-forward part)."""


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
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host_parameters: float = 0.0
    host_gradients: float = 0.0
    host_optimizer: float = 0.0

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


def layer_activations(
    sequence: int,
    micro: float,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    split_tokens: bool = False,
    scores: bool = True,
) -> float:
    """Bytes that one transformer layer keeps for its backward, in 16 bits.

    Args:
        sequence: Tokens in a sequence.
        micro: Sequences in a micro batch.
        hidden: Width.
        heads: Attention heads.
        tensor: Ranks that share the layer.
        split_tokens: Whether they share the tokens of norms and dropout too (sequence parallelism).
        scores: Whether attention keeps its scores; fused kernels compute them again.

    Source: arXiv 2205.05198, table 2.
    """
    attention = 5.0 * heads * sequence / hidden if scores else 0.0
    unit = float(sequence) * micro * hidden
    if split_tokens:
        return unit * (34.0 + attention) / tensor
    if tensor > 1:
        return unit * (10.0 + 24.0 / tensor + attention / tensor)
    return unit * (34.0 + attention)


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
    engine, ranks = layout.engine, layout.shard_ranks
    sizes = state_sizes(precision, optimizer, engine)
    mine = split_parameters(model, layout.tensor)
    trained = mine * model.trained_parameters / model.parameters
    parameters = mine * sizes.parameter / (ranks if "parameters" in layout.shards else 1)
    if engine.small_stay and "parameters" in layout.shards and ranks > 1:
        parameters += sizes.parameter * min(mine, model.small_parameters(layout.tensor))
    whole = engine.whole_in_windows and accumulate > 1
    gradients = trained * sizes.gradient / (ranks if "gradients" in layout.shards and not whole else 1)
    if engine.cuts_flat and "gradients" in layout.shards and "parameters" not in layout.shards:
        gradients += sizes.gradient * _beyond_cuts(model, layout)
    states = trained * sizes.optimizer / (ranks if "optimizer" in layout.shards else 1)
    host = (0.0, 0.0, 0.0)
    if layout.offload != "none":
        part = trained * sizes.gradient / ranks
        masters = trained * sizes.parameter / ranks if engine.master and precision == "fp32" else 0.0
        host, states = (0.0, 0.0, states + masters), 0.0
        if "gradients" in layout.shards:
            host, gradients = (host[0], gradients, host[2]), 0.0
        if engine.master and "parameters" not in layout.shards:  # copies on their way between host and device
            host = (trained * sizes.parameter / ranks, host[1] + part, host[2])
    if layout.offload == "params":
        host, parameters = (host[0] + parameters, host[1], host[2]), 0.0
    activations = _activations(model, layout, micro, sequence, precision, fused_attention)
    buffers = _buffers(model, layout, sizes, trained) + _casts(model, layout, sizes)
    assumed = catalogue()["assumed"]
    own = 0.0 if cpu else float(assumed["framework"]["bytes"])
    own += 0.0 if cpu else float(assumed["fragmentation"]["value"]) * (activations + buffers)
    return MemoryBytes(parameters, gradients, states, activations, buffers + own, *host)


def _beyond_cuts(model: ModelShape, layout: Layout) -> float:
    """Elements of gradients that reach into other ranks' parts, of the rank with the most of its own and these."""
    if model.seen is None or not model.seen.groups:
        return 0.0
    totals = [0.0] * layout.shard_ranks
    for sizes in model.seen.groups:
        part = -(-sum(sizes) // layout.shard_ranks)
        end = 0
        for size in sizes:
            begin, end = end, end + size
            for rank in range(begin // part, (end - 1) // part + 1):
                totals[rank] += size / layout.tensor
    return max(totals) - sum(map(sum, model.seen.groups)) / layout.tensor / layout.shard_ranks


def split_parameters(model: ModelShape, tensor: int) -> float:
    """Parameters of a rank in a tensor group: matrices and the vocabulary are split, norms are whole."""
    whole = model.whole_parameters(tensor)
    return (model.parameters - whole) / tensor + whole


def _activations(
    model: ModelShape, layout: Layout, micro: float, sequence: int, precision: str, fused_attention: bool
) -> float:
    if model.seen is not None and model.seen.step is not None:
        return micro * _seen_activations(model.seen.step, model, layout, precision)
    width = 2.0 if precision == "fp32" else 1.0  # the formulas count 16-bit values
    if model.convolution is not None:
        kept = micro * model.convolution.kept(round(2 * width))
        return kept if layout.recompute == "none" else kept / 3  # of a bottleneck block its input: 4 of 12 parts
    one = width * layer_activations(
        sequence, micro, model.hidden, model.heads, tensor=layout.tensor, scores=not fused_attention
    )
    if layout.recompute == "full":
        kept = width * 2.0 * sequence * micro * model.hidden
        layers = model.layers * kept + one
    elif layout.recompute == "selective":
        layers = model.layers * one * _SELECTIVE / 34 + one
    else:
        layers = model.layers * one
    logits = 10.0 * width * sequence * micro * model.vocabulary / layout.tensor  # 16 bits, fp32 softmax, its gradient
    if layout.strategy == "dp":
        logits *= layout.data  # the first device gathers the outputs of all
    return layers + logits


def _seen_activations(step: SeenStep, model: ModelShape, layout: Layout, precision: str) -> float:
    """Of one sample; a tensor group splits what arXiv 2205.05198 says it splits (24 of 34 parts), and the logits."""
    assert model.seen is not None
    blocks = {
        "none": step.in_blocks,
        "selective": step.in_blocks * _SELECTIVE / 34 + step.largest_block,
        "full": step.block_inputs + step.largest_block,
    }[layout.recompute]
    share = (10 + 24 / layout.tensor) / 34
    outside = (step.saved - step.in_blocks) / layout.tensor
    width = (1 if precision != "fp32" else 2) / (1 if model.seen.precision != "fp32" else 2)
    return width * (share * blocks + outside)


def _buffers(model: ModelShape, layout: Layout, sizes: StateSizes, trained: float) -> float:
    engine, mine = layout.engine, split_parameters(model, layout.tensor)
    own = 0.0 if model.seen is None else float(model.seen.buffers)
    layer, outside = model.layer_parameters / layout.tensor, model.outside_parameters / layout.tensor
    if "parameters" in layout.shards:
        if engine.kept:
            gathered = min(mine, engine.kept + engine.prefetched + max(layer, outside))
            return own + sizes.compute * gathered + sizes.gradient * _bucket(trained)
        return own + sizes.compute * (2.0 * layer + outside) + sizes.gradient * max(layer, outside)
    if "optimizer" in layout.shards:
        return own + sizes.gradient * _bucket(trained) * (2 if "gradients" in layout.shards else 1)
    return own + (sizes.gradient * trained if engine.copies_gradients else 0.0)


def _casts(model: ModelShape, layout: Layout, sizes: StateSizes) -> float:
    """Parameters that autocast makes in 16 bits for a forward, which the backward wants again.

    Engines that keep or gather parameters in 16 bits need none.
    """
    if sizes.compute == sizes.parameter or layout.engine.master or "parameters" in layout.shards:
        return 0.0
    if model.seen is not None and model.seen.step is not None and model.seen.precision != "fp32":
        return model.seen.step.casts / layout.tensor
    return sizes.compute * split_parameters(model, layout.tensor)


def _bucket(trained: float) -> float:
    """Elements that DeepSpeed reduces at a time, as distkit sets it."""
    return reduce_bucket_size(int(trained))
