"""The sizes of the transformer that stands for a :class:`~distkit.advise.models.ModelShape` when it is run; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distkit.advise.models import ModelShape
from distkit.errors import PlanError

__all__ = ["Sizes", "sizes_of"]

TOLERANCE = 0.01
"""Share of the parameters by which model and shape may differ."""


@dataclass(frozen=True)
class Sizes:
    """What the modules are built from.

    Args:
        shape: The model.
        positions: Rows of the table of learned positions; 0 for none.
        layers: How many of its layers are built.
        fused: Whether attention keeps no scores.
    """

    shape: ModelShape
    positions: int
    layers: int
    fused: bool = True

    @property
    def biases(self) -> bool:
        """GPT-like layers have them."""
        return not self.shape.gated

    @property
    def parameters(self) -> int:
        """Of the model with so many layers."""
        shape = self.shape
        ends = shape.head_parameters + self.positions * shape.hidden + (2 if self.biases else 1) * shape.hidden
        return ends + self.layers * self.layer_parameters

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        shape, hidden = self.shape, self.shape.hidden
        kv = hidden * shape.kv_heads // shape.heads
        matrices = 2 * hidden * (hidden + kv) + (3 if shape.gated else 2) * hidden * shape.feed_forward
        norms_and_biases = 4 * hidden + 3 * hidden + 2 * kv + shape.feed_forward if self.biases else 2 * hidden
        return matrices + norms_and_biases


def sizes_of(shape: ModelShape, *, fused: bool = True) -> Sizes:
    """The sizes with which a model of this shape has its parameters.

    A GPT-like one has what its layers leave over in learned positions. Where the shape is only a typical one for a number
    of parameters, the feed-forward part is widened or narrowed until the number is met.

    Raises:
        PlanError: No such model has that number of parameters.
    """
    plain = Sizes(shape, 0, shape.layers, fused)
    rest = shape.parameters - plain.parameters
    if shape.assumed:
        step = shape.heads  # whatever tensor group the heads can be shared by shares it too
        each = (3 if shape.gated else 2) * shape.hidden * shape.layers
        wider = max(step, shape.feed_forward + round(rest / each / step) * step)
        found = Sizes(replace(shape, feed_forward=wider), 0, shape.layers, fused)
    else:
        found = replace(plain, positions=0 if shape.gated else max(0, rest // shape.hidden))
    if abs(found.parameters - shape.parameters) > TOLERANCE * shape.parameters:
        raise PlanError(
            f"{shape.name} has {shape.parameters:,} parameters, but a transformer of {shape.layers} layers of {shape.hidden} "
            f"has {found.parameters:,}: --exact runs such a transformer",
            hint="leave --exact out",
        )
    return found
