"""Bytes that autograd keeps from the forward to the backward, in closed form or as they were seen of a real step.

b sequences of s tokens in a micro batch; h hidden width, a heads, l layers, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from distkit.advise.layout import Layout
from distkit.advise.models import ModelShape, SeenStep
from distkit.advise.parts import Part

__all__ = ["activations_of", "layer_activations"]

TABLE = "arXiv 2205.05198, table 2"

_SELECTIVE = 22
"""Of the 34 s b h bytes of a layer, what selective checkpointing keeps: its input and, in 16 bits, the results of the products
(3 for queries, keys and values, 1 and 1 for attention and what follows it, 4 and 1 for the feed-forward part)."""


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


def activations_of(
    model: ModelShape, layout: Layout, micro: float, sequence: int, precision: str, fused_attention: bool
) -> Iterator[Part]:
    """Of a micro batch, with logits and loss.

    Args:
        model: The model.
        layout: The candidate.
        micro: Samples in the micro batch.
        sequence: Tokens in each.
        precision: As in the settings.
        fused_attention: Whether scores aren't kept.
    """
    width = 2.0 if precision == "fp32" else 1.0  # the formulas count 16-bit values
    if model.seen is not None and model.seen.step is not None:
        yield from _seen(model.seen.step, layout, micro, width / (2.0 if model.seen.precision == "fp32" else 1.0))
        return
    if model.convolution is not None:
        kept = micro * model.convolution.kept(round(2 * width))
        kept = kept if layout.recompute == "none" else kept / 3  # of a bottleneck block its input: 4 of 12 parts
        yield Part("activations", "what convolutions put out, twice", kept, "2 x values an image", "convolutions.py")
        return
    one = width * layer_activations(
        sequence, micro, model.hidden, model.heads, tensor=layout.tensor, scores=not fused_attention
    )
    formula = "l s b h (34 + 5 a s / h), with t (10 + 24/t + 5 a s / (h t))"
    layers = model.layers * one
    if layout.recompute == "full":
        formula, layers = "2 l s b h, and one layer", model.layers * width * 2.0 * sequence * micro * model.hidden + one
    elif layout.recompute == "selective":
        formula, layers = f"{_SELECTIVE}/34 of the layers, and one whole", layers * _SELECTIVE / 34 + one
    yield Part("activations", "layers", layers, formula, TABLE)
    logits = 10.0 * width * sequence * micro * model.vocabulary / layout.tensor
    if layout.strategy == "dp":
        logits *= layout.data  # the first device gathers the outputs of all
    yield Part("activations", "logits and loss", logits, "10 s b V / t: 16 bits, fp32 softmax, its gradient", "torch")


def _seen(step: SeenStep, layout: Layout, micro: float, width: float) -> Iterator[Part]:
    """A tensor group splits what arXiv 2205.05198 says it splits (24 of 34 parts), and what is outside of the blocks."""
    blocks = {
        "none": step.in_blocks,
        "selective": step.in_blocks * _SELECTIVE / 34 + step.largest_block,
        "full": step.block_inputs + step.largest_block,
    }[layout.recompute]
    share = (10 + 24 / layout.tensor) / 34
    source = "one step of the script, without values"
    yield Part("activations", "blocks", micro * width * share * blocks, "counted x (10 + 24/t) / 34", source)
    outside = micro * width * (step.saved - step.in_blocks) / layout.tensor
    yield Part("activations", "outside of the blocks", outside, "counted / t", source)
