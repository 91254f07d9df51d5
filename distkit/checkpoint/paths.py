"""Where checkpoints lie: a folder of this machine, or a URL such as ``s3://bucket/run``.

A URL becomes a path of universal_pathlib, which has the interface of :class:`pathlib.Path` over fsspec's file systems;
all code here takes either, and is typed with ``Path``. What the two can't do alike is in the stores
(:mod:`distkit.checkpoint.store`) and where tensors are read (:mod:`distkit.checkpoint.tensorfile`).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, cast

from distkit.errors import CheckpointError
from distkit.masking import mask_text

__all__ = ["is_local", "look_again", "remove_tree", "to_path"]

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::[A-Za-z][A-Za-z0-9+.\-]*)*://")

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Extras of this package that bring the driver of a kind of URL."""


def to_path(given: str | Path) -> Path:
    """A path of either kind.

    Args:
        given: A path of this machine or a URL.

    Raises:
        CheckpointError: The URL is of a kind that this machine has no driver for; the hint is the install line.
    """
    if not isinstance(given, str):
        return given
    if not URL.match(given):
        return Path(given)
    kind = given.split(":", 1)[0]
    try:
        from upath import UPath
    except ImportError as error:
        raise CheckpointError(
            f"{mask_text(given)} is a URL, which needs universal_pathlib; it isn't installed",
            hint="pip install 'distkit[remote]'",
        ) from error
    try:
        path: Any = UPath(given)
        path.fs  # noqa: B018  (loads the driver)
    except ImportError as error:
        install = f"'distkit[{EXTRAS[kind]}]'" if kind in EXTRAS else "the package that it names"
        raise CheckpointError(
            f"{mask_text(given)}: the driver for {kind}:// isn't installed ({error})", hint=f"pip install {install}"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{mask_text(given)}: {kind}:// is no kind of URL that fsspec knows",
            hint="use a path, or s3://..., gs://..., file:///...",
        ) from error
    return cast(Path, path)


def is_local(path: Path) -> bool:
    """Whether it is a path of this machine (a network file system that is mounted here is one)."""
    return isinstance(path, Path)


def look_again(folder: Path) -> None:
    """Forget what a remote file system remembers of a folder: other processes write there too."""
    if not is_local(folder):
        cast(Any, folder).fs.invalidate_cache()


def remove_tree(path: Path) -> None:
    """A folder and all that is in it.

    Raises:
        OSError: It can't be removed.
    """
    if is_local(path):
        shutil.rmtree(path)
    else:
        look_again(path)
        cast(Any, path).rmdir(recursive=True)
