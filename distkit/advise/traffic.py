"""The collectives of a step, exactly: what, how large, over which ranks, how often; and the bytes that each link carries.

A ring sends 2 (n-1)/n of a message for an all-reduce and (n-1)/n for an all-gather or a reduce-scatter (Patarasu and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distkit.advise.compression import wire_bytes
from distkit.advise.hardware import Hardware
from distkit.advise.layout import Layout
from distkit.advise.memory import StateSizes, split_parameters, state_sizes
from distkit.advise.models import ModelShape
from distkit.strategies.zero_config import reduce_bucket_size
from distkit.traffic import ring_share

__all__ = ["Collective", "LinkBytes", "collectives_of", "link_bytes"]

_DDP_BUCKET = 25 * 2**20
"""DDP's ``bucket_cap_mb``, in bytes."""


@dataclass(frozen=True)
class Collective:
    """One kind of them in a step.

    Args:
        what: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast`` or ``reduce``.
        purpose: For people.
        message: Bytes of the whole tensor.
        ranks: Size of the group.
        in_node: How many of them share a node.
        groups: Groups that use a node's network at the same time.
        count: How often in a step.
        hides: Whether it can overlap with computing.
        parts: Single calls that it stands for (layers, buckets), each with a latency.
        forward: Share of it that belongs to the forward; the rest belongs to the backward.
        window: Share of the micro batches under which it can hide.
    """

    what: str
    purpose: str
    message: float
    ranks: int
    in_node: int
    groups: int
    count: float
    hides: bool
    parts: int = 1
    forward: float = 0.0
    window: float = 1.0

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a step."""
        return ring_share(self.what, self.ranks) * self.message * self.count

    @property
    def crosses(self) -> bool:
        """Whether its group reaches over nodes."""
        return self.ranks > self.in_node


@dataclass(frozen=True)
class LinkBytes:
    """Of one rank in a step, sent.

    Args:
        intra: Inside of its node.
        inter: Across nodes, its share of what its node sends.
        host: To and from host memory.
    """

    intra: float
    inter: float
    host: float

    def as_dict(self) -> dict[str, int]:
        """Rounded, for JSON."""
        return {"intra": round(self.intra), "inter": round(self.inter), "host": round(self.host)}


def collectives_of(
    model: ModelShape,
    layout: Layout,
    hardware: Hardware,
    *,
    micro: float,
    accumulate: int,
    sequence: int,
    optimizer: str,
    precision: str,
    compress: str = "none",
) -> list[Collective]:
    """What a rank takes part in during one optimizer step.

    Args:
        model: The model.
        layout: The candidate.
        hardware: Where.
        micro: Sequences in a micro batch of a data-parallel rank.
        accumulate: Micro batches in a step.
        sequence: Tokens in a sequence.
        optimizer: Name of the optimizer.
        precision: As in the settings.
        compress: As ``compress.method`` in the settings.
    """
    sizes = state_sizes(precision, optimizer, layout.engine)
    group = _DataGroup(layout, hardware)
    found: list[Collective] = []
    if layout.data > 1:
        found += _data_parallel(model, layout, group, sizes, accumulate, compress)
    # DeepSpeed's stage 3 passes each layer's input through a function of its own.
    shared = not (layout.engine.kept and "parameters" in layout.shards)
    passes = model.tensor_reductions(layout.tensor, shared=shared)
    if passes:
        # Of a block that is computed again only the last all-reduce isn't wanted.
        passes += model.layers if layout.recompute != "none" else 0
        value = 4.0 if precision == "fp32" else 2.0
        message = value * sequence * micro * model.hidden
        found.append(
            Collective(
                *("all_reduce", "activations between split layers", message, layout.tensor, layout.tensor),
                groups=1,
                count=float(passes * accumulate),
                hides=False,
                parts=passes * accumulate,
            )
        )
    return found


@dataclass(frozen=True)
class _DataGroup:
    """How the data-parallel ranks lie over the nodes."""

    layout: Layout
    hardware: Hardware

    @property
    def in_node(self) -> int:
        return min(self.layout.data, self.hardware.each // self.layout.tensor)

    def collective(
        self,
        what: str,
        purpose: str,
        message: float,
        count: float,
        parts: int,
        *,
        over: str = "all",
        hides: bool = True,
        forward: float = 0.0,
        window: float = 1.0,
    ) -> Collective:
        """Over all of them, those of a node, or those at the same place of all nodes."""
        layout, hardware = self.layout, self.hardware
        ranks, in_node, groups = layout.data, self.in_node, layout.tensor
        if over == "node":
            ranks = in_node
        elif over == "nodes":
            ranks, in_node, groups = hardware.nodes, 1, hardware.each
        return Collective(what, purpose, message, ranks, in_node, groups, count, hides, parts, forward, window)


def _data_parallel(
    model: ModelShape, layout: Layout, group: _DataGroup, sizes: StateSizes, accumulate: int, compress: str
) -> list[Collective]:
    """By what is split: the sum of gradients, and the weights that have to be gathered."""
    reduce, gather = "reduce_scatter", "all_gather"
    engine, layers = layout.engine, model.layers
    mine = split_parameters(model, layout.tensor)
    gradients = mine * model.trained_parameters / model.parameters * wire_bytes(sizes.gradient, compress)
    last = 1 / accumulate  # what is exchanged once a step goes with the last micro batch's backward
    if "parameters" in layout.shards:
        over = "node" if layout.strategy == "hsdp" else "all"
        passes = 2 * accumulate
        gathered = sizes.compute * _gathered(model, layout, accumulate) / passes
        windows = 1 if engine.whole_in_windows else accumulate
        found = [
            group.collective(
                *(gather, "weights, forward and backward", gathered, float(passes), layers * passes),
                over=over,
                forward=0.5,
            ),
            group.collective(
                reduce, "gradients", gradients, float(windows), layers * windows, over=over, window=windows * last
            ),
        ]
        if layout.strategy == "hsdp":
            shard = gradients / layout.shard_ranks
            found.append(
                group.collective("all_reduce", "gradients across nodes", shard, 1.0, layers, over="nodes", window=last)
            )
        return found
    if "optimizer" in layout.shards:
        windows = accumulate if "gradients" in layout.shards else 1
        sums = reduce if engine.scatters else "all_reduce"
        buckets = -(-int(mine) // reduce_bucket_size(int(mine)))
        return [
            group.collective(sums, "gradients", gradients, float(windows), buckets * windows, window=windows * last),
            group.collective(gather, "updated weights", mine * sizes.compute, 1.0, buckets, hides=False),
        ]
    weights = mine * sizes.parameter
    if layout.strategy == "dp":  # one thread a device, nothing beside it
        return [
            group.collective(
                "broadcast", "weights to all devices", weights, float(accumulate), accumulate, hides=False
            ),
            group.collective("reduce", "gradients to the first", gradients, float(accumulate), accumulate, hides=False),
        ]
    buckets = max(1, round(gradients / _DDP_BUCKET))
    return [group.collective("all_reduce", "gradients", gradients, 1.0, buckets, window=last)]


def _gathered(model: ModelShape, layout: Layout, accumulate: int) -> float:
    """Elements that are gathered in a step: all for each forward, and again for each backward what wasn't kept till then."""
    engine, mine = layout.engine, split_parameters(model, layout.tensor)
    if engine.outside_stays:
        again = mine * (1 - model.outside_parameters / model.parameters)
        return accumulate * (mine + again)
    small = (
        min(mine, model.small_parameters(layout.tensor)) if engine.small_stay else 0.0
    )  # gathered once, after they were stepped
    return small + accumulate * (mine - small) + accumulate * max(0.0, mine - max(small, engine.kept))


def link_bytes(collectives: Iterable[Collective], host: float) -> LinkBytes:
    """What each link carries for one rank.

    In a ring over nodes, one of a node's ranks in it sends to the next node, and the others inside.

    Args:
        collectives: Of a step.
        host: Bytes to and from host memory.
    """
    intra = inter = 0.0
    for one in collectives:
        across = one.sent / one.in_node if one.crosses else 0.0
        inter += across
        intra += one.sent - across
    return LinkBytes(intra, inter, host)
