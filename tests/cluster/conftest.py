"""A cluster for tests. Tests that use it are marked `cluster`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.emulated import EmulatedCluster, turn
from tests.cluster.running import STEPS, MakeRun, Run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are marked."""
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def root() -> None:
    """Fails where hosts can't be emulated."""
    if os.geteuid() != 0:
        pytest.fail(
            "needs root for network namespaces, on Linux; leave these tests out with scripts/test -m 'not cluster'",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def hosts_of_session(root: None) -> Iterator[EmulatedCluster]:
    with EmulatedCluster() as cluster:
        yield cluster


@pytest.fixture
def one_at_a_time() -> Iterator[None]:
    with turn():
        yield


@pytest.fixture
def cluster(one_at_a_time: None, hosts_of_session: EmulatedCluster) -> Iterator[EmulatedCluster]:
    """Two hosts, host0 and host1, on links without limits. They are the session's; each test finds them mended."""
    yield hosts_of_session
    hosts_of_session.mend()


@pytest.fixture
def slow_cluster(root: None, one_at_a_time: None) -> Iterator[EmulatedCluster]:
    """Two hosts on links of 200 Mbit/s, and 5 ms from one to the other."""
    with EmulatedCluster("-slow", bandwidth="200mbit", latency="5ms") as cluster:
        yield cluster


@pytest.fixture
def make(cluster: EmulatedCluster, tmp_path: Path) -> MakeRun:
    """A run's folder by its name."""
    return lambda name: Run(cluster, tmp_path / name)


@pytest.fixture(scope="session")
def single(hosts_of_session: EmulatedCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process on one host."""
    run = Run(hosts_of_session, tmp_path_factory.mktemp("single") / "run")
    with turn():
        run.once("-s", "single")
    assert len(run.losses()) == STEPS
    return run.losses()


@pytest.fixture(scope="session")
def undisturbed(hosts_of_session: EmulatedCluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """ddp on all four processes, and nothing happens on the way."""
    run = Run(hosts_of_session, tmp_path_factory.mktemp("undisturbed") / "run")
    hostfile = run.folder.with_name("hostfile")
    hostfile.write_text("# as Open MPI and DeepSpeed have it\nhost0 slots=2 max_slots=4\n\nhost1 slots=2\n")
    with turn():
        run.once("-s", "ddp", "--hostfile", hostfile)
    assert len(run.weights()) == 1
    return run
