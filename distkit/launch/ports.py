"""The port of node 0 at which the nodes of a run meet: derived without asking, and checked before the start."""

from __future__ import annotations

import errno
import socket
import zlib

from distkit.errors import LaunchError

__all__ = ["check_port_free", "derive_port"]


def derive_port(name: str) -> int:
    """The port 20000-29999 that belongs to a run's name: every host finds the same one without asking."""
    return 20000 + zlib.crc32(name.encode()) % 10000


def check_port_free(port: int) -> None:
    """See whether node 0 can listen on the port.

    Raises:
        LaunchError: Another process listens there, or the port is a privileged one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise LaunchError(
                f"the nodes were to meet at port {port} of this host, but "
                + ("another process listens there" if taken else f"it can't be used: {error.strerror}"),
                hint=f"--master-port {port + 1 if 1024 <= port < 65535 else 29400}   on every host",
            ) from error
