"""What a link does, measured between two hosts: `probe.py serve`, and `probe.py HOST BYTES` on another one."""

from __future__ import annotations

import json
import socket
import sys
import time

PORT = 5001


def serve() -> None:
    """Take one connection: echo ten small messages, then read all that comes and tell how much it was."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            for _ in range(10):
                connection.sendall(connection.recv(1))
            count = 0
            while part := connection.recv(1 << 20):
                count += len(part)
            connection.sendall(str(count).encode())


def measure(host: str, size: int) -> None:
    """Print the shortest round trip in seconds, and the rate of a transfer of `size` bytes in bits per second."""
    with socket.create_connection((host, PORT), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(10):
            begin = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            trips.append(time.monotonic() - begin)
        begin = time.monotonic()
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        arrived = int(connection.recv(100))
        print(json.dumps({"trip_s": min(trips), "bits_s": 8 * arrived / (time.monotonic() - begin), "bytes": arrived}))


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else measure(sys.argv[1], int(sys.argv[2]))
