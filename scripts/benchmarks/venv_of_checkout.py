"""The benchmarks run under the checkout's own interpreter, whichever one started them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["ROOT", "use_venv"]

ROOT = Path(__file__).resolve().parents[2]


def use_venv() -> None:
    """Go on under .venv, if it is there and another interpreter started the script."""
    python = ROOT / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *sys.argv])
