"""What ``--job KEY=VALUE`` says to a scheduler, checked against the keys that it has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distkit.config.nearest import nearest
from distkit.errors import LaunchError

__all__ = ["job_settings", "whole_number"]


def job_settings(texts: Sequence[str], known: Collection[str], launcher: str) -> dict[str, str]:
    """The settings by key.

    Args:
        texts: Each ``KEY=VALUE``.
        known: The keys that there are.
        launcher: Name of the launcher, for messages.

    Raises:
        LaunchError: A text has no value, a key is unknown, or it stands there twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise LaunchError(f"--job was set to {text!r}; valid: KEY=VALUE", hint=f"--job {key or 'KEY'}=VALUE")
        if key not in known:
            near = nearest(key, known)
            raise LaunchError(
                f"--job {key} was set, but --launcher {launcher} knows: {', '.join(sorted(known))}",
                hint=f"--job {near}={value}" if near else f"--job {min(known)}=...",
            )
        if key in found:
            raise LaunchError(f"--job {key} was set twice: {found[key]!r} and {value!r}", hint=f"--job {key}={value}")
        found[key] = value
    return found


def whole_number(key: str, text: str) -> int:
    """A value that counts something.

    Raises:
        LaunchError: It is no number from 1 on.
    """
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"--job {key} was set to {text!r}; valid: a number from 1 on", hint=f"--job {key}=1")
    return int(text)
