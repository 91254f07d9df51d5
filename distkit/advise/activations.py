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

SELECTIVE_SHARE = 22 / 32
"""Of what a layer with 4 widths inside keeps, without dropout: its input and the results of its products."""


def layer_activations(
    sequence: int,
    micro: float,
    hidden: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    feed_forward: int | None = None,
    gated: bool = False,
    tensor: int = 1,
    split_tokens: bool = False,
    scores: bool = True,
    dropout: bool = True,
) -> float:
    """Bytes that one transformer layer keeps for its backward, in 16 bits.

    The terms of arXiv 2205.05198, table 2, for any inner width and number of heads of keys and values: in units of s b h, norms and
    what goes into products as a whole 8 (and 2 for dropout's masks), queries, keys and values 2 + 4 k/a, attention's
    output 2, the feed-forward part 4 f/h, or 8 f/h with a gate.

    Args:
        sequence: Tokens in a sequence.
        micro: Sequences in a micro batch.
        hidden: Width.
        heads: Attention heads.
        kv_heads: Heads of keys and values; None is as many.
        feed_forward: Inner width of the feed-forward part; None is 4 widths.
        gated: Whether that has a gate.
        tensor: Ranks that share the layer.
        split_tokens: Whether they share the tokens of norms and dropout too (sequence parallelism).
        scores: Whether attention keeps its scores; fused kernels compute them again.
        dropout: Whether there is any.
    """
    attention = 5.0 * heads * sequence / hidden if scores else 0.0
    inner = (feed_forward or 4 * hidden) / hidden
    split = 2 + 4 * (kv_heads or heads) / heads + 2 + (8 if gated else 4) * inner
    whole = 8.0 + (2.0 if dropout else 0.0)
    unit = float(sequence) * micro * hidden
    return unit * ((whole + split + attention) / tensor if split_tokens else whole + (split + attention) / tensor)


def _selective(model: ModelShape, tensor: int) -> float:
    """What selective checkpointing keeps of a layer, in units of 2 s b h bytes: its input, and the results of the products."""
    products = 2 + 2 * model.kv_heads / model.heads + (2 if model.gated else 1) * model.feed_forward / model.hidden
    return 1 + products / tensor + 2


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
        sequence, micro, model.hidden, model.heads, kv_heads=model.kv_heads, feed_forward=model.feed_forward,
        gated=model.gated, tensor=layout.tensor, scores=not fused_attention, dropout=False,
    )  # fmt: skip
    unit = float(sequence) * micro * model.hidden
    if (
        precision in ("bf16", "fp16") and not layout.published
    ):  # norms keep fp32, and each product its own copy of what goes in
        one += unit * (10 if model.gated else 8)
    formula = "l s b h (8 + (4 + 4 k/a + 4 f/h) / t), 8 f/h with a gate; under autocast 8 or 10 more"
    layers = model.layers * one
    if layout.recompute == "full":
        formula, layers = "2 l s b h, and one layer", model.layers * width * 2.0 * unit + one
    elif layout.recompute == "selective":
        kept = 2.0 * width * _selective(model, layout.tensor) * unit
        formula, layers = "l times its input and the results of its products, and one layer", model.layers * kept + one
    yield Part("activations", "layers", layers, formula, f"{TABLE}, without dropout; checked against --exact")
    logits = 12.0 * sequence * micro * model.vocabulary / layout.tensor
    if layout.strategy == "dp":
        logits *= layout.data  # the first device gathers the outputs of all
    yield Part("activations", "logits and loss", logits, "12 s b V / t: logits, softmax, its gradient", "--exact")


def _seen(step: SeenStep, layout: Layout, micro: float, width: float) -> Iterator[Part]:
    """A tensor group splits what arXiv 2205.05198 says it splits (24 of 32 parts without dropout), and what is outside of the blocks."""
    blocks = {
        "none": step.in_blocks,
        "selective": step.in_blocks * SELECTIVE_SHARE + step.largest_block,
        "full": step.block_inputs + step.largest_block,
    }[layout.recompute]
    share = (8 + 24 / layout.tensor) / 32
    source = "one step of the script, without values"
    yield Part("activations", "blocks", micro * width * share * blocks, "counted x (8 + 24/t) / 32", source)
    outside = micro * width * (step.saved - step.in_blocks) / layout.tensor
    yield Part("activations", "outside of the blocks", outside, "counted / t", source)
