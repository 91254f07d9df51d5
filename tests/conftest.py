"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.pool import CLEAN, Pool


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
