"""Collectives and bytes on the wire are counted as they are."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from distkit.traffic import Call, TrafficCounter, note, ring_share, socket_bytes
from tests.pool import Pool

CASES = "tests.traffic_cases:"


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
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    before = socket_bytes()
    assert before is not None
    reader = threading.Thread(target=lambda: [other.recv(65536) for _ in range(40)])
    reader.start()
    client.sendall(bytes(100_000))
    client.shutdown(socket.SHUT_WR)
    reader.join(10)
    now = socket_bytes()
    assert now is not None and now - before == 100_000
    for one in (client, other, server):
        one.close()
