"""The model that a plan is about: its size, and as much of its shape as is known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distkit.advise.convolutions import NETWORKS, Convolution
from distkit.config.nearest import nearest
from distkit.errors import PlanError

__all__ = [
    "FAMILIES",
    "ModelShape",
    "SeenModel",
    "SeenStep",
    "model_named",
    "model_of_facts",
    "model_of_size",
    "parse_parameters",
]

SMALL = 100_000
"""Elements of a tensor that DeepSpeed's stage 3 keeps whole on every rank, at most (``stage3_param_persistence_threshold``)."""

_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class SeenStep:
    """What one forward and backward of a real model kept and computed, for each sample.

    Args:
        saved: Bytes that autograd keeps.
        block_inputs: Bytes of the blocks' inputs.
        in_blocks: Of what is kept, bytes in blocks.
        largest_block: Bytes that the block with the most keeps.
        flops: Operations, forward and backward.
        tokens: Whole numbers that go in; 0 where inputs aren't tokens.
        casts: Bytes of parameters that autocast made in 16 bits and autograd keeps; of the whole model.
    """

    saved: float
    block_inputs: float
    in_blocks: float
    largest_block: float
    flops: float
    tokens: float
    casts: float


@dataclass(frozen=True)
class SeenModel:
    """Sizes of a real model.

    Args:
        trained: Parameters that have a gradient.
        outside: Parameters in no repeated block.
        small: Parameters in small tensors.
        buffers: Bytes of its buffers.
        precision: In which it was computed.
        tensor_split: Parameters that a tensor group splits; None where nobody looked.
        tensor_small: Parameters of a rank of a tensor group in small tensors.
        tensor_rows: All-reduces of activations in one direction, over a tensor group.
        tensor_columns: Layers whose outputs are split over it.
        step: None where the script's step couldn't be run without values.
        of_samples: Whether what goes in isn't tokens.
        groups: Sizes of a rank's trained parameters, by the optimizer's groups and in their order; empty where it isn't known.
    """

    trained: int
    outside: int
    small: int
    buffers: int
    precision: str
    tensor_split: int | None = None
    tensor_small: int | None = None
    tensor_rows: int | None = None
    tensor_columns: int | None = None
    step: SeenStep | None = None
    of_samples: bool = False
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """A transformer, or a convolutional network for images, as far as memory and time depend on it.

    Args:
        name: For people.
        parameters: Number of parameters.
        layers: Number of layers.
        hidden: Width.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        feed_forward: Inner width of the feed-forward part.
        gated: Whether that has a gate (three matrices instead of two).
        vocabulary: Size of the vocabulary.
        tied: Whether embedding and head are one.
        assumed: Whether the shape is a typical one for the size, and not the model's own.
        seen: What was seen of a real model; None where only its shape is known.
        convolution: What an image costs; None for transformers. With it the widths above mean nothing, and a sample
            counts as one token.
    """

    name: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    gated: bool
    vocabulary: int
    tied: bool
    assumed: bool = False
    seen: SeenModel | None = None
    convolution: Convolution | None = None

    @property
    def unit(self) -> str:
        """What is counted by the second: ``tokens``, or ``samples`` where one isn't a sequence."""
        of_samples = self.convolution is not None or (self.seen is not None and self.seen.of_samples)
        return "samples" if of_samples else "tokens"

    @property
    def head_parameters(self) -> int:
        """Of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer_parameters(self) -> int:
        """Of one layer, all alike."""
        outside = self.head_parameters if self.seen is None else self.seen.outside
        return max(1, (self.parameters - outside) // self.layers)

    @property
    def outside_parameters(self) -> int:
        """Of what is in no layer."""
        return self.parameters - self.layers * self.layer_parameters

    @property
    def trained_parameters(self) -> int:
        """Those that have a gradient."""
        return self.parameters if self.seen is None else self.seen.trained

    def small_parameters(self, tensor: int) -> int:
        """Those of a rank of a tensor group that are in small tensors: norms and biases."""
        if self.seen is not None:
            known = tensor > 1 and self.seen.tensor_small is not None
            return self.seen.tensor_small or 0 if known else self.seen.small
        return self.layers * self._norms_and_biases

    def whole_parameters(self, tensor: int) -> int:
        """Those that every rank of a tensor group has."""
        if tensor == 1:
            return 0
        if self.seen is not None and self.seen.tensor_split is not None:
            return self.parameters - self.seen.tensor_split
        return self.layers * 4 * self.hidden

    def tensor_reductions(self, tensor: int, *, shared: bool = True) -> int:
        """All-reduces of activations in a forward and a backward: two a layer and one for the vocabulary, each way.

        Args:
            tensor: Ranks of a tensor group.
            shared: Whether layers that are given the same tensor sum its gradient once, and not each for itself.
        """
        if tensor == 1:
            return 0
        seen = self.seen
        rows = 2 * self.layers + 1 if seen is None or seen.tensor_rows is None else seen.tensor_rows
        columns = (5 if self.gated else 2) * self.layers + 1
        if seen is not None and seen.tensor_columns is not None:
            columns = seen.tensor_columns
        return 2 * rows if shared else rows + columns

    @property
    def _norms_and_biases(self) -> int:
        if self.gated:
            return 2 * self.hidden
        return 7 * self.hidden + 2 * self.hidden * self.kv_heads // self.heads + self.feed_forward

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, without recomputation: 6 for each parameter of a matrix, and attention's own part.

        arXiv 2104.04473, equation 3 without recomputation: scores and their use take 12 l h s for each token.
        """
        if self.seen is not None and self.seen.step is not None:
            return self.seen.step.flops / sequence
        if self.convolution is not None:
            return self.convolution.flops
        matrices = self.parameters - (0 if self.tied else self.vocabulary * self.hidden)  # looked up, not multiplied
        return 6.0 * matrices + 12.0 * self.layers * self.hidden * sequence


