"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool import CLEAN, Pool

TOGETHER = (
    "tests/advise/test_script.py::test_predicted",
    "tests/chaos/",
    "tests/checkpoint/foreign/",
    "tests/cluster/",
    "tests/launch/test_elastic.py",
    "tests/launch/test_ray.py",
    "tests/recipes/test_recipes.py::test_gpt_has_the_same_losses",
)
"""Beginnings of the names of tests that share what takes long to make: rounds, engines' checkpoints, hosts, a Ray
cluster, reference runs, what was seen of a script."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of several processes: those that belong together first, in one process; the others one by one, in order.

    A mark (xdist_group) would say the same, but pytest 9.2 with xdist 3.8 does nothing about it.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name in TOGETHER if nodeid.startswith(name)), nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Live worker processes."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables leak into a test."""
    for name in list(os.environ):
        if name in CLEAN or name.startswith(("SLURM_", "OMPI_", "PMI_", "HOROVOD_")):
            monkeypatch.delenv(name)
