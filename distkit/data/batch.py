"""Batch sizes: micro batch x accumulation x data-parallel ranks = global batch, and any two of them give the third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distkit.config.schema import BatchConfig
from distkit.errors import ConfigError

__all__ = ["BatchPlan", "batch_size_of", "resolve_batch"]


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of one optimizer step are cut.

    Args:
        micro: Samples in one micro batch on one device; None where the DataLoader's own batch sampler, or the data
            set itself, makes the batches.
        accumulate: Micro batches on one device in one optimizer step.
        data_size: Data-parallel ranks.
        global_batch: Samples in one optimizer step, over all ranks; None where ``micro`` is.
        per: Whether a batch of the DataLoader is one ``device``'s micro batch or the ``global`` one.
    """

    micro: int | None
    accumulate: int
    data_size: int
    global_batch: int | None
    per: str = "device"

    def describe(self) -> str:
        """The product in words, as in ``micro batch 8 x accumulate 2 x data-parallel 4 = global batch 64``."""
        if self.micro is None:
            whose = (
                "each batch of the DataLoader is a global batch, cut into"
                if self.per == "global"
                else ("micro batches as the DataLoader makes them x")
            )
            return f"{whose} accumulate {self.accumulate} x data-parallel {self.data_size}"
        return (
            f"micro batch {self.micro} x accumulate {self.accumulate} x data-parallel {self.data_size} "
            f"= global batch {self.global_batch}"
        )


def batch_size_of(loader: Any) -> int | None:
    """The batch size that a DataLoader was made with.

    Args:
        loader: A DataLoader, also one with a ``batch_sampler``.

    Returns:
        Samples; None where batches have no fixed size, or the data set yields whole batches.
    """
    if loader.batch_size is not None:
        return int(loader.batch_size)
    size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def resolve_batch(batch: BatchConfig, loader_batch_size: int | None, data_size: int) -> BatchPlan:
    """Find micro batch, accumulation and global batch from what was set.

    Args:
        batch: The settings. With ``per: device``, ``size`` (or ``micro``) is one micro batch on one device. With
            ``per: global``, ``size`` is all samples of one optimizer step, and ``micro`` or ``accumulate`` says how
            it is cut.
        loader_batch_size: The DataLoader's own batch size, taken where ``size`` is null.
        data_size: Data-parallel ranks (not all processes: tensor-parallel ranks see the same samples).

    Raises:
        ConfigError: The numbers contradict each other, or don't divide; the hint has values that work.
    """
    if batch.per == "device":
        return _per_device(batch, loader_batch_size, data_size)
    return _per_global(batch, loader_batch_size, data_size)


def _per_device(batch: BatchConfig, loader_batch_size: int | None, data_size: int) -> BatchPlan:
    if batch.size is not None and batch.micro is not None and batch.size != batch.micro:
        raise ConfigError(
            f"batch.per=device, so batch.size={batch.size} and batch.micro={batch.micro} both speak of one micro batch, "
            f"and they differ (data-parallel {data_size})",
            hint="--set batch.per=global",
        )
    micro = batch.size or batch.micro or loader_batch_size
    accumulate = batch.accumulate or 1
    return BatchPlan(micro, accumulate, data_size, None if micro is None else micro * accumulate * data_size)


def _per_global(batch: BatchConfig, loader_batch_size: int | None, data_size: int) -> BatchPlan:
    micro, accumulate, size = batch.micro, batch.accumulate, batch.size
    if size is None and micro is not None and (accumulate is not None or loader_batch_size is None):
        size = micro * (accumulate or 1) * data_size
    origin = "batch.size" if size is not None else "the DataLoader's batch_size"
    size = loader_batch_size if size is None else size
    if size is None:
        return BatchPlan(None, accumulate or 1, data_size, None, "global")
    if micro is not None and accumulate is not None and micro * accumulate * data_size != size:
        raise ConfigError(
            f"batch.per=global and batch.size={size}, but batch.micro={micro} x batch.accumulate={accumulate} x "
            f"data-parallel {data_size} = {micro * accumulate * data_size}",
            hint=f"--set batch.size={micro * accumulate * data_size}   or leave one of the three at null",
        )
    known, name = (micro, "micro") if micro is not None else (accumulate or 1, "accumulate")
    third, rest = divmod(size, known * data_size)
    if rest:
        raise ConfigError(
            f"batch.per=global and {origin}={size}, which can't be cut evenly: batch.{name}={known} x data-parallel "
            f"{data_size} = {known * data_size}, and {size} / {known * data_size} = {size / (known * data_size):.4g}",
            hint=_values_that_work(size, known, name, data_size),
        )
    micro, accumulate = (known, third) if micro is not None else (third, known)
    return BatchPlan(micro, accumulate, data_size, size, "global")


def _values_that_work(size: int, known: int, name: str, data_size: int) -> str:
    """Global batches next to the one that was set and, if it divides by the ranks, other values of the second key."""
    unit = known * data_size
    sizes = [n for n in (size - size % unit, size - size % unit + unit) if n > 0]
    hint = " or ".join(f"--set batch.size={n}" for n in sizes)
    if size % data_size == 0:
        share = size // data_size
        divisors = sorted((d for d in range(1, share + 1) if share % d == 0), key=lambda d: (abs(d - known), d))
        hint += f", or --set batch.{name}={divisors[0]}"
    return hint
