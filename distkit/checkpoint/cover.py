"""Whether boxes hold each element of a tensor exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from distkit.state import Region

__all__ = ["cover_problem"]


def cover_problem(shape: Sequence[int], regions: Sequence[Region]) -> str | None:
    """What is wrong with the regions of a tensor.

    Args:
        shape: Shape of the whole tensor.
        regions: Its pieces.

    Returns:
        None if each element lies in exactly one region; else which lie in two, in none, or outside.
    """
    shape = tuple(shape)
    for region in regions:
        if len(region.offset) != len(shape) or len(region.shape) != len(shape):
            return f"the region at {list(region.offset)} has another number of dimensions"
        if any(o + n > size for o, n, size in zip(region.offset, region.shape, shape, strict=True)):
            return f"the region at {list(region.offset)} of shape {list(region.shape)} lies outside"
    present = [region for region in regions if region.numel > 0]
    overlap = _first_overlap(present)
    if overlap is not None:
        a, b = overlap
        return (
            f"the regions at {list(a.offset)} of shape {list(a.shape)} and at {list(b.offset)} of shape {list(b.shape)} "
            "overlap"
        )
    missing = prod(shape) - sum(region.numel for region in present)
    if missing:
        return f"{missing:,} of {prod(shape):,} elements are in no region"
    return None


def _first_overlap(regions: list[Region]) -> tuple[Region, Region] | None:
    """Sweep along the dimension that is cut into most pieces, so that few regions are open at a time."""
    if len(regions) < 2:
        return None
    dims = len(regions[0].offset)
    if dims == 0:
        return regions[0], regions[1]
    along = max(range(dims), key=lambda d: len({region.offset[d] for region in regions}))
    opened: list[Region] = []
    for region in sorted(regions, key=lambda r: r.offset[along]):
        start = region.offset[along]
        opened = [other for other in opened if other.offset[along] + other.shape[along] > start]
        for other in opened:
            if region.intersect(other) is not None:
                return other, region
        opened.append(region)
    return None