def _shape(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    *,
    kv_heads: int | None = None,
    feed_forward: int | None = None,
    gated: bool = False,
    tied: bool = False,
    positions: int = 0,
    biases: bool = True,
) -> ModelShape:
    """Counts the parameters of a decoder or encoder with these sizes."""
    kv = kv_heads or heads
    inner = feed_forward or 4 * hidden
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv // heads
    mlp = (3 if gated else 2) * hidden * inner
    norms = (4 if biases else 2) * hidden
    bias = (2 * hidden + 2 * hidden * kv // heads + inner + hidden) if biases else 0
    layer = attention + mlp + norms + bias
    ends = vocabulary * hidden * (1 if tied else 2) + positions * hidden + (2 if biases else 1) * hidden
    return ModelShape(name, layers * layer + ends, layers, hidden, heads, kv, inner, gated, vocabulary, tied)


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return _shape(name, layers, hidden, heads, 50257, tied=True, positions=1024)


def _gpt3(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return _shape(name, layers, hidden, heads, 50257, tied=True, positions=2048)


def _llama(
    name: str, layers: int, hidden: int, heads: int, inner: int, kv: int | None = None, vocabulary: int = 32000
) -> ModelShape:
    return _shape(name, layers, hidden, heads, vocabulary, kv_heads=kv, feed_forward=inner, gated=True, biases=False)


def _network(one: Convolution) -> ModelShape:
    return ModelShape(one.name, one.parameters, one.layers, 1, 1, 1, 1, False, 0, True, convolution=one)


FAMILIES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        _gpt3("gpt3-1.3b", 24, 2048, 16),
        _gpt3("gpt3-2.7b", 32, 2560, 32),
        _gpt3("gpt3-6.7b", 32, 4096, 32),
        _gpt3("gpt3-13b", 40, 5120, 40),
        _gpt3("gpt3-175b", 96, 12288, 96),
        _gpt3("mt-nlg-530b", 105, 20480, 128),
        _llama("llama-7b", 32, 4096, 32, 11008),
        _llama("llama-13b", 40, 5120, 40, 13824),
        _llama("llama-70b", 80, 8192, 64, 28672, 8),
        _llama("llama3-8b", 32, 4096, 32, 14336, 8, 128256),
        _llama("llama3-70b", 80, 8192, 64, 28672, 8, 128256),
        _llama("llama3-405b", 126, 16384, 128, 53248, 8, 128256),
        *(_network(one) for one in NETWORKS),
    )
}
"""Published shapes: GPT-2 (its release), GPT-3 (arXiv 2005.14165, table 2.1), MT-NLG (arXiv 2201.11990), Llama (arXiv 2302.13971, 2307.09288, 2407.21783);
networks for images (convolutions.py)."""


