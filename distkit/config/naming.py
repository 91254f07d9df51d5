"""The name of a run that wasn't given one."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["run_name"]

_NO_NAME = {"train", "main", "run", "__main__"}
"""Stems of scripts that name nothing: the run takes the folder's name."""


def run_name(name: str | None, script: str, *, module: bool = False) -> str:
    """The config's name, else the script's; a script that is called train.py is named by its folder.

    Args:
        name: The config key ``name``.
        script: Path of the script, or the dotted name of a module.
        module: Whether ``script`` is a module.

    Returns:
        A name that can be a folder's.
    """
    if name:
        found = name
    elif module:
        parts = [part for part in script.split(".") if part not in _NO_NAME]
        found = parts[-1] if parts else script
    else:
        path = Path(script).resolve()
        found = path.parent.name if path.stem in _NO_NAME and path.parent.name else path.stem
    return re.sub(r"[^\w.-]+", "-", found).strip("-.") or "run"
