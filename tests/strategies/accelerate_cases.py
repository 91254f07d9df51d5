"""What the tests of `strategy: accelerate` run in worker processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.contract.cases import train


def from_file(run_dir: str, file: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Train as a file of accelerate says."""
    path = Path(run_dir).with_suffix(".accelerate.yaml")
    path.write_text(json.dumps(file))
    return train("accelerate", run_dir, settings={"engine.accelerate": {"config_file": str(path)}, **settings})