def model_of_facts(facts: Mapping[str, Any], precision: str) -> ModelShape:
    """The shape of a real model.

    Args:
        facts: As :mod:`distkit.strategies.profiling` writes them.
        precision: In which its step was computed.
    """
    blocks, step, tensor = facts["blocks"], facts.get("step"), facts.get("tensor")
    layers = max(1, len(blocks))
    sizes = facts["sizes"] if tensor is None else tensor["sizes"]
    seen = SeenModel(
        trained=facts["trained"],
        outside=facts["parameters"] - sum(blocks) if blocks else 0,
        small=_small(facts["sizes"]),
        buffers=facts["buffers"],
        precision=precision,
        tensor_split=None if tensor is None else tensor["split"],
        tensor_small=None if tensor is None else _small(tensor["sizes"]),
        tensor_columns=None if tensor is None else tensor["columns"],
        tensor_rows=None if tensor is None else tensor["rows"] + tensor["vocabulary"],
        step=None if not step or not step["samples"] else _seen_step(step),
        groups=tuple(tuple(sizes[place] for place in places) for places in facts.get("groups", ())),
        of_samples=step is not None and not step["tokens"],
    )
    return ModelShape(
        facts["name"], facts["parameters"], layers, facts["hidden"], facts["heads"], facts["kv_heads"],
        facts["feed_forward"], False, facts["vocabulary"], False, seen=seen,
    )  # fmt: skip


def _small(sizes: Sequence[int]) -> int:
    return sum(size for size in sizes if size <= SMALL)


def _seen_step(step: Mapping[str, Any]) -> SeenStep:
    names = ("saved", "block_inputs", "in_blocks", "largest_block", "flops", "tokens")
    shares = {name: step[name] / step["samples"] for name in names}
    return SeenStep(**shares, casts=step["casts"])


def parse_parameters(text: str) -> int:
    """``13B`` is 13e9, ``350M`` 350e6.

    Raises:
        PlanError: It is no number above 0.
    """
    number, unit = text.strip(), ""
    if number[-1:].lower() in _UNITS:
        number, unit = number[:-1], number[-1].lower()
    try:
        found = float(number) * _UNITS.get(unit, 1.0)
    except ValueError:
        found = 0.0
    if not 1 <= found < math.inf:
        raise PlanError(f"--params was set to {text!r}, which is no number of parameters", hint="--params 13B")
    return round(found)


def model_of_size(parameters: int) -> ModelShape:
    """A typical shape: that of the nearest published model, widened or narrowed to the size."""
    published = [shape for shape in FAMILIES.values() if shape.convolution is None]
    near = min(published, key=lambda shape: abs(math.log(shape.parameters / parameters)))
    ratio = (parameters / near.parameters) ** (1 / 3)
    layers = max(1, round(near.layers * ratio))
    head = max(1, near.hidden // near.heads)
    vocabulary = max(256, min(near.vocabulary, parameters // 64))
    step = head * 8 if parameters > 500e6 else head  # heads that tensor parallelism can share
    hidden = max(step, round(math.sqrt(parameters * 0.95 / (12 * layers)) / step) * step)
    heads = max(1, hidden // head)
    name = f"{parameters / 1e9:g}B" if parameters >= 1e9 else f"{parameters / 1e6:g}M"
    return ModelShape(name, parameters, layers, hidden, heads, heads, 4 * hidden, False, vocabulary, True, assumed=True)


def model_named(text: str) -> ModelShape:
    """A built-in family, or a transformers configuration (``config.json``, or the folder that has one).

    Raises:
        PlanError: It is neither.
    """
    if text.lower() in FAMILIES:
        return FAMILIES[text.lower()]
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _of_transformers(path)
    near = nearest(text.lower(), list(FAMILIES))
    raise PlanError(
        f"--model was set to {text!r}, which is no built-in model and no config.json; built in: {', '.join(FAMILIES)}",
        hint=f"--model {near or 'llama-7b'}   or --params 7B",
    )


def _of_transformers(path: Path) -> ModelShape:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(
            f"--model was set to {str(path)!r}, which can't be read: {error}", hint="--model config.json"
        ) from error

    def read(*names: str, default: Any = None) -> Any:
        for name in names:
            if found.get(name) is not None:
                return found[name]
        if default is None:
            raise PlanError(
                f"{path} has no {' or '.join(names)}, by which the model's size is counted",
                hint="--params 7B   plans with a typical shape",
            )
        return default

    hidden, heads = (
        int(read("hidden_size", "n_embd", "d_model")),
        int(read("num_attention_heads", "n_head", "num_heads")),
    )
    gated = "silu" in str(read("hidden_act", "activation_function", default="gelu")).lower()
    return _shape(
        str(found.get("_name_or_path") or found.get("model_type") or path.parent.name),
        int(read("num_hidden_layers", "n_layer", "num_layers")),
        hidden,
        heads,
        int(read("vocab_size")),
        kv_heads=int(read("num_key_value_heads", default=heads)),
        feed_forward=int(read("intermediate_size", "n_inner", "d_ff", default=4 * hidden)),
        gated=gated,
        tied=bool(found.get("tie_word_embeddings", not gated)),
        positions=0 if gated else int(read("max_position_embeddings", "n_positions", default=1)),
        biases=not gated,
    )
