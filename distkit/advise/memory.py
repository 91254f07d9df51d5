"""Bytes that a rank needs, by kind, in closed form: each term with its formula and source.

P parameters, D data-parallel ranks, t tensor-parallel ranks; b sequences of s tokens in a micro batch; h hidden width, a
heads, l layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distkit.advise.hardware import catalogue
from distkit.advise.layout import Layout
from distkit.advise.models import ModelShape

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


@dataclass(frozen=True)
class MemoryBytes:
    """Of one rank.

    Args:
        parameters: Its parameters.
        gradients: Its gradients.
        optimizer: Optimizer states and master copies on the device.
        activations: What the backward needs, with logits and loss.
        buffers: Gathered parameters, communication buckets, the framework's own.
        host: What lies in host memory instead.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    host: float = 0.0

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


def state_sizes(precision: str, optimizer: str, engine: str) -> StateSizes:
    """What an engine keeps for each parameter.

    In 16 bits with fp32 masters all engines need 16 bytes with Adam; they only name them differently: DeepSpeed keeps
    parameters and gradients in 16 bits and a master copy with the optimizer, torch under autocast keeps fp32.

    Args:
        precision: As in the settings.
        optimizer: One of :data:`OPTIMIZERS`.
        engine: ``deepspeed`` or ``torch``.
    """
    states = OPTIMIZERS[optimizer]
    if precision == "bf16-pure":
        return StateSizes(2, 2, 2 * states)
    if precision == "fp32":
        return StateSizes(4, 4, 4 * states, compute=4)
    if engine == "deepspeed":
        return StateSizes(2, 2, 4 + 4 * states)
    return StateSizes(4, 4, 4 * states)


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
        cpu: Whether the framework's own memory is left out.
    """
    sizes = state_sizes(precision, optimizer, layout.engine)
    mine = split_parameters(model, layout.tensor)
    ranks = layout.shard_ranks
    parameters = mine * sizes.parameter / (ranks if "parameters" in layout.shards else 1)
    gradients = mine * sizes.gradient / (ranks if "gradients" in layout.shards else 1)
    states = mine * sizes.optimizer / (ranks if "optimizer" in layout.shards else 1)
    host = 0.0
    if layout.offload in ("optimizer", "params"):
        host, states = states, 0.0
    if layout.offload == "params":
        host, parameters = host + parameters, 0.0
    activations = _activations(model, layout, micro, sequence, precision, fused_attention)
    buffers = _buffers(model, layout, sizes)
    assumed = catalogue()["assumed"]
    own = 0.0 if cpu else float(assumed["framework"]["bytes"])
    own += 0.0 if cpu else float(assumed["fragmentation"]["value"]) * (activations + buffers)
    return MemoryBytes(parameters, gradients, states, activations, buffers + own, host)


def split_parameters(model: ModelShape, tensor: int) -> float:
    """Parameters of a rank in a tensor group: matrices and the vocabulary are split, norms are whole."""
    whole = model.layers * 4 * model.hidden if tensor > 1 else 0
    return (model.parameters - whole) / tensor + whole


def _activations(
    model: ModelShape, layout: Layout, micro: float, sequence: int, precision: str, fused_attention: bool
) -> float:
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
    else:
        layers = model.layers * one
    logits = 10.0 * width * sequence * micro * model.vocabulary / layout.tensor  # 16 bits, fp32 softmax, its gradient
    if layout.strategy == "dp":
        logits *= layout.data  # the first device gathers the outputs of all
    return layers + logits


def _buffers(model: ModelShape, layout: Layout, sizes: StateSizes) -> float:
    mine = split_parameters(model, layout.tensor)
    largest = max(model.layer_parameters, model.vocabulary * model.hidden) / layout.tensor
    if "parameters" in layout.shards:
        gathered = 2.0 * model.layer_parameters / layout.tensor + largest
        return sizes.compute * gathered + sizes.gradient * largest
    if layout.engine == "deepspeed":
        return 2.0 * sizes.gradient * min(5e8, mine / 4)
    return 25e6 * 2
