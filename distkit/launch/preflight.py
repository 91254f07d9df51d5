"""Looks at every host before anything is started there: one table with all problems of all hosts.

``python -m distkit.launch.preflight`` runs on each host; it reads JSON with what is needed from its standard input, and
prints JSON with what it found.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distkit.errors import LaunchError
from distkit.launch.hardware import visible_gpus
from distkit.launch.hosts import is_this_host
from distkit.launch.ssh import SshOptions

__all__ = ["HostNeeds", "Problem", "check_hosts", "look_here"]

_WITHIN_S = 60.0
_PACKAGES = ("distkit", "torch", "deepspeed", "horovod", "megatron-core")


@dataclass(frozen=True)
class HostNeeds:
    """What every host must have.

    Args:
        directory: The working directory.
        target: The script's path; None for a module.
        run_dir: The run's folder.
        token: Name of a file in it that the launching host has written.
        nproc: Processes on the host.
        cuda: Whether each of them needs a GPU.
        interface: Network interface that must be there.
        first: Host 0, where the processes meet.
        python: Version of the interpreter.
        packages: Versions of what takes part, as the launching host has them.
    """

    directory: str
    target: str | None
    run_dir: str
    token: str
    nproc: int
    cuda: bool
    interface: str | None
    first: str
    python: str = field(default_factory=platform.python_version)
    packages: Mapping[str, str] = field(default_factory=lambda: versions())


@dataclass(frozen=True)
class Problem:
    """Something that keeps a run from starting on a host.

    Args:
        host: Its name.
        what: A sentence.
        hint: What to do.
        away: Whether the host can't be reached at all.
    """

    host: str
    what: str
    hint: str
    away: bool = False


def versions() -> dict[str, str]:
    """Versions of the packages that must be the same everywhere."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def check_hosts(hosts: Sequence[str], needs: HostNeeds, ssh: SshOptions, python: str) -> list[Problem]:
    """Ask all hosts at the same time.

    Args:
        hosts: Their names.
        needs: What they must have.
        ssh: How they are reached.
        python: The interpreter there.

    Returns:
        All problems, in the order of the hosts.

    Raises:
        LaunchError: The run's folder can't be written here.
    """
    token = Path(needs.run_dir, needs.token)
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_text("distkit-run looks whether every host sees this file\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run's folder {needs.run_dir!r} can't be written: {error.strerror}", hint="--run-dir DIR"
        ) from error
    try:
        with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
            return [
                problem for found in pool.map(lambda host: _ask(host, needs, ssh, python), hosts) for problem in found
            ]
    finally:
        token.unlink(missing_ok=True)


def _ask(host: str, needs: HostNeeds, ssh: SshOptions, python: str) -> list[Problem]:
    program = [python, "-m", "distkit.launch.preflight"]
    here = is_this_host(host, os.uname().nodename)
    words = program if here else ssh.command(host, program)
    try:
        done = subprocess.run(
            words, input=json.dumps(asdict(needs)), capture_output=True, text=True, timeout=_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [
            Problem(
                host,
                f"didn't answer within {_WITHIN_S:g} s",
                f"ssh {host} true   must end at once; start-up files of a shell may wait there",
                away=True,
            )
        ]
    except OSError as error:
        return [Problem(host, f"{words[0]} can't be started: {error.strerror}", "apt-get install openssh-client")]
    if done.returncode == 0:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            last = done.stdout.strip().splitlines()[-1]
            return [Problem(host, **found) for found in json.loads(last)["problems"]]
    said = (done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == 255 and not here:
        return [Problem(host, f"can't be reached over ssh: {said}", _ssh_hint(host, ssh), away=True)]
    if done.returncode in (126, 127):
        return [Problem(host, f"has no {python}", "the same Python environment must be at the same path on every host")]
    if "No module named" in said and "distkit" in said:
        return [
            Problem(host, "has no distkit in this Python environment", f"ssh {host} {python} -m pip install distkit")
        ]
    return [Problem(host, f"couldn't be looked at: {said}", f"ssh {host} {python} -m distkit.doctor")]


def _ssh_hint(host: str, ssh: SshOptions) -> str:
    words = " ".join(["ssh", *ssh.words(), host, "true"])
    return f"{words}   must work without a question; --ssh-port, --ssh-identity and --ssh-option change it"


def look_here(needs: HostNeeds, host_resolves: Callable[[str], str] = socket.gethostbyname) -> list[dict[str, str]]:
    """What this host lacks.

    Args:
        needs: What it must have.
        host_resolves: Finds the address of a name.
    """
    found: list[dict[str, str]] = []

    def problem(what: str, hint: str) -> None:
        found.append({"what": what, "hint": hint})

    if not Path(needs.directory).is_dir():
        problem(f"has no folder {needs.directory}", "shared storage, mounted at the same path on every host")
    elif needs.target is not None and not Path(needs.target).exists():
        problem(f"has no {needs.target}", "shared storage, or the same files on every host")
    if not Path(needs.run_dir, needs.token).exists():
        problem(f"doesn't see the run's folder {needs.run_dir}", "--run-dir DIR   on storage that all hosts share")
    elif not os.access(needs.run_dir, os.W_OK):
        problem(f"can't write into the run's folder {needs.run_dir}", "the same user, or other rights")
    if platform.python_version_tuple()[:2] != tuple(needs.python.split("."))[:2]:
        problem(f"has Python {platform.python_version()}, the launching host {needs.python}", "the same environment")
    own = versions()
    for name, version in needs.packages.items():
        if own.get(name) != version:
            problem(
                f"has {name} {own.get(name, 'not installed')}, the launching host {version}",
                f"pip install {name}=={version}",
            )
    gpus = visible_gpus(os.environ)
    if needs.cuda and gpus < needs.nproc:
        problem(f"has {gpus} visible GPUs, --nproc is {needs.nproc}", f"--nproc {max(1, gpus)}   or --exclude it")
    _look_at_network(needs, host_resolves, problem)
    return found


def _look_at_network(
    needs: HostNeeds, host_resolves: Callable[[str], str], problem: Callable[[str, str], None]
) -> None:
    interfaces = [name for _, name in socket.if_nameindex()]
    if needs.interface is not None and not set(needs.interface.split(",")) & set(interfaces):
        problem(f"has no interface {needs.interface}; it has {', '.join(interfaces)}", f"--interface {interfaces[-1]}")
    try:
        first = host_resolves(needs.first)
    except OSError as error:
        problem(
            f"doesn't know the name of host 0, {needs.first}: {error.strerror}",
            "/etc/hosts or DNS; or addresses as names",
        )
        return
    own = os.uname().nodename
    if first.startswith("127.") and not is_this_host(needs.first, own):
        problem(f"takes {needs.first} for itself ({first})", "a name or address in --hosts that all hosts know")
    if needs.interface is None and "GLOO_SOCKET_IFNAME" not in os.environ and not first.startswith("127."):
        with contextlib.suppress(OSError):
            address = host_resolves(own)
            if address.startswith("127."):  # Gloo listens at the address of the host's name
                problem(
                    f"its own name {own} is {address}, where no other host reaches it",
                    f"--interface NAME   one of {', '.join(name for name in interfaces if name != 'lo')}",
                )


def main() -> int:
    """Read the needs, print the problems."""
    needs: Any = HostNeeds(**json.loads(sys.stdin.read()))
    sys.stdout.write(json.dumps({"problems": look_here(needs)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
