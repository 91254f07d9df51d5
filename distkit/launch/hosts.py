"""The hosts of a run, from ``--hosts`` or ``--hostfile``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distkit.errors import LaunchError

__all__ = ["Host", "common_slots", "is_this_host", "parse_host_lines", "parse_hosts", "read_hostfile"]

_ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)(?:\s*:\s*(?P<count>\d+)|\s+(?:slots|max_slots)\s*=\s*(?P<slots>\d+))?"
)


@dataclass(frozen=True)
class Host:
    """One host.

    Args:
        name: As ssh knows it.
        slots: Processes that it has room for; None where that wasn't said.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """``host0:4,host1:4``; the number may be left out.

    Raises:
        LaunchError: Something in it is no host.
    """
    return _unique((_host(part, f"--hosts {text}") for part in text.split(",")), f"--hosts {text}")


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """One host a line, as ``host``, ``host:4`` (MPICH, horovodrun) or ``host slots=4`` (Open MPI, DeepSpeed).

    Raises:
        LaunchError: The file can't be read, or a line is no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LaunchError(
            f"--hostfile was set to {str(path)!r}, which can't be read: {error.strerror}",
            hint="--hosts host0:4,host1:4",
        ) from error
    found = parse_host_lines(lines, str(path))
    if not found:
        raise LaunchError(
            f"--hostfile was set to {str(path)!r}, which names no host", hint="a line such as: host0 slots=4"
        )
    return found


def parse_host_lines(lines: Iterable[str], where: str) -> tuple[Host, ...]:
    """Hosts, one a line; empty lines and what follows ``#`` are left out.

    Args:
        lines: The text.
        where: Names it in messages.

    Raises:
        LaunchError: A line is no host.
    """
    entries = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    return _unique((_host(entry, f"{where}:{number}") for number, entry in entries if entry), where)


def common_slots(hosts: Sequence[Host]) -> int | None:
    """Processes that every host has room for; None where no host says."""
    return min((host.slots for host in hosts if host.slots is not None), default=None)


def is_this_host(name: str, own: str) -> bool:
    """Whether a name is that of the machine we are on."""
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0])


def _host(text: str, where: str) -> Host:
    match = _ENTRY.fullmatch(text.strip())
    count = None if match is None else match["count"] or match["slots"]
    if match is None or count == "0":
        raise LaunchError(f"{where}: {text.strip()!r} is no host", hint="host0:4   or host0 slots=4   in a file")
    return Host(match["name"], None if count is None else int(count))


def _unique(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    found: dict[str, Host] = {}
    for host in hosts:
        if host.name in found:
            raise LaunchError(f"{where}: {host.name!r} is there twice", hint=f"{host.name}:N   with the sum")
        found[host.name] = host
    return tuple(found.values())
