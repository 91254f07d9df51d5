"""Checkpoints in an object store, or whatever else fsspec reaches: no rename, no flush, no half-written file.

A checkpoint is written under its final name, the manifest last. Until then an object ``unfinished-<host>-<pid>`` in it
says who is writing. A second checkpoint of the same step goes to ``step-00000100.1``, and the first is removed when it is
whole; so at no moment fewer checkpoints are there than before.
"""

from __future__ import annotations

import logging
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from distkit.checkpoint.format import MANIFEST, STEP_FOLDER, step_folder
from distkit.checkpoint.listing import MARKER, is_unfinished
from distkit.checkpoint.store import SURELY_DEAD_S, Store, remove, this_process, writer_is_dead
from distkit.checkpoint.tensorfile import writing

__all__ = ["ObjectStore"]

MARKER_NAME = re.compile(MARKER + r"(?P<host>.+)-(?P<pid>\d+)")

log = logging.getLogger(__name__)


class ObjectStore(Store):
    """See :class:`Store` and this module."""

    def name_for(self, step: int) -> str:
        """See :class:`Store`: the first of ``step-00000100``, ``step-00000100.1`` ... that nothing lies under."""
        name, number = step_folder(step), 0
        while (self.folder / name).exists():
            number += 1
            name = f"{step_folder(step)}.{number}"
        return name

    def begin(self, name: str) -> str:
        """See :class:`Store`."""
        folder = self.folder / name
        marker = folder / f"{MARKER}{this_process()}"
        with writing(folder):
            try:
                marker.write_bytes(b"")
            except FileNotFoundError:  # a file system with folders; object stores have none to make
                folder.mkdir(parents=True, exist_ok=True)
                marker.write_bytes(b"")
        return name

    def publish(self, temporary: str, name: str) -> None:
        """See :class:`Store`; the manifest has made it a checkpoint already."""
        with writing(self.folder / name):
            (self.folder / name / f"{MARKER}{this_process()}").unlink()
        step = name.split(".")[0]
        for path in list(self.folder.iterdir()):
            if path.name != name and path.name.split(".")[0] == step and STEP_FOLDER.fullmatch(path.name):
                self.retire(path.name)

    def abandon(self, temporary: str) -> None:
        """See :class:`Store`."""
        try:
            self.retire(temporary)
        except OSError as error:
            log.warning("%s is not removed: %s", self.folder / temporary, error)

    def retire(self, name: str) -> None:
        """See :class:`Store`; without its manifest, and with a marker, it is none any more."""
        folder = self.folder / name
        try:
            (folder / f"{MARKER}{this_process()}").write_bytes(b"")
            if (folder / MANIFEST).exists():
                (folder / MANIFEST).unlink()
        except OSError as error:
            log.warning("%s is not removed: %s", folder, error.strerror or error)
            return
        remove(folder)

    def clean_up_one(self, path: Path) -> None:
        """See :class:`Store`."""
        if not STEP_FOLDER.fullmatch(path.name):
            return
        writers = [match for file in path.iterdir() if (match := MARKER_NAME.fullmatch(file.name))]
        if not writers:
            return
        if not is_unfinished(path):  # died between manifest and marker
            for match in writers:
                (path / match[0]).unlink()
        elif all(writer_is_dead(w["host"], int(w["pid"])) for w in writers) or self._is_old(path):
            remove(path)

    @staticmethod
    def _is_old(path: Path) -> bool:
        """By the store's clock; a store that tells no times says it isn't."""
        ages = []
        for file in path.iterdir():
            remote = cast(Any, file)
            try:
                written: datetime = remote.fs.modified(remote.path)
            except (NotImplementedError, KeyError):
                return False
            written = written if written.tzinfo is not None else written.replace(tzinfo=timezone.utc)
            ages.append(time.time() - written.timestamp())
        return bool(ages) and min(ages) > SURELY_DEAD_S
