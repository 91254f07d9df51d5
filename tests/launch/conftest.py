"""A folder to launch from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.support import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path)
    yield started
    started.close()
