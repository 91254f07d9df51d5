"""How another host is reached over ssh: one place for its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distkit.errors import LaunchError

__all__ = ["CONNECT_S", "SshOptions", "check_words"]

CONNECT_S = 10
"""Time limit for a connection, in seconds."""

_ALIVE = ("ServerAliveInterval=5", "ServerAliveCountMax=3")
_PLAIN = re.compile(r"[\w./,@+:=-]+")


@dataclass(frozen=True)
class SshOptions:
    """What is said to ssh besides host and command.

    Args:
        port: Port of ssh on the other hosts; None is ssh's own.
        identity: Private key; None is ssh's own.
        options: Further ``KEY=VALUE`` texts, as ssh's ``-o`` takes them.
    """

    port: int | None = None
    identity: str | None = None
    options: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """As options of ssh."""
        port = ["-p", str(self.port)] if self.port else []
        identity = ["-i", self.identity] if self.identity else []
        return [*port, *identity, *(word for text in self.options for word in ("-o", text))]

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """ssh's own command line. The user's options stand first: of two values ssh takes the first.

        Args:
            host: Name of the host.
            program: What runs there; its words are quoted, since ssh gives them to a shell.
        """
        ours = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", *_ALIVE]
        own = [word for text in ours for word in ("-o", text)]
        return ["ssh", *self.words(), *own, "-T", host, shlex.join(program)]


def check_words(given: Mapping[str, str | None] | Iterable[tuple[str, str | None]]) -> None:
    """Refuse texts that a launcher hands to a shell and that mean something there.

    Args:
        given: Values by the option's name.

    Raises:
        LaunchError: Naming the option.
    """
    for name, text in dict(given).items():
        if text is not None and not _PLAIN.fullmatch(text):
            raise LaunchError(f"{name} was set to {text!r}, which has characters that shells read", hint="rename it")
