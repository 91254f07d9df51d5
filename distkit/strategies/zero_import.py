"""Importing DeepSpeed: for the right device, and without what it doesn't need."""

from __future__ import annotations

import os
import sys

__all__ = ["import_deepspeed"]


def import_deepspeed(device_type: str) -> None:
    """Import it for this kind of device (``cpu``, ``cuda`` ...); later imports find it loaded.

    Its autotuner, which nothing here uses, imports MLflow where that is installed (autotuning/autotuner.py): seconds on each
    rank. It goes on without, so MLflow is hidden meanwhile.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # or it takes the GPU that device=cpu leaves alone
    hidden = "mlflow" not in sys.modules
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    if hidden:
        modules["mlflow"] = None
    try:
        import deepspeed  # noqa: F401
    finally:
        if hidden:
            del modules["mlflow"]
