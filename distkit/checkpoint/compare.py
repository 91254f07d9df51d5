"""Two checkpoints side by side, tensor by tensor, whoever wrote them and on however many processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from distkit.checkpoint.load import CheckpointReader
from distkit.state import Region

__all__ = ["TensorDifference", "compare_checkpoints"]


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs.

    Args:
        group: ``model``, ``optimizer`` ...
        name: Its name.
        kind: ``parameter``, ``exp_avg`` ...
        what: ``only in the first``, ``only in the second``, ``shape``, ``dtype``, ``values``, or ``equal``.
        largest: Largest absolute difference of the values; NaN where exactly one of two values is NaN.
    """

    group: str
    name: str
    kind: str
    what: str
    largest: float = 0.0


def compare_checkpoints(first: CheckpointReader, second: CheckpointReader) -> Iterator[TensorDifference]:
    """Every tensor of both, in the first one's order; one tensor at a time is in memory.

    Args:
        first: Open for reading.
        second: Open for reading.

    Raises:
        CheckpointError: A file is damaged.
    """
    keys = [{(g, n, k) for g, n, k, _ in reader.manifest.all_tensors()} for reader in (first, second)]
    for group, name, kind, _ in first.manifest.all_tensors():
        if (group, name, kind) not in keys[1]:
            yield TensorDifference(group, name, kind, "only in the first")
        else:
            yield _compare(first, second, group, name, kind)
    for group, name, kind, _ in second.manifest.all_tensors():
        if (group, name, kind) not in keys[0]:
            yield TensorDifference(group, name, kind, "only in the second")


def _compare(first: CheckpointReader, second: CheckpointReader, group: str, name: str, kind: str) -> TensorDifference:
    a, b = first.stored(group, name, kind), second.stored(group, name, kind)
    if a.shape != b.shape:
        return TensorDifference(group, name, kind, "shape")
    whole = Region.whole(a.shape)
    x, y = first.read(group, name, kind, whole), second.read(group, name, kind, whole)
    if a.dtype == b.dtype and torch.equal(x, y):
        return TensorDifference(group, name, kind, "equal")
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(same, torch.zeros((), dtype=torch.float64), (x - y).abs())
    largest = float(apart.max()) if apart.numel() else 0.0
    if a.dtype != b.dtype:
        return TensorDifference(group, name, kind, "dtype", largest)
    return TensorDifference(group, name, kind, "equal" if bool(same.all()) else "values", largest)
