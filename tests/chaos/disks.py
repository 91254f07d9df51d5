"""Small disks, full disks and folders that can't be written; all of it undone at the end. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["can_mount", "fill", "lock_folder", "remount", "small_disk", "unlock_folder"]

FILLER = "filler"


def can_mount() -> bool:
    """Whether this process may mount, and make a folder immutable."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and shutil.which("chattr") is not None


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Memory as a file system of its own.

    Args:
        folder: Where; it is made.
        size: Bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        # Lazily: a process that is stuck with a file open must not keep the disk for ever.
        if subprocess.run(["umount", str(folder)], capture_output=True).returncode != 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str, seconds: float = 5.0) -> bool:
    """Change a mounted disk: ``ro``, ``rw`` or ``size=...``.

    A disk with a file open for writing can't become read-only, so this is tried until it works.

    Args:
        folder: Where it is mounted.
        options: As for ``mount -o remount``.
        seconds: How long to try.

    Returns:
        Whether it worked.
    """
    until = time.monotonic() + seconds
    while True:
        done = subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], capture_output=True)
        if done.returncode == 0 or time.monotonic() > until:
            return done.returncode == 0


def fill(folder: Path) -> Path:
    """Take all the space that is left.

    Returns:
        The file that has it.
    """
    path = folder / FILLER
    with path.open("ab", buffering=0) as file:
        while True:
            found = os.statvfs(folder)
            free = found.f_bavail * found.f_frsize
            if free == 0:
                return path
            with suppress(OSError):  # someone else was quicker
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)


def lock_folder(folder: Path) -> bool:
    """Let nothing be made, renamed or removed in a folder: mode bits don't stop root, the immutable flag does.

    Returns:
        Whether it worked; the folder may be gone.
    """
    return subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode == 0


def unlock_folder(folder: Path) -> None:
    """Undo it, for the folder and all below it."""
    subprocess.run(["chattr", "-R", "-i", str(folder)], capture_output=True)
