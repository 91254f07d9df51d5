"""A folder of checkpoints: how one of them appears there, as a whole or not at all, and how it goes.

Rank 0 calls these methods. :class:`LocalStore` writes under a temporary name and renames at the end. Object stores can't
rename; :class:`distkit.checkpoint.object_store.ObjectStore` relies on the manifest, which comes last.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import socket
import time
from abc import ABC, abstractmethod
from pathlib import Path

from distkit.checkpoint.format import step_folder
from distkit.checkpoint.listing import inspect_checkpoint
from distkit.checkpoint.paths import is_local, remove_tree
from distkit.checkpoint.tensorfile import fsync_folder, writing

__all__ = ["LocalStore", "Store", "open_store", "remove", "this_host", "this_process", "writer_is_dead"]

UNFINISHED = re.compile(r"\.tmp-step-\d+-(?P<host>.+)-(?P<pid>\d+)-\d+")
MOVED_ASIDE = re.compile(r"\.old-(?P<name>step-\d+)-\d+")
SURELY_DEAD_S = 24 * 3600.0

log = logging.getLogger(__name__)


class Store(ABC):
    """A folder of checkpoints.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def name_for(self, step: int) -> str:
        """Name under which the next checkpoint of a step will be found."""

    @abstractmethod
    def begin(self, name: str) -> str:
        """Make a folder to write into.

        Args:
            name: From :meth:`name_for`.

        Returns:
            The name of that folder.

        Raises:
            CheckpointError: It can't be made.
        """

    @abstractmethod
    def publish(self, temporary: str, name: str) -> None:
        """All files are there, the manifest too: let the checkpoint be found.

        Args:
            temporary: From :meth:`begin`.
            name: From :meth:`name_for`. An older checkpoint of the same step is replaced.

        Raises:
            CheckpointError: It can't; an older one is as before.
        """

    @abstractmethod
    def abandon(self, temporary: str) -> None:
        """Remove what was written since :meth:`begin`; never raises."""

    @abstractmethod
    def retire(self, name: str) -> None:
        """Remove a checkpoint such that a half-removed one is never taken for one; a failure is logged."""

    @abstractmethod
    def clean_up_one(self, path: Path) -> None:
        """Remove what a run left half-written, if its writer is surely dead."""

    def clean_up(self) -> None:
        """See :meth:`clean_up_one`, for all that is in the folder."""
        try:
            for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
                self.clean_up_one(path)
        except OSError as error:
            log.warning("%s can't be cleaned up: %s", self.folder, error.strerror or error)


class LocalStore(Store):
    """On a file system: written beside, flushed, renamed."""

    def name_for(self, step: int) -> str:
        """See :class:`Store`; the same each time."""
        return step_folder(step)

    def begin(self, name: str) -> str:
        """See :class:`Store`."""
        temporary = f".tmp-{name}-{this_process()}-{time.time_ns()}"
        with writing(self.folder / temporary):
            (self.folder / temporary).mkdir(parents=True)
        return temporary

    def publish(self, temporary: str, name: str) -> None:
        """See :class:`Store`. An older one is moved aside first; clean_up() puts it back if we die in between."""
        final, aside = self.folder / name, self.folder / f".old-{name}-{time.time_ns()}"
        with writing(final):
            fsync_folder(self.folder / temporary)
            replaced = final.exists()
            if replaced:
                final.rename(aside)
            try:
                (self.folder / temporary).rename(final)
            except OSError:
                if replaced:
                    aside.rename(final)
                raise
            shutil.rmtree(aside, ignore_errors=True)
            fsync_folder(self.folder)

    def abandon(self, temporary: str) -> None:
        """See :class:`Store`."""
        shutil.rmtree(self.folder / temporary, ignore_errors=True)

    def retire(self, name: str) -> None:
        """See :class:`Store`; renamed first."""
        doomed = self.folder / f".del-{name}-{time.time_ns()}"
        try:
            (self.folder / name).rename(doomed)
        except OSError as error:
            log.warning("%s is not removed: %s", self.folder / name, error.strerror)
            return
        remove(doomed)

    def clean_up_one(self, path: Path) -> None:
        """See :class:`Store`. A checkpoint that was being replaced when its run died is put back."""
        if path.name.startswith(".del-"):
            remove(path)
        elif match := UNFINISHED.fullmatch(path.name):
            if writer_is_dead(match["host"], int(match["pid"])) or self._is_old(path):
                remove(path)
        elif match := MOVED_ASIDE.fullmatch(path.name):
            place = self.folder / match["name"]
            if not place.exists() and inspect_checkpoint(path).problem is None:
                path.rename(place)
            else:
                remove(path)

    @staticmethod
    def _is_old(path: Path) -> bool:
        times = [path.stat().st_mtime, *(file.stat().st_mtime for file in path.iterdir())]
        return time.time() - max(times) > SURELY_DEAD_S


def open_store(folder: Path) -> Store:
    """The store for a folder of this machine or of a URL."""
    if is_local(folder):
        return LocalStore(folder)
    from distkit.checkpoint.object_store import ObjectStore

    return ObjectStore(folder)


def remove(path: Path) -> None:
    """A folder that can't be removed wastes space, which is said, but does no harm."""
    try:
        remove_tree(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            log.warning("%s is not removed: %s", path, error.strerror or error)


def this_process() -> str:
    """Host and process, as they stand in the name of an unfinished folder.

    The number of the PID namespace is part of the host: two containers may have the same host name.
    """
    return f"{this_host()}-{os.getpid()}"


def this_host() -> str:
    """See :func:`this_process`."""
    host = re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "host"
    try:
        return f"{host}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return host


def writer_is_dead(host: str, pid: int) -> bool:
    """Whether the process was of this host and is gone."""
    return host == this_host() and not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user: it is there
        return True
    return True
