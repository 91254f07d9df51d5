"""Collectives and bytes on the wire are counted as they are."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distkit.traffic import Call, TrafficCounter, note, ring_share, socket_bytes
from tests.pool import Pool

CASES = "tests.traffic_cases:"
ROOT = Path(__file__).parent.parent


def test_rings() -> None:
    assert Call("all_reduce", 1000, 4).sent == 2 * 3 / 4 * 1000
    assert Call("all_gather", 1000, 4).sent == Call("reduce_scatter", 1000, 4).sent == 750
    assert ring_share("send", 4) == 1


def test_noted_calls_count_while_a_counter_is_open() -> None:
    note("all_reduce", 8, 2)
    with TrafficCounter() as counter:
        note("all_reduce", 8, 2)
        note("all_reduce", 8, 2)
        note("all_reduce", 8, 1)
    note("all_reduce", 8, 2)
    assert counter.calls == {Call("all_reduce", 8, 2): 2} and counter.sent == 16


@pytest.mark.parametrize("processes", [2, 4])
def test_each_kind_of_call(pool: Pool, tmp_path: Path, processes: int) -> None:
    whole = 4 * 4 * processes
    expected = {
        ("all_gather", whole, processes): 2,
        ("all_reduce", whole, processes): 2,
        ("all_to_all", whole, processes): 1,
        ("broadcast", whole, processes): 1,
        ("reduce", whole, processes): 1,
        ("reduce_scatter", whole, processes): 1,
    }
    pair = ("all_reduce", whole, 2)
    expected[pair] = expected.get(pair, 0) + 1
    for found in pool.run(CASES + "called", processes, run_dir=str(tmp_path)):
        assert {tuple(row[:3]): row[3] for row in found["calls"]} == expected
        assert found["sent"] == sum(Call(*call).sent * count for call, count in expected.items())


@pytest.mark.parametrize("processes", [2, 4])
def test_what_c_calls_in_backward(pool: Pool, tmp_path: Path, processes: int) -> None:
    ring = 2 * (processes - 1) / processes * 4 * (1000 * 1000 + 1000)
    for found in pool.run(CASES + "trained", processes, run_dir=str(tmp_path)):
        assert found["sent"] == pytest.approx(ring, rel=1e-3)
        assert found["carried"] == pytest.approx(ring, rel=0.01)


def test_sockets() -> None:
    assert written_to_a_socket(100_000) == 100_000


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_bytes_that_tcp_sends_again_count_once() -> None:
    """A queue of a few packets drops the others."""
    queue = "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate 20mbit burst 5000 limit 8000"
    there = "from tests.test_traffic import written_to_a_socket; print(written_to_a_socket(300_000))"
    command = [
        "unshare",
        "-n",
        "sh",
        "-ec",
        f'{queue} && "$@" && tc -s qdisc show dev lo',
        "sh",
        sys.executable,
        "-c",
        there,
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT).stdout
    assert int(re.findall(r"dropped (\d+)", found)[0]) > 0, found
    assert found.splitlines()[0] == "300000"


def test_bytes_that_wait_in_a_queue_count() -> None:
    with connected() as (client, _):
        before = socket_bytes()
        client.setblocking(False)
        sent = client.send(bytes(10_000_000))
        now = socket_bytes()
    assert before is not None and now is not None and now - before == sent


def written_to_a_socket(size: int) -> int:
    """What is counted while so many bytes go through one."""
    with connected() as (client, other):
        before = socket_bytes()
        reader = threading.Thread(target=other.recv, args=(size, socket.MSG_WAITALL))
        reader.start()
        client.sendall(bytes(size))
        reader.join(60)
        now = socket_bytes()
    assert before is not None and now is not None
    return now - before


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with client, other:
            yield client, other
