"""The hosts of a run, from ``--hosts`` or ``--hostfile``, and which of them are taken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distkit.config.nearest import nearest
from distkit.errors import LaunchError

__all__ = ["Host", "chosen", "common_slots", "is_this_host", "parse_host_lines", "parse_hosts", "read_hostfile"]

_ENTRY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)"
    r"(?:\s*:\s*(?P<count>\d+)|\s+slots\s*=\s*(?P<slots>\d+)(?:\s+max[_-]slots\s*=\s*\d+)?"
    r"|\s+max[_-]slots\s*=\s*(?P<most>\d+))?"
)
_FILTER = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(?::(?P<slots>\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class Host:
    """One host.

    Args:
        name: As ssh knows it.
        slots: Processes that it has room for; None where that wasn't said.
        devices: Numbers of the devices that processes there may use; None is all.
    """

    name: str
    slots: int | None = None
    devices: tuple[int, ...] | None = None

    def as_text(self) -> str:
        """``host0:4``, as :func:`parse_hosts` reads it."""
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


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
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise LaunchError(
            f"--hostfile was set to {str(path)!r}, which can't be read: {why}",
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


def chosen(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Those that ``--include`` names, or all but those of ``--exclude``; in the order in which they were listed.

    Args:
        hosts: All.
        include: DeepSpeed's form: ``host0@host1:0,2``, where the numbers choose devices. Several hosts without devices
            may have commas between them.
        exclude: The same; with numbers only these devices are left out.

    Raises:
        LaunchError: Both were set, a host or device isn't there, or none is left.
    """
    if include is None and exclude is None:
        return tuple(hosts)
    if include is not None and exclude is not None:
        raise LaunchError("--include and --exclude were set, and each chooses the hosts", hint="leave one out")
    flag, text = ("--include", include) if include is not None else ("--exclude", exclude)
    wanted = _filter(flag, str(text), hosts)
    if include is not None:
        kept = [_with_devices(host, wanted[host.name]) for host in hosts if host.name in wanted]
    else:
        kept = [_without(host, wanted) for host in hosts if wanted.get(host.name, (0,)) is not None]
    if not kept or any(host.slots == 0 for host in kept):
        raise LaunchError(f"{flag} was set to {text!r}, which leaves no room", hint=f"{flag} {hosts[0].name}")
    return tuple(kept)


def _filter(flag: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Hosts that a filter names, with the devices that it names."""
    parts = text.split("@") if "@" in text or ":" in text else text.split(",")
    found: dict[str, tuple[int, ...] | None] = {}
    names = [host.name for host in hosts]
    for part in parts:
        match = _FILTER.fullmatch(part.strip())
        if match is None:
            raise LaunchError(f"{flag} was set to {text!r}: {part!r} is no host", hint=f"{flag} host0@host1:0,1")
        if match["name"] not in names:
            near = nearest(match["name"], names) or names[0]
            raise LaunchError(f"{flag} names {match['name']!r}, which is not among the hosts", hint=f"{flag} {near}")
        slots = next(host.slots for host in hosts if host.name == match["name"])
        devices = None if match["slots"] is None else tuple(int(number) for number in match["slots"].split(","))
        if devices is not None and slots is not None and max(devices) >= slots:
            raise LaunchError(
                f"{flag} names device {max(devices)} of {match['name']}, which has {slots} slots",
                hint=f"{flag} {match['name']}:0" + (f",{slots - 1}" if slots > 1 else ""),
            )
        if match["name"] in found or len(set(devices or ())) < len(devices or ()):
            raise LaunchError(f"{flag} was set to {text!r}, which names {part.strip()!r} twice", hint="name each once")
        found[match["name"]] = devices
    return found


def _with_devices(host: Host, devices: tuple[int, ...] | None) -> Host:
    return host if devices is None else Host(host.name, len(devices), devices)


def _without(host: Host, out: Mapping[str, tuple[int, ...] | None]) -> Host:
    devices = out.get(host.name)
    if devices is None:
        return host
    if host.slots is None:
        raise LaunchError(
            f"--exclude leaves out devices of {host.name}, but its slots aren't said", hint=f"{host.name} slots=8"
        )
    return _with_devices(host, tuple(number for number in range(host.slots) if number not in devices))


def common_slots(hosts: Sequence[Host]) -> int | None:
    """Processes that every host has room for; None where no host says."""
    return min((host.slots for host in hosts if host.slots is not None), default=None)


def is_this_host(name: str, own: str) -> bool:
    """Whether a name is that of the machine we are on."""
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0])


def _host(text: str, where: str) -> Host:
    match = _ENTRY.fullmatch(text.strip())
    count = None if match is None else match["count"] or match["slots"] or match["most"]
    if count is not None and int(count) == 0:
        raise LaunchError(f"{where}: {text.strip()!r} has room for no process", hint="leave the host out")
    if match is None and "@" in text:
        raise LaunchError(
            f"{where}: {text.strip()!r} is no host: ssh is told the user by itself",
            hint=f"--ssh-option User={text.strip().partition('@')[0]}   or a line in ~/.ssh/config",
        )
    if match is None:
        raise LaunchError(f"{where}: {text.strip()!r} is no host", hint="host0:4   or host0 slots=4   in a file")
    return Host(match["name"], None if count is None else int(count))


def _unique(hosts: Iterable[Host], where: str) -> tuple[Host, ...]:
    found: dict[str, Host] = {}
    for host in hosts:
        if host.name in found:
            raise LaunchError(f"{where}: {host.name!r} is there twice", hint=f"{host.name}:N   with the sum")
        found[host.name] = host
    return tuple(found.values())
