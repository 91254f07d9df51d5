"""Data: the same samples in the same order for any number of ranks and workers.

Nothing here loads torch before it is used, so that a launcher can resolve batch sizes without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distkit.data.batch import BatchPlan, batch_size_of, resolve_batch
    from distkit.data.loader import LoaderListener, PreparedLoader
    from distkit.data.order import BatchInfo
    from distkit.data.transfer import batch_samples, move_to

_LAZY = {
    "BatchInfo": "distkit.data.order",
    "BatchPlan": "distkit.data.batch",
    "LoaderListener": "distkit.data.loader",
    "PreparedLoader": "distkit.data.loader",
    "batch_samples": "distkit.data.transfer",
    "batch_size_of": "distkit.data.batch",
    "move_to": "distkit.data.transfer",
    "resolve_batch": "distkit.data.batch",
}

__all__ = [
    "BatchInfo",
    "BatchPlan",
    "LoaderListener",
    "PreparedLoader",
    "batch_samples",
    "batch_size_of",
    "move_to",
    "resolve_batch",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'distkit.data' has no attribute {name!r}")
    return getattr(import_module(module), name)
